//! Encoding and decoding of the migration protocol, without sockets and without unsafe code.
//!
//! A migration has one control channel and one or more bulk channels; a postcopy also has urgent
//! channels. Each channel is a byte stream that starts with a [`Hello`] and its [`HelloReply`]. The
//! control channel then carries [`ToTarget`] and [`ToSource`] messages. A bulk channel carries
//! frames in one direction. A frame has a fixed header ([`FrameHeader`]), a table with runs and
//! digests ([`Table`]), and the content of the pages. An urgent channel carries frames to the
//! target, and each [`Request`] for a page to the source. `docs/protocol.md` describes all of these
//! formats.
//!
//! Because all input comes from a peer, each length is compared with its limit before it is used,
//! and the decoders allocate no more than these limits permit. Integers are little-endian.
//!
//! ```
//! use vmferry_wire::{FEATURES, Hello, MigrationId, RefusalCode, Role, Token, VERSION_MAX, VERSION_MIN, negotiate};
//!
//! let hello = Hello {
//!     version_min: VERSION_MIN,
//!     version_max: VERSION_MAX,
//!     features: FEATURES,
//!     migration: MigrationId([7; 16]),
//!     role: Role::Control,
//!     index: 0,
//!     token: Token([0; 16]),
//!     arbiter: 0,
//! };
//! let received = Hello::decode(&hello.encode()).expect("these bytes are a hello");
//! assert_eq!(received, hello);
//! assert!(negotiate(&received).is_ok());
//!
//! // A peer that speaks only newer versions is refused with the reason.
//! let newer = Hello { version_min: VERSION_MAX + 1, version_max: VERSION_MAX + 1, ..hello };
//! assert_eq!(negotiate(&newer), Err(RefusalCode::Version));
//! ```
#![forbid(unsafe_code)]

mod carrier;
mod control;
mod error;
mod frame;
mod hello;
#[cfg(any(test, feature = "hostile"))]
pub mod hostile;
mod request;
mod snapshot;
mod working_set;

pub use carrier::{
    CARRIER, LANE_ROOM, MAX_LANE_ROOM, MAX_LANES, MAX_PIECE_BYTES, PIECE_HEADER_BYTES, Piece, PieceKind,
};
pub use control::{
    CONTROL_HEADER_BYTES, ControlHeader, FaultLatency, LocalRegion, MAX_BUCKETS, MAX_CONTROL_BYTES,
    MAX_DESCRIPTION_BYTES, MAX_LATENCIES, MAX_MISSING_BYTES, MAX_NAMED_RUNS, MAX_SECTIONS, MAX_STATE_BYTES,
    MAX_STREAM_BYTES, MAX_STREAMS, MAX_UNKNOWN_BYTES, MissingPages, Mode, PagingFigures, RegionPage,
    RegionRun, ToSource, ToTarget, decode_control, encode_control,
};
pub use error::{MAX_DETAIL_CHARS, Refusal, RefusalCode, WireError};
pub use frame::{
    Content, Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, HASH_BYTES, MAX_CONTENT_BYTES,
    MAX_FRAME_PAGES, MAX_FRAME_RUNS, MAX_SEGMENTS, MAX_TABLE_BYTES, RunEntry, RunKind, Segment, Table,
    TableWriter,
};
pub use hello::{
    FEATURE_COSTS, FEATURE_DESCRIPTION, FEATURE_KNOWN_PAGES, FEATURE_LOCAL_MEMORY, FEATURE_PAUSED,
    FEATURE_SEGMENTS, FEATURE_STREAMS, FEATURE_TOUCHED, FEATURE_TRIAL, FEATURES, HELLO_BYTES, Hello,
    HelloReply, MigrationId, Role, Token, VERSION_MAX, VERSION_MIN, arbiter_digest, negotiate,
};
pub use request::{MAX_AHEAD, REQUEST_BYTES, Request};
pub use snapshot::{
    BaseName, MAX_MACHINE_BYTES, MAX_STATE_PART_BYTES, PageEntry, PageTable, PartSum, RegionOffsets,
    SNAPSHOT_HEADER_BYTES, SNAPSHOT_VERSION, SnapshotBase, SnapshotError, SnapshotHeader, SnapshotMap,
    SnapshotPart, SnapshotRegion, TABLE_BYTES, TABLE_PAGES, TableIndex, TableKind, decode_part,
    encode_machine, encode_state,
};
pub use working_set::{MAX_WORKING_SET_BYTES, MAX_WORKING_SET_RUNS, WorkingSet, WorkingSetError};

use crc_fast::{CrcAlgorithm, checksum};

/// Returns the checksum that protects headers and control messages (CRC-64/NVME).
fn crc(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// Reader of little-endian fields from a slice whose length was checked before.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("fixed layouts are sliced to their size");
        self.0 = rest;
        *field
    }
    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
