//! Simulated world: a clock, a queue of events, two hosts, a link, and the faults of one seed.

use super::arbiter::SimArbiter;
pub(super) use super::defect::Defect;
use super::faults::Faults;
use super::guest::Memory;
use super::link::{Cargo, Request, Wire};
use super::rng::Rng;
use super::source;
use super::source_host::SourceHost;
use super::target_host::TargetHost;
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership, Side};
use crate::source::MigrationMode;
use crate::target::session as target;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use vmferry_core::RunState;

/// Upper bound of the duration of a migration of a few pages, in simulated microseconds.
pub(super) const FOR_EVER: u64 = 900_000_000;

/// Future event. A number called `link` names the set of channels for which the event counts.
#[derive(Debug)]
pub(super) enum Item {
    Arrive(usize),
    Tick,
    GuestWrites,
    Cancel,
    SwitchNow,
    StopTarget,
    CrashSource,
    CrashTarget,
    Cut,
    Mend,
    CutChannel,
    Stall,
    SourceLost(usize),
    TargetLost(usize),
    SourceStep(source::Action),
    /// Round of the streams of device state. The flag is true if the guest is paused.
    StreamState(bool),
    TargetStep(target::Action),
    TargetWakes,
    Runs,
    SenderStep(usize, usize),
    SkipStep,
    GuestAnswers,
    Urgent(usize, usize, Request),
    Operator,
    /// The arbiter receives a request, and answers if the flag is true.
    ArbiterReceives(Side, ArbiterRequest, bool),
    ArbiterAnswers(Side, ArbiterRequest, Result<Ownership, ArbiterError>),
    LeaseEnds,
}

/// Result of a run, for the statistics of many runs.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) source: Option<source::Outcome>,
    pub(super) target: Option<target::Outcome>,
    pub(super) committed: bool,
    pub(super) postcopy: bool,
    /// True if the guest was to run before all of its memory had arrived.
    pub(super) postcopy_mode: bool,
    /// Content of the register, if the source has asked the arbiter.
    pub(super) owner: Option<Ownership>,
    pub(super) resent: u64,
    /// Number of pages that arrived as deltas.
    pub(super) deltas: u64,
    /// Number of pages that were skipped as free.
    pub(super) skipped: u64,
    /// True if the first pass waited until the guest had named its free pages.
    pub(super) answered: bool,
    /// Number of answers about free pages that were dropped.
    pub(super) dropped: u64,
    pub(super) interruptions: u64,
    /// Number of deferrals because of the guest's I/O.
    pub(super) deferrals: u64,
    /// True if the target was to take over the memory instead of copying it.
    pub(super) local: bool,
    /// True if the target's VM has prepared itself.
    pub(super) prepared: bool,
    /// True if the operator had paused the guest.
    pub(super) paused: bool,
    /// Decisions that the migration made by itself.
    pub(super) course: Vec<String>,
    /// True if a host died, or was stopped while the guest was not complete.
    pub(super) crashed: bool,
    pub(super) slow: bool,
    pub(super) stalls: u64,
    pub(super) outlasted: u64,
    pub(super) steps: u64,
}

/// Streams of one set of channels, by number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    pub(super) bulk: usize,
    pub(super) urgent: usize,
    pub(super) probe: bool,
}

pub(super) const TO_TARGET: usize = 0;
pub(super) const TO_SOURCE: usize = 1;
pub(super) const BULK: usize = 2;

impl Streams {
    pub(super) fn urgent(self, index: usize) -> usize {
        BULK + self.bulk + index
    }

    pub(super) fn requests(self, index: usize) -> usize {
        BULK + self.bulk + self.urgent + index
    }

    fn probe(self) -> usize {
        BULK + self.bulk + 2 * self.urgent
    }

    pub(super) fn count(self) -> usize {
        self.probe() + 1
    }

    pub(super) fn of_target(self, stream: usize) -> bool {
        stream == TO_SOURCE || (self.requests(0)..self.probe()).contains(&stream)
    }

    /// Returns the streams that the source opens after the control channel.
    pub(super) fn opened(self) -> impl Iterator<Item = usize> {
        (BULK..self.requests(0)).chain(self.probe.then_some(self.probe()))
    }
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    items: Vec<Option<Item>>,
    free: Vec<usize>,
    order: u64,
    pub(super) streams: Streams,
    /// Wires of all sets of channels so far.
    pub(super) wires: Vec<Wire>,
    /// Number of the first set of channels that is not cut.
    pub(super) alive_from: usize,
    pub(super) net_up: bool,
    pub(super) faults: Faults,
    pub(super) defect: Defect,
    pub(super) memory: Memory,
    /// In a handoff, the memory when the device state was saved. It must not change until one host
    /// runs the guest.
    pub(super) frozen: Option<Vec<u64>>,
    pub(super) source: SourceHost,
    pub(super) target: TargetHost,
    pub(super) arbiter: SimArbiter,
    /// First broken promise.
    broken: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, defect: Defect) -> Self {
        let mut rng = Rng::new(seed);
        let memory = Memory::new(&mut rng);
        // A generator of its own, so that the other runs are the same as without handoffs.
        let local = Rng::new(!seed).per_mille(80);
        let source = SourceHost::new(&mut rng, &memory, defect, local);
        let mut target = TargetHost::new(&mut rng, memory.pages.len(), source.settings.arbiter.is_some());
        target.session = target.session.taking_memory(local);
        let streams = Streams {
            bulk: source.settings.channels.into(),
            urgent: source.settings.urgent_count().into(),
            probe: source.settings.probe(),
        };
        let mut world = Self {
            now: 0,
            queue: BinaryHeap::new(),
            items: Vec::new(),
            free: Vec::new(),
            order: 0,
            wires: (0..streams.count()).map(|_| Wire::default()).collect(),
            streams,
            alive_from: 0,
            net_up: true,
            faults: Faults::default(),
            defect,
            memory,
            frozen: None,
            source,
            target,
            arbiter: SimArbiter::new(),
            broken: None,
            rng,
        };
        world.choose_faults();
        world.at(1, Item::GuestWrites);
        world.at(2, Item::GuestAnswers);
        world.at(1_000_000, Item::Operator);
        world
    }

    pub(super) fn at(&mut self, delay: u64, item: Item) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() - 1
        });
        self.items[slot] = Some(item);
        self.order += 1;
        self.queue.push(Reverse((self.now + delay, self.order, slot)));
    }

    /// Records a broken promise. The first one is reported.
    pub(super) fn promise(&mut self, kept: bool, what: impl FnOnce(&Self) -> String) {
        if !kept && self.broken.is_none() {
            self.broken = Some(what(self));
        }
    }

    /// Returns true if this set of channels is not cut.
    pub(super) fn alive(&self, link: usize) -> bool {
        link >= self.alive_from
    }

    /// Returns true if cargo from the source arrives.
    pub(super) fn link_up(&self) -> bool {
        self.source.connected && self.alive(self.source.link)
    }

    /// Opens a new set of channels, which replaces the source's.
    pub(super) fn connect(&mut self) {
        self.source.link = self.wires.len() / self.streams.count();
        self.wires.extend((0..self.streams.count()).map(|_| Wire::default()));
    }

    /// Returns the wire of a stream of the source.
    pub(super) fn source_wire(&self, stream: usize) -> usize {
        self.source.link * self.streams.count() + stream
    }

    /// Puts `cargo` on a stream. On a dead link the cargo is lost.
    pub(super) fn transmit(&mut self, stream: usize, cargo: Cargo) {
        let (link, connected) = if self.streams.of_target(stream) {
            (self.target.link, self.target.connected)
        } else {
            (self.source.link, self.source.connected)
        };
        if connected && self.alive(link) {
            self.enqueue(link * self.streams.count() + stream, cargo);
        }
    }

    fn enqueue(&mut self, wire: usize, cargo: Cargo) {
        let at = self.wires[wire].send(self.now, &mut self.rng, self.faults.rate, cargo);
        self.at(at - self.now, Item::Arrive(wire));
    }

    /// Sends the target's answer on a control channel that is not its own yet, or never will be.
    pub(super) fn reply(&mut self, link: usize, yes: bool) {
        if self.alive(link) {
            self.enqueue(link * self.streams.count() + TO_SOURCE, Cargo::Reply(yes));
        }
    }

    /// Counts a sent control message. The link may be cut after this one.
    pub(super) fn count_control(&mut self) {
        if let Some(left) = self.faults.cut_after.as_mut() {
            if *left == 0 {
                self.faults.cut_after = None;
                let delay = self.rng.below(300);
                self.at(delay, Item::Cut);
            } else {
                *left -= 1;
            }
        }
    }

    /// Checks that the guest runs on one host at most, and only where it may run.
    pub(super) fn check_owner(&mut self) {
        let both = self.source.running && self.target.running;
        self.promise(!both, |_| "the guest runs on both sides".into());
    }

    /// Returns true if source and target have the same memory.
    pub(super) fn is_local(&self) -> bool {
        self.source.settings.mode == MigrationMode::Local
    }

    /// Checks that the memory which is handed over has not changed since the device state was
    /// saved. The guest is about to run.
    pub(super) fn thaw(&mut self) {
        if let Some(frozen) = self.frozen.take() {
            let same = frozen == self.memory.pages;
            self.promise(same, |_| "the shared memory has changed since the state was saved".into());
        }
    }

    /// Checks that each running guest is known to run.
    fn check_states(&mut self) {
        let target = &self.target;
        let known = !target.running
            || target.in_postcopy
            || target.action_queue.is_under_way()
            || target.outcome.is_some();
        self.promise(known, |world| format!("it runs while {:?}", world.target.session));
        if self.target.in_postcopy && !self.source.ended() {
            let known = self.source.session.handed_over();
            self.promise(known, |world| format!("it runs there while {:?}", world.source.session));
        }
    }

    pub(super) fn run(mut self) -> Result<Ending, String> {
        let mut steps = 0;
        self.pump_source();
        while let Some(Reverse((time, _, slot))) = self.queue.pop() {
            self.now = time;
            steps += 1;
            let item = self.items[slot].take();
            self.free.push(slot);
            if let Some(item) = item {
                self.happen(item);
            }
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
            if self.source.ended() && self.target.ended() {
                return self.judge(steps);
            }
            if self.now > FOR_EVER {
                break;
            }
        }
        Err(format!(
            "no end: source {:?}, target {:?}, after {} us: {:?} {:?}",
            self.source.outcome, self.target.outcome, self.now, self.source.session, self.target.session
        ))
    }

    fn happen(&mut self, item: Item) {
        match item {
            Item::Arrive(wire) => {
                let (link, stream) = (wire / self.streams.count(), wire % self.streams.count());
                if let Some(cargo) = self.wires[wire].arrive(self.now) {
                    if self.streams.of_target(stream) {
                        self.source_receives(link, stream, cargo);
                    } else {
                        self.target_receives(link, stream, cargo);
                    }
                }
            }
            Item::Tick => self.source.timer = false,
            // The loops run below.
            Item::Runs => {}
            Item::GuestWrites => self.guest_works(),
            Item::GuestAnswers => self.guest_answers(),
            Item::SkipStep => self.skip_step(),
            Item::Cancel => self.source.cancelled = true,
            Item::SwitchNow => self.source.requests.push_back(source::Event::SwitchNow),
            Item::StopTarget if self.target.in_postcopy => self.crash_target(),
            Item::StopTarget => {
                self.target.stopped = true;
                self.target.was_stopped |= !self.target.ended();
            }
            Item::CrashSource => self.crash_source(),
            Item::CrashTarget => self.crash_target(),
            Item::Cut => self.cut(),
            Item::Mend => self.net_up = true,
            Item::CutChannel => self.cut_channel(),
            Item::Stall => self.stall(),
            Item::SourceLost(link) => self.source_lost(link, "the link was cut"),
            Item::TargetLost(link) => self.target_lost(link),
            Item::SourceStep(action) => self.source_step_done(action),
            Item::StreamState(paused) => self.stream_state(paused),
            Item::TargetStep(action) => self.target_step_done(action),
            Item::TargetWakes => self.target.timer = false,
            Item::SenderStep(link, channel) => self.sender_step(link, channel),
            Item::Urgent(link, channel, request) => self.send_urgent(link, channel, request),
            Item::Operator => self.operate(),
            Item::ArbiterReceives(side, request, answered) => self.arbiter_receives(side, request, answered),
            Item::ArbiterAnswers(side, request, answer) => self.arbiter_answers(side, request, answer),
            Item::LeaseEnds => self.lease_ends(),
        }
        self.pump_source();
        self.pump_target();
        self.check_owner();
        self.check_states();
    }

    fn guest_works(&mut self) {
        let next = 1 + self.rng.below(if self.now < 200_000 { 1_500 } else { 200_000 });
        self.at(next, Item::GuestWrites);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a thousand")]
        let held = (self.source.slowed * 1e3) as u64;
        for _ in 0..self.rng.below(4) {
            if self.source.wanted == RunState::Paused || (self.source.running && self.rng.per_mille(held)) {
                // The guest is throttled.
            } else if self.source.running && self.rng.per_mille(300) {
                self.memory.free(&mut self.rng);
            } else if self.source.running {
                self.memory.write(&mut self.rng);
            } else if self.target.running {
                self.guest_works_on_target();
            }
        }
    }
}
