//! Errors of trackers.

use vmferry_core::{PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Error of a tracker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The host refused a step.
    #[error("tracking writes to {region}: {source}")]
    Host {
        /// Region of the step.
        region: RegionId,
        /// Error that the host returned.
        source: SysError,
    },
    /// The host does not support this kind of tracking.
    #[error("tracking writes: {0}")]
    Unavailable(#[source] SysError),
    /// The windows of a measurement do not ascend, are too many, or are too long.
    #[error("windows of a measurement must ascend, be at most 64, and end within {longest:?}")]
    Windows {
        /// Maximum length of a window.
        longest: std::time::Duration,
    },
    /// A harvest or protect was requested before the tracker was started or after it was stopped.
    #[error("the tracker is not started")]
    NotStarted,
    /// The tracker does not track the region.
    #[error("{0} is not tracked")]
    NoRegion(RegionId),
    /// The region does not have the pages.
    #[error("{region} has {have} pages, not {run}")]
    NoPages {
        /// Region of the request.
        region: RegionId,
        /// Number of pages of the region.
        have: u64,
        /// Requested pages.
        run: PageRun,
    },
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
    /// The address or the length of a region is not whole pages, or the region is empty.
    #[error("{0} is not made of whole pages")]
    NotPages(RegionId),
    /// The harvested pages could not be protected again. The tracker keeps them, and the next
    /// harvest tries again.
    #[error("the dirty rings cannot be reset: {0}")]
    RingReset(#[source] SysError),
    /// KVM does not return harvested entries of a ring, and reports no error.
    #[error("the dirty ring of vCPU {vcpu} cannot be reset: KVM keeps its entries without an error")]
    RingStuck {
        /// Index of the vCPU with the ring.
        vcpu: usize,
    },
    /// Another tracker uses the rings. A VM has one set of rings.
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
