//! Host of the target's session, with real threads, sockets and a real VM.
//!
//! Threads and their work:
//!
//! - The caller's thread runs the session and the VM.
//! - One thread accepts connections.
//! - One thread reads the control channel.
//! - One thread for each other channel receives ([`Link`]).
//!
//! All of these threads report to the caller's thread through one bounded queue of [`Input`]s.

mod handover;

use super::channels::Link;
use super::inbox::{self, Inbox, Sources};
use super::postcopy::PostcopyReceiver;
use super::session::{Action, Event, Outcome, Session};
use super::{Arrival, MOST_WAITING, ReceiveFailure, Received};
use crate::MigrateError;
use crate::arbiter::{ArbiterAnswer, ArbiterClient, ArbiterRequest};
use crate::channel::{Greeted, accept, answer, send_message};
use crate::clock::Clock;
use crate::handle::thread_cpu_us;
use crate::handoff;
use crate::heartbeat::Heartbeat;
use crate::run::{self, ActionQueue, Host};
use handover::Handover;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmferry_core::{RunState, Section, StateWriter, StreamName, TargetVm, VmError};
use vmferry_wire::{
    FEATURE_COSTS, FEATURE_TRIAL, LocalRegion, Refusal, RefusalCode, Role, ToSource, ToTarget,
};

/// Report of another thread, with the number of the attempt that the thread belongs to. The number
/// is needed because a thread of a refused attempt may report its end when the next source is
/// already being served. Connections belong to no attempt.
pub(super) type Numbered = inbox::Numbered<Box<Greeted>>;
/// Report of another thread.
pub(super) type Input = inbox::Input<Box<Greeted>>;

/// Announcement of a guest by a source, read before there was a VM for it.
pub(super) struct Announcement {
    /// `Setup` message of the source.
    pub(super) setup: ToTarget,
    /// Heartbeat that has sent messages for the target since the announcement.
    pub(super) heartbeat: Heartbeat,
}

/// One attempt of a source to move its guest to this target.
pub(super) struct Driver<'a> {
    vm: &'a mut dyn TargetVm,
    arrival: &'a Arrival,
    session: Session,
    action_queue: ActionQueue<Action>,
    inbox: Inbox,
    clock: Clock,
    inputs: &'a Receiver<Numbered>,
    /// Sources that connected while this attempt was being ended. They are served next.
    waiting: Vec<Greeted>,
    link: Link,
    /// Heartbeat that sends messages for the target while the VM works.
    heartbeat: Option<Heartbeat>,
    load: Duration,
    /// Streams of device state.
    streams: Vec<Box<dyn StateWriter>>,
    /// True if the guest was left paused at its start, because its operator has paused it.
    paused: bool,
    handover: Handover,
    /// Announcement of the guest, if it was read before there was a VM.
    announced: Option<Event>,
    /// Arbiter that decides who owns the guest.
    arbiter: Option<ArbiterClient>,
}

impl<'a> Driver<'a> {
    pub(super) fn run(
        vm: &'a mut dyn TargetVm,
        arrival: &'a Arrival,
        (sender, inputs): (&SyncSender<Numbered>, &'a Receiver<Numbered>),
        attempt: u64,
        incoming: Greeted,
        announced: Option<Announcement>,
    ) -> Result<Attempt, MigrateError> {
        let memory = vm.memory();
        let hello = incoming.hello.clone();
        let handover = Handover::new(memory.layout());
        let link = Link::new(attempt, incoming, sender.clone(), memory)?.knowing(arrival.known().clone());
        let wants_costs = hello.features & FEATURE_COSTS != 0;
        let load = if wants_costs { vm.expected_load() } else { None };
        let wants_trial = hello.features & FEATURE_TRIAL != 0 && vm.wants_trial();
        let has = arrival.features(&link.control, &hello);
        let session = Session::begin(vm.config(), link.tokens).expecting(load).wanting_trial(wants_trial);
        let session = session.taking_memory(has.local_memory);
        let mut driver = Driver {
            session: session.with_arbiter(arrival.arbiter.is_some()),
            arbiter: arrival.arbiter.clone().map(|arbiter| ArbiterClient::new(arbiter, link.migration)),
            vm,
            arrival,
            action_queue: ActionQueue::new(Vec::new()),
            inbox: Inbox::new(Duration::ZERO),
            clock: Clock::start(),
            inputs,
            waiting: Vec::new(),
            link,
            heartbeat: None,
            load: Duration::ZERO,
            streams: Vec::new(),
            paused: false,
            handover,
            announced: None,
        };
        let cpu_before = thread_cpu_us();
        let timeout = Some(arrival.peer_timeout);
        let greeted = driver
            .link
            .control
            .set_timeouts(timeout, timeout)
            .and_then(|()| {
                let Some(Announcement { setup, heartbeat }) = announced else {
                    driver.heartbeat = Some(Heartbeat::of_target(arrival.peer_timeout)?);
                    return accept(&driver.link.control, &hello, has);
                };
                heartbeat.end();
                driver.heartbeat = Some(heartbeat);
                driver.announced = Some(Event::Message(setup));
                Ok(())
            })
            .and_then(|()| driver.link.read_control(arrival.peer_timeout, has.local_memory));
        let outcome = match greeted {
            Ok(()) => {
                let Ok(outcome) = run::advance(&mut driver);
                outcome
            }
            Err(error) => {
                Outcome::Failed(Refusal::new(RefusalCode::Other, format!("the link failed: {error}")))
            }
        };
        let own_cpu_us = thread_cpu_us().saturating_sub(cpu_before);
        Ok(driver.wind_up(outcome, own_cpu_us))
    }

    fn wind_up(mut self, outcome: Outcome, own_cpu_us: u64) -> Attempt {
        let runs_in_postcopy = outcome == Outcome::Running;
        if !runs_in_postcopy {
            self.close(&outcome);
        }
        let accepted = self.session.accepted();
        let threads = self.link.cpu_us.load(Ordering::Relaxed);
        let received = Received {
            id: self.link.migration.to_string(),
            source: self.link.control.peer.clone(),
            pages: self.link.arrivals.pages(),
            known_pages: self.link.arrivals.known(),
            paused: self.paused,
            load_ms: self.load.as_secs_f64() * 1e3,
            cpu_ms: (threads + own_cpu_us) as f64 / 1e3,
            postcopy: None,
            copy_of: None,
        };
        let postcopy = runs_in_postcopy.then(|| {
            PostcopyReceiver::new((self.session, self.action_queue), self.link, self.handover.take_threads())
        });
        Attempt { accepted, outcome, waiting: std::mem::take(&mut self.waiting), received, postcopy }
    }

    fn take_connection(&mut self, incoming: Greeted) -> Option<Event> {
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

    /// Answers a new control channel. It is accepted only from the source of this attempt, and only
    /// if that source may have sent the commit.
    fn control_back(&mut self, incoming: Greeted) -> Option<Event> {
        let ours = self.session.accepts_new_link() && self.link.named_by(&incoming);
        let verdict = if ours { Ok(()) } else { Err(RefusalCode::Busy) };
        if let Err(error) = answer(&incoming.stream, &incoming.hello, verdict) {
            tracing::warn!("{}: the answer to its hello was lost: {error}", incoming.stream.peer);
            return None;
        }
        verdict.ok()?;
        self.inbox.reopened();
        Some(match self.link.take_up(incoming, self.inputs, self.arrival.peer_timeout) {
            Ok(()) => Event::ControlReopened,
            Err(error) => Event::PeerLost(format!("the new control channel cannot be used: {error}")),
        })
    }

    /// Shuts down a link that is lost. The guest already runs on the target, or will never run
    /// there.
    fn disconnect(&self) {
        if self.session.renounced() {
            tracing::warn!(
                "the link to the source {} was lost before the guest was started on the target: the guest will not \
                 run on the target. The source learns this when it reconnects; end the target only if the link \
                 cannot be restored, or if the guest runs on the source",
                self.link.control.peer
            );
        }
        self.link.shutdown();
        self.link.control.shutdown();
    }

    fn send(&self, message: &ToSource) -> Option<Event> {
        // Once the guest runs, a lost answer affects only the source, which then reports that the
        // owner is unknown.
        let failed = send_message(&self.link.control, message, self.arrival.peer_timeout).err()?;
        Some(Event::PeerLost(format!(
            "the link to the source {} failed: {}",
            self.link.control.peer, failed.error
        )))
    }

    fn ask_arbiter(&self, request: ArbiterRequest, after: Duration) {
        let Some(arbiter) = &self.arbiter else { return };
        if request == ArbiterRequest::Runs {
            return arbiter.confirm();
        }
        let (inputs, attempt) = (self.link.inputs.clone(), self.link.attempt);
        // A failed wake needs no handling: if the queue is full, the driver is reading it.
        arbiter.send(request, after, move || drop(inputs.try_send((attempt, Input::Wake))));
    }

    /// Calls the VM. The heartbeat sends messages to the source meanwhile.
    fn busy<T>(&mut self, work: impl FnOnce(&mut dyn TargetVm) -> T) -> T {
        let vm = &mut *self.vm;
        match &self.heartbeat {
            Some(heartbeat) => heartbeat.during(&self.link.control, || work(vm)),
            None => work(vm),
        }
    }

    fn load(&mut self, sections: &[Section]) -> Event {
        // From now on, only the guest may write its memory, and further pages from the source are
        // refused.
        if self.link.arrivals.pager().is_none() && !self.link.arrivals.seal() {
            let detail = "pages were still arriving, or had a digest mismatch, when the source reported that all had been sent";
            return Event::LocalFailure(Refusal::new(RefusalCode::Protocol, detail));
        }
        // The session has finished every stream before the load.
        self.streams.clear();
        let began = self.now();
        let loaded = self.busy(|vm| vm.load(sections));
        if self.link.arrivals.pager().is_some_and(|pager| pager.pages.abandoned()) {
            // The device state may have been loaded over zeros, so the guest must not run. The
            // source has not sent the commit, because it was not told that the state is loaded.
            let peer = &self.link.control.peer;
            return Event::PeerLost(format!(
                "the link to the source {peer} was lost while the state was loaded"
            ));
        }
        match loaded {
            Ok(()) => {
                self.load = self.clock.since(began);
                Event::Loaded { micros: micros(self.load) }
            }
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::State, error.to_string())),
        }
    }

    fn open_stream(&mut self, name: &StreamName) -> Option<Event> {
        match self.busy(|vm| vm.stream(name)) {
            Ok(writer) => self.streams.push(writer),
            Err(error) => return Some(state_refused(&error)),
        }
        None
    }

    fn stream(
        &mut self,
        stream: u32,
        work: impl FnOnce(&mut dyn StateWriter) -> Result<(), VmError>,
    ) -> Option<Event> {
        let mut streams = std::mem::take(&mut self.streams);
        let writer = usize::try_from(stream).ok().and_then(|at| streams.get_mut(at));
        debug_assert!(writer.is_some(), "the session knows which streams are open");
        let done = writer.map_or(Ok(()), |writer| self.busy(|_| work(&mut **writer)));
        self.streams = streams;
        done.err().map(|error| state_refused(&error))
    }

    fn prepare_vm(&mut self, trial: &[Section]) -> Event {
        match self.busy(|vm| vm.prepare(trial)) {
            Ok(()) => Event::VmPrepared { load_us: self.vm.expected_load().map(micros) },
            Err(error) => {
                let detail = format!("the target could not prepare itself for the guest: {error}");
                Event::LocalFailure(Refusal::new(RefusalCode::Other, detail))
            }
        }
    }

    /// Lets the VM map the memory of the source's guest.
    fn take_memory(&mut self, regions: Vec<LocalRegion>) -> Event {
        let failed =
            |error: VmError| Event::LocalFailure(Refusal::new(RefusalCode::Memory, error.to_string()));
        // From now on, pages of this source would be written over the memory of a running guest.
        if !self.link.arrivals.seal() {
            return failed(VmError::new("pages were arriving when the source shared its memory"));
        }
        let layout = self.link.memory.layout().clone();
        let shared = match handoff::passed(&layout, regions, self.link.take_descriptors()) {
            Ok(shared) => shared,
            Err(error) => return failed(error),
        };
        match self.busy(|vm| vm.take_memory(shared)) {
            Ok(()) => Event::MemoryTaken,
            Err(error) => failed(error),
        }
    }

    fn start(&mut self, wanted: RunState) -> Event {
        let failed = |detail| Event::StartFailed(Refusal::new(RefusalCode::Other, detail));
        if self.link.arrivals.pager().is_some_and(|pager| !pager.pages.commit()) {
            return failed("the link was lost before the guest was started on the target".to_owned());
        }
        let began = self.now();
        match self.busy(|vm| vm.start(wanted)) {
            Ok(()) => {
                self.paused = wanted == RunState::Paused;
                if let Some(pager) = self.link.arrivals.pager() {
                    pager.pages.memory.started();
                }
                let cpu_us = self.link.cpu_us.load(Ordering::Relaxed) + thread_cpu_us();
                Event::Started { micros: micros(self.clock.since(began)), cpu_us }
            }
            Err(error) => failed(format!("the guest could not be started on the target: {error}")),
        }
    }

    /// Ends all threads of the attempt, and lets the last message arrive. Because closing a socket
    /// with unread bytes would discard the last message, the control channel is first read to its
    /// end, for at most one second.
    fn close(&mut self, outcome: &Outcome) {
        if let Some(pager) = self.link.arrivals.pager() {
            pager.pages.end();
        }
        if matches!(outcome, Outcome::Failed(_)) {
            self.link.control.finish();
        }
        let deadline = self.now() + Duration::from_secs(1);
        while !self.inbox.control_lost()
            && let Some(left) = self.clock.until(deadline)
        {
            match self.inputs.recv_timeout(left) {
                Err(_) => break,
                Ok((_, Input::Connected(incoming))) => self.keep(*incoming),
                Ok((attempt, Input::ControlLost(_))) if attempt == self.link.attempt => break,
                Ok(_) => {}
            }
        }
        self.link.shutdown();
        self.link.control.shutdown();
        // Threads that wait for room in the queue must find room until they have ended.
        while self.link.at_work() {
            if let Ok((_, Input::Connected(incoming))) = self.inputs.recv_timeout(Duration::from_millis(1)) {
                self.keep(*incoming);
            }
        }
        self.link.join();
        for thread in self.handover.take_threads() {
            if thread.join().is_err() {
                tracing::error!("a fault thread panicked");
            }
        }
    }

    fn keep(&mut self, incoming: Greeted) {
        // A source with a guest ends the wait for others. Other channels belong to an attempt that
        // has ended and are dropped.
        if incoming.hello.role != Role::Control {
            return;
        }
        match self.waiting.len() < MOST_WAITING {
            true => self.waiting.push(incoming),
            false => super::refuse(&incoming, RefusalCode::Busy),
        }
    }
}

impl Host for Driver<'_> {
    type Session = Session;
    type Idle = Infallible;

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn session(&self) -> &Session {
        &self.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.session.handle(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Infallible> {
        Ok(match action {
            Action::Send(message) => self.send(&message),
            Action::PrepareDemandPaging => Some(self.handover.prepare(&mut *self.vm)),
            Action::AwaitChannels(channels) => {
                self.link.await_channels(channels);
                None
            }
            Action::CountDigestMismatches { pass } => {
                let (pages, runs) = self.link.arrivals.mismatches();
                Some(Event::DigestMismatches { pass, pages, runs })
            }
            Action::CountMismatches => {
                let (pages, mismatched, samples) = self.link.arrivals.differences();
                Some(Event::Compared { pages, mismatched, samples })
            }
            Action::TakeMissing(piece) => self.handover.add(&piece),
            Action::BeginDemandPaging { pages } => {
                self.handover.begin(&mut self.link, &*self.vm, self.arrival.stay_awake, pages)
            }
            Action::Load(sections) => Some(self.load(&sections)),
            Action::AskArbiter { request, after } => {
                self.ask_arbiter(request, after);
                None
            }
            Action::TakeMemory(regions) => Some(self.take_memory(regions)),
            Action::PrepareVm(trial) => Some(self.prepare_vm(&trial)),
            Action::OpenStream(name) => self.open_stream(&name),
            Action::WriteStream { stream, bytes } => self.stream(stream, |writer| writer.write(&bytes)),
            Action::FinishStream { stream } => self.stream(stream, |writer| writer.finish()),
            Action::Start { wanted } => Some(self.start(wanted)),
            Action::Disconnect => {
                self.disconnect();
                None
            }
            Action::EndDemandPaging => {
                self.link.arrivals.pager().inspect(|pager| pager.pages.end());
                None
            }
            // These actions occur only after this driver has ended.
            Action::NameMissing | Action::RequestAgain | Action::Finish(_) => None,
        })
    }

    fn next(&mut self) -> Result<Option<Event>, Infallible> {
        inbox::next(self)
    }

    fn publish_progress(&mut self) {
        self.arrival.publish_undecided(self.session.undecided());
    }
}

impl Sources for Driver<'_> {
    type Connection = Box<Greeted>;

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    fn peer(&self) -> &str {
        &self.link.control.peer
    }

    fn peer_timeout(&self) -> Duration {
        self.arrival.peer_timeout
    }

    fn attempt(&self) -> u64 {
        self.link.attempt
    }

    fn stopped(&self) -> bool {
        self.arrival.stopped()
    }

    fn setup_timeout(&self) -> Duration {
        self.arrival.setup_timeout()
    }

    fn answer(&mut self) -> Option<ArbiterAnswer> {
        self.arbiter.as_ref().and_then(ArbiterClient::answer)
    }

    fn found(&mut self) -> Option<Event> {
        if self.announced.is_some() {
            return self.announced.take();
        }
        while let Some(incoming) = self.link.late.pop_front() {
            let event = self.take_connection(incoming);
            if event.is_some() {
                return event;
            }
        }
        None
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Infallible> {
        Ok(self.inputs.recv_timeout(until.saturating_sub(self.now())).ok())
    }

    fn connected(&mut self, incoming: Box<Greeted>) -> Option<Event> {
        self.take_connection(*incoming)
    }

    fn all_arrived(&self) -> Option<Event> {
        self.link.arrivals.pager().map(|pager| Event::MissingArrived(pager.pages.figures()))
    }
}

fn state_refused(error: &VmError) -> Event {
    Event::LocalFailure(Refusal::new(RefusalCode::State, error.to_string()))
}

/// Result of one attempt.
pub(super) struct Attempt {
    /// True if a guest that fits had been announced. After that, memory is no longer empty.
    pub(super) accepted: bool,
    pub(super) outcome: Outcome,
    /// Sources that connected meanwhile.
    pub(super) waiting: Vec<Greeted>,
    pub(super) received: Received,
    /// Pages that are still missing, for a guest that already runs.
    pub(super) postcopy: Option<PostcopyReceiver>,
}

impl Attempt {
    /// Returns the result for a source that was the only one.
    pub(super) fn only(self) -> Result<(Received, Option<PostcopyReceiver>), ReceiveFailure> {
        match self.outcome {
            Outcome::Completed | Outcome::Running => Ok((self.received, self.postcopy)),
            Outcome::Failed(why) => Err(ReceiveFailure::Failed(why)),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the function by which the acceptor puts connections into the queue.
pub(super) fn forward(inputs: &SyncSender<Numbered>) -> impl Fn(Greeted) + Send + Sync + Clone + 'static {
    let inputs = Arc::new(Mutex::new(inputs.clone()));
    move |incoming| {
        let sender = inputs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let _ = sender.send((0, Input::Connected(Box::new(incoming))));
    }
}
