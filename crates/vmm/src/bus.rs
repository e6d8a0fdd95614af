//! The bus at which devices are mapped into the guest's physical memory.
//!
//! Device number n is [`STRIDE`] bytes after device n - 1, the first at [`BASE`], and has interrupt number n of [`LINES`]; so the order in
//! which devices are plugged in is part of what both sides of a move must agree upon. All lie in the gigabyte below 4 GiB that is kept
//! free of RAM.
//!
//! A guest with ACPI finds them in the DSDT. One without is told on its command line, as Linux's driver reads it
//! (Documentation/admin-guide/kernel-parameters.txt) and QEMU's microvm writes it: `virtio_mmio.device=512@0xd0000000:16`.

use crate::error::{Error, Result};
use crate::state::{Sections, StateError};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_engine::Section;
use vmferry_virtio::device::Resume;
use vmferry_virtio::mmio::{STATUS, WINDOW};

/// Where the first device is.
const BASE: u64 = 0xd000_0000;
/// From one device to the next: a page each, so that a guest can map them apart.
const STRIDE: u64 = 0x1000;
/// Interrupts in the order in which devices get them: first those of the I/O APIC that no PC has (16 and up go nowhere else), then those
/// of a PC's that nothing here has. Each is for one device only, for they are edges.
const LINES: [u32; 12] = [16, 17, 18, 19, 20, 21, 22, 23, 5, 9, 10, 11];

/// How long a device may take to finish what is under way.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The second half of loading a device: takes up what was read.
pub(crate) type Load<'a> = Box<dyn FnOnce() -> std::result::Result<(), StateError> + 'a>;

/// A device that is mapped into memory. Registers are accessed from vCPUs' threads, several at once.
pub(crate) trait MmioDevice: Send + Sync + Debug {
    /// What it is: the name of its section.
    fn name(&self) -> &'static str;

    /// The guest reads at `offset` of the window.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes there.
    fn write(&self, offset: u64, data: &[u8]);

    /// Whether the device has work left that it did not want to keep the vCPU for.
    fn due(&self) -> bool;

    /// Does a portion of it; `false` if another thread is at it.
    fn work(&self) -> bool;

    /// The vCPUs stand still: finishes what is under way, and begins nothing until [`resumed`](Self::resumed). `false` if that was not
    /// possible by `deadline`.
    fn quiesce(&self, deadline: Instant) -> bool;

    /// The guest is about to run. Touches no guest memory.
    ///
    /// # Errors
    /// Why it cannot run here, in words for a person.
    fn resumed(&self, how: Resume) -> std::result::Result<(), String>;

    /// Its state, at rest.
    fn save(&self) -> std::result::Result<Section, StateError>;

    /// Takes its section out of `parts` and reads it; what comes back applies it.
    fn prepare(&self, parts: &mut Sections<'_>) -> std::result::Result<Load<'_>, StateError>;
}

/// Where a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its first address; its window is [`WINDOW`] bytes.
    pub(crate) address: u64,
    /// Its interrupt, of the I/O APIC; edges, active high.
    pub(crate) gsi: u32,
}

/// All places, in the order in which devices get them.
fn places() -> impl Iterator<Item = Place> {
    let addresses = (0..).map(|n| BASE + n * STRIDE);
    addresses.zip(LINES).map(|(address, gsi)| Place { address, gsi })
}

/// The devices, by their place.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    devices: Vec<Arc<dyn MmioDevice>>,
}

impl Bus {
    /// Plugs in the device that `make` makes for its place.
    ///
    /// # Errors
    /// Those of `make`, and if the VM has too many devices.
    pub(crate) fn plug<D: MmioDevice + 'static>(
        &mut self,
        make: impl FnOnce(Place) -> Result<Arc<D>>,
    ) -> Result<Arc<D>> {
        let place = places().nth(self.devices.len()).ok_or_else(|| {
            Error::Options(format!("too many devices: a VM can have {}, balloon and all", LINES.len()))
        })?;
        let device = make(place)?;
        self.devices.push(Arc::clone(&device) as _);
        Ok(device)
    }

    /// Where the devices are.
    pub(crate) fn places(&self) -> Vec<Place> {
        places().take(self.devices.len()).collect()
    }

    /// The devices by name, in order.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.devices.iter().map(|device| device.name()).collect()
    }

    /// What a guest without ACPI is told of the devices on its command line; ends with a space, if anything.
    pub(crate) fn announcement(&self) -> String {
        let place = |Place { address, gsi }| format!("virtio_mmio.device={WINDOW}@{address:#x}:{gsi} ");
        self.places().into_iter().map(place).collect()
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

    /// Brings all devices to rest; the vCPUs stand still. What devices do until this returns (memory that they write, interrupts that they
    /// send) is part of what is to be saved after it.
    ///
    /// # Errors
    /// If one does not come to rest. None begins anything new before [`resumed`](Self::resumed) even then.
    pub(crate) fn quiesce(&self) -> Result<()> {
        self.quiesce_by(Instant::now() + PATIENCE)
    }

    /// The same with another patience.
    pub(crate) fn quiesce_by(&self, deadline: Instant) -> Result<()> {
        let began = Instant::now();
        // All of them, also behind one that is busy.
        let busy: Vec<_> = self.devices.iter().filter(|device| !device.quiesce(deadline)).collect();
        match busy.first() {
            Some(device) => Err(Error::Busy { name: device.name(), within: began.elapsed() }),
            None => Ok(()),
        }
    }

    /// Lets the devices go on, for a guest that is about to run.
    ///
    /// # Errors
    /// If one cannot: all are at rest then, as before.
    pub(crate) fn resumed(&self, how: Resume) -> Result<()> {
        for device in &self.devices {
            if let Err(why) = device.resumed(how) {
                let name = device.name();
                // Nothing can be under way yet in those that were told to go on.
                let _ = self.quiesce();
                return Err(Error::Device { name, why });
            }
        }
        Ok(())
    }

    /// Resets the devices, at rest, as their drivers would.
    pub(crate) fn reset(&self) {
        self.devices.iter().for_each(|device| device.write(STATUS, &[0; 4]));
    }

    /// The devices' state, at rest.
    pub(crate) fn save(&self) -> std::result::Result<Vec<Section>, StateError> {
        self.devices.iter().map(|device| device.save()).collect()
    }

    /// Reads the devices' sections; what comes back applies them.
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
        resting: AtomicBool,
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
            self.resting.store(true, Ordering::Relaxed);
            !self.busy
        }
        fn resumed(&self, _: Resume) -> std::result::Result<(), String> {
            self.resting.store(self.stuck, Ordering::Relaxed);
            if self.stuck { Err("it is stuck".to_owned()) } else { Ok(()) }
        }
        fn save(&self) -> std::result::Result<Section, StateError> {
            unreachable!()
        }
        fn prepare(&self, _: &mut Sections<'_>) -> std::result::Result<Load<'_>, StateError> {
            unreachable!()
        }
    }

    fn plug(bus: &mut Bus, device: Scratch) -> (Arc<Scratch>, u32) {
        let mut line = 0;
        let plugged = bus.plug(|place| {
            line = place.gsi;
            Ok(Arc::new(device))
        });
        (plugged.unwrap(), line)
    }

    #[test]
    fn each_device_has_its_window_and_the_rest_is_empty() {
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
    fn interrupts_are_apart_and_end() {
        let mut bus = Bus::default();
        let mut lines: Vec<u32> = LINES.iter().map(|_| plug(&mut bus, Scratch::default()).1).collect();
        assert_eq!(bus.places().iter().map(|place| place.gsi).collect::<Vec<_>>(), lines);
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), LINES.len());
        assert!(
            lines.iter().all(|line| {
                *line < 24 && ![4, crate::power::LINE, crate::generation::LINE].contains(line)
            }),
            "the I/O APIC has 24, and 4 is the serial port's"
        );
        let error = bus.plug(|_| Ok(Arc::new(Scratch::default()))).unwrap_err().to_string();
        assert!(error.contains("too many devices"), "{error}");
    }

    #[test]
    fn a_device_that_cannot_go_on_lets_none_go_on() {
        let mut bus = Bus::default();
        let (first, _) = plug(&mut bus, Scratch::default());
        plug(&mut bus, Scratch { stuck: true, ..Scratch::default() });
        let (last, _) = plug(&mut bus, Scratch::default());
        let error = bus.resumed(Resume::First).unwrap_err().to_string();
        assert_eq!(error, "scratch: it is stuck");
        assert!(first.resting.load(Ordering::Relaxed) && last.resting.load(Ordering::Relaxed));
    }

    #[test]
    fn all_devices_are_brought_to_rest_even_if_one_is_not() {
        let mut bus = Bus::default();
        plug(&mut bus, Scratch { busy: true, ..Scratch::default() });
        let (second, _) = plug(&mut bus, Scratch::default());
        assert!(bus.quiesce().is_err());
        assert!(second.resting.load(Ordering::Relaxed));
    }
}
