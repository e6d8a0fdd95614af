//! The disk's saved state.

use serde::{Deserialize, Serialize};

/// Saved state of a disk, apart from its registers and queue. No request is part of the state,
/// because the disk is quiesced when it is saved: a request that was not begun is still in the
/// ring, and a request that was begun is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlkSaved {
    /// Size of the disk in sectors. The target compares it with the size of its own disk.
    pub sectors: u64,
    /// True if the guest cannot write to the disk.
    pub read_only: bool,
    /// ID that the disk reports.
    pub id: [u8; super::ID_BYTES],
    /// Cache mode that the driver chose, if it may choose: true if writes may be answered before
    /// they are on stable storage.
    pub writeback: bool,
}
