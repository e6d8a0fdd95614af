//! Simulation of harvest policies. The policies are those that ship, and an arithmetic model
//! replaces the guest and the clock.
//!
//! [`run`] plays a [`Trace`] under a [`ReaperPolicy`] and returns the cost of the policy. A *turn*
//! of the reaper is one wake-up. If `series` is true, the result also contains the sleep and the
//! fill of the rings at each turn, for a chart.

mod guest;
mod trace;

use super::policy::{ReaperPolicy, RingView, Rings};
use super::set::RingSet;
use crate::TrackerError;
use guest::Vcpu;
pub use guest::{Costs, Order, Phase};
use std::time::Duration;
pub use trace::Trace;
use vmferry_sys::ring::RESERVED_ENTRIES;

/// One turn of the reaper.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Time of the turn, in seconds since the start.
    pub at: f64,
    /// Time that the reaper slept after the turn, in seconds.
    pub sleep: f64,
    /// Fill of the fullest ring just before the turn, as a share of its entries.
    pub occupancy: f64,
    /// True if the policy harvested in the turn.
    pub harvested: bool,
}

/// Cost of a policy on a trace.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Number of writes that the guest completed.
    pub writes: f64,
    /// Number of faults of these writes.
    pub faults: f64,
    /// Number of times that a vCPU stopped because of a full ring.
    pub full_exits: u64,
    /// Total time of these stops, in seconds, summed over the vCPUs.
    pub stalled: f64,
    /// Number of turns of the reaper.
    pub turns: u64,
    /// Number of turns in which the reaper harvested.
    pub harvests: u64,
    /// Processor time that the reaper used, in seconds.
    pub reaper_cpu: f64,
    /// Shortest and longest sleep, in seconds.
    pub sleeps: (f64, f64),
    /// Turns of the reaper, if requested.
    pub series: Vec<Sample>,
}

impl Outcome {
    /// Returns the time that the vCPUs lost to faults and stops per million writes, in seconds.
    #[must_use]
    pub fn lost_per_million(&self, costs: &Costs) -> f64 {
        (self.stalled + self.faults * costs.fault) / self.writes * 1e6
    }
}

/// Running harvest: its rings, and the time of its end.
#[derive(Debug)]
struct Job {
    end: f64,
    rings: Vec<usize>,
}

/// Simulated host.
struct Host<'a> {
    costs: &'a Costs,
    entries: u32,
    usable: f64,
    /// True if a full ring makes its vCPU harvest all rings.
    all: bool,
    /// True if the policy harvested in this turn.
    harvested: bool,
    now: f64,
    vcpus: Vec<Vcpu>,
    counts: Vec<RingView>,
    jobs: Vec<Job>,
    reaper_cpu: f64,
}

/// Plays `trace` for `seconds` of simulated time under `policy`, with rings of `entries` entries.
/// The trace is repeated if it is shorter.
///
/// # Panics
/// Panics if a vCPU of the trace has no phase, the policy uses a ring that does not exist, or the
/// policy returns an error (no simulated harvest fails).
#[must_use]
pub fn run(
    policy: &dyn ReaperPolicy,
    trace: &Trace,
    entries: u32,
    costs: &Costs,
    seconds: f64,
    series: bool,
) -> Outcome {
    let vcpus: Vec<_> = trace.vcpus.iter().map(|phases| Vcpu::new(phases.clone())).collect();
    let mut host = Host {
        costs,
        entries,
        usable: f64::from(entries.saturating_sub(RESERVED_ENTRIES)),
        all: policy.harvests_all(),
        harvested: false,
        now: 0.0,
        counts: vec![RingView::default(); vcpus.len()],
        vcpus,
        jobs: Vec::new(),
        reaper_cpu: 0.0,
    };
    let mut outcome = Outcome { sleeps: (f64::INFINITY, 0.0), ..Outcome::default() };
    let mut schedule = policy.begin(&host);
    let mut sleep = schedule.first_sleep();
    loop {
        host.run_until((host.now + sleep.as_secs_f64()).min(seconds));
        if host.now >= seconds {
            break;
        }
        let occupancy = host.vcpus.iter().map(Vcpu::used).fold(0.0, f64::max) / f64::from(entries);
        let at = host.now;
        host.harvested = false;
        sleep = schedule.step(&mut host).expect("no simulated harvest fails");
        host.reaper_cpu += costs.look;
        outcome.turns += 1;
        outcome.harvests += u64::from(host.harvested);
        let slept = sleep.as_secs_f64();
        outcome.sleeps = (outcome.sleeps.0.min(slept), outcome.sleeps.1.max(slept));
        if series {
            outcome.series.push(Sample { at, sleep: slept, occupancy, harvested: host.harvested });
        }
    }
    outcome.writes = host.vcpus.iter().map(|vcpu| vcpu.writes).sum();
    outcome.faults = host.vcpus.iter().map(|vcpu| vcpu.faults).sum();
    outcome.full_exits = host.counts.iter().map(|count| count.full_exits).sum();
    outcome.stalled = host.counts.iter().map(|count| count.stalled.as_secs_f64()).sum();
    outcome.reaper_cpu = host.reaper_cpu;
    outcome
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and at most 65536"
)]
fn whole(entries: f64) -> u32 {
    (entries + 1e-6) as u32
}

impl Host<'_> {
    fn run_until(&mut self, end: f64) {
        while self.now < end {
            let own = self
                .vcpus
                .iter()
                .map(|vcpu| vcpu.next(self.usable, self.costs))
                .fold(f64::INFINITY, f64::min);
            let job = self.jobs.iter().map(|job| job.end).fold(f64::INFINITY, f64::min);
            let next = (self.now + own).min(job).min(end);
            let passed = next - self.now;
            for vcpu in &mut self.vcpus {
                vcpu.advance(passed, self.costs);
            }
            self.now = next;
            self.finish_jobs();
            for ring in 0..self.vcpus.len() {
                if self.vcpus[ring].stopped.is_none() && self.vcpus[ring].full(self.usable) {
                    self.stop(ring);
                }
            }
        }
    }

    /// Stops the vCPU of `ring` until a harvest is done: a running harvest of the ring, or its own.
    fn stop(&mut self, ring: usize) {
        self.vcpus[ring].stopped = Some(self.now);
        self.counts[ring].full_exits += 1;
        if !self.jobs.iter().any(|job| job.rings.contains(&ring)) {
            let rings = if self.all { (0..self.vcpus.len()).collect() } else { vec![ring] };
            self.begin(rings);
        }
    }

    /// Begins a harvest of `rings`, after all running harvests, and returns the time of its end.
    fn begin(&mut self, rings: Vec<usize>) -> f64 {
        let free = self.jobs.iter().map(|job| job.end).fold(self.now, f64::max);
        let end = free + self.duration(&rings);
        self.jobs.push(Job { end, rings });
        end
    }

    fn duration(&self, rings: &[usize]) -> f64 {
        let pages: f64 = rings.iter().map(|ring| self.vcpus[*ring].used()).sum();
        if pages < 1.0 { 0.0 } else { self.costs.harvest + self.costs.page * pages }
    }

    fn finish_jobs(&mut self) {
        let now = self.now;
        let (done, open): (Vec<_>, Vec<_>) = self.jobs.drain(..).partition(|job| job.end <= now + 1e-12);
        self.jobs = open;
        for ring in done.into_iter().flat_map(|job| job.rings) {
            let (vcpu, count) = (&mut self.vcpus[ring], &mut self.counts[ring]);
            count.harvested += u64::from(whole(vcpu.used()));
            count.emptied_at = Duration::from_secs_f64(now);
            vcpu.emptied();
            if let Some(since) = vcpu.stopped.take() {
                count.stalled += Duration::from_secs_f64(now - since + self.costs.exit);
            }
        }
    }

    fn reap(&mut self, rings: Vec<usize>) -> u64 {
        let before: u64 = self.counts.iter().map(|count| count.harvested).sum();
        self.reaper_cpu += self.duration(&rings);
        let end = self.begin(rings);
        self.run_until(end);
        self.finish_jobs();
        self.counts.iter().map(|count| count.harvested).sum::<u64>() - before
    }
}

impl Rings for Host<'_> {
    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    fn entries(&self) -> u32 {
        self.entries
    }

    fn usable(&self) -> u32 {
        whole(self.usable)
    }

    fn observe(&mut self, views: &mut Vec<RingView>) {
        views.clear();
        let seen = self.vcpus.iter().zip(&self.counts);
        views.extend(seen.map(|(vcpu, count)| RingView { used: whole(vcpu.used()), ..*count }));
    }

    fn harvest(&mut self, rings: &[usize]) -> Result<u64, TrackerError> {
        self.harvested |= !rings.is_empty();
        let rings = RingSet::named(rings, self.vcpus.len())?;
        Ok(self.reap(rings.iter().collect()))
    }

    fn harvest_all(&mut self) -> Result<u64, TrackerError> {
        self.harvested = true;
        Ok(self.reap((0..self.vcpus.len()).collect()))
    }
}

#[cfg(test)]
mod tests;
