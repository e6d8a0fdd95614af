//! Errors of a snapshot file, with the damaged part and its offset.

use vmferry_core::{LayoutError, PageIndex, PageRun, RegionId};

/// Part of a snapshot file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotPart {
    /// First 4096 bytes of the file.
    Header,
    /// Description of the machine.
    Machine,
    /// Device state.
    State,
    /// Index of a region: the checksums of its tables.
    Index(RegionId),
    /// Table of a region with the digests of the given pages.
    Table(RegionId, PageRun),
    /// Content of a page.
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

/// Error of a snapshot file that cannot be decoded, or of a part that cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file does not start with the bytes of a snapshot.
    #[error("this is not a snapshot of a guest (its first bytes are {0:02x?})")]
    Foreign([u8; 8]),
    /// The file was never completed: its header, which is written last, is empty.
    #[error("this snapshot was never finished: its header is empty")]
    Unfinished,
    /// The file has another format version.
    #[error("the snapshot is of version {0}, this vmferry reads version {ours}", ours = super::SNAPSHOT_VERSION)]
    Version(u16),
    /// The file needs features that this build does not know.
    #[error("the snapshot needs features that this vmferry does not have ({0:#x})")]
    Features(u64),
    /// A checksum is wrong.
    #[error("the {part} at byte {at:#x} is damaged (its checksum is wrong)")]
    Damaged {
        /// Damaged part.
        part: SnapshotPart,
        /// Offset of the part in the file, in bytes.
        at: u64,
    },
    /// The length of the file differs from the length in its header.
    #[error("the file has {has} bytes, and the snapshot in it {wants}: it was cut off, or is not whole yet")]
    Length {
        /// Length of the file in bytes.
        has: u64,
        /// Length according to the header, in bytes.
        wants: u64,
    },
    /// A field has a value that the format does not allow.
    #[error("the {part} says {what} = {value}, allowed is {allowed}")]
    Field {
        /// Part that contains the field.
        part: SnapshotPart,
        /// Name of the field.
        what: &'static str,
        /// Value of the field.
        value: u64,
        /// Allowed values.
        allowed: &'static str,
    },
    /// The regions in the header are not a valid layout of guest memory.
    #[error("the header's memory cannot be a guest's: {0}")]
    Layout(#[from] LayoutError),
    /// A part cannot be decoded although its checksum is correct.
    #[error("the {part} at byte {at:#x} cannot be read: {why}")]
    Unreadable {
        /// Part that cannot be decoded.
        part: SnapshotPart,
        /// Offset of the part in the file, in bytes.
        at: u64,
        /// Message of the decoder.
        why: String,
    },
    /// A part that is to be written is larger than the format allows.
    #[error("the {part} of {bytes} bytes is too large for a snapshot (at most {limit})")]
    TooLarge {
        /// Part that is too large.
        part: SnapshotPart,
        /// Size in bytes.
        bytes: usize,
        /// Maximum size in bytes.
        limit: usize,
    },
}
