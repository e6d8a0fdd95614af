//! Conditions that must hold at the end of every run.

use super::source::Outcome;
use super::world::{Ending, World};
use crate::source::AutoConverge;
use crate::target::session::Outcome as TargetOutcome;
use vmferry_core::RunState;

impl World {
    pub(super) fn judge(self, steps: u64) -> Result<Ending, String> {
        let (here, there) = (self.here.running, self.there.running);
        let (source, target) = (&self.here.outcome, &self.there.outcome);
        let wrong = |what: &str| {
            Err(format!(
                "{what}: source {source:?}{}, target {target:?}{}, runs here {here}, there {there}",
                if self.here.crashed { " (crashed)" } else { "" },
                if self.there.crashed { " (crashed)" } else { "" },
            ))
        };
        if there != (*target == Some(TargetOutcome::Completed)) {
            return wrong("the target runs the guest if and only if it says so");
        }
        if there && !self.here.committed {
            return wrong("the target runs what was not handed over");
        }
        if let Some(lazy) = self.there.lazy.as_ref().filter(|_| there)
            && (lazy.left() > 0 || !self.same(lazy.model()))
        {
            return wrong("the target has not all of the guest's memory, or another's");
        }
        if let Some(what) = source.as_ref().and_then(|source| self.source_is_wrong(source)) {
            return wrong(what);
        }
        let gone = self.here.crashed || self.there.crashed;
        if self.there.rest && !gone && (*source != Some(Outcome::Completed) || !there) {
            return wrong("no host died, but the guest's memory did not become complete");
        }
        let renounced = self.here.committed && self.there.lazy.is_some() && !self.there.rest;
        if renounced && !gone && !self.there.was_stopped && matches!(source, Some(Outcome::Unknown(_))) {
            return wrong("the target renounced the guest, and its source was not told");
        }
        if self.fenced() && !gone && matches!(source, Some(Outcome::Unknown(_))) {
            return wrong("no host died, but the arbiter has not decided");
        }
        let by_timeout =
            matches!(source, Some(Outcome::Cancelled(why)) if why.starts_with("not done within"));
        if self.faults.calm && *source != Some(Outcome::Completed) && !by_timeout {
            return wrong("nothing was wrong and yet it failed");
        }
        if let Some(what) = self.course_is_wrong() {
            return wrong(what);
        }
        Ok(Ending {
            committed: self.here.committed,
            lazy: self.there.rest,
            lazy_mode: self.there.lazy.is_some(),
            ruling: self.fence.register.filter(|_| self.fenced() && !self.here.session.fence_done()),
            resent: self.here.session.summary().suspects_resent,
            skipped: self.here.pending.skipped_count(),
            dropped: self.here.skipping.as_ref().map_or(0, |skipping| skipping.figures().dropped_reports),
            put_off: self.here.session.put_off(),
            prepared: self.there.prepared > 0,
            paused: self.here.wanted == RunState::Paused,
            interruptions: self.here.session.interruptions(),
            course: self.here.session.course().iter().map(|change| change.what.clone()).collect(),
            crashed: gone,
            slow: self.faults.rate.is_some(),
            stalls: self.faults.stalls,
            outlasted: self.faults.outlasted,
            source: self.here.outcome,
            target: self.there.outcome,
            steps,
        })
    }

    /// Returns true if the target's memory equals `model`, except for pages whose content does not
    /// matter.
    pub(super) fn same(&self, model: &[u64]) -> bool {
        (0..model.len()).all(|page| !self.memory.counts(page) || self.there.pages[page] == model[page])
    }

    /// Returns an error if the migration made a decision that the settings do not allow.
    fn course_is_wrong(&self) -> Option<&'static str> {
        let auto = self.here.settings.auto.as_ref();
        let may = |what: &str| match what {
            "postcopy" => auto.is_some_and(|auto| auto.postcopy),
            "throttle" => auto.is_some_and(|auto| auto.throttle != AutoConverge::Off),
            _ => auto.is_some(),
        };
        let course = self.here.session.course();
        if course.iter().any(|change| !may(&change.what)) {
            return Some("the migration changed its course in a way that the settings do not allow");
        }
        let advice = course.iter().filter(|change| change.what == "advice").count();
        (advice > 1).then_some("it gave its advice more than once")
    }

    fn source_is_wrong(&self, source: &Outcome) -> Option<&'static str> {
        let (here, there) = (self.here.running, self.there.running);
        let died = self.there.crashed;
        let verified = self.here.session.verification().map(|found| (found.pages, found.mismatched));
        let all = Some((self.memory.pages.len() as u64 - self.here.pending.skipped_count(), 0));
        match source {
            Outcome::Completed if here || !(there || died) => Some("completed, but not moved"),
            Outcome::Completed if self.here.settings.verify && !self.there.rest && verified != all => {
                Some("completed without the verification that was asked for")
            }
            Outcome::Unknown(_) | Outcome::Lost(_) if !self.here.committed => {
                Some("unknown before the commit")
            }
            Outcome::Unknown(_) | Outcome::Lost(_) if here => Some("unknown, and yet it was resumed"),
            Outcome::Lost(_) if !self.there.rest => Some("lost, but it never ran there"),
            Outcome::Cancelled(_) | Outcome::Failed(_) if there => Some("given up, but the target runs it"),
            Outcome::Cancelled(_) | Outcome::Failed(_) if !here && !self.here.resume_failed => {
                Some("given up, but it does not run here")
            }
            _ => None,
        }
    }
}
