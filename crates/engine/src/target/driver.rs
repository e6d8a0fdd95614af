//! The target's driver: does what the session decides, with real threads, sockets and a real VM.
//!
//! Threads and what they own: the caller's thread runs the session and the VM; one thread accepts connections; one reads
//! the control channel; one per channel receives ([`Link`]). They meet in one bounded queue of [`Input`]s.

mod lazily;

use super::channels::Link;
use super::receiver::ReceiveError;
use super::rest::Rest;
use super::session::{Action, Event, Outcome, Session};
use super::{Arrival, Received};
use crate::MigrateError;
use crate::channel::{Incoming, answer, send_message};
use crate::fence::{Asker, Word};
use crate::heartbeat::Heartbeat;
use crate::lacking::Collected;
use crate::monitor::thread_cpu_us;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::{LazyMemory, Section, TargetVm};
use vmferry_wire::{FEATURE_COSTS, Refusal, RefusalCode, Role, ToSource, ToTarget};

/// How often the driver looks whether it should stop.
const TICK: Duration = Duration::from_millis(100);
/// How long a source may take to announce its guest. Until it has, it keeps others out and has shown nothing for it.
pub(super) const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// What another thread reports, with the number of the attempt that it belongs to: a thread of an attempt that was
/// refused can report its end when the next source is already served. Connections belong to none.
pub(super) type Numbered = (u64, Input);

/// What other threads report.
pub(super) enum Input {
    Connected(Box<Incoming>),
    Message(ToTarget),
    ControlLost(io::Error),
    /// There is something to look at.
    Wake,
    Barrier {
        channel: u16,
        pass: u32,
    },
    AllHere,
    ChannelLost {
        role: Role,
        channel: u16,
        error: ReceiveError,
    },
}

/// One attempt of a source to bring its guest.
pub(super) struct Driver<'a> {
    vm: &'a mut dyn TargetVm,
    arrival: &'a Arrival,
    session: Session,
    began: Instant,
    inputs: &'a Receiver<Numbered>,
    /// Sources that came while this attempt was being wound up: they are served next.
    waiting: Vec<Incoming>,
    link: Link,
    /// What speaks for this side while the VM is at work.
    heart: Option<Heartbeat>,
    /// The control channel's reader has ended: no last word is to be waited for.
    control_lost: bool,
    load: Duration,
    /// There once a guest was announced that may run before all of its memory is here.
    lazy_memory: Option<Arc<dyn LazyMemory>>,
    lacking: Collected,
    fault_threads: Vec<JoinHandle<()>>,
    /// Who decides who owns the guest.
    fence: Option<Asker>,
}

impl<'a> Driver<'a> {
    pub(super) fn run(
        vm: &'a mut dyn TargetVm,
        arrival: &'a Arrival,
        (sender, inputs): (&SyncSender<Numbered>, &'a Receiver<Numbered>),
        attempt: u64,
        incoming: Incoming,
    ) -> Result<Attempt, MigrateError> {
        let memory = vm.memory();
        let hello = incoming.hello.clone();
        let lacking = Collected::new(memory.layout());
        let link = Link::new(attempt, incoming, sender.clone(), memory)?;
        let wants_costs = hello.features & FEATURE_COSTS != 0;
        let load = if wants_costs { vm.expected_load() } else { None };
        let session = Session::begin(vm.config(), link.tokens).expecting(load);
        let mut driver = Driver {
            session: session.fenced(arrival.fence.is_some()),
            fence: arrival.fence.clone().map(|fence| Asker::new(fence, link.migration)),
            vm,
            arrival,
            began: Instant::now(),
            inputs,
            waiting: Vec::new(),
            link,
            heart: None,
            control_lost: false,
            load: Duration::ZERO,
            lazy_memory: None,
            lacking,
            fault_threads: Vec::new(),
        };
        let cpu_before = thread_cpu_us();
        let timeout = Some(arrival.peer_timeout);
        let greeted = driver
            .link
            .control
            .set_timeouts(timeout, timeout)
            .and_then(|()| answer(&driver.link.control, &hello, Ok(())))
            .and_then(|()| {
                driver.heart = Some(Heartbeat::of_target(arrival.peer_timeout)?);
                driver.link.read_control(arrival.peer_timeout)
            });
        let outcome = match greeted {
            Ok(()) => driver.drive(),
            Err(error) => {
                Outcome::Failed(Refusal::new(RefusalCode::Other, format!("the link failed: {error}")))
            }
        };
        let own_cpu_us = thread_cpu_us().saturating_sub(cpu_before);
        Ok(driver.wind_up(outcome, own_cpu_us))
    }

    fn wind_up(mut self, outcome: Outcome, own_cpu_us: u64) -> Attempt {
        let runs_lazily = outcome == Outcome::RunsLazily;
        if !runs_lazily {
            self.close(&outcome);
        }
        let accepted = self.session.accepted();
        let threads = self.link.cpu_us.load(Ordering::Relaxed);
        let received = Received {
            id: self.link.migration.to_string(),
            source: self.link.control.peer.clone(),
            pages: self.link.arrivals.pages(),
            load_ms: self.load.as_secs_f64() * 1e3,
            cpu_ms: (threads + own_cpu_us) as f64 / 1e3,
            rest: None,
            copy_of: None,
        };
        let rest = runs_lazily.then(|| Rest::new(self.session, self.link, self.fault_threads));
        Attempt { accepted, outcome, waiting: std::mem::take(&mut self.waiting), received, rest }
    }

    fn drive(&mut self) -> Outcome {
        let mut actions = VecDeque::new();
        loop {
            while let Some(action) = actions.pop_front() {
                if let Action::Finish(outcome) = action {
                    return outcome;
                }
                if let Some(event) = self.perform(action) {
                    let before = self.session.ended();
                    let more = self.session.handle(event);
                    if !before && self.session.ended() {
                        // A state must not be loaded over memory that could not be prepared, nor a guest accepted. Once
                        // only: a last word that cannot be sent must not take the end with it.
                        actions.clear();
                    }
                    actions.extend(more);
                }
            }
            self.arrival.show(self.session.undecided());
            if let Some(event) = self.wait() {
                actions.extend(self.session.handle(event));
            }
        }
    }

    /// The next input of this attempt, or a new connection.
    fn next_input(&mut self, within: Duration) -> Result<Option<Input>, RecvTimeoutError> {
        let (attempt, input) = self.inputs.recv_timeout(within)?;
        let ours = attempt == self.link.attempt;
        self.control_lost |= ours && matches!(input, Input::ControlLost(_));
        Ok((ours || matches!(input, Input::Connected(_))).then_some(input))
    }

    fn wait(&mut self) -> Option<Event> {
        // Looked at every time: a source that never stops talking must not keep us from it.
        if self.arrival.stopped() && self.session.heeds_stop() {
            return Some(Event::Stopped);
        }
        if self.session.awaits_setup() && self.began.elapsed() > self.arrival.setup_timeout() {
            return Some(Event::PeerLost(format!(
                "{} said hello and announced no guest within {SETUP_TIMEOUT:?}",
                self.link.control.peer
            )));
        }
        if let Some((word, answer)) = self.fence.as_ref().and_then(Asker::answer) {
            return Some(Event::Ruled(word, answer));
        }
        if let Some(incoming) = self.link.late.pop_front() {
            return self.connected(incoming);
        }
        let input = self.next_input(TICK).ok().flatten()?;
        let peer = &self.link.control.peer;
        match input {
            Input::Connected(incoming) => self.connected(*incoming),
            Input::Message(message) => Some(Event::Message(message)),
            Input::Wake => None,
            Input::ControlLost(error) => Some(Event::PeerLost(match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                    format!("the source {peer} went away before it handed over the guest")
                }
                io::ErrorKind::TimedOut => {
                    format!("nothing was heard of the source {peer} for {:?}", self.arrival.peer_timeout)
                }
                _ => format!("the link to the source {peer} failed: {error}"),
            })),
            Input::Barrier { channel, pass } => Some(Event::Barrier { channel, pass }),
            Input::AllHere => self.link.arrivals.lazy().map(|lazy| Event::AllHere(lazy.figures())),
            Input::ChannelLost { role, channel, error } => self.channel_lost(role, channel, &error),
        }
    }

    /// A channel that ends before the commit takes the migration with it. Which side was at fault matters to the
    /// reader: a cancelled source closes its channels, and says why on the control channel.
    fn channel_lost(&mut self, role: Role, channel: u16, error: &ReceiveError) -> Option<Event> {
        if self.session.memory_complete() || self.session.renounced() {
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
            return Some(Event::PeerLost(format!("the source {} broke off", self.link.control.peer)));
        }
        let detail = format!("{role:?} channel {channel} from {}: {error}", self.link.control.peer);
        Some(Event::LocalFailure(Refusal::new(RefusalCode::Memory, detail)))
    }

    fn connected(&mut self, incoming: Incoming) -> Option<Event> {
        if incoming.hello.role == Role::Control {
            return self.control_back(incoming);
        }
        Some(match self.link.connected(incoming)? {
            Ok(()) => Event::ChannelUp,
            Err(error) => Event::LocalFailure(Refusal::new(
                RefusalCode::Other,
                format!("the target's host refused a thread for a channel: {error}"),
            )),
        })
    }

    /// Only the source of a guest that may have been committed is heard beside this attempt's own control channel.
    fn control_back(&mut self, incoming: Incoming) -> Option<Event> {
        let ours = self.session.may_be_asked() && self.link.named_by(&incoming);
        let verdict = if ours { Ok(()) } else { Err(RefusalCode::Busy) };
        if let Err(error) = answer(&incoming.stream, &incoming.hello, verdict) {
            tracing::warn!("{}: the answer to its hello was lost: {error}", incoming.stream.peer);
            return None;
        }
        verdict.ok()?;
        self.control_lost = false;
        Some(match self.link.take_up(incoming, self.inputs, self.arrival.peer_timeout) {
            Ok(()) => Event::ControlBack,
            Err(error) => Event::PeerLost(format!("the new control channel cannot be used: {error}")),
        })
    }

    /// The link is lost, and the guest runs already, or never will.
    fn disconnect(&self) {
        if self.session.renounced() {
            tracing::warn!(
                "the link to the source {} was lost before the guest was started here: it will not run here. The source is told                  so as soon as it asks; end this side only when the guest runs there",
                self.link.control.peer
            );
        }
        self.link.shutdown();
        self.link.control.shutdown();
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::PrepareLazily => Some(self.prepare_lazily()),
            Action::AwaitChannels(channels) => {
                self.link.await_channels(channels);
                None
            }
            Action::CountSuspects { pass } => {
                let (pages, runs) = self.link.arrivals.suspects();
                Some(Event::Suspects { pass, pages, runs })
            }
            Action::CountDifferences => {
                let (pages, mismatched, samples) = self.link.arrivals.differences();
                Some(Event::Compared { pages, mismatched, samples })
            }
            Action::TakeLacking(piece) => self.take_lacking(&piece),
            Action::BeginLazily { pages } => self.begin_lazily(pages),
            Action::Load(sections) => Some(self.load(&sections)),
            Action::Fence { word, after } => {
                self.ask_fence(word, after);
                None
            }
            Action::Start => Some(self.start()),
            Action::Disconnect => {
                self.disconnect();
                None
            }
            Action::EndLazily => {
                self.link.arrivals.lazy().inspect(|lazy| lazy.end());
                None
            }
            // For the time after this driver.
            Action::Retell | Action::AskAgain | Action::Finish(_) => None,
        }
    }

    fn send(&self, message: &ToSource) -> Option<Event> {
        // Once the guest runs, a lost answer is the source's problem: it will say that it does not know.
        let failed = send_message(&self.link.control, message, self.arrival.peer_timeout).err()?;
        Some(Event::PeerLost(format!(
            "the link to the source {} failed: {}",
            self.link.control.peer, failed.error
        )))
    }

    fn ask_fence(&self, word: Word, after: Duration) {
        let Some(fence) = &self.fence else { return };
        if word == Word::Runs {
            return fence.confirm();
        }
        let (inputs, attempt) = (self.link.inputs.clone(), self.link.attempt);
        // A full queue is being read.
        fence.ask(word, after, move || drop(inputs.try_send((attempt, Input::Wake))));
    }

    /// Has the VM do something; the source hears of this side meanwhile.
    fn busy<T>(&mut self, work: impl FnOnce(&mut dyn TargetVm) -> T) -> T {
        let vm = &mut *self.vm;
        match &self.heart {
            Some(heart) => heart.during(&self.link.control, || work(vm)),
            None => work(vm),
        }
    }

    fn load(&mut self, sections: &[Section]) -> Event {
        // From here on nobody may write the guest's memory but the guest: what a source still sends is refused.
        if self.link.arrivals.lazy().is_none() && !self.link.arrivals.seal() {
            let detail = "pages were still arriving, or damaged, when the source said that all had been sent";
            return Event::LocalFailure(Refusal::new(RefusalCode::Protocol, detail));
        }
        let began = Instant::now();
        let loaded = self.busy(|vm| vm.load(sections));
        if self.link.arrivals.lazy().is_some_and(|lazy| lazy.abandoned()) {
            // Perhaps over zeros. The source was not told that the state is loaded, so it has not committed.
            let peer = &self.link.control.peer;
            return Event::PeerLost(format!(
                "the link to the source {peer} was lost while the state was loaded"
            ));
        }
        match loaded {
            Ok(()) => {
                self.load = began.elapsed();
                Event::Loaded { micros: micros(self.load) }
            }
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::State, error.to_string())),
        }
    }

    fn start(&mut self) -> Event {
        let failed = |detail| Event::StartFailed(Refusal::new(RefusalCode::State, detail));
        if self.link.arrivals.lazy().is_some_and(|lazy| !lazy.commit()) {
            return failed("the link was lost before the guest was started on the target".to_owned());
        }
        let began = Instant::now();
        match self.busy(|vm| vm.start()) {
            Ok(()) => {
                if let Some(lazy) = self.link.arrivals.lazy() {
                    lazy.memory.started();
                }
                let cpu_us = self.link.cpu_us.load(Ordering::Relaxed) + thread_cpu_us();
                Event::Started { micros: micros(began.elapsed()), cpu_us }
            }
            Err(error) => failed(format!("the guest could not be started on the target: {error}")),
        }
    }

    /// Leaves no thread behind, and lets our last word arrive: closing a socket with unread bytes in it would destroy
    /// what we sent last, so the control channel is read to its end first, for a second at most.
    fn close(&mut self, outcome: &Outcome) {
        if let Some(lazy) = self.link.arrivals.lazy() {
            lazy.end();
        }
        if matches!(outcome, Outcome::Failed(_)) {
            self.link.control.finish();
        }
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.control_lost
            && let Some(left) = deadline.checked_duration_since(Instant::now())
        {
            match self.next_input(left) {
                Err(_) => break,
                Ok(Some(Input::Connected(incoming))) => self.keep(*incoming),
                Ok(_) => {}
            }
        }
        self.link.shutdown();
        self.link.control.shutdown();
        // Threads that wait for room in the queue must find it until they have ended.
        while self.link.at_work() {
            if let Ok(Some(Input::Connected(incoming))) = self.next_input(Duration::from_millis(1)) {
                self.keep(*incoming);
            }
        }
        self.link.join();
        for thread in self.fault_threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a fault thread panicked");
            }
        }
    }

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
    /// What is still to come for a guest that runs already.
    pub(super) rest: Option<Rest>,
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
