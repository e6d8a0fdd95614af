//! Several channels on one connection, each divided into pieces. Source and target agree on such a
//! connection with the feature bit [`CARRIER`] in the first hello.
//!
//! Each channel on such a connection is a lane. The source opens the lanes, which are numbered from
//! 0. The two directions of a lane are separate byte streams. The sender of a stream may end it,
//! and its receiver may stop it. The sender may send [`LANE_ROOM`] bytes at first, and then only as
//! many as the receiver grants. Therefore a lane that is not read does not delay the other lanes.

use crate::{Fields, WireError, crc};

/// Feature bit of a hello: the connection carries lanes after the hello. The peer must understand
/// this bit.
pub const CARRIER: u64 = 1 << 32;
/// Length of an encoded [`Piece`] in bytes, without the bytes that follow a [`PieceKind::Bytes`].
pub const PIECE_HEADER_BYTES: usize = 24;
/// Maximum number of bytes that follow the header of a piece.
pub const MAX_PIECE_BYTES: usize = 64 << 10;
/// Number of bytes that may be sent on a new lane before the receiver grants more.
pub const LANE_ROOM: usize = 64 << 10;
/// Maximum number of bytes that a receiver may grant on a lane.
pub const MAX_LANE_ROOM: usize = 16 << 20;
/// Maximum number of lanes that may be open at the same time: a control channel, 64 bulk channels,
/// 64 urgent channels, and a probe channel.
pub const MAX_LANES: usize = 130;

const MAGIC: [u8; 4] = *b"VMFl";

/// Header of a piece, which is a part of one lane's byte stream or a message about that lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Lane of the piece.
    pub lane: u16,
    /// Content of the piece.
    pub kind: PieceKind,
}

/// Content of a [`Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceKind {
    /// The source opens the lane. Its number is one more than that of the lane opened before.
    Open,
    /// The given number of bytes of the lane follow, 1 to [`MAX_PIECE_BYTES`].
    Bytes(usize),
    /// The sender of this piece sends no more bytes on the lane.
    End,
    /// The sender of this piece accepts no more bytes of the lane.
    Stop,
    /// The sender of this piece grants the given number of further bytes, 1 to [`MAX_LANE_ROOM`].
    Room(usize),
}

impl Piece {
    /// Returns the bytes of the header.
    ///
    /// # Panics
    /// Panics if the number of bytes does not fit into 32 bits. The limits of [`PieceKind`] are
    /// checked only by [`decode`](Self::decode).
    #[must_use]
    pub fn encode(self) -> [u8; PIECE_HEADER_BYTES] {
        let (kind, value) = match self.kind {
            PieceKind::Open => (0, 0),
            PieceKind::Bytes(count) => (1, count),
            PieceKind::End => (2, 0),
            PieceKind::Stop => (3, 0),
            PieceKind::Room(count) => (4, count),
        };
        let value = u32::try_from(value).expect("within the limits of a piece");
        let mut bytes = [0; PIECE_HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = kind;
        bytes[6..8].copy_from_slice(&self.lane.to_le_bytes());
        bytes[8..12].copy_from_slice(&value.to_le_bytes());
        let sum = crc(&bytes[..PIECE_HEADER_BYTES - 8]);
        bytes[PIECE_HEADER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a header. The caller must check that the lane is open.
    ///
    /// # Errors
    /// Returns [`WireError`] if these bytes are not the header of a piece.
    pub fn decode(bytes: &[u8; PIECE_HEADER_BYTES]) -> Result<Self, WireError> {
        let (body, sum) = bytes.split_at(PIECE_HEADER_BYTES - 8);
        if body[..4] != MAGIC || sum != crc(body).to_le_bytes() {
            return Err(WireError::Damaged { what: "header of a piece" });
        }
        let mut fields = Fields(&body[4..]);
        let (kind, _, lane, value) = (fields.u8(), fields.u8(), fields.u16(), fields.u32());
        let within = |most: usize, allowed| {
            let count = usize::try_from(value).ok().filter(|count| (1..=most).contains(count));
            count.ok_or(WireError::Field { what: "bytes of a piece", value: value.into(), allowed })
        };
        let kind = match kind {
            0 => PieceKind::Open,
            1 => PieceKind::Bytes(within(MAX_PIECE_BYTES, "1 to 65536")?),
            2 => PieceKind::End,
            3 => PieceKind::Stop,
            4 => PieceKind::Room(within(MAX_LANE_ROOM, "1 to 16777216")?),
            _ => {
                return Err(WireError::Field {
                    what: "kind of a piece",
                    value: kind.into(),
                    allowed: "0 to 4",
                });
            }
        };
        Ok(Self { lane, kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [PieceKind; 7] = [
        PieceKind::Open,
        PieceKind::Bytes(1),
        PieceKind::Bytes(MAX_PIECE_BYTES),
        PieceKind::End,
        PieceKind::Stop,
        PieceKind::Room(1),
        PieceKind::Room(MAX_LANE_ROOM),
    ];

    #[test]
    fn pieces_decode_as_encoded_and_invalid_lengths_are_rejected() {
        for kind in KINDS {
            let piece = Piece { lane: 0xabcd, kind };
            assert_eq!(Piece::decode(&piece.encode()), Ok(piece));
        }
        for kind in [
            PieceKind::Bytes(0),
            PieceKind::Bytes(MAX_PIECE_BYTES + 1),
            PieceKind::Room(0),
            PieceKind::Room(MAX_LANE_ROOM + 1),
        ] {
            let error = Piece::decode(&Piece { lane: 1, kind }.encode()).unwrap_err();
            assert!(matches!(error, WireError::Field { what: "bytes of a piece", .. }), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_damaged_bit_of_a_piece_is_found(kind in 0..KINDS.len(), at in 0..PIECE_HEADER_BYTES * 8) {
            let mut bytes = Piece { lane: 3, kind: KINDS[kind] }.encode();
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert!(Piece::decode(&bytes).is_err());
        }
    }
}
