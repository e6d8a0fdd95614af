//! Format of a snapshot file. The offset of every part is known before the part is written.
//!
//! The header has the checksums of the description of the machine, of the device state and of each
//! region's index. An index has the checksums of the tables of its region, and a table has the
//! digests of 512 pages. A reader can therefore read one page and check it down from the header,
//! without the rest. Pages of zeros are holes in the file, and so are tables of pages of zeros
//! only. `docs/protocol.md` has a diagram.
//!
//! A file is trusted as little as a peer. Offsets are not stored: they follow from the layout
//! ([`SnapshotMap`]). Lengths are checked before they are used for an allocation, and the file must
//! have the length that its header says.

mod error;
mod header;
mod map;
mod table;

pub use error::{SnapshotError, SnapshotPart};
pub use header::{
    MAX_MACHINE_BYTES, MAX_STATE_PART_BYTES, PartSum, SNAPSHOT_HEADER_BYTES, SNAPSHOT_VERSION,
    SnapshotHeader, SnapshotRegion, decode_part, encode_machine, encode_state,
};
pub use map::{RegionOffsets, SnapshotMap};
pub use table::{PageTable, TABLE_BYTES, TABLE_PAGES, TableIndex};

#[cfg(test)]
mod tests;
