//! Pacing of a socket.

use crate::SysError;
use crate::error::common;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Limits what `socket` sends to `bytes_per_s`, counted without headers (`SO_MAX_PACING_RATE`, Linux
/// `include/net/sock.h`). TCP paces itself: no queueing discipline is needed.
///
/// # Errors
/// If it is no socket.
pub fn set_max_pacing_rate(socket: BorrowedFd<'_>, bytes_per_s: u64) -> Result<(), SysError> {
    const LEN: libc::socklen_t = 8;
    let value = bytes_per_s.to_ne_bytes();
    // SAFETY: the kernel reads the LEN bytes of `value`, which lives until the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            value.as_ptr().cast(),
            LEN,
        )
    };
    if done == 0 {
        return Ok(());
    }
    Err(SysError::last("setsockopt(SO_MAX_PACING_RATE)", || format!("{bytes_per_s} bytes/s"), common))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    #[test]
    fn a_paced_socket_is_slower_than_its_link() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        set_max_pacing_rate(sender.as_fd(), 10_000_000).unwrap();
        let start = Instant::now();
        let worker = std::thread::spawn(move || sender.write_all(&vec![0; 3_000_000]));
        receiver.read_exact(&mut vec![0; 3_000_000]).unwrap();
        worker.join().unwrap().unwrap();
        // 300 ms at that rate; unpaced it is done in 2. The first windows may leave in bursts.
        assert!(start.elapsed() > Duration::from_millis(100), "{:?}", start.elapsed());
    }

    #[test]
    fn what_is_no_socket_says_so() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(set_max_pacing_rate(reader.as_fd(), 1).unwrap_err().errno(), Some(libc::ENOTSOCK));
    }
}
