//! What Linux lets us ask of a TCP socket, and the standard library does not.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

/// Limits what `socket` sends to `bytes_per_s`, counted without headers (`SO_MAX_PACING_RATE`, Linux
/// `include/net/sock.h`). TCP paces itself: no queueing discipline is needed.
///
/// # Errors
/// If it is no socket.
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

/// Lets a sender into `socket` only while fewer than `bytes` wait there unsent (`TCP_NOTSENT_LOWAT`, tcp(7)): what is
/// in the send buffer is what is on its way, and not a queue of ours.
///
/// # Errors
/// If it is no TCP socket.
pub fn set_unsent_limit(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    socket2::SockRef::from(&socket).set_tcp_notsent_lowat(bytes)
}

/// Lets no more wait in `socket` to be read than a fast link needs: what arrives faster than it is read then waits at its sender, who can
/// still choose what to send, and not here, where a page that is needed now stands behind others. It is the link's round trip, taken
/// twice, at 10 Gb/s for each connection.
///
/// By `SO_RCVBUF` (socket(7)): a clamp of the window would be raised again by the kernel, which makes room for what comes. Where the
/// link needs more than the host lets a process ask for, the kernel goes on by itself.
///
/// What is here already stays, and so does a longer queue until it has run off.
///
/// # Errors
/// If it is no TCP socket.
pub fn keep_receive_queue_short(socket: BorrowedFd<'_>) -> io::Result<()> {
    /// Of a connection, in bytes a second.
    const FAST: u64 = 1_250_000_000;
    /// Two of the largest segments that a host hands over at once; with less, each would be waited for.
    const LEAST: u64 = 128 << 10;
    let Some(round_trip) = least_round_trip(socket)? else { return Ok(()) };
    let micros = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    let bytes = micros.saturating_mul(2 * (FAST / 1_000_000)).max(LEAST);
    if bytes > most_receive_buffer() {
        return Ok(());
    }
    socket2::SockRef::from(&socket).set_recv_buffer_size(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Reads what this host allows, for threads that cannot.
pub(crate) fn learn_limits() {
    most_receive_buffer();
}

/// The most that may be asked for by `SO_RCVBUF`, in bytes, as it was at first; the kernel's default where it does not say.
fn most_receive_buffer() -> u64 {
    const MOST: (&str, u64) = ("/proc/sys/net/core/rmem_max", 212_992);
    static READ: OnceLock<u64> = OnceLock::new();
    *READ.get_or_init(|| {
        let most = std::fs::read_to_string(MOST.0).ok().and_then(|text| text.trim().parse().ok());
        most.unwrap_or(MOST.1)
    })
}

/// The shortest round trip of `socket` lately (`tcpi_min_rtt` of `TCP_INFO`, microseconds); of a socket that only receives, that of
/// its handshake. None: the kernel is older than 4.6 and does not know, or none was measured.
fn least_round_trip(socket: BorrowedFd<'_>) -> io::Result<Option<Duration>> {
    /// Of `tcpi_min_rtt` in `struct tcp_info`.
    const AT: usize = 148;
    const LEN: usize = AT + 4;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let micros = u32::from_ne_bytes(info[AT..].try_into().map_err(io::Error::other)?);
    Ok((len >= LEN && micros != u32::MAX).then(|| Duration::from_micros(micros.into())))
}

/// The bytes that the peer of `socket` has acknowledged since it was connected (`TCP_INFO`, RFC 4898
/// `tcpEStatsAppHCThruOctetsAcked`). None: the kernel is older than 4.1 and does not count them.
///
/// # Errors
/// If it is no TCP socket.
pub fn bytes_acknowledged(socket: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    /// Of `tcpi_bytes_acked` in `struct tcp_info` (Linux `include/uapi/linux/tcp.h`; fields are only ever appended).
    const AT: usize = 120;
    const LEN: usize = AT + 8;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let known = len >= LEN;
    let bytes: [u8; 8] = info[AT..].try_into().map_err(io::Error::other)?;
    Ok(known.then(|| u64::from_ne_bytes(bytes)))
}

/// Whether the peer's kernel has acknowledged all that was written to `socket` (`tcpi_unacked` and `tcpi_notsent_bytes` of `TCP_INFO`);
/// `false` where the kernel does not know (before 4.6).
///
/// # Errors
/// If it is no TCP socket.
pub fn all_acknowledged(socket: BorrowedFd<'_>) -> io::Result<bool> {
    /// Of `tcpi_unacked` and `tcpi_notsent_bytes` in `struct tcp_info`.
    const AT: [usize; 2] = [24, 144];
    const LEN: usize = AT[1] + 4;
    let (info, len): ([u8; LEN], _) = tcp_info(socket)?;
    let none = |at: usize| info.get(at..at + 4).is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0));
    Ok(len >= LEN && AT.into_iter().all(none))
}

/// Has the kernel acknowledge the next segments on `socket` as they arrive (`TCP_QUICKACK`, tcp(7)), and not when a process has read or
/// answered them. It does so for a few, and then finds again by itself when to: to be asked often.
///
/// # Errors
/// If it is no TCP socket.
pub fn acknowledge_at_once(socket: BorrowedFd<'_>) -> io::Result<()> {
    socket2::SockRef::from(&socket).set_tcp_quickack(true)
}

/// The smoothed round trip of `socket` (`tcpi_rtt` of `TCP_INFO`, microseconds): measured between the two kernels, whatever
/// their processes are doing.
///
/// # Errors
/// If it is no TCP socket.
pub fn smoothed_round_trip(socket: BorrowedFd<'_>) -> io::Result<Duration> {
    /// Of `tcpi_rtt` in `struct tcp_info`.
    const AT: usize = 68;
    let info: [u8; AT + 4] = tcp_info(socket)?.0;
    let bytes = info[AT..].try_into().map_err(io::Error::other)?;
    Ok(Duration::from_micros(u32::from_ne_bytes(bytes).into()))
}

/// The first `N` bytes of `TCP_INFO`, and how many the kernel knows.
fn tcp_info<const N: usize>(socket: BorrowedFd<'_>) -> io::Result<([u8; N], usize)> {
    let mut info = [0_u8; N];
    let mut len = libc::socklen_t::try_from(N).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most the `len` bytes of `info`, and how many into `len`; both live until the call
    // returns. Any bytes are valid in `info`.
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
        // 300 ms at that rate; unpaced it is done in 2. The first windows may leave in bursts.
        assert!(start.elapsed() > Duration::from_millis(100), "{:?}", start.elapsed());
    }

    #[test]
    fn what_has_arrived_is_counted() {
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
    fn what_nobody_has_read_is_acknowledged_all_the_same() {
        if skip_if_emulated("TCP_INFO") {
            return;
        }
        let (mut sender, receiver) = pair();
        acknowledge_at_once(receiver.as_fd()).unwrap();
        sender.write_all(&[0; 64]).unwrap();
        wait("an acknowledgement", || all_acknowledged(sender.as_fd()).unwrap());
        // What does not fit into the peer's window is not there.
        sender.set_nonblocking(true).unwrap();
        let block = [0; 65536];
        // A bound on the loop: 64 MiB are more than any socket buffers.
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
            // Nothing leaves at this pace but the first window.
            set_max_pacing_rate(sender.as_fd(), 1000).unwrap();
            limit.into_iter().for_each(|limit| set_unsent_limit(sender.as_fd(), limit).unwrap());
            sender.set_nonblocking(true).unwrap();
            let block = [0; 4096];
            // A bound on the loop: 64 MiB are more than any socket buffers.
            (0..16384).map_while(|_| sender.write(&block).ok()).sum::<usize>()
        };
        let (free, limited) = (sent(None), sent(Some(65536)));
        assert!(limited < free && limited < 1 << 20, "{limited} of {free}");
    }

    #[test]
    fn what_is_not_read_waits_at_its_sender() {
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
            // As much is read as sent at first, so that the kernel makes room; then nothing. Bounded: 256 MiB.
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
    fn what_is_no_socket_says_so() {
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
    fn a_unix_socket_has_no_tcp() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(bytes_acknowledged(socket.as_fd()).is_err());
    }
}
