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

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSaved {
    /// Its index.
    pub index: u16,
    /// Its size, as the driver set it.
    pub size: u32,
    /// Address of the descriptors.
    pub descriptors: u64,
    /// Address of what the driver offers.
    pub driver: u64,
    /// Address of what the device gives back.
    pub device: u64,
    /// Whether the driver has made it ready.
    pub ready: bool,
    /// The next buffer that is taken.
    pub next_avail: u16,
    /// The next place for one that is given back.
    pub next_used: u16,
}

/// Registers and queues of a device, and the device behind them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportSaved<D> {
    /// The device status.
    pub status: u32,
    /// The selected bank of what the device offers.
    pub device_select: u32,
    /// The selected bank of what the driver accepts.
    pub driver_select: u32,
    /// What the driver accepts.
    pub driver_features: u128,
    /// The selected queue.
    pub queue_select: u32,
    /// The interrupt status.
    pub interrupt: u32,
    /// The generation of the configuration.
    pub generation: u32,
    /// The queues that the device has.
    pub queues: Vec<QueueSaved>,
    /// The device.
    pub device: D,
}

/// Why saved state cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The device does not have these queues.
    #[error("it has other queues than this device")]
    Queues,
    /// A queue that is ready where none can be.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A status that no device gets into.
    #[error("a device status of {0:#x} with features {1:#x}")]
    Status(u32, u128),
    /// The device says no.
    #[error("{0}")]
    Device(String),
}

impl<D: Device> MmioTransport<D> {
    /// The state; the vCPUs stand still.
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

    /// Takes up `saved`, which a peer or a file may have made up. Sends no interrupt and touches no guest memory (pages may still
    /// be elsewhere): [`resumed`](Self::resumed) does, when the guest runs.
    ///
    /// # Errors
    /// If it cannot be the state of this device with this memory; nothing has changed then.
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
