//! One measurement: requests that another process answers, with or without a bulk stream.
//!
//! Pages travel as in postcopy. The source, which is a separate process, answers each request with
//! a page on one connection and sends bulk data on another. The target, which is this process,
//! sends requests, receives the bulk data, and measures all times.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmferry_engine::tcp;

use super::samples::Samples;
use super::{RttError, SourceCommand, probe};
use crate::child::Reaped;
use crate::link::{Link, Pair};

/// Bytes in a request.
pub(super) const REQUEST: usize = 16;
/// Bytes in an answer: one page.
pub(super) const ANSWER: usize = 4096;

/// Modes of the source: no bulk stream, an unpaced one, and one with the pace controller.
const ALONE: &str = "alone";
const UNPACED: &str = "bulk";
const FOUND: &str = "found";

/// Bytes per `write` or `read` call of the bulk stream.
const BULK_CALL: usize = 256 << 10;

/// Largest number of requests of one measurement, so that memory and time are bounded on any host.
const MAX_REQUESTS: usize = 200_000;

/// Parameters of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    /// TCP congestion control of every socket. `None` means the host's default.
    pub(super) congestion: Option<&'a str>,
    /// Time between an answer and the next request. Zero means back to back.
    pub(super) gap: Duration,
    pub(super) bulk: Bulk,
    /// Time of requests before the measurement, while the bulk stream already runs.
    pub(super) warm_up: Duration,
    pub(super) measure: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bulk {
    None,
    Unpaced,
    /// Limited to this many bytes per second, without headers.
    Paced(u64),
    /// Paced by the engine's controller.
    Found,
}

/// Result of a measurement.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) rtt: Samples,
    /// Rate of the bulk data that arrived meanwhile, in 10^9 bits per second. `None` without a bulk
    /// stream.
    pub(super) bulk_gbps: Option<f64>,
    /// Pace of the bulk stream, in 10^9 bits per second.
    pub(super) pace_gbps: Option<f64>,
}

/// Runs a measurement once.
pub(super) fn measure(link: &Link, plan: Plan<'_>, command: &SourceCommand) -> Result<Round, RttError> {
    let mut source = Source::start(link, plan.congestion, plan.bulk, command)?;
    let mut rtt = Samples::default();
    // One request comes before the measurement in any case: it includes the start of the source's
    // process.
    source.measure(Duration::ZERO, plan.gap, None)?;
    source.measure(plan.warm_up, plan.gap, None)?;
    let (begin, before) = (Instant::now(), source.received());
    source.measure(plan.measure, plan.gap, Some(&mut rtt))?;
    let bulk = gbps(source.received() - before, begin.elapsed());
    let pace_gbps = match plan.bulk {
        Bulk::Paced(rate) => Some(gbps(rate, Duration::from_secs(1))),
        _ => None,
    };
    Ok(Round { rtt, bulk_gbps: (plan.bulk != Bulk::None).then_some(bulk), pace_gbps })
}

/// Source process, and the target's ends of its connections. Dropping the value ends all of them.
#[derive(Debug)]
pub(super) struct Source {
    urgent: TcpStream,
    requested: u64,
    received: Arc<AtomicU64>,
    /// Ends that the threads read from.
    ends: Vec<Arc<TcpStream>>,
    threads: Vec<JoinHandle<()>>,
    _child: Reaped,
}

impl Source {
    /// Starts the source process. Its bulk stream starts at once.
    pub(super) fn start(
        link: &Link,
        congestion: Option<&str>,
        bulk: Bulk,
        command: &SourceCommand,
    ) -> Result<Self, RttError> {
        let urgent = link.connect().map_err(RttError::Link)?;
        let stream = if bulk == Bulk::None { None } else { Some(link.connect().map_err(RttError::Link)?) };
        let probes = if bulk == Bulk::Found { Some(link.connect().map_err(RttError::Link)?) } else { None };
        for pair in [Some(&urgent), stream.as_ref(), probes.as_ref()].into_iter().flatten() {
            set_congestion(pair, congestion)?;
        }
        if let (Bulk::Paced(rate), Some(pair)) = (bulk, &stream) {
            tcp::set_max_pacing_rate(pair.source.as_fd(), rate).map_err(RttError::Pace)?;
        }
        let (stream, sink) = stream.map(|pair| (pair.source, pair.destination)).unzip();
        let (probes, echo) = probes.map(|pair| (pair.source, pair.destination)).unzip();
        let mut source = Source {
            urgent: urgent.destination,
            requested: 0,
            received: Arc::default(),
            ends: Vec::new(),
            threads: Vec::new(),
            _child: spawn(command, urgent.source, stream, probes)?,
        };
        let received = Arc::clone(&source.received);
        source.attend("bulk-sink", sink, move |end| take_bulk(end, &received))?;
        source.attend("echo", echo, probe::echo)?;
        Ok(source)
    }

    /// Returns the bytes of bulk data that have arrived so far.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Sends requests for `time`, but at least one, with a `gap` between an answer and the next
    /// request. Adds the times to `rtt`.
    pub(super) fn measure(
        &mut self,
        time: Duration,
        gap: Duration,
        mut rtt: Option<&mut Samples>,
    ) -> Result<(), RttError> {
        let begin = Instant::now();
        loop {
            let took = request(&mut self.urgent, &mut self.requested)
                .map_err(RttError::io("ask the source for a page"))?;
            if let Some(rtt) = rtt.as_deref_mut() {
                rtt.push(took);
                if rtt.len() >= MAX_REQUESTS {
                    return Ok(());
                }
            }
            if begin.elapsed() >= time {
                return Ok(());
            }
            if !gap.is_zero() {
                std::thread::sleep(gap);
            }
        }
    }

    /// Starts a thread that runs `work` on `end`, if there is one, until `end` is shut down.
    fn attend(
        &mut self,
        name: &str,
        end: Option<TcpStream>,
        work: impl FnOnce(&TcpStream) + Send + 'static,
    ) -> Result<(), RttError> {
        let Some(end) = end.map(Arc::new) else { return Ok(()) };
        self.ends.push(Arc::clone(&end));
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&end));
        self.threads.push(thread.map_err(RttError::io("start a thread"))?);
        Ok(())
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        for end in &self.ends {
            // The shutdown ends the thread that reads the socket. It fails if the connection is
            // gone, and then the thread ends too.
            let _ = end.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has already printed its message.
            let _ = thread.join();
        }
    }
}

/// Sets the TCP congestion control `name` on both ends. `None` keeps the host's default.
fn set_congestion(pair: &Pair, name: Option<&str>) -> Result<(), RttError> {
    let Some(name) = name else { return Ok(()) };
    for socket in [&pair.source, &pair.destination] {
        rustix::net::sockopt::set_tcp_congestion(socket, name)
            .map_err(|source| RttError::Congestion { name: name.into(), source: source.into() })?;
    }
    Ok(())
}

/// Starts the source with its ends of the connections as standard input, output and error.
fn spawn(
    command: &SourceCommand,
    urgent: TcpStream,
    bulk: Option<TcpStream>,
    probes: Option<TcpStream>,
) -> Result<Reaped, RttError> {
    let mode = match (&bulk, &probes) {
        (None, _) => ALONE,
        (Some(_), None) => UNPACED,
        (Some(_), Some(_)) => FOUND,
    };
    let mut child = Command::new(&command.program);
    child.args(&command.args).arg(mode).stdin(OwnedFd::from(urgent)).stdout(Stdio::null());
    if let Some(bulk) = bulk {
        child.stdout(OwnedFd::from(bulk));
    }
    if let Some(probes) = probes {
        child.stderr(OwnedFd::from(probes));
    }
    // `child` is dropped at the end of this function, and with it this process's copies of the
    // source's ends. Otherwise the death of the source would go unnoticed.
    Reaped::spawn(&mut child).map_err(RttError::io("start the source's process"))
}

/// Requests one page and waits for it. Returns the time that it took.
fn request(socket: &mut TcpStream, number: &mut u64) -> io::Result<Duration> {
    *number += 1;
    let mut request = [0; REQUEST];
    request[..8].copy_from_slice(&number.to_le_bytes());
    let mut answer = [0; ANSWER];
    let start = Instant::now();
    socket.write_all(&request)?;
    socket.read_exact(&mut answer)?;
    let took = start.elapsed();
    if answer[..REQUEST] != request {
        return Err(io::Error::other("the answer is not to this request"));
    }
    Ok(took)
}

fn take_bulk(mut sink: &TcpStream, received: &AtomicU64) {
    let mut buffer = vec![0; BULK_CALL];
    // The end of the stream and an error are treated alike: the requests beside the stream report
    // what is wrong, and the count stays.
    while let Ok(bytes @ 1..) = sink.read(&mut buffer) {
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Returns a rate in 10^9 bits per second.
#[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
pub(super) fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e9 / time.as_secs_f64()
}

/// Runs the source process until the target closes its connections.
///
/// `args` are the arguments that [`run`](super::run) appended to the subcommand. Standard input is
/// the source's end of the connection for requests, and standard output that of the bulk stream.
/// Standard error is that of the controller's probes if the stream has a pace controller.
///
/// # Errors
///
/// Fails if standard input is not a connection, the mode is unknown, or a socket fails before the
/// target has finished.
pub fn source_main(args: &[String]) -> Result<(), RttError> {
    let socket = |fd: io::Result<OwnedFd>| fd.map(TcpStream::from).map_err(RttError::io("take a socket"));
    let mut urgent = socket(io::stdin().as_fd().try_clone_to_owned())?;
    urgent.peer_addr().map_err(RttError::io("find a connection on standard input"))?;
    let mode = match args {
        [mode] if [ALONE, UNPACED, FOUND].contains(&mode.as_str()) => mode,
        other => return Err(RttError::Usage(format!("want {ALONE}, {UNPACED} or {FOUND}, got {other:?}"))),
    };
    if mode != ALONE {
        let mut bulk = socket(io::stdout().as_fd().try_clone_to_owned())?;
        if mode == FOUND {
            let paced = bulk.try_clone().map_err(RttError::io("take a socket"))?;
            let probes = socket(io::stderr().as_fd().try_clone_to_owned())?;
            // The controller ends when the target is gone, and so does this process.
            detach("pace", move || _ = probe::pace(&paced, probes))?;
        }
        detach("bulk", move || {
            let buffer = vec![0x5a; BULK_CALL];
            while bulk.write_all(&buffer).is_ok() {}
        })?;
    }
    let mut answer = [0x5a; ANSWER];
    loop {
        match urgent.read_exact(&mut answer[..REQUEST]) {
            Ok(()) => urgent.write_all(&answer).map_err(RttError::io("answer a request"))?,
            Err(error) if is_end(&error) => return Ok(()),
            Err(error) => return Err(RttError::io("read a request")(error)),
        }
    }
}

/// Starts a thread that is not joined. It ends with this process, whose life depends on the
/// connection for requests.
fn detach(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), RttError> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(work);
    thread.map(|_| ()).map_err(RttError::io("start a thread"))
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_in_decimal_bits() {
        assert_eq!(gbps(250_000_000, Duration::from_secs(1)), 2.0);
        assert_eq!(gbps(125_000_000, Duration::from_millis(500)), 2.0);
    }

    #[test]
    fn answer_to_another_request_is_an_error() {
        let pair = Link::Loopback.connect().unwrap();
        let mut source = pair.source;
        let answering = std::thread::spawn(move || {
            let mut request = [0; REQUEST];
            source.read_exact(&mut request).unwrap();
            source.write_all(&[7; ANSWER]).unwrap();
        });
        let mut destination = pair.destination;
        let error = request(&mut destination, &mut 0).unwrap_err();
        assert!(error.to_string().contains("not to this request"), "{error}");
        answering.join().unwrap();
    }

    #[test]
    fn dead_source_is_an_error_and_not_a_hang() {
        let dead = SourceCommand { program: "/bin/true".into(), args: Vec::new() };
        let plan = Plan {
            congestion: None,
            gap: Duration::ZERO,
            bulk: Bulk::None,
            warm_up: Duration::ZERO,
            measure: Duration::from_millis(10),
        };
        let error = measure(&Link::Loopback, plan, &dead).unwrap_err();
        assert!(error.to_string().contains("ask the source"), "{error}");
        let error =
            measure(&Link::Loopback, Plan { congestion: Some("none-such"), ..plan }, &dead).unwrap_err();
        assert!(matches!(error, RttError::Congestion { .. }), "{error}");
    }
}
