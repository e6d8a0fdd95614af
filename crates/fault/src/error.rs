//! Errors of demand paging.

use vmferry_core::{MAX_REGIONS, PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Error of demand paging.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// The host does not support demand paging for this guest.
    #[error("demand paging is not possible: {0}")]
    Unavailable(#[source] SysError),
    /// The host refused a step.
    #[error("{region}: {source}")]
    Host {
        /// Region of the step.
        region: RegionId,
        /// Error that the host returned.
        source: SysError,
    },
    /// Waiting for faults on the userfaultfd of a shard failed.
    #[error("waiting for faults of shard {shard}: {source}")]
    Wait {
        /// Number of the shard.
        shard: usize,
        /// Error that the host returned.
        source: std::io::Error,
    },
    /// The regions cannot be the memory of one guest.
    #[error(
        "missing pages need 1 to {MAX_REGIONS} regions of whole pages that do not overlap, each id once; not {0}"
    )]
    Regions(String),
    /// The shard does not exist.
    #[error("there is no shard {shard}, only {have}")]
    NoShard {
        /// Number of the shard.
        shard: usize,
        /// Number of shards.
        have: usize,
    },
    /// The region does not exist.
    #[error("{0} is not a region of the memory for demand paging")]
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
    /// The length of the content differs from the length of its pages.
    #[error("{run} of {region} are {} bytes, but {bytes} were given", run.bytes())]
    Content {
        /// Region of the pages.
        region: RegionId,
        /// Pages to place.
        run: PageRun,
        /// Number of bytes that were given.
        bytes: usize,
    },
    /// The set of pages belongs to other memory.
    #[error("{region} has {have} pages, but the set of missing pages covers {bits}")]
    Length {
        /// Region with the mismatch.
        region: RegionId,
        /// Number of pages of the region.
        have: u64,
        /// Number of pages that the set covers.
        bits: u64,
    },
    /// Demand paging has already begun.
    #[error("demand paging has already begun; end it first")]
    Begun,
    /// A page was placed although demand paging has not begun.
    #[error("no page of {0} is missing: begin demand paging first")]
    NotBegun(RegionId),
    /// Huge pages cannot be mapped a second time.
    #[error("{region}: its huge pages cannot be mapped a second time, as placing pages requires: {source}")]
    Alias {
        /// Region of the huge pages.
        region: RegionId,
        /// Error that the host returned.
        source: std::io::Error,
    },
    /// A page of a memfd stays after it was dropped.
    #[error(
        "{region}: {run} cannot be dropped: a huge page of the memfd is in use; set \
         /sys/kernel/mm/transparent_hugepage/shmem_enabled to never, or use anonymous memory"
    )]
    Sticky {
        /// Region of the pages.
        region: RegionId,
        /// Pages that stay.
        run: PageRun,
    },
    /// The mapping changed at every attempt to place a page.
    #[error("{region}: {page:#x} cannot be placed: the mapping changed at every attempt")]
    Unstable {
        /// Region of the page.
        region: RegionId,
        /// Index of the page.
        page: u64,
    },
    /// The host reported a fault outside the registered memory.
    #[error("the host reports a fault at {0:#x}, which is not guest memory")]
    Stray(u64),
}

impl FaultError {
    /// Returns a function for `map_err` that wraps an error of the host about `region`.
    pub(crate) fn host(region: RegionId) -> impl FnOnce(SysError) -> Self {
        move |source| Self::Host { region, source }
    }
}

impl From<FaultError> for VmError {
    fn from(error: FaultError) -> Self {
        Self::new(error)
    }
}
