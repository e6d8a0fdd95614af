//! Throttling of a guest that dirties pages faster than the link sends them.

use super::context::SourceContext;
use crate::source::policy::PassOutcome;
use crate::source::settings::AutoConverge;
use crate::source::throttle;
use std::time::Duration;
use vmferry_core::PAGE_SIZE;

/// State of the throttle of the vCPUs.
#[derive(Debug, Clone)]
pub(super) struct Throttling {
    pub(super) how: AutoConverge,
    /// Number of pages that each vCPU wrote during the last pass. Empty if the tracker does not
    /// distinguish vCPUs.
    pub(super) writers: Vec<u64>,
    /// Share of the time for which each vCPU is stopped. Empty if the guest is not throttled.
    shares: Vec<f64>,
}

impl Throttling {
    pub(super) fn new(how: AutoConverge) -> Self {
        Self { how, writers: Vec::new(), shares: Vec::new() }
    }

    pub(super) fn slows(&self) -> bool {
        self.shares.iter().any(|share| *share > 0.0)
    }

    /// Returns the new shares of the time for which the vCPUs must be stopped, or `None` if they do
    /// not change. Throttling begins only if the `predicted` downtime after `pass` exceeds the
    /// limit.
    pub(super) fn adapt(
        &mut self,
        context: &SourceContext,
        pass: PassOutcome,
        predicted: Option<Duration>,
    ) -> Option<Vec<f64>> {
        let bandwidth = context.link.rate.bandwidth()?;
        let (seconds, bytes) = (pass.elapsed.as_secs_f64(), (pass.remaining * PAGE_SIZE) as f64);
        let fits = predicted? <= context.settings.downtime_limit;
        if self.how == AutoConverge::Off || seconds <= 0.0 || (fits && self.shares.is_empty()) {
            return None;
        }
        let written: u64 = self.writers.iter().sum();
        let apart = self.how == AutoConverge::Writers && written > 0;
        // Only the proportions of these numbers are used, because the rings count a page once for
        // each harvest.
        let part = |pages: &u64| bytes / seconds * (*pages as f64 / written as f64);
        let dirty: Vec<f64> =
            if apart { self.writers.iter().map(part).collect() } else { vec![bytes / seconds] };
        self.shares.resize(dirty.len(), self.shares.last().copied().unwrap_or(0.0));
        let shares = throttle::shares(&dirty, &self.shares, bandwidth);
        let changed = shares != self.shares;
        self.shares.clone_from(&shares);
        changed.then_some(shares)
    }

    /// Ends the throttling. Returns the shares with which the guest runs at full speed, or `None`
    /// if the guest was not throttled.
    pub(super) fn release(&mut self) -> Option<Vec<f64>> {
        let slowed = self.slows();
        self.shares.clear();
        slowed.then(|| vec![0.0])
    }

    /// Hashes the fields that affect decisions. Nothing takes time in a model, so no guest is
    /// throttled there.
    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { how: _, writers, shares } = self;
        assert!(shares.is_empty());
        std::hash::Hash::hash(writers, hasher);
    }
}
