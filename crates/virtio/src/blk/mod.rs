//! A disk (virtio 1.2, section 5.2): a raw file, or anything else that a [`Disk`] is made of.
//!
//! | module | what |
//! |---|---|
//! | `device` | features, configuration, the queue |
//! | `request` | what a chain of descriptors asks for |
//! | `work` | requests under way, and how they come to rest |
//! | `run` | doing one |
//! | `metrics` | what happened |
//! | `persist` | saved state |
//!
//! # Who does the work
//! Where the host's kernel passes notifications on by itself, a thread waits for them ([`BlkWork::attend`]): it takes requests out of the
//! ring, does at once what needs no waiting (what the host's page cache has), and leaves the rest to other threads ([`BlkWork::run`]).
//! Elsewhere the vCPU that notifies takes requests out of the ring, and those threads do all of them. Either way a guest goes on while
//! its disk works, and a request may take as long as it takes. Threads, not io_uring: each request is one system call straight from or
//! into guest memory either way, a buffered write in io_uring ends up on a thread of the kernel's in any case, hosts that harden
//! themselves switch io_uring off, and with threads it is plain who sleeps when a page is missing (postcopy): nobody that
//! anybody else waits for.
//!
//! # What is on stable storage
//! A driver that knows flushes (`VIRTIO_BLK_F_FLUSH`) gets writes that are answered once the host's page cache has them, and everything
//! answered before a flush is on stable storage when the flush is answered. For one that does not, or that chose so (`writeback`), every
//! write is on stable storage when it is answered (5.2.6.2).

mod device;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod metrics;
mod persist;
mod request;
mod run;
#[cfg(any(test, feature = "hostile"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use more of it"))]
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

/// The queue of requests.
const QUEUE: u16 = 0;

/// What a disk's bytes are kept in. Called from the disk's threads, several at once; offsets and lengths are multiples of [`SECTOR`] and
/// within its size.
pub trait Disk: Send + Sync + Debug {
    /// Fills all of `into` with what is at `offset`. Marking the pages is not its affair.
    ///
    /// # Errors
    /// If the host does not give it; anything may be in `into`.
    fn read<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// Writes all of `from` at `offset`.
    ///
    /// # Errors
    /// If the host does not take it; some may be written.
    fn write<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> io::Result<()>;

    /// As [`read`](Self::read), but only if that takes no waiting for the storage or for guest memory. Says whether all was done; if not,
    /// anything may be in `into`.
    fn read_at_once<B: BitmapSlice>(&self, offset: u64, into: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, into);
        false
    }

    /// As [`write`](Self::write), likewise; if it says `false`, some may be written.
    fn write_at_once<B: BitmapSlice>(&self, offset: u64, from: &[VolatileSlice<'_, B>]) -> bool {
        let _ = (offset, from);
        false
    }

    /// Brings everything that was written to stable storage.
    ///
    /// # Errors
    /// If that is not certain.
    fn flush(&self) -> io::Result<()>;

    /// Nobody needs what is in `len` bytes at `offset`: they may read as anything from now on.
    ///
    /// # Errors
    /// If the host fails; not if it only cannot do it.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` zeros, which need no place of their own if `unmap`.
    ///
    /// # Errors
    /// If they may not be zeros.
    fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
}

/// What a disk is to be like. Equal on both sides of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlkOptions {
    /// Its size, in [sectors](SECTOR).
    pub sectors: u64,
    /// Whether it cannot be written.
    pub read_only: bool,
    /// What it says that it is called; padded with zeros.
    pub id: [u8; ID_BYTES],
}
