//! Interface of a virtio device to its transport.

use crate::queue::{RingError, VirtQueue};
use crate::signals::Signals;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;
use vm_memory::GuestMemory;

/// Queue of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSpec {
    /// Index of the queue.
    pub index: u16,
    /// Maximum number of entries, a power of two.
    pub max_size: u16,
}

/// Result that serving a queue returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// The queue is empty, and the driver will notify when it is not.
    Done,
    /// The queue may have more buffers.
    More,
}

/// Reason for which a device resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// The guest is about to run for the first time.
    First,
    /// The guest was paused for a moment and runs again on the same host.
    Again,
    /// The guest was migrated to this host, and the device was loaded. The network may not know the
    /// guest's new location yet.
    Moved,
}

/// Doorbell with which a device's own threads report that they have something for the driver, such
/// as a completed request or a received packet.
///
/// The device is then [served](Device::serve) on the thread that rings, which must not hold any
/// lock that the device takes. Serving may access guest memory, and may therefore sleep on a
/// missing page in postcopy. Therefore a thread may ring only if nothing other than the guest waits
/// for it.
pub trait Doorbell: Send + Sync + Debug {
    /// Serves `queue` as if its driver had notified. Does nothing if the driver has not set up the
    /// queue, or if the device no longer exists.
    fn ring(&self, queue: u16);
}

/// Connection of a device to its machine, apart from its transport.
#[derive(Debug, Clone)]
pub struct Wiring {
    /// Interrupts of the device.
    pub signals: Arc<Signals>,
    /// Doorbell for the device's threads. It does not keep the device alive, because a device ends
    /// its threads when it is dropped.
    pub doorbell: Arc<dyn Doorbell>,
}

/// Virtio device. Its transport makes one call at a time.
///
/// A device is a folder: the device itself, the handling of its queues, metrics and saved state.
/// See [`balloon`](crate::balloon).
pub trait Device: Send + Debug {
    /// Type of the device's saved state, which no other device uses.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;

    /// ID of the device type (virtio 1.2, section 5).
    const ID: u32;

    /// Queues of the device. An index that is not listed does not exist.
    const QUEUES: &'static [QueueSpec];

    /// Returns the offered features of this device type. The transport adds the features of rings
    /// and of the transport.
    fn features(&self) -> u128;

    /// Returns false if this device was created without queue `index` of [`QUEUES`](Self::QUEUES).
    /// The saved state contains the queue in any case.
    fn has_queue(&self, index: u16) -> bool {
        let _ = index;
        true
    }

    /// Reads `data.len()` bytes of the configuration at `offset` for the driver. The caller has
    /// filled `data` with zeros, and bytes of fields that do not exist are left unchanged.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` to the configuration at `offset` for the driver.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// Activates the device. The driver is ready, has accepted `features`, and has set up the
    /// queues `ready`.
    fn activate(&mut self, features: u128, ready: &[u16]);

    /// Serves a portion of `queue`. The driver has added buffers, or the queue has to be checked
    /// for another reason.
    ///
    /// # Errors
    /// Returns an error if the ring is invalid. The device then stops until it is reset.
    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError>;

    /// Begins to quiesce the device, because the vCPUs are paused and the state is about to be
    /// saved. Returns true if nothing is under way. Otherwise the method is called again after each
    /// ring of the device's [`Doorbell`]. It must not wait.
    ///
    /// Until [`resumed`](Self::resumed) is called, the device must begin nothing new. This also
    /// holds for [`serve`](Self::serve), which is still called to give back buffers that are done.
    ///
    /// The default implementation returns true. It suits a device that does all of its work in
    /// [`serve`](Self::serve).
    fn quiesce(&mut self) -> bool {
        true
    }

    /// Resumes the device, because the guest is about to run. The method must not access guest
    /// memory, because pages may be missing. Every queue is served right afterwards.
    ///
    /// # Errors
    /// Returns a message for the operator if the device does not get a resource that it needs. The
    /// guest then does not run on this host.
    fn resumed(&mut self, how: Resume) -> Result<(), String> {
        let _ = how;
        Ok(())
    }

    /// Takes `queue` away, because the driver disables it. After this method has returned, the
    /// device must not access the queue's rings and buffers any more.
    fn taken_away(&mut self, queue: u16) {
        let _ = queue;
    }

    /// Resets the device for the driver. Requests under way may still be completed, but must not
    /// write to the driver's memory after this method has returned.
    fn reset(&mut self);

    /// Reports to the device that it stops because of `error`.
    fn broken(&mut self, error: &RingError);

    /// Returns the device's state.
    fn save(&self) -> Self::Saved;

    /// Loads `saved`. If `active` is not `None`, the driver was ready, with these features and with
    /// queues of these sizes. Returns true if the configuration differs from the saved one.
    ///
    /// # Errors
    /// Returns the reason as a message if `saved` cannot be loaded. The device is unchanged then.
    fn load(&mut self, saved: &Self::Saved, active: Option<(u128, &[QueueSpec])>) -> Result<bool, String>;
}

/// Copies the bytes at `offset` to `data`. The part of `data` beyond the end of `bytes` is left
/// unchanged.
pub(crate) fn read_bytes(bytes: &[u8], offset: u64, data: &mut [u8]) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    if let Some(rest) = bytes.get(from..) {
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
    }
}
