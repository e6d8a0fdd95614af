//! `vmferry-bench plan`: what was predicted of a migration, and what it was.
//!
//! Each case is a guest, a link and a way of moving; in each round it is predicted, moved, and compared. No other side takes part:
//! what counts is how far the prediction was off, and whether it was right to say that it would converge.

mod report;
mod spec;

use vmferry_report::json::Document;

use crate::host;
use crate::rounds::{Rounds, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub use report::table;
pub use spec::{CaseSpec, Load, Options, Way};

/// What was said, and what came.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Run {
    /// How likely it was said to converge, 0 to 1.
    pub probability: f64,
    /// The time that was said, in ms: low, expected, high; None where it was said not to end.
    pub total: Option<[f64; 3]>,
    /// The downtime, likewise.
    pub downtime: Option<[f64; 3]>,
    /// The bytes that were said.
    pub bytes: Option<f64>,
    /// What the link was said to carry, in bytes a second.
    pub link: f64,
    /// It converged.
    pub converged: bool,
    /// It took so long, in ms.
    pub real_total: f64,
    /// The guest stood still for so long, in ms.
    pub real_downtime: f64,
    /// So many bytes went over.
    pub real_bytes: f64,
    /// In so many passes.
    pub passes: f64,
    /// What looking cost the guest: tracked, and stopped, in ms.
    pub tracked: f64,
    /// See there.
    pub paused: f64,
}

/// Predicts and moves: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec`, predicts, moves it once, and ends both sides.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the case; everything else is a failure.
    fn run(&mut self, spec: &CaseSpec) -> Result<Run, OurError>;
}

type CaseRuns = crate::rounds::SideRuns<(), Run>;

/// Runs the bench; `progress` is told what begins.
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
