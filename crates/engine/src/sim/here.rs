//! The source's host in the simulation: does what the session decides, takes its time, and sometimes fails.

use super::link::{Cargo, SentPage};
use super::rng::Rng;
use super::world::{BULK, Defect, Item, TO_SOURCE, TO_TARGET, World};
use crate::source::events::{Action, Event, Pass};
use crate::source::session::Session;
use crate::source::{OnTimeout, Outcome, Settings};
use std::collections::VecDeque;
use std::time::Duration;
use vmferry_memory::{Gpa, Region, RegionId};
use vmferry_wire::{MachineConfig, Refusal, RefusalCode, Section, ToSource, ToTarget};

/// What a bulk channel is sending.
#[derive(Debug, Default)]
struct Job {
    pass: u32,
    digests: bool,
    first: bool,
    left: VecDeque<usize>,
    /// Digests were taken of these; their content is read when they are sent.
    prepared: Vec<(usize, u64)>,
    active: bool,
}

pub(super) struct Here {
    pub(super) session: Session,
    pub(super) settings: Settings,
    pub(super) actions: VecDeque<Action>,
    /// Events that wait for the step under way: the real driver performs a step to its end.
    inbox: VecDeque<Event>,
    /// Whether events may overtake steps, which the real driver does not do and the session must bear.
    eager: bool,
    busy: bool,
    pub(super) running: bool,
    pub(super) committed: bool,
    pub(super) resume_failed: bool,
    pub(super) outcome: Option<Outcome>,
    pub(super) bulk_dead: Vec<bool>,
    pending: Vec<bool>,
    jobs: Vec<Job>,
    missing: usize,
    bytes: u64,
    stopped: bool,
}

/// What both machines are.
pub(super) fn machine(pages: usize) -> MachineConfig {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: (pages as u64) << 12 };
    MachineConfig { kind: "simulated".into(), vcpus: 1, regions: vec![region], extra: vec![] }
}

impl Here {
    pub(super) fn new(rng: &mut Rng, pages: usize) -> (Self, Vec<Action>) {
        let channels = 1 + u16::try_from(rng.below(4)).expect("small");
        let settings = Settings {
            channels,
            downtime_limit: Duration::from_micros(1 + rng.below(100_000)),
            timeout: Some(Duration::from_micros(200_000 + rng.below(3_000_000))),
            on_timeout: if rng.per_mille(700) { OnTimeout::Switch } else { OnTimeout::Cancel },
            verify: rng.per_mille(500),
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
            resume_failed: false,
            outcome: None,
            bulk_dead: vec![false; usize::from(channels)],
            pending: vec![true; pages],
            jobs: (0..channels).map(|_| Job::default()).collect(),
            missing: 0,
            bytes: 0,
            stopped: false,
            settings,
        };
        (here, first)
    }
}

impl World {
    pub(super) fn source_event(&mut self, event: Event) {
        if self.here.outcome.is_some() {
            return;
        }
        if self.here.busy && !self.here.eager {
            self.here.inbox.push_back(event);
            return;
        }
        self.source_handle(event);
        self.pump_source();
    }

    fn source_handle(&mut self, event: Event) {
        let now = Duration::from_micros(self.now);
        let actions = self.here.session.handle(now, event);
        self.here.actions.extend(actions);
    }

    pub(super) fn source_lost(&mut self, why: &str) {
        if self.defect == Defect::ResumesAfterCommit && self.here.committed && self.here.outcome.is_none() {
            self.here.running = true;
            self.here.outcome = Some(Outcome::Failed(Refusal::new(RefusalCode::Other, "lost")));
            return;
        }
        self.source_event(Event::PeerLost(why.into()));
    }

    pub(super) fn source_receives(&mut self, cargo: Cargo) {
        match cargo {
            Cargo::ToSource(message) => {
                self.source_event(Event::Message(message));
            }
            _ => self.source_lost("the target closed the connection"),
        }
    }

    /// Performs actions in order, until one takes its time.
    pub(super) fn pump_source(&mut self) {
        while !self.here.busy && self.here.outcome.is_none() {
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
            // Postcopy's business.
            Action::Remember { .. } => {}
            Action::SendPass { number, pass } => self.begin_pass(number, pass),
            Action::Finish(outcome) => {
                self.here.outcome = Some(outcome);
                self.stop_senders();
                self.transmit(TO_TARGET, Cargo::Eof);
            }
            step => {
                if step == Action::Rehearse {
                    self.here.running = false;
                }
                if let Action::OpenChannels { .. } = step {
                    for channel in 0..self.here.jobs.len() {
                        self.transmit(BULK + channel, Cargo::Hello);
                    }
                }
                self.here.busy = true;
                let delay = self.rng.latency(300);
                self.at(delay, Item::SourceStep(step));
            }
        }
    }

    fn source_sends(&mut self, message: ToTarget) -> Option<Event> {
        if message == ToTarget::Commit {
            let (first, paused) = (!self.here.committed, !self.here.running);
            self.promise(first && paused, |_| "a second commit, or one with the guest running".into());
            self.here.committed = true;
        }
        self.count_control();
        if self.link_up && !self.faults.calm && self.rng.per_mille(3) {
            // The send fails, and nobody can tell how much of it had left: all of it, perhaps.
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            self.cut();
            return Some(Event::PeerLost("the link failed".into()));
        }
        if self.link_up {
            self.transmit(TO_TARGET, Cargo::ToTarget(message));
            return None;
        }
        // A dead link swallows, or refuses, or breaks in the middle; none of it arrives.
        match self.rng.below(3) {
            0 => None,
            1 => Some(Event::NotSent("the link is down".into())),
            _ => Some(Event::PeerLost("the link is down".into())),
        }
    }

    /// A step that took its time is done: now it has its effect.
    pub(super) fn source_step_done(&mut self, action: Action) {
        let failed = self.rng.per_mille(self.faults.step_fails);
        let event = match action {
            Action::OpenChannels { .. } if !self.link_up => failure("opening channels"),
            Action::OpenChannels { .. } => Event::ChannelsOpened,
            Action::StartTracker => {
                self.memory.start_tracking();
                Event::TrackerStarted
            }
            Action::Rehearse => {
                self.resume();
                Event::Rehearsed { fixed: Duration::from_micros(self.rng.below(500)) }
            }
            Action::Harvest => self.harvest(),
            Action::Pause => {
                self.here.running = false;
                Event::Paused
            }
            Action::Save => {
                // Saving may write guest memory, with the guest stopped.
                self.memory.write(&mut self.rng);
                let section =
                    |instance| Section { name: "cpu".into(), instance, version: 1, payload: vec![7] };
                Event::Saved {
                    sections: (0..u32::try_from(self.rng.below(4)).expect("small")).map(section).collect(),
                }
            }
            Action::Resume => {
                self.here.resume_failed = failed;
                if !failed {
                    self.resume();
                }
                self.stop_senders();
                Event::Resumed
            }
            other => failure(&format!("{other:?} is no step")),
        };
        self.here.busy = false;
        let event = if failed { failure("a step") } else { event };
        self.source_handle(event);
        self.pump_source();
    }

    fn resume(&mut self) {
        self.here.running = true;
        self.check_owner();
    }

    fn harvest(&mut self) -> Event {
        self.memory.harvest(&mut self.here.pending);
        if self.defect == Defect::LostPage && self.rng.per_mille(200) {
            let page = self.rng.index(self.here.pending.len());
            self.here.pending[page] = false;
        }
        Event::Harvested {
            pages: self.here.pending.iter().filter(|dirty| **dirty).count() as u64,
            writers: Vec::new(),
        }
    }

    fn begin_pass(&mut self, number: u32, pass: Pass) {
        let pages = self.here.pending.len();
        let (digests, first) = (pass == Pass::Digests, pass == Pass::Dirty { first: true });
        let set = match pass {
            Pass::Dirty { .. } => std::mem::replace(&mut self.here.pending, vec![false; pages]),
            Pass::Again(runs) => {
                let named =
                    |page: u64| runs.iter().any(|run| (run.first..run.first + run.count).contains(&page));
                (0..pages as u64).map(named).collect()
            }
            Pass::Digests => vec![true; pages],
        };
        let channels = self.here.jobs.len();
        self.here.missing = channels;
        self.here.bytes = 0;
        for (channel, job) in self.here.jobs.iter_mut().enumerate() {
            let left = (0..pages).filter(|page| set[*page] && page % channels == channel).collect();
            *job = Job { pass: number, digests, first, left, prepared: Vec::new(), active: true };
        }
        for channel in 0..channels {
            let delay = self.rng.latency(200);
            self.at(delay, Item::SenderStep(channel));
        }
    }

    /// Sends the frame that was prepared, with what its pages hold by now, and prepares the next.
    pub(super) fn sender_step(&mut self, channel: usize) {
        if self.here.stopped || !self.here.jobs[channel].active {
            return;
        }
        if self.here.bulk_dead[channel] || (!self.link_up && self.rng.per_mille(300)) {
            self.here.jobs[channel].active = false;
            // As the real driver: the link is blamed only if the target leaves no last words.
            self.at(500_000, Item::SourceLost);
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
        let job = &mut self.here.jobs[channel];
        let next: Vec<usize> = job.left.drain(..most.min(job.left.len())).collect();
        if next.is_empty() {
            let pass = job.pass;
            job.active = false;
            self.transmit(BULK + channel, Cargo::Barrier(pass));
            self.here.missing -= 1;
            if self.here.missing == 0 {
                self.source_event(Event::PassSent { bytes: self.here.bytes });
            }
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
        self.at(delay, Item::SenderStep(channel));
    }

    fn read(&mut self, (page, digest): (usize, u64)) -> SentPage {
        let content = self.memory.pages[page];
        if self.defect == Defect::ProtectsLate {
            self.memory.protect(page);
        }
        let damaged = self.rng.per_mille(self.faults.damage);
        SentPage { page, digest, content: if damaged { u64::MAX - self.rng.below(1000) } else { content } }
    }

    fn stop_senders(&mut self) {
        if !std::mem::replace(&mut self.here.stopped, true) {
            for channel in 0..self.here.jobs.len() {
                self.transmit(BULK + channel, Cargo::Eof);
            }
        }
    }

    /// The target sends: to a source that has ended, for nobody.
    pub(super) fn target_transmits(&mut self, message: ToSource) {
        self.count_control();
        self.transmit(TO_SOURCE, Cargo::ToSource(message));
    }
}

fn failure(what: &str) -> Event {
    Event::LocalFailure(Refusal::new(RefusalCode::Other, format!("{what} failed")))
}
