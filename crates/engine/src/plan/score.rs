//! Comparison of a prediction with the migration that followed.

use super::predict::ModePlan;
use crate::handle::MigrationState;
use crate::report::Report;
use serde::Serialize;

/// Figures of a real migration, for comparison with a prediction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ActualFigures {
    /// True if the migration completed, and did not change its course by itself
    /// ([`Settings::auto`](crate::Settings::auto)).
    pub converged: bool,
    /// Total time of the migration in ms.
    pub total_ms: f64,
    /// Downtime in ms.
    pub downtime_ms: f64,
    /// Bytes on the wire.
    pub bytes: f64,
}

impl ActualFigures {
    /// Returns the figures of a migration that has ended.
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

/// Deviation of a prediction from the real migration. All options are `None` if the migration or
/// the prediction did not converge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Score {
    /// Deviation of the predicted total time, in percent of the real total time. Positive if the
    /// migration took less time than predicted.
    pub total_pct: Option<f64>,
    /// Deviation of the predicted downtime, in percent of the real downtime. Positive if the
    /// downtime was shorter than predicted.
    pub downtime_pct: Option<f64>,
    /// Deviation of the downtime in ms: predicted downtime minus real downtime.
    pub downtime_ms: Option<f64>,
    /// Deviation of the predicted bytes, in percent of the real bytes. Positive if the migration
    /// sent fewer bytes than predicted.
    pub bytes_pct: Option<f64>,
    /// True if the plan predicted correctly whether the migration would converge.
    pub convergence_right: bool,
    /// True if the total time was within the predicted interval.
    pub total_within: Option<bool>,
    /// True if the downtime was within the predicted interval.
    pub downtime_within: Option<bool>,
}

/// Returns the deviation of the prediction `predicted` from `real`.
#[must_use]
pub fn score(predicted: &ModePlan, real: &ActualFigures) -> Score {
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
    use crate::plan::{Interval, Likelihood, Strategy};

    #[test]
    fn score_compares_prediction_with_real_migration() {
        let interval = |low, expected, high| Some(Interval { low, expected, high });
        let predicted = ModePlan {
            mode: Strategy::Precopy,
            probability: 0.8,
            converges: Likelihood::Borderline,
            total_ms: interval(900.0, 1100.0, 1200.0),
            downtime_ms: interval(5.0, 12.0, 14.0),
            bytes: interval(1.0, 2.0, 3.0),
            encoding_cpu_ms: None,
            slowdown: None,
            passes: None,
        };
        let real = ActualFigures { converged: true, total_ms: 1000.0, downtime_ms: 20.0, bytes: 2.0 };
        let got = score(&predicted, &real);
        assert!(
            (got.total_pct.unwrap() - 10.0).abs() < 1e-9 && (got.downtime_ms.unwrap() + 8.0).abs() < 1e-9
        );
        assert_eq!(
            (got.total_within, got.downtime_within, got.convergence_right),
            (Some(true), Some(false), true)
        );
        let stuck = score(&predicted, &ActualFigures { converged: false, ..real });
        assert_eq!((stuck.total_pct, stuck.convergence_right), (None, false));
        let no = ModePlan { probability: 0.0, total_ms: None, ..predicted };
        assert!(score(&no, &ActualFigures { converged: false, ..real }).convergence_right);
    }
}
