//! How fast the guest runs, from its own reports.

use crate::guest::SharedProbe;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_guest_abi::StatsSnapshot;

/// How often the guest's reports are looked at.
pub(crate) const EVERY: Duration = Duration::from_millis(100);
/// How far back the speed before a migration reaches, in guest microseconds.
const BEFORE_US: u64 = 1_000_000;

/// A guest's clock and its writes until then, of its first vCPU's time and all vCPUs' writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) t_us: u64,
    pub(crate) writes: u64,
}

impl Sample {
    pub(crate) fn of(stats: &StatsSnapshot) -> Self {
        let t_us = stats.cpus().iter().map(|cpu| cpu.t_us).max().unwrap_or(0);
        Self { t_us, writes: stats.writes() }
    }

    /// Writes a second from `earlier` to this; `None` if no time has passed.
    pub(crate) fn since(self, earlier: Self) -> Option<f64> {
        let us = self.t_us.checked_sub(earlier.t_us).filter(|us| *us > 0)?;
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        Some(self.writes.saturating_sub(earlier.writes) as f64 * 1e6 / us as f64)
    }
}

/// The samples of the last few seconds.
#[derive(Debug, Default, Clone)]
pub(crate) struct Speed(Arc<Mutex<VecDeque<Sample>>>);

impl Speed {
    /// Looks at the guest once; called every [`EVERY`] by whoever watches it.
    pub(crate) fn look(&self, probe: &SharedProbe) {
        let Ok(stats) = probe.stats() else { return };
        let sample = Sample::of(&stats);
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.back() != Some(&sample) {
            samples.push_back(sample);
        }
        while samples.len() > 64 {
            samples.pop_front();
        }
    }

    /// Writes a second over the last second.
    pub(crate) fn recent(&self) -> Option<f64> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = *samples.back()?;
        let oldest = samples.iter().find(|sample| newest.t_us.saturating_sub(sample.t_us) <= BEFORE_US)?;
        newest.since(*oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_writes_by_guest_time() {
        let (a, b) = (Sample { t_us: 1000, writes: 5 }, Sample { t_us: 501_000, writes: 50_005 });
        assert_eq!(b.since(a), Some(100_000.0));
        assert_eq!(a.since(a), None);
        assert_eq!(a.since(b), None);
    }
}
