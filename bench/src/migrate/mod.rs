//! `vmferry-bench migrate`: vmferry, QEMU and the floor move the same guest in turn.
//!
//! Each case is a guest with a workload. In each round every side runs once. vmferry and QEMU run
//! with one channel and with two. vmferry also runs encrypted. The floor copies the same bytes over
//! as many streams. The report has medians over the rounds, and ratios taken within the rounds.

mod cold;
mod report;
mod spec;

use vmferry_report::json::Document;

use crate::floor::{self, ReceiverCommand};
use crate::host;
use crate::qemu::{self, QemuSpec, Stream};
use crate::result::MigrationResult;
use crate::rounds::{Rounds, Stop, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub use cold::{ColdOptions, ColdSide, TargetMemory, run as run_cold};
pub use spec::{CaseSpec, Options, Side};
pub use vmferry_report::benches::migrate::table;

/// Runner of vmferry's own side. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec`, lets it run for the warm-up time, migrates it over loopback to
    /// another process, and ends both.
    ///
    /// The migration uses `channels` channels, and TLS if `encrypted` is set. The result must
    /// follow the definitions of [`MigrationResult`].
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the side, which skips it. Every
    /// other error is a failure.
    fn run(&mut self, spec: &CaseSpec, channels: u32, encrypted: bool) -> Result<MigrationResult, OurError>;
}

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<Side, MigrationResult>;

/// Runs the bench. `receiver` starts the floor's other process. Calls `progress` with the name of
/// each run that begins.
pub fn run(
    options: &Options,
    ours: &mut dyn OurRunner,
    receiver: &ReceiverCommand,
    progress: &mut dyn FnMut(&str),
) -> Outcome {
    let mut document = Document::new("migrate", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for spec in &options.cases {
        let wanted = options.sides.iter().copied().filter(|side| options.wants(spec, *side));
        let sides = rounds.run(
            wanted,
            |side| format!("{}/{side}", spec.name),
            |side, _| run_side(spec, side, ours, receiver),
        );
        report::add_case(&mut document, spec, &sides);
    }
    let failures = rounds.failures;
    report::finish(&mut document, options.repeats, &failures);
    Outcome { document, failures }
}

fn run_side(
    spec: &CaseSpec,
    side: Side,
    ours: &mut dyn OurRunner,
    receiver: &ReceiverCommand,
) -> Result<MigrationResult, Stop> {
    // At the end of a migration both processes hold the guest. The floor's processes hold only its
    // data.
    enough_memory(if matches!(side, Side::Floor { .. }) { spec.data } else { spec.memory })?;
    match side {
        Side::Ours { channels, encrypted } => Ok(ours.run(spec, channels, encrypted)?),
        Side::Qemu { multifd } => Ok(qemu::migrate(&qemu_spec(spec, multifd))?),
        Side::Floor { streams } => {
            let result = floor::run(spec.data, streams, receiver)?;
            Ok(MigrationResult {
                total: result.elapsed,
                data_bytes: result.bytes,
                cpu_source: result.cpu_sender,
                cpu_destination: result.cpu_receiver,
                ..MigrationResult::default()
            })
        }
    }
}

/// Returns the machine and the migration of `spec` for QEMU.
pub(crate) fn qemu_spec(spec: &CaseSpec, multifd: Option<u32>) -> QemuSpec {
    QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload.clone(),
        stream: Stream::plain(multifd),
        dirty_ring: None,
        downtime_limit: spec.downtime_limit,
        warm_up: spec.warm_up,
        prealloc: spec.target == TargetMemory::Warm,
        small_pages: spec.small_pages,
        given_back: spec.given_back,
        ..QemuSpec::default()
    }
}

#[cfg(test)]
mod tests;
