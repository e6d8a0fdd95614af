//! Files with guest memory that other processes of the host can map.

use crate::RegionId;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Part of a file that is, or will be, the memory of one region. The part is as long as the region.
///
/// A handoff shares the files with the target ([`SourceVm::share_memory`]). Branches map them
/// privately ([`BranchMemory`]).
///
/// [`SourceVm::share_memory`]: crate::SourceVm::share_memory
/// [`BranchMemory`]: crate::BranchMemory
#[derive(Debug, Clone)]
pub struct RegionFile {
    /// Id of the region.
    pub region: RegionId,
    /// File that contains the part: a memfd or, for a branch, also a file on a disk.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte of the region in the file, a multiple of the page size.
    pub offset: u64,
}
