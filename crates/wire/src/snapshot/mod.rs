//! Format of a snapshot file, in which the offset of every part is known before the part is
//! written.
//!
//! The header contains the checksums of the machine description, of the device state, and of the
//! index of each region. An index contains the checksums of the tables of its region, and a table
//! contains the digests of 512 pages. Therefore a reader can read and verify a single page without
//! the other pages: the header verifies the index, the index verifies the table, and the table
//! verifies the page. Pages of zeros are holes in the file, and so are tables whose pages are all
//! zero. `docs/protocol.md` has a diagram.
//!
//! An *increment* contains only the pages that differ from those of another snapshot, its base. A
//! table has a word for the pages of the base, and a table whose pages are all those of the base is
//! a hole. The base may be an increment itself.
//!
//! A snapshot file is not trusted, just as a peer is not. Offsets are not stored, because they
//! follow from the layout ([`SnapshotMap`]). Lengths are checked before they are used for an
//! allocation, and the file must have the length that its header gives.

mod error;
mod header;
mod map;
mod table;

pub use error::{SnapshotError, SnapshotPart};
pub use header::{
    BaseName, MAX_MACHINE_BYTES, MAX_STATE_PART_BYTES, PartSum, SNAPSHOT_HEADER_BYTES, SNAPSHOT_VERSION,
    SnapshotBase, SnapshotHeader, SnapshotRegion, decode_part, encode_machine, encode_state,
};
pub use map::{RegionOffsets, SnapshotMap};
pub use table::{PageEntry, PageTable, TABLE_BYTES, TABLE_PAGES, TableIndex, TableKind};

#[cfg(test)]
mod tests;
