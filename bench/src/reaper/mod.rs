//! `vmferry-bench reaper`: what finding dirty pages costs the guest, by tracker, policy and size of the rings.
//!
//! A guest under stress is migrated over a link so slow that it takes several passes, by each side in turn, and its speed
//! is watched before, during and after in windows of 100 ms. The question is guestperf's: for how long, and how deep, does
//! the guest's memory performance drop?

mod figures;
mod goals;
mod report;
mod series;
mod spec;

use std::time::Duration;

use vmferry_report::json::Document;

use crate::host;
use crate::qemu::{self, QemuSpec};
use crate::rounds::{Rounds, Stop, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub(crate) use series::to_f64;
pub use series::{Point, Recorder, Timeline, WINDOW, drop_s, worst_ms_per_gb};
pub use spec::{CaseSpec, ENTRIES, Options, Policy, Purpose, SCALE, Side};
pub use vmferry_report::benches::reaper::{page, table};

/// Runs vmferry's own side: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec` with the rings of `side`, watches it for `before`, migrates it once over loopback with
    /// one channel to another process, watches it for `after`, and ends both.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the side; everything else is a failure.
    fn run(
        &mut self,
        spec: &CaseSpec,
        side: Side,
        before: Duration,
        after: Duration,
    ) -> Result<Run, OurError>;
}

/// One migration, watched.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// What the guest wrote when; 0 is the command to migrate.
    pub timeline: Timeline,
    /// Seconds from the command until the source knew that it was done.
    pub end: f64,
    /// What the migrating program says that it took.
    pub total: Duration,
    /// How long the guest ran nowhere, as the migrating program reports it.
    pub downtime: Duration,
    /// Times that memory was gone over.
    pub passes: u64,
    /// Everything that went over the network, in bytes.
    pub wire_bytes: u64,
    /// Pages that the tracker found written, each once a harvest: as many faults had the guest. None: not known.
    pub dirtied: Option<u64>,
    /// What the rings did. None: there are none, or they are another program's.
    pub ring: Option<RingRun>,
}

/// What the rings did in a migration, all vCPUs together.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RingRun {
    /// How often a vCPU stopped for a full ring.
    pub full_exits: u64,
    /// How long they stood still for that.
    pub full_stall: Duration,
    /// Harvests of a ring.
    pub harvests: u64,
    /// Processor time of the reaper.
    pub reaper_cpu: Duration,
}

/// Everything that one side did in one case.
type SideRuns = crate::rounds::SideRuns<Side, Run>;

/// Runs the bench. `progress` is told what begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("reaper", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for spec in &options.cases {
        let wanted = spec.sides.iter().copied().filter(|side| options.wants(spec, *side));
        let sides = rounds.run(
            wanted,
            |side| format!("{}/{side}", spec.name),
            |side, _| run_side(options, spec, side, ours),
        );
        report::add_case(&mut document, options, spec, &sides);
    }
    let failures = rounds.failures;
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

fn run_side(options: &Options, spec: &CaseSpec, side: Side, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    enough_memory(spec.memory)?;
    let Side::Qemu { ring } = side else {
        return Ok(ours.run(spec, side, options.before, options.after)?);
    };
    let qemu = QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload.clone(),
        multifd: None,
        dirty_ring: ring,
        downtime_limit: spec.downtime_limit,
        max_bandwidth: Some(spec.max_bandwidth),
        switch_after: Some(spec.timeout),
        settle: options.before,
        after: options.after,
        balloon: None,
    };
    let (result, timeline) = qemu::watch(&qemu)?;
    Ok(Run {
        timeline,
        end: result.total.as_secs_f64(),
        total: result.total,
        downtime: result.downtime,
        passes: result.passes.unwrap_or(0),
        wire_bytes: result.wire_bytes.unwrap_or(0),
        dirtied: None,
        ring: None,
    })
}

#[cfg(test)]
mod tests;
