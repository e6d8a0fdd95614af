//! The block device (virtio 1.2, section 5.2): a raw file, or any other implementation of [`Disk`].
//!
//! | module | content |
//! |---|---|
//! | `device` | features, configuration, the queue |
//! | `request` | parsing of a request from a chain of descriptors |
//! | `work` | requests under way, and quiescing |
//! | `run` | execution of a request |
//! | `metrics` | counters |
//! | `persist` | saved state |
//!
//! # Threads
//! Where KVM passes notifications on by itself, a thread waits for them ([`BlkWork::attend`]). This
//! thread takes requests out of the ring and does the ones that need no waiting at once (data in
//! the host's page cache). It leaves the rest to other threads ([`BlkWork::run`]). Elsewhere the
//! vCPU that notifies takes requests out of the ring, and those threads do all of them. In both
//! cases the guest continues while its disk works, and a request may take any time.
//!
//! The disk uses threads and not io_uring for these reasons:
//! - Each request is one system call straight from or into guest memory in both designs.
//! - A buffered write in io_uring runs on a kernel thread in any case.
//! - Hardened hosts disable io_uring.
//! - With threads it is clear which thread sleeps on a missing page (postcopy): a thread that no
//!   other thread waits for.
//!
//! # Stable storage
//! A driver that supports flushes (`VIRTIO_BLK_F_FLUSH`) gets a write answered once the host's page
//! cache has the data. When a flush is answered, everything that was answered before it is on
//! stable storage. For a driver without flushes, or one that chose so (`writeback`), every write is
//! on stable storage when it is answered (5.2.6.2).

mod device;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod metrics;
mod persist;
mod request;
mod run;
#[cfg(any(test, feature = "hostile"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of this module"))]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod work;

pub use device::Blk;
pub use metrics::BlkFigures;
pub use persist::BlkSaved;
pub use request::SECTOR;
pub use run::ID_BYTES;
pub use work::BlkWork;

use std::fmt::Debug;
use std::io;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Index of the queue of requests.
const QUEUE: u16 = 0;

/// Storage of a disk's bytes. The disk's threads call this, several at once. Offsets and lengths
/// are multiples of [`SECTOR`] and within the disk's size.
pub trait Disk: Send + Sync + Debug {
    /// Fills all of `into` from `offset`. The caller marks the pages as dirty.
    ///
    /// # Errors
    /// Fails if the host cannot read. `into` may then have any content.
    fn read<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// Writes all of `from` at `offset`.
    ///
    /// # Errors
    /// Fails if the host cannot write. Some of the data may have been written.
    fn write<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// Reads as [`read`](Self::read) does, but only if this needs no wait for storage or guest
    /// memory. Returns true if everything was read. Otherwise `into` may have any content.
    fn read_at_once<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, into);
        false
    }

    /// Writes as [`write`](Self::write) does, but without waiting. If this returns false, some of
    /// the data may have been written.
    fn write_at_once<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, from);
        false
    }

    /// Brings all written data to stable storage.
    ///
    /// # Errors
    /// Fails if it is not certain that the data is on stable storage.
    fn flush(&self) -> io::Result<()>;

    /// Discards `len` bytes at `offset`, which may read as anything from now on.
    ///
    /// # Errors
    /// Fails if the host fails, but not if the host only does not support it.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` read as zeros. If `unmap` is true, the zeros need no space.
    ///
    /// # Errors
    /// Fails if the bytes may not read as zeros.
    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
}

/// Options of a disk. Equal on source and target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlkOptions {
    /// Size of the disk, in [sectors](SECTOR).
    pub sectors: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
    /// ID that the disk reports, padded with zeros.
    pub id: [u8; ID_BYTES],
}
