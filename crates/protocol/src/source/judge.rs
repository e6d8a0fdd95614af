//! Prediction after each pass of a precopy, and the resulting change of course.

use super::context::{SourceContext, Urgency};
use super::costs::Costs;
use crate::source::policy::PassOutcome;
use crate::source::settings::AutoConverge;
use crate::source::{Course, CourseChange, Observations, PassState, Remedy, Verdict};
use std::time::Duration;

/// Ratio of the pages that a pass left to the pages that the pass before left. A pass with a higher
/// ratio made no progress.
const PROGRESS: f64 = 0.95;

/// State that is kept from pass to pass.
#[derive(Debug, Clone, Default)]
pub(super) struct Judged {
    pub(super) verdict: Option<Verdict>,
    /// Number of pages that the previous pass left.
    before: Option<u64>,
    /// Number of consecutive passes without progress.
    pub(super) stuck: u32,
    /// True if the operator was told that no allowed change helps.
    advised: bool,
    /// True if throttling was chosen as the course.
    throttles: bool,
}

impl Judged {
    pub(super) fn begin_anew(&mut self) {
        (self.before, self.stuck) = (None, 0);
    }

    /// Returns the state of the migration after `pass`. `None` before the link's bandwidth is
    /// known.
    pub(super) fn pass_state(
        &mut self,
        context: &SourceContext,
        pass: PassOutcome,
        costs: &Costs,
        slowed: bool,
    ) -> Option<PassState> {
        let bandwidth = context.link.rate.bandwidth()?;
        Some(PassState {
            before: self.before.replace(pass.remaining),
            left: pass.remaining,
            pass: pass.elapsed,
            bandwidth,
            bandwidth_stopped: context.link.rate.bandwidth_stopped().unwrap_or(bandwidth),
            fixed: costs.all(context),
            limit: context.settings.downtime_limit,
            throttled: slowed || self.throttles,
            may_hand_over: context.settings.may_hand_over(),
            encodes: context.settings.encodes,
        })
    }

    /// Makes the prediction from `pass_state`, and returns the measurements so far. `waits_for_io`
    /// is true if only the guest's I/O prevents stopping the guest, and `waited` is the total time
    /// for which the source has waited until the guest could be stopped.
    pub(super) fn seen(
        &mut self,
        context: &SourceContext,
        now: Duration,
        pass: PassOutcome,
        pass_state: PassState,
        (waits_for_io, waited): (bool, Duration),
    ) -> Observations {
        let verdict = if context.deferral.busy().is_some() { too_busy() } else { pass_state.judge() };
        let no_progress =
            pass_state.before.is_some_and(|before| pass.remaining as f64 > before as f64 * PROGRESS);
        let stuck = !waits_for_io && verdict.converging != Some(true) && no_progress;
        self.stuck = if stuck { self.stuck + 1 } else { 0 };
        self.verdict = Some(verdict.clone());
        Observations {
            passes: context.pass,
            elapsed: now.saturating_sub(context.started),
            waited,
            stuck: self.stuck,
            pass_state,
            verdict,
            advised: self.advised,
        }
    }

    /// Changes the course if the settings allow it and `seen` requires it. Returns the vCPUs to
    /// throttle from now on, if any.
    pub(super) fn change_course(
        &mut self,
        context: &mut SourceContext,
        seen: &Observations,
    ) -> Option<AutoConverge> {
        let course = context.settings.auto.as_ref()?.decide(seen);
        context.summary.course.extend(course.change(seen));
        match course {
            Course::Keep => {}
            Course::Postcopy { .. } => {
                if context.settings.may_hand_over() {
                    context.urgency.raise(Urgency::Advised);
                }
            }
            Course::Throttle { how, .. } => {
                self.throttles = true;
                // The guest wrote the pages that the last pass left at full speed, so the next
                // passes must not be compared with that pass.
                self.stuck = 0;
                return Some(how);
            }
            Course::Advise { .. } => self.advised = true,
        }
        None
    }

    /// Records the change of course to postcopy of a guest that takes too long to stop: `costs`,
    /// with nothing to send.
    pub(super) fn note_long_stop(context: &mut SourceContext, now: Duration, costs: Duration) {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let why = format!(
            "stopping the guest takes {:.1} ms with nothing to send, but {:.1} ms are allowed: the guest \
             continues on the target, and the rest of its memory follows",
            millis(costs),
            millis(context.settings.downtime_limit)
        );
        context.summary.course.push(CourseChange {
            at_ms: millis(now.saturating_sub(context.started)),
            passes: context.pass,
            what: "postcopy".into(),
            why,
        });
    }
}

fn too_busy() -> Verdict {
    Verdict { converging: Some(false), help: vec![Remedy::LessIo], ..Verdict::default() }
}
