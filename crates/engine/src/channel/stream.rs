//! A connected socket that sends and receives straight out of and into guest memory.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};
use vmferry_memory::Window;

/// As many as the kernel takes at once (UIO_MAXIOV).
const MOST_BUFS: usize = 1024;

/// An `iovec`: bytes of our own or of guest memory, by address.
///
/// Guest memory is never made a `&[u8]` (another runs in it), so the standard library's `IoSlice` cannot serve.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct IoBuf<'a> {
    raw: libc::iovec,
    bytes: PhantomData<&'a ()>,
}

// SAFETY: an address and a length; what they point at is borrowed for 'a, and is either shared bytes that nobody
// writes, a unique borrow, or guest memory that everybody may access through raw addresses.
unsafe impl Send for IoBuf<'_> {}

impl<'a> IoBuf<'a> {
    /// To send `bytes`. Only [`Stream::send`] may be given it.
    pub(crate) fn from_bytes(bytes: &'a [u8]) -> Self {
        Self::raw(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// To receive into `bytes`, or to send them.
    pub(crate) fn from_bytes_mut(bytes: &'a mut [u8]) -> Self {
        Self::raw(bytes.as_mut_ptr(), bytes.len())
    }

    /// To send or receive guest memory.
    pub(crate) fn from_window(window: Window<'a>) -> Self {
        Self::raw(window.as_ptr(), window.len())
    }

    /// Bytes that it has left.
    pub(crate) fn len(&self) -> usize {
        self.raw.iov_len
    }

    /// Whether it is used up.
    pub(crate) fn is_empty(&self) -> bool {
        self.raw.iov_len == 0
    }

    /// Copies as much of `from` as fits, and goes on behind it; for a buffer that may be received into. Returns how much
    /// that was.
    pub(crate) fn put(&mut self, from: &[u8]) -> usize {
        let len = from.len().min(self.raw.iov_len);
        // SAFETY: the buffer's bytes are mapped and may be written (it was made to be received into, which callers keep, as
        // for `recvmsg`), and cannot overlap `from`, which is a shared borrow of other bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.raw.iov_base.cast(), len) };
        self.advance(len);
        len
    }

    fn raw(start: *mut u8, len: usize) -> Self {
        Self { raw: libc::iovec { iov_base: start.cast(), iov_len: len }, bytes: PhantomData }
    }

    /// Drops the first `count` bytes.
    fn advance(&mut self, count: usize) {
        // Stays within or one past the end: callers advance by at most iov_len.
        self.raw.iov_base = self.raw.iov_base.cast::<u8>().wrapping_add(count).cast();
        self.raw.iov_len -= count;
    }
}

/// Whether anything left before sending failed.
#[derive(Debug)]
pub(crate) struct SendError {
    /// Nothing of this send reached the kernel: the peer cannot have any of it.
    pub(crate) nothing_left: bool,
    pub(crate) error: io::Error,
}

impl SendError {
    /// Why the message could not even be encoded, if that is what failed.
    pub(crate) fn wire_error(&self) -> Option<&vmferry_wire::WireError> {
        self.error.get_ref()?.downcast_ref()
    }
}

/// One connected stream socket. Sending and receiving are independent and may be done from two threads.
#[derive(Debug)]
pub(crate) struct Stream {
    fd: OwnedFd,
    /// How people know the other end.
    pub(crate) peer: String,
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Stream {
    pub(crate) fn new(socket: socket2::Socket, peer: String) -> io::Result<Self> {
        if !socket.local_addr()?.is_unix() {
            // Control messages are small and waited for; pages fill whole segments anyway.
            socket.set_tcp_nodelay(true)?;
        }
        Ok(Self { fd: socket.into(), peer })
    }

    /// How long a send or a receive may make no progress; `None` for ever.
    pub(crate) fn set_timeouts(&self, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
        let socket = socket2::SockRef::from(&self.fd);
        socket.set_read_timeout(receive)?;
        socket.set_write_timeout(send)
    }

    /// Ends both directions: whoever is blocked in this stream, on either side, returns.
    pub(crate) fn shutdown(&self) {
        // Fails only where the peer was faster.
        let _ = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Both);
    }

    /// Says that nothing more will be sent; what was sent still arrives, and receiving goes on.
    pub(crate) fn finish(&self) {
        let _ = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Write);
    }

    /// Sends all of `bufs`; uses them up.
    pub(crate) fn send(&self, mut bufs: &mut [IoBuf<'_>]) -> Result<(), SendError> {
        let mut nothing_left = true;
        while let Some(rest) = skip_empty(bufs) {
            bufs = rest;
            match self.call(bufs, libc::MSG_NOSIGNAL, sendmsg) {
                Ok(sent) => {
                    nothing_left = nothing_left && sent == 0;
                    consume(bufs, sent);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(SendError { nothing_left, error: timed_out(error) }),
            }
        }
        Ok(())
    }

    /// Sends `bytes`, and gives up when that took longer than `within`, however steadily the peer drips.
    pub(crate) fn send_bytes_within(&self, bytes: &[u8], within: Duration) -> Result<(), SendError> {
        let deadline = after(within);
        let (mut bufs, mut nothing_left) = ([IoBuf::from_bytes(bytes)], true);
        while let Some(rest) = skip_empty(&mut bufs) {
            match self.call(rest, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT, sendmsg) {
                Ok(sent) => {
                    nothing_left = nothing_left && sent == 0;
                    consume(rest, sent);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let room = self.wait_for_room(left);
                    room.map_err(|error| SendError { nothing_left, error })?;
                }
                Err(error) => return Err(SendError { nothing_left, error }),
            }
        }
        Ok(())
    }

    /// Waits until the socket takes more, or fails; `TimedOut` after `left`.
    fn wait_for_room(&self, left: Duration) -> io::Result<()> {
        let millis = libc::c_int::try_from(left.as_millis()).unwrap_or(libc::c_int::MAX);
        if millis == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one pollfd, on our stack.
        if unsafe { libc::poll(&raw mut poll, 1, millis) } < 0 {
            return interrupted(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Fills all of `bufs`; uses them up. `UnexpectedEof` if the peer ended the stream before.
    pub(crate) fn receive(&self, mut bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        while let Some(rest) = skip_empty(bufs) {
            bufs = rest;
            match self.call(bufs, libc::MSG_WAITALL, recvmsg) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => consume(bufs, received),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
        Ok(())
    }

    /// Whether the kernel paces it and knows what has arrived.
    pub(crate) fn is_tcp(&self) -> bool {
        socket2::SockRef::from(&self.fd).local_addr().is_ok_and(|address| !address.is_unix())
    }

    /// Whether there is something to be received right now, or the stream has ended.
    pub(crate) fn has_input(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, on our stack; no wait.
        (unsafe { libc::poll(&raw mut poll, 1, 0) }) > 0
    }

    /// Waits at most `time` for the peer to end the stream; says whether it has, whatever is still to be read before.
    pub(crate) fn hung_up_within(&self, time: Duration) -> bool {
        let millis = libc::c_int::try_from(time.as_millis()).unwrap_or(libc::c_int::MAX);
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one pollfd, on our stack. Of an error there is no need to know: the caller asks again.
        (unsafe { libc::poll(&raw mut poll, 1, millis) }) > 0
    }

    /// Waits until there is something to be received, or the stream has ended; false if nothing came before `until`.
    pub(crate) fn wait_for_input(&self, until: Instant) -> io::Result<bool> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let time = libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd and one time, on our stack; no signal mask.
            match unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, std::ptr::null()) } {
                0 => return Ok(false),
                1.. => return Ok(true),
                _ => interrupted(io::Error::last_os_error())?,
            }
        }
    }

    /// Receives what there is, at least a byte, at most what `bytes` hold.
    pub(crate) fn receive_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut bufs = [IoBuf::from_bytes_mut(bytes)];
        loop {
            match self.call(&mut bufs, 0, recvmsg) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => return Ok(received),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
    }

    /// Asks the kernel to note when bytes arrive (`SO_TIMESTAMPNS`, socket(7)), for
    /// [`receive_stamped`](Self::receive_stamped).
    pub(crate) fn stamp_arrivals(&self) -> io::Result<()> {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads the four bytes of `on`.
        let done = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_TIMESTAMPNS,
                (&raw const on).cast(),
                4,
            )
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Fills `bytes`. Returns for how long the last of them had been in this host's kernel by then, if it knows: what a busy
    /// processor adds to a round trip is no part of the link's.
    pub(crate) fn receive_stamped(&self, bytes: &mut [u8]) -> io::Result<Option<Duration>> {
        // Aligned as a cmsghdr, with room for one timespec.
        let mut control = [0u64; 8];
        // SAFETY: msghdr is plain data; all zero is its empty value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        let mut bufs = [IoBuf::from_bytes_mut(bytes)];
        message.msg_iov = bufs.as_mut_ptr().cast();
        message.msg_iovlen = bufs.len();
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let received = recvmsg(self.fd.as_raw_fd(), &mut message, libc::MSG_WAITALL);
        let now = SystemTime::now();
        match usize::try_from(received) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => consume(&mut bufs, received),
            Err(_) => interrupted(io::Error::last_os_error()).map_err(timed_out)?,
        }
        let stamp = arrival(&message);
        // Cut short by a signal or the end: then the stamp is not that of the last byte, and the rest says so.
        if bufs[0].is_empty() {
            return Ok(stamp.and_then(|stamp| now.duration_since(stamp).ok()));
        }
        self.receive(&mut bufs)?;
        Ok(None)
    }

    /// Fills `bytes`.
    pub(crate) fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.receive(&mut [IoBuf::from_bytes_mut(bytes)])
    }

    /// Fills `bytes`, and gives up when that took longer than `within`, however steadily the peer drips. Leaves another
    /// receive timeout behind.
    pub(crate) fn receive_bytes_within(&self, bytes: &mut [u8], within: Duration) -> io::Result<()> {
        let deadline = after(within);
        let mut bufs = [IoBuf::from_bytes_mut(bytes)];
        while let Some(rest) = skip_empty(&mut bufs) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let socket = socket2::SockRef::from(&self.fd);
            // The kernel counts in microseconds, and takes none for no limit.
            socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match self.call(rest, 0, recvmsg) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => consume(rest, received),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
        Ok(())
    }

    fn call(
        &self,
        bufs: &mut [IoBuf<'_>],
        flags: libc::c_int,
        call: impl Fn(libc::c_int, &mut libc::msghdr, libc::c_int) -> isize,
    ) -> io::Result<usize> {
        // SAFETY: msghdr is plain data; all zero is its empty value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = bufs.as_mut_ptr().cast();
        message.msg_iovlen = bufs.len().min(MOST_BUFS);
        let moved = call(self.fd.as_raw_fd(), &mut message, flags);
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

fn sendmsg(fd: libc::c_int, message: &mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: `message` points at IoBufs (repr(transparent) iovec), whose bytes are borrowed and mapped for as long as
    // they live; the kernel only reads them.
    unsafe { libc::sendmsg(fd, message, flags) }
}

fn recvmsg(fd: libc::c_int, message: &mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: as in `sendmsg`; the kernel writes, and every IoBuf that is received into was made of a unique borrow or
    // of guest memory (`from_bytes` is documented as send-only, and this module's callers keep that).
    unsafe { libc::recvmsg(fd, message, flags) }
}

/// Bytes of a timespec.
const TIMESPEC: u32 = 16;
const _: () = assert!(size_of::<libc::timespec>() == TIMESPEC as usize);

/// When the kernel got what `message` received, if it says.
fn arrival(message: &libc::msghdr) -> Option<SystemTime> {
    // SAFETY: `message` was filled by recvmsg; the macro looks only within its control bytes.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    if header.is_null() {
        return None;
    }
    // SAFETY: the first header lies whole within the control bytes, as the macro has checked.
    let kind = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
    // SAFETY: a length computed from a length.
    let len = unsafe { libc::CMSG_LEN(TIMESPEC) };
    if kind != (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, len as _) {
        return None;
    }
    // SAFETY: its data are a timespec, by its kind and length; not necessarily aligned.
    let time = unsafe { libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned() };
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
}

/// The bufs from the first that has bytes; `None` when all are used up.
fn skip_empty<'a, 'b>(bufs: &'a mut [IoBuf<'b>]) -> Option<&'a mut [IoBuf<'b>]> {
    let first = bufs.iter().position(|buf| buf.raw.iov_len > 0)?;
    Some(&mut bufs[first..])
}

fn consume(bufs: &mut [IoBuf<'_>], mut moved: usize) {
    for buf in bufs {
        let here = moved.min(buf.raw.iov_len);
        buf.advance(here);
        moved -= here;
        if moved == 0 {
            return;
        }
    }
}

/// The moment `within` from now; a year for what no clock can name.
fn after(within: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(within).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

/// A signal is no failure: the call is made again.
fn interrupted(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

/// A socket timeout is reported as `WouldBlock`; people understand `TimedOut`.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
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
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let began = Instant::now();
            let error = a.receive_bytes_within(&mut [0; 80], Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(began.elapsed() < Duration::from_millis(1000), "80 drips would take 1.6 s");
            drop(a);
        });
    }

    #[test]
    fn a_peer_that_sips_is_given_up_in_time() {
        let (a, b) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while b.receive_bytes(&mut [0; 4096]).is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let began = Instant::now();
            let error = a.send_bytes_within(&vec![0; 8 << 20], Duration::from_millis(100)).unwrap_err();
            assert_eq!((error.nothing_left, error.error.kind()), (false, io::ErrorKind::TimedOut));
            assert!(began.elapsed() < Duration::from_secs(5), "2000 sips would take 40 s");
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
