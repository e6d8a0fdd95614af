//! `vmferry-bench plan`: predictions of migrations, compared with the real migrations.
//!
//! Each case is a guest, a link and a mode of migration. In each round its migration is predicted,
//! run, and compared. No other side takes part. The results are the error of the prediction, and
//! whether it was right about convergence.

mod report;
mod spec;

use vmferry_report::json::Document;

use crate::host;
use crate::rounds::{Rounds, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub use report::table;
pub use spec::{CaseSpec, Load, Options, Way};

/// Prediction of a migration, and its real figures.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Run {
    /// Predicted probability of convergence, 0 to 1.
    pub probability: f64,
    /// Predicted total time in ms: low, expected, high. `None` if the migration was predicted not
    /// to end.
    pub total: Option<[f64; 3]>,
    /// Predicted downtime in ms: low, expected, high. `None` if the migration was predicted not to
    /// end.
    pub downtime: Option<[f64; 3]>,
    /// Predicted number of bytes.
    pub bytes: Option<f64>,
    /// Estimated capacity of the link in bytes per second.
    pub link: f64,
    /// Set if the migration converged.
    pub converged: bool,
    /// Real total time in ms.
    pub real_total: f64,
    /// Real downtime in ms.
    pub real_downtime: f64,
    /// Real number of bytes.
    pub real_bytes: f64,
    /// Number of passes.
    pub passes: f64,
    /// Time in ms for which the prediction tracked the guest's writes.
    pub tracked: f64,
    /// Time in ms for which the prediction stopped the guest.
    pub paused: f64,
}

/// Runner of predictions and migrations. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec`, predicts its migration, moves it once, and ends both sides.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the case, which skips it. Every
    /// other error is a failure.
    fn run(&mut self, spec: &CaseSpec) -> Result<Run, OurError>;
}

type CaseRuns = crate::rounds::SideRuns<(), Run>;

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("plan", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    let mut all = Vec::new();
    for spec in options.cases.iter().filter(|case| options.wants(case)) {
        let runs = rounds.run(
            [()],
            |()| spec.name.clone(),
            |(), _| {
                enough_memory(spec.memory)?;
                Ok(ours.run(spec)?)
            },
        );
        for runs in &runs {
            document.cases.push(report::case(spec, runs));
        }
        all.extend(runs.into_iter().map(|runs| (spec.borderline(), runs)));
    }
    let failures = rounds.failures;
    report::finish(&mut document, &all, &failures);
    Outcome { document, failures }
}

#[cfg(test)]
mod tests;
