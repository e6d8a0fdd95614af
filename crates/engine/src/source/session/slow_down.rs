//! When a guest is slowed, and by how much.

use super::Session;
use crate::source::policy::PassOutcome;
use crate::source::settings::AutoConverge;
use crate::source::throttle;
use vmferry_core::PAGE_SIZE;

impl Session {
    pub(super) fn slowed(&self) -> bool {
        self.shares.iter().any(|share| *share > 0.0)
    }

    /// New shares of time for which vCPUs are to stand still, if they change: the guest dirtied too much during `pass` for
    /// the downtime to fit.
    pub(super) fn slow_down(&mut self, pass: PassOutcome) -> Option<Vec<f64>> {
        let bandwidth = self.policy.bandwidth()?;
        let (seconds, bytes) = (pass.elapsed.as_secs_f64(), (pass.remaining * PAGE_SIZE) as f64);
        let fits = self.predicted_downtime()? <= self.settings.downtime_limit;
        if self.settings.auto_converge == AutoConverge::Off
            || seconds <= 0.0
            || (fits && self.shares.is_empty())
        {
            return None;
        }
        let written: u64 = self.writers.iter().sum();
        let apart = self.settings.auto_converge == AutoConverge::Writers && written > 0;
        // The rings count a page once for each harvest: only their proportions are used.
        let part = |pages: &u64| bytes / seconds * (*pages as f64 / written as f64);
        let dirty: Vec<f64> =
            if apart { self.writers.iter().map(part).collect() } else { vec![bytes / seconds] };
        self.shares.resize(dirty.len(), self.shares.last().copied().unwrap_or(0.0));
        let shares = throttle::shares(&dirty, &self.shares, bandwidth);
        let changed = shares != self.shares;
        self.shares.clone_from(&shares);
        changed.then_some(shares)
    }
}
