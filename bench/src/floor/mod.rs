//! The floor: the speed at which this host copies memory between two processes over loopback TCP.
//!
//! The floor copies the same bytes as a migration, over the same number of streams, from touched
//! huge-page memory into fresh memory that is mapped like a target's. It has no protocol, no
//! tracking and no checksum. A migration is compared with the floor of the same run, because fresh
//! memory, huge pages and the load of the cores change the result. A copy into touched memory would
//! be a quarter faster, but no target starts with touched memory.
//!
//! The receiver is this executable, started again with [`RECEIVER_SUBCOMMAND`]. An executable that
//! uses the floor must route that subcommand to [`receiver_main`].

mod mapping;
mod receiver;

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::child::Reaped;
use crate::warm::Warm;
pub(crate) use mapping::Mapping;

pub use receiver::receiver_main;

/// Hidden subcommand that an executable must route to [`receiver_main`].
pub const RECEIVER_SUBCOMMAND: &str = "bench-floor-receiver";

/// Bytes per `write` or `read` call.
///
/// Measurements show the same speed from 128 KiB to 4 MiB, and 4 MiB takes the least processor
/// time. BBR, CUBIC and Reno do not differ either, nor do fixed socket buffers of 1 or 4 MiB
/// compared with the kernel's tuning. Therefore the sockets keep the host's defaults, as the
/// migrations' sockets do.
const CALL_BYTES: usize = 4 << 20;

/// Time after which one call on a socket or the receiver's pipe counts as hung.
const IO_LIMIT: Duration = Duration::from_secs(60);

/// Largest copy in bytes, so that a mistyped size does not exhaust the host.
const MAX_BYTES: u64 = 1 << 40;

/// Largest number of streams.
const MAX_STREAMS: u32 = 64;

/// Error of a floor measurement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FloorError {
    /// The size or the number of streams is out of range, or a thread of the copy panicked.
    #[error("floor: {0}")]
    Usage(String),
    /// A system call failed.
    #[error("floor: cannot {action}: {source}")]
    Io {
        /// Action that failed, for the message.
        action: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The receiver violated its protocol or ended early.
    #[error("floor: the receiving process {0}; run the bench again, and see its messages above")]
    Receiver(String),
}

impl FloorError {
    /// Returns a closure for `map_err` that names the `action` that failed.
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| FloorError::Io { action, source }
    }
}

/// Command that starts a receiver. The receiver's arguments are appended.
#[derive(Debug, Clone)]
pub struct ReceiverCommand {
    /// Path of the executable.
    pub program: PathBuf,
    /// Arguments before the receiver's own.
    pub args: Vec<OsString>,
}

impl ReceiverCommand {
    /// Returns the command for this executable with [`RECEIVER_SUBCOMMAND`].
    ///
    /// # Errors
    ///
    /// Fails if the path of this executable is unknown.
    pub fn this_executable() -> Result<Self, FloorError> {
        let program = std::env::current_exe().map_err(FloorError::io("find this executable"))?;
        Ok(ReceiverCommand { program, args: vec![RECEIVER_SUBCOMMAND.into()] })
    }
}

/// Result of one copy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FloorResult {
    /// Number of bytes copied.
    pub bytes: u64,
    /// Time from the first byte sent until the last stream's receiver acknowledged all its bytes.
    pub elapsed: Duration,
    /// Processor time of the sending process, user and system.
    pub cpu_sender: Duration,
    /// Processor time of the receiving process, user and system.
    pub cpu_receiver: Duration,
}

impl FloorResult {
    /// Returns the throughput in 10^9 bytes per second.
    #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
    pub fn gbytes_per_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.elapsed.as_secs_f64()
    }
}

/// Copies `bytes` bytes to another process over `streams` loopback TCP streams, and measures the
/// time.
///
/// Each stream's share is rounded up to whole pages. The copy needs twice `bytes` of free memory.
/// The source is filled before the clock starts, and the receiver checks one word of every page
/// after the clock has stopped.
///
/// # Errors
///
/// Fails if an argument is out of range, a system call fails, or the receiver does not receive
/// every page.
pub fn run(bytes: u64, streams: u32, receiver: &ReceiverCommand) -> Result<FloorResult, FloorError> {
    let share = share_of(bytes, streams)?;
    let mut source =
        Mapping::new(share * streams as usize).map_err(FloorError::io("map the source memory"))?;
    fill(source.bytes_mut());
    let warm = Warm::hold(bytes);

    let nonce = u64::from(std::process::id()) << 32 | u64::from(Instant::now().elapsed().subsec_nanos());
    let mut child = Reaped::spawn(
        Command::new(&receiver.program)
            .args(&receiver.args)
            .args([streams.to_string(), share.to_string(), nonce.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped()),
    )
    .map_err(FloorError::io("start the receiving process"))?;
    let Some(stdout) = child.child().stdout.take() else {
        return Err(FloorError::Receiver("has no output".into()));
    };
    let mut stdout = BufReader::new(stdout);

    let port: u16 = line_after(&mut stdout, "PORT ")?;
    let mut sockets = Vec::new();
    for index in 0..streams {
        sockets.push(connect(port, nonce, index).map_err(FloorError::io("connect to the receiver"))?);
    }

    drop(warm);
    let cpu_before = process_cpu();
    let start = Instant::now();
    send_all(&mut sockets, source.bytes(), share)?;
    let elapsed = start.elapsed();
    let cpu_sender = process_cpu().saturating_sub(cpu_before);

    let cpu_nanos: u64 = line_after(&mut stdout, "CPU ")?;
    let good_pages: usize = line_after(&mut stdout, "PAGES ")?;
    if good_pages != source.bytes().len() / PAGE {
        return Err(FloorError::Receiver(format!("has only {good_pages} right pages")));
    }
    Ok(FloorResult {
        bytes: source.bytes().len() as u64,
        elapsed,
        cpu_sender,
        cpu_receiver: Duration::from_nanos(cpu_nanos),
    })
}

/// Page size in bytes to which shares are rounded.
const PAGE: usize = 4096;

/// Returns the bytes that each stream carries, as a whole number of pages.
fn share_of(bytes: u64, streams: u32) -> Result<usize, FloorError> {
    if bytes == 0 || bytes > MAX_BYTES {
        return Err(FloorError::Usage(format!("{bytes} bytes; want 1 to {MAX_BYTES}")));
    }
    if streams == 0 || streams > MAX_STREAMS {
        return Err(FloorError::Usage(format!("{streams} streams; want 1 to {MAX_STREAMS}")));
    }
    let share = bytes.div_ceil(u64::from(streams)).next_multiple_of(PAGE as u64);
    usize::try_from(share).map_err(|_| FloorError::Usage(format!("{bytes} bytes do not fit this machine")))
}

fn connect(port: u16, nonce: u64, index: u32) -> io::Result<TcpStream> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut socket = TcpStream::connect_timeout(&address, IO_LIMIT)?;
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(IO_LIMIT))?;
    socket.set_read_timeout(Some(IO_LIMIT))?;
    socket.write_all(&nonce.to_le_bytes())?;
    socket.write_all(&index.to_le_bytes())?;
    Ok(socket)
}

/// Sends each stream its share, all streams at once, and waits for every acknowledgement.
fn send_all(sockets: &mut [TcpStream], source: &[u8], share: usize) -> Result<(), FloorError> {
    std::thread::scope(|scope| {
        let senders: Vec<_> = sockets
            .iter_mut()
            .zip(source.chunks_exact(share))
            .map(|(socket, part)| scope.spawn(move || send_one(socket, part)))
            .collect();
        senders.into_iter().try_for_each(|sender| match sender.join() {
            Ok(result) => result.map_err(FloorError::io("send to the receiver")),
            Err(_) => Err(FloorError::Usage("a sending thread panicked".into())),
        })
    })
}

fn send_one(socket: &mut TcpStream, part: &[u8]) -> io::Result<()> {
    for call in part.chunks(CALL_BYTES) {
        socket.write_all(call)?;
    }
    let mut acknowledgement = [0u8; 1];
    socket.read_exact(&mut acknowledgement)
}

/// Reads a line `PREFIX number` from the receiver.
///
/// The call cannot hang: the receiver bounds its own waits, so a line or the end of the pipe
/// arrives.
fn line_after<T: std::str::FromStr>(from: &mut impl BufRead, prefix: &str) -> Result<T, FloorError> {
    let mut line = String::new();
    from.take(256).read_line(&mut line).map_err(FloorError::io("read from the receiver"))?;
    line.trim()
        .strip_prefix(prefix.trim_end())
        .and_then(|rest| rest.trim().parse().ok())
        .ok_or_else(|| FloorError::Receiver(format!("printed {line:?} instead of {prefix:?} and a number")))
}

/// Fills memory with words that compression, zero detection and deduplication cannot reduce.
fn fill(memory: &mut [u8]) {
    for (index, word) in memory.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&word_at(index as u64).to_le_bytes());
    }
}

/// Returns the word at an index, by splitmix64, which computes any word independently.
fn word_at(index: u64) -> u64 {
    let mut x = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the processor time of all threads of this process so far.
fn process_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(now).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole_pages_and_cover_all_bytes() {
        assert_eq!(share_of(1, 1).unwrap(), 4096);
        assert_eq!(share_of(1 << 20, 2).unwrap(), 1 << 19);
        assert_eq!(share_of((1 << 20) + 1, 2).unwrap(), (1 << 19) + 4096);
        for (bytes, streams) in [(0, 1), (1, 0), (MAX_BYTES + 1, 1), (1, MAX_STREAMS + 1)] {
            assert!(matches!(share_of(bytes, streams), Err(FloorError::Usage(_))));
        }
    }

    #[test]
    fn content_does_not_repeat() {
        let mut memory = vec![0u8; 1 << 16];
        fill(&mut memory);
        let mut words: Vec<&[u8]> = memory.chunks_exact(8).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), (1 << 16) / 8);
    }

    #[test]
    fn program_that_is_not_a_receiver_is_an_error() {
        let other = ReceiverCommand { program: "/bin/echo".into(), args: vec!["hello".into()] };
        let error = run(1 << 16, 1, &other).unwrap_err().to_string();
        assert!(error.contains("hello"), "{error}");
        let missing = ReceiverCommand { program: "/nonexistent/receiver".into(), args: vec![] };
        assert!(matches!(run(1 << 16, 1, &missing), Err(FloorError::Io { .. })));
    }
}
