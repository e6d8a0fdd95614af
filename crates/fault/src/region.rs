//! Regions of guest memory as they are mapped in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_core::RegionId;

/// Kind of memory behind the mapping of a region, which decides how its pages are dropped.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. Shared anonymous memory does not belong to this variant, because
    /// the kernel implements it as an unnamed file on tmpfs.
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
    /// A memfd of 2 MiB huge pages (`MFD_HUGETLB | MFD_HUGE_2MB`), mapped shared. The address, the
    /// length and the offset of the region must be multiples of 2 MiB.
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
    /// Address of the first byte in this process, a multiple of the page size.
    pub host: u64,
    /// Length of the region in bytes, a multiple of the page size that is not 0.
    pub len: u64,
    /// Kind of memory behind the mapping.
    pub backing: Backing,
}
