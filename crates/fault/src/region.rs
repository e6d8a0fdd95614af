//! Regions of guest memory as they are mapped in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_core::RegionId;

/// What a mapping is made of: what decides how its pages are dropped.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. (Shared anonymous memory is a memfd without a name: it is not this.)
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// The file.
        file: Arc<OwnedFd>,
        /// Where in the file the region starts, in bytes.
        offset: u64,
    },
    /// A memfd of huge pages of 2 MiB (`MFD_HUGETLB | MFD_HUGE_2MB`), mapped shared, in whole huge pages.
    HugeMemfd {
        /// The file.
        file: Arc<OwnedFd>,
        /// Where in the file the region starts, in bytes.
        offset: u64,
    },
}

/// A region of guest memory, mapped readable and writable in this process.
#[derive(Debug, Clone)]
pub struct LazyRegion {
    /// Its name in the migration.
    pub id: RegionId,
    /// Address of its first byte in this process, at a page boundary.
    pub host: u64,
    /// Its length in bytes, whole pages.
    pub len: u64,
    /// What it is made of.
    pub backing: Backing,
}
