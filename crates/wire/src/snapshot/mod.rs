//! The bytes of a snapshot file: a guest at rest, every part at an offset that is known before it is written.
//!
//! The header vouches for the description of the machine, the device state and each region's index; an index vouches for
//! the tables of its region, a table for 512 pages. So one page can be read, and checked down from the header, without
//! the rest. Pages of zeros are holes, and so are tables that speak of nothing else. `docs/protocol.md` draws it.
//!
//! A file is as little trusted as a peer: the offsets are not written but follow from the layout ([`SnapshotMap`]),
//! lengths are checked before anything is allocated by them, and the file must be as long as its header says.

mod error;
mod header;
mod map;
mod table;

pub use error::{SnapshotError, SnapshotPart};
pub use header::{
    MAX_MACHINE_BYTES, MAX_STATE_PART_BYTES, PartSum, SNAPSHOT_HEADER_BYTES, SNAPSHOT_VERSION,
    SnapshotHeader, SnapshotRegion, decode_part, encode_machine, encode_state,
};
pub use map::{RegionPlace, SnapshotMap};
pub use table::{PageTable, TABLE_BYTES, TABLE_PAGES, TableIndex};

#[cfg(test)]
mod tests;
