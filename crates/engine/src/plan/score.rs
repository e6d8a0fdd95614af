//! What was predicted against what came.

use super::predict::ModePlan;
use crate::monitor::MigrationState;
use crate::report::Report;
use serde::Serialize;

/// What came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Real {
    /// It ended with the guest on the target, by itself: not because of a timeout or of somebody's word.
    pub converged: bool,
    /// In ms.
    pub total_ms: f64,
    /// In ms.
    pub downtime_ms: f64,
    /// On the wire.
    pub bytes: f64,
}

impl Real {
    /// Of a migration that has ended.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let completed = report.state == MigrationState::Completed;
        Self {
            converged: completed && report.course.is_empty(),
            total_ms: report.total_ms,
            downtime_ms: report.downtime_ms,
            bytes: report.bytes.wire as f64,
        }
    }
}

/// How far a prediction was off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Score {
    /// In percent of what came; positive: it took less than was predicted. `None` if either did not end.
    pub total_pct: Option<f64>,
    /// Likewise.
    pub downtime_pct: Option<f64>,
    /// In ms.
    pub downtime_ms: Option<f64>,
    /// In percent of what came.
    pub bytes_pct: Option<f64>,
    /// Whether it was right to say that it would converge, or that it would not.
    pub convergence_right: bool,
    /// Whether the total time lay in the interval that was given.
    pub total_within: Option<bool>,
    /// Likewise.
    pub downtime_within: Option<bool>,
}

/// Scores what was `predicted`.
#[must_use]
pub fn score(predicted: &ModePlan, real: &Real) -> Score {
    let right = (predicted.probability >= 0.5) == real.converged;
    let both = real.converged && predicted.total_ms.is_some();
    let off = |expected: f64, real: f64| (real > 0.0).then(|| (expected / real - 1.0) * 100.0);
    let (total, downtime) = (predicted.total_ms.filter(|_| both), predicted.downtime_ms.filter(|_| both));
    let bytes = predicted.bytes.filter(|_| both);
    Score {
        total_pct: total.and_then(|total| off(total.expected, real.total_ms)),
        downtime_pct: downtime.and_then(|down| off(down.expected, real.downtime_ms)),
        downtime_ms: downtime.map(|down| down.expected - real.downtime_ms),
        bytes_pct: bytes.and_then(|bytes| off(bytes.expected, real.bytes)),
        convergence_right: right,
        total_within: total.map(|total| (total.low..=total.high).contains(&real.total_ms)),
        downtime_within: downtime.map(|down| (down.low..=down.high).contains(&real.downtime_ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Chances, Interval, Way};

    #[test]
    fn what_came_is_what_counts() {
        let interval = |low, expected, high| Some(Interval { low, expected, high });
        let predicted = ModePlan {
            mode: Way::Precopy,
            probability: 0.8,
            converges: Chances::Borderline,
            total_ms: interval(900.0, 1100.0, 1200.0),
            downtime_ms: interval(5.0, 12.0, 14.0),
            bytes: interval(1.0, 2.0, 3.0),
            slowdown: None,
            passes: None,
        };
        let real = Real { converged: true, total_ms: 1000.0, downtime_ms: 20.0, bytes: 2.0 };
        let got = score(&predicted, &real);
        assert!(
            (got.total_pct.unwrap() - 10.0).abs() < 1e-9 && (got.downtime_ms.unwrap() + 8.0).abs() < 1e-9
        );
        assert_eq!(
            (got.total_within, got.downtime_within, got.convergence_right),
            (Some(true), Some(false), true)
        );
        let stuck = score(&predicted, &Real { converged: false, ..real });
        assert_eq!((stuck.total_pct, stuck.convergence_right), (None, false));
        let no = ModePlan { probability: 0.0, total_ms: None, ..predicted };
        assert!(score(&no, &Real { converged: false, ..real }).convergence_right);
    }
}
