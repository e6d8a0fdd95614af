//! Errors of trackers.

use vmferry_core::{PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Error that a dirty tracker returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The kernel refused an operation on a region.
    #[error("tracking writes to {region}: {source}")]
    Host {
        /// Region of the operation.
        region: RegionId,
        /// Error that the host returned.
        source: SysError,
    },
    /// The host does not support this kind of tracking.
    #[error("tracking writes: {0}")]
    Unavailable(#[source] SysError),
    /// The windows of a measurement do not meet the conditions of
    /// [`check_windows`](crate::check_windows).
    #[error("windows of a measurement must ascend, be at most 64, and end within {longest:?}")]
    Windows {
        /// Maximum length of the last window.
        longest: std::time::Duration,
    },
    /// A harvest or a protection was requested while the tracker was not started.
    #[error("the tracker is not started")]
    NotStarted,
    /// The tracker does not track the region.
    #[error("{0} is not tracked")]
    NoRegion(RegionId),
    /// The request includes pages beyond the end of the region.
    #[error("{region} has {have} pages, not {run}")]
    NoPages {
        /// Region of the request.
        region: RegionId,
        /// Number of pages of the region.
        have: u64,
        /// Requested pages.
        run: PageRun,
    },
    /// The memory is of a kind that other processes cannot share.
    #[error(
        "{0} is neither a memfd nor a file that is mapped privately, so it cannot be shared with a branch"
    )]
    NotShareable(RegionId),
    /// The length of a bitmap differs from the length of its region.
    #[error("{region} has {have} pages, but a bitmap for it has {bits}")]
    Length {
        /// Region of the bitmap.
        region: RegionId,
        /// Number of pages of the region.
        have: u64,
        /// Number of pages that the bitmap covers.
        bits: u64,
    },
    /// The region is empty, its address or length is not a multiple of the page size, or it extends
    /// beyond the end of the address space.
    #[error("{0} is not made of whole pages")]
    NotPages(RegionId),
    /// The harvested pages could not be protected again. The tracker keeps these pages, and the
    /// next harvest tries to protect them.
    #[error("the dirty rings cannot be reset: {0}")]
    RingReset(#[source] SysError),
    /// KVM did not reset the harvested entries of a ring, although it reported no error.
    #[error("the dirty ring of vCPU {vcpu} cannot be reset: KVM keeps its entries without an error")]
    RingStuck {
        /// Index of the vCPU with the ring.
        vcpu: usize,
    },
    /// A harvest policy named a ring that does not exist.
    #[error("vCPU {vcpu} has no dirty ring: the VM has {rings} rings")]
    NoRing {
        /// Index of the ring, which is the index of its vCPU.
        vcpu: usize,
        /// Number of rings of the VM.
        rings: usize,
    },
    /// Another tracker is already started on the same dirty rings. A VM has only one set of rings,
    /// so only one tracker can use them at a time.
    #[error("another tracker is using the dirty rings; stop it first")]
    RingsInUse,
    /// The reaper thread could not be started.
    #[error("the reaper of the dirty rings cannot be started: {0}")]
    Reaper(#[source] std::io::Error),
}

impl TrackerError {
    /// Returns a function for `map_err` that wraps an error of the host about `region`.
    pub(crate) fn host(region: RegionId) -> impl FnOnce(SysError) -> Self {
        move |source| Self::Host { region, source }
    }
}

impl From<TrackerError> for VmError {
    fn from(error: TrackerError) -> Self {
        Self::new(error)
    }
}
