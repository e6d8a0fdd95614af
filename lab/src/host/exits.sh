# Counts, in the outer machine, what a Linux guest costs under vmferry and under QEMU's microvm, with the same kernel: exits from the
# guest, system calls and voluntary switches of the process. Says so line by line in /share/exits.txt: VMM WHAT COUNTER NUMBER.
#
# What is asked of the guest is typed on its console, which costs exits itself; so each thing is done a few times and many times, and what
# counts is the difference, divided by that of the times.
out=/share/exits.txt
: >$out
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
calls=/sys/kernel/tracing/events/raw_syscalls/sys_enter
echo 'hist:keys=common_pid,id:size=32768' >$calls/trigger || exit 1
# Every process that this script starts takes room in it.
forget() {
    echo 'hist:keys=common_pid,id:size=32768:clear' >>$calls/trigger
}
cp -r /share/qemu /tmp/qemu
for tap in tap0 tap1; do
    tunctl -t $tap >/dev/null && ip link set $tap up
done
ip addr add 10.9.0.1/24 dev tap0
ip addr add 10.9.1.1/24 dev tap1
losetup /dev/loop0 /lab/disk.img

# count NAME: what process $pid has cost so far, into /tmp/NAME.
count() {
    ls /proc/$pid/task >/tmp/tasks
    {
        echo exits $(cat /sys/kernel/debug/kvm/$pid-*/exits)
        echo wakeups $(cat /proc/$pid/task/*/status | awk '/^voluntary_ctxt/ { n += $2 } END { print n }')
        tr -d '{}:,' <$calls/hist | awk 'NR == FNR { own[$1] = 1; next }
            $1 == "common_pid" && own[$2] { n += $6; id[$4] += $6 }
            END { print "syscalls", n; for (i in id) print "call-" i, id[i] }' /tmp/tasks -
    } >/tmp/$1
}

# until TEXT: waits for it on the console, N times.
until_says() {
    for i in $(seq 1200); do
        [ $(grep -c "$1" /tmp/console) -ge $2 ] && return 0
        [ -d /proc/$pid ] || break
        sleep 0.1
    done
    echo "the guest does not say $1; it said:"
    tail -5 /tmp/console
    return 1
}

# do_times COMMAND TIMES: has the guest do that, and says what it cost in /tmp/cost.
said=0
do_times() {
    said=$((said + 1))
    forget
    count before
    echo "$(echo "$1" | sed "s/TIMES/$2/"); echo DO'NE'" >&3
    until_says DONE $said || return 1
    sleep 1
    count after
    awk 'NR == FNR { was[$1] = $2; next } { print $1, $2 - was[$1] }' /tmp/before /tmp/after >/tmp/cost
}

# measure WHAT COMMAND
measure() {
    do_times "$2" 100 && cp /tmp/cost /tmp/few && do_times "$2" 1100 || { echo "$vmm $1 failed"; return; }
    awk -v vmm=$vmm -v what="$1" 'NR == FNR { few[$1] = $2; next } { print vmm, what, $1, ($2 - few[$1]) / 1000 }' \
        /tmp/few /tmp/cost >>$out
}

# run VMM NET COMMAND...: boots a guest in it and measures.
run() {
    vmm=$1 net=$2 said=0
    shift 2
    rm -f /tmp/keys /tmp/console
    mkfifo /tmp/keys
    # Opened for both, so that neither end waits for the other.
    exec 3<>/tmp/keys
    forget
    "$@" </tmp/keys >/tmp/console 2>/tmp/errors &
    pid=$!
    sleep 1
    until_says COUNT-UP 1 || { cat /tmp/errors; kill $pid; return 1; }
    count boot
    awk -v vmm=$vmm '{ print vmm, "boot", $1, $2 }' /tmp/boot >>$out
    sleep 2
    do_times "ip addr add 10.9.$net.2/24 dev eth0; ip link set eth0 up; ping -c 1 10.9.$net.1 >/dev/null" 1
    measure read "dd if=/dev/vda of=/dev/null bs=4k count=TIMES iflag=direct 2>/dev/null"
    measure write "dd if=/dev/zero of=/dev/vda bs=4k count=TIMES oflag=direct conv=notrunc 2>/dev/null"
    measure ping "ping -A -q -c TIMES 10.9.$net.1 >/dev/null"
    # What it costs beside the guest's memory.
    awk -v vmm=$vmm '/^Pss:/ { n += $2 } END { print vmm, "whole", "pss_kib", n }' /proc/$pid/smaps_rollup >>$out
    echo "poweroff -f" >&3
    for i in $(seq 100); do
        [ -d /proc/$pid ] || break
        sleep 0.1
    done
    kill $pid 2>/dev/null
    wait $pid
    exec 3>&-
    echo "$vmm is done"
}

line="console=ttyS0 quiet init_on_alloc=0 lab.count=1"
ours() {
    name=$1 disk=$2
    shift 2
    run $name 0 /lab/vmferry run --memory 192M --cpus 1 --kernel /lab/kernel --initrd /lab/initrd --cmdline "$line" \
        --serial stdio --disk $disk --net tap=tap0 "$@"
}
theirs() {
    run $1 1 /tmp/qemu/ld.so --library-path /tmp/qemu /tmp/qemu/qemu-system-x86_64 -L /tmp/qemu -M microvm -accel kvm \
        -cpu host -m 192M -smp 1 -nodefaults -no-user-config -display none -serial stdio -kernel /lab/kernel \
        -initrd /lab/initrd -append "$line" -drive id=d,file=$2,format=raw,if=none -device virtio-blk-device,drive=d \
        -netdev tap,id=n,ifname=tap1,script=no,downscript=no -device virtio-net-device,netdev=n -device virtio-rng-device \
        -device virtio-balloon-device
}
ours vmferry /dev/loop0
theirs qemu /dev/loop0
ours vmferry-no-ioeventfd /dev/loop0 --ioeventfd off
echo "EXITS end" >>$out
