//! What goes wrong in a tracker.

use vmferry_core::{PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Why pages cannot be tracked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The host refused.
    #[error("tracking writes to {region}: {source}")]
    Host {
        /// The region that it was about.
        region: RegionId,
        /// What the host said.
        source: SysError,
    },
    /// The host cannot track writes this way at all.
    #[error("tracking writes: {0}")]
    Unavailable(#[source] SysError),
    /// Windows of a measurement that do not ascend, or are too long.
    #[error("windows of a measurement must ascend, be at most 64, and end within {longest:?}")]
    Windows {
        /// The longest.
        longest: std::time::Duration,
    },
    /// Harvest or protect on a tracker that was not started, or was stopped.
    #[error("the tracker is not started")]
    NotStarted,
    /// A region that the tracker does not track.
    #[error("{0} is not tracked")]
    NoRegion(RegionId),
    /// Pages that the region does not have.
    #[error("{region} has {have} pages, not {run}")]
    NoPages {
        /// The region.
        region: RegionId,
        /// How many pages it has.
        have: u64,
        /// The pages asked for.
        run: PageRun,
    },
    /// A bitmap whose length is not that of its region.
    #[error("{region} has {have} pages, but a bitmap for it has {bits}")]
    Length {
        /// The region.
        region: RegionId,
        /// How many pages it has.
        have: u64,
        /// How many the bitmap speaks of.
        bits: u64,
    },
    /// A region whose address or length is not whole pages, or that is empty.
    #[error("{0} is not made of whole pages")]
    NotPages(RegionId),
    /// The pages that were harvested could not be protected again. They are kept, and the next harvest tries again.
    #[error("the dirty rings cannot be reset: {0}")]
    RingReset(#[source] SysError),
    /// KVM does not give back what was harvested from a ring, and does not say why.
    #[error("the dirty ring of vCPU {vcpu} cannot be reset: KVM keeps its entries without an error")]
    RingStuck {
        /// Whose ring.
        vcpu: usize,
    },
    /// There is one set of rings, and another tracker uses it.
    #[error("another tracker is using the dirty rings; stop it first")]
    RingsInUse,
    /// The reaper's thread could not be started.
    #[error("starting the reaper of the dirty rings: {0}")]
    Reaper(#[source] std::io::Error),
}

impl TrackerError {
    /// For `map_err`: `source`, about `region`.
    pub(crate) fn host(region: RegionId) -> impl FnOnce(SysError) -> Self {
        move |source| Self::Host { region, source }
    }
}

impl From<TrackerError> for VmError {
    fn from(error: TrackerError) -> Self {
        Self::new(error)
    }
}
