//! A link that counts bytes and does harm at a chosen one.

use crate::rig::socket_path;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_engine::Uri;
use vmferry_testkit::PATIENCE;
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, HELLO_BYTES, Hello, Role, ToTarget, decode_control};

/// One direction of one connection: connections in the order of their arrival, the control channel is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) connection: usize,
    pub(crate) to_target: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// This connection ends.
    CutOne,
    /// All connections end.
    CutAll,
    /// One bit of this byte is turned over.
    Flip,
    /// Nothing more arrives on this connection, which stays.
    Hold,
    /// The commit still arrives, and nothing of what the target says to it. Counts no bytes.
    CutBehindCommit,
    /// The commit left the source and does not arrive. Counts no bytes.
    CutAtCommit,
    /// The same, and every other connection ends with it.
    CutAllAtCommit,
    /// Every other connection ends, and then the commit arrives. Counts no bytes.
    CutOthersAtCommit,
}

impl Harm {
    pub(crate) fn at_commit(self) -> bool {
        use Harm::{CutAllAtCommit, CutAtCommit, CutBehindCommit, CutOthersAtCommit};
        matches!(self, CutBehindCommit | CutAtCommit | CutAllAtCommit | CutOthersAtCommit)
    }
}

/// Whether a whole commit is among these bytes of a control channel.
pub(crate) fn holds_commit(bytes: &[u8]) -> bool {
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

/// Do `harm` when `after` bytes have gone this way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) way: Way,
    pub(crate) after: usize,
    pub(crate) harm: Harm,
}

/// What the threads of a proxy share.
#[derive(Default)]
pub(crate) struct Shared {
    /// Of each connection, both ends.
    streams: Mutex<Vec<UnixStream>>,
    seen: Mutex<Vec<(Way, Vec<u8>)>>,
    done: AtomicBool,
    /// While this is true, a bulk channel carries 64 KiB a second: a pass takes minutes.
    pub(crate) slows_pages: AtomicBool,
    /// Whether the harm was done.
    harmed: AtomicBool,
}

impl Shared {
    fn cut_all(&self) {
        self.cut_all_but(usize::MAX);
    }

    fn cut_all_but(&self, connection: usize) {
        for (at, stream) in self.streams.lock().unwrap().iter().enumerate() {
            if at / 2 != connection {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Stands between a source and its target; ends with all its threads when it is dropped.
pub(crate) struct Proxy {
    path: PathBuf,
    pub(crate) shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn new(to: PathBuf, rule: Option<Rule>) -> Self {
        let path = socket_path();
        let listener = UnixListener::bind(&path).unwrap();
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            for (connection, client) in listener.incoming().enumerate() {
                if own.done.load(Ordering::Acquire) {
                    break;
                }
                let client = client.unwrap();
                let Ok(server) = UnixStream::connect(&to) else { continue };
                own.streams
                    .lock()
                    .unwrap()
                    .extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                for to_target in [true, false] {
                    let (from, into) = if to_target { (&client, &server) } else { (&server, &client) };
                    let (from, into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                    let (own, way) = (Arc::clone(&own), Way { connection, to_target });
                    let rule = rule.filter(|rule| rule.way == way);
                    pumps.push(std::thread::spawn(move || pump(&own, way, rule, from, into)));
                }
            }
            own.cut_all();
            for pump in pumps {
                pump.join().unwrap();
            }
        });
        Self { path, shared, acceptor: Some(acceptor) }
    }

    pub(crate) fn uri(&self) -> Uri {
        Uri::Unix(self.path.clone())
    }

    pub(crate) fn harmed(&self) -> bool {
        self.shared.harmed.load(Ordering::Acquire)
    }

    /// The same, once both sides have closed all their connections.
    pub(crate) fn finished(self) -> std::collections::BTreeMap<Way, Vec<u8>> {
        let shared = Arc::clone(&self.shared);
        // Its threads note what they saw as they end.
        drop(self);
        let seen = std::mem::take(&mut *shared.seen.lock().unwrap());
        seen.into_iter().collect()
    }

    /// All bytes that went each way.
    pub(crate) fn seen(&self) -> Vec<(Way, Vec<u8>)> {
        let mut seen = self.shared.seen.lock().unwrap().clone();
        seen.sort_by_key(|(way, _)| *way);
        seen
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Release);
        self.shared.cut_all();
        // Wakes the acceptor.
        let _ = UnixStream::connect(&self.path);
        self.acceptor.take().unwrap().join().unwrap();
        std::fs::remove_file(&self.path).unwrap();
    }
}

/// Waits until the other end has hung up, and reads nothing.
pub(crate) fn until_hung_up(stream: &UnixStream) {
    let mut fd = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    let within = i32::try_from(PATIENCE.as_millis()).unwrap();
    // SAFETY: one structure of our own, about a descriptor that is open.
    assert_eq!(unsafe { libc::poll(&raw mut fd, 1, within) }, 1, "the other end does not hang up");
}

/// Waits a second, or until pages may go on.
fn slow_down(shared: &Shared) {
    let until = Instant::now() + Duration::from_secs(1);
    let slow = || shared.slows_pages.load(Ordering::Acquire) && !shared.done.load(Ordering::Acquire);
    while slow() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pump(shared: &Shared, way: Way, rule: Option<Rule>, mut from: UnixStream, mut into: UnixStream) {
    let (mut all, mut buffer, mut bulk) = (Vec::new(), vec![0; 64 << 10], false);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..read].to_vec();
        if let Some(Rule { harm, .. }) = rule.filter(|rule| rule.harm.at_commit()) {
            if !shared.harmed.load(Ordering::Acquire) && holds_commit(&[&all[..], &bytes].concat()) {
                shared.harmed.store(true, Ordering::Release);
                if harm == Harm::CutOthersAtCommit {
                    shared.cut_all_but(way.connection);
                    // The target has found it, and given up its source, before it is told to run the guest.
                    until_hung_up(&into);
                } else {
                    let _ = from.shutdown(Shutdown::Both);
                    if harm == Harm::CutBehindCommit {
                        let _ = into.write_all(&bytes);
                        all.extend(&bytes);
                    } else if harm == Harm::CutAllAtCommit {
                        shared.cut_all();
                    }
                    break;
                }
            }
        } else if let Some(rule) = rule
            && (all.len()..all.len() + read).contains(&rule.after)
        {
            let at = rule.after - all.len();
            shared.harmed.store(true, Ordering::Release);
            if rule.harm == Harm::Flip {
                bytes[at] ^= 0x10;
            } else if rule.harm == Harm::Hold {
                while let Ok(1..) = from.read(&mut buffer) {}
                break;
            } else {
                bytes.truncate(at);
                let _ = into.write_all(&bytes);
                // Mostly the other end reads what was sent before it sees the end. It may also see the end first.
                std::thread::sleep(Duration::from_millis(1));
                if rule.harm == Harm::CutAll {
                    shared.cut_all();
                }
                let _ = from.shutdown(Shutdown::Both);
                all.extend(bytes);
                break;
            }
        }
        // The greeting comes first, and is answered before anything follows. It has to tell the
        // channel in the clear.
        if all.is_empty() {
            let hello = bytes.first_chunk().and_then(|bytes| Hello::decode(bytes).ok());
            bulk = way.to_target && hello.is_some_and(|hello| hello.role == Role::Bulk);
        } else if bulk {
            slow_down(shared);
        }
        all.extend(&bytes);
        if into.write_all(&bytes).is_err() {
            let _ = from.shutdown(Shutdown::Read);
            break;
        }
    }
    // An end is passed on: of this direction only, as a real link does.
    let _ = into.shutdown(if rule.is_some_and(|rule| rule.harm == Harm::CutOne && all.len() == rule.after) {
        Shutdown::Both
    } else {
        Shutdown::Write
    });
    shared.seen.lock().unwrap().push((way, all));
}
