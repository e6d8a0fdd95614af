//! Connection to the peer, plain or encrypted.

use super::iobuf::IoBuf;
pub(crate) use super::raw::SendError;
use super::raw::{RawStream, after};
use super::tls::{Records, Tls};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime};

/// Connected stream. Sending and receiving are independent and may be done from two threads.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: RawStream,
    records: Option<Box<Records>>,
    /// Name of the peer for messages.
    pub(crate) peer: String,
    /// Feature bits that source and target both support.
    pub(crate) features: u64,
}

/// Returns the descriptor of the socket, for settings and queries of the kernel.
impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raw.as_fd()
    }
}

impl Stream {
    /// Creates a plain stream.
    pub(crate) fn new(socket: socket2::Socket, peer: String) -> io::Result<Self> {
        Ok(Self { raw: RawStream::new(socket)?, records: None, peer, features: 0 })
    }

    /// Encrypts the stream within `time`, as the end that has connected to `host`. No byte may have
    /// been sent or received before. Changes the timeouts.
    pub(super) fn encrypt_to(&mut self, tls: &Tls, host: Option<&str>, time: Duration) -> io::Result<()> {
        self.records = Some(Box::new(Records::connect(tls, host, &self.raw, time)?));
        Ok(())
    }

    /// Encrypts the stream within `time`, as the end that has accepted the connection. No byte may
    /// have been sent or received before. Changes the timeouts.
    pub(super) fn encrypt_from(&mut self, tls: &Tls, time: Duration) -> io::Result<()> {
        self.records = Some(Box::new(Records::accept(tls, &self.raw, time)?));
        Ok(())
    }

    /// Copies the bytes that arrive within `time` to `bytes` without removing them from the stream.
    /// Returns their number, which may be less than the length of `bytes`.
    pub(super) fn peek(&self, bytes: &mut [u8], time: Duration) -> io::Result<usize> {
        self.raw.peek(bytes, after(time))
    }

    /// Returns the certificate that the peer presented. `None` for a plain stream.
    pub(crate) fn peer_certificate(&self) -> Option<&[u8]> {
        self.records.as_ref().map(|records| records.peer())
    }

    /// Returns true if the stream is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.records.is_some()
    }

    /// Converts the stream to its socket. Call this only on a plain stream, because an encrypted
    /// stream may hold bytes that were received and would be lost.
    pub(super) fn into_socket(self) -> socket2::Socket {
        self.raw.into_socket()
    }

    /// Sets the time without progress after which a send or a receive fails. `None` means no limit.
    pub(crate) fn set_timeouts(&self, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
        self.raw.set_timeouts(receive, send)
    }

    /// Shuts down both directions. Threads that wait in this stream return, on both sides.
    pub(crate) fn shutdown(&self) {
        self.raw.shutdown();
    }

    /// Ends the sending direction. What was sent still arrives, and receiving continues.
    ///
    /// An encrypted stream ends like a plain one, without a TLS alert. An alert is not needed: each
    /// message shows whether it is complete, and a stream that ends between two messages counts as
    /// a lost link, whichever end has ended it.
    pub(crate) fn finish(&self) {
        self.raw.finish();
    }

    /// Sends all of `bufs`. The content of `bufs` is used up.
    pub(crate) fn send(&self, bufs: &mut [IoBuf<'_>]) -> Result<(), SendError> {
        match &self.records {
            None => self.raw.send(bufs),
            Some(records) => records.send(bufs, |sealed| self.raw.send(&mut [IoBuf::from_bytes(sealed)])),
        }
    }

    /// Sends `bytes`. Fails after `within`, even if the peer keeps reading slowly.
    pub(crate) fn send_bytes_within(&self, bytes: &[u8], within: Duration) -> Result<(), SendError> {
        let Some(records) = &self.records else { return self.raw.send_bytes_within(bytes, within) };
        let deadline = after(within);
        records.send(&mut [IoBuf::from_bytes(bytes)], |sealed| {
            self.raw.send_bytes_within(sealed, deadline.saturating_duration_since(Instant::now()))
        })
    }

    /// Fills all of `bufs`. The content of `bufs` is used up. `UnexpectedEof` if the peer ended the
    /// stream before.
    pub(crate) fn receive(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        match &self.records {
            None => self.raw.receive(bufs, None),
            Some(records) => records.receive(bufs, &self.raw, None),
        }
    }

    /// Like [`receive`](Self::receive), but fails at `deadline`, even if the peer sends slowly but
    /// continuously. Changes the receive timeout.
    pub(crate) fn receive_before(&self, bufs: &mut [IoBuf<'_>], deadline: Instant) -> io::Result<()> {
        match &self.records {
            None => self.raw.receive(bufs, Some(deadline)),
            Some(records) => records.receive(bufs, &self.raw, Some(deadline)),
        }
    }

    /// Returns true for TCP: the kernel can pace the stream and knows which bytes have arrived.
    pub(crate) fn is_tcp(&self) -> bool {
        self.raw.is_tcp()
    }

    /// Returns true if bytes can be received without waiting, or the stream has ended.
    pub(crate) fn has_input(&self) -> bool {
        self.has_opened() || self.raw.has_input()
    }

    /// Waits at most `time` for the peer to end the stream. Returns true if the peer has, even if
    /// there are bytes left to be read.
    pub(crate) fn hung_up_within(&self, time: Duration) -> bool {
        self.raw.hung_up_within(time)
    }

    /// Waits until bytes can be received, or the stream has ended. Returns false if nothing arrived
    /// before `until`.
    pub(crate) fn wait_for_input(&self, until: Instant) -> io::Result<bool> {
        Ok(self.has_opened() || self.raw.wait_for_input(until)?)
    }

    fn has_opened(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_input())
    }

    /// Receives the bytes that are available, at least one and at most the length of `bytes`.
    pub(crate) fn receive_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match &self.records {
            None => self.raw.receive_some(bytes),
            Some(records) => records.receive_some(bytes, &self.raw),
        }
    }

    /// Requests that the kernel records when bytes arrive (`SO_TIMESTAMPNS`, socket(7)), for
    /// [`receive_stamped`](Self::receive_stamped).
    pub(crate) fn stamp_arrivals(&self) -> io::Result<()> {
        self.raw.stamp_arrivals()
    }

    /// Fills `bytes`. Returns the time for which the last byte had been in this host's kernel, if
    /// it is known.
    ///
    /// With this time, the caller can subtract the delay of a busy processor from the round trip of
    /// the link.
    pub(crate) fn receive_stamped(&self, bytes: &mut [u8]) -> io::Result<Option<Duration>> {
        let age = |stamp: SystemTime| SystemTime::now().duration_since(stamp).ok();
        let Some(records) = &self.records else {
            let (received, stamp) = self.raw.receive_stamped(bytes, libc::MSG_WAITALL)?;
            let (now, rest) = (stamp.and_then(age), bytes.get_mut(received..).unwrap_or_default());
            if rest.is_empty() {
                return Ok(now);
            }
            // A signal or the end of the stream has cut the receive short, so the stamp is not that
            // of the last byte.
            self.receive_bytes(rest)?;
            return Ok(None);
        };
        Ok(records.receive_stamped(bytes, &self.raw)?.and_then(age))
    }

    /// Fills `bytes`. Returns `UnexpectedEof` if the peer ends the stream before `bytes` is full.
    pub(crate) fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.receive(&mut [IoBuf::from_bytes_mut(bytes)])
    }

    /// Fills `bytes`, and fails after the time `within`, even if the peer sends slowly but
    /// continuously. Changes the receive timeout.
    pub(crate) fn receive_bytes_within(&self, bytes: &mut [u8], within: Duration) -> io::Result<()> {
        self.receive_before(&mut [IoBuf::from_bytes_mut(bytes)], after(within))
    }
}

#[cfg(all(test, feature = "ring"))]
impl Stream {
    /// Changes the keys of the sending direction, as TLS does after very many records.
    pub(super) fn change_keys(&self) {
        self.records.as_ref().unwrap().change_keys();
    }
}

/// Returns the two ends of a TCP connection on this host.
#[cfg(test)]
pub(crate) fn test_pair() -> (Stream, Stream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let there = listener.accept().unwrap().0;
    (Stream::new(here.into(), "there".into()).unwrap(), Stream::new(there.into(), "here".into()).unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};

    fn pair() -> (Stream, Stream) {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        (Stream::new(a, "a".into()).unwrap(), Stream::new(b, "b".into()).unwrap())
    }

    #[test]
    fn scattered_bytes_arrive_in_order_however_the_kernel_cuts_them() {
        let (a, b) = pair();
        let pieces: Vec<Vec<u8>> =
            (0..3000u32).map(|i| vec![i.to_le_bytes()[0]; (i % 700) as usize]).collect();
        let want = pieces.concat();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bufs: Vec<IoBuf<'_>> = pieces.iter().map(|p| IoBuf::from_bytes(p)).collect();
                a.send(&mut bufs).unwrap();
            });
            let mut got = vec![0; want.len()];
            let (left, right) = got.split_at_mut(12_345);
            b.receive(&mut [IoBuf::from_bytes_mut(left), IoBuf::from_bytes_mut(right)]).unwrap();
            assert!(got == want);
        });
    }

    #[test]
    fn closed_peer_is_noticed_in_both_directions() {
        let (a, b) = pair();
        drop(b);
        let error = a.send(&mut [IoBuf::from_bytes(b"x")]).unwrap_err();
        assert!(error.nothing_left);
        assert_eq!(error.error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(a.receive_bytes(&mut [0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn slow_sender_times_out() {
        let (a, b) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while b.send(&mut [IoBuf::from_bytes(b"x")]).is_ok() {
                    // The delay is at least this long, so that 80 bytes do not arrive in time but
                    // do arrive in the end.
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let error = a.receive_bytes_within(&mut [0; 80], Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            drop(a);
        });
    }

    #[test]
    fn slow_receiver_times_out() {
        let (a, b) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while b.receive_bytes(&mut [0; 4096]).is_ok() {
                    // The delay is at least this long, so that 8 MiB do not leave in time but do
                    // leave in the end.
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let error = a.send_bytes_within(&vec![0; 8 << 20], Duration::from_millis(100)).unwrap_err();
            assert_eq!((error.nothing_left, error.error.kind()), (false, io::ErrorKind::TimedOut));
            drop(a);
        });
    }

    #[test]
    fn peer_that_does_not_read_times_out_after_some_bytes_left() {
        let (a, _b) = pair();
        a.set_timeouts(Some(Duration::from_millis(20)), Some(Duration::from_millis(20))).unwrap();
        let error = a.send(&mut [IoBuf::from_bytes(&vec![0; 32 << 20])]).unwrap_err();
        assert_eq!((error.nothing_left, error.error.kind()), (false, io::ErrorKind::TimedOut));
        assert_eq!(a.receive_bytes(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
