//! Lanes of one connection, without the connection itself: the caller passes in the bytes from the
//! peer, and takes out the bytes for the peer.
//!
//! Each lane is a local socket. The rest of the engine uses the other end of that socket like any
//! connection. No function blocks, and the number of buffered bytes is bounded: the peer may send
//! on a lane only as many bytes as the local end has given it room for, and gets more room as the
//! bytes of the lane are read.

use socket2::{Domain, Socket, Type};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use vmferry_wire::{LANE_ROOM, MAX_LANE_ROOM, MAX_LANES, PIECE_HEADER_BYTES, Piece, PieceKind, WireError};

/// Maximum number of bytes that a lane sends in one piece. Pieces of other lanes are sent between
/// two pieces of one lane.
const PIECE: usize = 32 << 10;
/// Number of bytes that wait to be sent to the peer. At this number, lanes are not read.
const OUT_FULL: usize = 128 << 10;
/// Number of bytes that wait to be sent to the peer. At this number, no more bytes are taken from
/// the peer, because its pieces cause answers.
pub(super) const OUT_MOST: usize = 1 << 20;
/// Maximum room that the local end gives a lane: the number of bytes that a link of 1 GB/s carries
/// in 4 ms.
const ROOM_MOST: usize = 4 << 20;

/// Lanes of a connection.
#[derive(Debug)]
pub(super) struct Lanes {
    /// True if the local end opens lanes, because it is the source.
    opens: bool,
    lanes: BTreeMap<u16, Lane>,
    /// Number of lanes that were opened so far.
    opened: u32,
    /// Part of a piece's header that has arrived.
    header: Vec<u8>,
    /// Lane of the piece that is arriving, and the number of bytes of the piece that have not
    /// arrived.
    bytes: (u16, usize),
    out: OutBuffer,
    /// Lane that is read first.
    turn: u16,
}

/// Bytes for the peer. The first `sent` bytes have been sent.
#[derive(Debug, Default)]
struct OutBuffer {
    bytes: Vec<u8>,
    sent: usize,
}

impl OutBuffer {
    fn waiting(&self) -> usize {
        self.bytes.len() - self.sent
    }

    fn push_piece(&mut self, lane: u16, kind: PieceKind) {
        self.bytes.extend_from_slice(&Piece { lane, kind }.encode());
    }
}

#[derive(Debug)]
struct Lane {
    socket: Socket,
    /// Bytes of the peer that the socket has not taken.
    incoming: VecDeque<u8>,
    /// Number of bytes that the peer may still send.
    allowed: usize,
    /// Number of bytes that the socket has taken, and for which the peer was not given new room
    /// yet.
    taken: usize,
    /// Room of the peer when no bytes wait.
    window: usize,
    /// Number of bytes that may be sent to the peer.
    room: usize,
    /// True if the peer has ended its direction.
    ended: bool,
    /// True if the socket takes no more bytes, or has all of them.
    closed: bool,
    /// True if nothing more is sent to the peer.
    finished: bool,
}

fn wrong(what: &'static str, value: u64, allowed: &'static str) -> io::Error {
    io::Error::other(WireError::Field { what, value, allowed })
}

/// Returns true if the call has not failed, but must be repeated later.
fn later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Returns true if the other end of a local socket is closed, or has ended both directions.
fn hung_up(socket: &Socket) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the call gets one pollfd, which is on this stack, and does not wait.
    (unsafe { libc::poll(&raw mut poll, 1, 0) }) > 0
}

impl Lane {
    /// Writes bytes of the peer to the socket, as many as it takes.
    fn push(&mut self, number: u16, out: &mut OutBuffer) {
        while !self.closed && !self.incoming.is_empty() {
            match self.socket.send_with_flags(self.incoming.as_slices().0, libc::MSG_NOSIGNAL) {
                Ok(count) => {
                    self.incoming.drain(..count);
                    self.taken += count;
                }
                Err(error) if later(&error) => break,
                Err(_) => {
                    (self.closed, self.incoming) = (true, VecDeque::new());
                    out.push_piece(number, PieceKind::Stop);
                }
            }
        }
        if self.ended && !self.closed && self.incoming.is_empty() {
            self.closed = true;
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        // Room is given in large steps, whose size doubles as long as the socket takes all bytes.
        if !self.closed && !self.ended && self.taken >= self.window / 2 {
            let more = self.window.min(ROOM_MOST - self.window);
            out.push_piece(number, PieceKind::Room(self.taken + more));
            self.allowed += self.taken + more;
            self.window += more;
            self.taken = 0;
        }
    }

    /// Sends a piece of the socket's bytes to the peer.
    fn pull(&mut self, number: u16, out: &mut OutBuffer) {
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
                out.push_piece(number, PieceKind::End);
                // The other end may have ended only one direction. If it has ended both, the lane
                // is of no use to the peer either.
                if !self.closed && hung_up(&self.socket) {
                    (self.closed, self.incoming) = (true, VecDeque::new());
                    out.push_piece(number, PieceKind::Stop);
                }
            }
        }
    }

    /// Returns the poll events to wait for at the socket. There are none if the lane can only make
    /// progress after bytes from the peer.
    fn interest(&self, reads: bool) -> libc::c_short {
        let read = reads && !self.finished && self.room > 0;
        let write = !self.closed && !self.incoming.is_empty();
        (if read { libc::POLLIN } else { 0 }) | (if write { libc::POLLOUT } else { 0 })
    }
}

impl Lanes {
    /// Creates the lanes of a connection, without any lane. `opens` is true on the side that opens
    /// lanes.
    pub(super) fn new(opens: bool) -> Self {
        let (lanes, header) = (BTreeMap::new(), Vec::with_capacity(PIECE_HEADER_BYTES));
        Self { opens, lanes, opened: 0, header, bytes: (0, 0), out: OutBuffer::default(), turn: 0 }
    }

    /// Returns true if the local end opens lanes.
    pub(super) fn opens(&self) -> bool {
        self.opens
    }

    /// Returns true if there is no lane.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Opens a lane for `socket`, the near end of a pair made by [`pair`].
    ///
    /// # Errors
    /// If too many lanes were opened.
    pub(super) fn open(&mut self, socket: Socket) -> io::Result<()> {
        let number = self.add(socket)?;
        self.out.push_piece(number, PieceKind::Open);
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

    /// Takes bytes of the peer. Returns the far ends of the lanes that the peer opened.
    ///
    /// # Errors
    /// If the peer violates the protocol of the connection, or a socket cannot be created.
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
        // If source and target have both ended the lane, bytes of the lane may still have been in
        // flight.
        let Some(lane) = self.lanes.get_mut(&number) else { return Ok(None) };
        match kind {
            PieceKind::Bytes(count) if lane.ended || count > lane.allowed => {
                return Err(wrong("bytes on a lane", count as u64, "as many as there is room for"));
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

    /// Records that the peer has ended the connection. Each lane still passes its bytes to its
    /// socket, and then ends.
    pub(super) fn hang_up(&mut self) {
        self.out = OutBuffer::default();
        for lane in self.lanes.values_mut() {
            (lane.ended, lane.finished) = (true, true);
            let _ = lane.socket.shutdown(Shutdown::Read);
        }
    }

    /// Moves bytes between the lanes' sockets and the buffers. Removes lanes that have ended in
    /// both directions.
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
                // The next call begins with the lane that had no room this time.
                self.turn = number;
            }
        }
        self.lanes.retain(|_, lane| !(lane.closed && lane.finished));
    }

    /// Returns the lanes' sockets, with the poll events to wait for at each.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        let reads = self.out.waiting() < OUT_FULL;
        let all = self.lanes.values().map(move |lane| (lane.socket.as_raw_fd(), lane.interest(reads)));
        // A socket whose other end is closed is always ready.
        all.filter(|(_, interest)| *interest != 0)
    }

    /// Returns true if more bytes of the peer can be taken.
    pub(super) fn wants_input(&self) -> bool {
        self.out.waiting() < OUT_MOST
    }

    /// Returns the bytes for the peer.
    pub(super) fn output(&self) -> &[u8] {
        &self.out.bytes[self.out.sent..]
    }

    /// Records that `count` bytes of [`output`](Self::output) have been sent.
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

/// Creates the two ends of a lane: the near end, which does not block, and the far end.
///
/// # Errors
/// If a socket cannot be created.
pub(super) fn pair() -> io::Result<(Socket, Socket)> {
    let (near, far) = Socket::pair(Domain::UNIX, Type::STREAM, None)?;
    near.set_nonblocking(true)?;
    Ok((near, far))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
