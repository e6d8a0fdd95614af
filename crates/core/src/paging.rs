//! Demand paging: memory whose pages are placed while the guest runs.

use crate::VmError;
use crate::{PageIndex, PageRun, PageSet, RegionId};
use std::fmt::Debug;
use std::time::Duration;

/// Access to a missing page. The thread that made the access sleeps until the page is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Region of the page.
    pub region: RegionId,
    /// The page.
    pub page: PageIndex,
    /// True for a write.
    pub write: bool,
    /// The vCPU that sleeps. `None` for another thread of the VMM, or if the thread is unknown.
    pub vcpu: Option<u32>,
}

/// Result of placing a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placed {
    /// Pages that were missing before the call.
    pub pages: u64,
    /// Pages that were already present before the call. The call does not change them.
    pub already_present: u64,
}

/// Guest memory whose pages are placed while the guest runs. Postcopy and a lazy restore need this
/// trait.
///
/// A page is missing from [`begin`](Self::begin) until it is placed, which happens once. A thread
/// that touches the page before that (a vCPU, a device, a system call, the VMM) sleeps in the
/// kernel and makes a [`Fault`]. A page that is not in the set given to `begin`, and is not
/// populated because the guest never touched it, makes faults as well. The engine answers such a
/// fault with [`place_zeros`](Self::place_zeros).
///
/// Each fault belongs to a shard by its address, so that several threads can take faults without a
/// common queue. All methods may be called from all threads at the same time. No method touches
/// guest memory: the access could sleep until the page is placed.
///
/// # Dropping
/// The guest runs from [`started`](Self::started) to [`end`](Self::end). If the value is dropped in
/// between, no page may be made up: a thread that waits for a page must not read zeros. The engine
/// drops its `Arc` when a postcopy is abandoned. The VM keeps another one, and calls `end` when the
/// vCPUs and devices of the lost guest can no longer act on what they read.
pub trait DemandPaging: Send + Sync + Debug {
    /// Returns the number of shards: at least 1. It does not change.
    fn shards(&self) -> usize;

    /// Returns the shard of `page`: 0 to `shards() - 1`.
    fn shard_of(&self, region: RegionId, page: PageIndex) -> usize;

    /// Returns the number of pages of a unit: a power of two that does not change. A unit is
    /// aligned to its size within the region.
    ///
    /// A thread that touches a page sleeps until all pages of the page's unit are placed. They are
    /// placed in any order and in parts. If a unit has more than 1 page, the engine also places
    /// pages of zeros before a thread waits for them.
    fn unit_pages(&self, region: RegionId) -> u64 {
        let _ = region;
        1
    }

    /// Makes the pages of `missing` missing and discards their content. From now on, every access
    /// to a page that is not populated sleeps. The vCPUs do not run.
    ///
    /// # Errors
    /// If the host does not allow demand paging. The text says what the host lacks, and how to
    /// permit it. Memory then makes no faults, as before, but the content of pages of `missing` may
    /// be gone.
    fn begin(&self, missing: &PageSet) -> Result<(), VmError>;

    /// Tells the memory that the guest runs: from now until [`end`](Self::end) its vCPUs wait for
    /// single pages. The thread that started the guest calls this, at most once between `begin` and
    /// `end`, or late, after `end`. An implementation may give the vCPUs another scheduling policy.
    /// The default does nothing.
    fn started(&self) {}

    /// Waits for the next fault of `shard`. Returns `None` if there was none `within` that time,
    /// or if [`interrupt`](Self::interrupt) was called.
    ///
    /// # Errors
    /// If the host does not answer.
    fn next_fault(&self, shard: usize, within: Duration) -> Result<Option<Fault>, VmError>;

    /// Ends every [`next_fault`](Self::next_fault) that waits now. The next call of each thread
    /// returns without waiting.
    fn interrupt(&self);

    /// Places a copy of `bytes`, which are whole pages, as the pages of `run`. Pages that are
    /// present stay as they are.
    ///
    /// A page appears as a whole. The call wakes the threads that wait for one of the pages, or,
    /// with larger units, those that wait for a unit that is now complete.
    ///
    /// # Errors
    /// If the run is not in the region, if `bytes` has another length, or if the host refuses. The
    /// pages before the refused page are then placed.
    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError>;

    /// Places zeros in the pages of `run`, like [`place`](Self::place).
    ///
    /// # Errors
    /// As for `place`.
    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError>;

    /// Wakes the threads that wait for `page`. They try the access again.
    ///
    /// # Errors
    /// If the host refuses.
    fn wake(&self, region: RegionId, page: PageIndex) -> Result<(), VmError>;

    /// Ends demand paging. Every page that is still missing reads as zeros from now on, and no
    /// access makes a fault. Does nothing if [`begin`](Self::begin) was not called.
    ///
    /// Any thread of the engine may call it before the guest was started. After that, only fault
    /// threads and the caller's threads do.
    ///
    /// # Errors
    /// If the host refuses for some memory.
    fn end(&self) -> Result<(), VmError>;
}
