//! Carrier, which carries all channels of a migration on one connection.
//!
//! A caller may have only one connected socket for a migration, like a program that manages QEMU.
//! The channels are then lanes of that connection ([`lanes`]). Each lane is a local socket pair:
//! the engine uses the far end of the pair like a separate connection, and one thread moves the
//! bytes between the near ends and the connection. Source and target agree on lanes in the hello of
//! the connection ([`CARRIER`](vmferry_wire::CARRIER)).

#[cfg(feature = "hostile")]
#[cfg_attr(
    not(test),
    expect(
        clippy::expect_used,
        clippy::indexing_slicing,
        reason = "tests run this, and a failure is to end them"
    )
)]
mod hostile;
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "positions in buffers of its own, which `hostile.rs` drives with any bytes"
    )
)]
mod lanes;

#[cfg(feature = "hostile")]
pub use hostile::drive_lanes;

use super::raw::is_tcp;
use super::tcp;
use lanes::Lanes;
use socket2::Socket;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_thread::{Role, spawn};

/// Maximum number of bytes that are read from the connection at a time.
const READ: usize = 128 << 10;
/// Maximum number of unsent bytes in the socket of the connection. The number is limited, because
/// messages of the control channel wait behind these bytes.
const UNSENT: u32 = 256 << 10;
/// Time after which the target closes a connection that carries no lane.
const IDLE: Duration = Duration::from_secs(5);
/// Maximum time for which the source waits until the target has read all bytes, after the last lane
/// has ended.
const LAST: Duration = Duration::from_secs(1);

/// Source end of a connection that carries lanes. The connection ends when this value is dropped
/// and all lanes have ended.
#[derive(Debug)]
pub(super) struct Carrier {
    shared: Arc<LaneRequests>,
    /// Socket that wakes the thread. When this socket is closed, the thread knows that no more
    /// lanes will be opened.
    wake: UnixStream,
}

#[derive(Debug, Default)]
struct LaneRequests(Mutex<Opening>);

/// Lanes that the thread must open.
#[derive(Debug, Default)]
struct Opening {
    near: Vec<Socket>,
    /// True if the thread has ended, and the connection with it.
    ended: bool,
}

impl Opening {
    fn end(&mut self) {
        (self.ended, self.near) = (true, Vec::new());
    }
}

impl LaneRequests {
    fn lock(&self) -> MutexGuard<'_, Opening> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Carrier {
    /// Starts a thread that carries lanes on `link`. Source and target must have agreed on lanes.
    ///
    /// # Errors
    /// If the thread or a socket cannot be created.
    pub(super) fn start(link: Socket) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let shared = Arc::<LaneRequests>::default();
        let own = Arc::clone(&shared);
        let mut side = Side::new(link, true)?;
        let work = move || {
            let ended = side.carry(Some((&woken, &own)), &mut drop);
            say_why(&ended);
            own.lock().end();
        };
        spawn(Role::Listener, "source-carrier", work)?;
        Ok(Self { shared, wake })
    }

    /// Opens a lane, and returns its far end.
    ///
    /// # Errors
    /// If the connection has ended, or a socket cannot be created.
    pub(super) fn open(&self) -> io::Result<Socket> {
        let (near, far) = lanes::pair()?;
        let mut opening = self.shared.lock();
        if opening.ended {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the connection has ended"));
        }
        opening.near.push(near);
        drop(opening);
        // The write fails only if the thread has been woken already, or has ended.
        let _ = io::Write::write(&mut &self.wake, &[0]);
        Ok(far)
    }
}

/// Carries lanes on `link` at the target, until the connection ends or carries no lane for a while.
/// Passes the far end of each lane to `take`.
///
/// # Errors
/// If the socket cannot be used.
pub(super) fn carry(link: Socket, mut take: impl FnMut(Socket)) -> io::Result<()> {
    say_why(&Side::new(link, false)?.carry(None, &mut take));
    Ok(())
}

fn say_why(ended: &io::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!("a connection that carries all channels has ended: {error}");
    }
}

/// One end of the connection, and its lanes.
struct Side {
    link: Socket,
    lanes: Lanes,
    buffer: Box<[u8]>,
    /// Time at which the thread found that the last lane has ended. `None` while there are lanes:
    /// the thread may sleep for as long as they are silent.
    idle_since: Option<Instant>,
    /// True if nothing more is sent, because all lanes have ended and the peer must end the
    /// connection.
    finished: bool,
    /// True if the peer has ended the connection.
    gone: bool,
}

impl Side {
    fn new(link: Socket, opens: bool) -> io::Result<Self> {
        link.set_nonblocking(true)?;
        if is_tcp(&link)? {
            link.set_tcp_nodelay(true)?;
            tcp::set_unsent_limit(link.as_fd(), UNSENT)?;
        }
        let buffer = vec![0; READ].into_boxed_slice();
        Ok(Self { link, lanes: Lanes::new(opens), buffer, idle_since: None, finished: false, gone: false })
    }

    /// Carries lanes until the connection ends. At the source, opens the lanes that are requested
    /// through `requests`.
    fn carry(
        &mut self,
        requests: Option<(&UnixStream, &LaneRequests)>,
        take: &mut dyn FnMut(Socket),
    ) -> io::Result<()> {
        let mut more = requests.is_some();
        loop {
            self.lanes.serve();
            self.send()?;
            if self.is_over(more)? {
                return Ok(());
            }
            let (woken, input) = self.wait(requests.filter(|_| more).map(|(woken, _)| woken))?;
            if let (true, Some((wake, shared))) = (woken, requests) {
                more = !matches!((&*wake).read(&mut [0; 64]), Ok(0));
                let near = std::mem::take(&mut shared.lock().near);
                near.into_iter().try_for_each(|near| self.lanes.open(near))?;
            }
            if input && !self.receive(take)? {
                self.lanes.hang_up();
                break;
            }
        }
        if let Some((_, shared)) = requests {
            shared.lock().end();
        }
        // Bytes that the peer sent before it ended the connection are still passed to the lanes.
        while !self.lanes.is_empty() {
            self.lanes.serve();
            self.wait(None)?;
        }
        Ok(())
    }

    /// Returns true if the connection must end. `more` is true if the source may still open lanes.
    fn is_over(&mut self, more: bool) -> io::Result<bool> {
        let now = Instant::now();
        if !self.lanes.is_empty() || !self.lanes.output().is_empty() {
            self.idle_since = None;
            return Ok(false);
        }
        let opens = self.lanes.opens();
        if opens && !more && !self.finished {
            self.finished = true;
            self.link.shutdown(Shutdown::Write)?;
        }
        let longest = if self.finished { LAST } else { IDLE };
        let since = *self.idle_since.get_or_insert(now);
        Ok((self.finished || !opens) && now.duration_since(since) >= longest)
    }

    /// Waits until the thread can make progress. Returns whether new lanes are requested, and
    /// whether bytes can be read from the connection.
    fn wait(&self, woken: Option<&UnixStream>) -> io::Result<(bool, bool)> {
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let input = if self.lanes.wants_input() { libc::POLLIN } else { 0 };
        let output = if self.lanes.output().is_empty() { 0 } else { libc::POLLOUT };
        let wake = entry(woken.map_or(-1, AsRawFd::as_raw_fd), libc::POLLIN);
        let link = if self.gone { -1 } else { self.link.as_raw_fd() };
        let mut all = vec![wake, entry(link, input | output)];
        all.extend(self.lanes.sockets().map(|(fd, events)| entry(fd, events)));
        // Without lanes the thread wakes to check the time.
        let longest = if self.lanes.is_empty() { 100 } else { -1 };
        // SAFETY: `all` has this number of entries, for descriptors that are open.
        if unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, longest) } < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok((false, false)) } else { Err(error) };
        }
        // An error of the connection is found when it is read.
        let ready = |entry: &libc::pollfd, what| entry.revents & (what | libc::POLLERR | libc::POLLHUP) != 0;
        let [wake, link, ..] = all.as_slice() else { return Ok((false, false)) };
        Ok((ready(wake, libc::POLLIN), ready(link, libc::POLLIN) && self.lanes.wants_input()))
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.lanes.output().is_empty() {
            match self.link.send_with_flags(self.lanes.output(), libc::MSG_NOSIGNAL) {
                Ok(count) => self.lanes.sent(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads the bytes that are available on the connection. Returns false if the peer has ended
    /// the connection.
    fn receive(&mut self, take: &mut dyn FnMut(Socket)) -> io::Result<bool> {
        match (&self.link).read(&mut self.buffer) {
            Ok(0) => {
                self.gone = true;
                return Ok(false);
            }
            Ok(count) => {
                self.lanes.take(self.buffer.get(..count).unwrap_or_default())?.into_iter().for_each(take)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc::channel;
    use vmferry_testkit::{PATIENCE, wait};
    use vmferry_wire::{Piece, PieceKind};

    /// Returns a carrier, and the far ends that arrive at its target.
    fn carried(link: (Socket, Socket)) -> (Carrier, std::sync::mpsc::Receiver<Socket>) {
        let (sender, arrived) = channel();
        let target = link.1;
        std::thread::spawn(move || carry(target, |socket| sender.send(socket).unwrap()).unwrap());
        (Carrier::start(link.0).unwrap(), arrived)
    }

    fn tcp_pair() -> (Socket, Socket) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (here.into(), listener.accept().unwrap().0.into())
    }

    /// After a silence of all lanes, source and target end them at about the same time. The source
    /// must still be able to use the connection again.
    #[test]
    fn connection_is_idle_from_the_end_of_its_last_lane_on() {
        let (link, _peer) = Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        let mut side = Side::new(link, false).unwrap();
        let mut far = side.lanes.take(&Piece { lane: 0, kind: PieceKind::Open }.encode()).unwrap();
        assert!(!side.is_over(false).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        far.clear();
        side.lanes.serve();
        let output = side.lanes.output().len();
        side.lanes.sent(output);
        let ended = Instant::now();
        assert!(side.lanes.is_empty() && !side.is_over(false).unwrap());
        assert!(side.idle_since.unwrap() >= ended, "the silence of the lanes counts as idle");
    }

    #[test]
    fn a_lane_that_is_not_read_delays_no_other_lane() {
        for link in [tcp_pair(), Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap()] {
            let (carrier, arrived) = carried(link);
            let (mut stuck, mut moving) = (carrier.open().unwrap(), carrier.open().unwrap());
            let (not_read, mut read) =
                (arrived.recv_timeout(PATIENCE).unwrap(), arrived.recv_timeout(PATIENCE).unwrap());
            stuck.set_nonblocking(true).unwrap();
            read.set_read_timeout(Some(PATIENCE)).unwrap();
            moving.set_read_timeout(Some(PATIENCE)).unwrap();
            // The loop ends when nothing more fits, far below this bound.
            let filled = (0..1024).any(|_| stuck.write(&[7; 65536]).is_err());
            assert!(filled, "64 MiB wait on a lane that is not read");
            let sent: Vec<u8> =
                (0..8u32 << 20).map(|at| at.wrapping_mul(0x9e37_79b9).to_le_bytes()[3]).collect();
            let bytes = sent.clone();
            let writer = std::thread::spawn(move || {
                moving.write_all(&bytes).unwrap();
                let mut answer = [0; 2];
                moving.read_exact(&mut answer).unwrap();
                answer
            });
            let mut got = vec![0; sent.len()];
            read.read_exact(&mut got).unwrap();
            assert!(got == sent, "bytes of a lane are out of order");
            read.write_all(b"ok").unwrap();
            assert_eq!(writer.join().unwrap(), *b"ok");
            drop(not_read);
        }
    }

    #[test]
    fn ends_of_lanes_and_of_the_connection_reach_the_peer() {
        let (here, there) = tcp_pair();
        let cut = here.try_clone().unwrap();
        let (carrier, arrived) = carried((here, there));
        let (mut one, mut two) = (carrier.open().unwrap(), carrier.open().unwrap());
        let (mut first, second) =
            (arrived.recv_timeout(PATIENCE).unwrap(), arrived.recv_timeout(PATIENCE).unwrap());
        for socket in [&one, &two, &first] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        // One direction ends, and the other continues.
        one.write_all(b"last").unwrap();
        one.shutdown(Shutdown::Write).unwrap();
        let mut text = Vec::new();
        first.read_to_end(&mut text).unwrap();
        assert_eq!(text, b"last");
        first.write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        one.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        // A far end that is dropped ends both directions.
        drop(second);
        assert_eq!(two.read(&mut [0]).unwrap(), 0);
        two.set_write_timeout(Some(PATIENCE)).unwrap();
        let error = (0..1024).find_map(|_| two.write(&[0; 65536]).err()).unwrap();
        assert!(
            matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset),
            "{error}"
        );
        // A connection that is cut ends all lanes.
        cut.shutdown(Shutdown::Both).unwrap();
        assert_eq!(one.read(&mut [0]).unwrap(), 0);
        assert_eq!(first.read(&mut [0]).unwrap(), 0);
        wait("the end of the connection to be known", || carrier.open().is_err());
    }

    #[test]
    fn source_ends_the_connection_after_its_last_byte() {
        let (carrier, arrived) = carried(tcp_pair());
        let mut lane = carrier.open().unwrap();
        let mut far = arrived.recv_timeout(PATIENCE).unwrap();
        drop(carrier);
        let writer = std::thread::spawn(move || lane.write_all(&vec![3; 3 << 20]).unwrap());
        let mut got = Vec::new();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        far.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), 3 << 20);
        writer.join().unwrap();
        drop(far);
        // The thread of the target has ended, and has dropped its sender.
        assert!(arrived.recv_timeout(PATIENCE).is_err());
    }
}
