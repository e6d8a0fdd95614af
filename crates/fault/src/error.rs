//! Errors of demand paging and write protection.

use vmferry_core::{MAX_REGIONS, PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Error that demand paging or write protection returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// The host does not support demand paging for this guest.
    #[error("demand paging is not possible: {0}")]
    Unavailable(#[source] SysError),
    /// The host does not support write protection of this guest's memory.
    #[error("the memory of the running guest cannot be write-protected: {0}")]
    NoProtection(#[source] SysError),
    /// The region consists of huge pages (hugetlbfs), which cannot be write-protected page by page.
    #[error(
        "{0} consists of huge pages (hugetlbfs), which cannot be write-protected page by page: use anonymous memory or a memfd for this guest"
    )]
    HugePages(RegionId),
    /// The kernel refused an operation on a region.
    #[error("{region}: {source}")]
    Host {
        /// Region of the operation.
        region: RegionId,
        /// Error that the host returned.
        source: SysError,
    },
    /// Waiting for faults of a shard failed, or the eventfd that interrupts the wait could not be
    /// created.
    #[error("waiting for faults of shard {shard}: {source}")]
    Wait {
        /// Index of the shard.
        shard: usize,
        /// Error that the host returned.
        source: std::io::Error,
    },
    /// The regions cannot be the memory of one guest.
    #[error(
        "guest memory needs 1 to {MAX_REGIONS} regions of whole pages that do not overlap, each id once; not {0}"
    )]
    Regions(String),
    /// The shard does not exist.
    #[error("there is no shard {shard}, only {have}")]
    NoShard {
        /// Index of the shard.
        shard: usize,
        /// Number of shards.
        have: usize,
    },
    /// The region does not exist.
    #[error("{0} is not a region of this guest memory")]
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
    /// The content to place does not have the length of the pages.
    #[error("{run} of {region} are {} bytes, but {bytes} were given", run.bytes())]
    Content {
        /// Region of the pages.
        region: RegionId,
        /// Pages to place.
        run: PageRun,
        /// Number of bytes that were given.
        bytes: usize,
    },
    /// The set of missing pages does not have the length of a region, so it was made for other
    /// memory.
    #[error("{region} has {have} pages, but the set of missing pages covers {bits}")]
    Length {
        /// Region with the mismatch.
        region: RegionId,
        /// Number of pages of the region.
        have: u64,
        /// Number of pages that the set covers.
        bits: u64,
    },
    /// Demand paging, or write protection, has already begun.
    #[error("demand paging or write protection of this memory has already begun; end it first")]
    Begun,
    /// A page of a region of huge pages was placed although demand paging has not begun.
    #[error("no page of {0} is missing: begin demand paging first")]
    NotBegun(RegionId),
    /// The huge pages of a region cannot be mapped a second time, through which pages are placed.
    #[error("{region}: its huge pages cannot be mapped a second time, as placing pages requires: {source}")]
    Alias {
        /// Region of the huge pages.
        region: RegionId,
        /// Error that the host returned.
        source: std::io::Error,
    },
    /// Pages of a memfd could not be dropped, because a huge page of the memfd is in use.
    #[error(
        "{region}: {run} cannot be dropped: a huge page of the memfd is in use; set \
         /sys/kernel/mm/transparent_hugepage/shmem_enabled to never, or use anonymous memory"
    )]
    Sticky {
        /// Region of the pages.
        region: RegionId,
        /// Pages that were to be dropped.
        run: PageRun,
    },
    /// A page could not be placed, because the mapping was being changed at every attempt.
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
