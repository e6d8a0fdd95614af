//! Figures of the migration, as the migration handle shows them.

use super::{Context, Driver, TICK};
use crate::handle::MigrationState;
use crate::run::Host;
use crate::source::session::Phase;
use crate::source::timings::Timings;
use std::time::Duration;

/// Figures so far.
pub(super) struct Account {
    pub(super) timings: Timings,
    /// Phase of the last report to the migration handle, and its time. `None` before the first
    /// report.
    shown: Option<(Phase, Duration)>,
}

impl Account {
    /// Begins the figures of a guest whose vCPUs had been stopped by a throttle for `held_before`.
    pub(super) fn new(context: &Context<'_>, held_before: Vec<Duration>) -> Self {
        Self { timings: Timings::new(context, held_before), shown: None }
    }

    /// Returns true if the migration handle needs a new report. Because each report is made from
    /// scratch, there is at most one per tick, and in addition one for each new phase, before the
    /// handle shows that phase.
    fn is_due(&mut self, now: Duration, phase: Phase) -> bool {
        if self.shown.is_some_and(|(known, last)| known == phase && now.saturating_sub(last) < TICK) {
            return false;
        }
        self.shown = Some((phase, now));
        true
    }
}

impl Driver<'_, '_> {
    /// Stores the progress in the migration handle.
    pub(super) fn show_progress(&mut self) {
        let (phase, handle, elapsed) = (self.session.phase(), self.context.handle, self.now());
        if self.account.is_due(elapsed, phase) {
            let (held, tracker) = (self.guest.held(), self.tracking.tracker());
            handle.account(self.account.timings.account(self.context, &self.session, tracker, &held));
        }
        let session = &self.session;
        handle.update(|progress| {
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
            progress.runs_on_target = session.runs_on_target();
            progress.owner_unknown =
                session.committed() && !session.runs_on_target() && phase != Phase::Ended;
            progress.arbiter = session.arbiter_answer().map(|says| match &self.arbiter {
                Some(arbiter) => format!("{says} ({})", arbiter.register()),
                None => says,
            });
            progress.verdict = session.verdict().cloned();
            progress.busy = session.busy().map(str::to_owned);
            if progress.course.len() != session.course().len() {
                progress.course = session.course().to_vec();
            }
            progress.left_pages = self.demand.left();
        });
    }
}
