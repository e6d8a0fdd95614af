# Counts in the outer machine what a Linux guest costs under vmferry and under QEMU's microvm with
# the same kernel: exits of the guest, and for each thread of the process its system calls, wakeups,
# and switches because it waits. Writes one line for each count to /share/exits.txt: VMM WHAT
# COUNTER NUMBER.
#
# Exits are also counted by their reason. Their causes are counted by what the guest accessed:
# model-specific registers, addresses and ports of devices. Interrupts are counted by their vector.
#
# Commands are typed on the guest's console, which causes exits itself. Therefore each action is run
# a few times and many times, and the result is the difference of the counts divided by the
# difference of the times.
#
# The kernel counts in histograms by thread. The counters of a thread in /proc disappear with it,
# and QEMU's workers end when they were idle for ten seconds. A sum over the existing threads could
# therefore fall.
out=/share/exits.txt
: >$out
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
events=/sys/kernel/tracing/events
# histogram EVENT KEYS [FILTER]
histogram() {
    echo "$events/$1/trigger hist:keys=$2:size=${size:-32768} $3" >>/tmp/histograms
    echo "hist:keys=$2:size=${size:-32768} $3" >$events/$1/trigger || exit 1
}
histogram raw_syscalls/sys_enter common_pid,id
histogram sched/sched_wakeup pid
# Threads that are neither preempted (256) nor still running (0).
histogram sched/sched_switch prev_pid "if prev_state > 0 && prev_state < 256"
# One VM runs at a time, so these events need no filter.
size=2048
histogram kvm/kvm_exit exit_reason.hex
histogram kvm/kvm_msr ecx.hex,write
histogram kvm/kvm_mmio gpa.hex,type
histogram kvm/kvm_pio port.hex,rw
histogram kvm/kvm_inj_virq vector.hex
# Clears the histograms, because every process that this script starts takes room in them.
forget() {
    while read -r trigger keys filter; do
        echo "$keys:clear $filter" >>$trigger
    done </tmp/histograms
}
cp -r /share/qemu /tmp/qemu
for tap in tap0 tap1; do
    tunctl -t $tap >/dev/null && ip link set $tap up
done
ip addr add 10.9.0.1/24 dev tap0
ip addr add 10.9.1.1/24 dev tap1
losetup /dev/loop0 /lab/disk.img

# count NAME: writes the cost of process $pid so far to /tmp/NAME.
count() {
    # Includes threads that have ended since.
    for task in /proc/$pid/task/*; do
        echo "${task##*/} $(tr ' /' '--' <$task/comm)"
    done >>/tmp/tasks
    {
        echo exits $(cat /sys/kernel/debug/kvm/$pid-*/exits)
        awk '{ print "ms", $1 * 1000 }' /proc/uptime
        tr -d '{}:,' <$events/raw_syscalls/sys_enter/hist | awk 'NR == FNR { own[$1] = 1; next }
            $1 == "common_pid" && own[$2] { n += $6; id[$4] += $6 }
            END { print "syscalls", n; for (i in id) print "call-" i, id[i] }' /tmp/tasks -
        by_thread wakeups $events/sched/sched_wakeup/hist
        by_thread waits $events/sched/sched_switch/hist
        by_key exits kvm_exit
        by_key msrs kvm_msr
        by_key mmio kvm_mmio
        by_key ports kvm_pio
        by_key interrupts kvm_inj_virq
    } >/tmp/$1
}

# by_key COUNTER EVENT: events of KVM by their keys, as COUNTER-of-KEY or COUNTER-of-KEY-KEY.
by_key() {
    tr -d '{}:,' <$events/kvm/$2/hist | awk -v counter=$1 'NF > 3 && $(NF - 1) == "hitcount" {
        print counter "-of-" $2 (NF > 4 ? "-" $4 : ""), $NF }'
}

# by_thread COUNTER HISTOGRAM
by_thread() {
    tr -d '{}:,' <$2 | awk -v counter=$1 'NR == FNR { name[$1] = $2; next }
        ($1 == "pid" || $1 == "prev_pid") && ($2 in name) { n += $4; of[name[$2]] += $4 }
        END { print counter, n + 0; for (i in of) print counter "-of-" i, of[i] }' /tmp/tasks -
}

# until_says TEXT N: waits until the console has the text N times.
until_says() {
    for i in $(seq 1200); do
        [ $(grep -c "$1" /tmp/console) -ge $2 ] && return 0
        [ -d /proc/$pid ] || break
        sleep 0.1
    done
    echo "the guest did not print $1; its last output:"
    tail -5 /tmp/console
    return 1
}

# do_times COMMAND TIMES: runs the command in the guest, and writes its cost to /tmp/cost.
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

# measure WHAT COMMAND FEW MANY
measure() {
    do_times "$2" $3 && cp /tmp/cost /tmp/few && do_times "$2" $4 || { echo "$vmm $1 failed"; return; }
    awk -v vmm=$vmm -v what="$1" -v times=$(($4 - $3)) 'NR == FNR { few[$1] = $2; next }
        { print vmm, what, $1, ($2 - few[$1]) / times }' /tmp/few /tmp/cost >>$out
}

# run VMM NET COMMAND...: boots a guest in the VMM and measures.
run() {
    vmm=$1 net=$2 said=0
    shift 2
    rm -f /tmp/keys /tmp/console /tmp/tasks
    mkfifo /tmp/keys
    # Opened for reading and writing, so that neither end waits for the other.
    exec 3<>/tmp/keys
    forget
    "$@" </tmp/keys >/tmp/console 2>/tmp/errors &
    pid=$!
    sleep 1
    until_says COUNT-UP 1 || { cat /tmp/errors; kill $pid; return 1; }
    count boot
    # The clock was not read before the boot.
    awk -v vmm=$vmm '$1 != "ms" { print vmm, "boot", $1, $2 }' /tmp/boot >>$out
    sleep 2
    do_times "ip addr add 10.9.$net.2/24 dev eth0; ip link set eth0 up; ping -c 1 10.9.$net.1 >/dev/null" 1
    measure read "dd if=/dev/vda of=/dev/null bs=4k count=TIMES iflag=direct 2>/dev/null" 100 1100
    measure write "dd if=/dev/zero of=/dev/vda bs=4k count=TIMES oflag=direct conv=notrunc 2>/dev/null" 100 1100
    measure ping "ping -A -q -c TIMES 10.9.$net.1 >/dev/null" 100 1100
    # Ten pings per second: the same rate for both VMMs, and all threads sleep in between.
    measure spaced-ping "ping -i 0.1 -q -c TIMES 10.9.$net.1 >/dev/null" 20 220
    # Cost of the guest's own timers.
    measure idle-second "sleep TIMES" 2 32
    # Memory of the process, which includes the guest's.
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
        -name lab,debug-threads=on \
        -cpu host -m 192M -smp 1 -nodefaults -no-user-config -display none -serial stdio -kernel /lab/kernel \
        -initrd /lab/initrd -append "$line" -drive id=d,file=$2,format=raw,if=none -device virtio-blk-device,drive=d \
        -netdev tap,id=n,ifname=tap1,script=no,downscript=no -device virtio-net-device,netdev=n -device virtio-rng-device \
        -device virtio-balloon-device
}
ours vmferry /dev/loop0
theirs qemu /dev/loop0
ours vmferry-no-ioeventfd /dev/loop0 --ioeventfd off
echo "EXITS end" >>$out
