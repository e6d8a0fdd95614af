//! Simulation of migrations: computes the duration of each pass and the pages that it leaves dirty,
//! with the policy that real migrations use.

use super::curve::{Class, Curve};
use super::encoding::{Encoding, PageCost, PassPages};
use super::inputs::{Inputs, Protection};
use super::ring::Ring;
use super::rng::Rng;
use crate::source::sender;
use crate::source::{AutoConverge, BulkLimit, MigrationMode, OnTimeout, Settings};
use std::time::Duration;
use vmferry_protocol::source::policy::{Convergence, Decision, LinkRate, PassOutcome};
use vmferry_protocol::source::throttle;

/// Bytes of a page on the wire without encoding. The policy counts in such pages, as in a real
/// migration.
const WIRE_PAGE: f64 = PageCost::RAW.wire;
/// Time to read a page of zeros, in seconds.
const ZERO_PAGE_S: f64 = 0.4e-6;
/// Time of a pass in addition to its pages and the round trip, in seconds: distributing the work,
/// barriers, waking threads.
const PASS_S: f64 = 0.2e-3;
/// Time in seconds after which a migration without a timeout counts as never ending.
const HORIZON_S: f64 = 600.0;
/// Number of passes after which a migration counts as never ending.
const MOST_PASSES: u32 = 400;
/// Share of the bandwidth of the link that the bulk channels get under rate control in postcopy.
const PACED: f64 = 0.93;
/// Time of a remote fault in addition to its round trip, in seconds: the fault itself, and placing
/// the page.
const FAULT_S: f64 = 60e-6;
/// Time to prepare the target's memory for faults, and time to drop one stale page on the target,
/// in seconds.
const LAZY_S: f64 = 1.5e-3;
const STALE_PAGE_S: f64 = 1.2e-6;
/// Number of pages of a frame. A channel protects the pages of the next frame as soon as it has
/// passed the current frame to the socket.
const FRAME_PAGES: f64 = sender::FRAME_PAGES as f64;
/// Bytes that wait in a channel's socket in the first pass, in which only the link limits their
/// number. In later passes, the source limits it.
const SOCKET_BYTES: f64 = 3e6;
/// Variations between passes: of the bandwidth and of the guest's writes, both relative, and of
/// wake-up times, in seconds.
const PASS_SPREAD: f64 = 0.005;
const GUEST_SPREAD: f64 = 0.01;
const WAKE_S: f64 = 0.1e-3;
/// Threshold of hybrid mode: a pass that leaves more than this share of the pages that the previous
/// pass left is the last one.
const HYBRID: f64 = vmferry_protocol::source::policy::CONVERGING;

/// Assumptions of one run of the simulation.
pub(crate) struct World<'a> {
    pub(crate) inputs: &'a Inputs,
    pub(crate) settings: &'a Settings,
    pub(crate) encoding: Encoding<'a>,
    pub(crate) curve: Curve,
    /// Bandwidth in bytes per second.
    pub(crate) bandwidth: f64,
    /// Factor by which the measured fixed costs are multiplied.
    pub(crate) fixed: f64,
    pub(crate) round_trip: f64,
    /// Number of touched pages among which the dirty pages are spread.
    pub(crate) spread: f64,
}

/// Result of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Run {
    /// True if the migration ended by itself within the downtime limit.
    pub(crate) ends: bool,
    pub(crate) total: f64,
    pub(crate) downtime: f64,
    pub(crate) bytes: f64,
    /// CPU time of the encoding in seconds.
    pub(crate) encode: f64,
    /// Share of its time that the guest lost while it ran.
    pub(crate) lost: f64,
    pub(crate) passes: u32,
}

/// State of a simulated migration.
struct State<'a, 'w> {
    world: &'w World<'a>,
    rng: &'w mut Rng,
    classes: Vec<Class>,
    /// Number of dirty pages of each class.
    dirty: Vec<f64>,
    /// Dirty parts of each class that is written sequentially, `None` for each other class.
    rings: Vec<Option<Ring>>,
    now: f64,
    bytes: f64,
    encode: f64,
    faults: f64,
    held: f64,
    share: f64,
}

impl World<'_> {
    /// Returns the time in seconds to send `pages` pages with content at the cost `cost`, and to
    /// read `others` pages without sending them.
    fn sending(&self, (pages, cost): (f64, PageCost), others: f64, bandwidth: f64) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let costs = &self.inputs.costs;
        let cpu = (self.inputs.link.cpu_page_s + costs.protect_page_s) * pages / channels
            + self.encoding.seconds(cost) * pages;
        (pages * cost.wire / bandwidth).max(cpu) + others * (ZERO_PAGE_S + costs.protect_page_s) / channels
    }

    /// Returns the mean time in seconds between the protection of a page and the moment at which
    /// the page is sent.
    ///
    /// The pages of a chunk are protected together, but are sent in one frame after the other. With
    /// a bandwidth limit, a frame waits for its slot. Otherwise, it waits behind the bytes in the
    /// socket and on the network path.
    fn lead(&self, (pages, cost): (f64, PageCost), bandwidth: f64, first: bool) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let each = pages / channels;
        let density = (pages / self.spread).min(1.0);
        let chunk = each.min(self.inputs.chunk_pages as f64 * density) * channels * cost.wire / bandwidth;
        let frame = each.min(FRAME_PAGES) * channels * cost.wire / bandwidth;
        let waits = if self.capped() {
            frame
        } else {
            let queued =
                if first { SOCKET_BYTES * channels / bandwidth } else { sender::UNSENT.as_secs_f64() };
            queued.min(pages * cost.wire / bandwidth) + self.inputs.link.queue_s
        };
        0.5 * chunk + waits
    }

    /// Returns true if the bandwidth limit of the settings limits the senders, and not the link.
    fn capped(&self) -> bool {
        self.settings.max_bandwidth.is_some_and(|cap| cap as f64 <= self.bandwidth * 1.1)
    }

    /// Returns the time in seconds until the first frame of a pass may be sent. Under a bandwidth
    /// limit, the last frame of the previous pass, which had `before` pages, delays that frame.
    fn slot(&self, before: f64, cost: PageCost) -> f64 {
        let channels = f64::from(self.settings.channels.max(1));
        let frame = (before / channels).min(FRAME_PAGES) * cost.wire;
        if self.capped() { 0.5 * frame / self.bandwidth } else { 0.0 }
    }

    fn downtime(&self, (pages, cost): (f64, PageCost), before: f64) -> f64 {
        let costs = &self.inputs.costs;
        let state = costs.state_bytes / self.bandwidth;
        self.fixed * (costs.stopping_s() + costs.harvest_s)
            + state
            + 3.0 * self.round_trip
            + PASS_S
            + self.sending((pages, cost), 0.0, self.bandwidth)
            + self.slot(before, cost)
    }

    fn setup(&self) -> f64 {
        let costs = &self.inputs.costs;
        let urgent = if self.settings.may_use_postcopy() {
            f64::from(self.settings.urgent_channels) + 1.0
        } else {
            0.0
        };
        // Setup opens the control channel, negotiates, and opens the other channels one after the
        // other.
        (2.0 + f64::from(self.settings.channels) + urgent) * self.inputs.link.connect_s
            + 2.0 * self.round_trip
            + costs.start_s
    }

    /// Returns the number of pages with content, which must be sent, and the number of all other
    /// pages, which are only read.
    fn pages(&self) -> (f64, f64) {
        let Inputs { memory_pages, touched_pages, zero_pages, free_pages, .. } = *self.inputs;
        let content = touched_pages.saturating_sub(zero_pages).saturating_sub(free_pages);
        (content as f64, memory_pages.saturating_sub(content) as f64)
    }

    /// Returns the mean cost of the `pages` pages of pass number `pass`, or of the pages after a
    /// handover.
    fn cost(&self, pass: Option<u32>, pages: f64) -> PageCost {
        self.encoding.cost(PassPages { pass, pages, all: self.pages().0 }, self.bandwidth)
    }

    /// Runs the simulation.
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
            encode: 0.0,
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
            let (bytes, elapsed) = self.pass(pass);
            self.now += costs.harvest_s;
            if pass == 0 {
                self.now += costs.pause_s + costs.quiesce_s + costs.save_s;
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
            let hands_over = settings.mode == MigrationMode::Hybrid && slow;
            if hands_over || (late && settings.on_timeout == OnTimeout::Postcopy) {
                return self.hand_over(left, pass + 1);
            }
            if late {
                break;
            }
            let fits =
                link.predict(whole(left), seconds(fixed)).is_some_and(|time| time <= settings.downtime_limit);
            self.throttle(left / elapsed.max(1e-6), fits, pass + 1);
        }
        Run { ends: false, total: horizon, passes: MOST_PASSES, ..self.account(horizon) }
    }

    /// Simulates pass number `number`: a pass over all pages if it is 0, or else over the dirty
    /// pages. Returns the bytes of its pages without encoding, and its duration in seconds.
    /// Afterwards, `self.dirty` has the pages that the pass left dirty.
    fn pass(&mut self, number: u32) -> (f64, f64) {
        let (world, first) = (self.world, number == 0);
        // The host's speed varies between passes.
        let bandwidth = world.bandwidth * self.rng.around(PASS_SPREAD);
        let speed = (1.0 - self.share) * self.rng.around(GUEST_SPREAD);
        let (pages, others) = if first { world.pages() } else { (self.dirty.iter().sum(), 0.0) };
        let woken = WAKE_S * self.rng.gauss().abs();
        let cost = world.cost(Some(number), pages);
        let elapsed = world.sending((pages, cost), others, bandwidth) + world.round_trip + PASS_S + woken;
        let window = elapsed + world.inputs.costs.harvest_s;
        let at_harvest = world.inputs.protection == Protection::AtHarvest;
        let lead = if at_harvest { window } else { world.lead((pages, cost), bandwidth, first).min(window) };
        let parts = if first && !at_harvest { self.parts() } else { vec![(1.0, 0.0, 1.0)] };
        for ((class, dirty), ring) in self.classes.iter().zip(&mut self.dirty).zip(&mut self.rings) {
            let kernel = class.kernel.faster(speed);
            let left = if let Some(ring) = ring {
                ring.pass(kernel, window, lead, if first { Some(&parts) } else { None })
            } else if first {
                let part = |(share, from, to): &(f64, f64, f64)| {
                    class.pages * share * kernel.left_by_turns((*from, *to), window, lead)
                };
                parts.iter().map(part).sum()
            } else {
                let sent = dirty.min(class.pages);
                (class.pages - sent) * kernel.within(window)
                    + sent * kernel.left_by_turns((0.0, 1.0), window, lead)
            };
            // Random writes deviate from their mean.
            *dirty = (left + self.rng.gauss() * left.sqrt()).clamp(0.0, class.pages);
        }
        let written: f64 = self.dirty.iter().sum();
        self.faults += written;
        self.held += self.share * window;
        self.now += elapsed;
        self.count(pages, cost);
        (pages * WIRE_PAGE, elapsed)
    }

    /// Returns the parts of the first pass: for each part, its share of the dirty pages, and the
    /// shares of the pass at which reading the part begins and ends.
    fn parts(&self) -> Vec<(f64, f64, f64)> {
        let parts = &self.world.inputs.parts;
        let (touched, dirty) =
            parts.iter().fold((0.0, 0.0), |(t, d), part| (t + part.touched, d + part.dirty));
        if touched <= 0.0 || dirty <= 0.0 {
            return vec![(1.0, 0.0, 1.0)];
        }
        let mut at = 0.0;
        let part = |part: &super::inputs::MemoryPart| {
            let from = at;
            at += part.touched / touched;
            (part.dirty / dirty, from, at)
        };
        parts.iter().map(part).collect()
    }

    /// Throttles the guest as the session would.
    fn throttle(&mut self, dirtied: f64, fits: bool, next: u32) {
        let world = self.world;
        if world.settings.auto_converge == AutoConverge::Off || (fits && self.share == 0.0) {
            return;
        }
        let cost = world.cost(Some(next), self.dirty.iter().sum());
        let page_s = (cost.wire / world.bandwidth).max(world.encoding.seconds(cost));
        let bandwidth = 1.0 / page_s;
        self.share = throttle::shares(&[dirtied], &[self.share], bandwidth).first().copied().unwrap_or(0.0);
    }

    fn stop(mut self, (left, before): (f64, f64), passes: u32, ends: bool) -> Run {
        let world = self.world;
        // The guest still writes a few pages while it is being paused.
        let since = world.curve.pages(world.inputs.costs.pause_s);
        let cost = world.cost(Some(passes), left + since);
        let downtime = world.downtime((left + since, cost), before / WIRE_PAGE);
        self.count(left, cost);
        let total = self.now + downtime;
        Run { ends, total, downtime, passes, ..self.account(self.now) }
    }

    fn postcopy(self) -> Run {
        let pages = self.world.pages().0;
        self.hand_over(pages, 0)
    }

    /// Simulates a handover with `missing` missing pages, after `passes` passes.
    fn hand_over(mut self, missing: f64, passes: u32) -> Run {
        let world = self.world;
        let costs = &world.inputs.costs;
        let names = world.inputs.memory_pages as f64 / 8.0 / world.bandwidth;
        let harvest = if passes == 0 { 0.0 } else { costs.harvest_s };
        // The target must first fetch the pages that loading the state and starting the guest
        // touch.
        let downtime = world.fixed * (costs.stopping_s() + harvest)
            + costs.state_bytes / world.bandwidth
            + names
            + 4.0 * world.round_trip
            + 4.0 * (world.round_trip + FAULT_S)
            + 2.0 * PASS_S
            + LAZY_S
            + if passes == 0 { 0.0 } else { missing * STALE_PAGE_S };
        let share = if world.settings.pace == BulkLimit::Auto && !world.capped() { PACED } else { 1.0 };
        let cost = world.cost(None, missing);
        let page_s = (cost.wire / (world.bandwidth * share)).max(world.encoding.seconds(cost));
        let rest = missing * page_s + world.round_trip + PASS_S;
        let blocked = self.blocked(rest, missing);
        self.count(missing, cost);
        self.held += blocked;
        let run = self.account(self.now + rest);
        Run { ends: true, total: self.now + downtime + rest, downtime, passes, ..run }
    }

    /// Returns the time in seconds for which a vCPU waits for pages, if the missing pages arrive
    /// within `rest` seconds.
    fn blocked(&self, rest: f64, missing: f64) -> f64 {
        let world = self.world;
        let vcpus = f64::from(world.inputs.vcpus.max(1));
        let each = world.round_trip + FAULT_S + WIRE_PAGE / world.bandwidth;
        let mut blocked = 0.0;
        for _ in 0..20 {
            // A guest that waits for a page does not touch further pages.
            let runs = (rest - blocked).max(0.02 * rest);
            let touched: f64 =
                world.curve.classes.iter().map(|c| c.pages * c.kernel.mean_within(0.0, runs)).sum();
            let next = (touched.min(missing) * each / vcpus).min(rest * 0.98);
            blocked = 0.5 * (blocked + next);
        }
        blocked
    }

    /// Counts pages that are sent.
    fn count(&mut self, pages: f64, cost: PageCost) {
        self.bytes += pages * cost.wire;
        self.encode += pages * cost.encode;
    }

    fn account(&self, until: f64) -> Run {
        let vcpus = f64::from(self.world.inputs.vcpus.max(1));
        let lost = self.held + self.faults * self.world.inputs.costs.fault_s / vcpus;
        let lost = (lost / until.max(1e-6)).clamp(0.0, 1.0);
        Run { bytes: self.bytes, encode: self.encode, lost, ..Run::default() }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
fn whole(value: f64) -> u64 {
    value.clamp(0.0, 1e18).round() as u64
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}
