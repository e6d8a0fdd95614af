//! Options and figures of TCP sockets on Linux that the standard library does not offer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

/// Limits the rate of `socket` to `bytes_per_s`, counted without headers (`SO_MAX_PACING_RATE`,
/// Linux `include/net/sock.h`). TCP paces itself, so no queueing discipline is needed.
///
/// # Errors
/// If `socket` is not a socket.
pub fn set_max_pacing_rate(socket: BorrowedFd<'_>, bytes_per_s: u64) -> io::Result<()> {
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
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes `socket` writable only while fewer than `bytes` wait in it unsent (`TCP_NOTSENT_LOWAT`,
/// tcp(7)). The send buffer then holds bytes in flight, and hardly a queue.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn set_unsent_limit(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    socket2::SockRef::from(&socket).set_tcp_notsent_lowat(bytes)
}

/// Limits the receive queue of `socket` to what a fast link needs.
///
/// Bytes that arrive faster than they are read then wait at the sender. This is better for urgent
/// pages, because the sender can still choose what to send next, whereas a page in the receive
/// queue waits behind others. The limit for each connection is the number of bytes that a link of
/// 10 Gb/s carries in twice the link's round trip.
///
/// The limit is set with `SO_RCVBUF` (socket(7)), because the kernel would raise a clamp of the
/// window again. If the limit would be larger than the host allows a process to set, the kernel's
/// own limit stays in effect.
///
/// Bytes that are already in the queue stay there, and so does a longer queue until it has drained.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn keep_receive_queue_short(socket: BorrowedFd<'_>) -> io::Result<()> {
    /// Rate of a fast connection in bytes per second.
    const FAST: u64 = 1_250_000_000;
    /// Minimum limit in bytes: two segments of the largest size that a host passes on at once. With
    /// a smaller limit, the sender would wait for each segment.
    const LEAST: u64 = 128 << 10;
    let Some(round_trip) = least_round_trip(socket)? else { return Ok(()) };
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let bytes = micros.saturating_mul(2 * (FAST / 1_000_000)).max(LEAST);
    if bytes > most_receive_buffer() {
        return Ok(());
    }
    socket2::SockRef::from(&socket).set_recv_buffer_size(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Reads and stores the host's limits, for threads that may not open files later.
pub(crate) fn learn_limits() {
    most_receive_buffer();
}

/// Returns the largest value of `SO_RCVBUF` in bytes, as it was at the first call. Returns the
/// kernel's default if the limit cannot be read.
fn most_receive_buffer() -> u64 {
    const MOST: (&str, u64) = ("/proc/sys/net/core/rmem_max", 212_992);
    static READ: OnceLock<u64> = OnceLock::new();
    *READ.get_or_init(|| {
        let most = std::fs::read_to_string(MOST.0).ok().and_then(|text| text.trim().parse().ok());
        most.unwrap_or(MOST.1)
    })
}

/// Returns the shortest recent round trip of `socket` (`tcpi_min_rtt` of `TCP_INFO`, microseconds).
/// For a socket that only receives, that is the round trip of its handshake.
///
/// Returns `None` if the kernel is older than 4.6, or no round trip was measured.
fn least_round_trip(socket: BorrowedFd<'_>) -> io::Result<Option<Duration>> {
    /// Offset of `tcpi_min_rtt` in `struct tcp_info`.
    const AT: usize = 148;
    const LEN: usize = AT + 4;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let micros = u32::from_ne_bytes(info[AT..].try_into().map_err(io::Error::other)?);
    Ok((len >= LEN && micros != u32::MAX).then(|| Duration::from_micros(micros.into())))
}

/// Returns the bytes that the peer of `socket` has acknowledged since the connection was made
/// (`TCP_INFO`, RFC 4898 `tcpEStatsAppHCThruOctetsAcked`). Returns `None` if the kernel is older
/// than 4.1.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn bytes_acknowledged(socket: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    /// Offset of `tcpi_bytes_acked` in `struct tcp_info` (Linux `include/uapi/linux/tcp.h`). Fields
    /// are only ever appended.
    const AT: usize = 120;
    const LEN: usize = AT + 8;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let known = len >= LEN;
    let bytes: [u8; 8] = info[AT..].try_into().map_err(io::Error::other)?;
    Ok(known.then(|| u64::from_ne_bytes(bytes)))
}

/// Returns true if the peer's kernel has acknowledged all bytes that were written to `socket`
/// (`tcpi_unacked` and `tcpi_notsent_bytes` of `TCP_INFO`). Returns false if the local kernel is
/// older than 4.6, and therefore does not report this.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn all_acknowledged(socket: BorrowedFd<'_>) -> io::Result<bool> {
    /// Offsets of `tcpi_unacked` and `tcpi_notsent_bytes` in `struct tcp_info`.
    const AT: [usize; 2] = [24, 144];
    const LEN: usize = AT[1] + 4;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let none = |at: usize| info.get(at..at + 4).is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0));
    Ok(len >= LEN && AT.into_iter().all(none))
}

/// Makes the kernel acknowledge the next segments on `socket` as they arrive (`TCP_QUICKACK`,
/// tcp(7)), instead of when a process has read or answered them.
///
/// The kernel does so for a few segments, and then returns to its own choice. Therefore the caller
/// repeats the call often.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn acknowledge_at_once(socket: BorrowedFd<'_>) -> io::Result<()> {
    socket2::SockRef::from(&socket).set_tcp_quickack(true)
}

/// Returns the smoothed round trip of `socket` (`tcpi_rtt` of `TCP_INFO`, microseconds). It is
/// measured between the two kernels, whatever their processes do.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn smoothed_round_trip(socket: BorrowedFd<'_>) -> io::Result<Duration> {
    /// Offset of `tcpi_rtt` in `struct tcp_info`.
    const AT: usize = 68;
    let info: [u8; AT + 4] = tcp_info(socket)?.0;
    let bytes = info[AT..].try_into().map_err(io::Error::other)?;
    Ok(Duration::from_micros(u32::from_ne_bytes(bytes).into()))
}

/// Returns the first `N` bytes of `TCP_INFO`, and how many of them the kernel has filled.
fn tcp_info<const N: usize>(socket: BorrowedFd<'_>) -> io::Result<([u8; N], usize)> {
    let mut info = [0_u8; N];
    let mut len = libc::socklen_t::try_from(N).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most the `len` bytes of `info`, and their number into `len`.
    // Both live until the call returns. Any bytes are valid in `info`.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((info, usize::try_from(len).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Instant;
    use vmferry_testkit::{skip_if_emulated, wait, wait_for};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (sender, listener.accept().unwrap().0)
    }

    #[test]
    fn a_paced_socket_is_slower_than_its_link() {
        if skip_if_emulated("SO_MAX_PACING_RATE") {
            return;
        }
        let (mut sender, mut receiver) = pair();
        set_max_pacing_rate(sender.as_fd(), 10_000_000).unwrap();
        let start = Instant::now();
        let worker = std::thread::spawn(move || sender.write_all(&vec![0; 3_000_000]));
        receiver.read_exact(&mut vec![0; 3_000_000]).unwrap();
        worker.join().unwrap().unwrap();
        // The transfer takes 300 ms at that rate, and 2 ms without a limit. The first windows may
        // leave in bursts.
        assert!(start.elapsed() > Duration::from_millis(100), "{:?}", start.elapsed());
    }

    #[test]
    fn acknowledged_bytes_are_counted() {
        if skip_if_emulated("TCP_INFO") {
            return;
        }
        let (mut sender, mut receiver) = pair();
        let before = bytes_acknowledged(sender.as_fd()).unwrap().unwrap();
        sender.write_all(&[0; 123_456]).unwrap();
        receiver.read_exact(&mut [0; 123_456]).unwrap();
        // The acknowledgement of the last bytes may take 40 ms.
        wait_for("the acknowledgement of all bytes", || {
            match bytes_acknowledged(sender.as_fd()).unwrap().unwrap() - before {
                123_456 => Ok(()),
                bytes => Err(bytes),
            }
        });
    }

    #[test]
    fn unread_bytes_are_acknowledged() {
        if skip_if_emulated("TCP_INFO") {
            return;
        }
        let (mut sender, receiver) = pair();
        acknowledge_at_once(receiver.as_fd()).unwrap();
        sender.write_all(&[0; 64]).unwrap();
        wait("an acknowledgement", || all_acknowledged(sender.as_fd()).unwrap());
        // Bytes that do not fit into the peer's window are not acknowledged.
        sender.set_nonblocking(true).unwrap();
        let block = [0; 65536];
        // Bound of the loop: 64 MiB are more than any socket buffers.
        let full = (0..1024).any(|_| sender.write(&block).is_err());
        assert!(full && !all_acknowledged(sender.as_fd()).unwrap());
    }

    #[test]
    fn an_unsent_limit_stops_the_sender() {
        if skip_if_emulated("SO_MAX_PACING_RATE") {
            return;
        }
        let sent = |limit: Option<u32>| {
            let (mut sender, _receiver) = pair();
            // At this rate nothing leaves except the first window.
            set_max_pacing_rate(sender.as_fd(), 1000).unwrap();
            limit.into_iter().for_each(|limit| set_unsent_limit(sender.as_fd(), limit).unwrap());
            sender.set_nonblocking(true).unwrap();
            let block = [0; 4096];
            // Bound of the loop: 64 MiB are more than any socket buffers.
            (0..16384).map_while(|_| sender.write(&block).ok()).sum::<usize>()
        };
        let (free, limited) = (sent(None), sent(Some(65536)));
        assert!(limited < free && limited < 1 << 20, "{limited} of {free}");
    }

    #[test]
    fn unread_bytes_wait_at_the_sender() {
        if skip_if_emulated("TCP_INFO") {
            return;
        }
        let waiting = |short: bool| {
            let (mut sender, mut receiver) = pair();
            if short {
                keep_receive_queue_short(receiver.as_fd()).unwrap();
            }
            sender.set_nonblocking(true).unwrap();
            receiver.set_nonblocking(true).unwrap();
            let (block, mut read, mut sent) = ([0; 65536], vec![0; 65536], 0);
            // At first as much is read as sent, so that the kernel enlarges the buffer. Then
            // nothing is read. The loop sends at most 256 MiB.
            for turn in 0..4096 {
                match sender.write(&block) {
                    Ok(bytes) => sent += bytes,
                    Err(_) if turn > 2048 => break,
                    Err(_) => {}
                }
                if turn < 2048 {
                    while let Ok(bytes) = receiver.read(&mut read) {
                        sent -= bytes.min(sent);
                    }
                }
            }
            let mut queued = 0;
            // SAFETY: the kernel writes the four bytes of `queued`.
            assert_eq!(unsafe { libc::ioctl(receiver.as_raw_fd(), libc::FIONREAD, &raw mut queued) }, 0);
            queued
        };
        let (free, short) = (waiting(false), waiting(true));
        assert!(short < free / 2 && short <= 1 << 20, "{short} of {free} bytes");
    }

    #[test]
    fn descriptor_that_is_no_socket_is_refused() {
        if skip_if_emulated("SO_MAX_PACING_RATE") {
            return;
        }
        let (reader, _writer) = std::io::pipe().unwrap();
        let error = set_max_pacing_rate(reader.as_fd(), 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTSOCK));
        assert!(set_unsent_limit(reader.as_fd(), 1).is_err());
        assert!(bytes_acknowledged(reader.as_fd()).is_err());
        assert!(keep_receive_queue_short(reader.as_fd()).is_err());
    }

    #[test]
    fn unix_socket_is_refused() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(bytes_acknowledged(socket.as_fd()).is_err());
    }
}
