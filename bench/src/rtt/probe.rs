//! Probes of the pace controller over a separate socket, and their echo.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_engine::pace::{Probe, RateControl, TcpBulk};
use vmferry_engine::tcp;

/// Bytes of a probe, and of its echo.
const FRAME: usize = 64;

/// Source's end of the probes' connection.
#[derive(Debug)]
struct SocketProbe {
    socket: TcpStream,
    /// Bytes of an incomplete echo.
    partial: Vec<u8>,
}

impl Probe for SocketProbe {
    fn send(&mut self, number: u64) -> io::Result<()> {
        let mut frame = [0; FRAME];
        frame[..8].copy_from_slice(&number.to_le_bytes());
        match self.socket.write(&frame) {
            Ok(FRAME) => Ok(()),
            Ok(_) => Err(io::Error::other("part of a probe was sent")),
            // The connection is full of probes, so this probe counts as lost.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn echoes(&mut self, until: Instant, echo: &mut dyn FnMut(u64, Instant)) -> io::Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let ready = poll(&mut [PollFd::new(&self.socket.as_fd(), PollFlags::IN)], Some(&timeout))?;
            let arrived = Instant::now();
            if ready == 0 {
                return Ok(());
            }
            let mut bytes = [0; 16 * FRAME];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.partial.extend_from_slice(&bytes[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let whole = self.partial.len() / FRAME * FRAME;
            for frame in self.partial[..whole].chunks_exact(FRAME) {
                let mut number = [0; 8];
                number.copy_from_slice(&frame[..8]);
                echo(u64::from_le_bytes(number), arrived);
            }
            self.partial.drain(..whole);
        }
    }

    fn reached(&mut self) -> io::Result<bool> {
        tcp::all_acknowledged(self.socket.as_fd())
    }
}

/// Paces `bulk` by probes through `probes` until one of them fails because the target is gone.
pub(super) fn pace(bulk: &TcpStream, probes: TcpStream) -> io::Result<()> {
    probes.set_nonblocking(true)?;
    // The pace is not reduced by the answers: one per millisecond is 33 Mb/s.
    let bulk = TcpBulk::new([bulk.as_fd()], [], || true)?;
    let probe = SocketProbe { socket: probes, partial: Vec::new() };
    RateControl::new(probe, bulk).run(|| false, |_, _| {}).map(|_| ())
}

/// Echoes all bytes at the target's end until the source is gone.
pub(super) fn echo(mut socket: &TcpStream) {
    let mut bytes = [0; 16 * FRAME];
    // Acknowledges at once, as the engine's target does.
    while tcp::acknowledge_at_once(socket.as_fd()).is_ok()
        && let Ok(length @ 1..) = socket.read(&mut bytes)
    {
        if socket.write_all(&bytes[..length]).is_err() {
            return;
        }
    }
}
