//! `vmferry-bench scale`: cost of a migration as the guest or the host grows.
//!
//! Each curve changes one quantity: the memory of the guest, its vCPUs, its working set, or the
//! number of guests of the host. At each point a guest moves to another process of this host. The
//! report has the times of the migration, the parts of its downtime, and the memory that the
//! processes need besides guest memory. Each figure has a slope: its growth along the curve.
//!
//! A point that this host cannot run is skipped with the reason.

mod figures;
mod goals;
mod report;
mod slope;
mod spec;

use vmferry_report::json::Document;

use crate::host;
use crate::rounds::{Rounds, Stop, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub use figures::{End, Neighbours, Run};
pub use spec::{Curve, GuestSpec, Kind, Options, Point};
pub use vmferry_report::benches::scale::{page, table};

/// Runner of guests. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Starts the neighbours of `spec` and then its guest, moves the guest over loopback to another
    /// process, and ends all processes.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the guest, which skips the
    /// point. Every other error is a failure.
    fn run(&mut self, spec: &GuestSpec) -> Result<Run, OurError>;
}

/// Runs of one point.
type SideRuns = crate::rounds::SideRuns<Point, Run>;

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("scale", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for curve in Curve::ALL {
        let sides = rounds.run(
            options.selected(curve),
            |point| format!("{}/{point}", curve.name()),
            |point, _| run_point(&point.guest(), ours),
        );
        report::add_curve(&mut document, curve, &sides);
    }
    let failures = rounds.failures;
    report::finish(&mut document, options.repeats, &failures);
    Outcome { document, failures }
}

fn run_point(spec: &GuestSpec, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    let beside = u64::from(spec.neighbours) * spec.neighbour().needed();
    // The neighbours exist once, and the guest that moves exists at both ends.
    enough_memory(spec.needed() + beside.div_ceil(2))?;
    Ok(ours.run(spec)?)
}

#[cfg(test)]
mod tests;
