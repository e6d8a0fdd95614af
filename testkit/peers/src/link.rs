//! Proxy link that records its connections and injects a fault at a chosen byte.

use crate::socket::{connect, listen, remove, unix_uri, until_hung_up};
use socket2::Socket;
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_engine::Uri;
use vmferry_testkit::PATIENCE;
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, HELLO_BYTES, Hello, Role, ToTarget, decode_control};

/// One direction of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Direction {
    /// Number of the connection, in the order in which the source opens them. The control channel
    /// is 0.
    pub connection: usize,
    /// True if the bytes go from the source to the target.
    pub to_target: bool,
}

/// Connection in which a rule injects its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// Connection with this number, as in [`Direction`].
    Number(usize),
    /// First connection of this channel.
    Channel(Role, u16),
}

/// Fault of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// The connection of the rule ends.
    CutOne,
    /// All connections end.
    CutAll,
    /// One bit of the byte is inverted.
    Flip,
    /// No further byte arrives. The proxy continues to read, and the connection stays open.
    Hold,
    /// No further byte arrives. The proxy stops reading, so the sender's buffers fill up.
    Stall,
    /// The commit arrives, but no reply of the target does. Counts no bytes.
    CutBehindCommit,
    /// The commit leaves the source and does not arrive. Counts no bytes.
    CutAtCommit,
    /// Like [`CutAtCommit`](Self::CutAtCommit), and every other connection ends too.
    CutAllAtCommit,
    /// Every other connection ends, and then the commit arrives. Counts no bytes.
    CutOthersAtCommit,
}

impl Harm {
    /// Returns true for a fault that is injected when the commit passes.
    pub fn at_commit(self) -> bool {
        use Harm::{CutAllAtCommit, CutAtCommit, CutBehindCommit, CutOthersAtCommit};
        matches!(self, CutBehindCommit | CutAtCommit | CutAllAtCommit | CutOthersAtCommit)
    }
}

/// Returns true if these bytes of a control channel contain a complete commit.
pub fn holds_commit(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(HELLO_BYTES..).unwrap_or_default();
    while let Some(header) = rest.first_chunk().and_then(|header| ControlHeader::decode(header).ok()) {
        let end = CONTROL_HEADER_BYTES + header.len;
        let Some(body) = rest.get(CONTROL_HEADER_BYTES..end) else { break };
        if decode_control::<ToTarget>(header, body) == Ok(ToTarget::Commit) {
            return true;
        }
        rest = &rest[end..];
    }
    false
}

/// Fault that a proxy injects once.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Connection with the fault.
    pub connection: Connection,
    /// Direction of the fault: true for bytes from the source to the target.
    pub to_target: bool,
    /// Number of bytes in this direction before the fault. The hello and its reply count.
    pub after: usize,
    /// Kind of the fault.
    pub harm: Harm,
}

impl Rule {
    /// Injects `harm` after `after` bytes in `direction`.
    pub fn on(direction: Direction, after: usize, harm: Harm) -> Self {
        Self {
            connection: Connection::Number(direction.connection),
            to_target: direction.to_target,
            after,
            harm,
        }
    }

    /// Injects `harm` in the first connection of a channel.
    ///
    /// Bytes to the target are counted from the end of the hello. Bytes to the source are counted
    /// from the start of the reply to the hello.
    pub fn in_channel(role: Role, index: u16, to_target: bool, after: usize, harm: Harm) -> Self {
        let hello = if to_target { HELLO_BYTES } else { 0 };
        Self { connection: Connection::Channel(role, index), to_target, after: hello + after, harm }
    }
}

/// State that the threads of a proxy share.
#[derive(Debug)]
struct ProxyState {
    to: Uri,
    rules: Vec<Rule>,
    /// True if all bytes are kept.
    records: bool,
    /// Both ends of each connection, with its number and role.
    streams: Mutex<Vec<(usize, Role, Socket)>>,
    /// Number of times that each channel was opened.
    opened: Mutex<HashMap<(Role, u16), u32>>,
    seen: Mutex<BTreeMap<Direction, Vec<u8>>>,
    /// True if new connections are closed as soon as they arrive.
    closed: AtomicBool,
    turned_away: AtomicU32,
    done: AtomicBool,
    slows_pages: AtomicBool,
    harmed: AtomicU32,
}

impl ProxyState {
    fn cut(&self, which: impl Fn(usize, Role) -> bool) {
        self.streams.lock().unwrap().retain(|(number, role, stream)| {
            let hit = which(*number, *role);
            if hit {
                let _ = stream.shutdown(Shutdown::Both);
            }
            !hit
        });
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Waits for a second, or until pages may continue.
    fn slow_down(&self) {
        let until = Instant::now() + Duration::from_secs(1);
        let slow = || self.slows_pages.load(Ordering::Acquire) && !self.is_done();
        while slow() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Link between a source and its target. When it is dropped, it ends with all its threads.
#[derive(Debug)]
pub struct Proxy {
    uri: Uri,
    shared: Arc<ProxyState>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Creates a link to the target at `to`, over a socket of the same kind.
    pub fn new(to: &Uri, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self::start(to, rules, false)
    }

    /// Creates a link that keeps all bytes that pass it.
    pub fn recording(to: &Uri, rules: impl IntoIterator<Item = Rule>) -> Self {
        Self::start(to, rules, true)
    }

    fn start(to: &Uri, rules: impl IntoIterator<Item = Rule>, records: bool) -> Self {
        let own = match to {
            Uri::Unix(_) => unix_uri(),
            _ => Uri::Tcp { host: "127.0.0.1".into(), port: 0 },
        };
        let (listener, uri) = listen(&own);
        let shared = Arc::new(ProxyState {
            to: to.clone(),
            rules: rules.into_iter().collect(),
            records,
            streams: Mutex::default(),
            opened: Mutex::default(),
            seen: Mutex::default(),
            closed: AtomicBool::new(false),
            turned_away: AtomicU32::new(0),
            done: AtomicBool::new(false),
            slows_pages: AtomicBool::new(false),
            harmed: AtomicU32::new(0),
        });
        let own = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accept(&own, &listener));
        Self { uri, shared, acceptor: Some(acceptor) }
    }

    /// Returns the address of this link, for the source.
    pub fn uri(&self) -> Uri {
        self.uri.clone()
    }

    /// Returns the number of injected faults.
    pub fn harmed(&self) -> u32 {
        self.shared.harmed.load(Ordering::Acquire)
    }

    /// Returns the number of connections that were closed as soon as they arrived.
    pub fn turned_away(&self) -> u32 {
        self.shared.turned_away.load(Ordering::Acquire)
    }

    /// Ends the channels of these roles now.
    pub fn cut(&self, which: impl Fn(Role) -> bool) {
        self.shared.harmed.fetch_add(1, Ordering::AcqRel);
        self.shared.cut(|_, role| which(role));
    }

    /// Sets whether new connections are closed as soon as they arrive.
    pub fn close(&self, closed: bool) {
        self.shared.closed.store(closed, Ordering::Release);
    }

    /// Sets whether a bulk channel carries only 64 KiB per second, so that a pass takes minutes.
    pub fn slow_pages(&self, slow: bool) {
        self.shared.slows_pages.store(slow, Ordering::Release);
    }

    /// Returns all bytes of the connections that have ended, for each direction. The link must be
    /// [`recording`](Self::recording).
    pub fn seen(&self) -> BTreeMap<Direction, Vec<u8>> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Returns the result of [`seen`](Self::seen) once source and target have closed all their
    /// connections.
    pub fn finished(self) -> BTreeMap<Direction, Vec<u8>> {
        let shared = Arc::clone(&self.shared);
        // The threads store the bytes when they end.
        drop(self);
        std::mem::take(&mut *shared.seen.lock().unwrap())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Release);
        self.shared.cut(|_, _| true);
        // Wakes the acceptor.
        let _ = connect(&self.uri);
        self.acceptor.take().unwrap().join().unwrap();
        remove(&self.uri);
    }
}

/// Accepts connections of the source until the proxy is dropped.
fn accept(shared: &Arc<ProxyState>, listener: &Socket) {
    let mut pumps = Vec::new();
    for number in 0.. {
        let client = listener.accept();
        if shared.is_done() {
            break;
        }
        let Ok((client, _)) = client else { continue };
        if shared.closed.load(Ordering::Acquire) {
            // For the source, this looks like a host on which no program listens.
            drop(client);
            shared.turned_away.fetch_add(1, Ordering::AcqRel);
        } else {
            pumps.extend(carry(shared, number, client).into_iter().flatten());
        }
    }
    shared.cut(|_, _| true);
    for pump in pumps {
        pump.join().unwrap();
    }
}

/// Order in which a source opens its channels, with its usual settings.
const ORDER: [(Role, u16); 6] = [
    (Role::Control, 0),
    (Role::Bulk, 0),
    (Role::Bulk, 1),
    (Role::Urgent, 0),
    (Role::Urgent, 1),
    (Role::Probe, 0),
];

/// Reads the hello, which names the channel of this connection, and starts to carry bytes.
fn carry(shared: &Arc<ProxyState>, number: usize, mut client: Socket) -> Option<[JoinHandle<()>; 2]> {
    let mut hello = [0; HELLO_BYTES];
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut hello).ok()?;
    client.set_read_timeout(None).unwrap();
    let server = connect(&shared.to).ok()?;
    let tcp = matches!(shared.to, Uri::Tcp { .. });
    if tcp {
        client.set_tcp_nodelay(true).unwrap();
        server.set_tcp_nodelay(true).unwrap();
    }
    let (role, index, opened) = {
        let mut all = shared.opened.lock().unwrap();
        // An encrypted hello cannot be read.
        let (role, index) = Hello::decode(&hello).map_or_else(
            |_| ORDER[all.values().sum::<u32>() as usize % ORDER.len()],
            |hello| (hello.role, hello.index),
        );
        let opened = all.entry((role, index)).or_default();
        (role, index, std::mem::replace(opened, *opened + 1))
    };
    let ends = [client.try_clone().unwrap(), server.try_clone().unwrap()];
    shared.streams.lock().unwrap().extend(ends.map(|stream| (number, role, stream)));
    Some([true, false].map(|to_target| {
        let (from, into) = if to_target { (&client, &server) } else { (&server, &client) };
        let of_this = |rule: &&Rule| {
            rule.to_target == to_target
                && match rule.connection {
                    Connection::Number(harmed) => harmed == number,
                    Connection::Channel(harmed, place) => opened == 0 && (harmed, place) == (role, index),
                }
        };
        let pump = Pump {
            shared: Arc::clone(shared),
            direction: Direction { connection: number, to_target },
            rule: shared.rules.iter().find(of_this).copied(),
            from: from.try_clone().unwrap(),
            into: into.try_clone().unwrap(),
            pages: to_target && role == Role::Bulk,
            // To fail the sender, it is enough to stop reading a Unix socket. A TCP socket must be
            // closed.
            unread: if tcp { Shutdown::Both } else { Shutdown::Read },
            count: 0,
            kept: Vec::new(),
        };
        let hello = to_target.then(|| hello.to_vec());
        std::thread::spawn(move || pump.run(hello))
    }))
}

/// Thread that carries one direction of one connection.
struct Pump {
    shared: Arc<ProxyState>,
    direction: Direction,
    rule: Option<Rule>,
    from: Socket,
    into: Socket,
    /// True if this direction carries pages.
    pages: bool,
    /// Directions of `from` to shut down if `into` accepts no more bytes.
    unread: Shutdown,
    /// Number of bytes that arrived.
    count: usize,
    /// Bytes that arrived, if they are recorded or searched for the commit.
    kept: Vec<u8>,
}

impl Pump {
    fn run(mut self, hello: Option<Vec<u8>>) {
        let mut buffer = vec![0; 64 << 10];
        let mut goes_on = hello.is_none_or(|mut hello| self.carry(&mut hello));
        while goes_on && let Ok(read @ 1..) = self.from.read(&mut buffer) {
            if self.pages {
                self.shared.slow_down();
            }
            goes_on = self.carry(&mut buffer[..read]);
        }
        // Pass on the end of this direction only, as a real link does.
        let _ = self.into.shutdown(Shutdown::Write);
        if self.shared.records {
            self.shared.seen.lock().unwrap().insert(self.direction, self.kept);
        }
    }

    /// Carries `bytes`, or injects the fault. Returns whether this direction continues.
    fn carry(&mut self, bytes: &mut [u8]) -> bool {
        let place = self.count..self.count + bytes.len();
        if let Some(Rule { after, harm, .. }) = self.rule {
            if harm.at_commit() {
                if self.is_commit(bytes) && !self.harm_at_commit(harm, bytes) {
                    return false;
                }
            } else if place.contains(&after) {
                let at = after - place.start;
                self.shared.harmed.fetch_add(1, Ordering::AcqRel);
                if harm != Harm::Flip {
                    self.harm(harm, &bytes[..at]);
                    return false;
                }
                bytes[at] ^= 0x10;
            }
        }
        self.note(bytes);
        if self.into.write_all(bytes).is_err() {
            let _ = self.from.shutdown(self.unread);
            return false;
        }
        true
    }

    fn note(&mut self, bytes: &[u8]) {
        self.count += bytes.len();
        if self.shared.records || self.rule.is_some_and(|rule| rule.harm.at_commit()) {
            self.kept.extend(bytes);
        }
    }

    /// Returns true if `bytes` end the first commit.
    fn is_commit(&self, bytes: &[u8]) -> bool {
        self.shared.harmed.load(Ordering::Acquire) == 0 && holds_commit(&[&self.kept[..], bytes].concat())
    }

    /// Injects `harm` at the commit, which ends in `bytes`. Returns whether this direction
    /// continues.
    fn harm_at_commit(&mut self, harm: Harm, bytes: &[u8]) -> bool {
        self.shared.harmed.fetch_add(1, Ordering::AcqRel);
        if harm == Harm::CutOthersAtCommit {
            self.shared.cut(|number, _| number != self.direction.connection);
            // The target has detected the cut, and given up its source, before it receives the
            // commit.
            until_hung_up(&self.into);
            return true;
        }
        let _ = self.from.shutdown(Shutdown::Both);
        if harm == Harm::CutBehindCommit {
            let _ = self.into.write_all(bytes);
            self.note(bytes);
        } else if harm == Harm::CutAllAtCommit {
            self.shared.cut(|_, _| true);
        }
        false
    }

    /// Ends or stalls this direction after `bytes`.
    fn harm(&mut self, harm: Harm, bytes: &[u8]) {
        let _ = self.into.write_all(bytes);
        self.note(bytes);
        match harm {
            Harm::Hold => {
                while let Ok(1..) = self.from.read(&mut [0; 4096]) {}
                return;
            }
            Harm::Stall => {
                // Stall until the test has ended. Source and target have given up the connection by
                // then.
                while !self.shared.is_done() {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            _ => {
                // With this pause, the receiver mostly reads the bytes before it sees the end. It
                // may also see the end first.
                std::thread::sleep(Duration::from_millis(1));
                if harm == Harm::CutAll {
                    self.shared.cut(|_, _| true);
                }
            }
        }
        let _ = self.from.shutdown(Shutdown::Both);
        let _ = self.into.shutdown(Shutdown::Both);
    }
}
