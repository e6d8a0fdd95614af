//! The transport's saved state.

use super::{DRIVER_OK, DRIVERS, FEATURES_OK, MmioTransport, NEEDS_RESET, Setup, Slot};
use crate::device::{Device, QueueSpec};
use crate::queue::{RingError, VirtQueue};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INT_CONFIG;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::GuestMemory;

/// State of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSaved {
    /// Index of the queue.
    pub index: u16,
    /// Size of the queue, as the driver set it.
    pub size: u32,
    /// Guest address of the descriptors.
    pub descriptors: u64,
    /// Guest address of the driver's ring (available buffers).
    pub driver: u64,
    /// Guest address of the device's ring (used buffers).
    pub device: u64,
    /// True if the driver has made the queue ready.
    pub ready: bool,
    /// Index of the next buffer to take.
    pub next_avail: u16,
    /// Index of the next buffer to give back.
    pub next_used: u16,
}

/// State of a device's registers and queues, and of the device itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportSaved<D> {
    /// The device status.
    pub status: u32,
    /// Selected bank of the offered features.
    pub device_select: u32,
    /// Selected bank of the accepted features.
    pub driver_select: u32,
    /// Features that the driver accepts.
    pub driver_features: u128,
    /// Index of the selected queue.
    pub queue_select: u32,
    /// The interrupt status.
    pub interrupt: u32,
    /// The generation of the configuration.
    pub generation: u32,
    /// Queues of the device.
    pub queues: Vec<QueueSaved>,
    /// State of the device.
    pub device: D,
}

/// Error that loading saved state returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The saved queues are not the queues of this device.
    #[error("the saved state has other queues than this device")]
    Queues,
    /// A ready queue has an invalid description.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The saved status is one that no device can have.
    #[error("a device status of {0:#x} with features {1:#x} is not possible")]
    Status(u32, u128),
    /// The device refuses its state.
    #[error("{0}")]
    Device(String),
}

impl<D: Device> MmioTransport<D> {
    /// Returns the state. The vCPUs must be paused.
    #[must_use]
    pub fn save(&self) -> TransportSaved<D::Saved> {
        let core = self.core();
        let queue = |slot: &Slot| {
            let Setup { spec, size, descriptors, driver, device } = slot.setup;
            let (next_avail, next_used) = match &slot.queue {
                Some(queue) => (queue.queue().next_avail(), queue.queue().next_used()),
                None => (0, 0),
            };
            let ready = slot.queue.is_some();
            QueueSaved { index: spec.index, size, descriptors, driver, device, ready, next_avail, next_used }
        };
        TransportSaved {
            status: core.status,
            device_select: core.device_select,
            driver_select: core.driver_select,
            driver_features: core.driver_features,
            queue_select: core.queue_select,
            interrupt: self.signals.status(),
            generation: self.signals.generation(),
            queues: core.slots.iter().map(queue).collect(),
            device: core.device.save(),
        }
    }

    /// Loads `saved`, which comes from a peer or a file and is not trusted. The method sends no
    /// interrupt and does not access guest memory, because pages may be missing.
    /// [`resumed`](Self::resumed) does both when the guest is about to run.
    ///
    /// # Errors
    /// Returns an error if `saved` cannot be the state of this device with this memory. The device
    /// is unchanged then.
    pub fn load<M: GuestMemory>(
        &self,
        memory: &M,
        saved: &TransportSaved<D::Saved>,
    ) -> Result<(), LoadError> {
        let mut core = self.core();
        let slots = slots::<D, M>(memory, saved)?;
        if slots.iter().any(|slot| slot.queue.is_some() && !core.device.has_queue(slot.setup.spec.index)) {
            return Err(LoadError::Queues);
        }
        let status = saved.status;
        let accepted = status & FEATURES_OK == 0 || core.acceptable(saved.driver_features);
        if status & !(DRIVERS | NEEDS_RESET) != 0
            || status & (DRIVER_OK | FEATURES_OK) == DRIVER_OK
            || !accepted
        {
            return Err(LoadError::Status(status, saved.driver_features));
        }
        let active = status & DRIVER_OK != 0;
        let ready: Vec<_> = slots
            .iter()
            .filter_map(|slot| slot.queue.as_ref())
            .map(|queue| QueueSpec { index: queue.index(), max_size: queue.queue().size() })
            .collect();
        let device = active.then_some((saved.driver_features, &ready[..]));
        let changed = core.device.load(&saved.device, device).map_err(LoadError::Device)?;
        core.status = status;
        core.device_select = saved.device_select;
        core.driver_select = saved.driver_select;
        core.driver_features = saved.driver_features;
        core.queue_select = saved.queue_select;
        core.slots = slots;
        self.more.store(false, Ordering::Release);
        let (mut interrupt, mut generation) = (saved.interrupt, saved.generation);
        if changed && active {
            interrupt |= VIRTIO_MMIO_INT_CONFIG;
            generation = generation.wrapping_add(1);
        }
        self.signals.load(interrupt, generation, active);
        Ok(())
    }
}

fn slots<D: Device, M: GuestMemory>(
    memory: &M,
    saved: &TransportSaved<D::Saved>,
) -> Result<Vec<Slot>, LoadError> {
    if saved.queues.len() != D::QUEUES.len() {
        return Err(LoadError::Queues);
    }
    let event_idx = saved.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
    let slot = |(spec, queue): (&QueueSpec, &QueueSaved)| {
        if spec.index != queue.index {
            return Err(LoadError::Queues);
        }
        let QueueSaved { size, descriptors, driver, device, .. } = *queue;
        let setup = Setup { spec: *spec, size, descriptors, driver, device };
        let mut slot = Slot { setup, queue: None, due: false };
        if queue.ready {
            let mut ring = setup.queue(memory)?;
            ring.set_next_avail(queue.next_avail);
            ring.set_next_used(queue.next_used);
            ring.set_event_idx(event_idx);
            slot.queue = Some(VirtQueue::new(spec.index, ring));
        }
        Ok(slot)
    };
    D::QUEUES.iter().zip(&saved.queues).map(slot).collect()
}
