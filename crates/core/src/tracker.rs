//! Dirty tracking: finds the pages that the guest wrote.

use crate::{PageRun, PageSet, RegionId, VmError};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use vmferry_bitmap::Bitmap;

/// Method of finding the pages that the guest writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// KVM's dirty log. If KVM supports manual protection, the pages are protected chunk by chunk.
    Log,
    /// KVM's dirty rings, one for each vCPU.
    Ring,
    /// Write protection by userfaultfd, read by `PAGEMAP_SCAN`.
    Wp,
    /// A tracker that the embedder provides.
    Custom,
}

impl fmt::Display for TrackerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Log => "log",
            Self::Ring => "ring",
            Self::Wp => "wp",
            Self::Custom => "custom",
        })
    }
}

/// Tracker of the pages that were written by the guest, by the VMM, or by the kernel on behalf of
/// either.
///
/// # Contract
/// The following must hold for every page `p` between [`start`](Self::start) and
/// [`stop`](Self::stop). If a tracker breaks this rule, pages are lost.
///
/// > After [`Protect::protect`] has returned for `p`, every later write to `p` is reported by a
/// > later harvest.
///
/// The engine reads `p` only after `protect` has returned for `p`. There are two kinds of trackers:
///
/// - A tracker that protects pages again while it harvests them, such as `wp`, has an empty
///   `protect`.
/// - A tracker that leaves pages writable after a harvest, such as KVM's dirty log with manual
///   protection, does its work in `protect`. The engine calls `protect` chunk by chunk, right
///   before the pages are read, so that no lock is held for long.
///
/// A tracker of the first kind may also discard writes in `protect`, as dirty rings do: see
/// [`Protect::is_useful`].
pub trait DirtyTracker: Send {
    /// Returns the kind of this tracker, for reports.
    fn kind(&self) -> TrackerKind {
        TrackerKind::Custom
    }

    /// Starts tracking. The engine sends every page once after this call, so earlier writes need
    /// not be reported.
    ///
    /// # Errors
    /// If the host cannot track this memory. The call must then have no effect on the guest.
    fn start(&mut self) -> Result<(), VmError>;

    /// Adds to `dirty` the pages written since they were last protected, and forgets these writes.
    /// `dirty` may already contain pages. If the harvest of a page fails, the next harvest reports
    /// the page again.
    ///
    /// # Errors
    /// If the host cannot report the written pages. `dirty` then contains the pages that were
    /// collected before the failure.
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError>;

    /// Returns the part of this tracker that channel threads call before they read pages.
    fn protector(&self) -> Arc<dyn Protect>;

    /// Returns the cost of dirty rings since [`start`](Self::start), for reports, or `None` for a
    /// tracker without rings.
    fn ring(&self) -> Option<RingFigures> {
        None
    }

    /// Returns the time that the last [`harvest`](Self::harvest) took to get the written pages from
    /// the kernel, for reports. Merging these pages into the set of the caller does not count. The
    /// default returns `None`, for a tracker that does not measure this time.
    fn harvest_kernel_time(&self) -> Option<Duration> {
        None
    }

    /// Stops tracking, so that the guest runs at full speed again. The engine does not call
    /// [`Protect::protect`] after this call.
    ///
    /// The guest may stay on this host, because the migration failed or was only a measurement. A
    /// tracker that shares its record of writes with the VMM leaves that record as
    /// [`start`](Self::start) found it, and gives the VMM the pages that it took out of the record.
    /// The trackers of `vmferry-dirty` do so with `LogSlot::returned_pages`.
    ///
    /// # Errors
    /// If the host cannot stop tracking. The guest continues to run, but perhaps not at full speed.
    fn stop(&mut self) -> Result<(), VmError>;
}

/// Part of a [`DirtyTracker`] that protects pages right before they are read. The threads of all
/// bulk channels and the thread that runs the migration use it concurrently.
pub trait Protect: Send + Sync {
    /// Returns the size of a chunk in pages: a power of two that never changes. No run that the
    /// engine passes to [`protect`](Self::protect) crosses a multiple of this number. The default
    /// is 512, for chunks of 2 MiB.
    fn chunk_pages(&self) -> u64 {
        512
    }

    /// Returns false if [`protect`](Self::protect) does nothing, because a later harvest reports
    /// every write since [`DirtyTracker::start`], even if its page was never passed to `protect`.
    ///
    /// The engine then determines for large parts of memory at once which pages were touched. The
    /// default returns true.
    fn is_needed(&self) -> bool {
        true
    }

    /// Returns false if [`protect`](Self::protect) has no effect at all.
    ///
    /// A tracker that returns true here and false in [`is_needed`](Self::is_needed) discards the
    /// recorded writes to a page in `protect`. A page that the guest wrote before its turn is then
    /// sent once, not twice. The engine calls `protect` right before it reads a chunk. The default
    /// returns the same as `is_needed`.
    fn is_useful(&self) -> bool {
        self.is_needed()
    }

    /// Protects those pages of `chunk` that are set in `pages`, a bitmap of the whole region. After
    /// this call has returned, a later harvest reports every write to one of these pages.
    ///
    /// Pages that are not set in `pages` must keep their state. If a write to such a page is
    /// already recorded, the record must not be lost.
    ///
    /// # Errors
    /// If the host cannot protect the pages. The migration then fails, and the guest continues to
    /// run.
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError>;
}

/// [`Protect`] of a tracker that need not protect pages before they are read, because its harvest
/// protects the pages again or takes marks that later writes set again.
#[derive(Debug, Clone, Copy, Default)]
pub struct NothingToProtect;

impl Protect for NothingToProtect {
    fn is_needed(&self) -> bool {
        false
    }

    fn protect(&self, _: RegionId, _: PageRun, _: &Bitmap) -> Result<(), VmError> {
        Ok(())
    }
}

/// Cost of dirty rings since tracking was started.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RingFigures {
    /// Number of entries of each ring.
    pub entries: u32,
    /// Name of the harvest policy.
    pub policy: String,
    /// Number of times that a vCPU stopped because its ring was full.
    pub full_exits: u64,
    /// Time for which vCPUs did not run because their rings were full, summed over all vCPUs, in
    /// microseconds.
    pub full_stall_us: u64,
    /// Number of harvests of single rings, by the reaper or by the vCPU itself.
    pub harvests: u64,
    /// CPU time that the reaper used, in milliseconds.
    pub reaper_cpu_ms: f64,
    /// Figures of the reaper.
    pub reaper: ReaperFigures,
    /// Figures of each vCPU.
    pub vcpus: Vec<VcpuRing>,
}

/// State of the reaper, the thread that harvests dirty rings between the passes.
///
/// As JSON, a state is an object with the name of the state in `state`. The object of a failed
/// reaper also has `error`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(tag = "state", content = "error", rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReaperState {
    /// No reaper runs, because tracking is off.
    #[default]
    Off,
    /// The reaper sleeps until its next look.
    Sleeping,
    /// The reaper looks at the rings and harvests.
    Working,
    /// The reaper ended with this error. vCPUs still empty their full rings, and each harvest of
    /// the engine still empties all rings. Therefore no write is lost, but the guest may run
    /// slower.
    Failed(String),
}

/// Figures of the reaper in [`RingFigures`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ReaperFigures {
    /// State of the reaper.
    #[serde(flatten)]
    pub state: ReaperState,
    /// Number of times that the reaper woke up.
    pub iterations: u64,
    /// Number of wake-ups in which the reaper harvested.
    pub harvests: u64,
    /// Length of the current sleep in microseconds, or 0 if tracking is off or the reaper failed.
    pub sleep_us: u64,
}

/// Figures of one vCPU in [`RingFigures`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VcpuRing {
    /// Number of times that the vCPU stopped because its ring was full.
    pub full_exits: u64,
    /// Time for which the vCPU did not run because its ring was full, in microseconds.
    pub full_stall_us: u64,
    /// Longest of these stalls, in microseconds.
    pub full_stall_max_us: u64,
    /// Number of harvests of the vCPU's ring.
    pub harvests: u64,
    /// Number of harvested entries. Each entry is a page that the vCPU wrote, counted once per
    /// harvest.
    pub pages: u64,
}
