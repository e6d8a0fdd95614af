//! Write protection: memory whose writers wait until a page has been copied.

use crate::{Fault, PageIndex, PageRun, RegionId, VmError};
use std::fmt::Debug;
use std::time::Duration;

/// Guest memory whose pages can be write-protected while the guest runs. Background snapshots need
/// this trait.
///
/// Between [`begin`](Self::begin) and [`end`](Self::end), a page that was
/// [protected](Self::protect) keeps its content until it is [unprotected](Self::unprotect). A
/// thread that writes to such a page sleeps in the kernel and causes a [`Fault`]. This applies to
/// threads of vCPUs, devices and the VMM, and also to system calls and to KVM. Reads are never
/// delayed.
///
/// The address of a fault determines its shard, so that several threads can take faults without a
/// common queue. All methods may be called concurrently from any thread. No method may write guest
/// memory, because the write could wait for the caller.
///
/// The methods of [`GuestMemory`](crate::GuestMemory) must not wait for a thread that writes guest
/// memory, because the engine calls some of them while it delays all writes to protected pages.
///
/// # Writes that are not delayed
/// The implementation must tell its user how to prevent the following changes of protected pages,
/// because no thread waits for them:
/// - writes through another mapping of the memory;
/// - writes of devices to pages that were pinned before the pages were protected. The engine
///   therefore lets the VM quiesce its devices ([`SourceVm::quiesce`](crate::SourceVm::quiesce));
/// - memory that is given back to the host, for example by a balloon. The implementation must
///   refuse to give back memory until `end` has returned.
pub trait WriteProtection: Send + Sync + Debug {
    /// Returns the number of shards, at least 1. The result never changes.
    fn shards(&self) -> usize;

    /// Returns the shard of `page`, 0 to `shards() - 1`.
    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize;

    /// Begins to receive the faults of the memory. No page is protected yet. The guest runs during
    /// the call.
    ///
    /// # Errors
    /// If the host does not allow write protection. The error should say what is missing on the
    /// host, and how to permit it. The memory then causes no faults, as before the call.
    fn begin(&self) -> Result<(), VmError>;

    /// Protects the pages of `run`, including pages that were never touched. After this call has
    /// returned, every thread that writes to one of them causes a fault and sleeps.
    ///
    /// # Errors
    /// If the run is not in the region, or if the host refuses. Some of the pages may be protected.
    fn protect(&self, region: RegionId, run: PageRun) -> Result<(), VmError>;

    /// Lifts the protection of the pages of `run`, and wakes the threads that sleep on one of them.
    ///
    /// # Errors
    /// If the run is not in the region, or if the host refuses. The threads may still sleep until
    /// [`end`](Self::end) is called.
    fn unprotect(&self, region: RegionId, run: PageRun) -> Result<(), VmError>;

    /// Waits for the next fault of `shard`, at most for the time `within`. Returns `None` if there
    /// was no fault in this time, or if [`interrupt`](Self::interrupt) was called.
    ///
    /// # Errors
    /// If the host cannot report faults.
    fn next_write(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError>;

    /// Interrupts every call of [`next_write`](Self::next_write) that is waiting. If a thread is
    /// not waiting, its next call of `next_write` returns without waiting.
    fn interrupt(&self);

    /// Ends write protection, and wakes all threads that sleep. After this call, no write causes a
    /// fault. Does nothing if [`begin`](Self::begin) was not called.
    ///
    /// # Errors
    /// If the host cannot end write protection for a part of the memory. The call can be repeated.
    fn end(&self) -> Result<(), VmError>;
}
