//! Proxy for the link of a migration under test.
//!
//! The proxy decodes the control messages to know the phase of the migration, holds the migration
//! at a phase, and injects faults into single channels.

use super::plan::{Channel, Phase};
use super::socket::{self, Socket};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_engine::Uri;
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, HELLO_BYTES, Hello, Role, ToSource, ToTarget, decode_control,
};

/// Bulk bytes after which the first pass counts as under way.
const UNDER_WAY: u64 = 2 << 20;

/// Fault that the proxy injects into a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Harm {
    Cut = 1,
    Stall,
    Corrupt,
    Truncate,
    /// The proxy stops reading in both directions and keeps the connection open.
    Deaf,
}

/// One connection through the proxy.
struct Wire {
    channel: Mutex<Option<Channel>>,
    /// Fault to inject into the next bytes, as a `Harm`. 0 means none.
    harm: AtomicU8,
    ends: [Socket; 2],
}

#[derive(Default)]
struct Stage {
    wanted: Option<Phase>,
    reached: bool,
    /// Set when the target has reported `Running` over this link.
    running: bool,
    first_pass: bool,
}

struct LinkState {
    wires: Mutex<Vec<Arc<Wire>>>,
    stage: Mutex<Stage>,
    changed: Condvar,
    bulk: AtomicU64,
    done: AtomicBool,
}

pub(in crate::command) struct Link {
    at: Uri,
    state: Arc<LinkState>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Returns a link to the target that listens at `target`. The link itself listens at `at`.
    pub(in crate::command) fn to(target: Uri, at: &Uri) -> io::Result<Self> {
        let listener = socket::Listener::bind(at)?;
        let at = listener.uri()?;
        let state = Arc::new(LinkState {
            wires: Mutex::default(),
            stage: Mutex::default(),
            changed: Condvar::new(),
            bulk: AtomicU64::new(0),
            done: AtomicBool::new(false),
        });
        let own = Arc::clone(&state);
        std::thread::Builder::new().name("link".into()).spawn(move || {
            loop {
                let client = listener.accept();
                if own.done.load(Ordering::Acquire) {
                    return;
                }
                // A target that is gone refuses connections. The proxy then drops its connection
                // too.
                let Ok((client, server)) = client.and_then(|client| Ok((client, Socket::connect(&target)?)))
                else {
                    continue;
                };
                let _ = own.carry(client, server);
            }
        })?;
        Ok(Self { at, state })
    }

    pub(in crate::command) fn uri(&self) -> String {
        self.at.to_string()
    }

    /// Arranges that the link holds the migration when it reaches `phase`.
    pub(in crate::command) fn hold_at(&self, phase: Phase) {
        let mut stage = lock(&self.state.stage);
        (stage.wanted, stage.reached) = (Some(phase), false);
    }

    /// Waits until the link holds the migration, and returns whether it does.
    pub(in crate::command) fn reached(&self, within: Duration) -> bool {
        let stage = lock(&self.state.stage);
        let waited = self.state.changed.wait_timeout_while(stage, within, |stage| !stage.reached);
        waited.is_ok_and(|(stage, _)| stage.reached)
    }

    /// Lets the migration continue.
    pub(in crate::command) fn release(&self) {
        lock(&self.state.stage).wanted = None;
        self.state.changed.notify_all();
    }

    /// Injects `harm` into all open connections of `channel`, or of every channel if `channel` is
    /// `None`.
    pub(in crate::command) fn harm(&self, harm: Harm, channel: Option<Channel>) {
        for wire in lock(&self.state.wires).iter() {
            let of = *lock(&wire.channel);
            if channel.is_some() && of != channel {
                continue;
            }
            if harm == Harm::Cut {
                wire.close();
            } else {
                wire.harm.store(harm as u8, Ordering::Release);
            }
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.state.done.store(true, Ordering::Release);
        self.release();
        self.harm(Harm::Cut, None);
        let _ = Socket::connect(&self.at);
    }
}

impl Wire {
    fn close(&self) {
        for end in &self.ends {
            end.shutdown();
        }
    }
}

impl LinkState {
    fn carry(self: &Arc<Self>, client: Socket, server: Socket) -> io::Result<()> {
        let ends = [client.try_clone()?, server.try_clone()?];
        let wire = Arc::new(Wire { channel: Mutex::new(None), harm: AtomicU8::new(0), ends });
        lock(&self.wires).push(Arc::clone(&wire));
        for (from, into, to_target) in
            [(client.try_clone()?, server.try_clone()?, true), (server, client, false)]
        {
            let (own, wire) = (Arc::clone(self), Arc::clone(&wire));
            std::thread::Builder::new()
                .name("wire".into())
                .spawn(move || own.pump(&wire, from, into, to_target))?;
        }
        Ok(())
    }

    fn pump(&self, wire: &Wire, from: Socket, into: Socket, to_target: bool) {
        let (mut words, mut buffer) = (Words::default(), vec![0; 64 << 10]);
        while let Ok((read @ 1.., descriptors)) = from.receive(&mut buffer) {
            let bytes = &mut buffer[..read];
            // Descriptors belong to the last message that came with them.
            let first = if descriptors.is_empty() { 0 } else { words.last_message(bytes) };
            let channel = *lock(&wire.channel);
            let channel = channel.or_else(|| {
                let first = if to_target { Words::role(bytes) } else { None };
                *lock(&wire.channel) = first;
                first
            });
            if channel == Some(Channel::Bulk) && to_target {
                let before = self.bulk.fetch_add(read as u64, Ordering::AcqRel);
                self.bulk_goes(before + read as u64);
            } else if channel == Some(Channel::Control) || !to_target {
                words.take(bytes, to_target, &mut |word| self.said(word));
            }
            match wire.harm.load(Ordering::Acquire) {
                harm if harm == Harm::Stall as u8 => {
                    // The proxy keeps reading and drops the bytes. A full socket alone must not
                    // reveal the stall.
                    continue;
                }
                // The connection stays open: `Wire::ends` keeps its sockets.
                harm if harm == Harm::Deaf as u8 => return,
                harm if harm == Harm::Corrupt as u8 => {
                    wire.harm.store(0, Ordering::Release);
                    bytes[read / 2] ^= 0x10;
                }
                harm if harm == Harm::Truncate as u8 => {
                    let _ = into.send(&bytes[..read / 2], &[]);
                    wire.close();
                    return;
                }
                _ => {}
            }
            let (before, with) = bytes.split_at(first);
            if into.send(before, &[]).and_then(|()| into.send(with, &descriptors)).is_err() {
                break;
            }
        }
        if wire.harm.load(Ordering::Acquire) != Harm::Stall as u8 {
            into.end();
        }
    }

    fn bulk_goes(&self, bytes: u64) {
        let stage = lock(&self.stage);
        let here = match stage.wanted {
            Some(Phase::FirstPass) => stage.first_pass && bytes > UNDER_WAY,
            // Any number of bytes counts: a guest that hardly runs on a busy host leaves few pages
            // for the postcopy phase, and most of them may go by the urgent channels.
            Some(Phase::Postcopy) => stage.running && bytes > 0,
            _ => false,
        };
        self.stop_at_phase(stage, here);
    }

    fn said(&self, word: Word) {
        let mut stage = lock(&self.stage);
        stage.running |= word == Word::Running;
        stage.first_pass |= word == Word::Pass(0);
        if word == Word::Running {
            self.bulk.store(0, Ordering::Release);
        }
        let here = match stage.wanted {
            Some(Phase::Setup) => word == Word::Setup,
            Some(Phase::LaterPass) => matches!(word, Word::Pass(1..)),
            Some(Phase::Switchover) => word == Word::StateEnd,
            Some(Phase::Commit) => word == Word::Commit,
            Some(Phase::Answer) => word == Word::Running,
            Some(Phase::Recovery) => word == Word::Resume,
            _ => false,
        };
        self.stop_at_phase(stage, here);
    }

    /// Marks the phase as reached if `here` is set, and blocks the pump until the release, for at
    /// most ten seconds.
    fn stop_at_phase(&self, mut stage: MutexGuard<'_, Stage>, here: bool) {
        if here && !stage.reached {
            stage.reached = true;
            self.changed.notify_all();
        }
        if stage.reached && stage.wanted.is_some() {
            let longest = Duration::from_secs(10);
            let _ = self.changed.wait_timeout_while(stage, longest, |stage| stage.wanted.is_some());
        }
    }
}

/// Control message that marks a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Setup,
    Pass(u32),
    StateEnd,
    Commit,
    Running,
    Resume,
}

/// Decoder of one direction of a control channel.
#[derive(Default)]
struct Words {
    greeted: bool,
    bytes: Vec<u8>,
}

impl Words {
    fn role(bytes: &[u8]) -> Option<Channel> {
        let hello = Hello::decode(bytes.first_chunk::<HELLO_BYTES>()?).ok()?;
        match hello.role {
            Role::Control => Some(Channel::Control),
            Role::Bulk => Some(Channel::Bulk),
            Role::Urgent => Some(Channel::Urgent),
            _ => None,
        }
    }

    /// Returns the offset in `bytes`, which follow what was taken, of the message that ends last.
    fn last_message(&self, bytes: &[u8]) -> usize {
        // The peers send each message at once, so a message begins where the bytes begin.
        let (mut first, mut next) = (0, if self.greeted { 0 } else { HELLO_BYTES });
        while let Some(header) = bytes.get(next..).and_then(<[u8]>::first_chunk) {
            first = next;
            let Ok(header) = ControlHeader::decode(header) else { break };
            next += CONTROL_HEADER_BYTES + header.len;
        }
        first.min(bytes.len())
    }

    fn take(&mut self, bytes: &[u8], to_target: bool, said: &mut dyn FnMut(Word)) {
        self.bytes.extend(bytes);
        if !self.greeted && self.bytes.len() >= HELLO_BYTES {
            self.greeted = true;
            self.bytes.drain(..HELLO_BYTES);
        }
        while self.greeted
            && let Some(header) = self.bytes.first_chunk()
        {
            let Ok(header) = ControlHeader::decode(header) else {
                // These bytes belong to another channel: page requests or echoes.
                self.bytes.clear();
                return;
            };
            let end = CONTROL_HEADER_BYTES + header.len;
            let Some(body) = self.bytes.get(CONTROL_HEADER_BYTES..end) else { return };
            let word = if to_target {
                match decode_control::<ToTarget>(header, body) {
                    Ok(ToTarget::Setup { .. }) => Some(Word::Setup),
                    Ok(ToTarget::Pass { pass, .. }) => Some(Word::Pass(pass)),
                    Ok(ToTarget::StateEnd { .. }) => Some(Word::StateEnd),
                    Ok(ToTarget::Commit) => Some(Word::Commit),
                    _ => None,
                }
            } else {
                match decode_control::<ToSource>(header, body) {
                    Ok(ToSource::Running { .. }) => Some(Word::Running),
                    Ok(ToSource::Resume { .. }) => Some(Word::Resume),
                    _ => None,
                }
            };
            self.bytes.drain(..end);
            if let Some(word) = word {
                said(word);
            }
        }
    }
}
