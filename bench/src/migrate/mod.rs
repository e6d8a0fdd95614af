//! `bench migrate`: vmferry, QEMU and the floor move the same guest, in turn.
//!
//! Each case is a guest with a workload. In each round every side runs once: vmferry and QEMU with one
//! channel and with two, and the bare copy of the same bytes over as many streams. What is reported are
//! medians over the rounds, and ratios taken within the rounds.

mod report;
mod spec;

use std::error::Error;

use crate::floor::{self, ReceiverCommand};
use crate::host::{Host, available_memory};
use crate::json::Document;
use crate::qemu::{self, QemuError, QemuSpec};
use crate::result::MigrationResult;
use crate::stats::turns;

pub use report::table;
pub use spec::{CaseSpec, Options, Side};

/// Memory that must stay free beside the guests, in bytes.
const MEMORY_RESERVE: u64 = 512 << 20;

/// Runs vmferry's own side: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec`, lets it settle, migrates it once over loopback with `channels` channels to
    /// another process, and ends both. What [`MigrationResult`] says of its fields holds here too.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the side; everything else is a failure.
    fn run(&mut self, spec: &CaseSpec, channels: u32) -> Result<MigrationResult, OurError>;
}

/// Why [`OurRunner::run`] gave no result.
#[derive(Debug, thiserror::Error)]
pub enum OurError {
    /// It cannot run on this host, and why.
    #[error("{0}")]
    Unavailable(String),
    /// It ran and failed.
    #[error(transparent)]
    Failed(#[from] Box<dyn Error + Send + Sync>),
}

/// Everything that one side did in one case.
#[derive(Debug)]
struct SideRuns {
    side: Side,
    /// A round in which the side failed has None.
    rounds: Vec<Option<MigrationResult>>,
    skipped: Option<String>,
}

/// What a bench came to.
#[derive(Debug)]
pub struct Outcome {
    /// The document of contracts, failures included.
    pub document: Document,
    /// Runs that failed, as opposed to sides that were skipped. A command that gets any exits with 1.
    pub failures: Vec<String>,
}

/// Runs the bench. `receiver` starts the floor's other process; `progress` is told what begins.
pub fn run(
    options: &Options,
    ours: &mut dyn OurRunner,
    receiver: &ReceiverCommand,
    progress: &mut dyn FnMut(&str),
) -> Outcome {
    let mut document = Document::new("migrate", Host::describe());
    let mut failures = Vec::new();
    for spec in &options.cases {
        let wanted = options.sides.iter().filter(|side| options.wants(spec, **side));
        let mut sides: Vec<SideRuns> =
            wanted.map(|&side| SideRuns { side, rounds: Vec::new(), skipped: None }).collect();
        for round in 0..options.repeats {
            for turn in turns(sides.len(), round) {
                let runs = &mut sides[turn];
                if runs.skipped.is_some() {
                    continue;
                }
                progress(&format!("{}/{}, round {} of {}", spec.name, runs.side, round + 1, options.repeats));
                match run_side(spec, runs.side, ours, receiver) {
                    Ok(result) => runs.rounds.push(Some(result)),
                    Err(Stop::Skip(why)) => runs.skipped = Some(why),
                    Err(Stop::Fail(why)) => {
                        runs.rounds.push(None);
                        failures.push(format!("{}/{}, round {}: {why}", spec.name, runs.side, round + 1));
                    }
                }
            }
        }
        report::add_case(&mut document, spec, &sides);
    }
    report::finish(&mut document, options.repeats, &failures);
    Outcome { document, failures }
}

/// Why a side gave no result.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    Skip(String),
    Fail(String),
}

fn run_side(
    spec: &CaseSpec,
    side: Side,
    ours: &mut dyn OurRunner,
    receiver: &ReceiverCommand,
) -> Result<MigrationResult, Stop> {
    enough_memory(spec, side, available_memory())?;
    match side {
        Side::Ours { channels } => ours.run(spec, channels).map_err(|e| match e {
            OurError::Unavailable(why) => Stop::Skip(why),
            OurError::Failed(_) => Stop::Fail(with_sources(&e)),
        }),
        Side::Qemu { multifd } => qemu::migrate(&qemu_spec(spec, multifd)).map_err(|e| match e {
            QemuError::Unavailable(why) => Stop::Skip(why),
            e => Stop::Fail(with_sources(&e)),
        }),
        Side::Floor { streams } => {
            let result =
                floor::run(spec.data, streams, receiver).map_err(|e| Stop::Fail(with_sources(&e)))?;
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

fn qemu_spec(spec: &CaseSpec, multifd: Option<u32>) -> QemuSpec {
    QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload.clone(),
        multifd,
        dirty_ring: None,
        downtime_limit: spec.downtime_limit,
        settle: spec.settle,
        ..QemuSpec::default()
    }
}

/// Both ends hold the guest at the end. A host that would swap or kill measures nothing.
fn enough_memory(spec: &CaseSpec, side: Side, available: Option<u64>) -> Result<(), Stop> {
    let guest = if matches!(side, Side::Floor { .. }) { spec.data } else { spec.memory };
    let needed = guest.saturating_mul(2).saturating_add(MEMORY_RESERVE);
    match available {
        Some(available) if available < needed => Err(Stop::Skip(format!(
            "needs {} MiB of memory, {} MiB are available",
            needed >> 20,
            available >> 20
        ))),
        _ => Ok(()),
    }
}

/// An error with what caused it, in one line.
pub(crate) fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Many messages already end with their cause.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
