//! Pages from guest memory to a socket without a copy.
//!
//! `vmsplice` puts references to the pages into a pipe, `splice` moves the references into the socket's queue; the bytes
//! are first read when the network card, or on one host the receiver, takes them. (`MSG_ZEROCOPY` would do the same but
//! copies on loopback, and wants its completions read.)
//!
//! So what arrives is the page as it is *then*, which may be newer than its digest: the guest may have written it in
//! between. That is the case that the protocol allows for anyway (traps.md 10): such a page was written after it was
//! protected, so it is dirty and comes again, and the target does not believe the damaged version until it has. Once the
//! guest has stopped nothing changes any more.

use super::stream::{IoBuf, MOST_BUFS, SendError, Stream, consume, interrupted, skip_empty, timed_out};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// What the pipe is asked to hold, in bytes: a whole frame, and the most that a user who is not root may ask for.
const PIPE_BYTES: libc::c_int = 1 << 20;
/// Fewer bytes than this are copied: it is cheaper than two more system calls.
const WORTH_IT: usize = 32 << 10;

/// The pipe between guest memory and one socket.
#[derive(Debug)]
pub(crate) struct Splicer {
    read: OwnedFd,
    write: OwnedFd,
    /// The kernel has shown that it can: after that an error is an error.
    proven: bool,
}

impl Splicer {
    /// A pipe; `None` if the host has none to give, and pages are copied.
    pub(crate) fn new() -> Option<Self> {
        let mut fds = [0; 2];
        // SAFETY: the array has room for two descriptors.
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return None;
        }
        // SAFETY: pipe2 succeeded and nobody else has these descriptors.
        let (read, write) = unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) };
        // A smaller pipe (a user with many) works too, in more steps.
        // SAFETY: changes only the size of our own pipe.
        unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
        Some(Self { read, write, proven: false })
    }

    /// Whether so many bytes are worth it.
    pub(crate) fn worth_it(bytes: usize) -> bool {
        bytes >= WORTH_IT
    }

    /// Moves all of `bufs`, which is guest memory, to `stream`; uses them up. `Ok(false)` if this host cannot, and
    /// nothing was moved.
    pub(crate) fn send(&mut self, stream: &Stream, mut bufs: &mut [IoBuf<'_>]) -> Result<bool, SendError> {
        while let Some(rest) = skip_empty(bufs) {
            bufs = rest;
            let count = bufs.len().min(MOST_BUFS);
            // SAFETY: IoBufs are iovecs over mapped memory; the kernel takes references to its pages and only reads.
            let taken = unsafe { libc::vmsplice(self.write.as_raw_fd(), bufs.as_ptr().cast(), count, 0) };
            let taken = match usize::try_from(taken) {
                Ok(taken) => taken,
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => continue,
                    _ if !self.proven => return Ok(false),
                    error => return Err(SendError { nothing_left: false, error }),
                },
            };
            if !self.drain(stream, taken)? {
                return Ok(false);
            }
            consume(bufs, taken);
        }
        Ok(true)
    }

    /// Moves `left` bytes from the pipe to the socket.
    fn drain(&mut self, stream: &Stream, mut left: usize) -> Result<bool, SendError> {
        let (from, to) = (self.read.as_raw_fd(), stream.as_raw_fd());
        while left > 0 {
            let nowhere = std::ptr::null_mut();
            // SAFETY: both descriptors are ours and open; no offsets are given.
            let moved = unsafe { libc::splice(from, nowhere, to, nowhere, left, libc::SPLICE_F_MOVE) };
            match usize::try_from(moved) {
                Ok(0) => {
                    return Err(SendError { nothing_left: false, error: io::ErrorKind::WriteZero.into() });
                }
                Ok(moved) => {
                    self.proven = true;
                    left -= moved;
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if !self.proven && error.kind() == io::ErrorKind::InvalidInput {
                        // A socket that cannot be spliced to. The pipe still holds pages: it is not used again.
                        return Ok(false);
                    }
                    interrupted(error)
                        .map_err(|error| SendError { nothing_left: false, error: timed_out(error) })?;
                }
            }
        }
        Ok(true)
    }
}

/// Keeps the calling thread from being ended by a peer that went away: `splice` has no flag for that, as `sendmsg` has.
pub(crate) fn block_sigpipe() {
    // SAFETY: changes the calling thread's own signal mask, with a set that is initialised here.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::net::TcpListener;

    /// Sends `pages` pages by splicing and says what arrived at the other end.
    fn splice_over(a: Socket, b: Socket, pages: usize) {
        let (a, b) = (Stream::new(a, "a".into()).unwrap(), Stream::new(b, "b".into()).unwrap());
        let content: Vec<u8> = (0..pages * 4096).map(|i| (i / 4096 * 31 + i).to_le_bytes()[0]).collect();
        let mut got = vec![0; content.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut splicer = Splicer::new().expect("a pipe");
                let mut bufs: Vec<IoBuf<'_>> = content.chunks(12_288).map(IoBuf::from_bytes).collect();
                assert!(splicer.send(&a, &mut bufs).unwrap(), "this kernel splices to its sockets");
            });
            b.receive_bytes(&mut got).unwrap();
        });
        assert!(got == content);
    }

    #[test]
    fn pages_arrive_whole_through_tcp_and_unix_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        splice_over(a.into(), listener.accept().unwrap().0.into(), 3000);
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        splice_over(a, b, 3000);
    }

    #[test]
    fn a_peer_that_left_is_an_error_not_a_signal() {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let a = Stream::new(a, "a".into()).unwrap();
        drop(b);
        std::thread::spawn(move || {
            block_sigpipe();
            let content = vec![1; 1 << 16];
            let error = Splicer::new().unwrap().send(&a, &mut [IoBuf::from_bytes(&content)]).unwrap_err();
            assert_eq!(error.error.kind(), io::ErrorKind::BrokenPipe);
        })
        .join()
        .unwrap();
    }
}
