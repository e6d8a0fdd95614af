//! The disk's saved state.

use serde::{Deserialize, Serialize};

/// State of a disk, apart from its registers and queue. The disk is quiesced when it is saved, so
/// no request is part of the state. A request that was not begun is in the ring. A request that was
/// begun is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlkSaved {
    /// Size of the disk in sectors, by which the target checks that it has the same disk.
    pub sectors: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
    /// ID that the disk reports.
    pub id: [u8; super::ID_BYTES],
    /// True if writes may be answered before they are on stable storage, if the driver chose the
    /// cache mode.
    pub writeback: bool,
}
