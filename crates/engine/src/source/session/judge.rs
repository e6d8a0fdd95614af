//! What is judged of a precopy after each of its passes, and what it does by itself because of that.

use super::{Phase, Session};
use crate::plan::{Course, CourseChange, Seen, Standing, Verdict};
use crate::source::policy::{Decision, PassOutcome};
use std::time::Duration;

/// A pass that leaves more than this share of what it began with made no headway.
const HEADWAY: f64 = 0.95;

/// What is kept from pass to pass.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, Default)]
pub(super) struct Judged {
    verdict: Option<Verdict>,
    before: Option<u64>,
    pub(super) stuck: u32,
    advised: bool,
    /// It was decided to slow the guest where that helps.
    throttles: bool,
    course: Vec<CourseChange>,
}

impl Judged {
    pub(super) fn begin_anew(&mut self) {
        (self.before, self.stuck) = (None, 0);
    }
}

impl Session {
    /// What is to be expected of the passes; none once the guest is being stopped.
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.judged.verdict.as_ref().filter(|_| self.phase() == Phase::Precopy)
    }

    /// What it has done by itself.
    pub(crate) fn course(&self) -> &[CourseChange] {
        &self.judged.course
    }

    /// A pass has ended and left something; `decision` is the policy's.
    pub(super) fn judge(&mut self, now: Duration, pass: PassOutcome, decision: Decision) {
        let Some(bandwidth) = self.policy.bandwidth() else { return };
        let before = self.judged.before.replace(pass.remaining);
        let standing = Standing {
            before,
            left: pass.remaining,
            pass: pass.elapsed,
            bandwidth,
            bandwidth_stopped: self.policy.bandwidth_stopped().unwrap_or(bandwidth),
            fixed: self.fixed_costs(),
            limit: self.settings.downtime_limit,
            throttled: self.slowed() || self.judged.throttles,
            lazy: self.settings.may_be_lazy(),
        };
        let mut verdict = standing.judge();
        if self.busy.is_some() {
            verdict = too_busy();
        }
        let stuck = !self.waits_for_io()
            && verdict.converging != Some(true)
            && before.is_some_and(|before| pass.remaining as f64 > before as f64 * HEADWAY);
        self.judged.stuck = if stuck { self.judged.stuck + 1 } else { 0 };
        self.judged.verdict = Some(verdict.clone());
        if decision == Decision::Switch || self.switch_wanted || self.postcopy_wanted || self.postcopy_advised
        {
            return;
        }
        // Nothing that it could do helps against I/O.
        let Some(auto) = self.settings.auto.as_ref().filter(|_| !self.waits_for_io()) else { return };
        let seen = Seen {
            passes: self.pass,
            elapsed: now.saturating_sub(self.started),
            rested: self.rested,
            stuck: self.judged.stuck,
            standing,
            verdict,
            advised: self.judged.advised,
        };
        let course = auto.decide(&seen);
        self.judged.course.extend(course.change(&seen));
        match course {
            Course::Keep => {}
            Course::Postcopy { .. } => self.postcopy_advised = self.settings.may_be_lazy(),
            Course::Throttle { how, .. } => {
                self.settings.auto_converge = how;
                self.judged.throttles = true;
                // What it left was written at full speed: the passes to come are judged anew.
                self.judged.stuck = 0;
            }
            Course::Advise { .. } => self.judged.advised = true,
        }
    }
}

impl Session {
    /// Nothing is left to be sent, and the guest still cannot be stopped for as short as it has to be: whether postcopy may be chosen for that,
    /// and then is.
    pub(super) fn stopping_takes_too_long(&mut self, now: Duration) -> bool {
        if !self.settings.auto.as_ref().is_some_and(|auto| auto.postcopy) || !self.settings.may_be_lazy() {
            return false;
        }
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let why = format!(
            "stopping the guest takes {:.1} ms with nothing to send, where {:.1} ms are allowed: the guest goes on on the target, and the \
             rest follows",
            millis(self.fixed_costs()),
            millis(self.settings.downtime_limit)
        );
        let at_ms = millis(now.saturating_sub(self.started));
        self.judged.course.push(CourseChange { at_ms, passes: self.pass, what: "postcopy".into(), why });
        self.postcopy_advised = true;
        true
    }
}

fn too_busy() -> Verdict {
    let help = vec!["less I/O in the guest, or a longer --downtime-limit".into()];
    Verdict { converging: Some(false), help, ..Verdict::default() }
}
