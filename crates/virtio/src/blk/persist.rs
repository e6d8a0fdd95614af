//! The disk's saved state.

use serde::{Deserialize, Serialize};

/// A disk, apart from its registers and queue. It is at rest when it is saved, so there is no request in it: what the driver has put in
/// the ring and nobody has begun is in the ring, and what was begun is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlkSaved {
    /// Its size, by which the other side knows that it has the same disk.
    pub sectors: u64,
    /// Whether it cannot be written.
    pub read_only: bool,
    /// What it says that it is called.
    pub id: [u8; super::ID_BYTES],
    /// Whether writes may be answered before they are on stable storage, if the driver chose.
    pub writeback: bool,
}
