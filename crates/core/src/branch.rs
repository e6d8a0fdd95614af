//! Memory of a guest at the instant at which other guests branch off.

use crate::RegionId;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bytes of a file that are, or will be, the memory of one region.
///
/// From the instant of a branch on, these bytes never change. Each process maps them privately, so
/// that a write copies the written page for the writer only.
#[derive(Debug, Clone)]
pub struct BranchRegion {
    /// Id of the region.
    pub id: RegionId,
    /// File with the bytes: a memfd, or a file on a disk.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte of the region in the file, a multiple of the page size.
    pub offset: u64,
}

/// Files that hold the memory of a guest that is to be branched.
#[derive(Debug, Clone)]
pub enum BranchMemory {
    /// The memory is these files, which the VM has mapped shared. They contain every write of the
    /// guest up to the instant, and no process changes them after that.
    Files(Vec<BranchRegion>),
    /// The guest has written pages that are in no file, because its memory is mapped privately
    /// since an earlier branch. The engine copies all memory into new files.
    Copied,
}
