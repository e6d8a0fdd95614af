//! `vmferry-bench stalls`: stalls of a guest while precopy moves it, outside the blackout.
//!
//! Each case is a guest whose vCPUs write without a pause or in bursts, so that the threads of a
//! migration compete with them for the processors. In each round every side moves the guest once:
//! vmferry with each setting of its channels, QEMU with a single stream, and QEMU with multifd.
//!
//! A host that is itself a virtual machine may stop a processor for milliseconds, most of all if
//! all of its processors are busy. Therefore the side `floor` measures the same guest without a
//! migration, while other threads keep the remaining processors busy.
//!
//! # How stalls are measured
//!
//! The guest measures its stalls by its own clock. Each vCPU counts them by length, and publishes
//! every 10 ms the longest one of that window. The counts and the windows are in guest memory, so
//! they move with the guest. All sides run the same guest image, and the bench reads the same page
//! of its memory: from vmferry by `x-vmferry-stalls`, from QEMU by `pmemsave`. Lengths are counted
//! in powers of two, so a stall of 1 ms is one of 1024 us and more.
//!
//! The stalls of a migration are those of all vCPUs from the command until the first report from
//! the target that the bench reads after the end.
//!
//! # How the blackout is excluded
//!
//! The guest's clock runs on during the blackout, so each vCPU counts the blackout as a stall. The
//! bench removes this stall as follows:
//!
//! 1. When the source has reported the end, its copy of the guest no longer changes. The bench
//!    reads there how many windows each vCPU had closed before it was stopped.
//! 2. The next window of the same vCPU is closed on the target. It contains the blackout.
//! 3. The longest stall of this window is removed. It is reported as `guest_downtime_ms`.
//!
//! If the source cannot be read in step 1, or the window is no longer known on the target, the
//! figures of stalls are absent for this round.
//!
//! A trial pause or a deferred switchover also stops the vCPUs. The bench counts it as a stall,
//! because it is not a part of the blackout.
//!
//! # What remains uncertain
//!
//! - If a vCPU had a stall that was longer than the blackout in the 10 ms of that window, the other
//!   stall is removed, and the blackout is counted.
//! - A host may stop the guest's clock during the blackout. Then `guest_downtime_ms` is far below
//!   `downtime_ms`. What is removed is the longest stall of the 10 ms around the blackout.
//! - A stall that directly precedes or follows the blackout is a part of it for the guest.
//! - A window shows only its longest stall. A second long stall in the window of the blackout is
//!   counted, but its length is known only as the mean of its power of two. The same holds for a
//!   window that was not read within 160 ms.
//! - Each read takes some processor time, at most 20 times a second, under vmferry as under QEMU.
//!   The stalls before the command are measured with the same reads, and are reported beside.

mod figures;
mod report;
mod spec;

use std::time::{Duration, Instant};

use vmferry_report::json::Document;

use crate::host;
use crate::link::Link;
use crate::migrate::qemu_spec;
use crate::postcopy::Observation;
use crate::qemu;
use crate::rounds::{Rounds, Stop, enough_memory};

pub use crate::migrate::CaseSpec;
pub use crate::postcopy::Run;
pub use crate::rounds::{OurError, Outcome};
pub(crate) use figures::speeds;
pub use spec::{Channels, Options, Side};
pub use vmferry_report::benches::stalls::{page, table};

/// Interval at which a guest is read. Its statistics page has the windows of the last 160 ms.
pub const POLL: Duration = Duration::from_millis(50);

/// Interval at which the guest is read on the target until it reports from there.
const FIRST_POLL: Duration = Duration::from_millis(20);

/// Time for which the guest is observed after its first reports from the target. In this time the
/// source process ends.
const AFTER: Duration = Duration::from_millis(500);

/// Time for which a guest is observed that is not moved.
pub const FLOOR: Duration = Duration::from_secs(4);

/// Longest time until the guest reports from the target.
pub(crate) const REPORT: Duration = Duration::from_secs(10);

/// Runner of vmferry's own side. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec`, lets it run for the warm-up time, migrates it by precopy over
    /// loopback to another process, and ends both.
    ///
    /// The guest is read before and during the migration. The last observation of the source is
    /// from its copy after the end. [`on_target`] returns the observations of the target.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the side, which skips it. Every
    /// other error is a failure.
    fn run(&mut self, spec: &CaseSpec, channels: Channels) -> Result<Run, OurError>;

    /// Boots the guest of `spec`, lets it run for the warm-up time, and observes it for
    /// [`FLOOR`] while all processors of the host are busy. The guest is not moved, so the total
    /// time of the result is zero.
    ///
    /// # Errors
    ///
    /// Fails like [`run`](Self::run).
    fn stay(&mut self, spec: &CaseSpec) -> Result<Run, OurError>;
}

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<Side, Run>;

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("stalls", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for spec in &options.cases {
        let sides = rounds.run(
            options.selected(spec),
            |side| format!("{}/{side}", spec.name),
            |side, _| run_side(spec, side, ours),
        );
        report::add_case(&mut document, spec, &sides);
    }
    let failures = rounds.failures;
    report::finish(&mut document, options.repeats, &failures);
    Outcome { document, failures }
}

fn run_side(spec: &CaseSpec, side: Side, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    enough_memory(spec.memory)?;
    Ok(match side {
        Side::Floor => ours.stay(spec)?,
        Side::Ours(channels) => ours.run(spec, channels)?,
        Side::Qemu { multifd } => qemu::stalls(&qemu_spec(spec, multifd), &Link::Loopback)?,
    })
}

/// Reads the guest on the target by `look`, which returns `None` while the guest cannot be read.
///
/// `stopped` is the last observation of the source. The first observation of the target is the
/// earliest one in which each vCPU has closed the window of the blackout and the window after it.
/// The others are from the next 500 ms.
///
/// Returns `None` if the guest does not report within 10 s.
///
/// # Errors
///
/// Returns the first error of `look`.
pub fn on_target<E>(
    stopped: Option<&Observation>,
    mut look: impl FnMut() -> Result<Option<Observation>, E>,
) -> Result<Option<Vec<Observation>>, E> {
    let before = stopped.map_or(&[][..], |observed| &observed.vcpus[..]);
    let has_arrived = |observed: &Observation| {
        observed.vcpus.len() >= before.len()
            && before.iter().zip(&observed.vcpus).all(|(before, now)| now.reports >= before.reports + 2)
    };
    let (begin, mut seen) = (Instant::now(), Vec::new());
    let mut arrived = None;
    while arrived.is_some() || begin.elapsed() < REPORT {
        std::thread::sleep(if arrived.is_some() { POLL } else { FIRST_POLL });
        let observed = look()?;
        seen.extend(observed.filter(|observed| arrived.is_some() || has_arrived(observed)));
        if !seen.is_empty() && arrived.get_or_insert_with(Instant::now).elapsed() >= AFTER {
            return Ok(Some(seen));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
