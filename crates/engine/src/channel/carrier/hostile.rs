//! Hostile peer of a connection that carries lanes: its pieces are derived from the input bytes.
//! For the fuzz target, and for the tests, which run it on seeded noise.

use super::lanes::{Lanes, OUT_MOST, pair};
use socket2::Socket;
use std::collections::BTreeMap;
use std::io::Read;
use vmferry_wire::{MAX_LANE_ROOM, MAX_PIECE_BYTES, PIECE_HEADER_BYTES, Piece, PieceKind};

/// Largest number of bytes that a step sends.
const MOST: usize = 1024;

/// Far end of a lane, with the bytes that the peer sent on it and those that arrived.
struct End {
    socket: Socket,
    sent: Vec<u8>,
    got: Vec<u8>,
}

impl End {
    fn new(socket: Socket) -> Self {
        socket.set_nonblocking(true).expect("a socket of this process");
        Self { socket, sent: Vec::new(), got: Vec::new() }
    }

    fn read(&mut self) {
        let _ = (&self.socket).read_to_end(&mut self.got);
        assert!(self.sent.starts_with(&self.got), "a lane delivers bytes that the peer did not send on it");
    }
}

/// Runs the steps that `bytes` encode, at the target's end of a connection and at the source's.
///
/// # Panics
/// If a lane delivers bytes that are not its own, or if the output is unbounded or not a sequence
/// of pieces.
pub fn drive_lanes(bytes: &[u8]) {
    drive(bytes, false);
    drive(bytes, true);
}

fn drive(bytes: &[u8], opens: bool) {
    let (mut lanes, mut ends) = (Lanes::new(opens), BTreeMap::new());
    for number in 0..if opens { 3u16 } else { 0 } {
        let Ok((near, far)) = pair() else { return };
        lanes.open(near).expect("three lanes");
        ends.insert(number, End::new(far));
    }
    let mut opened = if opens { 3u16 } else { 0 };
    for step in bytes.chunks(4) {
        let at = |index: usize| step.get(index).copied().unwrap_or(0);
        let (number, value) = (u16::from(at(1) % 8), u16::from_le_bytes([at(2), at(3)]));
        let count = usize::from(value) % MOST + 1;
        let kind = match at(0) % 8 {
            0 => PieceKind::Open,
            1 | 2 => PieceKind::Bytes(count),
            3 => PieceKind::End,
            4 => PieceKind::Stop,
            5 => PieceKind::Room((usize::from(value) << 8) + 1),
            6 => {
                take_output(&mut lanes);
                ends.values_mut().for_each(End::read);
                continue;
            }
            _ if value % 2 == 0 => {
                ends.remove(&number);
                continue;
            }
            _ => PieceKind::Room(MAX_LANE_ROOM),
        };
        let number = if kind == PieceKind::Open && at(1) < 192 { opened } else { number };
        let mut said = Piece { lane: number, kind }.encode().to_vec();
        if let PieceKind::Bytes(count) = kind {
            said.extend(std::iter::repeat_n(at(2), count));
            let end = ends.get_mut(&number);
            end.into_iter().for_each(|end: &mut End| end.sent.extend(std::iter::repeat_n(at(2), count)));
        }
        if at(0) == 0xff {
            said[usize::from(at(1)) % PIECE_HEADER_BYTES] ^= 1;
        }
        match lanes.take(&said) {
            Ok(far) => {
                for socket in far {
                    ends.insert(opened, End::new(socket));
                    opened += 1;
                }
            }
            Err(_) => break,
        }
        lanes.serve();
        assert!(lanes.output().len() <= OUT_MOST, "the output is unbounded");
    }
    lanes.hang_up();
    lanes.serve();
    ends.values_mut().for_each(End::read);
}

/// Takes the bytes for the peer, which must be complete pieces.
fn take_output(lanes: &mut Lanes) {
    let output = lanes.output().to_vec();
    lanes.sent(output.len());
    let mut rest = &output[..];
    while let Some((header, behind)) = rest.split_first_chunk::<PIECE_HEADER_BYTES>() {
        rest = match Piece::decode(header).expect("a piece").kind {
            PieceKind::Bytes(count) if count <= MAX_PIECE_BYTES => &behind[count..],
            _ => behind,
        };
    }
    assert!(rest.is_empty(), "an incomplete header");
}
