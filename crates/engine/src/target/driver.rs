//! The target's driver: does what the session decides, with real threads, sockets and a real VM.
//!
//! Threads and what they own: the caller's thread runs the session and the VM; one thread accepts connections; one reads
//! the control channel; one per bulk channel receives. They meet in one bounded queue of [`Input`]s.

use super::receiver::{Arrivals, ReceiveError, Receiver as PageReceiver};
use super::session::{Action, Event, Outcome, Session};
use super::{Arrival, Received};
use crate::channel::{Incoming, Stream, answer, read_message, send_message};
use crate::monitor::thread_cpu_us;
use crate::vm::{GuestMemory, TargetVm};
use crate::{MigrateError, Settings, random};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use vmferry_wire::{MigrationId, Refusal, RefusalCode, Role, Section, ToSource, ToTarget, Token};

/// How often the driver looks whether it should stop.
const TICK: Duration = Duration::from_millis(100);
/// How long a source may take to announce its guest. Until it has, it keeps others out and has shown nothing for it.
const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// What another thread reports, with the number of the attempt that it belongs to: a thread of an attempt that was
/// refused can report its end when the next source is already served. Connections belong to none.
pub(super) type Numbered = (u64, Input);

/// What other threads report.
pub(super) enum Input {
    Connected(Box<Incoming>),
    Message(ToTarget),
    ControlLost(io::Error),
    Barrier { channel: u16, pass: u32 },
    ChannelLost { channel: u16, error: ReceiveError },
}

/// One attempt of a source to bring its guest.
pub(super) struct Driver<'a> {
    vm: &'a mut dyn TargetVm,
    arrival: &'a Arrival,
    session: Session,
    /// The number of this attempt.
    attempt: u64,
    began: Instant,
    inputs: &'a Receiver<Numbered>,
    sender: SyncSender<Numbered>,
    /// Sources that came while this attempt was being wound up: they are served next.
    waiting: Vec<Incoming>,
    control: Arc<Stream>,
    migration: MigrationId,
    token: Token,
    bulk: Vec<Option<Arc<Stream>>>,
    threads: Vec<JoinHandle<()>>,
    arrivals: Arc<Arrivals>,
    memory: Arc<dyn GuestMemory>,
    cpu_us: Arc<AtomicU64>,
    load: Duration,
}

impl<'a> Driver<'a> {
    pub(super) fn run(
        vm: &'a mut dyn TargetVm,
        arrival: &'a Arrival,
        (sender, inputs): (&SyncSender<Numbered>, &'a Receiver<Numbered>),
        attempt: u64,
        incoming: Incoming,
    ) -> Result<Attempt, MigrateError> {
        let (token, urgent) = (Token(random()?), Token(random()?));
        let memory = vm.memory();
        let mut driver = Driver {
            session: Session::begin(vm.config(), (token, urgent)),
            vm,
            arrival,
            attempt,
            began: Instant::now(),
            inputs,
            sender: sender.clone(),
            waiting: Vec::new(),
            control: Arc::new(incoming.stream),
            migration: incoming.hello.migration,
            token,
            bulk: Vec::new(),
            threads: Vec::new(),
            arrivals: Arc::new(Arrivals::new(&*memory)),
            memory,
            cpu_us: Arc::default(),
            load: Duration::ZERO,
        };
        let cpu_before = thread_cpu_us();
        let timeout = Some(arrival.peer_timeout);
        let greeted = driver
            .control
            .set_timeouts(timeout, timeout)
            .and_then(|()| answer(&driver.control, &incoming.hello, Ok(())))
            .and_then(|()| driver.read_control());
        let outcome = match greeted {
            Ok(()) => driver.drive(),
            Err(error) => {
                Outcome::Failed(Refusal::new(RefusalCode::Other, format!("the link failed: {error}")))
            }
        };
        driver.close(&outcome);
        let accepted = driver.session.accepted();
        let threads = driver.cpu_us.load(Ordering::Relaxed);
        Ok(Attempt {
            accepted,
            outcome,
            waiting: std::mem::take(&mut driver.waiting),
            received: Received {
                id: driver.migration.to_string(),
                source: driver.control.peer.clone(),
                pages: driver.arrivals.pages(),
                load_ms: driver.load.as_secs_f64() * 1e3,
                cpu_ms: (threads + thread_cpu_us().saturating_sub(cpu_before)) as f64 / 1e3,
            },
        })
    }

    fn read_control(&mut self) -> io::Result<()> {
        let (control, inputs, attempt) = (Arc::clone(&self.control), self.sender.clone(), self.attempt);
        let read = move || loop {
            let input = match read_message(&control) {
                Ok(message) => Input::Message(message),
                Err(error) => Input::ControlLost(error),
            };
            let last = matches!(input, Input::ControlLost(_));
            if inputs.send((attempt, input)).is_err() || last {
                return;
            }
        };
        self.threads.push(Builder::new().name("target-control".into()).spawn(read)?);
        Ok(())
    }

    fn drive(&mut self) -> Outcome {
        let mut actions = VecDeque::new();
        loop {
            while let Some(action) = actions.pop_front() {
                if let Action::Finish(outcome) = action {
                    return outcome;
                }
                if let Some(event) = self.perform(action) {
                    actions.extend(self.session.handle(event));
                }
            }
            if let Some(event) = self.wait() {
                actions.extend(self.session.handle(event));
            }
        }
    }

    /// The next input of this attempt, or a new connection.
    fn next_input(&self, within: Duration) -> Result<Option<Input>, RecvTimeoutError> {
        let (attempt, input) = self.inputs.recv_timeout(within)?;
        Ok((attempt == self.attempt || matches!(input, Input::Connected(_))).then_some(input))
    }

    fn wait(&mut self) -> Option<Event> {
        // Looked at every time: a source that never stops talking must not keep us from it.
        if self.arrival.stopped() {
            let why = Refusal::new(RefusalCode::Cancelled, "the target was told to stop");
            return Some(Event::LocalFailure(why));
        }
        if !self.session.accepted() && self.began.elapsed() > SETUP_TIMEOUT {
            return Some(Event::PeerLost(format!(
                "{} said hello and announced no guest within {SETUP_TIMEOUT:?}",
                self.control.peer
            )));
        }
        match self.next_input(TICK).ok().flatten()? {
            Input::Connected(incoming) => self.connected(*incoming),
            Input::Message(message) => Some(Event::Message(message)),
            Input::ControlLost(error) => Some(Event::PeerLost(match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                    format!("the source {} went away before it handed over the guest", self.control.peer)
                }
                io::ErrorKind::TimedOut => {
                    format!(
                        "nothing was heard of the source {} for {:?}",
                        self.control.peer, self.arrival.peer_timeout
                    )
                }
                _ => format!("the link to the source {} failed: {error}", self.control.peer),
            })),
            Input::Barrier { channel, pass } => Some(Event::Barrier { channel, pass }),
            Input::ChannelLost { channel, error } => self.channel_lost(channel, &error),
        }
    }

    /// A channel that ends before the commit takes the migration with it. Which side was at fault matters to the
    /// reader: a cancelled source closes its channels, and says why on the control channel.
    fn channel_lost(&mut self, channel: u16, error: &ReceiveError) -> Option<Event> {
        if self.session.memory_complete() {
            return None;
        }
        if let ReceiveError::Link(link) = error
            && matches!(link.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
        {
            let deadline = Instant::now() + Duration::from_millis(500);
            while let Some(left) = deadline.checked_duration_since(Instant::now()) {
                match self.next_input(left) {
                    Ok(Some(Input::Message(message @ (ToTarget::Cancel(_) | ToTarget::Commit)))) => {
                        return Some(Event::Message(message));
                    }
                    Ok(Some(Input::ControlLost(_))) | Err(_) => break,
                    Ok(_) => {}
                }
            }
            return Some(Event::PeerLost(format!("the source {} broke off", self.control.peer)));
        }
        let detail = format!("channel {channel} from {}: {error}", self.control.peer);
        Some(Event::LocalFailure(Refusal::new(RefusalCode::Memory, detail)))
    }

    fn connected(&mut self, incoming: Incoming) -> Option<Event> {
        let Incoming { stream, hello } = incoming;
        let verdict = match hello.role {
            Role::Control => Err(RefusalCode::Busy),
            Role::Urgent => Err(RefusalCode::Feature),
            Role::Bulk => match self.bulk.get(usize::from(hello.index)) {
                Some(None) if hello.migration == self.migration && hello.token == self.token => Ok(()),
                _ => Err(RefusalCode::Token),
            },
        };
        if let Err(error) = answer(&stream, &hello, verdict) {
            tracing::warn!("{}: the answer to its hello was lost: {error}", stream.peer);
            return None;
        }
        if verdict.is_err() {
            return None;
        }
        match self.start_receiver(stream, hello.index) {
            Ok(()) => Some(Event::ChannelUp),
            Err(error) => Some(Event::LocalFailure(Refusal::new(
                RefusalCode::Other,
                format!("the target's host refused a thread for a channel: {error}"),
            ))),
        }
    }

    fn start_receiver(&mut self, stream: Stream, channel: u16) -> io::Result<()> {
        // No timeout: a bulk channel is silent while nothing is dirty; the control channel tells whether the peer lives.
        stream.set_timeouts(None, None)?;
        let stream = Arc::new(stream);
        self.bulk[usize::from(channel)] = Some(Arc::clone(&stream));
        let (memory, arrivals) = (Arc::clone(&self.memory), Arc::clone(&self.arrivals));
        let (inputs, cpu_us, attempt) = (self.sender.clone(), Arc::clone(&self.cpu_us), self.attempt);
        let receive = move || {
            let mut receiver = PageReceiver::new(&*memory, &arrivals, &*stream);
            let mut counted = 0;
            loop {
                let result = receiver.receive_pass();
                let used = thread_cpu_us();
                cpu_us.fetch_add(used - counted, Ordering::Relaxed);
                counted = used;
                let (input, last) = match result {
                    Ok(pass) => (Input::Barrier { channel, pass }, false),
                    Err(error) => (Input::ChannelLost { channel, error }, true),
                };
                if inputs.send((attempt, input)).is_err() || last {
                    return;
                }
            }
        };
        self.threads.push(Builder::new().name(format!("target-bulk-{channel}")).spawn(receive)?);
        Ok(())
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::AwaitChannels(count) => {
                debug_assert!(count <= Settings::MAX_CHANNELS);
                self.bulk = vec![None; usize::from(count)];
                None
            }
            Action::CountSuspects { pass } => {
                let (pages, runs) = self.arrivals.suspects();
                Some(Event::Suspects { pass, pages, runs })
            }
            Action::CountDifferences => {
                let (pages, mismatched, samples) = self.arrivals.differences();
                Some(Event::Compared { pages, mismatched, samples })
            }
            Action::Load(sections) => Some(self.load(&sections)),
            Action::Start => Some(self.start()),
            Action::Finish(_) => None,
        }
    }

    fn send(&self, message: &ToSource) -> Option<Event> {
        // Once the guest runs, a lost answer is the source's problem: it will say that it does not know.
        let failed = send_message(&self.control, message, self.arrival.peer_timeout).err()?;
        Some(Event::PeerLost(format!(
            "the link to the source {} failed: {}",
            self.control.peer, failed.error
        )))
    }

    fn load(&mut self, sections: &[Section]) -> Event {
        // From here on nobody may write the guest's memory but the guest: what a source still sends is refused.
        if !self.arrivals.seal() {
            let detail = "pages were still arriving, or damaged, when the source said that all had been sent";
            return Event::LocalFailure(Refusal::new(RefusalCode::Protocol, detail));
        }
        let began = Instant::now();
        match self.vm.load(sections) {
            Ok(()) => {
                self.load = began.elapsed();
                Event::Loaded { micros: micros(self.load) }
            }
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::State, error.to_string())),
        }
    }

    fn start(&mut self) -> Event {
        let began = Instant::now();
        match self.vm.start() {
            Ok(()) => {
                let cpu_us = self.cpu_us.load(Ordering::Relaxed) + thread_cpu_us();
                Event::Started { micros: micros(began.elapsed()), cpu_us }
            }
            Err(error) => Event::StartFailed(Refusal::new(
                RefusalCode::State,
                format!("the vCPUs could not be started on the target: {error}"),
            )),
        }
    }

    /// Leaves no thread behind, and lets our last word arrive: closing a socket with unread bytes in it would destroy
    /// what we sent last, so the control channel is read to its end first, for a second at most.
    fn close(&mut self, outcome: &Outcome) {
        if matches!(outcome, Outcome::Failed(_)) {
            self.control.finish();
        }
        let deadline = Instant::now() + Duration::from_secs(1);
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            match self.next_input(left) {
                Ok(Some(Input::ControlLost(_))) | Err(_) => break,
                Ok(Some(Input::Connected(incoming))) => self.keep(*incoming),
                Ok(_) => {}
            }
        }
        self.bulk.iter().flatten().for_each(|stream| stream.shutdown());
        self.control.shutdown();
        // Threads that wait for room in the queue must find it until they have ended.
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if let Ok(Some(Input::Connected(incoming))) = self.next_input(Duration::from_millis(1)) {
                self.keep(*incoming);
            }
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a channel's thread panicked");
            }
        }
    }
}

impl Driver<'_> {
    fn keep(&mut self, incoming: Incoming) {
        // A guest that came ends the wait for others, and channels of an attempt that has ended are nobody's.
        if incoming.hello.role == Role::Control && self.waiting.len() < 16 {
            self.waiting.push(incoming);
        }
    }
}

/// How one attempt ended.
pub(super) struct Attempt {
    /// Whether a guest had been announced that fits; after that, memory is no longer empty.
    pub(super) accepted: bool,
    pub(super) outcome: Outcome,
    /// Sources that came meanwhile.
    pub(super) waiting: Vec<Incoming>,
    pub(super) received: Received,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Kept by the acceptor: where connections go.
pub(super) fn forward(inputs: &SyncSender<Numbered>) -> impl Fn(Incoming) + Send + Sync + Clone + 'static {
    let inputs = Arc::new(Mutex::new(inputs.clone()));
    move |incoming| {
        let sender = inputs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let _ = sender.send((0, Input::Connected(Box::new(incoming))));
    }
}
