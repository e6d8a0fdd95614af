//! The source's host in the simulation: does what the session decides, takes its time, and sometimes fails.

use super::guest::Memory;
use super::link::{Cargo, Request, SentPage};
use super::rng::Rng;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use super::{fence, here_free};
use crate::fence::Side;
use crate::lacking::Collected;
use crate::plan::{Auto, Expected};
use crate::source::events::{Action, Event};
use crate::source::flight::Flight;
use crate::source::pending::Pending;
use crate::source::session::{Phase, Session};
use crate::source::skip::Skipping;
use crate::source::{AutoConverge, MigrationMode, OnTimeout, Outcome, Pace, Settings, UrgentPath};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{Gpa, Layout, MachineConfig, Region, RegionId};
use vmferry_wire::{Refusal, RefusalCode, ToSource, ToTarget};

/// What a bulk channel is sending.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) pass: u32,
    pub(super) digests: bool,
    pub(super) first: bool,
    /// What is left is claimed as it goes.
    pub(super) rest: bool,
    /// Pages to compare.
    pub(super) left: VecDeque<usize>,
    /// Pages to send.
    pub(super) flight: Option<Arc<Flight>>,
    /// Digests were taken of these; their content is read when they are sent.
    pub(super) prepared: Vec<(usize, u64)>,
    pub(super) active: bool,
}

pub(super) struct Here {
    pub(super) session: Session,
    pub(super) settings: Settings,
    pub(super) actions: VecDeque<Action>,
    /// Events that wait for the step under way: the real driver performs a step to its end.
    inbox: VecDeque<Event>,
    /// Whether events may overtake steps, which the real driver does not do and the session must bear.
    eager: bool,
    pub(super) busy: bool,
    pub(super) running: bool,
    /// It has what only the side that runs the guest may have.
    pub(super) holds: bool,
    pub(super) committed: bool,
    /// The target has renounced the guest, or the commit never left.
    pub(super) given_back: bool,
    pub(super) resume_failed: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) crashed: bool,
    /// The set of channels, and whether they were not closed.
    pub(super) link: usize,
    pub(super) connected: bool,
    /// A new control channel has said hello.
    pub(super) connecting: bool,
    /// Bulk and then urgent channels that are lost alone.
    pub(super) dead: Vec<bool>,
    pub(super) pending: Pending,
    pub(super) skipping: Option<Skipping>,
    /// The share of its time that the guest is held for.
    pub(super) slowed: f64,
    /// For good, not for a rehearsal.
    pub(super) paused: bool,
    pub(super) jobs: Vec<Job>,
    pub(super) missing: usize,
    pub(super) bytes: u64,
    stopped: bool,
    /// Pages of the rest that nobody has claimed.
    pub(super) claims: Option<Vec<bool>>,
    pub(super) serving: bool,
    /// Requests that came before this side serves any, and those that wait for a bulk thread.
    pub(super) early: Vec<(usize, Request)>,
    pub(super) queue: VecDeque<(usize, Request)>,
    pub(super) lacking: Collected,
}

pub(super) fn layout(pages: usize) -> Layout {
    Layout::new(machine(pages).regions).expect("one region")
}

/// What a migration may do by itself, if anything.
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

/// What both machines are.
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

impl Here {
    pub(super) fn new(rng: &mut Rng, memory: &Memory, defect: Defect) -> (Self, Vec<Action>) {
        let pages = memory.pages.len();
        let channels = 1 + u16::try_from(rng.below(4)).expect("small");
        let mode = [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid][rng.index(3)];
        let auto = auto(rng);
        // What changes a course is a downtime that hardly ever fits.
        let strict = auto.is_some() && rng.per_mille(700);
        let settings = Settings {
            mode: if strict { MigrationMode::Precopy } else { mode },
            urgent: [UrgentPath::Shared, UrgentPath::Interleaved, UrgentPath::Dedicated][rng.index(3)],
            urgent_channels: 1 + u16::try_from(rng.below(2)).expect("small"),
            pace: if rng.per_mille(500) { Pace::Auto } else { Pace::Off },
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
            fence: fence::choose(rng),
            ..Settings::default()
        };
        let (session, first) = Session::begin(settings.clone(), machine(pages), pages as u64, Duration::ZERO);
        let here = Self {
            session,
            actions: VecDeque::new(),
            inbox: VecDeque::new(),
            eager: rng.per_mille(400),
            busy: false,
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
            pending: Pending::everything(&layout(pages)),
            skipping: here_free::skipping(rng, memory, defect),
            slowed: 0.0,
            paused: false,
            jobs: (0..channels).map(|_| Job::default()).collect(),
            missing: 0,
            bytes: 0,
            stopped: false,
            claims: None,
            serving: false,
            early: Vec::new(),
            queue: VecDeque::new(),
            lacking: Collected::new(&layout(pages)),
            settings,
        };
        (here, first)
    }

    pub(super) fn ended(&self) -> bool {
        self.outcome.is_some() || self.crashed
    }
}

impl World {
    pub(super) fn source_event(&mut self, event: Event) {
        if self.here.ended() {
            return;
        }
        // A lost link is taken up by one thread that does nothing else meanwhile.
        let waits = !self.here.eager || self.here.session.phase() == Phase::PostcopyPaused;
        if self.here.busy && waits {
            self.here.inbox.push_back(event);
            return;
        }
        self.source_handle(event);
        self.pump_source();
    }

    pub(super) fn source_handle(&mut self, event: Event) {
        let now = Duration::from_micros(self.now);
        // Its own news of channels that are closed since does not reach the session of the real driver either.
        let before = self.here.session.phase();
        if self.here.committed && before == Phase::Switchover {
            self.here.given_back |= matches!(
                event,
                Event::NotSent(_) | Event::Message(ToSource::Returned(_) | ToSource::Failed(_))
            );
        }
        // Over a new link as well, unless it ran there meanwhile.
        let late = before == Phase::PostcopyPaused
            && !self.here.session.runs_there()
            && matches!(event, Event::Message(ToSource::Returned(_)));
        let actions = self.here.session.handle(now, event);
        self.here.given_back |= late && self.here.session.phase() == Phase::Ended;
        if before != Phase::Ended && self.here.session.phase() == Phase::Ended {
            // What was still to be done is moot.
            self.here.actions.clear();
        }
        self.here.actions.extend(actions);
    }

    pub(super) fn source_lost(&mut self, link: usize, why: &str) {
        if link != self.here.link || self.here.ended() {
            return;
        }
        if self.here.connecting {
            self.reconnected(false);
            return;
        }
        let planted = match self.defect {
            Defect::ResumesAfterCommit => self.here.committed,
            Defect::ResumesInPostcopy => self.here.session.phase() == Phase::Postcopy,
            _ => false,
        };
        if planted {
            self.here.running = true;
            self.here.outcome = Some(Outcome::Failed(Refusal::new(RefusalCode::Other, "lost")));
            return;
        }
        if self.here.connected {
            self.source_event(Event::PeerLost(why.into()));
        }
    }

    pub(super) fn source_receives(&mut self, link: usize, stream: usize, cargo: Cargo) {
        if link != self.here.link || self.here.ended() {
            return;
        }
        match cargo {
            Cargo::Reply(yes) if self.here.connecting => self.reconnected(yes),
            Cargo::ToSource(message) if self.here.connected => self.source_event(Event::Message(message)),
            Cargo::Request(request) if self.here.connected => {
                self.requested(stream - self.streams.requests(0), request);
            }
            _ => self.source_lost(link, "the target closed the connection"),
        }
    }

    /// Performs actions in order, until one takes its time.
    pub(super) fn pump_source(&mut self) {
        while !self.here.busy && !self.here.ended() {
            if let Some(action) = self.here.actions.pop_front() {
                self.perform_source(action);
            } else if let Some(event) = self.here.inbox.pop_front() {
                self.source_handle(event);
            } else {
                return;
            }
        }
    }

    fn perform_source(&mut self, action: Action) {
        match action {
            Action::Send(message) => {
                if let Some(event) = self.source_sends(message) {
                    self.source_handle(event);
                }
            }
            Action::Remember { .. } => {}
            Action::Throttle(shares) => self.here.slowed = shares[0],
            Action::SendRest { number } => self.send_rest(number),
            Action::Disconnect => self.disconnect(),
            Action::TakeLacking(piece) => {
                if let Err(why) = self.here.lacking.add(&piece) {
                    self.source_handle(Event::PeerLost(why));
                }
            }
            Action::ServeAgain { pages } => self.serve_again(pages),
            Action::SendPass { number, pass } => self.begin_pass(number, pass),
            Action::Fence { word, after } => self.ask_fence(Side::Source, word, after),
            Action::Finish(outcome) => {
                self.here.outcome = Some(outcome);
                if self.here.session.fence_done() {
                    self.fence.register = None;
                }
                self.stop_senders();
                self.transmit(TO_TARGET, Cargo::Eof);
            }
            step => {
                if matches!(step, Action::Rehearse { .. }) {
                    self.here.running = false;
                }
                if let Action::OpenChannels { bulk, urgent } = step {
                    for stream in self.streams.opened() {
                        let token = if stream < self.streams.urgent(0) { bulk } else { urgent };
                        self.transmit(stream, Cargo::Hello(token));
                    }
                }
                self.here.busy = true;
                let mut delay = self.rng.latency(300);
                if step == Action::Resume {
                    delay += self.stopped_for();
                }
                if let Action::Reconnect { after } = step {
                    delay += u64::try_from(after.as_micros()).expect("short");
                }
                self.at(delay, Item::SourceStep(step));
            }
        }
    }

    pub(super) fn source_sends(&mut self, message: ToTarget) -> Option<Event> {
        if message == ToTarget::Commit {
            let (first, paused) = (!self.here.committed, !self.here.running);
            self.promise(first && paused, |_| "a second commit, or one with the guest running".into());
            self.here.committed = true;
            if self.here.session.handed_over() && !self.faults.calm && self.rng.per_mille(150) {
                // Between the commit and the start is little time, and most to be decided.
                let soon = self.rng.below(1000);
                let item = if self.rng.per_mille(600) { Item::Cut } else { Item::CutChannel };
                self.at(soon, item);
            }
        }
        self.count_control();
        if self.link_up() && !self.faults.calm && self.rng.per_mille(3) {
            // The send fails, and nobody can tell how much of it had left: all of it, perhaps.
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            self.cut();
            return Some(Event::PeerLost("the link failed".into()));
        }
        if self.link_up() {
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            return None;
        }
        // A dead link swallows, or refuses, or breaks in the middle; none of it arrives.
        match self.rng.below(3) {
            0 => None,
            1 => Some(Event::unsent(&message, "the link is down".into())),
            _ => Some(Event::PeerLost("the link is down".into())),
        }
    }

    pub(super) fn start_senders(&mut self) {
        for channel in 0..self.here.jobs.len() {
            let delay = self.rng.latency(200);
            self.at(delay, Item::SenderStep(self.here.link, channel));
        }
    }

    /// Sends the frame that was prepared, with what its pages hold by now, and prepares the next.
    pub(super) fn sender_step(&mut self, link: usize, channel: usize) {
        let stale = link != self.here.link || self.here.ended();
        if self.here.stopped || stale || !self.here.jobs[channel].active {
            return;
        }
        if self.here.dead[channel] || (!self.link_up() && self.rng.per_mille(300)) {
            self.here.jobs[channel].active = false;
            // As the real driver: before the handover the link is blamed only if the target leaves no last words.
            let wait = if self.here.session.runs_there() { 1 } else { 500_000 };
            self.at(wait, Item::SourceLost(link));
            return;
        }
        if self.here.jobs[channel].rest {
            self.rest_step(channel);
            return;
        }
        let job = &mut self.here.jobs[channel];
        let prepared = std::mem::take(&mut job.prepared);
        let (late, first) = (self.defect == Defect::ProtectsLate, job.first);
        if !prepared.is_empty() {
            self.here.bytes += prepared.len() as u64 * 4096;
            let cargo = if job.digests {
                Cargo::Digests(prepared)
            } else {
                Cargo::Pages(prepared.into_iter().map(|prepared| self.read(prepared)).collect())
            };
            self.transmit(BULK + channel, cargo);
        }
        let most = 1 + self.rng.index(6);
        let next = self.next_pages(channel, most);
        if next.is_empty() {
            let job = &mut self.here.jobs[channel];
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
            // What was never touched is left out of the first pass.
            if !(first && digest == 0) || self.here.jobs[channel].digests {
                self.here.jobs[channel].prepared.push((page, digest));
            }
        }
        let delay = self.rng.latency(100);
        self.at(delay, Item::SenderStep(link, channel));
    }

    pub(super) fn pass_done(&mut self) {
        self.here.missing -= 1;
        if self.here.missing == 0 {
            self.source_event(Event::PassSent { bytes: self.here.bytes, listing: Duration::ZERO });
        }
    }

    pub(super) fn read(&mut self, (page, digest): (usize, u64)) -> SentPage {
        let content = self.memory.pages[page];
        if self.defect == Defect::ProtectsLate {
            self.memory.protect(page);
        }
        let damaged = self.rng.per_mille(self.faults.damage);
        SentPage { page, digest, content: if damaged { u64::MAX - self.rng.below(1000) } else { content } }
    }

    pub(super) fn stop_senders(&mut self) {
        if !std::mem::replace(&mut self.here.stopped, true) {
            for stream in self.streams.opened() {
                self.transmit(stream, Cargo::Eof);
            }
        }
    }

    /// The target sends: to a source that has ended, for nobody.
    pub(super) fn target_transmits(&mut self, message: ToSource) {
        if !self.there.connected {
            let why = "the channel is closed".into();
            return self.target_handle(crate::target::session::Event::PeerLost(why));
        }
        self.count_control();
        self.transmit(TO_SOURCE, Cargo::ToSource(message));
    }
}
