//! Migrations on paper: what a pass takes and what it leaves, pass by pass, with the policy that decides in earnest.

use super::curve::{Class, Curve};
use super::inputs::{Inputs, Protection};
use super::ring::Ring;
use super::rng::Rng;
use crate::source::sender;
use crate::source::{AutoConverge, MigrationMode, OnTimeout, Pace, Settings};
use std::time::Duration;
use vmferry_core::PAGE_SIZE;
use vmferry_protocol::source::policy::{Convergence, Decision, LinkRate, PassOutcome};
use vmferry_protocol::source::throttle;

/// A page on the wire, with its share of a frame's table and header, in bytes.
const WIRE_PAGE: f64 = PAGE_SIZE as f64 + 16.3;
/// Looking at a page of zeros, in seconds.
const ZERO_PAGE_S: f64 = 0.4e-6;
/// A pass, beside its pages and the round trip: giving out work, barriers, waking threads.
const PASS_S: f64 = 0.2e-3;
/// Without a timeout a migration that has not ended by then is taken never to end.
const HORIZON_S: f64 = 600.0;
/// Likewise after so many passes.
const MOST_PASSES: u32 = 400;
/// How much of the link the pace of postcopy leaves to the bulk.
const PACED: f64 = 0.93;
/// A remote fault beside its round trip, in seconds: the fault itself, and its page.
const FAULT_S: f64 = 60e-6;
/// Setting memory up for faults at the target, and dropping a page there that is stale, in seconds.
const LAZY_S: f64 = 1.5e-3;
const STALE_PAGE_S: f64 = 1.2e-6;
/// Pages of a frame: a channel protects those of the next as soon as it has handed over this one.
const FRAME_PAGES: f64 = sender::FRAME_PAGES as f64;
/// Bytes that wait in a channel's socket in the first pass, where nothing but the link holds it back; later passes know how much may.
const SOCKET_BYTES: f64 = 3e6;
/// How much no two passes are alike: what the link carries, what the guest writes, and when whoever waits is woken, in seconds.
const PASS_SPREAD: f64 = 0.005;
const GUEST_SPREAD: f64 = 0.01;
const WAKE_S: f64 = 0.1e-3;
/// In hybrid mode, a pass that leaves more than this share of the pass before is the last.
const HYBRID: f64 = vmferry_protocol::source::policy::CONVERGING;

/// What is taken to be true in one run of the model.
pub(crate) struct World<'a> {
    pub(crate) inputs: &'a Inputs,
    pub(crate) settings: &'a Settings,
    pub(crate) curve: Curve,
    /// Bytes a second.
    pub(crate) bandwidth: f64,
    /// Of what was measured.
    pub(crate) fixed: f64,
    pub(crate) round_trip: f64,
    /// Over how many pages what is dirty is spread.
    pub(crate) spread: f64,
}

/// How it went.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Run {
    /// It ended by itself, within the downtime that is allowed.
    pub(crate) ends: bool,
    pub(crate) total: f64,
    pub(crate) downtime: f64,
    pub(crate) bytes: f64,
    /// The share of its time that the guest lost while it ran.
    pub(crate) lost: f64,
    pub(crate) passes: u32,
}

/// A migration under way.
struct State<'a, 'w> {
    world: &'w World<'a>,
    rng: &'w mut Rng,
    classes: Vec<Class>,
    /// Pages of each class that are to be sent.
    dirty: Vec<f64>,
    /// Where a walk has left them, for classes that are one.
    rings: Vec<Option<Ring>>,
    now: f64,
    bytes: f64,
    faults: f64,
    held: f64,
    share: f64,
}

impl World<'_> {
    /// Seconds that `pages` with content take on the wire, and `others` to be looked at only.
    fn sending(&self, pages: f64, others: f64, bandwidth: f64) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let costs = &self.inputs.costs;
        let cpu = (self.inputs.link.cpu_page_s + costs.protect_page_s) * pages / channels;
        (pages * WIRE_PAGE / bandwidth).max(cpu) + others * (ZERO_PAGE_S + costs.protect_page_s) / channels
    }

    /// How long before a page leaves it is protected, on average. The pages of a chunk that are to be sent are protected together,
    /// and leave one frame after the other; a frame waits for its slot under a cap, or behind what the socket and the way hold.
    fn lead(&self, pages: f64, bandwidth: f64, first: bool) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let each = pages / channels;
        let density = (pages / self.spread).min(1.0);
        let chunk = each.min(self.inputs.chunk_pages as f64 * density) * channels * WIRE_PAGE / bandwidth;
        let frame = each.min(FRAME_PAGES) * channels * WIRE_PAGE / bandwidth;
        let waits = if self.capped() {
            frame
        } else {
            let queued =
                if first { SOCKET_BYTES * channels / bandwidth } else { sender::UNSENT.as_secs_f64() };
            queued.min(pages * WIRE_PAGE / bandwidth) + self.inputs.link.queue_s
        };
        0.5 * chunk + waits
    }

    /// Whether it is our own cap that holds senders back.
    fn capped(&self) -> bool {
        self.settings.max_bandwidth.is_some_and(|cap| cap as f64 <= self.bandwidth * 1.1)
    }

    /// Until a frame may go, which the last frame of the pass before has taken time from.
    fn slot(&self, before: f64) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let frame = (before / channels).min(FRAME_PAGES) * WIRE_PAGE;
        if self.capped() { 0.5 * frame / self.bandwidth } else { 0.0 }
    }

    fn downtime(&self, pages: f64, before: f64) -> f64 {
        let costs = &self.inputs.costs;
        let state = costs.state_bytes / self.bandwidth;
        self.fixed * (costs.stopping_s() + costs.harvest_s)
            + state
            + 3.0 * self.round_trip
            + PASS_S
            + self.sending(pages, 0.0, self.bandwidth)
            + self.slot(before)
    }

    fn setup(&self) -> f64 {
        let costs = &self.inputs.costs;
        let urgent =
            if self.settings.may_be_lazy() { f64::from(self.settings.urgent_channels) + 1.0 } else { 0.0 };
        // The control channel, what is agreed on it, and the others one after the other.
        (2.0 + f64::from(self.settings.channels) + urgent) * self.inputs.link.connect_s
            + 2.0 * self.round_trip
            + costs.start_s
    }

    /// Pages with content that are to be moved, and pages that are only looked at.
    fn pages(&self) -> (f64, f64) {
        let Inputs { memory_pages, touched_pages, zero_pages, free_pages, .. } = *self.inputs;
        let content = touched_pages.saturating_sub(zero_pages).saturating_sub(free_pages);
        (content as f64, memory_pages.saturating_sub(content) as f64)
    }

    /// Runs it.
    pub(crate) fn run(&self, rng: &mut Rng) -> Run {
        let classes = self.curve.classes.clone();
        let dirty = vec![0.0; classes.len()];
        let rings = classes.iter().map(|class| Ring::of(class, rng)).collect();
        let now = self.setup();
        let state = State {
            world: self,
            rng,
            classes,
            dirty,
            rings,
            now,
            bytes: 0.0,
            faults: 0.0,
            held: 0.0,
            share: 0.0,
        };
        if self.settings.mode == MigrationMode::Postcopy { state.postcopy() } else { state.passes() }
    }
}

impl State<'_, '_> {
    fn passes(mut self) -> Run {
        let (world, settings) = (self.world, self.world.settings);
        let session = settings.session();
        let (mut link, mut policy) = (LinkRate::of(&session), Convergence::of(&session));
        let costs = &world.inputs.costs;
        let fixed = world.fixed * (costs.stopping_s() + costs.harvest_s) + 3.0 * world.round_trip;
        let horizon = settings.timeout.map_or(HORIZON_S, |timeout| timeout.as_secs_f64());
        let mut left_before: Option<f64> = None;
        for pass in 0..MOST_PASSES {
            let (bytes, elapsed) = self.pass(pass == 0);
            self.now += costs.harvest_s;
            if pass == 0 {
                self.now += costs.pause_s + costs.settle_s + costs.save_s;
            }
            let left: f64 = self.dirty.iter().sum();
            let outcome =
                PassOutcome { bytes: whole(bytes), elapsed: seconds(elapsed), remaining: whole(left) };
            link.learn(outcome);
            let decision = policy.decide(outcome, seconds(fixed), &link);
            let late = self.now > horizon;
            if decision == Decision::Switch || (late && settings.on_timeout == OnTimeout::Switch) {
                return self.stop((left, bytes), pass + 1, decision == Decision::Switch);
            }
            let slow = left_before.replace(left).is_some_and(|before| left > before * HYBRID);
            let lazy = settings.mode == MigrationMode::Hybrid && slow;
            if lazy || (late && settings.on_timeout == OnTimeout::Postcopy) {
                return self.hand_over(left, pass + 1);
            }
            if late {
                break;
            }
            let fits =
                link.predict(whole(left), seconds(fixed)).is_some_and(|time| time <= settings.downtime_limit);
            self.throttle(left / elapsed.max(1e-6), fits);
        }
        Run { ends: false, total: horizon, passes: MOST_PASSES, ..self.account(horizon) }
    }

    /// Sends what is dirty, or everything; returns its bytes and its time. What it leaves is dirty then.
    fn pass(&mut self, first: bool) -> (f64, f64) {
        let world = self.world;
        // No two passes find the host alike.
        let bandwidth = world.bandwidth * self.rng.around(PASS_SPREAD);
        let speed = (1.0 - self.share) * self.rng.around(GUEST_SPREAD);
        let (pages, others) = if first { world.pages() } else { (self.dirty.iter().sum(), 0.0) };
        let woken = WAKE_S * self.rng.gauss().abs();
        let elapsed = world.sending(pages, others, bandwidth) + world.round_trip + PASS_S + woken;
        let window = elapsed + world.inputs.costs.harvest_s;
        let at_harvest = world.inputs.protection == Protection::AtHarvest;
        let lead = if at_harvest { window } else { world.lead(pages, bandwidth, first).min(window) };
        let places = if first && !at_harvest { self.places() } else { vec![(1.0, 0.0, 1.0)] };
        for ((class, dirty), ring) in self.classes.iter().zip(&mut self.dirty).zip(&mut self.rings) {
            let kernel = class.kernel.faster(speed);
            let left = if let Some(ring) = ring {
                ring.pass(kernel, window, lead, if first { Some(&places) } else { None })
            } else if first {
                let part = |(share, from, to): &(f64, f64, f64)| {
                    class.pages * share * kernel.left_by_turns((*from, *to), window, lead)
                };
                places.iter().map(part).sum()
            } else {
                let sent = dirty.min(class.pages);
                (class.pages - sent) * kernel.within(window)
                    + sent * kernel.left_by_turns((0.0, 1.0), window, lead)
            };
            // Who writes at random is not as regular as the mean.
            *dirty = (left + self.rng.gauss() * left.sqrt()).clamp(0.0, class.pages);
        }
        let written: f64 = self.dirty.iter().sum();
        self.faults += written;
        self.held += self.share * window;
        self.now += elapsed;
        self.bytes += pages * WIRE_PAGE;
        (pages * WIRE_PAGE, elapsed)
    }

    /// For the first pass: shares of the dirty pages, and from when to when in the pass these are read.
    fn places(&self) -> Vec<(f64, f64, f64)> {
        let places = &self.world.inputs.places;
        let (touched, dirty) =
            places.iter().fold((0.0, 0.0), |(t, d), place| (t + place.touched, d + place.dirty));
        if touched <= 0.0 || dirty <= 0.0 {
            return vec![(1.0, 0.0, 1.0)];
        }
        let mut at = 0.0;
        let part = |place: &super::inputs::Place| {
            let from = at;
            at += place.touched / touched;
            (place.dirty / dirty, from, at)
        };
        places.iter().map(part).collect()
    }

    /// Slows the guest as the session would.
    fn throttle(&mut self, dirtied: f64, fits: bool) {
        let world = self.world;
        if world.settings.auto_converge == AutoConverge::Off || (fits && self.share == 0.0) {
            return;
        }
        let bandwidth = world.bandwidth / PAGE_SIZE as f64;
        self.share = throttle::shares(&[dirtied], &[self.share], bandwidth).first().copied().unwrap_or(0.0);
    }

    fn stop(mut self, (left, before): (f64, f64), passes: u32, ends: bool) -> Run {
        let world = self.world;
        // While it is paused and its state saved, it still wrote a little.
        let since = world.curve.pages(world.inputs.costs.pause_s);
        let downtime = world.downtime(left + since, before / WIRE_PAGE);
        self.bytes += left * WIRE_PAGE;
        let total = self.now + downtime;
        Run { ends, total, downtime, passes, ..self.account(self.now) }
    }

    fn postcopy(self) -> Run {
        let pages = self.world.pages().0;
        self.hand_over(pages, 0)
    }

    /// The guest goes on there without `lacking` pages.
    fn hand_over(mut self, lacking: f64, passes: u32) -> Run {
        let world = self.world;
        let costs = &world.inputs.costs;
        let names = world.inputs.memory_pages as f64 / 8.0 / world.bandwidth;
        let harvest = if passes == 0 { 0.0 } else { costs.harvest_s };
        // What loading and starting touch has to be fetched first.
        let downtime = world.fixed * (costs.stopping_s() + harvest)
            + costs.state_bytes / world.bandwidth
            + names
            + 4.0 * world.round_trip
            + 4.0 * (world.round_trip + FAULT_S)
            + 2.0 * PASS_S
            + LAZY_S
            + if passes == 0 { 0.0 } else { lacking * STALE_PAGE_S };
        let share = if world.settings.pace == Pace::Auto && !world.capped() { PACED } else { 1.0 };
        let rest = lacking * WIRE_PAGE / (world.bandwidth * share) + world.round_trip + PASS_S;
        let blocked = self.blocked(rest, lacking);
        self.bytes += lacking * WIRE_PAGE;
        self.held += blocked;
        let run = self.account(self.now + rest);
        Run { ends: true, total: self.now + downtime + rest, downtime, passes, ..run }
    }

    /// How long a vCPU waits for pages while the rest comes within `rest`.
    fn blocked(&self, rest: f64, lacking: f64) -> f64 {
        let world = self.world;
        let vcpus = f64::from(world.inputs.vcpus.max(1));
        let each = world.round_trip + FAULT_S + WIRE_PAGE / world.bandwidth;
        let mut blocked = 0.0;
        for _ in 0..20 {
            // A guest that waits does not touch pages meanwhile.
            let runs = (rest - blocked).max(0.02 * rest);
            let touched: f64 =
                world.curve.classes.iter().map(|c| c.pages * c.kernel.mean_within(0.0, runs)).sum();
            let next = (touched.min(lacking) * each / vcpus).min(rest * 0.98);
            blocked = 0.5 * (blocked + next);
        }
        blocked
    }

    fn account(&self, until: f64) -> Run {
        let vcpus = f64::from(self.world.inputs.vcpus.max(1));
        let lost = self.held + self.faults * self.world.inputs.costs.fault_s / vcpus;
        Run { bytes: self.bytes, lost: (lost / until.max(1e-6)).clamp(0.0, 1.0), ..Run::default() }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
fn whole(value: f64) -> u64 {
    value.clamp(0.0, 1e18).round() as u64
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
