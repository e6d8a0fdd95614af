//! The bus at which devices are mapped into the guest's physical memory.
//!
//! | address | interrupt | device |
//! |---|---|---|
//! | 0xd000_0000 | 5 | virtio: balloon |
//!
//! The next device is [`STRIDE`] higher and has the next interrupt. All lie in the gigabyte below 4 GiB that is kept free of RAM. Guests
//! are told on the kernel command line, as Linux's driver reads it (Documentation/admin-guide/kernel-parameters.txt) and QEMU's microvm
//! writes it: `virtio_mmio.device=512@0xd0000000:5`.

use crate::kvm::Machine;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use vmferry_virtio::mmio::WINDOW;
use vmferry_virtio::signals::Interrupt;

/// Where the first device is.
const BASE: u64 = 0xd000_0000;
/// From one device to the next: a page each, so that a guest can map them apart.
const STRIDE: u64 = 0x1000;
/// The first device's interrupt: the first of the I/O APIC that nothing of a PC's has.
const FIRST_INTERRUPT: u32 = 5;

/// A device that is mapped into memory. All methods are called from vCPUs' threads, several at once.
pub(crate) trait MmioDevice: Send + Sync + Debug {
    /// The guest reads at `offset` of the window.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes there.
    fn write(&self, offset: u64, data: &[u8]);

    /// Whether the device has work left that it did not want to keep the vCPU for.
    fn due(&self) -> bool;

    /// Does a portion of it; `false` if another thread is at it.
    fn work(&self) -> bool;

    /// The guest is about to run (again). Touches no guest memory.
    fn resumed(&self);
}

/// The devices, by their place.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    devices: Vec<Arc<dyn MmioDevice>>,
}

impl Bus {
    /// The interrupt that the next device gets.
    pub(crate) fn next_interrupt(&self) -> u32 {
        FIRST_INTERRUPT + u32::try_from(self.devices.len()).unwrap_or(u32::MAX)
    }

    /// Adds a device at the next place.
    pub(crate) fn add(&mut self, device: Arc<dyn MmioDevice>) {
        self.devices.push(device);
    }

    /// What a guest is told of the devices on its command line; ends with a space, if anything.
    pub(crate) fn announcement(&self) -> String {
        let places = (0..).map(|n| BASE + n * STRIDE).zip(FIRST_INTERRUPT..).take(self.devices.len());
        places.map(|(at, line)| format!("virtio_mmio.device={WINDOW}@{at:#x}:{line} ")).collect()
    }

    fn find(&self, gpa: u64) -> Option<(&Arc<dyn MmioDevice>, u64)> {
        let at = gpa.checked_sub(BASE)?;
        let device = self.devices.get(usize::try_from(at / STRIDE).ok()?)?;
        Some((device, at % STRIDE)).filter(|(_, offset)| *offset < WINDOW)
    }

    /// Reads as ones where nothing is, as an empty bus does.
    pub(crate) fn read(&self, gpa: u64, data: &mut [u8]) {
        match self.find(gpa) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    pub(crate) fn write(&self, gpa: u64, data: &[u8]) {
        if let Some((device, offset)) = self.find(gpa) {
            device.write(offset, data);
        }
    }

    /// Whether a device has work left.
    pub(crate) fn due(&self) -> bool {
        self.devices.iter().any(|device| device.due())
    }

    /// Does a portion of each device's; `false` if others are at all of it.
    pub(crate) fn work(&self) -> bool {
        self.devices.iter().filter(|device| device.due()).fold(false, |did, device| device.work() | did)
    }

    pub(crate) fn resumed(&self) {
        self.devices.iter().for_each(|device| device.resumed());
    }
}

/// Pulses an interrupt line of the kernel's interrupt controllers.
///
/// By ioctl, not by an eventfd: when `trigger` returns the interrupt is in the controller, so a save that follows has it.
#[derive(Debug)]
pub(crate) struct IrqLine {
    pub(crate) machine: Arc<Machine>,
    pub(crate) gsi: u32,
}

impl IrqLine {
    fn pulse(&self) -> io::Result<()> {
        let set = |active| {
            let result = self.machine.fd().set_irq_line(self.gsi, active);
            result.map_err(|e| io::Error::from_raw_os_error(e.errno()))
        };
        set(true)?;
        set(false)
    }
}

impl vm_superio::Trigger for IrqLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.pulse()
    }
}

impl Interrupt for IrqLine {
    fn trigger(&self) -> io::Result<()> {
        self.pulse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Debug, Default)]
    struct Scratch(Mutex<Vec<(u64, Vec<u8>)>>);

    impl MmioDevice for Scratch {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset.to_le_bytes()[0]);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
        fn due(&self) -> bool {
            false
        }
        fn work(&self) -> bool {
            false
        }
        fn resumed(&self) {}
    }

    #[test]
    fn each_device_has_its_window_and_the_rest_is_empty() {
        let (mut bus, second) = (Bus::default(), Arc::new(Scratch::default()));
        assert_eq!(bus.announcement(), "");
        bus.add(Arc::new(Scratch::default()));
        assert_eq!(bus.next_interrupt(), 6);
        bus.add(Arc::clone(&second) as _);
        assert_eq!(
            bus.announcement(),
            "virtio_mmio.device=512@0xd0000000:5 virtio_mmio.device=512@0xd0001000:6 "
        );
        let read = |gpa| {
            let mut data = [0; 2];
            bus.read(gpa, &mut data);
            data[0]
        };
        assert_eq!([read(BASE + 4), read(BASE + 0x1008)], [4, 8]);
        for empty in [0, BASE - 1, BASE + WINDOW, BASE + 0x2000, u64::MAX] {
            assert_eq!(read(empty), 0xff, "{empty:#x}");
            bus.write(empty, &[1]);
        }
        bus.write(BASE + 0x1010, &[1, 2]);
        assert_eq!(*second.0.lock().unwrap(), [(0x10, vec![1, 2])]);
    }
}
