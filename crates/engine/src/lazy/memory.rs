//! Memory whose pages are placed while the guest already runs.

use crate::vm::VmError;
use std::fmt::Debug;
use std::time::Duration;
use vmferry_memory::{PageIndex, PageRun, PageSet, RegionId};

/// Somebody touched a page that is not there, and sleeps until it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The page's region.
    pub region: RegionId,
    /// The page.
    pub page: PageIndex,
    /// It was a write.
    pub write: bool,
    /// The vCPU that sleeps; `None` for a thread of the VMM, or if that cannot be told.
    pub vcpu: Option<u32>,
}

/// What became of a run of pages that was to be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placed {
    /// Pages that were missing and are there now.
    pub pages: u64,
    /// Pages that were there already. They are as they were: nothing is ever overwritten.
    pub there: u64,
}

/// Guest memory whose pages come while the guest runs: what a target needs for postcopy, and a lazy restore.
///
/// The life of a page: missing from [`begin`](Self::begin) on, until it is placed, once. Whoever touches it before
/// (a vCPU, a device, a system call, the VMM) sleeps in the kernel and makes a [`Fault`]. Pages that are not in the set
/// given to `begin`, but not populated either (the guest never touched them), make faults as well: they are answered
/// with [`place_zeros`](Self::place_zeros).
///
/// Faults are dealt to stripes by their address, so that several threads can take them without one queue between them
/// all; all methods may be called from all threads at once. No method touches guest memory by itself, because that
/// could sleep for as long as the page takes to come.
pub trait LazyMemory: Send + Sync + Debug {
    /// Streams of faults, at least 1; does not change.
    fn stripes(&self) -> usize;

    /// The stripe that `page` belongs to: 0 to `stripes() - 1`.
    fn stripe_of(&self, region: RegionId, page: PageIndex) -> usize;

    /// Pages of a unit: a power of two. Whoever touches a page sleeps until all pages of its unit (aligned to that many,
    /// within the region) are there, and they come in any order and in parts. Where it is more than 1, pages of zeros are
    /// placed as well before anybody waits for them. Does not change.
    fn unit_pages(&self, region: RegionId) -> u64 {
        let _ = region;
        1
    }

    /// Makes the pages of `missing` missing, whatever they held, and every access to a page that is not populated sleep
    /// from now on. The vCPUs do not run.
    ///
    /// # Errors
    /// If the host does not allow it: what is missing, and how to permit it. Memory is then without faults as before, but
    /// pages of `missing` may have been dropped.
    fn begin(&self, missing: &PageSet) -> Result<(), VmError>;

    /// The guest runs: from now until [`end`](Self::end) its vCPUs wait for single pages. Called by the thread that started
    /// the guest, at most once between `begin` and `end`, and perhaps after `end`. An implementation may have the vCPUs
    /// scheduled accordingly. The default does nothing.
    fn started(&self) {}

    /// The next fault of `stripe`; `None` if none came `within` that time, or [`interrupt`](Self::interrupt) was called.
    ///
    /// # Errors
    /// If the host does not answer.
    fn next_fault(&self, stripe: usize, within: Duration) -> Result<Option<Fault>, VmError>;

    /// Lets every `next_fault` that waits now, and each one's next call, return without waiting.
    fn interrupt(&self);

    /// Places a copy of `bytes`, which are whole pages, as the pages of `run`, each at once for whoever looks, and wakes
    /// whoever waits for one of them; of larger units, each unit when all of it is there. Pages that are there already
    /// stay as they are.
    ///
    /// # Errors
    /// If the run is not in the region, not as long as `bytes`, or the host refuses; the pages before the one it refused
    /// are placed.
    fn place(&self, region: RegionId, run: PageRun, bytes: &[u8]) -> Result<Placed, VmError>;

    /// Like [`place`](Self::place), with zeros.
    ///
    /// # Errors
    /// As for `place`.
    fn place_zeros(&self, region: RegionId, run: PageRun) -> Result<Placed, VmError>;

    /// Wakes whoever waits for `page`; the access is tried again.
    ///
    /// # Errors
    /// If the host refuses.
    fn wake(&self, region: RegionId, page: PageIndex) -> Result<(), VmError>;

    /// Ends it: every page that is still missing reads as zeros from now on, and nothing makes faults any more. Does
    /// nothing if it was not begun. Called by any thread of the engine while the guest has not been started, and afterwards
    /// by fault threads and threads of the caller only.
    ///
    /// # Errors
    /// If the host refuses for some memory.
    fn end(&self) -> Result<(), VmError>;
}
