//! The simulated world: a clock, a queue of what is to happen, two hosts, a link, and the faults of one seed.

use super::guest::Memory;
use super::here::Here;
use super::link::{Cargo, Wire};
use super::rng::Rng;
use super::source;
use super::there::There;
use crate::target::session as target;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use vmferry_wire::{Refusal, RefusalCode};

/// Longer than any migration of a few pages may take, in simulated microseconds.
const FOR_EVER: u64 = 120_000_000;

/// Streams by number: control to the target, control to the source, then the bulk channels.
pub(super) const TO_TARGET: usize = 0;
pub(super) const TO_SOURCE: usize = 1;
pub(super) const BULK: usize = 2;

/// A defect that is planted to see whether the simulation finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Defect {
    None,
    /// A harvest now and then loses a page.
    LostPage,
    /// The guest is started when its state is loaded, before the commit.
    StartsAtLoad,
    /// A link that breaks after the commit is taken for one that broke before it.
    ResumesAfterCommit,
    /// Pages are protected after they were read, not before.
    ProtectsLate,
    /// The target says that all pages are sound.
    BlindToDamage,
}

/// What is to happen.
#[derive(Debug)]
pub(super) enum Item {
    Arrive(usize),
    Tick,
    GuestWrites,
    Cancel,
    StopTarget,
    Cut,
    CutBulk(usize),
    SourceLost,
    TargetLost,
    SourceStep(source::Action),
    TargetStep(target::Action),
    SenderStep(usize),
}

/// What goes wrong in this run.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Nothing goes wrong: the migration must succeed.
    pub(super) calm: bool,
    /// Local steps that fail, in a thousand.
    pub(super) step_fails: u64,
    /// Pages that are damaged on the way, in a thousand.
    pub(super) damage: u64,
    /// The link is cut when this many more control messages have been sent.
    pub(super) cut_after: Option<u64>,
}

/// How a run ended, for the statistics of many.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) source: source::Outcome,
    pub(super) target: target::Outcome,
    pub(super) committed: bool,
    pub(super) resent: u64,
    pub(super) steps: u64,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    items: Vec<Option<Item>>,
    free: Vec<usize>,
    order: u64,
    pub(super) wires: Vec<Wire>,
    pub(super) link_up: bool,
    pub(super) faults: Faults,
    pub(super) defect: Defect,
    pub(super) memory: Memory,
    pub(super) here: Here,
    pub(super) there: There,
    /// The first broken promise.
    broken: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, defect: Defect) -> Self {
        let mut rng = Rng::new(seed);
        let memory = Memory::new(&mut rng);
        let (here, first) = Here::new(&mut rng, memory.pages.len());
        let there = There::new(&mut rng, memory.pages.len());
        let mut world = Self {
            now: 0,
            queue: BinaryHeap::new(),
            items: Vec::new(),
            free: Vec::new(),
            order: 0,
            wires: (0..BULK + usize::from(here.settings.channels)).map(|_| Wire::default()).collect(),
            link_up: true,
            faults: Faults::default(),
            defect,
            memory,
            here,
            there,
            broken: None,
            rng,
        };
        world.here.actions.extend(first);
        world.choose_faults();
        world.at(1, Item::Tick);
        world.at(1, Item::GuestWrites);
        world
    }

    fn choose_faults(&mut self) {
        if self.rng.per_mille(150) {
            self.faults.calm = true;
            return;
        }
        if self.rng.per_mille(300) {
            self.faults.step_fails = 1 + self.rng.below(60);
        }
        if self.rng.per_mille(300) {
            self.faults.damage = 1 + self.rng.below(150);
        }
        match self.rng.below(4) {
            0 => self.faults.cut_after = Some(self.rng.below(24)),
            1 => {
                let time = self.some_time();
                self.at(time, Item::Cut);
            }
            _ => {}
        }
        let unlucky = |rng: &mut Rng| rng.per_mille(150);
        for item in [Item::Cancel, Item::StopTarget, Item::CutBulk(0)] {
            if unlucky(&mut self.rng) {
                let time = self.some_time();
                let channels = self.wires.len() - BULK;
                let item = if let Item::CutBulk(_) = item {
                    Item::CutBulk(BULK + self.rng.index(channels))
                } else {
                    item
                };
                self.at(time, item);
            }
        }
    }

    /// At any scale: while greeting, while pages move, late.
    fn some_time(&mut self) -> u64 {
        let scale = [300, 3000, 10_000, 30_000, 100_000][self.rng.index(5)];
        self.rng.below(scale)
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

    /// Notes a broken promise; the first one is reported.
    pub(super) fn promise(&mut self, kept: bool, what: impl FnOnce(&Self) -> String) {
        if !kept && self.broken.is_none() {
            self.broken = Some(what(self));
        }
    }

    /// Puts `cargo` on a stream. On a dead link it goes nowhere.
    pub(super) fn transmit(&mut self, stream: usize, cargo: Cargo) {
        if self.link_up {
            let at = self.wires[stream].send(self.now, &mut self.rng, cargo);
            self.at(at - self.now, Item::Arrive(stream));
        }
    }

    /// A control message leaves: perhaps it is the one that the link dies after.
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

    /// The link dies. Each side learns of it in its own time: at once by a reset, or late by its timeout.
    pub(super) fn cut(&mut self) {
        if !self.link_up {
            return;
        }
        self.link_up = false;
        for wire in &mut self.wires {
            wire.cut(&mut self.rng);
        }
        for item in [Item::SourceLost, Item::TargetLost] {
            let delay =
                if self.rng.per_mille(500) { self.rng.below(2000) } else { self.rng.below(10_000_000) };
            // Whatever still arrives was there before the end was noticed.
            let arrived = self.wires.iter().filter_map(|wire| wire.under_way.back()).map(|(at, _)| *at).max();
            self.at(delay.max(arrived.unwrap_or(0).saturating_sub(self.now)), item);
        }
    }

    /// Never two that run, never a guest that runs where it must not.
    pub(super) fn check_owner(&mut self) {
        let both = self.here.running && self.there.running;
        self.promise(!both, |_| "the guest runs on both sides".into());
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
            if self.here.outcome.is_some() && self.there.outcome.is_some() {
                return self.judge(steps);
            }
            if self.now > FOR_EVER {
                break;
            }
        }
        Err(format!(
            "no end: source {:?}, target {:?}, after {} us: {:?} {:?}",
            self.here.outcome, self.there.outcome, self.now, self.here.session, self.there.session
        ))
    }

    fn happen(&mut self, item: Item) {
        match item {
            Item::Arrive(stream) => {
                if let Some(cargo) = self.wires[stream].arrive(self.now) {
                    if stream == TO_SOURCE {
                        self.source_receives(cargo)
                    } else {
                        self.target_receives(stream, cargo)
                    }
                }
            }
            Item::Tick => {
                let next = 5_000 + self.rng.below(40_000);
                self.at(next, Item::Tick);
                self.source_event(source::Event::Tick);
            }
            Item::GuestWrites => {
                let next = 1 + self.rng.below(if self.now < 200_000 { 1_500 } else { 50_000 });
                self.at(next, Item::GuestWrites);
                for _ in 0..self.rng.below(4) {
                    if self.here.running {
                        self.memory.write(&mut self.rng);
                    }
                }
            }
            Item::Cancel => self.source_event(source::Event::Cancel),
            Item::StopTarget => {
                let why = Refusal::new(RefusalCode::Cancelled, "the target was told to stop");
                self.target_event(target::Event::LocalFailure(why));
            }
            Item::Cut => self.cut(),
            Item::CutBulk(stream) => {
                // The target notices and tells, or gives up; the source's writes fail.
                self.wires[stream].cut(&mut self.rng);
                self.here.bulk_dead[stream - BULK] = true;
                self.transmit(stream, Cargo::Eof);
            }
            Item::SourceLost => self.source_lost("the link was cut"),
            Item::TargetLost => self.target_event(target::Event::PeerLost("the link was cut".into())),
            Item::SourceStep(action) => self.source_step_done(action),
            Item::TargetStep(action) => self.target_step_done(action),
            Item::SenderStep(channel) => self.sender_step(channel),
        }
        self.check_owner();
    }

    /// What must hold at the end, whatever happened.
    fn judge(self, steps: u64) -> Result<Ending, String> {
        let (Some(source), Some(target)) = (self.here.outcome.clone(), self.there.outcome.clone()) else {
            return Err("judged before the end".into());
        };
        let here = self.here.running;
        let there = self.there.running;
        let wrong = |what: &str| {
            Err(format!("{what}: source {source:?}, target {target:?}, runs here {here}, there {there}"))
        };
        if there != (target == target::Outcome::Completed) {
            return wrong("the target runs the guest if and only if it says so");
        }
        if there && !self.here.committed {
            return wrong("the target runs what was not handed over");
        }
        match &source {
            source::Outcome::Completed if !there || here => return wrong("completed, but not moved"),
            source::Outcome::Unknown(_) if !self.here.committed => return wrong("unknown before the commit"),
            source::Outcome::Unknown(_) if here => return wrong("unknown, and yet it was resumed"),
            source::Outcome::Cancelled(_) | source::Outcome::Failed(_) if there => {
                return wrong("given up, but the target runs it");
            }
            source::Outcome::Cancelled(_) | source::Outcome::Failed(_)
                if !here && !self.here.resume_failed =>
            {
                return wrong("given up, but it does not run here");
            }
            source::Outcome::Completed if self.here.settings.verify => {
                let pages =
                    self.here.session.verification.as_ref().map(|found| (found.pages, found.mismatched));
                if pages != Some((self.memory.pages.len() as u64, 0)) {
                    return wrong("completed without the verification that was asked for");
                }
            }
            _ => {}
        }
        let by_timeout =
            matches!(&source, source::Outcome::Cancelled(why) if why.starts_with("not done within"));
        if self.faults.calm && source != source::Outcome::Completed && !by_timeout {
            return wrong("nothing was wrong and yet it failed");
        }
        let resent = self.here.session.suspects_resent;
        Ok(Ending { source, target, committed: self.here.committed, resent, steps })
    }
}
