//! Ten thousand connections at a door, and whoever is turned away comes again.

use super::stand::{LOAD, Stand, bounded, kept, speed, until};
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

/// How many that are turned away come again at once, and how often.
const AGAIN: usize = 200;
const EVERY: Duration = Duration::from_millis(20);
/// Descriptors that this process needs for other things.
const OTHERS: u64 = 500;

/// Where they come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// The port of a target that waits.
    Migration,
    /// The source's control socket.
    Control,
    /// The source's port for metrics.
    Metrics,
}

pub(super) fn crowd(door: Door, case: &mut Case, quick: bool, wrong: &mut Vec<String>) -> Result<()> {
    let wanted = if quick { 2_000 } else { 10_000 };
    let metrics = ["--metrics", "127.0.0.1:0"];
    let more: &[&str] = if door == Door::Metrics { &metrics } else { &[] };
    let mut stand = Stand::with("process", "64M", LOAD, more)?;
    // After the processes were started: they have what anybody's have.
    let descriptors = Descriptors::raise()?;
    let count = usize::try_from(descriptors.most.saturating_sub(OTHERS))?.min(wanted);
    case.params.insert("connections".into(), count.into());
    if count < wanted {
        case.params.insert("fewer_because".into(), "this process may open no more descriptors".into());
    }
    let scraped = match door {
        Door::Metrics => Some(metrics_of(&stand.source)?),
        Door::Migration | Door::Control => None,
    };
    let at = match (door, scraped) {
        (Door::Control, _) => At::Path(stand.folder.0.join("source")),
        (_, Some(address)) => At::Port(address),
        (_, None) => At::Port(stand.target.address()?),
    };
    let before = speed(&mut stand.source)?;
    let crowd = Crowd::gather(at, count)?;
    until("everybody having been at the door", || Ok(crowd.been.load(Ordering::Acquire) >= count))?;
    let during = speed(&mut stand.source)?;
    kept(case, wrong, before, during);
    let crowded = if door == Door::Migration { &stand.target } else { &stand.source };
    let who = if door == Door::Migration { "target" } else { "source" };
    bounded(case, wrong, who, &Sample::of(crowded.pid())?, stand.before.rss_kib);
    stand.move_it(case, wrong)?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    case.metric("turned_away", crowd.turned_away.load(Ordering::Acquire) as f64);
    drop(crowd);
    match scraped {
        Some(address) => until("a scrape", || Ok(scrape(address).unwrap_or(false))),
        None if door == Door::Control => {
            let path = stand.folder.0.join("source");
            until("a client of the control socket", || Ok(Client::connect(&path).is_ok()))
        }
        None => Ok(()),
    }
}

/// Where a process says that its metrics are.
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

/// As many descriptors as this process may have, until it is dropped.
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

/// Connections that are opened again when they are closed, for as long as this lives.
struct Crowd {
    /// How many of them were let in or waited to be, at least once.
    been: Arc<AtomicUsize>,
    turned_away: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// One of them.
#[derive(Default)]
struct Comer {
    socket: Option<Socket>,
    been: bool,
}

impl Crowd {
    fn gather(at: At, count: usize) -> Result<Self> {
        let (been, turned_away) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (own_been, own_away, ends) = (Arc::clone(&been), Arc::clone(&turned_away), Arc::clone(&stop));
        let come = move || {
            let mut comers: Vec<Comer> = (0..count).map(|_| Comer::default()).collect();
            while !ends.load(Ordering::Acquire) {
                come(&at, &mut comers)?;
                let (arrived, left) = look(&mut comers);
                own_been.fetch_add(arrived, Ordering::AcqRel);
                own_away.fetch_add(left, Ordering::AcqRel);
                std::thread::sleep(EVERY);
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().name("crowd".into()).spawn(come)?;
        Ok(Self { been, turned_away, stop, thread: Some(thread) })
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

/// Some of those that are not there come.
fn come(at: &At, comers: &mut [Comer]) -> Result<()> {
    let mut outside: Vec<usize> =
        (0..comers.len()).filter(|number| comers[*number].socket.is_none()).collect();
    // Who has not been there comes first, or the same would come again and again.
    outside.sort_by_key(|number| comers[*number].been);
    for number in outside.into_iter().take(AGAIN) {
        let comer = &mut comers[number];
        let (domain, address) = match at {
            At::Port(address) => (Domain::IPV4, SockAddr::from(*address)),
            At::Path(path) => (Domain::UNIX, SockAddr::unix(path)?),
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        if matches!(at, At::Port(_)) {
            // Ports are not used up so.
            let own = Ipv4Addr::new(127, 0, 0, u8::try_from(2 + number % 200)?);
            socket.bind(&SockAddr::from(SocketAddr::from((own, 0))))?;
        }
        match socket.connect(&address) {
            Ok(()) => comer.socket = Some(socket),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => comer.socket = Some(socket),
            // The kernel's queue is full, or nobody listens any more.
            Err(_) => {}
        }
    }
    Ok(())
}

/// Who has got to the door for the first time, and who was turned away.
fn look(comers: &mut [Comer]) -> (usize, usize) {
    let there: Vec<usize> = (0..comers.len()).filter(|number| comers[*number].socket.is_some()).collect();
    let interest = PollFlags::OUT | PollFlags::RDHUP;
    let sockets = there.iter().filter_map(|number| comers[*number].socket.as_ref());
    let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, interest)).collect();
    // Of an error nothing is known; it is looked again.
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let seen: Vec<_> = there.iter().copied().zip(fds.iter().map(PollFd::revents)).collect();
    let (mut arrived, mut left) = (0, 0);
    for (number, flags) in seen {
        let comer = &mut comers[number];
        let gone = flags.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        if flags.contains(PollFlags::OUT) && !comer.been && !flags.contains(PollFlags::ERR) {
            comer.been = true;
            arrived += 1;
        }
        if gone {
            comer.socket = None;
            left += usize::from(comer.been);
        }
    }
    (arrived, left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_crowd_comes_and_comes_again_until_it_is_dropped() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let crowd = Crowd::gather(At::Port(listener.local_addr().unwrap()), 20).unwrap();
        for _ in 0..50 {
            // Turned away at once.
            drop(listener.accept().unwrap());
        }
        until("all of them at the door", || Ok(crowd.been.load(Ordering::Acquire) == 20)).unwrap();
        until("some turned away", || Ok(crowd.turned_away.load(Ordering::Acquire) >= 20)).unwrap();
        drop(crowd);
        let address = listener.local_addr().unwrap();
        drop(listener);
        assert!(TcpStream::connect(address).is_err());
    }
}
