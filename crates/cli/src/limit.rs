//! Limits for how fast single vCPUs dirty memory: `set-vcpu-dirty-limit`.
//!
//! The machine's owner looks every [`PERIOD`] how many pages each vCPU wrote, by its dirty ring, and has those that wrote more than they
//! may stand still for a share of their time. A page that is written twice within a period counts once, as it would in a migration's
//! pass. While the guest moves or is measured, somebody else harvests the rings: the shares then stay as they are.

use crate::guest::Machine;
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};
use vmferry_core::PageSet;
use vmferry_engine::{DirtyTracker, TrackerKind};

/// How often rates are looked at and shares are set.
const PERIOD: Duration = Duration::from_secs(1);
/// The most that a vCPU stands still, or its watchdogs bark.
const MOST: f64 = 0.97;
/// Less is not worth a kick every few milliseconds.
const LEAST: f64 = 0.02;
const PAGE: f64 = 4096.0;

/// A vCPU with a limit, as it was seen last.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limited {
    pub(crate) cpu: usize,
    /// Bytes a second that it may dirty.
    pub(crate) limit: f64,
    /// Bytes a second that it dirtied.
    pub(crate) rate: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Vcpu {
    limit: Option<f64>,
    rate: f64,
    /// The share of its time that it stands still.
    share: f64,
    /// Pages that it has written by the last look.
    written: u64,
}

/// The limits of a machine's vCPUs.
#[derive(Default)]
pub(crate) struct Limiter {
    vcpus: Vec<Vcpu>,
    /// While there are limits and nobody else tracks.
    tracker: Option<Box<dyn DirtyTracker>>,
    looked: Option<Instant>,
}

impl Limiter {
    /// Sets or lifts the limit of vCPU `cpu`, or of all; `limit` is in bytes a second.
    pub(crate) fn set(
        &mut self,
        machine: &mut Machine,
        cpu: Option<usize>,
        limit: Option<f64>,
    ) -> Result<()> {
        if limit.is_some() {
            self.track(machine)?;
        }
        let count = self.vcpus.len();
        match cpu {
            Some(cpu) => match self.vcpus.get_mut(cpu) {
                Some(vcpu) => vcpu.limit = limit,
                // Nobody has a limit: there is nothing to lift.
                None if limit.is_none() => {}
                None => bail!("there is no vCPU {cpu}: this guest has {count}"),
            },
            None => self.vcpus.iter_mut().for_each(|vcpu| vcpu.limit = limit),
        }
        if self.vcpus.iter().all(|vcpu| vcpu.limit.is_none()) {
            return self.end(machine);
        }
        Ok(())
    }

    /// Who has a limit.
    pub(crate) fn limited(&self) -> Vec<Limited> {
        let limited =
            |(cpu, vcpu): (usize, &Vcpu)| Some(Limited { cpu, limit: vcpu.limit?, rate: vcpu.rate });
        self.vcpus.iter().enumerate().filter_map(limited).collect()
    }

    /// Lets somebody else track: nothing is looked at until [`look`](Self::look).
    pub(crate) fn give_way(&mut self) {
        self.tracker = None;
    }

    /// Looks, if it is time to; says whether it did. Called by the machine's owner while its guest runs.
    pub(crate) fn look(&mut self, machine: &mut Machine) -> Result<bool> {
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
        let mut tracker =
            tracker.context("a limit of a vCPU's dirty rate needs dirty rings (run --dirty-ring 4096)")?;
        tracker.start()?;
        let rings = tracker.ring().context("these rings do not count")?;
        self.vcpus.resize(rings.vcpus.len(), Vcpu::default());
        for (vcpu, ring) in self.vcpus.iter_mut().zip(&rings.vcpus) {
            vcpu.written = ring.pages;
        }
        self.tracker = Some(tracker);
        self.looked = Some(Instant::now());
        Ok(())
    }

    /// Nobody has a limit any more.
    fn end(&mut self, machine: &mut Machine) -> Result<()> {
        if self.vcpus.iter().any(|vcpu| vcpu.share > 0.0) {
            machine.source().throttle(&[0.0])?;
        }
        *self = Self::default();
        Ok(())
    }
}

impl Vcpu {
    /// It has written `pages` by now, `seconds` after the last look.
    fn seen(&mut self, pages: u64, seconds: f64) {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let pages_since = pages.saturating_sub(self.written) as f64;
        self.rate = pages_since * PAGE / seconds.max(1e-3);
        self.written = pages;
        let Some(limit) = self.limit else {
            self.share = 0.0;
            return;
        };
        // What it would dirty if it ran all the time; half way there each time, for its rate is not the same each time either.
        let full = self.rate / (1.0 - self.share);
        let wanted = if full > limit { 1.0 - limit / full } else { 0.0 };
        let share = f64::midpoint(self.share, wanted).clamp(0.0, MOST);
        self.share = if share < LEAST { 0.0 } else { share };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rates of a vCPU that dirties `full` bytes a second when it is let, over `looks` looks.
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
    fn a_vcpu_comes_to_its_limit_and_stays() {
        let proportional = rates(Some(1e7), |runs| runs * 1e8, 30);
        // One that would write its working set twice: what it dirties hardly falls at first.
        let saturated = rates(Some(1e7), |runs| 4e7 * (1.0 - (-runs * 8.0).exp()), 60);
        for rates in [proportional, saturated] {
            assert!(rates[0] > 3e7);
            assert!(rates[rates.len() - 5..].iter().all(|rate| (0.8e7..1.2e7).contains(rate)), "{rates:?}");
        }
    }

    #[test]
    fn whoever_stays_below_or_has_none_is_left_alone() {
        for limit in [None, Some(2e8)] {
            assert!(rates(limit, |runs| runs * 1e8, 10).iter().all(|rate| (0.99e8..1.01e8).contains(rate)));
        }
    }

    #[test]
    fn nobody_is_stopped_for_good() {
        let slow = rates(Some(1.0), |runs| runs * 1e9, 100);
        assert!(slow.last().is_some_and(|rate| *rate > 1e7), "3 % of its time is left");
    }
}
