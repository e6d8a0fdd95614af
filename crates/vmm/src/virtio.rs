//! Common part of all virtio devices on the bus.
//!
//! # How to add a device
//! 1. The device is a folder of `vmferry-virtio` and implements [`Device`]. It is created with a
//!    [`Wiring`]: threads of the device put finished work where [`Device::serve`] finds it, and
//!    ring the doorbell.
//! 2. Its saved state gets a name and a version: [`Saved`] for `TransportSaved<D::Saved>`.
//! 3. [`Devices`](crate::devices::Devices) makes a [`VirtioMmio`] of the device and plugs it into
//!    the [bus](crate::bus), which gives it an address and an interrupt. The rest follows: the
//!    device is announced to the guest, quiesced before state is saved, and saved and loaded as a
//!    section of its name and instance. Source and target of a migration compare their devices.

use crate::bus::{Load, MmioDevice};
use crate::memory::{GuestRam, WriteMarks};
use crate::state::{Saved, Sections, StateError};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;
use vm_memory::GuestMemoryMmap;
use vmferry_engine::Section;
use vmferry_virtio::device::{Device, Doorbell, Resume, Wiring};
use vmferry_virtio::mmio::{MmioTransport, TransportSaved};
use vmferry_virtio::signals::{Interrupt, Signals};

/// Virtio device, its registers, and the memory of its driver's queues.
#[derive(Debug)]
pub(crate) struct VirtioMmio<D> {
    transport: MmioTransport<D>,
    ram: Arc<GuestRam>,
    instance: u32,
}

/// Slot of a device that is being created. [`wire`] returns what the device is created with, and
/// [`plug`](Self::plug) takes the device.
#[derive(Debug)]
#[must_use]
pub(crate) struct Socket<D> {
    signals: Arc<Signals>,
    bell: Arc<DeviceBell<D>>,
}

/// Returns what a device with its interrupt at `line` is created with, and the place for it.
pub(crate) fn wire<D: Device + 'static>(line: Box<dyn Interrupt>) -> (Wiring, Socket<D>) {
    let (signals, bell) = (Signals::new(line), Arc::new(DeviceBell(OnceLock::new())));
    let wiring = Wiring { signals: Arc::clone(&signals), doorbell: Arc::clone(&bell) as _ };
    (wiring, Socket { signals, bell })
}

impl<D: Device + 'static> Socket<D> {
    /// Returns the device, number `instance` of its type, with its registers.
    pub(crate) fn plug(self, device: D, ram: &Arc<GuestRam>, instance: u32) -> Arc<VirtioMmio<D>> {
        let transport = MmioTransport::new(device, self.signals);
        let made = Arc::new(VirtioMmio { transport, ram: Arc::clone(ram), instance });
        // A ring before this point did nothing, as for a device that no driver has set up. The
        // value is set only once, because `self` is consumed.
        let _ = self.bell.0.set(Arc::downgrade(&made));
        made
    }
}

impl<D: Device + 'static> VirtioMmio<D> {
    /// Returns the device's registers, for a thread of the device.
    pub(crate) fn transport(&self) -> &MmioTransport<D> {
        &self.transport
    }

    /// Returns the memory of the driver's queues.
    pub(crate) fn memory(&self) -> &GuestMemoryMmap<WriteMarks> {
        self.ram.map()
    }

    /// Serves `queue` as if its driver had notified.
    pub(crate) fn notify(&self, queue: u16) {
        self.transport.notify(self.ram.map(), queue);
    }
}

/// Doorbell by which a device's threads reach the device.
#[derive(Debug)]
struct DeviceBell<D>(OnceLock<Weak<VirtioMmio<D>>>);

impl<D: Device + 'static> Doorbell for DeviceBell<D> {
    fn ring(&self, queue: u16) {
        if let Some(device) = self.0.get().and_then(Weak::upgrade) {
            device.notify(queue);
        }
    }
}

impl<D: Device + 'static> MmioDevice for VirtioMmio<D>
where
    TransportSaved<D::Saved>: Saved,
{
    fn name(&self) -> &'static str {
        <TransportSaved<D::Saved> as Saved>::NAME
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        self.transport.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.transport.write(self.ram.map(), offset, data);
    }

    fn due(&self) -> bool {
        self.transport.due()
    }

    fn work(&self) -> bool {
        self.transport.work(self.ram.map())
    }

    fn quiesce(&self, deadline: Instant) -> bool {
        self.transport.quiesce(deadline)
    }

    fn resumed(&self, how: Resume) -> Result<(), String> {
        self.transport.resumed(how)
    }

    fn save(&self) -> Result<Vec<Section>, StateError> {
        let saved = self.transport.save();
        let sections = [Some(saved.section(self.instance)?), saved.additions(self.instance)?];
        Ok(sections.into_iter().flatten().collect())
    }

    fn prepare(&self, parts: &mut Sections<'_>) -> Result<Load<'_>, StateError> {
        let mut saved = TransportSaved::<D::Saved>::take(parts, self.instance)?;
        saved.take_additions(parts, self.instance)?;
        Ok(Box::new(move || {
            let loaded = self.transport.load(self.ram.map(), &saved);
            loaded.map_err(|error| {
                StateError::invalid(TransportSaved::<D::Saved>::KIND, self.instance, error.to_string())
            })
        }))
    }
}
