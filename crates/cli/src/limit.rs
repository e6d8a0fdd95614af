//! Limits of the dirty rate of single vCPUs: `set-vcpu-dirty-limit`.
//!
//! Every [`PERIOD`] the machine's owner reads from the dirty rings how many pages each vCPU wrote.
//! vCPUs that exceed their limit are stopped for a share of their time. A page that is written
//! twice within a period counts once, as in a pass of a migration. While a migration or a
//! measurement harvests the rings, the shares stay as they are.

use crate::guest::Machine;
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};
use vmferry_core::PageSet;
use vmferry_engine::{DirtyTracker, TrackerKind};

/// Interval at which rates are read and shares are set.
const PERIOD: Duration = Duration::from_secs(1);
/// Largest share of time for which a vCPU is stopped. A larger share would trigger watchdogs in the
/// guest.
const MOST: f64 = 0.97;
/// Smallest share. A smaller one is not worth a kick of the vCPU every few milliseconds.
const LEAST: f64 = 0.02;
const PAGE: f64 = 4096.0;

/// A vCPU with a limit, and its last measured rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limited {
    pub(crate) cpu: usize,
    /// Limit in bytes per second.
    pub(crate) limit: f64,
    /// Measured dirty rate in bytes per second.
    pub(crate) rate: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Vcpu {
    limit: Option<f64>,
    rate: f64,
    /// Share of time for which the vCPU is stopped.
    share: f64,
    /// Pages that the vCPU had written at the last measurement.
    written: u64,
}

/// Limits of a machine's vCPUs.
#[derive(Default)]
pub(crate) struct Limiter {
    vcpus: Vec<Vcpu>,
    /// Tracker of this limiter. `None` without limits, and while a migration or a measurement
    /// tracks.
    tracker: Option<Box<dyn DirtyTracker>>,
    looked: Option<Instant>,
}

impl Limiter {
    /// Sets or removes the limit of vCPU `cpu`, or of all vCPUs. `limit` is in bytes per second.
    pub(crate) fn set(
        &mut self,
        machine: &mut Machine,
        cpu: Option<usize>,
        limit: Option<f64>,
    ) -> Result<()> {
        if limit.is_some() {
            self.track(machine)?;
        }
        let changed = self.change(cpu, limit);
        // Also after an error: without a limit, nothing may slow the guest down.
        if self.vcpus.iter().all(|vcpu| vcpu.limit.is_none()) {
            self.end(machine)?;
        }
        changed
    }

    fn change(&mut self, cpu: Option<usize>, limit: Option<f64>) -> Result<()> {
        let count = self.vcpus.len();
        match cpu {
            Some(cpu) => match self.vcpus.get_mut(cpu) {
                Some(vcpu) => vcpu.limit = limit,
                // Without any limit, there is nothing to remove.
                None if limit.is_none() => {}
                None => bail!("there is no vCPU {cpu}: this guest has {count}"),
            },
            None => self.vcpus.iter_mut().for_each(|vcpu| vcpu.limit = limit),
        }
        Ok(())
    }

    /// Returns the vCPUs with a limit.
    pub(crate) fn limited(&self) -> Vec<Limited> {
        let limited =
            |(cpu, vcpu): (usize, &Vcpu)| Some(Limited { cpu, limit: vcpu.limit?, rate: vcpu.rate });
        self.vcpus.iter().enumerate().filter_map(limited).collect()
    }

    /// Stops tracking, so that a migration or a measurement can track. The next
    /// [`adjust`](Self::adjust) starts tracking again.
    pub(crate) fn give_way(&mut self) {
        self.tracker = None;
    }

    /// Measures the rates and sets the shares if a period has passed. Returns whether it has. The
    /// machine's owner calls this method while its guest runs.
    pub(crate) fn adjust(&mut self, machine: &mut Machine) -> Result<bool> {
        if self.vcpus.iter().all(|vcpu| vcpu.limit.is_none()) {
            return Ok(false);
        }
        if self.tracker.is_none() {
            self.track(machine)?;
        }
        let Some((tracker, looked)) = self.tracker.as_mut().zip(self.looked) else { return Ok(false) };
        if looked.elapsed() < PERIOD {
            return Ok(false);
        }
        let source = machine.source();
        tracker.harvest(&mut PageSet::empty(source.memory().layout()))?;
        let rings = tracker.ring().unwrap_or_default();
        let seconds = looked.elapsed().as_secs_f64();
        for (vcpu, ring) in self.vcpus.iter_mut().zip(&rings.vcpus) {
            vcpu.seen(ring.pages, seconds);
        }
        self.looked = Some(Instant::now());
        let shares: Vec<_> = self.vcpus.iter().map(|vcpu| vcpu.share).collect();
        source.throttle(&shares)?;
        Ok(true)
    }

    fn track(&mut self, machine: &mut Machine) -> Result<()> {
        if self.tracker.is_some() {
            return Ok(());
        }
        let tracker = machine.source().tracker(Some(TrackerKind::Ring));
        let mut tracker = tracker.context("a limit of a vCPU's dirty rate needs dirty rings")?;
        tracker.start()?;
        let rings = tracker.ring().context("these dirty rings do not count pages")?;
        self.vcpus.resize(rings.vcpus.len(), Vcpu::default());
        for (vcpu, ring) in self.vcpus.iter_mut().zip(&rings.vcpus) {
            vcpu.written = ring.pages;
        }
        self.tracker = Some(tracker);
        self.looked = Some(Instant::now());
        Ok(())
    }

    /// Removes all limits and their effect.
    fn end(&mut self, machine: &mut Machine) -> Result<()> {
        if self.vcpus.iter().any(|vcpu| vcpu.share > 0.0) {
            machine.source().throttle(&[0.0])?;
        }
        *self = Self::default();
        Ok(())
    }
}

impl Vcpu {
    /// Updates rate and share: the vCPU has written `pages` by now, `seconds` after the last
    /// measurement.
    fn seen(&mut self, pages: u64, seconds: f64) {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let pages_since = pages.saturating_sub(self.written) as f64;
        self.rate = pages_since * PAGE / seconds.max(1e-3);
        self.written = pages;
        let Some(limit) = self.limit else {
            self.share = 0.0;
            return;
        };
        // `full` is the rate that the vCPU would have without a limit. The share moves half of the
        // way, because rates vary.
        let full = self.rate / (1.0 - self.share);
        let wanted = if full > limit { 1.0 - limit / full } else { 0.0 };
        let share = f64::midpoint(self.share, wanted).clamp(0.0, MOST);
        self.share = if share < LEAST { 0.0 } else { share };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rates of a vCPU over `looks` measurements. `full` is its dirty rate for a share
    /// of running time.
    fn rates(limit: Option<f64>, full: impl Fn(f64) -> f64, looks: usize) -> Vec<f64> {
        let mut vcpu = Vcpu { limit, ..Vcpu::default() };
        let mut written = 0.0;
        (0..looks)
            .map(|_| {
                written += full(1.0 - vcpu.share) / PAGE;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few pages")]
                vcpu.seen(written as u64, 1.0);
                assert!((0.0..=MOST).contains(&vcpu.share));
                vcpu.rate
            })
            .collect()
    }

    #[test]
    fn vcpu_reaches_its_limit_and_stays_there() {
        let proportional = rates(Some(1e7), |runs| runs * 1e8, 30);
        // A vCPU that writes its working set several times: its dirty rate hardly falls at first.
        let saturated = rates(Some(1e7), |runs| 4e7 * (1.0 - (-runs * 8.0).exp()), 60);
        for rates in [proportional, saturated] {
            assert!(rates[0] > 3e7);
            assert!(rates[rates.len() - 5..].iter().all(|rate| (0.8e7..1.2e7).contains(rate)), "{rates:?}");
        }
    }

    #[test]
    fn vcpu_below_its_limit_or_without_one_is_not_slowed() {
        for limit in [None, Some(2e8)] {
            assert!(rates(limit, |runs| runs * 1e8, 10).iter().all(|rate| (0.99e8..1.01e8).contains(rate)));
        }
    }

    #[test]
    fn no_vcpu_is_stopped_completely() {
        let slow = rates(Some(1.0), |runs| runs * 1e9, 100);
        assert!(slow.last().is_some_and(|rate| *rate > 1e7), "3 % of its time is left");
    }
}
