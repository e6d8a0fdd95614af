//! Host of the source in the simulation: performs the actions of the session, with delays and
//! failures.

use super::guest::Memory;
use super::link::{Cargo, Request, SentPage};
use super::rng::Rng;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use super::{arbiter, source_free, versions};
use crate::arbiter::{ArbiterError, Ownership, Side};
use crate::channel::SendError;
use crate::missing_pages::CollectedPages;
use crate::plan::{Auto, Expected};
use crate::run::{self, ActionQueue};
use crate::source::answer_wait::AnswerWait;
use crate::source::encode::Versions;
use crate::source::inbox::{self, Inbox, Input, Numbered, Sources};
use crate::source::pending::{PassPages, PendingPages};
use crate::source::sender::SenderError;
use crate::source::session::{Phase, Session};
use crate::source::skip::Skipping;
use crate::source::{AutoConverge, BulkLimit, MigrationMode, OnTimeout, Outcome, Settings, UrgentPath};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{Gpa, Layout, MachineConfig, Region, RegionId, RunState, StreamName};
use vmferry_protocol::source::{Action, Event};
use vmferry_wire::{LocalRegion, Refusal, RefusalCode, ToSource, ToTarget};

/// Work of a bulk channel.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) pass: u32,
    pub(super) digests: bool,
    pub(super) first: bool,
    /// True if damaged pages are sent again.
    pub(super) again: bool,
    /// Remaining pages, which are claimed one by one.
    pub(super) remaining: bool,
    /// Pages to compare.
    pub(super) left: VecDeque<usize>,
    /// Pages to send.
    pub(super) pages: Option<Arc<PassPages>>,
    /// Pages whose digests were computed. Their content is read when they are sent.
    pub(super) prepared: Vec<(usize, u64)>,
    pub(super) active: bool,
}

pub(super) struct SourceHost {
    pub(super) session: Session,
    pub(super) settings: Settings,
    pub(super) action_queue: ActionQueue<Action>,
    pub(super) inbox: Inbox,
    /// Reports of threads, oldest first.
    inputs: VecDeque<Numbered>,
    /// The operator wants the migration to be cancelled.
    pub(super) cancelled: bool,
    /// Other requests of the operator, and below, answers of the arbiter.
    pub(super) requests: VecDeque<Event>,
    pub(super) answers: VecDeque<Result<Ownership, ArbiterError>>,
    /// Result of the action that took time.
    pub(super) done: Option<Event>,
    /// Time at which the loop wants to check the clock. `timer` is set once an item for that is
    /// queued.
    wake_at: Duration,
    pub(super) timer: bool,
    /// Number of checks for an event since the loop was woken.
    looks: u32,
    /// Time before which the loop does not run, although it was woken.
    asleep_until: u64,
    pub(super) running: bool,
    /// True if the source holds what only the host that runs the guest may hold.
    pub(super) holds: bool,
    pub(super) committed: bool,
    /// True if the target has renounced the guest, or the commit was not sent.
    pub(super) given_back: bool,
    pub(super) resume_failed: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    /// Number of the set of channels, and below, whether it is open.
    pub(super) link: usize,
    pub(super) connected: bool,
    /// A hello was sent on a new control channel.
    pub(super) connecting: bool,
    /// Flags of bulk channels and then urgent channels that are lost alone.
    pub(super) dead: Vec<bool>,
    pub(super) pending: PendingPages,
    pub(super) skipping: Option<Skipping>,
    /// Longest time for which the pages of the first pass are held back.
    pub(super) free_pages_wait: Duration,
    /// Wait for the guest's answer, while the pages of the first pass are held back.
    pub(super) held: Option<AnswerWait>,
    /// Time for which the pages of the current pass were held back.
    pub(super) held_for: Duration,
    /// True if a wait ended because the guest had answered completely.
    pub(super) answered: bool,
    /// Share of its time for which the guest is throttled.
    pub(super) slowed: f64,
    /// True during the switchover, but not during a trial pause.
    pub(super) paused: bool,
    /// State that the operator wants. A paused guest writes nothing on source or target.
    pub(super) wanted: RunState,
    /// Number of sent bytes of each stream of device state, and whether the stream has ended.
    pub(super) streams: Vec<(u64, bool)>,
    /// Report of the streams.
    pub(super) streamed: Option<Event>,
    pub(super) jobs: Vec<Job>,
    /// Versions of pages of each channel, if the migration has deltas.
    pub(super) versions: Vec<Versions>,
    pub(super) bytes: u64,
    stopped: bool,
    /// Missing pages that no thread has claimed.
    pub(super) claims: Option<Vec<bool>>,
    pub(super) serving: bool,
    /// Requests that arrived before the source serves any, and below, requests that wait for a bulk
    /// thread.
    pub(super) early: Vec<(usize, Request)>,
    pub(super) queue: VecDeque<(usize, Request)>,
    pub(super) missing: CollectedPages,
}

pub(super) fn layout(pages: usize) -> Layout {
    Layout::new(machine(pages).regions).expect("one region")
}

/// Returns the decisions that a migration may make by itself, if any.
fn auto(rng: &mut Rng) -> Option<Auto> {
    rng.per_mille(400).then(|| Auto {
        postcopy: rng.per_mille(600),
        throttle: if rng.per_mille(300) { AutoConverge::All } else { AutoConverge::Off },
        expected: rng.per_mille(500).then(|| Expected {
            converges: if rng.per_mille(500) { 1.0 } else { 0.0 },
            longest: Duration::from_micros(1 + rng.below(300_000)),
        }),
    })
}

/// Returns the settings of a migration.
fn settings(rng: &mut Rng) -> Settings {
    let channels = 1 + u16::try_from(rng.below(4)).expect("small");
    let mode = [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid][rng.index(3)];
    let auto = auto(rng);
    // Changes of course need a downtime that rarely fits.
    let strict = auto.is_some() && rng.per_mille(700);
    Settings {
        mode: if strict { MigrationMode::Precopy } else { mode },
        urgent: [UrgentPath::Shared, UrgentPath::Interleaved, UrgentPath::Dedicated][rng.index(3)],
        urgent_channels: 1 + u16::try_from(rng.below(2)).expect("small"),
        pace: if rng.per_mille(500) { BulkLimit::Auto } else { BulkLimit::Off },
        reconnect_for: Duration::from_micros(1 + rng.below(20_000_000)),
        channels,
        downtime_limit: Duration::from_micros(1 + rng.below(if strict { 4_000 } else { 100_000 })),
        timeout: Some(Duration::from_micros(200_000 + rng.below(3_000_000))),
        on_timeout: match rng.below(10) {
            0..=4 => OnTimeout::Switch,
            5..=7 => OnTimeout::Cancel,
            _ => OnTimeout::Postcopy,
        },
        verify: rng.per_mille(500),
        auto,
        arbiter: arbiter::choose(rng),
        ..Settings::default()
    }
}

/// Returns the description of both machines.
pub(super) fn machine(pages: usize) -> MachineConfig {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: (pages as u64) << 12 };
    MachineConfig {
        kind: "simulated".into(),
        vcpus: 1,
        regions: vec![region],
        extra: vec![],
        features: vec![],
    }
}

/// Returns the description of the memory that is handed over.
pub(super) fn local_memory(pages: usize) -> Vec<LocalRegion> {
    vec![LocalRegion { region: RegionId(0), len: (pages as u64) << 12, offset: 0 }]
}

impl SourceHost {
    /// Returns the host of a source. If `local` is true, the target is another process of the host,
    /// and takes over the guest's memory.
    pub(super) fn new(rng: &mut Rng, memory: &Memory, defect: Defect, local: bool) -> Self {
        let pages = memory.pages.len();
        let mut settings = settings(rng);
        if local {
            let mode = MigrationMode::Local;
            settings = Settings { mode, channels: 1, verify: false, auto: None, ..settings };
        }
        let channels = settings.channels;
        let (session, first) =
            Session::begin(settings.session(), machine(pages), pages as u64, Duration::ZERO);
        let streams = if rng.per_mille(300) { 1 + u32::try_from(rng.below(2)).expect("small") } else { 0 };
        let name = |instance| StreamName { name: "device".into(), instance, version: 1 };
        Self {
            session: session.streaming((0..streams).map(name).collect()),
            streams: (0..streams).map(|_| (0, false)).collect(),
            streamed: None,
            action_queue: ActionQueue::new(first),
            inbox: Inbox::new(Duration::ZERO),
            inputs: VecDeque::new(),
            cancelled: false,
            requests: VecDeque::new(),
            answers: VecDeque::new(),
            done: None,
            wake_at: Duration::ZERO,
            timer: false,
            looks: 0,
            asleep_until: 0,
            running: true,
            committed: false,
            given_back: false,
            holds: true,
            resume_failed: false,
            outcome: None,
            crashed: false,
            link: 0,
            connected: true,
            connecting: false,
            dead: vec![false; usize::from(channels + settings.urgent_count())],
            pending: PendingPages::everything(&layout(pages)),
            skipping: source_free::skipping(rng, memory, defect),
            free_pages_wait: if rng.per_mille(300) {
                Duration::from_micros(1 + rng.below(20_000))
            } else {
                Duration::ZERO
            },
            held: None,
            held_for: Duration::ZERO,
            answered: false,
            slowed: 0.0,
            paused: false,
            wanted: if rng.per_mille(50) { RunState::Paused } else { RunState::Running },
            jobs: (0..channels).map(|_| Job::default()).collect(),
            versions: versions::of_channels(channels, rng.per_mille(500)),
            bytes: 0,
            stopped: false,
            claims: None,
            serving: false,
            early: Vec::new(),
            queue: VecDeque::new(),
            missing: CollectedPages::new(&layout(pages)),
            settings,
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl World {
    /// Queues a report of a thread of the source's host.
    pub(super) fn source_input(&mut self, input: Input) {
        let generation = self.source.inbox.generation();
        self.source.inputs.push_back((generation, input));
        if self.source.asleep_until <= self.now && self.rng.per_mille(200) {
            // The loop's thread is woken and runs later. Other inputs may arrive before that.
            let delay = self.rng.latency(200);
            self.source.asleep_until = self.now + delay;
            self.at(delay, Item::Runs);
        }
    }

    /// Returns the error of a thread whose channel for pages is lost.
    fn lost_channel() -> SenderError {
        let error = std::io::ErrorKind::BrokenPipe.into();
        SenderError::Link(SendError { nothing_left: false, error }, "the target".into())
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    /// Runs the source's loop until it has nothing to do.
    pub(super) fn pump_source(&mut self) {
        if self.source.ended() || self.now < self.source.asleep_until {
            return;
        }
        self.source.looks = 0;
        match run::advance(&mut AtSource(self)) {
            Ok(outcome) => self.source_ends(outcome),
            Err(Idle) => self.set_timer(),
        }
    }

    /// Schedules a run of the loop at the time that it wants, or later.
    fn set_timer(&mut self) {
        if self.source.action_queue.is_under_way() || std::mem::replace(&mut self.source.timer, true) {
            return;
        }
        let longest = if self.now < 5_000_000 { 40_000 } else { 2_000_000 };
        let late = self.rng.below(longest);
        let wanted = u64::try_from(self.source.wake_at.as_micros()).expect("short");
        self.at(wanted.saturating_sub(self.now) + late, Item::Tick);
    }

    fn source_ends(&mut self, outcome: Outcome) {
        self.source.outcome = Some(outcome);
        if self.source.session.register_unneeded() {
            self.arbiter.register = None;
        }
        self.stop_senders();
        self.transmit(TO_TARGET, Cargo::Eof);
    }

    fn source_handle(&mut self, event: Event) -> Vec<Action> {
        let now = self.now();
        let before = self.source.session.phase();
        if self.source.committed && before == Phase::Switchover {
            self.source.given_back |= matches!(
                event,
                Event::NotSent(_) | Event::Message(ToSource::Returned(_) | ToSource::Failed(_))
            );
        }
        // Also over a new link, unless the guest ran on the target meanwhile.
        let late = before == Phase::PostcopyPaused
            && !self.source.session.runs_on_target()
            && matches!(event, Event::Message(ToSource::Returned(_)));
        let actions = self.source.session.handle(now, event);
        self.source.given_back |= late && self.source.session.phase() == Phase::Ended;
        actions
    }

    pub(super) fn source_lost(&mut self, link: usize, why: &str) {
        if link != self.source.link || self.source.ended() {
            return;
        }
        if self.source.connecting {
            self.reconnected(false);
            return;
        }
        let planted = match self.defect {
            Defect::ResumesAfterCommit => self.source.committed,
            Defect::ResumesInPostcopy => self.source.session.phase() == Phase::Postcopy,
            _ => false,
        };
        if planted {
            self.source.running = true;
            self.source.outcome = Some(Outcome::Failed(Refusal::new(RefusalCode::Other, "lost")));
            return;
        }
        if self.source.connected {
            self.source_input(Input::ControlLost(why.into()));
        }
    }

    pub(super) fn source_receives(&mut self, link: usize, stream: usize, cargo: Cargo) {
        if link != self.source.link || self.source.ended() {
            return;
        }
        match cargo {
            Cargo::Reply(yes) if self.source.connecting => self.reconnected(yes),
            Cargo::ToSource(message) if self.source.connected => {
                let now = self.now();
                self.source_input(Input::Message(message, now));
            }
            Cargo::Request(request) if self.source.connected => {
                self.requested(stream - self.streams.requests(0), request);
            }
            _ => self.source_lost(link, "the target closed the connection"),
        }
    }

    fn perform_source(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        Ok(match action {
            Action::Send(message) => self.source_sends(message),
            Action::Remember { .. } | Action::Finish(_) => None,
            Action::Throttle(shares) => {
                self.source.slowed = shares[0];
                None
            }
            Action::SendRemaining { number } => {
                self.send_remaining(number);
                None
            }
            Action::StreamState => {
                let delay = self.rng.latency(300);
                self.at(delay, Item::StreamState(self.source.paused));
                None
            }
            Action::Disconnect => {
                self.disconnect();
                None
            }
            Action::TakeMissing(piece) => self.source.missing.add(&piece).err().map(Event::PeerLost),
            Action::ServeMissing { pages } => self.serve_again(pages),
            Action::TakeAnswer { channel, frame, .. } => {
                // The source of the simulation sends no hashes.
                let why = format!("an answer to frame {frame} of channel {channel}");
                Some(Event::LocalFailure(Refusal::new(RefusalCode::Protocol, why)))
            }
            Action::SendPass { number, pass } => self.begin_pass(number, pass),
            Action::ShareMemory if self.rng.per_mille(self.faults.step_fails) => {
                let why = "the memory cannot be shared";
                Some(Event::LocalFailure(Refusal::new(RefusalCode::Other, why)))
            }
            Action::ShareMemory => {
                let regions = local_memory(self.memory.pages.len());
                self.source_sends(ToTarget::LocalMemory { regions })
            }
            Action::AskArbiter { request, after } => {
                self.ask_arbiter(Side::Source, request, after);
                None
            }
            step => {
                self.begin_step(step);
                return Err(Idle);
            }
        })
    }

    /// Begins an action that takes time.
    fn begin_step(&mut self, step: Action) {
        if matches!(step, Action::TrialPause { .. }) {
            self.source.running = false;
        }
        if let Action::OpenChannels { bulk, urgent } = step {
            for stream in self.streams.opened() {
                let token = if stream < self.streams.urgent(0) { bulk } else { urgent };
                self.transmit(stream, Cargo::Hello(token));
            }
        }
        let mut delay = self.rng.latency(300);
        if step == Action::Resume {
            delay += self.stopped_for();
        }
        if let Action::Reconnect { after } = step {
            delay += u64::try_from(after.as_micros()).expect("short");
        }
        self.at(delay, Item::SourceStep(step));
    }

    pub(super) fn source_sends(&mut self, message: ToTarget) -> Option<Event> {
        if self.defect == Defect::LosesPause && message == ToTarget::StaysPaused {
            return None;
        }
        if message == ToTarget::Commit {
            let (first, paused) = (!self.source.committed, !self.source.running);
            self.promise(first && paused, |_| "a second commit, or one with the guest running".into());
            self.source.committed = true;
            if self.source.session.handed_over() && !self.faults.fault_free && self.rng.per_mille(150) {
                // There is little time between the commit and the start, and the most important
                // decisions fall into it.
                let soon = self.rng.below(1000);
                let item = if self.rng.per_mille(600) { Item::Cut } else { Item::CutChannel };
                self.at(soon, item);
            }
        }
        self.count_control();
        if self.link_up() && !self.faults.fault_free && self.rng.per_mille(3) {
            // The send fails, and the source cannot tell how much of the message was sent: perhaps
            // all of it.
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            self.cut();
            return Some(Event::PeerLost("the link failed".into()));
        }
        if self.link_up() {
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            return None;
        }
        // A dead link accepts the message, refuses it, or breaks in the middle. Nothing of it
        // arrives.
        match self.rng.below(4) {
            0 => None,
            1 => Some(Event::unsent(&message, "the link is down".into())),
            2 if !self.source.session.committed() => {
                // Like the driver: a message of the target may give a better reason.
                let now = self.now();
                self.source.inbox.hold(now, "the link is down".into());
                None
            }
            _ => Some(Event::PeerLost("the link is down".into())),
        }
    }

    pub(super) fn start_senders(&mut self) {
        for channel in 0..self.source.jobs.len() {
            let delay = self.rng.latency(200);
            self.at(delay, Item::SenderStep(self.source.link, channel));
        }
    }

    /// Sends the prepared frame with the present content of its pages, and prepares the next one.
    pub(super) fn sender_step(&mut self, link: usize, channel: usize) {
        let stale = link != self.source.link || self.source.ended();
        if self.source.stopped || stale || !self.source.jobs[channel].active {
            return;
        }
        if self.source.dead[channel] || (!self.link_up() && self.rng.per_mille(300)) {
            self.source.jobs[channel].active = false;
            self.source_input(Input::PassDone(Err(Self::lost_channel())));
            return;
        }
        if self.source.jobs[channel].remaining {
            self.remaining_step(channel);
            return;
        }
        let job = &mut self.source.jobs[channel];
        let prepared = std::mem::take(&mut job.prepared);
        let (late, first) = (self.defect == Defect::ProtectsLate, job.first);
        if !prepared.is_empty() {
            self.source.bytes += prepared.len() as u64 * 4096;
            let cargo = if job.digests {
                Cargo::Digests(prepared)
            } else {
                let deltas = self.rng.per_mille(800);
                let read = |prepared| self.read_for_pass(channel, prepared, deltas);
                Cargo::Pages(prepared.into_iter().map(read).collect())
            };
            self.transmit(BULK + channel, cargo);
        }
        let most = 1 + self.rng.index(6);
        let next = self.next_pages(channel, most);
        if next.is_empty() {
            let job = &mut self.source.jobs[channel];
            let pass = job.pass;
            job.active = false;
            self.transmit(BULK + channel, Cargo::Barrier(pass));
            self.pass_done();
            return;
        }
        for page in next {
            if !late {
                self.memory.protect(page);
            }
            let digest = self.memory.pages[page];
            // Pages that were never touched are not sent in the first pass.
            if !(first && digest == 0) || self.source.jobs[channel].digests {
                self.source.jobs[channel].prepared.push((page, digest));
            }
        }
        let delay = self.rng.latency(100);
        self.at(delay, Item::SenderStep(link, channel));
    }

    pub(super) fn pass_done(&mut self) {
        self.source_input(Input::PassDone(Ok(())));
    }

    /// Reports the loss of an urgent channel.
    pub(super) fn urgent_lost(&mut self) {
        self.source_input(Input::UrgentLost(Self::lost_channel()));
    }

    pub(super) fn read(&mut self, (page, digest): (usize, u64)) -> SentPage {
        let content = self.memory.pages[page];
        if self.defect == Defect::ProtectsLate {
            self.memory.protect(page);
        }
        let damaged = self.rng.per_mille(self.faults.damage);
        let content = if damaged { u64::MAX - self.rng.below(1000) } else { content };
        SentPage { page, digest, content, damaged, delta: None }
    }

    pub(super) fn stop_senders(&mut self) {
        if !std::mem::replace(&mut self.source.stopped, true) {
            for stream in self.streams.opened() {
                self.transmit(stream, Cargo::Eof);
            }
        }
    }

    /// Sends a message of the target. If the source has ended, the message is lost.
    pub(super) fn target_transmits(&mut self, message: ToSource) -> Option<crate::target::session::Event> {
        if !self.target.connected {
            return Some(crate::target::session::Event::PeerLost("the channel is closed".into()));
        }
        if !self.alive(self.target.link) && self.rng.per_mille(500) {
            return Some(crate::target::session::Event::PeerLost("the link failed".into()));
        }
        self.count_control();
        self.transmit(TO_SOURCE, Cargo::ToSource(message));
        None
    }
}

/// Error of a loop that has nothing to do at this moment.
pub(super) struct Idle;

/// Maximum number of checks at one moment. More mean that the loop spins.
pub(super) const MOST_LOOKS: u32 = 10_000;

/// Simulated host of the source.
struct AtSource<'a>(&'a mut World);

impl run::Host for AtSource<'_> {
    type Session = Session;
    type Idle = Idle;

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn session(&self) -> &Session {
        &self.0.source.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.0.source.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.0.source_handle(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Idle> {
        self.0.perform_source(action)
    }

    fn performed(&mut self) -> Result<Option<Event>, Idle> {
        self.0.source.done.take().map(Some).ok_or(Idle)
    }

    fn next(&mut self) -> Result<Option<Event>, Idle> {
        self.0.source.looks += 1;
        if self.0.source.looks > MOST_LOOKS {
            self.0
                .promise(false, |world| format!("the source's loop spins while {:?}", world.source.session));
            return Err(Idle);
        }
        inbox::next(self).map(Some)
    }
}

impl Sources for AtSource<'_> {
    fn inbox(&mut self) -> &mut Inbox {
        &mut self.0.source.inbox
    }

    fn pong(&mut self, number: u64, at: Duration) {
        self.0.source.session.pong(at, number);
    }

    fn cancelled(&self) -> bool {
        self.0.source.cancelled
    }

    fn answer(&mut self) -> Option<Result<Ownership, ArbiterError>> {
        self.0.source.answers.pop_front()
    }

    fn request(&mut self) -> Option<Event> {
        self.0.source.requests.pop_front()
    }

    fn streamed(&mut self) -> Option<Event> {
        self.0.source.streamed.take()
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Idle> {
        self.0.source.wake_at = until;
        self.0.source.inputs.pop_front().map(Some).ok_or(Idle)
    }

    fn unsent(&self) -> u64 {
        self.0.source.claims.iter().flatten().filter(|unclaimed| **unclaimed).count() as u64
    }

    fn record_message(&mut self, _: &ToSource) {}

    fn pass_sent(&mut self) -> Event {
        let held = std::mem::take(&mut self.0.source.held_for);
        Event::PassSent { bytes: self.0.source.bytes, listing: Duration::ZERO, held }
    }
}
