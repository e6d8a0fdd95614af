//! Regions of guest memory as they are mapped in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_core::RegionId;

/// Backing of a mapping, which decides how its pages are dropped.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. Shared anonymous memory is a memfd without a name and does not
    /// belong to this variant.
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
    /// A memfd of huge pages of 2 MiB (`MFD_HUGETLB | MFD_HUGE_2MB`), mapped shared, in whole huge
    /// pages.
    HugeMemfd {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
}

/// Region of guest memory, mapped readable and writable in this process.
#[derive(Debug, Clone)]
pub struct PagedRegion {
    /// Id of the region in the migration.
    pub id: RegionId,
    /// Address of the first byte in this process, at a page boundary.
    pub host: u64,
    /// Length of the region in bytes, whole pages.
    pub len: u64,
    /// Backing of the mapping.
    pub backing: Backing,
}
