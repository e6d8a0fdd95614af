//! Goals of the benches, and their verdicts.
//!
//! A goal is a bound for a figure. Its median over the rounds is above or below the bound. The
//! verdict is `met` or `missed` only if the distance of the median to the bound is larger than the
//! spread of the rounds. Otherwise the verdict is `inconclusive`.
//!
//! | figure | spread |
//! |---|---|
//! | measured in each round, or a ratio that the bench takes in each round | distance between the smallest and the largest round |
//! | difference of the medians of two sides | the larger spread of the two sides |
//! | ratio of the medians of two sides | the larger relative spread of the two sides, times the ratio |
//! | measured in fewer than two rounds | none, so the verdict is `inconclusive` |

use serde_json::{Value, json};
use vmferry_report::json::Case;

/// Figure over the rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    /// Spread of the rounds, in the unit of the median. `None` if it is unknown, as with one round.
    pub(crate) spread: Option<f64>,
}

impl Figure {
    /// Returns the figure of the metric `name` of a case, or `None` if the case does not have it.
    pub(crate) fn of(case: &Case, name: &str) -> Option<Self> {
        let metric = |suffix: &str| case.metrics.get(&format!("{name}{suffix}")).copied();
        let rounds = metric("_rounds").or_else(|| case.params.get("rounds")?.as_f64());
        let spread = metric("_max").zip(metric("_min")).map(|(max, min)| max - min);
        let spread = spread.filter(|_| rounds.is_some_and(|rounds| rounds >= 2.0));
        Some(Self { median: metric("")?, spread })
    }

    /// Returns the figure multiplied by `factor`, to convert it to another unit.
    pub(crate) fn times(self, factor: f64) -> Self {
        let spread = self.spread.map(|spread| (spread * factor).abs());
        Self { median: self.median * factor, spread }
    }

    /// Returns the ratio of this figure to `other`, or `None` if it is not finite.
    pub(crate) fn over(self, other: Self) -> Option<Self> {
        let ratio = self.median / other.median;
        let spread = self.spread.zip(other.spread).map(|(ours, theirs)| {
            // The first term does not divide by the median of `self`, which may be zero.
            (ours / other.median).abs().max((ratio * theirs / other.median).abs())
        });
        ratio.is_finite().then_some(Self { median: ratio, spread })
    }

    /// Returns the difference of this figure and `other`.
    pub(crate) fn minus(self, other: Self) -> Self {
        let spread = self.spread.zip(other.spread).map(|(ours, theirs)| ours.max(theirs));
        Self { median: self.median - other.median, spread }
    }
}

/// Verdict on a goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The median satisfies the goal by more than the spread.
    Met,
    /// The median violates the goal by more than the spread.
    Missed,
    /// The rounds differ by as much as the median differs from the bound, or have no spread.
    Inconclusive,
}

impl Verdict {
    /// Judges a median by its distance to the bound, which is negative if the median violates the
    /// goal, and by the spread of the rounds.
    pub(crate) fn of(margin: f64, spread: Option<f64>) -> Self {
        match spread {
            Some(spread) if margin > spread => Self::Met,
            Some(spread) if -margin > spread => Self::Missed,
            _ => Self::Inconclusive,
        }
    }

    /// Returns the verdict on a goal that consists of two goals.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Met, Self::Met) => Self::Met,
            (Self::Missed, _) | (_, Self::Missed) => Self::Missed,
            _ => Self::Inconclusive,
        }
    }

    /// Returns the verdict as it is written in results.
    pub(crate) fn value(self) -> Value {
        match self {
            Self::Met => true.into(),
            Self::Missed => false.into(),
            Self::Inconclusive => "inconclusive".into(),
        }
    }
}

/// Returns a goal for the summary of a document, or `None` if its figure is not finite.
pub(crate) fn judged(
    name: impl Into<String>,
    want: impl Into<String>,
    got: Figure,
    verdict: Verdict,
) -> Option<Value> {
    let (name, want): (String, String) = (name.into(), want.into());
    let Figure { median, spread } = got;
    let met = verdict.value();
    median
        .is_finite()
        .then(|| json!({ "name": name, "want": want, "got": median, "spread": spread, "met": met }))
}

/// Returns a goal for the summary of a document, or `None` if its figure is not finite. `margin` is
/// the distance of the median to the bound, as for [`Verdict::of`].
pub(crate) fn goal(
    name: impl Into<String>,
    want: impl Into<String>,
    got: Figure,
    margin: f64,
) -> Option<Value> {
    judged(name, want, got, Verdict::of(margin, got.spread))
}

/// Returns a goal that `got` must not exceed, or `None` if `got` is unknown.
pub(crate) fn at_most(name: impl Into<String>, most: f64, got: Option<Figure>) -> Option<Value> {
    let got = got?;
    goal(name, format!("<= {}", rounded(most)), got, most - got.median)
}

/// Returns a goal that `got` must reach, or `None` if `got` is unknown.
pub(crate) fn at_least(name: impl Into<String>, least: f64, got: Option<Figure>) -> Option<Value> {
    let got = got?;
    goal(name, format!(">= {}", rounded(least)), got, got.median - least)
}

/// Returns the goal that `got` must reach `bound` if `least` is true, and must not exceed `bound`
/// otherwise.
pub(crate) fn bounded(
    name: impl Into<String>,
    least: bool,
    bound: f64,
    got: Option<Figure>,
) -> Option<Value> {
    if least { at_least(name, bound, got) } else { at_most(name, bound, got) }
}

/// Returns a bound with at most three digits after the point.
fn rounded(bound: f64) -> f64 {
    (bound * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_report::Spread;

    fn figure(median: f64, spread: f64) -> Figure {
        Figure { median, spread: Some(spread) }
    }

    fn met(goal: Option<Value>) -> Value {
        goal.unwrap()["met"].clone()
    }

    #[test]
    fn goal_is_met_only_beyond_the_spread() {
        assert_eq!(met(at_most("a", 10.0, Some(figure(8.0, 1.0)))), true);
        assert_eq!(met(at_least("a", 10.0, Some(figure(12.0, 1.0)))), true);
    }

    #[test]
    fn goal_is_missed_only_beyond_the_spread() {
        assert_eq!(met(at_most("a", 10.0, Some(figure(12.0, 1.0)))), false);
        assert_eq!(met(at_least("a", 10.0, Some(figure(8.0, 1.0)))), false);
    }

    #[test]
    fn goal_within_the_spread_is_inconclusive() {
        for median in [7.5, 8.0, 10.0, 12.0, 12.5] {
            let got = Some(figure(median, 2.5));
            assert_eq!(met(at_most("a", 10.0, got)), "inconclusive", "{median}");
            assert_eq!(met(at_least("a", 10.0, got)), "inconclusive", "{median}");
        }
        // A median on the bound has no distance that could exceed the spread.
        assert_eq!(met(at_most("a", 10.0, Some(figure(10.0, 0.0)))), "inconclusive");
    }

    #[test]
    fn goal_of_one_round_is_inconclusive() {
        let of = |values: &[f64]| {
            let mut case = Case::new("a").param("rounds", values.len());
            case.spread("total_ms", Spread::of(values.iter().copied()));
            at_most("total", 10.0, Figure::of(&case, "total_ms")).unwrap()
        };
        let one = of(&[1.0]);
        assert_eq!(one["met"], "inconclusive");
        assert_eq!((&one["got"], &one["spread"]), (&json!(1.0), &Value::Null));
        assert_eq!(one["want"], "<= 10");
        assert_eq!((&of(&[1.0, 3.0])["met"], &of(&[1.0, 3.0])["spread"]), (&json!(true), &json!(2.0)));
    }

    #[test]
    fn figure_that_one_of_several_rounds_has_is_inconclusive() {
        let mut case = Case::new("a").param("rounds", 3);
        case.spread("back_90_ms", Spread::of([1.0]));
        assert_eq!(Figure::of(&case, "back_90_ms"), Some(Figure { median: 1.0, spread: None }));
        case.metric("derived", 1.0);
        assert_eq!(Figure::of(&case, "derived"), Some(Figure { median: 1.0, spread: None }));
        assert_eq!(Figure::of(&case, "unknown"), None);
    }

    #[test]
    fn ratio_has_the_larger_relative_spread_of_both_sides() {
        // 10 % against 50 %, and the reverse.
        assert_eq!(figure(20.0, 2.0).over(figure(10.0, 5.0)), Some(figure(2.0, 1.0)));
        assert_eq!(figure(20.0, 10.0).over(figure(10.0, 1.0)), Some(figure(2.0, 1.0)));
        assert_eq!(figure(0.0, 5.0).over(figure(10.0, 1.0)), Some(figure(0.0, 0.5)));
        assert_eq!(figure(1.0, 0.0).over(figure(0.0, 0.0)), None);
        let one_round = Figure { median: 10.0, spread: None };
        assert_eq!(figure(20.0, 0.0).over(one_round), Some(Figure { median: 2.0, spread: None }));
    }

    #[test]
    fn difference_has_the_larger_spread_of_both_sides() {
        assert_eq!(figure(20.0, 2.0).minus(figure(10.0, 5.0)), figure(10.0, 5.0));
        assert_eq!(figure(20.0, 2.0).times(0.5), figure(10.0, 1.0));
    }

    #[test]
    fn goal_of_two_parts_is_met_only_with_both() {
        use Verdict::{Inconclusive, Met, Missed};
        assert_eq!(Met.and(Met), Met);
        assert_eq!([Met.and(Inconclusive), Inconclusive.and(Met)], [Inconclusive; 2]);
        assert_eq!([Met.and(Missed), Missed.and(Inconclusive), Inconclusive.and(Missed)], [Missed; 3]);
    }

    #[test]
    fn goal_without_a_figure_is_absent() {
        assert_eq!(at_most("a", 1.0, None), None);
        assert_eq!(at_least("a", 1.0, Some(figure(f64::NAN, 0.0))), None);
    }
}
