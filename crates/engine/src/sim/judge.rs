//! Conditions that must hold at the end of every run.

use super::source::Outcome;
use super::world::{Ending, World};
use crate::source::AutoConverge;
use crate::target::session::Outcome as TargetOutcome;
use vmferry_core::RunState;

impl World {
    pub(super) fn judge(self, steps: u64) -> Result<Ending, String> {
        let (at_source, at_target) = (self.source.running, self.target.running);
        let (source, target) = (&self.source.outcome, &self.target.outcome);
        let wrong = |what: &str| {
            Err(format!(
                "{what}: source {source:?}{}, target {target:?}{}, runs here {at_source}, there {at_target}",
                if self.source.crashed { " (crashed)" } else { "" },
                if self.target.crashed { " (crashed)" } else { "" },
            ))
        };
        if at_target != (*target == Some(TargetOutcome::Completed)) {
            return wrong("the target runs the guest if and only if it says so");
        }
        if at_target && !self.source.committed {
            return wrong("the target runs what was not handed over");
        }
        if let Some(paging) = self.target.paging.as_ref().filter(|_| at_target)
            && (paging.left() > 0 || !self.same(paging.model()))
        {
            return wrong("the target has not all of the guest's memory, or another's");
        }
        if let Some(what) = source.as_ref().and_then(|source| self.source_is_wrong(source)) {
            return wrong(what);
        }
        let gone = self.source.crashed || self.target.crashed;
        if self.target.in_postcopy && !gone && (*source != Some(Outcome::Completed) || !at_target) {
            return wrong("no host died, but the guest's memory did not become complete");
        }
        let renounced = self.source.committed && self.target.paging.is_some() && !self.target.in_postcopy;
        if renounced && !gone && !self.target.was_stopped && matches!(source, Some(Outcome::Unknown(_))) {
            return wrong("the target renounced the guest, and its source was not told");
        }
        if self.has_arbiter() && !gone && matches!(source, Some(Outcome::Unknown(_))) {
            return wrong("no host died, but the arbiter has not decided");
        }
        let by_timeout =
            matches!(source, Some(Outcome::Cancelled(why)) if why.starts_with("not done within"));
        if self.faults.fault_free && *source != Some(Outcome::Completed) && !by_timeout {
            return wrong("nothing was wrong and yet it failed");
        }
        if let Some(what) = self.course_is_wrong() {
            return wrong(what);
        }
        Ok(Ending {
            committed: self.source.committed,
            postcopy: self.target.in_postcopy,
            postcopy_mode: self.target.paging.is_some(),
            owner: self
                .arbiter
                .register
                .filter(|_| self.has_arbiter() && !self.source.session.register_unneeded()),
            deltas: self.target.deltas,
            resent: self.source.session.summary().digest_mismatches_resent,
            skipped: self.source.pending.skipped_count(),
            answered: self.source.answered,
            dropped: self.source.skipping.as_ref().map_or(0, |skipping| skipping.figures().dropped_reports),
            deferrals: self.source.session.deferrals(),
            local: self.is_local(),
            prepared: self.target.prepared > 0,
            paused: self.source.wanted == RunState::Paused,
            interruptions: self.source.session.interruptions(),
            course: self.source.session.course().iter().map(|change| change.what.clone()).collect(),
            crashed: gone,
            slow: self.faults.rate.is_some(),
            stalls: self.faults.stalls,
            outlasted: self.faults.outlasted,
            source: self.source.outcome,
            target: self.target.outcome,
            steps,
        })
    }

    /// Returns true if the target's memory equals `model`, except for pages whose content does not
    /// matter.
    pub(super) fn same(&self, model: &[u64]) -> bool {
        (0..model.len()).all(|page| !self.memory.counts(page) || self.target.pages[page] == model[page])
    }

    /// Returns an error if the migration made a decision that the settings do not allow.
    fn course_is_wrong(&self) -> Option<&'static str> {
        let auto = self.source.settings.auto.as_ref();
        let may = |what: &str| match what {
            "postcopy" => auto.is_some_and(|auto| auto.postcopy),
            "throttle" => auto.is_some_and(|auto| auto.throttle != AutoConverge::Off),
            _ => auto.is_some(),
        };
        let course = self.source.session.course();
        if course.iter().any(|change| !may(&change.what)) {
            return Some("the migration changed its course in a way that the settings do not allow");
        }
        let advice = course.iter().filter(|change| change.what == "advice").count();
        (advice > 1).then_some("it gave its advice more than once")
    }

    fn source_is_wrong(&self, source: &Outcome) -> Option<&'static str> {
        let (at_source, at_target) = (self.source.running, self.target.running);
        let died = self.target.crashed;
        let verified = self.source.session.verification().map(|found| (found.pages, found.mismatched));
        let all = Some((self.memory.pages.len() as u64 - self.source.pending.skipped_count(), 0));
        match source {
            Outcome::Completed if at_source || !(at_target || died) => Some("completed, but not moved"),
            Outcome::Completed
                if self.source.settings.verify && !self.target.in_postcopy && verified != all =>
            {
                Some("completed without the verification that was asked for")
            }
            Outcome::Unknown(_) | Outcome::Lost(_) if !self.source.committed => {
                Some("unknown before the commit")
            }
            Outcome::Unknown(_) | Outcome::Lost(_) if at_source => Some("unknown, and yet it was resumed"),
            Outcome::Lost(_) if !self.target.in_postcopy => Some("lost, but it never ran there"),
            Outcome::Cancelled(_) | Outcome::Failed(_) if at_target => {
                Some("given up, but the target runs it")
            }
            Outcome::Cancelled(_) | Outcome::Failed(_) if !at_source && !self.source.resume_failed => {
                Some("given up, but it does not run here")
            }
            _ => None,
        }
    }
}
