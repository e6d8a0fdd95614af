//! What whoever watches a migration is shown.

use super::{Driver, TICK};
use crate::monitor::MigrationState;
use crate::run::Host;
use crate::source::session::Phase;
use crate::vm::shielded;
use std::time::Instant;

impl Driver<'_, '_> {
    /// Tells the monitor where it stands.
    pub(super) fn show_progress(&mut self) {
        let phase = self.session.phase();
        self.account(phase);
        let (session, elapsed) = (&self.session, self.now());
        self.ground.monitor.update(|progress| {
            progress.state = match phase {
                Phase::Setup => MigrationState::Setup,
                Phase::Precopy => MigrationState::Precopy,
                Phase::Switchover => MigrationState::Switchover,
                Phase::Unknown => MigrationState::Unknown,
                Phase::Postcopy => MigrationState::Postcopy,
                Phase::PostcopyPaused => MigrationState::PostcopyPaused,
                Phase::Ended => progress.state,
            };
            progress.elapsed = elapsed;
            progress.bandwidth = session.bandwidth();
            progress.predicted_downtime = session.predicted_downtime();
            progress.awaits_recover = session.interrupted().is_some_and(|(waiting, _)| waiting);
            progress.interrupted = session.interrupted().map(|(_, why)| why.to_owned());
            progress.runs_there = session.runs_there();
            progress.fence = session.fence_says().map(|says| match &self.fence {
                Some(fence) => format!("{says} ({})", fence.register()),
                None => says,
            });
            progress.verdict = session.verdict().cloned();
            progress.busy = session.busy().map(str::to_owned);
            if progress.course.len() != session.course().len() {
                progress.course = session.course().to_vec();
            }
            progress.left_pages = self.claims.as_ref().map(|claims| claims.left());
        });
    }

    /// Gives the monitor the account so far. It is made anew each time, so this is done at most once a
    /// tick, and for each new phase before the monitor shows that phase.
    fn account(&mut self, phase: Phase) {
        if self.accounted.is_some_and(|(known, last)| known == phase && last.elapsed() < TICK) {
            return;
        }
        self.accounted = Some((phase, Instant::now()));
        let held = shielded("how long the guest was slowed is not known", || self.vm.throttled());
        let report = self.timings.account(self.ground, &self.session, &*self.tracker, &held);
        self.ground.monitor.account(report);
    }
}
