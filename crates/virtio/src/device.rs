//! What a virtio device is, apart from its transport.

use crate::queue::{RingError, VirtQueue};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
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

    /// The driver resets the device.
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
