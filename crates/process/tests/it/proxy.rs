//! A TCP link that knows its channels and does harm to one of them at a chosen byte.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use vmferry_engine::Uri;
use vmferry_wire::{HELLO_BYTES, Hello, Role};

/// One direction of one channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) role: Role,
    pub(crate) index: u16,
    /// How often this channel had been opened before.
    pub(crate) opened: u32,
    pub(crate) to_target: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// This channel ends.
    CutOne,
    /// All channels that are open end.
    CutAll,
    /// Nothing moves on this way any more, and nobody is told.
    Stall,
    /// One bit of this byte is turned over.
    Flip,
}

/// Do `harm` when `after` bytes have gone this way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) way: Way,
    pub(crate) after: usize,
    pub(crate) harm: Harm,
}

#[derive(Default)]
struct Shared {
    rules: Vec<Rule>,
    streams: Mutex<Vec<(Role, TcpStream)>>,
    opened: Mutex<HashMap<(Role, u16), u32>>,
    /// Connections are closed as soon as they come.
    closed: AtomicBool,
    turned_away: AtomicU32,
    done: AtomicBool,
    harmed: AtomicU32,
}

impl Shared {
    fn cut(&self, which: impl Fn(Role) -> bool) {
        self.streams.lock().unwrap().retain(|(role, stream)| {
            let hit = which(*role);
            if hit {
                let _ = stream.shutdown(Shutdown::Both);
            }
            !hit
        });
    }
}

/// Stands between a source and its target; ends with all its threads when it is dropped.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn new(to: &Uri, rules: Vec<Rule>) -> Self {
        let Uri::Tcp { host, port } = to else { panic!("{to} is no TCP address") };
        let to = format!("{host}:{port}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared { rules, ..Shared::default() });
        let own = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            for client in listener.incoming() {
                if own.done.load(Ordering::Acquire) {
                    break;
                }
                // Otherwise it is closed, as by a host that is there and has nobody listening.
                let Ok(client) = client else { continue };
                if own.closed.load(Ordering::Acquire) {
                    drop(client);
                    own.turned_away.fetch_add(1, Ordering::AcqRel);
                } else {
                    pumps.extend(connect(&own, client, &to).into_iter().flatten());
                }
            }
            own.cut(|_| true);
            for pump in pumps {
                pump.join().unwrap();
            }
        });
        Self { port, shared, acceptor: Some(acceptor) }
    }

    pub(crate) fn uri(&self) -> Uri {
        Uri::Tcp { host: "127.0.0.1".into(), port: self.port }
    }

    /// How often harm was done.
    pub(crate) fn harmed(&self) -> u32 {
        self.shared.harmed.load(Ordering::Acquire)
    }

    /// How many connections were closed as soon as they came.
    pub(crate) fn turned_away(&self) -> u32 {
        self.shared.turned_away.load(Ordering::Acquire)
    }

    /// Ends the channels of these roles now.
    pub(crate) fn cut(&self, which: impl Fn(Role) -> bool) {
        self.shared.harmed.fetch_add(1, Ordering::AcqRel);
        self.shared.cut(which);
    }

    /// Lets nobody through any more, or again.
    pub(crate) fn close(&self, closed: bool) {
        self.shared.closed.store(closed, Ordering::Release);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Release);
        self.shared.cut(|_| true);
        // Wakes the acceptor.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        self.acceptor.take().unwrap().join().unwrap();
    }
}

const ORDER: [(Role, u16); 6] = [
    (Role::Control, 0),
    (Role::Bulk, 0),
    (Role::Bulk, 1),
    (Role::Urgent, 0),
    (Role::Urgent, 1),
    (Role::Probe, 0),
];

/// Reads the hello, which says what this connection is, and begins to pump.
fn connect(shared: &Arc<Shared>, mut client: TcpStream, to: &str) -> Option<[JoinHandle<()>; 2]> {
    client.set_nodelay(true).unwrap();
    client.set_read_timeout(Some(vmferry_testkit::PATIENCE)).unwrap();
    let mut hello = [0; HELLO_BYTES];
    client.read_exact(&mut hello).ok()?;
    client.set_read_timeout(None).unwrap();
    let (role, index) = match Hello::decode(&hello) {
        Ok(Hello { role, index, .. }) => (role, index),
        // Encrypted, and none of a proxy's business; but a source opens its channels in this order, with its usual settings.
        Err(_) => ORDER[shared.opened.lock().unwrap().values().sum::<u32>() as usize % ORDER.len()],
    };
    let mut server = TcpStream::connect(to).ok()?;
    server.set_nodelay(true).unwrap();
    server.write_all(&hello).ok()?;
    let opened = {
        let mut all = shared.opened.lock().unwrap();
        let opened = all.entry((role, index)).or_default();
        std::mem::replace(opened, *opened + 1)
    };
    let ends = [client.try_clone().unwrap(), server.try_clone().unwrap()];
    shared.streams.lock().unwrap().extend(ends.map(|stream| (role, stream)));
    Some([true, false].map(|to_target| {
        let (from, into) = if to_target { (&client, &server) } else { (&server, &client) };
        let (from, into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
        let way = Way { role, index, opened, to_target };
        let rule = shared.rules.iter().find(|rule| rule.way == way).copied();
        let own = Arc::clone(shared);
        std::thread::spawn(move || pump(&own, rule, from, into))
    }))
}

/// Bytes are counted from behind the hello.
fn pump(shared: &Shared, rule: Option<Rule>, mut from: TcpStream, mut into: TcpStream) {
    let (mut count, mut buffer) = (0, vec![0; 64 << 10]);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let mut bytes = &mut buffer[..read];
        if let Some(rule) = rule.filter(|rule| (count..count + read).contains(&rule.after)) {
            let at = rule.after - count;
            shared.harmed.fetch_add(1, Ordering::AcqRel);
            if rule.harm == Harm::Flip {
                bytes[at] ^= 0x10;
            } else {
                bytes = &mut bytes[..at];
                let _ = into.write_all(bytes);
                match rule.harm {
                    Harm::CutAll => shared.cut(|_| true),
                    Harm::Stall => {
                        // Until both sides have given it up, or the test has ended: for that it has as long as it takes.
                        while !shared.done.load(Ordering::Acquire) {
                            std::thread::sleep(Duration::from_millis(2));
                        }
                    }
                    _ => {}
                }
                let _ = from.shutdown(Shutdown::Both);
                let _ = into.shutdown(Shutdown::Both);
                return;
            }
        }
        count += read;
        if into.write_all(bytes).is_err() {
            let _ = from.shutdown(Shutdown::Both);
            return;
        }
    }
    // An end is passed on: of this direction only, as a real link does.
    let _ = into.shutdown(Shutdown::Write);
}
