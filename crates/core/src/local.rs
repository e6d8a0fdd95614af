//! Memory that source and target map at the same time.

use crate::RegionId;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Memory of one region as part of a file that another process of this host can map: a memfd, on
/// pages of the kernel or of the host's pool of huge pages.
#[derive(Debug, Clone)]
pub struct SharedRegion {
    /// Number of the region.
    pub region: RegionId,
    /// Length of the region in bytes.
    pub len: u64,
    /// File that contains the memory. It must be sealed against shrinking (`F_SEAL_SHRINK`,
    /// fcntl(2)), because an access beyond the end of a file ends the process that makes it.
    pub file: Arc<OwnedFd>,
    /// Position of the first byte of the region in the file, in bytes.
    pub offset: u64,
}
