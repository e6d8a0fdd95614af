//! Dirty tracking: finds the pages that the guest wrote.

use crate::{PageRun, PageSet, RegionId, VmError};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;

/// Method of finding the pages that the guest writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// KVM's dirty bitmap with manual protection: cleared chunk by chunk.
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

/// Tracker of the pages that were written by the guest, by the VMM, or by the kernel for either of
/// them.
///
/// # Contract
/// The following holds for every page `p` between [`start`](Self::start) and [`stop`](Self::stop).
/// Without this rule, pages are lost.
///
/// > After [`Protect::protect`] has returned for `p`, every later write to `p` is reported by a
/// > later harvest.
///
/// The engine reads `p` only after `protect` has returned for `p`. There are two kinds of trackers:
///
/// - A tracker that protects pages again while it harvests them (write protection) has an empty
///   `protect`.
/// - A tracker that leaves pages writable until it is told otherwise (KVM's bitmap with manual
///   protection) does its work in `protect`, chunk by chunk, right before the pages are read. No
///   lock is then held for long.
pub trait DirtyTracker: Send {
    /// Returns the kind of this tracker, for reports.
    fn kind(&self) -> TrackerKind {
        TrackerKind::Custom
    }

    /// Starts tracking. The engine sends every page once after this call, so earlier writes need
    /// not be reported.
    ///
    /// # Errors
    /// If the host cannot track this memory. The guest is then as before.
    fn start(&mut self) -> Result<(), VmError>;

    /// Adds to `dirty` the pages written since they were last protected, and forgets these writes.
    /// `dirty` may have pages in it already. A page whose harvest failed is reported again by the
    /// next harvest.
    ///
    /// # Errors
    /// If the host no longer answers. The pages that were collected before the failure are in
    /// `dirty`.
    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError>;

    /// Returns the part of this tracker that channel threads call before they read pages.
    fn protector(&self) -> Arc<dyn Protect>;

    /// Returns the cost of dirty rings since [`start`](Self::start), for reports, or `None` for a
    /// tracker without rings.
    fn ring(&self) -> Option<RingFigures> {
        None
    }

    /// Stops tracking, so that the guest runs at its full speed. [`Protect::protect`] is not called
    /// any more.
    ///
    /// The guest may stay on this host, because the migration failed or was only a measurement. A
    /// tracker that shares its record of writes with the VMM leaves that record as
    /// [`start`](Self::start) found it, and gives the VMM the pages that it took out of the record.
    /// The trackers of `vmferry-dirty` do so with `LogSlot::returned_pages`.
    ///
    /// # Errors
    /// If the host refuses. The guest still runs, perhaps slower.
    fn stop(&mut self) -> Result<(), VmError>;
}

/// Protects pages right before they are read: see [`DirtyTracker`]. The threads of all bulk
/// channels and the thread that runs the migration call it at the same time.
pub trait Protect: Send + Sync {
    /// Returns the size of a chunk, in pages: a power of two that does not change. No run that the
    /// engine gives to [`protect`](Self::protect) crosses a multiple of this number.
    fn chunk_pages(&self) -> u64 {
        512
    }

    /// Protects those pages of `chunk` that are set in `pages`, a bitmap of the whole region. After
    /// the return, a later harvest reports every write to them.
    ///
    /// Pages that are not set in `pages` must stay as they are. A write to such a page that is
    /// already recorded must not be forgotten.
    ///
    /// # Errors
    /// If the host refuses. The migration fails, and the guest continues to run.
    fn protect(&self, region: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError>;
}

/// [`Protect`] of a tracker that needs no protection before the read: its harvest protects pages
/// again, or takes marks that later writes set again.
#[derive(Debug, Clone, Copy, Default)]
pub struct NothingToProtect;

impl Protect for NothingToProtect {
    fn protect(&self, _: RegionId, _: PageRun, _: &Bitmap) -> Result<(), VmError> {
        Ok(())
    }
}

/// Cost of dirty rings since tracking was started.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RingFigures {
    /// Entries of each ring.
    pub entries: u32,
    /// Name of the harvest policy.
    pub policy: String,
    /// Number of times that a vCPU stopped because its ring was full.
    pub full_exits: u64,
    /// Time that vCPUs did not run because of full rings, summed over all vCPUs, in microseconds.
    pub full_stall_us: u64,
    /// Harvests of a ring, by the reaper or by the vCPU itself.
    pub harvests: u64,
    /// CPU time of the reaper, in milliseconds.
    pub reaper_cpu_ms: f64,
    /// Figures of each vCPU.
    pub vcpus: Vec<VcpuRing>,
}

/// Share of one vCPU in [`RingFigures`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VcpuRing {
    /// Number of times that the vCPU stopped because its ring was full.
    pub full_exits: u64,
    /// Time that the vCPU did not run because its ring was full, in microseconds.
    pub full_stall_us: u64,
    /// Longest of these stalls, in microseconds.
    pub full_stall_max_us: u64,
    /// Harvests of the vCPU's ring.
    pub harvests: u64,
    /// Entries harvested: pages that the vCPU wrote, each counted once per harvest.
    pub pages: u64,
}
