//! What goes wrong with missing pages.

use vmferry_core::{MAX_REGIONS, PageRun, RegionId, VmError};
use vmferry_sys::SysError;

/// Why pages cannot come while the guest runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// The host cannot do it for this guest at all.
    #[error("pages cannot come while the guest runs: {0}")]
    Unavailable(#[source] SysError),
    /// The host refused a step.
    #[error("{region}: {source}")]
    Host {
        /// The region that it was about.
        region: RegionId,
        /// What the host said.
        source: SysError,
    },
    /// A stripe's userfaultfd gives no answer.
    #[error("waiting for faults of stripe {stripe}: {source}")]
    Wait {
        /// Which.
        stripe: usize,
        /// What the host said.
        source: std::io::Error,
    },
    /// The regions cannot be one guest's memory.
    #[error(
        "missing pages need 1 to {MAX_REGIONS} regions of whole pages that do not overlap, each id once; not {0}"
    )]
    Regions(String),
    /// A stripe that does not exist.
    #[error("there is no stripe {stripe}, only {have}")]
    NoStripe {
        /// Which.
        stripe: usize,
        /// How many there are.
        have: usize,
    },
    /// A region that is not there.
    #[error("{0} is not among the memory whose pages may be missing")]
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
    /// Content whose length is not that of its pages.
    #[error("{run} of {region} are {} bytes, but {bytes} were given", run.bytes())]
    Content {
        /// The region.
        region: RegionId,
        /// The pages.
        run: PageRun,
        /// How many bytes came.
        bytes: usize,
    },
    /// A set of pages that is not of this memory.
    #[error("{region} has {have} pages, but the set of missing pages speaks of {bits}")]
    Length {
        /// The region.
        region: RegionId,
        /// How many pages it has.
        have: u64,
        /// How many the set speaks of.
        bits: u64,
    },
    /// It was begun already.
    #[error("pages are missing already; end that first")]
    Begun,
    /// A page came although none is missing.
    #[error("no page of {0} is missing: begin first")]
    NotBegun(RegionId),
    /// Huge pages cannot be mapped a second time.
    #[error(
        "{region}: its huge pages cannot be mapped a second time, to be written before the guest sees them: {source}"
    )]
    Alias {
        /// The region.
        region: RegionId,
        /// What the host said.
        source: std::io::Error,
    },
    /// A page of a memfd that does not go away.
    #[error(
        "{region}: {run} cannot be dropped: a huge page of the memfd is in use; set \
         /sys/kernel/mm/transparent_hugepage/shmem_enabled to never, or use anonymous memory"
    )]
    Sticky {
        /// The region.
        region: RegionId,
        /// The pages.
        run: PageRun,
    },
    /// The mapping changed at every attempt to place a page.
    #[error("{region}: {page:#x} cannot be placed: the mapping is being changed all the time")]
    Unstable {
        /// The region.
        region: RegionId,
        /// The index of the page.
        page: u64,
    },
    /// A fault outside the memory that was registered.
    #[error("the host reports a fault at {0:#x}, which is not guest memory")]
    Stray(u64),
}

impl FaultError {
    /// For `map_err`: `source`, about `region`.
    pub(crate) fn host(region: RegionId) -> impl FnOnce(SysError) -> Self {
        move |source| Self::Host { region, source }
    }
}

impl From<FaultError> for VmError {
    fn from(error: FaultError) -> Self {
        Self::new(error)
    }
}
