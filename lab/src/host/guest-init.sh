#!/bin/busybox sh
# The first program of a Linux guest: loads the drivers of vmferry's devices, starts the program
# that checks the guest, and runs a shell on the console.
/bin/busybox --install -s /bin
# A dumb terminal is not asked for its size.
export PATH=/bin HOME=/root PS1='lab# ' TERM=dumb
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /disk
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
dmesg -n 1
while read -r module; do
    insmod "/modules/$module.ko" || echo "LAB-WRONG cannot load $module"
done </modules/order
option() { sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
ip link set lo up
address=$(option lab.address)
if [ -n "$address" ]; then
    ip addr add "$address/24" dev eth0 && ip link set eth0 up || echo "LAB-WRONG no network"
fi
if [ -n "$(option lab.records)" ]; then
    mount -t ext4 /dev/vda /disk || echo "LAB-WRONG no disk"
fi
if [ -n "$(option lab.count)" ]; then
    # In the measurement of costs, the guest must do nothing except what it is asked to do.
    echo COUNT-UP
else
    lab-guest serve &
fi
while :; do
    setsid cttyhack sh
done
