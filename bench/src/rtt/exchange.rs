//! One measurement: requests answered by another process, beside a bulk stream or not.
//!
//! Pages travel as in postcopy: the source, a process of its own, answers each request with a page on one connection,
//! and sends bulk on another; the destination, this process, asks, takes the bulk, and keeps all the time.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::samples::Samples;
use super::{RttError, SourceCommand};
use crate::child::Reaped;
use crate::link::Link;

/// Bytes of a request.
pub(super) const REQUEST: usize = 16;
/// Bytes of an answer: a page.
pub(super) const ANSWER: usize = 4096;

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
    let urgent = link.connect().map_err(RttError::Link)?;
    let bulk = if plan.bulk == Bulk::None { None } else { Some(link.connect().map_err(RttError::Link)?) };
    for pair in [Some(&urgent), bulk.as_ref()].into_iter().flatten() {
        for socket in [&pair.source, &pair.destination] {
            if let Some(name) = plan.congestion {
                rustix::net::sockopt::set_tcp_congestion(socket, name)
                    .map_err(|source| RttError::Congestion { name: name.into(), source: source.into() })?;
            }
        }
    }
    if let (Bulk::Paced(rate), Some(pair)) = (plan.bulk, &bulk) {
        vmferry_engine::tcp::set_max_pacing_rate(pair.source.as_fd(), rate).map_err(RttError::Pace)?;
    }
    let (bulk_source, sink) = bulk.map(|pair| (pair.source, pair.destination)).unzip();
    let _child = start(command, urgent.source, bulk_source)?;
    let received = AtomicU64::new(0);
    std::thread::scope(|scope| {
        if let Some(sink) = &sink {
            std::thread::Builder::new()
                .name("bulk-sink".into())
                .spawn_scoped(scope, || take_bulk(sink, &received))
                .map_err(RttError::io("start a thread"))?;
        }
        let result = ask(urgent.destination, plan, &received);
        if let Some(sink) = &sink {
            // Ends the thread that reads it. It may be gone already; then so is the thread.
            let _ = sink.shutdown(Shutdown::Both);
        }
        result
    })
}

/// Starts the source with its ends of the connections as standard input and output.
fn start(command: &SourceCommand, urgent: TcpStream, bulk: Option<TcpStream>) -> Result<Reaped, RttError> {
    let mut child = Command::new(&command.program);
    child.args(&command.args).stdin(OwnedFd::from(urgent));
    match bulk {
        Some(bulk) => child.arg("bulk").stdout(OwnedFd::from(bulk)),
        None => child.arg("alone").stdout(Stdio::null()),
    };
    // `child` is dropped at the end, and with it our copies of the source's ends: then a source that dies is noticed.
    Reaped::spawn(&mut child).map_err(RttError::io("start the source's process"))
}

/// Asks until the time is over.
fn ask(mut socket: TcpStream, plan: Plan<'_>, received: &AtomicU64) -> Result<Round, RttError> {
    let failed = RttError::io("ask the source for a page");
    let mut number = 0;
    let asked = (|| {
        let until = Instant::now() + plan.settle;
        // At least one: it includes the start of the source's process.
        while number == 0 || Instant::now() < until {
            request(&mut socket, &mut number)?;
            std::thread::sleep(plan.gap);
        }
        let mut rtt = Samples::default();
        let (begin, before) = (Instant::now(), received.load(Ordering::Relaxed));
        while begin.elapsed() < plan.measure && rtt.len() < MAX_REQUESTS {
            rtt.push(request(&mut socket, &mut number)?);
            if !plan.gap.is_zero() {
                std::thread::sleep(plan.gap);
            }
        }
        let bytes = received.load(Ordering::Relaxed) - before;
        Ok((rtt, gbps(bytes, begin.elapsed())))
    })();
    let (rtt, bulk) = asked.map_err(failed)?;
    let pace_gbps = match plan.bulk {
        Bulk::Paced(rate) => Some(gbps(rate, Duration::from_secs(1))),
        _ => None,
    };
    Ok(Round { rtt, bulk_gbps: (plan.bulk != Bulk::None).then_some(bulk), pace_gbps })
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
fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / 1e9 / time.as_secs_f64()
}

/// The source's process: standard input is its end of the connection for requests, standard output that for bulk.
/// `args` are what [`run`](super::run) appended to the subcommand. Ends when the destination is gone.
///
/// # Errors
/// If it was started by hand, or a socket fails before the destination is done.
pub fn source_main(args: &[String]) -> Result<(), RttError> {
    let socket = |fd: io::Result<OwnedFd>| fd.map(TcpStream::from).map_err(RttError::io("take a socket"));
    let mut urgent = socket(io::stdin().as_fd().try_clone_to_owned())?;
    urgent.peer_addr().map_err(RttError::io("find a connection on standard input"))?;
    match args {
        [mode] if mode == "alone" => {}
        [mode] if mode == "bulk" => {
            let mut bulk = socket(io::stdout().as_fd().try_clone_to_owned())?;
            // Not joined: it ends with this process, which the requests' connection governs.
            std::thread::Builder::new()
                .name("bulk".into())
                .spawn(move || {
                    let buffer = vec![0x5a; BULK_CALL];
                    while bulk.write_all(&buffer).is_ok() {}
                })
                .map_err(RttError::io("start a thread"))?;
        }
        other => return Err(RttError::Usage(format!("want alone or bulk, got {other:?}"))),
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
