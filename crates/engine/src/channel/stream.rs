//! A connection to the peer, plain or encrypted.

use super::iobuf::IoBuf;
pub(crate) use super::raw::SendError;
use super::raw::{RawStream, after};
use super::tls::{Records, Tls};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime};

/// One connected stream. Sending and receiving are independent and may be done from two threads.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: RawStream,
    records: Option<Box<Records>>,
    /// How people know the other end.
    pub(crate) peer: String,
    /// Feature bits that both ends know.
    pub(crate) features: u64,
}

/// The socket, for what is asked of the kernel.
impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raw.as_fd()
    }
}

impl Stream {
    /// A plain one.
    pub(crate) fn new(socket: socket2::Socket, peer: String) -> io::Result<Self> {
        Ok(Self { raw: RawStream::new(socket)?, records: None, peer, features: 0 })
    }

    /// Encrypts it, as the side that connected to `host`, within `time`; nothing was sent or received yet. Leaves other timeouts
    /// behind.
    pub(super) fn encrypt_to(&mut self, tls: &Tls, host: Option<&str>, time: Duration) -> io::Result<()> {
        self.records = Some(Box::new(Records::connect(tls, host, &self.raw, time)?));
        Ok(())
    }

    /// The same, as the side that was connected to.
    pub(super) fn encrypt_from(&mut self, tls: &Tls, time: Duration) -> io::Result<()> {
        self.records = Some(Box::new(Records::accept(tls, &self.raw, time)?));
        Ok(())
    }

    /// The first bytes that come, within `time`, which stay to be received; fewer where there are no more.
    pub(super) fn peek(&self, bytes: &mut [u8], time: Duration) -> io::Result<usize> {
        self.raw.peek(bytes, after(time))
    }

    /// The certificate that the peer showed; `None` of a plain one.
    pub(crate) fn peer_certificate(&self) -> Option<&[u8]> {
        self.records.as_ref().map(|records| records.peer())
    }

    /// Gives the socket back. Nothing of what it received is held here, unless the stream is
    /// encrypted.
    pub(super) fn into_socket(self) -> socket2::Socket {
        self.raw.into_socket()
    }

    /// How long a send or a receive may make no progress; `None` for ever.
    pub(crate) fn set_timeouts(&self, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
        self.raw.set_timeouts(receive, send)
    }

    /// Ends both directions: whoever is blocked in this stream, on either side, returns.
    pub(crate) fn shutdown(&self) {
        self.raw.shutdown();
    }

    /// Says that nothing more will be sent; what was sent still arrives, and receiving goes on.
    ///
    /// An encrypted stream ends like a plain one: whatever is to be known as whole says so in its own messages, and a stream
    /// that ends between them is a lost link, whoever ended it.
    pub(crate) fn finish(&self) {
        self.raw.finish();
    }

    /// Sends all of `bufs`; uses them up.
    pub(crate) fn send(&self, bufs: &mut [IoBuf<'_>]) -> Result<(), SendError> {
        match &self.records {
            None => self.raw.send(bufs),
            Some(records) => records.send(bufs, |sealed| self.raw.send(&mut [IoBuf::from_bytes(sealed)])),
        }
    }

    /// Sends `bytes`, and gives up when that took longer than `within`, however steadily the peer drips.
    pub(crate) fn send_bytes_within(&self, bytes: &[u8], within: Duration) -> Result<(), SendError> {
        let Some(records) = &self.records else { return self.raw.send_bytes_within(bytes, within) };
        let deadline = after(within);
        records.send(&mut [IoBuf::from_bytes(bytes)], |sealed| {
            self.raw.send_bytes_within(sealed, deadline.saturating_duration_since(Instant::now()))
        })
    }

    /// Fills all of `bufs`; uses them up. `UnexpectedEof` if the peer ended the stream before.
    pub(crate) fn receive(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        match &self.records {
            None => self.raw.receive(bufs),
            Some(records) => records.receive(bufs, &self.raw, None),
        }
    }

    /// Whether the kernel paces it and knows what has arrived.
    pub(crate) fn is_tcp(&self) -> bool {
        self.raw.is_tcp()
    }

    /// Whether there is something to be received right now, or the stream has ended.
    pub(crate) fn has_input(&self) -> bool {
        self.has_opened() || self.raw.has_input()
    }

    /// Waits at most `time` for the peer to end the stream; says whether it has, whatever is still to be read before.
    pub(crate) fn hung_up_within(&self, time: Duration) -> bool {
        self.raw.hung_up_within(time)
    }

    /// Waits until there is something to be received, or the stream has ended; false if nothing came before `until`.
    pub(crate) fn wait_for_input(&self, until: Instant) -> io::Result<bool> {
        Ok(self.has_opened() || self.raw.wait_for_input(until)?)
    }

    fn has_opened(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_input())
    }

    /// Receives what there is, at least a byte, at most what `bytes` hold.
    pub(crate) fn receive_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match &self.records {
            None => self.raw.receive_some(bytes),
            Some(records) => records.receive_some(bytes, &self.raw),
        }
    }

    /// Asks the kernel to note when bytes arrive (`SO_TIMESTAMPNS`, socket(7)), for
    /// [`receive_stamped`](Self::receive_stamped).
    pub(crate) fn stamp_arrivals(&self) -> io::Result<()> {
        self.raw.stamp_arrivals()
    }

    /// Fills `bytes`. Returns for how long the last of them had been in this host's kernel by then, if it knows: what a busy
    /// processor adds to a round trip is no part of the link's.
    pub(crate) fn receive_stamped(&self, bytes: &mut [u8]) -> io::Result<Option<Duration>> {
        let age = |stamp: SystemTime| SystemTime::now().duration_since(stamp).ok();
        let Some(records) = &self.records else {
            let (received, stamp) = self.raw.receive_stamped(bytes, libc::MSG_WAITALL)?;
            let (now, rest) = (stamp.and_then(age), bytes.get_mut(received..).unwrap_or_default());
            if rest.is_empty() {
                return Ok(now);
            }
            // Cut short by a signal or the end: then the stamp is not that of the last byte, and the rest says so.
            self.receive_bytes(rest)?;
            return Ok(None);
        };
        Ok(records.receive_stamped(bytes, &self.raw)?.and_then(age))
    }

    /// Fills `bytes`.
    pub(crate) fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.receive(&mut [IoBuf::from_bytes_mut(bytes)])
    }

    /// Fills `bytes`, and gives up when that took longer than `within`, however steadily the peer drips. Leaves another
    /// receive timeout behind.
    pub(crate) fn receive_bytes_within(&self, bytes: &mut [u8], within: Duration) -> io::Result<()> {
        let deadline = after(within);
        if let Some(records) = &self.records {
            let mut bufs = [IoBuf::from_bytes_mut(bytes)];
            return records.receive(&mut bufs, &self.raw, Some(deadline));
        }
        let mut received = 0;
        while let Some(rest) = bytes.get_mut(received..).filter(|rest| !rest.is_empty()) {
            received += self.raw.receive_some_before(rest, deadline)?;
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "ring"))]
impl Stream {
    /// New keys for what is sent from now on, as after very many records.
    pub(super) fn change_keys(&self) {
        self.records.as_ref().unwrap().change_keys();
    }
}

/// Two ends of a TCP connection on this host.
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
    fn a_peer_that_leaves_is_noticed_both_ways() {
        let (a, b) = pair();
        drop(b);
        let error = a.send(&mut [IoBuf::from_bytes(b"x")]).unwrap_err();
        assert!(error.nothing_left);
        assert_eq!(error.error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(a.receive_bytes(&mut [0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_peer_that_drips_is_given_up_in_time() {
        let (a, b) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while b.send(&mut [IoBuf::from_bytes(b"x")]).is_ok() {
                    // The drip: at least this long, so that 80 bytes never come in time, and do come in the end.
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let error = a.receive_bytes_within(&mut [0; 80], Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            drop(a);
        });
    }

    #[test]
    fn a_peer_that_sips_is_given_up_in_time() {
        let (a, b) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while b.receive_bytes(&mut [0; 4096]).is_ok() {
                    // The sip: at least this long, so that 8 MiB never leave in time, and do leave in the end.
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let error = a.send_bytes_within(&vec![0; 8 << 20], Duration::from_millis(100)).unwrap_err();
            assert_eq!((error.nothing_left, error.error.kind()), (false, io::ErrorKind::TimedOut));
            drop(a);
        });
    }

    #[test]
    fn a_peer_that_does_not_read_times_out_and_something_had_left() {
        let (a, _b) = pair();
        a.set_timeouts(Some(Duration::from_millis(20)), Some(Duration::from_millis(20))).unwrap();
        let error = a.send(&mut [IoBuf::from_bytes(&vec![0; 32 << 20])]).unwrap_err();
        assert_eq!((error.nothing_left, error.error.kind()), (false, io::ErrorKind::TimedOut));
        assert_eq!(a.receive_bytes(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
