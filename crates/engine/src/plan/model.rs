//! Migrations on paper: what a pass takes and what it leaves, pass by pass, with the policy that decides in earnest.

use super::curve::{Class, Curve, Kernel};
use super::inputs::{Inputs, Protection};
use super::rng::Rng;
use crate::source::policy::{Convergence, Decision, PassOutcome};
use crate::source::throttle;
use crate::source::{AutoConverge, MigrationMode, OnTimeout, Pace, Settings};
use std::time::Duration;
use vmferry_memory::PAGE_SIZE;

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
/// In hybrid mode, a pass that leaves more than this share of the pass before is the last.
const HYBRID: f64 = crate::source::session::CONVERGING;

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
    /// The window of the pass before.
    window: f64,
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

    fn downtime(&self, pages: f64) -> f64 {
        let costs = &self.inputs.costs;
        let state = costs.state_bytes / self.bandwidth;
        self.fixed * (costs.pause_s + 2.0 * costs.save_s + costs.harvest_s)
            + state
            + 3.0 * self.round_trip
            + PASS_S
            + self.sending(pages, 0.0, self.bandwidth)
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
        let now = self.setup();
        let state = State {
            world: self,
            rng,
            classes,
            dirty,
            now,
            window: 0.0,
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
        let mut policy = Convergence::of(settings);
        let costs = &world.inputs.costs;
        let fixed =
            world.fixed * (costs.pause_s + 2.0 * costs.save_s + costs.harvest_s) + 3.0 * world.round_trip;
        let horizon = settings.timeout.map_or(HORIZON_S, |timeout| timeout.as_secs_f64());
        let mut left_before: Option<f64> = None;
        for pass in 0..MOST_PASSES {
            let (bytes, elapsed) = self.pass(pass == 0);
            self.now += costs.harvest_s;
            if pass == 0 {
                self.now += costs.pause_s + costs.save_s;
            }
            let left: f64 = self.dirty.iter().sum();
            let outcome =
                PassOutcome { bytes: whole(bytes), elapsed: seconds(elapsed), remaining: whole(left) };
            let decision = policy.decide(outcome, seconds(fixed));
            let late = self.now > horizon;
            if decision == Decision::Switch || (late && settings.on_timeout == OnTimeout::Switch) {
                return self.stop(left, pass + 1, decision == Decision::Switch);
            }
            let slow = left_before.replace(left).is_some_and(|before| left > before * HYBRID);
            let lazy = settings.mode == MigrationMode::Hybrid && slow;
            if lazy || (late && settings.on_timeout == OnTimeout::Postcopy) {
                return self.hand_over(left, pass + 1);
            }
            if late {
                break;
            }
            let fits = policy
                .predict(whole(left), seconds(fixed))
                .is_some_and(|time| time <= settings.downtime_limit);
            self.throttle(left / elapsed.max(1e-6), fits);
        }
        Run { ends: false, total: horizon, passes: MOST_PASSES, ..self.account(horizon) }
    }

    /// Sends what is dirty, or everything; returns its bytes and its time. What it leaves is dirty then.
    fn pass(&mut self, first: bool) -> (f64, f64) {
        let world = self.world;
        // No two passes find the host alike.
        let bandwidth = world.bandwidth * self.rng.around(0.02);
        let (pages, others) = if first { world.pages() } else { (self.dirty.iter().sum(), 0.0) };
        let elapsed = world.sending(pages, others, bandwidth) + world.round_trip + PASS_S;
        let window = elapsed + world.inputs.costs.harvest_s;
        let before = std::mem::replace(&mut self.window, window);
        let at_harvest = world.inputs.protection == Protection::AtHarvest;
        let places = if first && !at_harvest { self.places() } else { Vec::new() };
        for (class, dirty) in self.classes.iter().zip(&mut self.dirty) {
            let often = class.kernel.faster(1.0 - self.share);
            let left = if first && at_harvest {
                class.pages * often.within(window)
            } else if first {
                places
                    .iter()
                    .map(|(share, from, to)| {
                        class.pages
                            * share
                            * often.mean_within(window - to * elapsed, window - from * elapsed)
                    })
                    .sum()
            } else if at_harvest {
                class.pages * often.within(window)
            } else {
                left_by(class.pages, often, *dirty, before, window)
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

    fn stop(mut self, left: f64, passes: u32, ends: bool) -> Run {
        let world = self.world;
        // While it is paused and its state saved, it still wrote a little.
        let since = world.curve.pages(world.inputs.costs.pause_s);
        let downtime = world.downtime(left + since);
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
        let downtime = world.fixed * (costs.pause_s + 2.0 * costs.save_s + harvest)
            + costs.state_bytes / world.bandwidth
            + names
            + 4.0 * world.round_trip
            + 4.0 * (world.round_trip + FAULT_S)
            + 2.0 * PASS_S;
        let capped = world.settings.max_bandwidth.is_some();
        let share = if world.settings.pace == Pace::Auto && !capped { PACED } else { 1.0 };
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

/// Of a class of `pages`, of which `sent` were dirty and are sent in a pass that takes `window` and protects each right before it
/// is read: how many are dirty after it. `before` was the window of the pass before.
fn left_by(pages: f64, kernel: Kernel, sent: f64, before: f64, window: f64) -> f64 {
    let sent = sent.min(pages);
    match kernel {
        Kernel::Random(_) => (pages - sent) * kernel.within(window) + sent * kernel.mean_within(0.0, window),
        Kernel::Cyclic(often) => {
            let round = 1.0 / often.max(1e-12);
            if before + window <= round {
                return pages * kernel.within(window);
            }
            if window >= round {
                return pages * kernel.mean_within(0.0, window);
            }
            // Its walk has come round to pages that were just sent: those it reaches after their turn are dirty again.
            let again =
                (window * window - (round - before.min(round)).powi(2)) / (2.0 * before.min(round) * window);
            (pages - sent) + sent * again.clamp(0.0, 1.0)
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
fn whole(value: f64) -> u64 {
    value.clamp(0.0, 1e18).round() as u64
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
