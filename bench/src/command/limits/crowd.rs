//! Up to ten thousand connections to one port or socket. Each connection that the server closes is
//! opened again.

use super::pair::{LOAD, TestPair, bounded, check_kept_speed, speed, until};
use crate::command::sample::Sample;
use crate::command::side::Side;
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vmferry_client::Client;
use vmferry_report::json::Case;

/// Number of connections that are opened in one round.
const AGAIN: usize = 200;
/// Time between two rounds.
const EVERY: Duration = Duration::from_millis(20);
/// Descriptors that this process needs for other purposes.
const OTHERS: u64 = 500;

/// Endpoint that the connections go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// The migration port of a waiting target.
    Migration,
    /// The control socket of the source.
    Control,
    /// The metrics port of the source.
    Metrics,
}

pub(super) fn crowd(endpoint: Endpoint, case: &mut Case, quick: bool, wrong: &mut Vec<String>) -> Result<()> {
    let wanted = if quick { 2_000 } else { 10_000 };
    let metrics = ["--metrics", "127.0.0.1:0"];
    let more: &[&str] = if endpoint == Endpoint::Metrics { &metrics } else { &[] };
    let mut pair = TestPair::with("process", "64M", LOAD, more)?;
    // Raised after the processes were started, so that they keep the usual limit.
    let descriptors = Descriptors::raise()?;
    let count = usize::try_from(descriptors.most.saturating_sub(OTHERS))?.min(wanted);
    case.params.insert("connections".into(), count.into());
    if count < wanted {
        case.params.insert("fewer_because".into(), "this process may open no more descriptors".into());
    }
    let scraped = match endpoint {
        Endpoint::Metrics => Some(metrics_of(&pair.source)?),
        Endpoint::Migration | Endpoint::Control => None,
    };
    let at = match (endpoint, scraped) {
        (Endpoint::Control, _) => At::Path(pair.folder.0.join("source")),
        (_, Some(address)) => At::Port(address),
        (_, None) => At::Port(pair.target.address()?),
    };
    let before = speed(&mut pair.source)?;
    let crowd = Crowd::gather(at, count)?;
    until("all connections having been established", || Ok(crowd.reached.load(Ordering::Acquire) >= count))?;
    let during = speed(&mut pair.source)?;
    check_kept_speed(case, wrong, before, during);
    let crowded = if endpoint == Endpoint::Migration { &pair.target } else { &pair.source };
    let who = if endpoint == Endpoint::Migration { "target" } else { "source" };
    bounded(case, wrong, who, &Sample::of(crowded.pid())?, pair.before.rss_kib);
    pair.move_it(case, wrong)?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    case.metric("turned_away", crowd.turned_away.load(Ordering::Acquire) as f64);
    drop(crowd);
    match scraped {
        Some(address) => until("a scrape", || Ok(scrape(address).unwrap_or(false))),
        None if endpoint == Endpoint::Control => {
            let path = pair.folder.0.join("source");
            until("a client of the control socket", || Ok(Client::connect(&path).is_ok()))
        }
        None => Ok(()),
    }
}

/// Returns the address of the metrics port, from the output of a process.
fn metrics_of(side: &Side) -> Result<SocketAddr> {
    let said = side.said();
    let address = said.split("metrics at http://").nth(1).and_then(|rest| rest.split('/').next());
    Ok(address.with_context(|| format!("no address of metrics in: {said}"))?.parse()?)
}

fn scrape(at: SocketAddr) -> Result<bool> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200 "))
}

/// Raised limit of open descriptors of this process. The earlier limit is restored on drop.
struct Descriptors {
    before: Rlimit,
    most: u64,
}

impl Descriptors {
    fn raise() -> Result<Self> {
        let before = getrlimit(Resource::Nofile);
        let most = before.maximum.unwrap_or(1 << 20);
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: before.maximum })?;
        Ok(Self { before, most })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.before);
    }
}

#[derive(Debug, Clone)]
enum At {
    Port(SocketAddr),
    Path(PathBuf),
}

/// Connections that are opened again whenever the server closes them, until this value is dropped.
struct Crowd {
    /// Number of connections that were established at least once: accepted, or in the queue.
    reached: Arc<AtomicUsize>,
    turned_away: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// One connection of the crowd.
#[derive(Default)]
struct Connection {
    socket: Option<Socket>,
    reached: bool,
}

impl Crowd {
    fn gather(at: At, count: usize) -> Result<Self> {
        let (reached, turned_away) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (own_reached, own_away, ends) =
            (Arc::clone(&reached), Arc::clone(&turned_away), Arc::clone(&stop));
        let run = move || {
            let mut connections: Vec<Connection> = (0..count).map(|_| Connection::default()).collect();
            while !ends.load(Ordering::Acquire) {
                connect_some(&at, &mut connections)?;
                let (arrived, left) = poll_all(&mut connections);
                own_reached.fetch_add(arrived, Ordering::AcqRel);
                own_away.fetch_add(left, Ordering::AcqRel);
                std::thread::sleep(EVERY);
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().name("crowd".into()).spawn(run)?;
        Ok(Self { reached, turned_away, stop, thread: Some(thread) })
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("limits: the crowd: {error:#}");
        }
    }
}

/// Opens up to `AGAIN` of the connections that are closed.
fn connect_some(at: &At, connections: &mut [Connection]) -> Result<()> {
    let mut closed: Vec<usize> =
        (0..connections.len()).filter(|number| connections[*number].socket.is_none()).collect();
    // Connections that were never established come first. Otherwise the same ones would be opened
    // again and again.
    closed.sort_by_key(|number| connections[*number].reached);
    for number in closed.into_iter().take(AGAIN) {
        let connection = &mut connections[number];
        let (domain, address) = match at {
            At::Port(address) => (Domain::IPV4, SockAddr::from(*address)),
            At::Path(path) => (Domain::UNIX, SockAddr::unix(path)?),
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        if matches!(at, At::Port(_)) {
            // Several source addresses are used, because the ports of a single one would run out.
            let own = Ipv4Addr::new(127, 0, 0, u8::try_from(2 + number % 200)?);
            socket.bind(&SockAddr::from(SocketAddr::from((own, 0))))?;
        }
        match socket.connect(&address) {
            Ok(()) => connection.socket = Some(socket),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => connection.socket = Some(socket),
            // The kernel's queue is full, or the server no longer listens.
            Err(_) => {}
        }
    }
    Ok(())
}

/// Returns how many connections were established for the first time, and how many established ones
/// the server closed.
fn poll_all(connections: &mut [Connection]) -> (usize, usize) {
    let open: Vec<usize> =
        (0..connections.len()).filter(|number| connections[*number].socket.is_some()).collect();
    let interest = PollFlags::OUT | PollFlags::RDHUP;
    let sockets = open.iter().filter_map(|number| connections[*number].socket.as_ref());
    let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, interest)).collect();
    // An error of poll says nothing about the connections. The next round polls again.
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let seen: Vec<_> = open.iter().copied().zip(fds.iter().map(PollFd::revents)).collect();
    let (mut arrived, mut left) = (0, 0);
    for (number, flags) in seen {
        let connection = &mut connections[number];
        let gone = flags.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        if flags.contains(PollFlags::OUT) && !connection.reached && !flags.contains(PollFlags::ERR) {
            connection.reached = true;
            arrived += 1;
        }
        if gone {
            connection.socket = None;
            left += usize::from(connection.reached);
        }
    }
    (arrived, left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn closed_connections_are_opened_again_until_drop() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let crowd = Crowd::gather(At::Port(listener.local_addr().unwrap()), 20).unwrap();
        for _ in 0..50 {
            // Every connection is closed as soon as it is accepted.
            drop(listener.accept().unwrap());
        }
        until("all connections being established", || Ok(crowd.reached.load(Ordering::Acquire) == 20))
            .unwrap();
        until("some turned away", || Ok(crowd.turned_away.load(Ordering::Acquire) >= 20)).unwrap();
        drop(crowd);
        let address = listener.local_addr().unwrap();
        drop(listener);
        assert!(TcpStream::connect(address).is_err());
    }
}
