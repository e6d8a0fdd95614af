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
use super::inbox::{self, Inbox, Input, Numbered, Sources, TICK};
use super::pending::Pending;
use super::postcopy::{Claims, UrgentOut};
use super::sender::Shared;
use super::session::{Phase, Session};
use super::settings::{Settings, SwitchoverBandwidth};
use super::skip::Skipping;
use super::timings::Timings;
use crate::channel::{Pacer, Stream, Uri, read_message, send_message};
use crate::fence::{ArbiterError, Asker, Ruling};
use crate::heartbeat::Heartbeat;
use crate::lacking::Collected;
use crate::monitor::Monitor;
use crate::report::Report;
use crate::run::{self, Agenda, Host};
use crate::vm::{caught_io, shielded};
use channels::Streams;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use vmferry_core::{DirtyTracker, GuestMemory, PageSet, Protect, SourceVm};
use vmferry_wire::{MigrationId, Refusal, RefusalCode, ToSource, ToTarget, Token, WireError};

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
    agenda: Agenda<Action>,
    inbox: Inbox,
    inputs: (SyncSender<Numbered>, Receiver<Numbered>),
    control: Arc<Stream>,
    /// What speaks for this side while the VM is at work.
    heart: Option<Heartbeat>,
    /// What the control channel can be taken up again with.
    resume: Token,
    streams: Streams,
    jobs: Vec<SyncSender<Job<'e>>>,
    /// Whoever may still protect pages.
    senders: Vec<ScopedJoinHandle<'s, ()>>,
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
            agenda: Agenda::new(first),
            inbox: Inbox::new(ground.began.elapsed()),
            inputs,
            control: Arc::new(control),
            heart: None,
            resume: Token::NONE,
            streams: Streams::default(),
            jobs: Vec::new(),
            senders: Vec::new(),
            claims: None,
            handed_over: None,
            urgent: Arc::default(),
            lacking: Collected::new(ground.memory.layout()),
            pending,
            skipping: free.map(|source| Skipping::new(source, layout)),
            protect: None,
            paused: false,
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
            |()| {
                let Ok(outcome) = run::advance(&mut driver);
                outcome
            },
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
            (Arc::clone(&self.control), self.inputs.0.clone(), self.inbox.generation());
        let (began, silence) = (self.ground.began, self.ground.settings.peer_timeout);
        let read = move || loop {
            match caught_io(|| read_message(&control)) {
                Ok(message) => {
                    let at = began.elapsed();
                    if inputs.send((generation, Input::Message(message, at))).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let why = lost_control(&control.peer, &error, silence);
                    let _ = inputs.send((generation, Input::ControlLost(why)));
                    return;
                }
            }
        };
        vmferry_thread::spawn_scoped(vmferry_thread::Role::Control, "source-control", self.scope, read)
            .map(drop)
    }

    fn switch_bandwidth(&self) {
        match self.ground.settings.switchover_bandwidth {
            None => {}
            Some(SwitchoverBandwidth::Unlimited) => self.ground.pacer.set(None),
            Some(SwitchoverBandwidth::AtMost(rate)) => self.ground.pacer.set(Some(rate)),
        }
    }

    /// Returns the longest time that sending `message` may take. The guest is paused while the device state is sent, so all
    /// messages of the state together may take as long as any other message alone.
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
            self.inbox.hold(self.ground.began.elapsed(), why);
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

impl Host for Driver<'_, '_> {
    type Session = Session;
    type Idle = Infallible;

    fn now(&self) -> Duration {
        self.ground.began.elapsed()
    }

    fn session(&self) -> &Session {
        &self.session
    }

    fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    fn agenda(&mut self) -> &mut Agenda<Action> {
        &mut self.agenda
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Infallible> {
        Ok(match action {
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
                    self.show_progress();
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
                if let Some(fence) = &self.fence {
                    fence.ask(word, after, waking(&self.inputs.0));
                }
                None
            }
            Action::Resume => Some(self.resume()),
            Action::Finish(_) => None,
        })
    }

    fn next(&mut self) -> Result<Option<Event>, Infallible> {
        inbox::next(self).map(Some)
    }

    fn show(&mut self) {
        self.show_progress();
    }
}

impl Sources for Driver<'_, '_> {
    fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    fn cancelled(&self) -> bool {
        self.ground.monitor.cancelled()
    }

    fn answer(&mut self) -> Option<Result<Ruling, ArbiterError>> {
        self.fence.as_ref().and_then(Asker::answer).map(|(_, answer)| answer)
    }

    fn request(&mut self) -> Option<Event> {
        self.asked()
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Infallible> {
        let patience = self.leave_out_free().min(until.saturating_sub(self.now()));
        Ok(self.inputs.1.recv_timeout(patience).ok())
    }

    fn unsent(&self) -> u64 {
        self.claims.as_ref().map_or(0, |claims| claims.left())
    }

    fn heard(&mut self, message: &ToSource) {
        self.timings.message(message);
    }

    fn pass_sent(&mut self) -> (u64, Duration) {
        let bytes = self.timings.pass_sent(self.ground.monitor);
        (bytes, self.timings.listing())
    }
}

/// Says why the control channel has ended.
fn lost_control(peer: &str, error: &io::Error, silence: Duration) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            format!("the target {peer} closed the connection")
        }
        io::ErrorKind::TimedOut => format!("nothing was heard of the target {peer} for {silence:?}"),
        _ => format!("the link to {peer} failed: {error}"),
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
