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
//! If KVM itself passes notifications to the VMM (ioeventfd), a thread waits for them
//! ([`BlkWork::attend`]). This thread takes requests out of the ring, and immediately executes
//! those that need no wait, because their data is in the host's page cache. It leaves the other
//! requests to the threads that call [`BlkWork::run`]. Without ioeventfd, the vCPU that notifies
//! takes the requests out of the ring, and those threads execute all of them. In both cases, the
//! guest continues to run while its requests are executed, however long they take.
//!
//! The disk uses threads and not io_uring for these reasons:
//! - Each request is one system call straight from or into guest memory in both designs.
//! - A buffered write in io_uring runs on a kernel thread in any case.
//! - Hardened hosts disable io_uring.
//! - In postcopy, a thread that executes a request may sleep on a missing page. With threads, this
//!   thread is known, and no other thread waits for it.
//!
//! # Stable storage
//! If the driver supports flushes (`VIRTIO_BLK_F_FLUSH`), a write is answered as soon as the data
//! is in the host's page cache. When a flush is answered, all writes that were answered before it
//! are on stable storage. If the driver does not support flushes, or has disabled the write-back
//! cache (`writeback`), every write is on stable storage before it is answered (5.2.6.2).

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

/// Storage of a disk. Several threads of the disk may call the methods at the same time. Offsets
/// and lengths are in bytes, are multiples of [`SECTOR`], and are within the size of the disk.
pub trait Disk: Send + Sync + Debug {
    /// Reads the bytes from `offset` on into `into`, until it is full. The caller marks the pages
    /// as dirty.
    ///
    /// # Errors
    /// Returns an error if the host cannot read. `into` may then have any content.
    fn read<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// Writes all of `from` at `offset`.
    ///
    /// # Errors
    /// Returns an error if the host cannot write. Some of the data may have been written.
    fn write<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// Reads like [`read`](Self::read), but only if this needs no wait for storage or guest memory.
    /// Returns true if everything was read. Otherwise `into` may have any content.
    fn read_at_once<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, into);
        false
    }

    /// Writes like [`write`](Self::write), but only if this needs no wait. Returns true if
    /// everything was written. Otherwise some of the data may have been written.
    fn write_at_once<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, from);
        false
    }

    /// Waits until all written data is on stable storage.
    ///
    /// # Errors
    /// Returns an error if it is not certain that the data is on stable storage.
    fn flush(&self) -> io::Result<()>;

    /// Discards `len` bytes at `offset`. Afterwards these bytes may have any content.
    ///
    /// # Errors
    /// Returns an error if the host fails. It is not an error if the host does not support
    /// discards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` read as zeros. If `unmap` is true, the storage of these bytes
    /// may be freed.
    ///
    /// # Errors
    /// Returns an error if the bytes may not read as zeros.
    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
}

/// Options of a disk. They must be equal on source and target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlkOptions {
    /// Size of the disk, in [sectors](SECTOR).
    pub sectors: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
    /// ID that the disk reports, padded with zeros.
    pub id: [u8; ID_BYTES],
}
