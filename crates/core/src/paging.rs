//! Demand paging: memory whose pages are placed while the guest runs.

use crate::VmError;
use crate::{PageIndex, PageRun, PageSet, RegionId};
use std::fmt::Debug;
use std::time::Duration;

/// Access to a missing page. The thread that made the access sleeps until the page is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Region that contains the page.
    pub region: RegionId,
    /// Index of the page in the region.
    pub page: PageIndex,
    /// True if the access is a write.
    pub write: bool,
    /// Number of the vCPU whose thread sleeps, or `None` if another thread of the VMM sleeps or the
    /// thread is unknown.
    pub vcpu: Option<u32>,
}

/// Result of placing a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placed {
    /// Number of pages that were missing before the call, and that the call has placed.
    pub pages: u64,
    /// Number of pages that were already present before the call, and that the call has not
    /// changed.
    pub already_present: u64,
}

/// Guest memory whose pages are placed while the guest runs. Postcopy and on-demand restores need
/// this trait.
///
/// A page of the set that is passed to [`begin`](Self::begin) is missing until it is placed, which
/// happens once. A thread that touches a missing page sleeps in the kernel and causes a [`Fault`].
/// This applies to threads of vCPUs, devices and the VMM, and also to system calls. A page that is
/// not in the set but was never touched is not populated, and therefore causes faults as well. The
/// engine answers such a fault with [`place_zeros`](Self::place_zeros).
///
/// The address of a fault determines its shard, so that several threads can take faults without a
/// common queue. All methods may be called concurrently from any thread. No method may touch guest
/// memory, because the access could sleep until the page is placed.
///
/// # Dropping
/// The guest runs from [`started`](Self::started) to [`end`](Self::end). If the value is dropped in
/// between, a thread that waits for a missing page must not continue, because it would read zeros
/// instead of the page.
///
/// The engine drops its `Arc` when a postcopy is abandoned. The VM keeps its own `Arc`, and calls
/// `end` once the vCPUs and devices of the lost guest can no longer act on what they read.
pub trait DemandPaging: Send + Sync + Debug {
    /// Returns the number of shards, at least 1. The result never changes.
    fn shards(&self) -> usize;

    /// Returns the shard of `page`, 0 to `shards() - 1`.
    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize;

    /// Returns the number of pages in a unit: a power of two that never changes. Units are aligned
    /// to their size within the region. The default is 1.
    ///
    /// A thread that touches a page sleeps until all pages of the page's unit are placed. The
    /// engine places these pages in any order, with one or more calls. If a unit has more than 1
    /// page, the engine also places pages of zeros before a thread waits for them.
    fn unit_pages(&self, region: RegionId) -> u64 {
        let _ = region;
        1
    }

    /// Makes the pages of `missing` missing and discards their content. After this call, a thread
    /// that accesses a page that is not populated sleeps. The engine calls this method while the
    /// vCPUs do not run.
    ///
    /// # Errors
    /// If the host does not allow demand paging. The error should say what is missing on the host,
    /// and how to permit it. The memory then causes no faults, as before the call, but the content
    /// of pages of `missing` may be lost.
    fn begin(&self, missing: &PageSet) -> Result<(), VmError>;

    /// Notifies the memory that the guest runs, and that its vCPUs wait for single pages until
    /// [`end`](Self::end). The thread that started the guest calls this method at most once after
    /// `begin`, and perhaps only after `end`. An implementation may give the vCPU threads another
    /// scheduling policy. The default does nothing.
    fn started(&self) {}

    /// Waits for the next fault of `shard`, at most for the time `within`. Returns `None` if there
    /// was no fault in this time, or if [`interrupt`](Self::interrupt) was called.
    ///
    /// # Errors
    /// If the host cannot report faults.
    fn next_fault(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError>;

    /// Interrupts every call of [`next_fault`](Self::next_fault) that is waiting. If a thread is
    /// not waiting, its next call of `next_fault` returns without waiting.
    fn interrupt(&self);

    /// Copies `bytes`, which are the contents of all pages of `run`, into the missing pages of
    /// `run`. Pages that are already present keep their content.
    ///
    /// Each page becomes visible as a whole. The call wakes the threads that wait for one of the
    /// pages, or, with larger units, those that wait for a unit that is now complete.
    ///
    /// # Errors
    /// If the run is not in the region, if `bytes` has another length, or if the host refuses to
    /// place a page. The pages before that page are then placed.
    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError>;

    /// Places zeros in the pages of `run`, like [`place`](Self::place).
    ///
    /// # Errors
    /// As for `place`.
    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError>;

    /// Wakes the threads that wait for `page`, which then retry their access.
    ///
    /// # Errors
    /// If the host refuses.
    fn wake(&self, region: RegionId, page: PageIndex) -> Result<(), VmError>;

    /// Ends demand paging. After this call, every page that is still missing reads as zeros, and no
    /// access causes a fault. Does nothing if [`begin`](Self::begin) was not called.
    ///
    /// Before the guest is started, any thread of the engine may call this method. Afterwards, only
    /// fault threads and the threads of the engine's caller may call it.
    ///
    /// # Errors
    /// If the host cannot end demand paging for a part of the memory.
    fn end(&self) -> Result<(), VmError>;
}
