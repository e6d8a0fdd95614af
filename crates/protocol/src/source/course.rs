//! Changes of course that a precopy makes by itself (mode `auto`).
//!
//! The decision is a pure function of the plan and the measurements. The session evaluates it after
//! each pass that, according to the policy, another pass would follow.

use super::settings::AutoConverge;
use super::verdict::{PassState, Verdict, listed, readable_time};
use serde::Serialize;
use std::time::Duration;

/// Number of passes without progress after which the course is changed. A single such pass does not
/// suffice, because it may have an accidental cause, such as a busy host.
const PATIENCE: u32 = 2;
/// Factor of the longest expected time. A migration that takes longer has departed from the plan.
const OVERRUN: f64 = 1.5;
/// Largest share of its time that a throttled guest may lose, if it could move by postcopy instead.
const BEARABLE_THROTTLE: f64 = 0.5;

/// Changes of course that a migration may make by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Auto {
    /// True if the migration may go over to postcopy, in which the guest runs on the target before
    /// all of its memory has arrived.
    pub postcopy: bool,
    /// vCPUs that may be throttled.
    pub throttle: AutoConverge,
    /// Expectation of the plan, if the migration was planned.
    pub expected: Option<Expected>,
}

/// Expectation of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// Probability that precopy ends by itself, 0 to 1.
    pub converges: f64,
    /// Longest expected duration of the migration.
    pub longest: Duration,
}

/// Measurements of a migration up to the end of a pass.
#[derive(Debug, Clone)]
pub struct Observations {
    /// Number of passes that were sent so far.
    pub passes: u32,
    /// Time since the migration began.
    pub elapsed: Duration,
    /// Part of `elapsed` in which the source waited until the guest could be stopped, with almost
    /// nothing to send.
    pub waited: Duration,
    /// Number of consecutive passes without progress, up to the last pass.
    pub stuck: u32,
    /// Figures of the last pass, and the limits.
    pub pass_state: PassState,
    /// Prediction from the passes so far.
    pub verdict: Verdict,
    /// True if the operator was already told that no allowed change helps.
    pub advised: bool,
}

/// Decision on the course of a precopy after a pass.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Course {
    /// Continue with precopy.
    Keep,
    /// Go over to postcopy: let the guest run on the target now, and send the rest of its memory
    /// afterwards.
    Postcopy {
        /// Reason for the change.
        why: String,
    },
    /// Throttle the guest from now on.
    Throttle {
        /// vCPUs to throttle.
        how: AutoConverge,
        /// Reason for the change.
        why: String,
    },
    /// Tell the operator which change of the settings would help, because the settings allow no
    /// change that helps.
    Advise {
        /// Reason for the advice, and the changes that would help.
        why: String,
    },
}

/// Change of course, or advice, as an entry of the report.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CourseChange {
    /// Time since the migration began, in milliseconds.
    pub at_ms: f64,
    /// Number of passes that were sent before the change.
    pub passes: u32,
    /// Kind of change: `postcopy`, `throttle` or `advice`.
    pub what: String,
    /// Reason for the change.
    pub why: String,
}

impl Course {
    /// Returns the decision as an entry of the report, or `None` for [`Course::Keep`].
    #[must_use]
    pub fn change(&self, seen: &Observations) -> Option<CourseChange> {
        let (what, why) = match self {
            Self::Keep => return None,
            Self::Postcopy { why } => ("postcopy", why),
            Self::Throttle { why, .. } => ("throttle", why),
            Self::Advise { why } => ("advice", why),
        };
        let at_ms = seen.elapsed.as_secs_f64() * 1e3;
        Some(CourseChange { at_ms, passes: seen.passes, what: what.into(), why: why.clone() })
    }
}

impl Auto {
    /// Decides on the course after a pass.
    #[must_use]
    pub fn decide(&self, seen: &Observations) -> Course {
        let Some(trouble) = self.trouble(seen) else { return Course::Keep };
        let share = seen.pass_state.needed_throttle();
        let slow = !seen.pass_state.throttled && self.throttle != AutoConverge::Off;
        // Throttling helps only if the guest dirties pages too fast. It does not help if stopping
        // the guest takes too long even with nothing to send.
        let slowing_helps = slow && seen.pass_state.fixed <= seen.pass_state.limit;
        if slowing_helps && (!self.postcopy || share <= BEARABLE_THROTTLE) {
            let why = format!(
                "{trouble}: the guest is throttled for about {:.0} % of its time from now on",
                share * 100.0
            );
            return Course::Throttle { how: self.throttle, why };
        }
        if self.postcopy {
            return Course::Postcopy {
                why: format!(
                    "{trouble}: the guest continues on the target, and the rest of its memory follows"
                ),
            };
        }
        if seen.advised {
            return Course::Keep;
        }
        let help = seen.pass_state.help();
        Course::Advise {
            why: format!("{trouble}, and the settings allow no change. Possible remedies: {}", listed(&help)),
        }
    }

    /// Returns a text that states why the course must change, or `None` if it need not: the passes
    /// make no progress, or the migration takes much longer than planned.
    fn trouble(&self, seen: &Observations) -> Option<String> {
        if seen.stuck >= self.patience() {
            let ratio = seen.verdict.ratio.unwrap_or(1.0) * 100.0;
            return Some(format!(
                "precopy does not converge: the last {} passes made no progress, each left {ratio:.0} % of its pages, \
                 {} of downtime where {} are allowed",
                seen.stuck,
                readable_time(seen.pass_state.stop_s(seen.pass_state.left as f64)),
                readable_time(seen.pass_state.limit.as_secs_f64())
            ));
        }
        let longest = self.expected?.longest;
        let late = seen.elapsed.saturating_sub(seen.waited).as_secs_f64() > longest.as_secs_f64() * OVERRUN;
        // A migration that is about to end does not need a change.
        let near = seen.verdict.converging == Some(true)
            && seen.verdict.eta_s.is_some_and(|eta| eta < longest.as_secs_f64());
        (late && !near && seen.passes >= PATIENCE).then(|| {
            format!(
                "the run departs from the plan: {} so far, at most {} were expected, and the end is not near",
                readable_time(seen.elapsed.as_secs_f64()),
                readable_time(longest.as_secs_f64())
            )
        })
    }

    /// Returns the number of consecutive passes without progress after which the course is changed.
    /// If the plan expected no convergence, one such pass suffices.
    fn patience(&self) -> u32 {
        if self.expected.is_some_and(|expected| expected.converges < 0.5) { 1 } else { PATIENCE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seen(before: u64, left: u64, stuck: u32) -> Observations {
        let pass_state = PassState {
            before: Some(before),
            left,
            pass: Duration::from_secs_f64(before as f64 * 4096.0 / 100e6),
            bandwidth: 100e6,
            bandwidth_stopped: 100e6,
            fixed: Duration::from_millis(5),
            limit: Duration::from_millis(300),
            throttled: false,
            may_hand_over: false,
            encodes: false,
        };
        let elapsed = Duration::from_secs(10);
        Observations {
            passes: 3,
            elapsed,
            waited: Duration::ZERO,
            stuck,
            verdict: pass_state.judge(),
            pass_state,
            advised: false,
        }
    }

    const POSTCOPY: Auto = Auto { postcopy: true, throttle: AutoConverge::Off, expected: None };
    const NOTHING: Auto = Auto { postcopy: false, ..POSTCOPY };

    #[test]
    fn precopy_continues_while_passes_make_progress() {
        for auto in [POSTCOPY, NOTHING] {
            assert_eq!(auto.decide(&seen(50_000, 25_000, 0)), Course::Keep);
            assert_eq!(auto.decide(&seen(50_000, 49_999, 1)), Course::Keep, "once may be an accident");
        }
    }

    #[test]
    fn guest_that_dirties_faster_than_the_link_moves_by_postcopy_if_allowed() {
        let Course::Postcopy { why } = POSTCOPY.decide(&seen(50_000, 51_000, 2)) else { panic!("not moved") };
        assert!(why.contains("does not converge") && why.contains("102 %"), "{why}");
    }

    #[test]
    fn plan_without_convergence_changes_course_after_one_pass() {
        let longest = Duration::from_secs(1000);
        let expected = |converges| Some(Expected { converges, longest });
        let decide =
            |converges| Auto { expected: expected(converges), ..POSTCOPY }.decide(&seen(50_000, 50_000, 1));
        assert!(matches!(decide(0.1), Course::Postcopy { .. }));
        assert_eq!(decide(0.9), Course::Keep);
    }

    #[test]
    fn little_throttling_is_preferred_to_postcopy_and_much_is_not() {
        let auto = Auto { throttle: AutoConverge::All, ..POSTCOPY };
        // The guest dirties as fast as the link sends, so half of its time suffices.
        assert!(matches!(
            auto.decide(&seen(50_000, 49_900, 2)),
            Course::Throttle { how: AutoConverge::All, .. }
        ));
        // The guest dirties four times as fast.
        assert!(matches!(auto.decide(&seen(50_000, 200_000, 2)), Course::Postcopy { .. }));
        let alone = Auto { postcopy: false, ..auto.clone() };
        assert!(matches!(alone.decide(&seen(50_000, 200_000, 2)), Course::Throttle { .. }));
        // The guest is throttled already, and that did not help.
        let mut slowed = seen(50_000, 49_900, 2);
        slowed.pass_state.throttled = true;
        assert!(matches!(auto.decide(&slowed), Course::Postcopy { .. }));
    }

    #[test]
    fn advice_is_given_once_if_no_change_is_allowed() {
        let Course::Advise { why } = NOTHING.decide(&seen(50_000, 50_000, 2)) else { panic!("no advice") };
        assert!(why.contains("downtime limit") && why.contains("postcopy"), "{why}");
        let again = Observations { advised: true, ..seen(50_000, 50_000, 3) };
        assert_eq!(NOTHING.decide(&again), Course::Keep);
    }

    #[test]
    fn migration_that_takes_far_longer_than_planned_changes_course() {
        let auto =
            Auto { expected: Some(Expected { converges: 1.0, longest: Duration::from_secs(3) }), ..POSTCOPY };
        // The number of pages shrinks, but only by a tenth.
        let slow = seen(50_000, 45_500, 0);
        assert!(
            matches!(auto.decide(&slow), Course::Postcopy { ref why } if why.contains("departs from the plan"))
        );
        let near = seen(50_000, 10_000, 0);
        assert_eq!(auto.decide(&near), Course::Keep, "the end is in sight");
        let endless = Some(Expected { converges: 0.0, longest: Duration::MAX });
        assert_eq!(Auto { expected: endless, ..POSTCOPY }.decide(&slow), Course::Keep);
    }

    proptest! {
        #[test]
        fn course_is_always_allowed_by_the_settings(
            before in 1u64..1_000_000, left in 0u64..1_000_000, stuck in 0u32..9, postcopy: bool, throttle: bool, late: bool,
        ) {
            let throttle = if throttle { AutoConverge::All } else { AutoConverge::Off };
            let expected = late.then_some(Expected { converges: 0.9, longest: Duration::from_millis(1) });
            let auto = Auto { postcopy, throttle, expected };
            match auto.decide(&seen(before, left, stuck)) {
                Course::Postcopy { .. } => prop_assert!(postcopy),
                Course::Throttle { how, .. } => prop_assert!(how == throttle && how != AutoConverge::Off),
                Course::Advise { .. } => prop_assert!(!postcopy && throttle == AutoConverge::Off),
                Course::Keep => {}
            }
        }
    }
}
