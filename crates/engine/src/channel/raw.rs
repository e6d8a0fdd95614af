//! Connected socket that sends from and receives into guest memory without a copy in user space.

use super::iobuf::{IoBuf, consume, skip_empty};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

/// Maximum number of buffers that the kernel takes in one call (UIO_MAXIOV).
const MOST_BUFS: usize = 1024;

/// Error of a send, with the information whether any byte reached the kernel.
#[derive(Debug)]
pub(crate) struct SendError {
    /// True if no byte of this send reached the kernel, so that the peer cannot have received any
    /// part of the message.
    pub(crate) nothing_left: bool,
    pub(crate) error: io::Error,
}

impl SendError {
    /// Returns the error of encoding the message, or `None` if another step failed.
    pub(crate) fn wire_error(&self) -> Option<&vmferry_wire::WireError> {
        self.error.get_ref()?.downcast_ref()
    }
}

/// Connected stream socket. Sending and receiving are independent and may be done from two threads.
#[derive(Debug)]
pub(super) struct RawStream {
    fd: OwnedFd,
}

/// Interval of TCP keepalive probes, well below the shortest time for which firewalls and address
/// translators are known to keep a silent connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Returns true if `socket`, a stream socket, is a TCP socket and not a Unix or vsock socket.
pub(super) fn is_tcp(socket: &socket2::Socket) -> io::Result<bool> {
    use socket2::Domain;
    Ok([Domain::IPV4, Domain::IPV6].contains(&socket.domain()?))
}

impl AsFd for RawStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl RawStream {
    pub(super) fn new(socket: socket2::Socket) -> io::Result<Self> {
        if is_tcp(&socket)? {
            // Control messages are small and must not be delayed. Pages fill whole segments anyway.
            socket.set_tcp_nodelay(true)?;
            // Channels for pages are silent while a guest waits for its disk, or needs nothing.
            // Firewalls between the hosts must not forget the connection.
            let alive = socket2::TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE / 4);
            // Not the keepalive but `peer_timeout` must decide when the peer counts as lost,
            // however long that timeout is. Therefore the number of probes is the maximum, 127
            // (tcp(7)).
            let alive = alive.with_retries(127);
            socket.set_tcp_keepalive(&alive)?;
        }
        Ok(Self { fd: socket.into() })
    }

    pub(super) fn into_socket(self) -> socket2::Socket {
        self.fd.into()
    }

    /// Sets the time without progress after which a send or a receive fails. `None` means no limit.
    pub(super) fn set_timeouts(&self, receive: Option<Duration>, send: Option<Duration>) -> io::Result<()> {
        let socket = socket2::SockRef::from(&self.fd);
        socket.set_read_timeout(receive)?;
        socket.set_write_timeout(send)
    }

    /// Shuts down both directions. Threads that wait in this stream return, on source and target.
    pub(super) fn shutdown(&self) {
        // The call fails only if the peer has closed the connection first.
        let _ = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Both);
    }

    /// Ends the sending direction. Bytes that were already sent still arrive, and receiving
    /// continues.
    pub(super) fn finish(&self) {
        let _ = socket2::SockRef::from(&self.fd).shutdown(std::net::Shutdown::Write);
    }

    /// Sends all of `bufs`. The content of `bufs` is used up.
    pub(super) fn send(&self, mut bufs: &mut [IoBuf<'_>]) -> Result<(), SendError> {
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

    /// Sends `bytes`, and fails after the time `within`, even if the peer reads slowly but
    /// continuously.
    pub(super) fn send_bytes_within(&self, bytes: &[u8], within: Duration) -> Result<(), SendError> {
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

    /// Waits until the socket accepts more bytes, or has failed. Returns `TimedOut` after the time
    /// `left`.
    fn wait_for_room(&self, left: Duration) -> io::Result<()> {
        let millis = libc::c_int::try_from(left.as_millis()).unwrap_or(libc::c_int::MAX);
        if millis == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the call gets one pollfd, which is on this stack.
        if unsafe { libc::poll(&raw mut poll, 1, millis) } < 0 {
            return interrupted(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Fills all of `bufs`. The content of `bufs` is used up. Returns `UnexpectedEof` if the peer
    /// ends the stream before all of `bufs` is filled. If there is a `deadline`, returns `TimedOut`
    /// at that time, and changes the receive timeout.
    pub(super) fn receive(&self, mut bufs: &mut [IoBuf<'_>], deadline: Option<Instant>) -> io::Result<()> {
        while let Some(rest) = skip_empty(bufs) {
            bufs = rest;
            deadline.map_or(Ok(()), |deadline| self.receive_until(deadline))?;
            match self.call(bufs, libc::MSG_WAITALL, recvmsg) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => consume(bufs, received),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
        Ok(())
    }

    /// Returns true for TCP. The kernel can pace such a stream, and knows which bytes have arrived.
    pub(super) fn is_tcp(&self) -> bool {
        is_tcp(&socket2::SockRef::from(&self.fd)).unwrap_or(false)
    }

    /// Returns true if bytes can be received without waiting, or the stream has ended.
    pub(super) fn has_input(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the call gets one pollfd, which is on this stack, and does not wait.
        (unsafe { libc::poll(&raw mut poll, 1, 0) }) > 0
    }

    /// Waits at most `time` for the peer to end the stream. Returns true if the peer has, even if
    /// there are bytes left to be read.
    pub(super) fn hung_up_within(&self, time: Duration) -> bool {
        let millis = libc::c_int::try_from(time.as_millis()).unwrap_or(libc::c_int::MAX);
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: the call gets one pollfd, which is on this stack. An error need not be handled:
        // the caller asks again.
        (unsafe { libc::poll(&raw mut poll, 1, millis) }) > 0
    }

    /// Waits until bytes can be received, or the stream has ended. Returns false if nothing arrived
    /// before `until`.
    pub(super) fn wait_for_input(&self, until: Instant) -> io::Result<bool> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let time = libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the call gets one pollfd and one time, which are on this stack, and no signal
            // mask.
            match unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, std::ptr::null()) } {
                0 => return Ok(false),
                1.. => return Ok(true),
                _ => interrupted(io::Error::last_os_error())?,
            }
        }
    }

    /// Receives the bytes that are available, at least one and at most the length of `bytes`.
    pub(super) fn receive_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
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

    /// Requests that the kernel records when bytes arrive (`SO_TIMESTAMPNS`, socket(7)), for
    /// [`receive_stamped`](Self::receive_stamped).
    pub(super) fn stamp_arrivals(&self) -> io::Result<()> {
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

    /// Receives at least one byte into `bytes`. Returns the number of bytes, and when the kernel
    /// received the last of them, if known.
    ///
    /// `flags` may be `MSG_WAITALL`, which fills `bytes` unless the call is interrupted.
    pub(super) fn receive_stamped(
        &self,
        bytes: &mut [u8],
        flags: libc::c_int,
    ) -> io::Result<(usize, Option<SystemTime>)> {
        loop {
            // The array is aligned as a cmsghdr, with room for one timespec.
            let mut control = [0u64; 8];
            // SAFETY: msghdr is plain data, and all zero is its empty value.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            let mut bufs = [IoBuf::from_bytes_mut(bytes)];
            message.msg_iov = bufs.as_mut_ptr().cast();
            message.msg_iovlen = bufs.len();
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = size_of_val(&control) as _;
            match usize::try_from(recvmsg(self.fd.as_raw_fd(), &mut message, flags)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => return Ok((received, arrival(&message))),
                Err(_) => interrupted(io::Error::last_os_error()).map_err(timed_out)?,
            }
        }
    }

    /// Sets the receive timeout so that the next receive waits until `deadline`. Returns `TimedOut`
    /// if `deadline` has passed.
    fn receive_until(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The kernel counts in microseconds, and takes zero as no limit.
        socket2::SockRef::from(&self.fd).set_read_timeout(Some(left.max(Duration::from_millis(1))))
    }

    /// Receives the bytes that are available, without waiting. Returns `WouldBlock` if there are
    /// none.
    #[cfg(feature = "tls")]
    pub(super) fn receive_now(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.call(&mut [IoBuf::from_bytes_mut(bytes)], libc::MSG_DONTWAIT, recvmsg) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Waits until bytes can be received, or the stream has ended. If there is a `deadline`, waits
    /// at most until then, and changes the receive timeout. Otherwise waits at most for the receive
    /// timeout.
    #[cfg(feature = "tls")]
    pub(super) fn wait(&self, deadline: Option<Instant>) -> io::Result<()> {
        deadline.map_or(Ok(()), |deadline| self.receive_until(deadline))?;
        loop {
            // Peeking at a byte waits in the same way as receiving it, with the same timeout.
            match self.call(&mut [IoBuf::from_bytes_mut(&mut [0])], libc::MSG_PEEK, recvmsg) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map(drop).map_err(timed_out),
            }
        }
    }

    /// Copies the next bytes of the stream to `bytes` without removing them from the stream, and
    /// returns their number. The number is less than the length of `bytes` at `deadline`, or if the
    /// stream ends.
    pub(super) fn peek(&self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            self.receive_until(deadline)?;
            let mut bufs = [IoBuf::from_bytes_mut(bytes)];
            match self.call(&mut bufs, libc::MSG_PEEK | libc::MSG_WAITALL, recvmsg) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map_err(timed_out),
            }
        }
    }

    fn call(
        &self,
        bufs: &mut [IoBuf<'_>],
        flags: libc::c_int,
        call: impl Fn(libc::c_int, &mut libc::msghdr, libc::c_int) -> isize,
    ) -> io::Result<usize> {
        // SAFETY: msghdr is plain data, and all zero is its empty value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = bufs.as_mut_ptr().cast();
        message.msg_iovlen = bufs.len().min(MOST_BUFS);
        let moved = call(self.fd.as_raw_fd(), &mut message, flags);
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

fn sendmsg(fd: libc::c_int, message: &mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: `message` points at IoBufs (repr(transparent) iovec), whose bytes are borrowed and
    // mapped for as long as the IoBufs live. The kernel only reads them.
    unsafe { libc::sendmsg(fd, message, flags) }
}

fn recvmsg(fd: libc::c_int, message: &mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: as in `sendmsg`. The kernel writes, and every IoBuf that is received into was made
    // from a unique borrow or from guest memory (`from_bytes` is documented as send-only, and this
    // module's callers keep that).
    unsafe { libc::recvmsg(fd, message, flags) }
}

/// Size of a timespec in bytes.
const TIMESPEC: u32 = 16;
const _: () = assert!(size_of::<libc::timespec>() == TIMESPEC as usize);

/// Returns the time at which the kernel received the bytes of `message`, if the message contains
/// it.
fn arrival(message: &libc::msghdr) -> Option<SystemTime> {
    // SAFETY: `message` was filled by recvmsg. The macro reads only within its control bytes.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    if header.is_null() {
        return None;
    }
    // SAFETY: the first header lies completely within the control bytes, as the macro has checked.
    let kind = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
    // SAFETY: the macro computes a length from a length.
    let len = unsafe { libc::CMSG_LEN(TIMESPEC) };
    if kind != (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, len as _) {
        return None;
    }
    // SAFETY: the data of the header are a timespec, by its kind and length, and not necessarily
    // aligned.
    let time = unsafe { libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned() };
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
}

/// Returns the time `within` from now. If the clock cannot represent it, returns the time one year
/// from now.
pub(super) fn after(within: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(within).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

/// Ignores an interruption by a signal, after which the call is made again.
fn interrupted(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

/// Converts `WouldBlock`, with which the kernel reports a socket timeout, to `TimedOut`.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}
