//! One measurement: requests answered by another process, beside a bulk stream or not.
//!
//! Pages travel as in postcopy: the source, a process of its own, answers each request with a page on one connection,
//! and sends bulk on another; the destination, this process, asks, takes the bulk, and keeps all the time.

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

/// Bytes of a request.
pub(super) const REQUEST: usize = 16;
/// Bytes of an answer: a page.
pub(super) const ANSWER: usize = 4096;

/// What the source does beside answering.
const ALONE: &str = "alone";
const UNPACED: &str = "bulk";
const FOUND: &str = "found";

/// Bytes a `write` or `read` call of the bulk stream is given.
const BULK_CALL: usize = 256 << 10;

/// Requests of one measurement at most, so that memory and time are bounded on any host.
const MAX_REQUESTS: usize = 200_000;

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan<'a> {
    /// TCP congestion control of every socket. None: the host's default.
    pub(super) congestion: Option<&'a str>,
    /// Between an answer and the next request. Zero: back to back.
    pub(super) gap: Duration,
    pub(super) bulk: Bulk,
    /// Requests before the measurement, with the bulk stream already there.
    pub(super) settle: Duration,
    pub(super) measure: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bulk {
    None,
    Unpaced,
    /// At most so many bytes a second, headers not counted.
    Paced(u64),
    /// As fast as the engine's controller finds.
    Found,
}

/// What came out.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) rtt: Samples,
    /// Bulk that arrived meanwhile, in 10^9 bits a second. None: there was none.
    pub(super) bulk_gbps: Option<f64>,
    /// The pace that the bulk stream was held to, in 10^9 bits a second.
    pub(super) pace_gbps: Option<f64>,
}

/// Measures once.
pub(super) fn measure(link: &Link, plan: Plan<'_>, command: &SourceCommand) -> Result<Round, RttError> {
    let mut source = Source::start(link, plan.congestion, plan.bulk, command)?;
    let mut rtt = Samples::default();
    // At least one before the measurement: it includes the start of the source's process.
    source.ask(Duration::ZERO, plan.gap, None)?;
    source.ask(plan.settle, plan.gap, None)?;
    let (begin, before) = (Instant::now(), source.received());
    source.ask(plan.measure, plan.gap, Some(&mut rtt))?;
    let bulk = gbps(source.received() - before, begin.elapsed());
    let pace_gbps = match plan.bulk {
        Bulk::Paced(rate) => Some(gbps(rate, Duration::from_secs(1))),
        _ => None,
    };
    Ok(Round { rtt, bulk_gbps: (plan.bulk != Bulk::None).then_some(bulk), pace_gbps })
}

/// A source's process and the destination's ends of its connections. All of it ends with this value.
#[derive(Debug)]
pub(super) struct Source {
    urgent: TcpStream,
    asked: u64,
    received: Arc<AtomicU64>,
    /// What the threads read.
    ends: Vec<Arc<TcpStream>>,
    threads: Vec<JoinHandle<()>>,
    _child: Reaped,
}

impl Source {
    /// Starts it; its bulk flows from now on.
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
            asked: 0,
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

    /// Bytes of bulk that arrived so far.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Asks for `time`, and at least once, with a `gap` between an answer and the next request; keeps the times in
    /// `rtt`.
    pub(super) fn ask(
        &mut self,
        time: Duration,
        gap: Duration,
        mut rtt: Option<&mut Samples>,
    ) -> Result<(), RttError> {
        let begin = Instant::now();
        loop {
            let took = request(&mut self.urgent, &mut self.asked)
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

    /// Has a thread do `work` with `end`, if there is one, until it is shut down.
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
            // Ends the thread that reads it. It may be gone already; then so is the thread.
            let _ = end.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Has both ends use the TCP congestion control `name`; None: the host's default.
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
    // `child` is dropped at the end, and with it our copies of the source's ends: then a source that dies is noticed.
    Reaped::spawn(&mut child).map_err(RttError::io("start the source's process"))
}

/// Asks for one page and waits for it.
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
    // The end and an error are the same to it: the requests that go on beside it tell what is wrong, and the count stays.
    while let Ok(bytes @ 1..) = sink.read(&mut buffer) {
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// 10^9 bits a second.
#[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
pub(super) fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e9 / time.as_secs_f64()
}

/// The source's process: standard input is its end of the connection for requests, standard output that for bulk, and
/// standard error that for the controller's probes, if it finds its own pace.
/// `args` are what [`run`](super::run) appended to the subcommand. Ends when the destination is gone.
///
/// # Errors
/// If it was started by hand, or a socket fails before the destination is done.
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
            // It ends when the destination is gone, and so does everything.
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

/// Starts a thread that is not joined: it ends with this process, which the requests' connection governs.
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
    fn an_answer_to_something_else_is_an_error() {
        let pair = Link::Loopback.connect().unwrap();
        let mut source = pair.source;
        let liar = std::thread::spawn(move || {
            let mut request = [0; REQUEST];
            source.read_exact(&mut request).unwrap();
            source.write_all(&[7; ANSWER]).unwrap();
        });
        let mut destination = pair.destination;
        let error = request(&mut destination, &mut 0).unwrap_err();
        assert!(error.to_string().contains("not to this request"), "{error}");
        liar.join().unwrap();
    }

    #[test]
    fn a_source_that_dies_is_an_error_and_not_a_hang() {
        let dead = SourceCommand { program: "/bin/true".into(), args: Vec::new() };
        let plan = Plan {
            congestion: None,
            gap: Duration::ZERO,
            bulk: Bulk::None,
            settle: Duration::ZERO,
            measure: Duration::from_millis(10),
        };
        let error = measure(&Link::Loopback, plan, &dead).unwrap_err();
        assert!(error.to_string().contains("ask the source"), "{error}");
        let error =
            measure(&Link::Loopback, Plan { congestion: Some("none-such"), ..plan }, &dead).unwrap_err();
        assert!(matches!(error, RttError::Congestion { .. }), "{error}");
    }
}
