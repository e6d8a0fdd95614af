//! Host of the source's session, with real threads, sockets and a real VM.
//!
//! # Threads
//!
//! The caller's thread runs the session, the VM and the tracker. One thread reads the control
//! channel, and one thread for each bulk channel sends pages. In postcopy one thread for each
//! urgent channel answers requests. These threads report to the caller's thread through one bounded
//! queue of [`Input`]s.
//!
//! # State
//!
//! [`Driver`] consists of parts, each of which owns its state: [`Control`] owns the control
//! channel, [`Channels`] the other channels and their threads, [`Guest`] the VM, [`Tracking`] the
//! tracker, [`Pages`] the pages to send, [`Demand`] the missing pages in postcopy, and [`Account`]
//! the figures. Only the session knows the phase.

mod account;
mod channels;
mod control;
mod demand;
mod guest;
mod held;
mod pacing;
mod pages;
mod streams;
mod tracking;

use super::encode::Codecs;
use super::hashes::Answers;
use super::inbox::{self, Inbox, Input, Numbered, Sources, TICK};
use super::sender::{PassKind, SenderContext};
use super::session::Session;
use super::turns::{Adapter, Turns};
use super::{MigrationMode, Settings, SwitchoverBandwidth};
use crate::arbiter::{ArbiterClient, ArbiterError, Ownership};
use crate::channel::{Dialer, Pacer, Stream};
use crate::clock::Clock;
use crate::handle::{MigrationHandle, MigrationState};
use crate::handoff::SharedMemory;
use crate::idle::IdleCores;
use crate::missing_pages::pieces;
use crate::report::Report;
use crate::run::{self, ActionQueue, Host};
use crate::vm::{TrialPause, shielded};
use account::Account;
use channels::{Channels, Job};
use control::Control;
use demand::Demand;
use guest::{Guest, state_bytes};
use held::HeldPass;
use pages::Pages;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;
use std::time::Duration;
use streams::{Piece, Streams};
use tracking::Tracking;
use vmferry_core::{
    DirtyTracker, GuestMemory, NothingToProtect, PauseCosts, Protect, RunState, SourceVm, StateReader,
    VmError,
};
use vmferry_protocol::source::{Action, Event, Outcome, Pass};
use vmferry_wire::{
    FEATURE_DESCRIPTION, FEATURE_PAUSED, MigrationId, Refusal, RefusalCode, RegionRun, ToSource, ToTarget,
    Token,
};

/// Length of the queue of inputs. The queue is short, so that messages of a peer wait in the socket
/// and not in the memory of this process.
const QUEUE: usize = 8;

/// State that outlives the channel threads, so that they may borrow it.
pub(super) struct Context<'a> {
    pub(super) dialer: Dialer<'a>,
    pub(super) settings: &'a Settings,
    pub(super) handle: &'a MigrationHandle,
    pub(super) migration: MigrationId,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) pacer: Pacer,
    /// Pacer for data that is never limited.
    pub(super) unpaced: Pacer,
    /// Limit for the channels that send at the same time. `None` if all of them may.
    pub(super) turns: Option<Turns>,
    /// True if the threads of the current set of channels must end.
    pub(super) stop: AtomicBool,
    pub(super) clock: Clock,
    /// Codecs of bulk pages. `None` if the target does not decode pages.
    pub(super) codecs: Option<Codecs>,
    pub(super) idle: Arc<IdleCores>,
    /// The target's answers to hashes. `None` if the target has no known pages.
    pub(super) answers: Option<Answers>,
    /// Memory that the target takes over. `None` if pages are sent.
    pub(super) shared: Option<SharedMemory>,
    /// CPU time that the caller's thread had used when the migration began.
    pub(super) cpu_before_us: u64,
}

impl Context<'_> {
    /// Returns the references that a bulk channel's sender needs.
    fn sender_context<'a>(&'a self, protect: &'a dyn Protect) -> SenderContext<'a> {
        SenderContext {
            memory: &*self.memory,
            protect,
            pacer: &self.pacer,
            counters: &self.handle.counters,
            stop: &self.stop,
            channels: self.settings.channels,
            turns: self.turns.as_ref(),
        }
    }
}

/// Queue of inputs.
struct Inputs {
    sender: SyncSender<Numbered>,
    receiver: Receiver<Numbered>,
}

impl Inputs {
    fn new() -> Self {
        let (sender, receiver) = sync_channel(QUEUE);
        Self { sender, receiver }
    }

    /// Returns a function that wakes the caller's thread. If the queue is full, the function does
    /// nothing, because the thread checks for requests and answers after every input.
    fn waker(&self) -> impl Fn() + Send + Sync + 'static {
        let sender = self.sender.clone();
        move || drop(sender.try_send((0, Input::Wake)))
    }

    /// Takes and drops inputs until the control channel has ended or `time` has passed.
    fn drain_until_control_ends(&self, clock: Clock, time: Duration) {
        let deadline = clock.now() + time;
        while let Some(left) = clock.until(deadline) {
            match self.receiver.recv_timeout(left) {
                Ok((_, Input::ControlLost(_))) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }
}

/// Host of the source's session.
pub(super) struct Driver<'s, 'e> {
    context: &'e Context<'e>,
    session: Session,
    action_queue: ActionQueue<Action>,
    inbox: Inbox,
    inputs: Inputs,
    arbiter: Option<ArbiterClient>,
    control: Control,
    channels: Channels<'s, 'e>,
    /// Decides how many channels send at the same time. `None` if all of them may.
    adapter: Option<Adapter>,
    guest: Guest<'e>,
    tracking: Tracking,
    pages: Pages,
    /// Pass whose pages are held back until the guest has named its free pages.
    held: Option<HeldPass>,
    demand: Demand<'e>,
    streams: Streams,
    account: Account,
}

impl<'s, 'e> Driver<'s, 'e> {
    /// Runs a migration to its end.
    pub(super) fn run(
        context: &'e Context<'e>,
        scope: &'s Scope<'s, 'e>,
        vm: &'e mut dyn SourceVm,
        (tracker, readers): (Box<dyn DirtyTracker>, Vec<Box<dyn StateReader>>),
        control: Stream,
    ) -> Report {
        let layout = context.memory.layout();
        let now = context.clock.now();
        let (session, first) = Session::begin(context.settings.session(), vm.config(), layout.pages(), now);
        let streams = Streams::new(readers);
        let session = session.streaming(streams.names());
        let first = describe(vm, &control).into_iter().chain(first).collect();
        let asks = context.settings.free_pages && context.shared.is_none();
        let free = if asks { vm.free_pages() } else { None };
        let account = Account::new(context, vm.throttled());
        let mut driver = Self {
            context,
            session,
            action_queue: ActionQueue::new(first),
            inbox: Inbox::new(now),
            inputs: Inputs::new(),
            arbiter: context
                .settings
                .arbiter
                .clone()
                .map(|arbiter| ArbiterClient::new(arbiter, context.migration)),
            control: Control::new(control),
            channels: Channels::new(scope),
            adapter: context
                .turns
                .as_ref()
                .map(|turns| Adapter::new(context.settings.channels, turns.limit())),
            guest: Guest::new(vm),
            tracking: Tracking::new(tracker),
            pages: Pages::everything(layout, free),
            held: None,
            demand: Demand::new(layout),
            streams,
            account,
        };
        context.handle.update(|progress| progress.id = context.migration.to_string());
        let _waker = context.handle.wakers().register(driver.inputs.waker());
        let outcome = driver.listen().map_or_else(
            |error| {
                Outcome::Failed(Refusal::new(
                    RefusalCode::Other,
                    format!("cannot start a thread for the control channel: {error}"),
                ))
            },
            |()| {
                let Ok(outcome) = run::advance(&mut driver);
                outcome
            },
        );
        driver.finish(&outcome)
    }

    fn listen(&mut self) -> std::io::Result<()> {
        self.control.start_heartbeat(self.context.settings.peer_timeout)?;
        self.read_control()
    }

    fn read_control(&self) -> std::io::Result<()> {
        let (inputs, generation) = (self.inputs.sender.clone(), self.inbox.generation());
        self.control.read(self.context, self.channels.scope, inputs, generation)
    }

    /// Ends the migration and returns its report.
    fn finish(&mut self, outcome: &Outcome) -> Report {
        self.account.timings.ended(outcome);
        self.close(outcome);
        // The register is not needed any more, unless the target may still have to read it.
        if let Some(arbiter) = self.arbiter.as_ref().filter(|_| self.session.register_unneeded()) {
            shielded("removing the register at the arbiter failed", || arbiter.close());
        }
        let held = self.guest.held();
        let tracker = self.tracking.tracker();
        let mut report = self.account.timings.report(self.context, &self.session, outcome, tracker, &held);
        self.pages.report(&mut report, self.context.settings.verify);
        report.senders = self.adapter.as_ref().map(Adapter::figures);
        report
    }

    /// Cleans up, so that no thread stays blocked, no page stays tracked, and the target can read
    /// the last message.
    fn close(&mut self, outcome: &Outcome) {
        self.guest.unthrottle();
        self.pages.stop_free_page_requests();
        self.shut_down_channels();
        self.control.stream.finish();
        if !self.inbox.control_lost() {
            self.inputs.drain_until_control_ends(self.context.clock, Duration::from_secs(1));
        }
        self.control.stream.shutdown();
        // No input is used any more. Dropping the receiver ensures that no thread waits for room in
        // the queue.
        self.inputs = Inputs::new();
        // The threads must end before the tracker stops, because a page that is protected after the
        // tracker has stopped would stay protected.
        self.channels.join();
        self.tracking.stop();
        self.context.handle.update(|progress| {
            progress.busy = None;
            progress.state = match outcome {
                Outcome::Completed => MigrationState::Completed,
                Outcome::Cancelled(_) => MigrationState::Cancelled,
                Outcome::Failed(_) => MigrationState::Failed,
                Outcome::Unknown(_) => MigrationState::Unknown,
                Outcome::Lost(_) => MigrationState::Lost,
            };
        });
    }

    /// Shuts down all channels except the control channel. This ends the waits of their threads.
    fn shut_down_channels(&self) {
        self.context.stop.store(true, Ordering::Release);
        self.limit_senders(None);
        self.channels.shutdown();
    }
}

impl Drop for Driver<'_, '_> {
    /// Shuts down the channels after a panic, which the VM's own code may cause. No thread must
    /// keep waiting for a peer.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shut_down_channels();
            self.control.stream.shutdown();
        }
    }
}

impl Host for Driver<'_, '_> {
    type Session = Session;
    type Idle = Infallible;

    fn now(&self) -> Duration {
        self.context.clock.now()
    }

    fn session(&self) -> &Session {
        &self.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        let now = self.now();
        self.session.handle(now, event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Infallible> {
        Ok(match action {
            Action::Send(message) => self.send(&message),
            Action::OpenChannels { bulk, urgent } => Some(self.open_channels(bulk, urgent)),
            Action::Remember { resume } => {
                self.control.resume = resume;
                None
            }
            Action::TakeAnswer { channel, frame, unknown } => self.take_answer(channel, frame, &unknown),
            Action::ShareMemory => self.share_memory(),
            Action::StartTracker => Some(self.start_tracker()),
            Action::TrialPause { within } => Some(self.trial_pause(within)),
            Action::Harvest => Some(self.harvest()),
            Action::SendPass { number, pass } => self.send_pass(number, pass),
            Action::Throttle(shares) => {
                if self.guest.throttle(&shares) {
                    self.account.timings.throttled(shares);
                }
                None
            }
            Action::Pause => Some(self.pause()),
            Action::Save { within } => Some(self.save(within)),
            Action::StreamState => {
                let begun = self.streams.begin(self.guest.is_paused());
                begun.err().map(|error| local("reading device state", &error))
            }
            Action::RunOn => Some(self.run_on()),
            Action::Release => {
                let released = self.guest.during(&self.control, |vm| vm.release());
                Some(event(released, "releasing the resources that the target needs", |()| Event::Released))
            }
            Action::HandOver { also } => Some(self.hand_over(&also)),
            Action::SendRemaining { number } => self.send_remaining(number),
            Action::Disconnect => {
                self.disconnect();
                None
            }
            Action::Reconnect { after } => Some(self.reconnect(after)),
            Action::TakeMissing(piece) => self.demand.missing.add(&piece).err().map(Event::PeerLost),
            Action::ServeMissing { pages } => {
                self.demand.named_again(self.context, pages).err().map(Event::PeerLost)
            }
            Action::AskArbiter { request, after } => {
                if let Some(arbiter) = &self.arbiter {
                    arbiter.send(request, after, self.inputs.waker());
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

    fn publish_progress(&mut self) {
        self.adapt_senders();
        self.show_progress();
    }
}

impl Sources for Driver<'_, '_> {
    fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    fn pong(&mut self, number: u64, at: Duration) {
        self.session.pong(at, number);
    }

    fn cancelled(&self) -> bool {
        self.context.handle.cancelled()
    }

    fn answer(&mut self) -> Option<Result<Ownership, ArbiterError>> {
        self.arbiter.as_ref().and_then(ArbiterClient::answer).map(|(_, answer)| answer)
    }

    fn request(&mut self) -> Option<Event> {
        let handle = self.context.handle;
        if handle.take_switch() {
            self.release_held();
            return Some(Event::SwitchNow);
        }
        if handle.take_pause() {
            return Some(Event::Pause);
        }
        if handle.take_abandon() {
            return Some(Event::Abandon);
        }
        handle.take_recover().then_some(Event::Recover)
    }

    fn streamed(&mut self) -> Option<Event> {
        self.streams.take_report()
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Infallible> {
        // Device state is sent one piece at a time, so that inputs and requests are handled in
        // between.
        if self.streams.under_way() && !self.inbox.is_held() {
            if self.held.is_some() {
                self.skip_free_pages();
            }
            let input = self.inputs.receiver.try_recv().ok();
            if input.is_none() {
                self.send_piece();
            }
            return Ok(input);
        }
        let idle = self.skip_free_pages();
        let patience = idle.min(until.saturating_sub(self.now()));
        Ok(self.inputs.receiver.recv_timeout(patience).ok())
    }

    fn unsent(&self) -> u64 {
        self.demand.left().unwrap_or(0)
    }

    fn record_message(&mut self, message: &ToSource) {
        self.account.timings.message(message);
    }

    fn pass_sent(&mut self) -> Event {
        self.account.timings.pass_sent(self.context.handle)
    }
}

/// The guest.
impl Driver<'_, '_> {
    fn trial_pause(&mut self, within: Duration) -> Event {
        if let PauseCosts::Declared { stop, save, state_bytes } = self.guest.pause_costs() {
            let zero = Duration::ZERO;
            return Event::TrialPaused { stop, save, quiesce: zero, paused: zero, state_bytes, trial: None };
        }
        let tried = self.guest.trial_pause(&self.control, within);
        if let Ok(TrialPause { sections: Ok(_), pause, total, .. }) = &tried {
            self.account.timings.trial_paused(total.saturating_sub(*pause));
        }
        let measured =
            tried.and_then(|TrialPause { sections, pause, quiesce, save, total }| match sections {
                Err(busy) => Ok(Event::Busy { paused: total, why: busy.to_string() }),
                Ok(sections) => state_bytes(&sections).map(|state_bytes| Event::TrialPaused {
                    stop: pause + save,
                    save,
                    quiesce,
                    paused: total,
                    state_bytes,
                    trial: Some(sections),
                }),
            });
        event(measured, "the trial pause", |measured| measured)
    }

    fn pause(&mut self) -> Event {
        self.account.timings.pausing(self.session.predicted_downtime());
        match self.context.settings.switchover_bandwidth {
            None => {}
            Some(SwitchoverBandwidth::Unlimited) => self.context.pacer.set(None),
            Some(SwitchoverBandwidth::AtMost(rate)) => self.context.pacer.set(Some(rate)),
        }
        self.pages.stop_free_page_requests();
        let wanted = self.guest.run_state();
        if let Some(why) = cannot_stay_paused(wanted, &self.control.stream) {
            return Event::LocalFailure(why);
        }
        let paused = self.guest.pause(&self.control);
        self.account.timings.paused();
        // No vCPU wants a processor.
        self.limit_senders(None);
        event(paused, "pausing the guest", |()| Event::Paused { wanted })
    }

    fn save(&mut self, within: Duration) -> Event {
        if within == Duration::MAX {
            // This wait has no time limit, so the progress is published before it begins.
            self.show_progress();
        }
        let saved = self.guest.save(&self.control, within);
        self.account.timings.saved();
        self.control.expect_state(self.now().saturating_add(self.context.settings.peer_timeout));
        match saved {
            Ok(sections) => Event::Saved { sections },
            Err(busy) if busy.is_busy() => {
                Event::Busy { paused: self.account.timings.paused_time(), why: busy.to_string() }
            }
            Err(error) => local("saving the device state", &error),
        }
    }

    /// Resumes the guest after a deferred switchover.
    fn run_on(&mut self) -> Event {
        let resumed = self.guest.resume(&self.control);
        if let Some(adapter) = &mut self.adapter {
            adapter.forget();
            let limit = adapter.limit();
            self.limit_senders(Some(limit));
        }
        self.account.timings.went_on(self.context.settings.mode);
        self.context.pacer.set(self.context.settings.max_bandwidth);
        event(resumed, "resuming the guest after a deferred switchover", |()| Event::Resumed)
    }

    /// Resumes the guest on the source for good.
    fn resume(&mut self) -> Event {
        // The guest is resumed first, because stopping the senders and the tracker can take time.
        self.guest.unthrottle();
        self.pages.stop_free_page_requests();
        let resumed = self.guest.resume(&self.control);
        self.account.timings.resumed();
        self.shut_down_channels();
        self.release_held();
        event(resumed, "resuming the guest", |()| Event::Resumed)
    }
}

/// Passes over memory.
impl<'e> Driver<'_, 'e> {
    fn start_tracker(&mut self) -> Event {
        let began = self.now();
        let started = self.control.during(|| self.tracking.start(self.context.clock.now()));
        if let Err(error) = started {
            return local("starting to track dirty pages", &error);
        }
        self.account.timings.tracking_started(began);
        event(self.start_senders(), "starting a channel's thread", |()| Event::TrackerStarted)
    }

    fn start_senders(&mut self) -> Result<(), VmError> {
        let (inputs, generation) = (&self.inputs.sender, self.inbox.generation());
        let protector = || self.tracking.protector();
        self.channels.start_senders(self.context, protector, inputs, generation).map_err(VmError::new)
    }

    fn harvest(&mut self) -> Event {
        let began = self.now();
        self.account.timings.state_sent();
        let (tracking, pages) = (&mut self.tracking, &mut self.pages);
        let since = pages.before_harvest();
        if let Err(error) = self.control.during(|| tracking.harvest(since)) {
            return local("harvesting dirty pages", &error);
        }
        let handle = self.context.handle;
        let paused = self.guest.is_paused();
        if paused {
            pages.skip_free(handle);
        }
        let dirty = pages.count();
        let (seconds, writers) = tracking.harvested(self.context.clock.now());
        let of_pass = !self.session.harvests_after_wait();
        self.account.timings.harvested(began, tracking.harvest_kernel_time(), dirty, of_pass);
        // The pages that a paused guest wrote in the short time since the last harvest do not show
        // its dirty rate.
        if !paused {
            handle.update(|progress| progress.dirty_pages_per_s = dirty as f64 / seconds.max(1e-6));
        }
        Event::Harvested { pages: dirty, writers }
    }

    fn send_pass(&mut self, number: u32, pass: Pass) -> Option<Event> {
        let began = self.now();
        // The free pages of a paused guest were skipped at the last harvest.
        let asks = !self.guest.is_paused();
        let protect = self.tracking.protect().unwrap_or(&NothingToProtect);
        let takers = self.pages.takers(protect, self.context.settings.channels, asks);
        let (pages, kind) = match pass {
            Pass::Dirty { first } => {
                let examines = self.tracking.protect().is_some_and(|protect| !protect.is_needed());
                let memory = examines.then_some(&self.context.memory);
                let kind = if first { PassKind::First } else { PassKind::Later };
                (self.pages.pending.begin_pass(memory, takers), kind)
            }
            Pass::Again(runs) => match self.pages.begin_repeat(self.context.memory.layout(), &runs, takers) {
                Ok(pages) => (pages, PassKind::Again),
                Err(why) => return Some(Event::LocalFailure(Refusal::new(RefusalCode::Protocol, why))),
            },
            Pass::Digests => return Some(self.send_digests(number)),
        };
        self.account.timings.listed(began);
        let first = kind == PassKind::First;
        if !first && let Some(rate) = self.session.bandwidth() {
            self.channels.keep_sockets_short(self.account.timings.on_the_wire(rate));
        }
        if first && asks && !self.context.settings.free_pages_wait.is_zero() {
            self.pages.request_free_pages(&pages);
            self.hold(number, pages);
        } else {
            self.begin_pass(number, pages.pages());
            self.give_out(&Job::Pages { pass: number, pages: Arc::clone(&pages), kind, guest_runs: asks });
            if asks {
                self.pages.request_free_pages(&pages);
            }
        }
        self.pages.count_free(0, self.context.handle);
        None
    }

    /// Sends the digests of all pages that the target has, except skipped free pages.
    fn send_digests(&mut self, number: u32) -> Event {
        self.account.timings.verifying();
        let except = self.pages.not_compared();
        let pages = self.context.memory.layout().pages() - except.count();
        self.give_out(&Job::Digests { pass: number, except: Arc::new(except) });
        Event::Comparing { pages }
    }

    fn begin_pass(&mut self, number: u32, pages: u64) {
        self.account.timings.begin_pass(number, pages, self.context.handle);
        self.context.handle.begin_pass(number, pages);
    }

    /// Limits the channels that send at the same time. `None` is no limit.
    fn limit_senders(&self, limit: Option<u16>) {
        if let Some(turns) = &self.context.turns {
            turns.set_limit(limit.unwrap_or(u16::MAX));
        }
    }

    /// Adapts the number of channels that send at the same time to the processors that the guest's
    /// vCPUs leave idle.
    fn adapt_senders(&mut self) {
        let now = self.context.clock.now();
        let runs_here = !self.guest.is_paused() && !self.session.handed_over();
        let Some(adapter) = self.adapter.as_mut().filter(|adapter| runs_here && adapter.is_due(now)) else {
            return;
        };
        let waits = self.guest.run_delays();
        let limit = match waits.is_empty() {
            // The VMM does not tell, so the first limit stays.
            true => adapter.limit(),
            false => adapter.decide(now, &waits, self.context.idle.now(now)),
        };
        let figures = adapter.figures();
        self.limit_senders(Some(limit));
        self.context.handle.update(|progress| progress.senders = Some(figures));
    }

    /// Passes `job` to every bulk thread, which performs its part.
    fn give_out(&mut self, job: &Job<'e>) {
        self.inbox.pass_given_to(self.channels.give_out(job));
    }
}

/// Channels and messages.
impl Driver<'_, '_> {
    fn send(&mut self, message: &ToTarget) -> Option<Event> {
        self.account.timings.sending(message);
        let failed = self.control.send(self.context, message).err()?;
        if let Some(too_large) = failed.too_large {
            return Some(Event::LocalFailure(too_large));
        }
        // If the target has sent a reason, the reason is more precise than the loss of the
        // connection, so the source waits for it. After the commit, the source waits only if a ping
        // failed.
        if failed.peer_gone && (!self.session.committed() || matches!(message, ToTarget::Ping(_))) {
            self.inbox.hold(self.context.clock.now(), failed.why);
            return None;
        }
        Some(match failed.nothing_left {
            true => Event::unsent(message, failed.why),
            false => Event::PeerLost(failed.why),
        })
    }

    /// Passes the descriptors of the guest's memory to the target.
    fn share_memory(&mut self) -> Option<Event> {
        let Some(shared) = &self.context.shared else {
            return Some(local("sharing the memory", &VmError::new("the VM was not asked for its memory")));
        };
        let (message, descriptors) = shared.message();
        let failed = self.control.send_with(self.context, &message, &descriptors).err()?;
        Some(Event::PeerLost(failed.why))
    }

    /// Sends the next piece of the streams of device state.
    fn send_piece(&mut self) {
        let event = match self.control.during(|| self.streams.next_piece()) {
            Ok(Piece::Message(message)) => self.send_paced(&message),
            Ok(Piece::Done { bytes, left }) => Some(Event::StateStreamed { bytes, left }),
            Err(error) => Some(local("reading device state", &error)),
        };
        if let Some(event) = event {
            self.streams.end(event);
        }
    }

    /// Sends a message that counts against the bandwidth limit.
    fn send_paced(&mut self, message: &ToTarget) -> Option<Event> {
        if let ToTarget::StreamBytes { bytes, .. } = message {
            self.control.during(|| self.context.pacer.wait(bytes.len(), || self.context.handle.cancelled()));
            let counters = &self.context.handle.counters;
            counters.wire_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        self.send(message)
    }

    /// Passes an answer of the target to the sender of a bulk channel.
    fn take_answer(&self, channel: u16, frame: u64, unknown: &[u8]) -> Option<Event> {
        let unasked = || Err("the target answers to hashes, which it was not sent".to_owned());
        let taken = self
            .context
            .answers
            .as_ref()
            .map_or_else(unasked, |answers| answers.deliver(channel, frame, unknown));
        taken.err().map(|why| Event::LocalFailure(Refusal::new(RefusalCode::Protocol, why)))
    }

    fn open_channels(&mut self, bulk: Token, urgent: Token) -> Event {
        // A cancel has no effect any more once the guest is handed over.
        let handed_over = self.session.handed_over();
        let cancel = (!handed_over).then_some(self.context.handle);
        match self.channels.open(self.context, (bulk, urgent), cancel) {
            // Channels that were opened after a loss of the link serve requests at once.
            Ok(()) => match self.serve_requests() {
                Ok(()) => Event::ChannelsOpened,
                Err(error) => {
                    Event::PeerLost(format!("cannot start a thread for an urgent channel: {error}"))
                }
            },
            Err(crate::MigrateError::Cancelled { .. }) => {
                self.inbox.cancel_told();
                Event::Cancel
            }
            Err(error) if handed_over => Event::PeerLost(error.to_string()),
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::Other, error.to_string())),
        }
    }

    fn disconnect(&mut self) {
        self.shut_down_channels();
        self.control.stream.shutdown();
        self.channels.end_jobs();
        // Later reports of these threads are dropped. The target names the pages that they had
        // claimed.
        self.inbox.closed();
        self.demand.end();
    }

    fn reconnect(&mut self, after: Duration) -> Event {
        let until = self.now() + after;
        while let Some(left) = self.context.clock.until(until) {
            // The queue must be emptied, because threads of the lost channels need room in it to
            // end.
            let _ = self.inputs.receiver.recv_timeout(left);
        }
        if let Err(error) = self.control.reconnect(self.context) {
            return Event::NotReconnected(error.to_string());
        }
        self.inbox.reopened();
        self.context.stop.store(false, Ordering::Release);
        self.demand.reset_missing(self.context.memory.layout());
        match self.read_control() {
            Ok(()) => Event::Reconnected,
            Err(error) => {
                Event::NotReconnected(format!("cannot start a thread for the control channel: {error}"))
            }
        }
    }
}

/// The handover, and the missing pages after it.
impl Driver<'_, '_> {
    /// Tells the target which pages are missing. Because the guest is paused, these are the pages
    /// that are still to be sent.
    fn hand_over(&mut self, also: &[RegionRun]) -> Event {
        self.account.timings.state_sent();
        if self.context.settings.mode == MigrationMode::Postcopy {
            // A postcopy without precopy has no harvest in which the free pages were skipped.
            self.pages.skip_free(self.context.handle);
        }
        let missing = match self.pages.take_missing(&*self.context.memory, also) {
            Ok(missing) => missing,
            Err(why) => return Event::LocalFailure(why),
        };
        for piece in pieces(&missing) {
            if let Some(failed) = self.send(&ToTarget::Lacking(piece)) {
                return failed;
            }
        }
        self.demand.begin(self.context, (*missing).clone());
        let (pages, skipped) = (missing.count(), self.pages.pending.skipped_count());
        event(self.serve_requests().map_err(VmError::new), "starting an urgent channel's thread", |()| {
            Event::HandedOver { pages, skipped }
        })
    }

    /// Starts to answer requests for missing pages, if there are any.
    fn serve_requests(&mut self) -> std::io::Result<()> {
        let (inputs, generation) = (&self.inputs.sender, self.inbox.generation());
        self.demand.serve(self.context, &self.channels, inputs, generation)
    }

    /// Sends the missing pages that no vCPU waits for.
    fn send_remaining(&mut self, number: u32) -> Option<Event> {
        let claims = self.demand.claims()?;
        if self.channels.has_no_senders()
            && let Err(error) = self.start_senders()
        {
            return Some(local("starting a channel's thread", &error));
        }
        self.begin_pass(number, claims.left());
        // The guest is not paused any more, so the bandwidth limit of the switchover no longer
        // applies.
        self.context.pacer.set(self.context.settings.max_bandwidth);
        let longest = self.session.patience();
        pacing::pace(self.context, &self.channels, longest, &claims);
        let job = Job::Remaining { pass: number, claims, urgent: self.demand.urgent() };
        self.give_out(&job);
        None
    }
}

/// Returns the action that sends the VMM's description of the guest, which the target's VMM needs
/// before the guest is announced.
fn describe(vm: &dyn SourceVm, control: &Stream) -> Option<Action> {
    if control.features & FEATURE_DESCRIPTION == 0 {
        return None;
    }
    let description = vm.description();
    (!description.is_empty()).then_some(Action::Send(ToTarget::Description(description)))
}

/// Returns an error if the guest is paused and the target would start it.
fn cannot_stay_paused(wanted: RunState, control: &Stream) -> Option<Refusal> {
    let starts = wanted == RunState::Paused && control.features & FEATURE_PAUSED == 0;
    starts.then(|| {
        let detail = "the guest is paused, and the target's version starts every guest that it takes: resume the \
                      guest first, or update the target";
        Refusal::new(RefusalCode::Feature, detail)
    })
}

/// Converts the result of a step to its event. `what` names the step.
fn event<T>(result: Result<T, VmError>, what: &str, done: impl FnOnce(T) -> Event) -> Event {
    result.map_or_else(|error| local(what, &error), done)
}

fn local(what: &str, error: &VmError) -> Event {
    Event::LocalFailure(Refusal::new(RefusalCode::Other, format!("{what} failed: {error}")))
}
