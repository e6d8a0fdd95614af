//! Bus that maps devices into the guest's physical memory.
//!
//! Device number n is [`STRIDE`] bytes after device n - 1, starts at [`BASE`] for n = 0, and has
//! interrupt number n of [`LINES`]. Source and target of a migration must therefore plug in devices
//! in the same order. All devices are in the gigabyte below 4 GiB, which has no RAM.
//!
//! A guest with ACPI finds the devices in the DSDT. A guest without ACPI is told of them on its
//! command line, in the form that Linux's driver reads
//! (Documentation/admin-guide/kernel-parameters.txt) and QEMU's microvm writes:
//! `virtio_mmio.device=512@0xd0000000:16`.

use crate::error::{Error, Result};
use crate::state::{Sections, StateError};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_engine::Section;
use vmferry_virtio::device::Resume;
use vmferry_virtio::mmio::{STATUS, WINDOW};

/// Address of the first device.
const BASE: u64 = 0xd000_0000;
/// Distance between devices: a page each, so that a guest can map them separately.
const STRIDE: u64 = 0x1000;
/// Interrupts in the order in which devices get them. First come the inputs of the I/O APIC that a
/// PC does not use (16 and up), then those of a PC that this machine does not use. Each interrupt
/// is for one device only, because it is edge triggered.
const LINES: [u32; 12] = [16, 17, 18, 19, 20, 21, 22, 23, 5, 9, 10, 11];

/// Time that a device may take to finish the work under way.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Second half of loading a device, which applies the state that was read.
pub(crate) type Load<'a> = Box<dyn FnOnce() -> std::result::Result<(), StateError> + 'a>;

/// Device that is mapped into memory. vCPU threads access its registers, several at once.
pub(crate) trait MmioDevice: Send + Sync + Debug {
    /// Returns the name of the device, which is the name of its section.
    fn name(&self) -> &'static str;

    /// Reads at `offset` of the window for the guest.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes at `offset` of the window for the guest.
    fn write(&self, offset: u64, data: &[u8]);

    /// Returns true if the device has work left for which it did not keep the vCPU.
    fn due(&self) -> bool;

    /// Does a portion of the work that is left. Returns false if another thread is doing it.
    fn work(&self) -> bool;

    /// Quiesces the device while the vCPUs are paused: finishes the work under way, and begins
    /// nothing until [`resumed`](Self::resumed). Returns false if this was not possible by
    /// `deadline`.
    fn quiesce(&self, deadline: Instant) -> bool;

    /// Resumes the device, because the guest is about to run. Must not touch guest memory.
    ///
    /// # Errors
    /// Returns the reason, as a message for the operator, if the device cannot run on this host.
    fn resumed(&self, how: Resume) -> std::result::Result<(), String>;

    /// Returns the state of the quiesced device.
    fn save(&self) -> std::result::Result<Vec<Section>, StateError>;

    /// Takes the device's sections out of `parts` and reads them. The returned function applies
    /// them.
    fn prepare(&self, parts: &mut Sections<'_>) -> std::result::Result<Load<'_>, StateError>;
}

/// Slot of a device on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BusSlot {
    /// First address of the device's window, which has [`WINDOW`] bytes.
    pub(crate) address: u64,
    /// Interrupt of the I/O APIC; edge triggered, active high.
    pub(crate) gsi: u32,
}

/// Returns all slots, in the order in which devices get them.
fn slots() -> impl Iterator<Item = BusSlot> {
    let addresses = (0..).map(|n| BASE + n * STRIDE);
    addresses.zip(LINES).map(|(address, gsi)| BusSlot { address, gsi })
}

/// Devices in the order of their slots.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    devices: Vec<Arc<dyn MmioDevice>>,
}

impl Bus {
    /// Plugs in the device that `make` creates for its place.
    ///
    /// # Errors
    /// Returns the error of `make`, or an error if the VM has too many devices.
    pub(crate) fn plug<D: MmioDevice + 'static>(
        &mut self,
        make: impl FnOnce(BusSlot) -> Result<Arc<D>>,
    ) -> Result<Arc<D>> {
        let slot = slots().nth(self.devices.len()).ok_or_else(|| {
            Error::Options(format!("too many devices: a VM can have {}, balloon included", LINES.len()))
        })?;
        let device = make(slot)?;
        self.devices.push(Arc::clone(&device) as _);
        Ok(device)
    }

    /// Returns the slots of the devices.
    pub(crate) fn slots(&self) -> Vec<BusSlot> {
        slots().take(self.devices.len()).collect()
    }

    /// Returns the names of the devices, in order.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.devices.iter().map(|device| device.name()).collect()
    }

    /// Returns the part of the command line that describes the devices to a guest without ACPI. If
    /// it is not empty, it ends with a space.
    pub(crate) fn announcement(&self) -> String {
        let slot = |BusSlot { address, gsi }| format!("virtio_mmio.device={WINDOW}@{address:#x}:{gsi} ");
        self.slots().into_iter().map(slot).collect()
    }

    fn find(&self, gpa: u64) -> Option<(&Arc<dyn MmioDevice>, u64)> {
        let at = gpa.checked_sub(BASE)?;
        let device = self.devices.get(usize::try_from(at / STRIDE).ok()?)?;
        Some((device, at % STRIDE)).filter(|(_, offset)| *offset < WINDOW)
    }

    /// Reads for the guest. Addresses without a device read as ones, as on an empty bus.
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

    /// Returns true if a device has work left.
    pub(crate) fn due(&self) -> bool {
        self.devices.iter().any(|device| device.due())
    }

    /// Does a portion of each device's work. Returns false if other threads are doing all of it.
    pub(crate) fn work(&self) -> bool {
        self.devices.iter().filter(|device| device.due()).fold(false, |did, device| device.work() | did)
    }

    /// Quiesces all devices. The vCPUs must be paused. Memory that devices write and interrupts
    /// that they send until this returns are part of the state to be saved.
    ///
    /// # Errors
    /// Returns an error if a device cannot be quiesced. Even then no device begins anything new
    /// before [`resumed`](Self::resumed).
    pub(crate) fn quiesce(&self) -> Result<()> {
        self.quiesce_by(Instant::now() + PATIENCE)
    }

    /// Quiesces all devices with another deadline.
    pub(crate) fn quiesce_by(&self, deadline: Instant) -> Result<()> {
        let began = Instant::now();
        // All devices are quiesced, also those after a busy one.
        let busy: Vec<_> = self.devices.iter().filter(|device| !device.quiesce(deadline)).collect();
        match busy.first() {
            Some(device) => Err(Error::Busy { name: device.name(), within: began.elapsed() }),
            None => Ok(()),
        }
    }

    /// Resumes the devices, for a guest that is about to run.
    ///
    /// # Errors
    /// Returns an error if a device cannot be resumed. All devices are then quiesced as before.
    pub(crate) fn resumed(&self, how: Resume) -> Result<()> {
        for device in &self.devices {
            if let Err(why) = device.resumed(how) {
                let name = device.name();
                // Devices that were already resumed cannot have any work under way yet.
                let _ = self.quiesce();
                return Err(Error::Device { name, why });
            }
        }
        Ok(())
    }

    /// Resets the quiesced devices, as their drivers would.
    pub(crate) fn reset(&self) {
        self.devices.iter().for_each(|device| device.write(STATUS, &[0; 4]));
    }

    /// Returns the state of the quiesced devices.
    pub(crate) fn save(&self) -> std::result::Result<Vec<Section>, StateError> {
        let mut sections = Vec::with_capacity(self.devices.len());
        for device in &self.devices {
            sections.extend(device.save()?);
        }
        Ok(sections)
    }

    /// Reads the devices' sections. The returned functions apply them.
    pub(crate) fn prepare(&self, parts: &mut Sections<'_>) -> std::result::Result<Vec<Load<'_>>, StateError> {
        self.devices.iter().map(|device| device.prepare(parts)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[derive(Debug, Default)]
    struct Scratch {
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
        quiescing: AtomicBool,
        busy: bool,
        stuck: bool,
    }

    impl MmioDevice for Scratch {
        fn name(&self) -> &'static str {
            "scratch"
        }
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset.to_le_bytes()[0]);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.writes.lock().unwrap().push((offset, data.to_vec()));
        }
        fn due(&self) -> bool {
            false
        }
        fn work(&self) -> bool {
            false
        }
        fn quiesce(&self, _: Instant) -> bool {
            self.quiescing.store(true, Ordering::Relaxed);
            !self.busy
        }
        fn resumed(&self, _: Resume) -> std::result::Result<(), String> {
            self.quiescing.store(self.stuck, Ordering::Relaxed);
            if self.stuck { Err("it is stuck".to_owned()) } else { Ok(()) }
        }
        fn save(&self) -> std::result::Result<Vec<Section>, StateError> {
            unreachable!()
        }
        fn prepare(&self, _: &mut Sections<'_>) -> std::result::Result<Load<'_>, StateError> {
            unreachable!()
        }
    }

    fn plug(bus: &mut Bus, device: Scratch) -> (Arc<Scratch>, u32) {
        let mut line = 0;
        let plugged = bus.plug(|slot| {
            line = slot.gsi;
            Ok(Arc::new(device))
        });
        (plugged.unwrap(), line)
    }

    #[test]
    fn each_device_has_its_window_and_the_rest_reads_as_ones() {
        let mut bus = Bus::default();
        assert_eq!(bus.announcement(), "");
        plug(&mut bus, Scratch::default());
        let (second, line) = plug(&mut bus, Scratch::default());
        assert_eq!(line, 17);
        assert_eq!(
            bus.announcement(),
            "virtio_mmio.device=512@0xd0000000:16 virtio_mmio.device=512@0xd0001000:17 "
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
        assert_eq!(*second.writes.lock().unwrap(), [(0x10, vec![1, 2])]);
    }

    #[test]
    fn each_device_has_its_own_interrupt_and_their_number_is_limited() {
        let mut bus = Bus::default();
        let mut lines: Vec<u32> = LINES.iter().map(|_| plug(&mut bus, Scratch::default()).1).collect();
        assert_eq!(bus.slots().iter().map(|slot| slot.gsi).collect::<Vec<_>>(), lines);
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), LINES.len());
        assert!(
            lines.iter().all(|line| {
                *line < 24 && ![4, crate::power::LINE, crate::generation::LINE].contains(line)
            }),
            "an interrupt beyond the 24 of the I/O APIC, or the serial port's 4"
        );
        let error = bus.plug(|_| Ok(Arc::new(Scratch::default()))).unwrap_err().to_string();
        assert!(error.contains("too many devices"), "{error}");
    }

    #[test]
    fn device_that_cannot_resume_keeps_all_devices_quiesced() {
        let mut bus = Bus::default();
        let (first, _) = plug(&mut bus, Scratch::default());
        plug(&mut bus, Scratch { stuck: true, ..Scratch::default() });
        let (last, _) = plug(&mut bus, Scratch::default());
        let error = bus.resumed(Resume::First).unwrap_err().to_string();
        assert_eq!(error, "scratch: it is stuck");
        assert!(first.quiescing.load(Ordering::Relaxed) && last.quiescing.load(Ordering::Relaxed));
    }

    #[test]
    fn all_other_devices_are_quiesced_if_one_is_busy() {
        let mut bus = Bus::default();
        plug(&mut bus, Scratch { busy: true, ..Scratch::default() });
        let (second, _) = plug(&mut bus, Scratch::default());
        assert!(bus.quiesce().is_err());
        assert!(second.quiescing.load(Ordering::Relaxed));
    }
}
