//! Judgement of a precopy after each of its passes, and the resulting course.

use super::costs::Costs;
use super::shared::{Shared, Urgency};
use crate::source::policy::PassOutcome;
use crate::source::settings::AutoConverge;
use crate::source::{Course, CourseChange, Remedy, Seen, Standing, Verdict};
use std::time::Duration;

/// Share of pages left, compared with the pass before, above which a pass made no progress.
const PROGRESS: f64 = 0.95;

/// State that is kept from pass to pass.
#[derive(Debug, Clone, Default)]
pub(super) struct Judged {
    pub(super) verdict: Option<Verdict>,
    /// Number of pages that the pass before left.
    before: Option<u64>,
    /// Number of passes in a row that made no progress.
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
    pub(super) fn standing(
        &mut self,
        shared: &Shared,
        pass: PassOutcome,
        costs: &Costs,
        slowed: bool,
    ) -> Option<Standing> {
        let bandwidth = shared.link.rate.bandwidth()?;
        Some(Standing {
            before: self.before.replace(pass.remaining),
            left: pass.remaining,
            pass: pass.elapsed,
            bandwidth,
            bandwidth_stopped: shared.link.rate.bandwidth_stopped().unwrap_or(bandwidth),
            fixed: costs.all(shared),
            limit: shared.settings.downtime_limit,
            throttled: slowed || self.throttles,
            lazy: shared.settings.may_hand_over(),
        })
    }

    /// Judges `standing`. `waits_for_io` is true if only the guest's I/O prevents stopping it, and
    /// `rested` is the time for which the source waited for the guest.
    pub(super) fn seen(
        &mut self,
        shared: &Shared,
        now: Duration,
        pass: PassOutcome,
        standing: Standing,
        (waits_for_io, rested): (bool, Duration),
    ) -> Seen {
        let verdict = if shared.deferral.busy().is_some() { too_busy() } else { standing.judge() };
        let no_progress =
            standing.before.is_some_and(|before| pass.remaining as f64 > before as f64 * PROGRESS);
        let stuck = !waits_for_io && verdict.converging != Some(true) && no_progress;
        self.stuck = if stuck { self.stuck + 1 } else { 0 };
        self.verdict = Some(verdict.clone());
        Seen {
            passes: shared.pass,
            elapsed: now.saturating_sub(shared.started),
            rested,
            stuck: self.stuck,
            standing,
            verdict,
            advised: self.advised,
        }
    }

    /// Changes the course if the settings allow it and `seen` requires it. Returns the vCPUs to
    /// throttle from now on, if any.
    pub(super) fn change_course(&mut self, shared: &mut Shared, seen: &Seen) -> Option<AutoConverge> {
        let course = shared.settings.auto.as_ref()?.decide(seen);
        shared.summary.course.extend(course.change(seen));
        match course {
            Course::Keep => {}
            Course::Postcopy { .. } => {
                if shared.settings.may_hand_over() {
                    shared.urgency.raise(Urgency::Advised);
                }
            }
            Course::Throttle { how, .. } => {
                self.throttles = true;
                // The pages that the last pass left were written at full speed, so the next passes
                // are judged anew.
                self.stuck = 0;
                return Some(how);
            }
            Course::Advise { .. } => self.advised = true,
        }
        None
    }

    /// Records that the guest moves by postcopy because stopping it takes `costs`.
    pub(super) fn note_long_stop(shared: &mut Shared, now: Duration, costs: Duration) {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let why = format!(
            "stopping the guest takes {:.1} ms with nothing to send, but {:.1} ms are allowed: the guest \
             continues on the target, and the rest of its memory follows",
            millis(costs),
            millis(shared.settings.downtime_limit)
        );
        shared.summary.course.push(CourseChange {
            at_ms: millis(now.saturating_sub(shared.started)),
            passes: shared.pass,
            what: "postcopy".into(),
            why,
        });
    }
}

fn too_busy() -> Verdict {
    Verdict { converging: Some(false), help: vec![Remedy::LessIo], ..Verdict::default() }
}
