#!/bin/busybox sh
# The first program of the outer machine: loads the modules of KVM and the shared folder, and starts
# the agent, a shell or a script.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
while read -r module; do
    insmod "/modules/$module.ko" || echo "LAB cannot load $module"
done </modules/order
ip link set lo up
option() { sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
mkdir -p /share /lab
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 lab /share || echo "LAB cannot mount the shared folder"
cp /share/in/* /lab/
address=$(option lab.address)
if [ -n "$address" ]; then
    ip addr add "$address/24" dev eth0 && ip link set eth0 up
fi
export PATH=/bin:/lab
echo "LAB up at $(cut -d ' ' -f 1 /proc/uptime) s"
cd /lab
case $(option lab.mode) in
    shell) setsid cttyhack sh ;;
    script) sh /share/script ;;
    *) /lab/lab-agent $(option lab.agent | tr , ' ') ;;
esac
echo "LAB ended with status $?"
cd /
umount /share
poweroff -f
