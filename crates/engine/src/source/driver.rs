//! The source's driver: does what the session decides, with real threads, sockets and a real VM.
//!
//! Threads and what they own: the caller's thread runs the session, the VM and the tracker; one thread reads the control
//! channel; one thread per bulk channel sends. They meet in one bounded queue of [`Input`]s.

mod channels;
mod ending;
mod free;
mod pacing;
mod passes;
mod postcopy;
mod showing;
mod stopping;

use super::events::{Action, Event, Outcome};
use super::flight::Flight;
use super::pending::Pending;
use super::postcopy::{Claims, UrgentOut};
use super::sender::{SenderError, Shared};
use super::session::{Phase, Session};
use super::settings::{Settings, SwitchoverBandwidth};
use super::skip::Skipping;
use super::timings::Timings;
use crate::channel::{Pacer, SendError, Stream, Uri, read_message, send_message};
use crate::fence::Asker;
use crate::heartbeat::Heartbeat;
use crate::lacking::Collected;
use crate::monitor::Monitor;
use crate::report::Report;
use crate::vm::{caught_io, shielded};
use channels::Streams;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use vmferry_core::{DirtyTracker, GuestMemory, PageSet, Protect, SourceVm};
use vmferry_wire::{MigrationId, Refusal, RefusalCode, ToSource, ToTarget, Token, WireError};

/// How often the session looks at the clock.
const TICK: Duration = Duration::from_millis(20);
/// How long a broken bulk channel waits for the target to say why, before the link is blamed.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What other threads report.
pub(super) enum Input {
    /// A message, and when it arrived.
    Message(ToSource, Duration),
    ControlLost(io::Error),
    PassDone(Result<(), SenderError>),
    UrgentLost(SenderError),
    /// There is a request or an answer to look at.
    Wake,
}

/// An input, and which set of channels it is of: what is left of an earlier one counts no more.
pub(super) type Numbered = (u64, Input);

#[derive(Clone)]
enum Job<'e> {
    Pages {
        pass: u32,
        flight: Arc<Flight>,
        first: bool,
    },
    /// Of all pages but these.
    Digests {
        pass: u32,
        except: Arc<PageSet>,
    },
    Rest {
        pass: u32,
        claims: Arc<Claims>,
        urgent: Arc<Vec<UrgentOut<'e>>>,
    },
}

/// What outlives the channel threads, so that they may borrow it.
pub(super) struct Ground<'a> {
    pub(super) uri: &'a Uri,
    pub(super) settings: &'a Settings,
    pub(super) monitor: &'a Monitor,
    pub(super) migration: MigrationId,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) pacer: Pacer,
    /// For what is never held back.
    pub(super) unpaced: Pacer,
    pub(super) stop: AtomicBool,
    pub(super) began: Instant,
    /// CPU time that the thread that migrates had used by then.
    pub(super) cpu_before_us: u64,
}

pub(super) struct Driver<'s, 'e> {
    ground: &'e Ground<'e>,
    scope: &'s Scope<'s, 'e>,
    vm: &'e mut dyn SourceVm,
    tracker: Box<dyn DirtyTracker>,
    tracking: bool,
    session: Session,
    inputs: (SyncSender<Numbered>, Receiver<Numbered>),
    control: Arc<Stream>,
    /// What speaks for this side while the VM is at work.
    heart: Option<Heartbeat>,
    /// Its reader has ended: no last word is to be waited for.
    control_lost: bool,
    /// What the control channel can be taken up again with.
    resume: Token,
    streams: Streams,
    /// The number of this set of channels.
    generation: u64,
    jobs: Vec<SyncSender<Job<'e>>>,
    /// Whoever may still protect pages.
    senders: Vec<ScopedJoinHandle<'s, ()>>,
    missing: usize,
    /// Once the guest was handed over with pages lacking.
    claims: Option<Arc<Claims>>,
    /// The pages that the target was told it lacks.
    handed_over: Option<Arc<PageSet>>,
    urgent: Arc<Vec<UrgentOut<'e>>>,
    lacking: Collected,
    pending: Pending,
    /// Who says which pages are free, if anybody does.
    skipping: Option<Skipping>,
    /// Protects pages that are put off; none before tracking has begun.
    protect: Option<Arc<dyn Protect>>,
    /// The guest stands still, here.
    paused: bool,
    /// A link failure that waits for the target's own word on it.
    held: Option<(Instant, String)>,
    cancel_seen: bool,
    ticked: Instant,
    /// When, and in which phase, the monitor was given the account so far; `None` if it never was.
    accounted: Option<(Phase, Instant)>,
    timings: Timings,
    dirtied_since: Instant,
    /// Who is asked when nobody knows who owns the guest.
    fence: Option<Asker>,
    /// By when the device state has to be sent.
    state_deadline: Option<Instant>,
    /// The VM was asked to slow the guest.
    throttled: bool,
    /// Pages that each vCPU has written by the last harvest.
    written: Vec<u64>,
}

impl<'s, 'e> Driver<'s, 'e> {
    pub(super) fn run(
        ground: &'e Ground<'e>,
        scope: &'s Scope<'s, 'e>,
        vm: &'e mut dyn SourceVm,
        tracker: Box<dyn DirtyTracker>,
        control: Stream,
    ) -> Report {
        // A few are enough, and what a peer says waits in its socket, not in our memory.
        let inputs = sync_channel(8);
        let pages = ground.memory.layout().pages();
        let held_before = vm.throttled();
        let (session, first) =
            Session::begin(ground.settings.clone(), vm.config(), pages, ground.began.elapsed());
        let layout = ground.memory.layout();
        let pending = Pending::everything(layout);
        let free = if ground.settings.free_pages { vm.free_pages() } else { None };
        let mut driver = Self {
            ground,
            scope,
            vm,
            tracker,
            tracking: false,
            session,
            inputs,
            control: Arc::new(control),
            heart: None,
            control_lost: false,
            resume: Token::NONE,
            streams: Streams::default(),
            generation: 0,
            jobs: Vec::new(),
            senders: Vec::new(),
            missing: 0,
            claims: None,
            handed_over: None,
            urgent: Arc::default(),
            lacking: Collected::new(ground.memory.layout()),
            pending,
            skipping: free.map(|source| Skipping::new(source, layout)),
            protect: None,
            paused: false,
            held: None,
            cancel_seen: false,
            ticked: Instant::now(),
            accounted: None,
            timings: Timings::new(ground, held_before),
            dirtied_since: Instant::now(),
            throttled: false,
            written: Vec::new(),
            fence: ground.settings.fence.clone().map(|fence| Asker::new(fence, ground.migration)),
            state_deadline: None,
        };
        ground.monitor.update(|progress| progress.id = ground.migration.to_string());
        let _waker = ground.monitor.wakers().register(waking(&driver.inputs.0));
        let outcome = driver.listen().map_or_else(
            |error| {
                Outcome::Failed(Refusal::new(RefusalCode::Other, format!("no thread for the link: {error}")))
            },
            |()| driver.drive(first),
        );
        driver.timings.ended(&outcome);
        driver.close(&outcome);
        driver.close_fence();
        let held = shielded("how long the guest was slowed is not known", || driver.vm.throttled());
        let mut report =
            driver.timings.report(driver.ground, &driver.session, &outcome, &*driver.tracker, &held);
        driver.report_free(&mut report);
        report
    }

    fn listen(&mut self) -> io::Result<()> {
        self.heart = Some(Heartbeat::of_source(self.ground.settings.peer_timeout)?);
        self.read_control()
    }

    /// Has the VM do something; the target hears of this side meanwhile.
    fn busy<T>(
        &mut self,
        work: impl FnOnce(&mut dyn SourceVm, &mut dyn DirtyTracker, &mut Pending) -> T,
    ) -> T {
        let (vm, tracker, pending) = (&mut *self.vm, &mut *self.tracker, &mut self.pending);
        match &self.heart {
            Some(heart) => heart.during(&self.control, || work(vm, tracker, pending)),
            None => work(vm, tracker, pending),
        }
    }

    fn read_control(&self) -> io::Result<()> {
        let (control, inputs, generation) =
            (Arc::clone(&self.control), self.inputs.0.clone(), self.generation);
        let began = self.ground.began;
        let read = move || loop {
            match caught_io(|| read_message(&control)) {
                Ok(message) => {
                    let at = began.elapsed();
                    if inputs.send((generation, Input::Message(message, at))).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let _ = inputs.send((generation, Input::ControlLost(error)));
                    return;
                }
            }
        };
        vmferry_thread::spawn_scoped(vmferry_thread::Role::Control, "source-control", self.scope, read)
            .map(drop)
    }

    fn now(&self) -> Duration {
        self.ground.began.elapsed()
    }

    /// Runs to the end: performs actions, and waits for what happens when there are none.
    fn drive(&mut self, first: Vec<Action>) -> Outcome {
        let mut actions = VecDeque::from(first);
        loop {
            while let Some(action) = actions.pop_front() {
                if let Action::Finish(outcome) = action {
                    return outcome;
                }
                if let Some(event) = self.perform(action) {
                    let before = self.session.phase();
                    let more = self.session.handle(self.now(), event);
                    if before != Phase::Ended && self.session.phase() == Phase::Ended {
                        // What was still to be done is moot, and must not keep the guest from going on.
                        actions.clear();
                    }
                    actions.extend(more);
                }
            }
            self.show();
            let event = self.wait();
            actions.extend(self.session.handle(self.now(), event));
        }
    }

    fn wait(&mut self) -> Event {
        if self.ground.monitor.cancelled() && !self.cancel_seen {
            self.cancel_seen = true;
            return Event::Cancel;
        }
        if let Some((_, answer)) = self.fence.as_ref().and_then(Asker::answer) {
            return Event::Ruled(answer);
        }
        if let Some((_, why)) = self.held.take_if(|(deadline, _)| Instant::now() >= *deadline) {
            return Event::PeerLost(why);
        }
        if let Some(asked) = self.asked() {
            return asked;
        }
        // By the clock, not only when nothing comes: a target that never stops talking would stop all timeouts.
        if self.ticked.elapsed() >= TICK {
            self.ticked = Instant::now();
            return Event::Tick;
        }
        let patience = self.leave_out_free();
        let peer = &self.control.peer;
        match self.inputs.1.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Event::Tick,
            Ok((_, Input::Wake)) => Event::Tick,
            Ok((generation, _)) if generation != self.generation => Event::Tick,
            Ok((_, Input::Message(ToSource::Pong(number), at))) => {
                self.session.pong(at, number);
                Event::Tick
            }
            Ok((_, Input::Message(message, _))) => {
                if let Some(wrong) = self.cannot_be(&message) {
                    return Event::PeerLost(wrong);
                }
                self.timings.message(&message);
                Event::Message(message)
            }
            Ok((_, Input::ControlLost(error))) => {
                self.control_lost = true;
                Event::PeerLost(match error.kind() {
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                        format!("the target {peer} closed the connection")
                    }
                    io::ErrorKind::TimedOut => {
                        let silence = self.ground.settings.peer_timeout;
                        format!("nothing was heard of the target {peer} for {silence:?}")
                    }
                    _ => format!("the link to {peer} failed: {error}"),
                })
            }
            Ok((_, Input::PassDone(Ok(())))) => {
                self.missing = self.missing.saturating_sub(1);
                if self.missing > 0 {
                    return Event::Tick;
                }
                let bytes = self.timings.pass_sent(self.ground.monitor);
                Event::PassSent { bytes, listing: self.timings.listing() }
            }
            Ok((_, Input::PassDone(Err(error)) | Input::UrgentLost(error))) => self.channel_failed(error),
        }
    }

    fn channel_failed(&mut self, error: SenderError) -> Event {
        match error {
            SenderError::Stopped => Event::Tick,
            SenderError::Vm(error) => local("reading guest memory", &error),
            SenderError::Link(SendError { error, .. }, peer) => {
                let why = format!("the link to {peer} failed while pages were sent: {error}");
                // Once the guest is known to run there nothing is to be waited for. Before, its target's own word decides.
                if self.session.runs_there() {
                    return Event::PeerLost(why);
                }
                // Often the target closed its channels after saying why on the control channel: hear it out.
                self.held.get_or_insert((Instant::now() + LAST_WORDS, why));
                Event::Tick
            }
        }
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::OpenChannels { bulk, urgent } => Some(self.open_channels(bulk, urgent)),
            Action::Remember { resume } => {
                self.resume = resume;
                None
            }
            Action::StartTracker => Some(self.start_tracker()),
            Action::Rehearse { within } => Some(self.rehearse(within)),
            Action::Harvest => Some(self.harvest()),
            Action::SendPass { number, pass } => self.send_pass(number, pass),
            Action::Throttle(shares) => {
                self.throttle(shares);
                None
            }
            Action::Pause => {
                let predicted = self.session.predicted_downtime();
                self.timings.pausing(predicted);
                self.switch_bandwidth();
                self.stop_asking();
                let paused = self.busy(|vm, _, _| vm.pause());
                self.paused = paused.is_ok();
                self.timings.paused();
                Some(paused.map_or_else(|error| local("pausing the guest", &error), |()| Event::Paused))
            }
            Action::Save { within } => {
                if within == Duration::MAX {
                    // Somebody wants it whatever it takes, and may look at it meanwhile.
                    self.show();
                }
                Some(self.save(within))
            }
            Action::GoOn => Some(self.go_on()),
            Action::Release => {
                let released = self.busy(|vm, _, _| vm.release());
                Some(released.map_or_else(
                    |error| local("letting go of what the target needs", &error),
                    |()| Event::Released,
                ))
            }
            Action::HandOver { also } => Some(self.hand_over(&also)),
            Action::SendRest { number } => self.send_rest(number),
            Action::Disconnect => {
                self.disconnect();
                None
            }
            Action::Reconnect { after } => Some(self.reconnect(after)),
            Action::TakeLacking(piece) => self.lacking.add(&piece).err().map(Event::PeerLost),
            Action::ServeAgain { pages } => self.serve_again(pages),
            Action::Fence { word, after } => {
                self.fence.as_ref()?.ask(word, after, waking(&self.inputs.0));
                None
            }
            Action::Resume => Some(self.resume()),
            Action::Finish(_) => None,
        }
    }

    fn switch_bandwidth(&self) {
        match self.ground.settings.switchover_bandwidth {
            None => {}
            Some(SwitchoverBandwidth::Unlimited) => self.ground.pacer.set(None),
            Some(SwitchoverBandwidth::AtMost(rate)) => self.ground.pacer.set(Some(rate)),
        }
    }

    /// How long sending `message` may take: the device state, sent while the guest stands still, all together no longer than
    /// any other message.
    fn send_time(&self, message: &ToTarget) -> Duration {
        let longest = self.ground.settings.peer_timeout;
        match (message, self.state_deadline) {
            (ToTarget::Section(_) | ToTarget::StateEnd { .. }, Some(deadline)) => {
                deadline.saturating_duration_since(Instant::now())
            }
            _ => longest,
        }
    }

    fn send(&mut self, message: &ToTarget) -> Option<Event> {
        self.timings.sending(message);
        let failed = send_message(&self.control, message, self.send_time(message)).err()?;
        if let Some(too_large @ WireError::TooLarge { .. }) = failed.wire_error() {
            let what = match message {
                ToTarget::Section(section) => format!("the device state '{}'", section.name),
                _ => "a message to the target".into(),
            };
            let detail = format!("{what} cannot be sent: {too_large}");
            return Some(Event::LocalFailure(Refusal::new(RefusalCode::State, detail)));
        }
        let why = format!("the link to {} failed: {}", self.control.peer, failed.error);
        // The target's own words, if it left any, say more than that it is gone; after the commit only where a ping meets that.
        let gone = matches!(failed.error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
        if gone && (!self.session.committed() || matches!(message, ToTarget::Ping(_))) {
            self.held.get_or_insert((Instant::now() + LAST_WORDS, why));
            return None;
        }
        Some(if failed.nothing_left { Event::unsent(message, why) } else { Event::PeerLost(why) })
    }

    fn start_tracker(&mut self) -> Event {
        // Before anything is read, and even if it fails half-way there is something to stop.
        self.tracking = true;
        self.dirtied_since = Instant::now();
        if let Err(error) = self.busy(|_, tracker, _| tracker.start()) {
            return local("starting to track dirty pages", &error);
        }
        let protect = self.tracker.protector();
        if !protect.chunk_pages().is_power_of_two() {
            let wrong =
                format!("its chunks are of {} pages, which is no power of two", protect.chunk_pages());
            return local("starting to track dirty pages", &crate::VmError::new(wrong));
        }
        self.protect = Some(protect);
        match self.start_senders() {
            Ok(()) => Event::TrackerStarted,
            Err(error) => local("starting a channel's thread", &crate::VmError::new(error)),
        }
    }
}

/// Returns a function that wakes the driver. The driver looks for requests and answers after every input, so a full queue needs nothing.
fn waking(inputs: &SyncSender<Numbered>) -> impl Fn() + Send + Sync + 'static {
    let inputs = inputs.clone();
    move || drop(inputs.try_send((0, Input::Wake)))
}

fn local(what: &str, error: &crate::VmError) -> Event {
    Event::LocalFailure(Refusal::new(RefusalCode::Other, format!("{what} failed: {error}")))
}

impl<'e> Ground<'e> {
    /// What a bulk channel's sender needs.
    fn shared<'a>(&'a self, protect: &'a dyn Protect) -> Shared<'a> {
        Shared {
            memory: &*self.memory,
            protect,
            pacer: &self.pacer,
            counters: &self.monitor.counters,
            stop: &self.stop,
            channels: self.settings.channels,
        }
    }
}
