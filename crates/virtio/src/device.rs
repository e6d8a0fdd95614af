//! What a virtio device is, apart from its transport.

use crate::queue::{RingError, VirtQueue};
use crate::signals::Signals;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;
use vm_memory::GuestMemory;

/// A queue that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSpec {
    /// Its index.
    pub index: u16,
    /// Most entries, a power of two.
    pub max_size: u16,
}

/// Whether a queue has been served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// It is empty, and the driver will notify when it is not.
    Done,
    /// There may be more in it.
    More,
}

/// Why a device goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// The guest is about to run for the first time.
    First,
    /// It stood still for a moment, and runs again where it ran.
    Again,
    /// It has come from elsewhere: the device was loaded, and whatever is around the guest may not know yet where it is now.
    Moved,
}

/// By which a device's own threads say that they have something for the driver: a request that is done, a packet that came.
///
/// The device is then [served](Device::serve) on the thread that rings, which must hold none of the locks that the device takes. That
/// may touch guest memory and so sleep on a page that has not come (postcopy): it is for threads that nobody waits for but the guest.
pub trait Doorbell: Send + Sync + Debug {
    /// Has `queue` served as if its driver had notified. Does nothing if the driver has not set it up, or the device is gone.
    fn ring(&self, queue: u16);
}

/// What connects a device to its machine, apart from its transport.
#[derive(Debug, Clone)]
pub struct Wiring {
    /// Its interrupts.
    pub signals: Arc<Signals>,
    /// For its threads. Does not keep the device alive: a device ends its threads when it is dropped.
    pub doorbell: Arc<dyn Doorbell>,
}

/// A device, as its transport calls it: one call at a time.
///
/// A device is a folder: the device itself, the handling of its queues, metrics, saved state ([`balloon`](crate::balloon) is one).
pub trait Device: Send + Debug {
    /// Its saved state, serialized: a type for nothing else.
    type Saved: Serialize + DeserializeOwned + Clone + Debug + PartialEq;

    /// Its device id (virtio 1.2, section 5).
    const ID: u32;

    /// Its queues. Indices without one do not exist.
    const QUEUES: &'static [QueueSpec];

    /// The features of the device type that it offers; those of rings and transport are the transport's.
    fn features(&self) -> u128;

    /// Returns false if the device does not have queue `index` of [`QUEUES`](Self::QUEUES), as it was made. Saved state has the
    /// queue all the same.
    fn has_queue(&self, index: u16) -> bool {
        let _ = index;
        true
    }

    /// The driver reads `data.len()` bytes of the configuration at `offset`. Given zeros; what does not exist is left so.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// The driver writes to the configuration.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// The driver is ready, has accepted `features` and set up the queues `ready`.
    fn activate(&mut self, features: u128, ready: &[u16]);

    /// Serves `queue`, a portion of it. The driver has put something in, or it is to be looked at for another reason.
    ///
    /// # Errors
    /// If the ring cannot be followed: the device then rests until it is reset.
    fn serve<M: GuestMemory>(&mut self, queue: &mut VirtQueue, memory: &M) -> Result<Progress, RingError>;

    /// The vCPUs stand still and the state is about to be saved: from here to [`resumed`](Self::resumed) the device begins nothing new
    /// (also in [`serve`](Self::serve), which is still called to give back what is done). Says whether nothing is under way any more; if
    /// something is, it is asked again after each ring of its [`Doorbell`]. Waits for nothing.
    ///
    /// The default is for a device that does all its work in [`serve`](Self::serve).
    fn quiesce(&mut self) -> bool {
        true
    }

    /// The guest is about to run. Touches no guest memory, as pages may still be elsewhere; every queue is served right after.
    ///
    /// # Errors
    /// What the device needs and cannot have, in words for a person: the guest then does not run here.
    fn resumed(&mut self, how: Resume) -> Result<(), String> {
        let _ = how;
        Ok(())
    }

    /// The driver switches `queue` off: when this returns, nothing touches its rings and the buffers in them any more.
    fn taken_away(&mut self, queue: u16) {
        let _ = queue;
    }

    /// The driver resets the device. What is under way still ends, but nothing of it reaches the driver's memory after this.
    fn reset(&mut self);

    /// The device rests now, because of `error`.
    fn broken(&mut self, error: &RingError);

    /// Its state.
    fn save(&self) -> Self::Saved;

    /// Takes up `saved`; if `active`, the driver was ready, with these features and these queues of so many entries. Says whether the
    /// configuration is another one than was saved.
    ///
    /// # Errors
    /// What cannot be, in words; nothing has changed then.
    fn load(&mut self, saved: &Self::Saved, active: Option<(u128, &[QueueSpec])>) -> Result<bool, String>;
}

/// Copies what `bytes` has at `offset` to `data`; what it has not stays as it is.
pub(crate) fn read_bytes(bytes: &[u8], offset: u64, data: &mut [u8]) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    if let Some(rest) = bytes.get(from..) {
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
    }
}
