//! `vmferry-bench reaper`: cost of dirty tracking to the guest, by tracker, policy and ring size.
//!
//! A guest under stress is migrated by each side in turn, over a link so slow that the migration
//! takes several passes. The guest's speed is recorded before, during and after the migration in
//! windows of 100 ms. As in guestperf, the result is how long and how far the guest's memory
//! performance drops.

mod figures;
mod goals;
mod question;
mod report;
mod series;
mod spec;
pub mod traces;

use std::time::Duration;

use vmferry_report::json::Document;

use crate::host;
use crate::qemu::{self, QemuSpec};
use crate::rounds::{Rounds, Stop, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub(crate) use series::to_f64;
pub use series::{Point, Recorder, Timeline, WINDOW, drop_s, worst_ms_per_gb};
pub use spec::{CaseSpec, ENTRIES, Mode, Options, Policy, Purpose, SCALE, Side, Throttle};
pub use vmferry_report::benches::reaper::{page, table};

/// Runner of vmferry's own side. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec` with the rings of `side`, and migrates it once over loopback with
    /// one channel to another process.
    ///
    /// The guest is observed for `before` before the migration and for `after` after it. Then both
    /// processes end.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the side, which skips it. Every
    /// other error is a failure.
    fn run(
        &mut self,
        spec: &CaseSpec,
        side: Side,
        before: Duration,
        after: Duration,
    ) -> Result<Run, OurError>;
}

/// One observed migration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// Writes of the guest over time. Time 0 is the command to migrate.
    pub timeline: Timeline,
    /// Seconds from the command until the source knew the end of the migration.
    pub end: f64,
    /// Seconds from the command until the guest ran on the target. In a hybrid, this is before
    /// `end`.
    pub resumed: f64,
    /// Total time as the migrating program reports it.
    pub total: Duration,
    /// Downtime as the migrating program reports it.
    pub downtime: Duration,
    /// Number of passes over the memory.
    pub passes: u64,
    /// Bytes that were sent over the network.
    pub wire_bytes: u64,
    /// Pages that the tracker found dirty, each counted once per harvest. The guest had as many
    /// faults. `None` if unknown.
    pub dirtied: Option<u64>,
    /// Ring statistics. `None` without rings, or if another program has them.
    pub ring: Option<RingRun>,
    /// Throttle of the vCPUs. `None` if vmferry did not throttle, or if another program did.
    pub throttle: Option<ThrottleRun>,
}

/// Throttle of a migration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ThrottleRun {
    /// Time for which the throttle stopped each vCPU.
    pub held: Vec<Duration>,
    /// Highest share of its time for which a vCPU was stopped, from 0 to 1.
    pub highest_share: f64,
}

/// Ring statistics of a migration, over all vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RingRun {
    /// Number of exits of vCPUs because of a full ring.
    pub full_exits: u64,
    /// Time for which vCPUs were stopped by a full ring.
    pub full_stall: Duration,
    /// Number of harvests of a ring.
    pub harvests: u64,
    /// Processor time of the reaper thread.
    pub reaper_cpu: Duration,
}

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<Side, Run>;

/// Runs the bench. Calls `progress` with the name of each run that begins.
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
    let Side::Qemu { ring, stepped } = side else {
        return Ok(ours.run(spec, side, options.before, options.after)?);
    };
    let qemu = QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload.clone(),
        stream: qemu::Stream::Single,
        dirty_ring: ring,
        downtime_limit: spec.downtime_limit,
        max_bandwidth: spec.max_bandwidth,
        auto_converge: stepped,
        switch_after: Some(spec.timeout),
        warm_up: options.before,
        after: options.after,
        ..QemuSpec::default()
    };
    let (result, timeline) = qemu::watch(&qemu)?;
    Ok(Run {
        timeline,
        end: result.total.as_secs_f64(),
        resumed: result.total.as_secs_f64(),
        total: result.total,
        downtime: result.downtime,
        passes: result.passes.unwrap_or(0),
        wire_bytes: result.wire_bytes.unwrap_or(0),
        ..Run::default()
    })
}

#[cfg(test)]
mod tests;
