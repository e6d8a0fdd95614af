//! Registers that a driver sets, and the effects of setting them.

use super::{Core, DRIVER_OK, DRIVERS, FEATURES_OK, NEEDS_RESET, Setup, Slot, TRANSPORT_FEATURES};
use crate::device::{Device, Progress, Resume};
use crate::queue::{RingError, VirtQueue};
use crate::signals::Signals;
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_FAILED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_mmio as register;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::GuestMemory;

impl<D: Device> Core<D> {
    pub(super) fn offered(&self) -> u128 {
        self.device.features() | TRANSPORT_FEATURES
    }

    /// Returns true if the driver is ready and the device serves it.
    pub(super) fn running(&self) -> bool {
        self.status & (DRIVER_OK | VIRTIO_CONFIG_S_FAILED | NEEDS_RESET) == DRIVER_OK
    }

    /// Returns true if a driver may still change features and queues.
    pub(super) fn negotiating(&self) -> bool {
        self.status & FEATURES_OK == 0
    }

    pub(super) fn selected(&self) -> Option<&Slot> {
        let index = u16::try_from(self.queue_select).ok().filter(|index| self.device.has_queue(*index))?;
        self.slots.iter().find(|slot| slot.setup.spec.index == index)
    }

    pub(super) fn selected_mut(&mut self) -> Option<&mut Slot> {
        let index = u16::try_from(self.queue_select).ok().filter(|index| self.device.has_queue(*index))?;
        self.slots.iter_mut().find(|slot| slot.setup.spec.index == index)
    }

    pub(super) fn accept(&mut self, bits: u32) {
        if self.negotiating() && self.driver_select < 4 {
            let shift = self.driver_select * 32;
            self.driver_features &= !(u128::from(u32::MAX) << shift);
            self.driver_features |= u128::from(bits) << shift;
        }
    }

    /// Sets the status that the driver writes: 0 resets the device, and any other value adds bits
    /// (2.1.1: a driver must not clear a bit).
    pub(super) fn set_status(&mut self, value: u32, signals: &Signals) {
        if value == 0 {
            self.reset(signals);
            return;
        }
        let mut added = value & DRIVERS & !self.status;
        if added & FEATURES_OK != 0 && !self.acceptable(self.driver_features) {
            tracing::debug!(features = self.driver_features, "refused the features of a driver");
            added &= !FEATURES_OK;
        }
        if (self.status | added) & FEATURES_OK == 0 {
            // DRIVER_OK without agreed features is refused as well (3.1.1).
            added &= !DRIVER_OK;
        }
        self.status |= added;
        if added & DRIVER_OK != 0 && self.status & NEEDS_RESET == 0 {
            signals.set_live(true);
            let event_idx = self.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
            let mut ready = Vec::new();
            for slot in &mut self.slots {
                if let Some(queue) = &mut slot.queue {
                    queue.queue_mut().set_event_idx(event_idx);
                    // A driver may have added buffers and notified before it was ready (Linux does,
                    // for statistics). The device must not process them before this point (2.1.2),
                    // so it does now.
                    slot.due = true;
                    ready.push(queue.index());
                }
            }
            self.device.activate(self.driver_features, &ready);
        }
    }

    /// Returns true if all `features` are offered and the driver is not a legacy driver.
    pub(super) fn acceptable(&self, features: u128) -> bool {
        features & !self.offered() == 0 && features & 1 << VIRTIO_F_VERSION_1 != 0
    }

    /// Resumes the device for a guest that is about to run, and makes all queues due.
    pub(super) fn resumed(&mut self, how: Resume) -> Result<(), String> {
        self.device.resumed(how)?;
        self.slots.iter_mut().for_each(|slot| slot.due = slot.queue.is_some());
        Ok(())
    }

    pub(super) fn reset(&mut self, signals: &Signals) {
        signals.set_live(false);
        self.status = 0;
        (self.device_select, self.driver_select, self.queue_select) = (0, 0, 0);
        self.driver_features = 0;
        for slot in &mut self.slots {
            *slot = Slot { setup: Setup::new(slot.setup.spec), queue: None, due: false };
        }
        self.device.reset();
    }

    /// Sets an address or the size of the selected queue, which must not be ready.
    pub(super) fn set_up(&mut self, at: u32, value: u32) {
        let Some(Slot { setup, queue: None, .. }) = self.selected_mut() else { return };
        match at {
            register::VIRTIO_MMIO_QUEUE_NUM => setup.size = value,
            register::VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut setup.descriptors, value),
            register::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut setup.descriptors, value),
            register::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut setup.driver, value),
            register::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut setup.driver, value),
            register::VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut setup.device, value),
            register::VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut setup.device, value),
            _ => {}
        }
    }

    /// Makes the selected queue ready, between FEATURES_OK and DRIVER_OK, or takes it away at any
    /// time. Drivers take queues away before they reset a device.
    pub(super) fn set_ready<M: GuestMemory>(&mut self, value: u32, memory: &M, signals: &Signals) {
        let may = self.status & (FEATURES_OK | DRIVER_OK | NEEDS_RESET) == FEATURES_OK;
        let Some(slot) = self.selected_mut() else { return };
        match value {
            0 => {
                let index = slot.setup.spec.index;
                (slot.queue, slot.due) = (None, false);
                self.device.taken_away(index);
            }
            1 if may && slot.queue.is_none() => match slot.setup.queue(memory) {
                Ok(queue) => slot.queue = Some(VirtQueue::new(slot.setup.spec.index, queue)),
                Err(error) => self.require_reset(&error, signals),
            },
            _ => {}
        }
    }

    /// Stops the device, which sets DEVICE_NEEDS_RESET and waits for a reset (2.1.2).
    pub(super) fn require_reset(&mut self, error: &RingError, signals: &Signals) {
        tracing::debug!(%error, device = D::ID, "a virtio device stops until its driver resets it");
        self.status |= NEEDS_RESET;
        self.device.broken(error);
        signals.config_changed();
    }

    /// Serves a portion of each queue that is due. Returns true if any queue is still due.
    pub(super) fn serve_due<M: GuestMemory>(&mut self, memory: &M, signals: &Signals) -> bool {
        if !self.running() {
            return false;
        }
        let mut failed = None;
        for slot in &mut self.slots {
            let (Some(queue), true) = (&mut slot.queue, slot.due) else { continue };
            match self.device.serve(queue, memory) {
                Ok(progress) => slot.due = progress == Progress::More,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = failed {
            self.require_reset(&error, signals);
            return false;
        }
        self.slots.iter().any(|slot| slot.due && slot.queue.is_some())
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address >> 32 << 32 | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & u64::from(u32::MAX) | u64::from(value) << 32;
}
