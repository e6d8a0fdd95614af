//! What can be wrong with a snapshot file: which part, and where it lies.

use vmferry_core::{LayoutError, PageIndex, PageRun, RegionId};

/// A part of a snapshot file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotPart {
    /// The first 4096 bytes.
    Header,
    /// What the machine is like.
    Machine,
    /// The device state.
    State,
    /// A region's index: the checksums of its tables.
    Index(RegionId),
    /// A table of a region: the digests of these pages.
    Table(RegionId, PageRun),
    /// A page's content.
    Page(RegionId, PageIndex),
}

impl std::fmt::Display for SnapshotPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Header => f.write_str("header"),
            Self::Machine => f.write_str("description of the machine"),
            Self::State => f.write_str("device state"),
            Self::Index(region) => write!(f, "index of {region}"),
            Self::Table(region, run) => write!(f, "table for {region} {run}"),
            Self::Page(region, page) => write!(f, "content of {region} {page}"),
        }
    }
}

/// A file that is no snapshot, or not whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It starts otherwise.
    #[error("this is no snapshot of a guest (its first bytes are {0:02x?})")]
    Foreign([u8; 8]),
    /// It was never finished: the header is written last.
    #[error("this snapshot was never finished: its header is empty")]
    Unfinished,
    /// It is of another version.
    #[error("the snapshot is of version {0}, this vmferry reads version {ours}", ours = super::SNAPSHOT_VERSION)]
    Version(u16),
    /// It needs something that this build does not know.
    #[error("the snapshot needs features that this vmferry does not have ({0:#x})")]
    Features(u64),
    /// A checksum is wrong.
    #[error("the {part} at byte {at:#x} is damaged (its checksum is wrong)")]
    Damaged {
        /// Which part.
        part: SnapshotPart,
        /// Where it begins in the file, in bytes.
        at: u64,
    },
    /// It is shorter, or longer, than it says.
    #[error("the file has {has} bytes, and the snapshot in it {wants}: it was cut off, or is not whole yet")]
    Length {
        /// The file's bytes.
        has: u64,
        /// What its header asks for.
        wants: u64,
    },
    /// A field has a value that the format does not allow.
    #[error("the {part} says {what} = {value}, allowed is {allowed}")]
    Field {
        /// Where the field is.
        part: SnapshotPart,
        /// Which field.
        what: &'static str,
        /// What it has.
        value: u64,
        /// What it may have.
        allowed: &'static str,
    },
    /// The regions are no guest's memory.
    #[error("the header's memory cannot be a guest's: {0}")]
    Layout(#[from] LayoutError),
    /// A part does not decode although its checksum is right.
    #[error("the {part} at byte {at:#x} cannot be read: {why}")]
    Unreadable {
        /// Which part.
        part: SnapshotPart,
        /// Where it begins in the file, in bytes.
        at: u64,
        /// What the decoder says.
        why: String,
    },
    /// A part of ours is larger than the format allows.
    #[error("the {part} of {bytes} bytes is too large for a snapshot (at most {limit})")]
    TooLarge {
        /// Which part.
        part: SnapshotPart,
        /// Its size in bytes.
        bytes: usize,
        /// The most there may be.
        limit: usize,
    },
}
