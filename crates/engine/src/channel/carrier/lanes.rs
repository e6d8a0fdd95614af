//! The lanes of one connection, without that connection: bytes of the peer go in, bytes for the
//! peer come out.
//!
//! Each lane is a local socket, whose other end the rest of the engine uses like any connection.
//! Nothing here waits, and what is held is bounded: a lane holds no more than the room that this
//! side has given, and a lane that is read gets more room.

use socket2::{Domain, Socket, Type};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use vmferry_wire::{LANE_ROOM, MAX_LANE_ROOM, MAX_LANES, PIECE_HEADER_BYTES, Piece, PieceKind, WireError};

/// Most bytes that a lane sends in a piece. Pieces of other lanes go between two of them.
const PIECE: usize = 32 << 10;
/// While so many bytes wait for the peer, lanes are not read.
const OUT_FULL: usize = 128 << 10;
/// While so many bytes wait for the peer, nothing more of the peer is taken. Its pieces cause
/// answers.
pub(super) const OUT_MOST: usize = 1 << 20;
/// Most room that this side gives a lane: what a link of 1 GB/s carries in 4 ms.
const ROOM_MOST: usize = 4 << 20;

/// The lanes of a connection.
#[derive(Debug)]
pub(super) struct Lanes {
    /// This side opens lanes: it is the source.
    opens: bool,
    lanes: BTreeMap<u16, Lane>,
    /// Lanes that were opened so far.
    opened: u32,
    /// What has come of a piece's header.
    header: Vec<u8>,
    /// The lane of the bytes that come, and how many are still to come.
    bytes: (u16, usize),
    out: Out,
    /// The lane that is read first.
    turn: u16,
}

/// Bytes for the peer. Those before `sent` have left.
#[derive(Debug, Default)]
struct Out {
    bytes: Vec<u8>,
    sent: usize,
}

impl Out {
    fn waiting(&self) -> usize {
        self.bytes.len() - self.sent
    }

    fn say(&mut self, lane: u16, kind: PieceKind) {
        self.bytes.extend_from_slice(&Piece { lane, kind }.encode());
    }
}

#[derive(Debug)]
struct Lane {
    socket: Socket,
    /// Bytes of the peer that the socket has not taken.
    incoming: VecDeque<u8>,
    /// Bytes that the peer may still send.
    allowed: usize,
    /// Bytes that the socket took and for which the peer was given no room yet.
    taken: usize,
    /// Room that the peer has when nothing waits here.
    window: usize,
    /// Bytes that the peer takes.
    room: usize,
    /// The peer has ended its direction.
    ended: bool,
    /// The socket takes no more, or has all that there is.
    closed: bool,
    /// Nothing more is sent to the peer.
    finished: bool,
}

fn wrong(what: &'static str, value: u64, allowed: &'static str) -> io::Error {
    io::Error::other(WireError::Field { what, value, allowed })
}

/// Whether a call is to be made again later, rather than has failed.
fn later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Whether the other end of a local socket is gone, or has ended both directions.
fn hung_up(socket: &Socket) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one pollfd, on this stack; no wait.
    (unsafe { libc::poll(&raw mut poll, 1, 0) }) > 0
}

impl Lane {
    /// Gives the socket what it takes of the peer's bytes.
    fn push(&mut self, number: u16, out: &mut Out) {
        while !self.closed && !self.incoming.is_empty() {
            match self.socket.send_with_flags(self.incoming.as_slices().0, libc::MSG_NOSIGNAL) {
                Ok(count) => {
                    self.incoming.drain(..count);
                    self.taken += count;
                }
                Err(error) if later(&error) => break,
                Err(_) => {
                    (self.closed, self.incoming) = (true, VecDeque::new());
                    out.say(number, PieceKind::Stop);
                }
            }
        }
        if self.ended && !self.closed && self.incoming.is_empty() {
            self.closed = true;
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        // Room is given in large steps, and twice as much as long as the socket takes it all.
        if !self.closed && !self.ended && self.taken >= self.window / 2 {
            let more = self.window.min(ROOM_MOST - self.window);
            out.say(number, PieceKind::Room(self.taken + more));
            self.allowed += self.taken + more;
            self.window += more;
            self.taken = 0;
        }
    }

    /// Sends the peer a piece of what the socket has.
    fn pull(&mut self, number: u16, out: &mut Out) {
        let most = self.room.min(PIECE);
        if self.finished || most == 0 {
            return;
        }
        let (at, start) = (out.bytes.len(), out.bytes.len() + PIECE_HEADER_BYTES);
        out.bytes.resize(start + most, 0);
        match (&self.socket).read(&mut out.bytes[start..]) {
            Ok(count @ 1..) => {
                self.room -= count;
                out.bytes.truncate(start + count);
                let header = Piece { lane: number, kind: PieceKind::Bytes(count) }.encode();
                out.bytes[at..start].copy_from_slice(&header);
            }
            Err(error) if later(&error) => out.bytes.truncate(at),
            _ => {
                self.finished = true;
                out.bytes.truncate(at);
                out.say(number, PieceKind::End);
                // Only one direction may have ended. Otherwise the lane is of no use to the peer
                // either.
                if !self.closed && hung_up(&self.socket) {
                    (self.closed, self.incoming) = (true, VecDeque::new());
                    out.say(number, PieceKind::Stop);
                }
            }
        }
    }

    /// What to wait for at the socket; nothing if only the peer can bring the lane on.
    fn interest(&self, reads: bool) -> libc::c_short {
        let read = reads && !self.finished && self.room > 0;
        let write = !self.closed && !self.incoming.is_empty();
        (if read { libc::POLLIN } else { 0 }) | (if write { libc::POLLOUT } else { 0 })
    }
}

impl Lanes {
    /// Begins with no lane, on the side that `opens` lanes or on the other.
    pub(super) fn new(opens: bool) -> Self {
        let (lanes, header) = (BTreeMap::new(), Vec::with_capacity(PIECE_HEADER_BYTES));
        Self { opens, lanes, opened: 0, header, bytes: (0, 0), out: Out::default(), turn: 0 }
    }

    /// Whether this side opens lanes.
    pub(super) fn opens(&self) -> bool {
        self.opens
    }

    /// Whether there is no lane.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Opens a lane for `socket`, the near end of a pair that [`pair`] made.
    ///
    /// # Errors
    /// If too many lanes were opened.
    pub(super) fn open(&mut self, socket: Socket) -> io::Result<()> {
        let number = self.add(socket)?;
        self.out.say(number, PieceKind::Open);
        Ok(())
    }

    fn add(&mut self, socket: Socket) -> io::Result<u16> {
        let number = u16::try_from(self.opened).ok().filter(|_| self.lanes.len() < MAX_LANES);
        let most = MAX_LANES as u64;
        let number =
            number.ok_or_else(|| wrong("lanes of a connection", most + 1, "130 at once, 65536 in all"))?;
        self.opened += 1;
        let lane = Lane {
            socket,
            incoming: VecDeque::new(),
            allowed: LANE_ROOM,
            taken: 0,
            window: LANE_ROOM,
            room: LANE_ROOM,
            ended: false,
            closed: false,
            finished: false,
        };
        self.lanes.insert(number, lane);
        Ok(number)
    }

    /// Takes bytes of the peer. Returns the far ends of the lanes that it opened.
    ///
    /// # Errors
    /// If the peer breaks the rules of the connection, or the host has no more sockets.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> io::Result<Vec<Socket>> {
        let mut opened = Vec::new();
        while !bytes.is_empty() {
            let (number, left) = self.bytes;
            if left > 0 {
                let (some, rest) = bytes.split_at(left.min(bytes.len()));
                self.give(number, some);
                (self.bytes.1, bytes) = (left - some.len(), rest);
                continue;
            }
            let (some, rest) = bytes.split_at((PIECE_HEADER_BYTES - self.header.len()).min(bytes.len()));
            self.header.extend_from_slice(some);
            bytes = rest;
            if let Ok(header) = self.header.as_slice().try_into() {
                let piece = Piece::decode(header).map_err(io::Error::other)?;
                self.header.clear();
                opened.extend(self.piece(piece)?);
            }
        }
        Ok(opened)
    }

    fn piece(&mut self, Piece { lane: number, kind }: Piece) -> io::Result<Option<Socket>> {
        if kind == PieceKind::Open {
            if self.opens || u32::from(number) != self.opened {
                return Err(wrong("a new lane", number.into(), "the one after the last, by the source"));
            }
            let (near, far) = pair()?;
            self.add(near)?;
            return Ok(Some(far));
        }
        if u32::from(number) >= self.opened {
            return Err(wrong("a lane", number.into(), "one that was opened"));
        }
        if let PieceKind::Bytes(count) = kind {
            self.bytes = (number, count);
        }
        // Of a lane that both sides are done with something may still have been on its way.
        let Some(lane) = self.lanes.get_mut(&number) else { return Ok(None) };
        match kind {
            PieceKind::Bytes(count) if lane.ended || count > lane.allowed => {
                return Err(wrong("bytes on a lane", count as u64, "those that there is room for"));
            }
            PieceKind::Bytes(count) => lane.allowed -= count,
            PieceKind::Room(count) if lane.room + count > MAX_LANE_ROOM => {
                return Err(wrong("room on a lane", count as u64, "up to 16 MiB"));
            }
            PieceKind::Room(count) => lane.room += count,
            PieceKind::End => {
                lane.ended = true;
                lane.push(number, &mut self.out);
            }
            PieceKind::Stop => {
                lane.finished = true;
                let _ = lane.socket.shutdown(Shutdown::Read);
            }
            PieceKind::Open => {}
        }
        Ok(None)
    }

    fn give(&mut self, number: u16, bytes: &[u8]) {
        if let Some(lane) = self.lanes.get_mut(&number).filter(|lane| !lane.closed) {
            lane.incoming.extend(bytes);
            lane.push(number, &mut self.out);
        }
    }

    /// The peer has ended the connection: each lane gives its socket what has come, and ends.
    pub(super) fn hang_up(&mut self) {
        self.out = Out::default();
        for lane in self.lanes.values_mut() {
            (lane.ended, lane.finished) = (true, true);
            let _ = lane.socket.shutdown(Shutdown::Read);
        }
    }

    /// Moves what can be moved between the lanes' sockets and this; forgets lanes that have ended
    /// both ways.
    pub(super) fn serve(&mut self) {
        let turn = self.turn;
        let later = self.lanes.range(turn..).map(|(number, _)| *number);
        let order: Vec<u16> = later.chain(self.lanes.range(..turn).map(|(number, _)| *number)).collect();
        for number in order {
            let Some(lane) = self.lanes.get_mut(&number) else { continue };
            lane.push(number, &mut self.out);
            if self.out.waiting() < OUT_FULL {
                lane.pull(number, &mut self.out);
            } else if self.turn == turn {
                // The next time it begins where it stopped for want of room.
                self.turn = number;
            }
        }
        self.lanes.retain(|_, lane| !(lane.closed && lane.finished));
    }

    /// The lanes' sockets, with what to wait for at each.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        let reads = self.out.waiting() < OUT_FULL;
        let all = self.lanes.values().map(move |lane| (lane.socket.as_raw_fd(), lane.interest(reads)));
        // A socket whose other end is gone is always ready.
        all.filter(|(_, interest)| *interest != 0)
    }

    /// Whether bytes of the peer are wanted.
    pub(super) fn wants_input(&self) -> bool {
        self.out.waiting() < OUT_MOST
    }

    /// Bytes for the peer.
    pub(super) fn output(&self) -> &[u8] {
        &self.out.bytes[self.out.sent..]
    }

    /// So many bytes of [`output`](Self::output) have left.
    pub(super) fn sent(&mut self, count: usize) {
        self.out.sent += count;
        if self.out.waiting() == 0 {
            self.out.bytes.clear();
            self.out.sent = 0;
        } else if self.out.sent > OUT_FULL {
            self.out.bytes.drain(..self.out.sent);
            self.out.sent = 0;
        }
    }
}

/// Makes the two ends of a lane on this side: the near end, which never waits, and the far end.
///
/// # Errors
/// If the host has no more sockets.
pub(super) fn pair() -> io::Result<(Socket, Socket)> {
    let (near, far) = Socket::pair(Domain::UNIX, Type::STREAM, None)?;
    near.set_nonblocking(true)?;
    Ok((near, far))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
