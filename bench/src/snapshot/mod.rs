//! `vmferry-bench snapshot`: snapshots of a running guest, by vmferry and by QEMU.
//!
//! Both sides run the same guest, and write it to a file on the same file system. The pause is
//! compared with the size of the memory: the guest has touched three quarters of it. vmferry
//! reports its pause itself, and QEMU's pause is the time between its events STOP and RESUME.
//!
//! The side `vmferry-since` first writes a complete snapshot, and then measures an increment of it.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use vmferry_report::Spread;
use vmferry_report::by_memory::PAUSE_GOAL_MS;
use vmferry_report::json::{Case, Document};

use crate::goal::{self, Figure};
use crate::host;
use crate::qemu::{self, QemuSpec};
use crate::reaper::to_f64;
pub use crate::rounds::{OurError, Outcome};
use crate::rounds::{Rounds, SideRuns, Stop, room_for};
pub use vmferry_report::benches::snapshot::{page, table};

/// Bytes of the working set of the guest.
const WORKING_SET: u64 = 64 << 20;
/// Disk space in bytes that must stay free besides the file.
const DISK_RESERVE: u64 = 2 << 30;
/// One gibibyte.
const GIB: f64 = (1u64 << 30) as f64;

/// Sizes of the guests, and the number of rounds.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Memory of the guest in each case, in bytes.
    pub memories: Vec<u64>,
    /// Number of rounds.
    pub repeats: usize,
    /// Time for which the guest runs before the snapshot.
    pub warm_up: Duration,
    /// Texts of which the name of a side must contain one. Empty: all sides run.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of a complete run.
    #[must_use]
    pub fn full() -> Self {
        let memories = [256 << 20, 1 << 30, 4 << 30, 16 << 30].to_vec();
        Self { memories, repeats: 5, warm_up: Duration::from_secs(1), only: Vec::new() }
    }

    /// Returns the options of a run of a few minutes.
    #[must_use]
    pub fn quick() -> Self {
        Self { memories: [256 << 20, 1 << 30, 4 << 30].to_vec(), repeats: 2, ..Self::full() }
    }
}

/// Guest of one case.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GuestSpec {
    /// Memory in bytes.
    pub memory: u64,
    /// Time for which the guest runs before the snapshot.
    pub warm_up: Duration,
    /// True to measure an increment of a snapshot that was written just before.
    pub since: bool,
}

impl GuestSpec {
    /// Returns the workload, as on the guest's command line.
    #[must_use]
    pub fn workload(&self) -> String {
        let data = self.memory / 4 * 3;
        format!("uniform,ws={WORKING_SET},data={data},rate=50k,fill=random")
    }
}

/// Result of one snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Time for which the guest was paused.
    pub pause: Option<Duration>,
    /// Time from the command until the file was complete.
    pub total: Duration,
    /// Writes per second of the guest before the snapshot.
    pub before: Option<f64>,
    /// Writes per second of the guest during the snapshot.
    pub during: Option<f64>,
    /// Longest stall of the guest.
    pub stall_max: Option<Duration>,
    /// Bytes that were written.
    pub bytes: u64,
    /// Faults that waited for a writer. `None` for QEMU.
    pub waits: Option<u64>,
}

/// Runner of vmferry's side.
pub trait OurRunner {
    /// Runs the guest, and writes a snapshot of it to `file`.
    ///
    /// # Errors
    ///
    /// Fails if the side cannot run on this host, or if the snapshot failed.
    fn run(&mut self, spec: &GuestSpec, file: &Path) -> Result<Run, OurError>;
}

/// Program that writes the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    OursSince,
    Qemu,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "vmferry",
            Self::OursSince => "vmferry-since",
            Self::Qemu => "qemu",
        }
    }
}

/// Runs all cases.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("snapshot", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    let (mut our_pauses, mut qemu_pauses, mut goals) = (Vec::new(), Vec::new(), Vec::new());
    for memory in &options.memories {
        let spec = GuestSpec { memory: *memory, warm_up: options.warm_up, since: false };
        let name = |side: Side| format!("{}M/{}", memory >> 20, side.name());
        let wanted = |side: &Side| {
            options.only.is_empty() || options.only.iter().any(|only| name(*side).contains(only))
        };
        let sides = [Side::Ours, Side::OursSince, Side::Qemu].into_iter().filter(wanted);
        for runs in rounds.run(sides, name, |side, _: &[SideRuns<Side, Run>]| once(side, &spec, ours)) {
            let case = case(name(runs.side), &spec, &runs);
            if let Some(pause) = case.metrics.get("pause_ms") {
                let point = (to_f64(*memory) / GIB, *pause);
                match runs.side {
                    Side::Ours => our_pauses.push(point),
                    Side::OursSince => {}
                    Side::Qemu => qemu_pauses.push(point),
                }
            }
            if runs.side == Side::Ours {
                let name = format!("pause of {} MiB, ms", memory >> 20);
                goals.extend(goal::at_most(name, PAUSE_GOAL_MS, Figure::of(&case, "pause_ms")));
            }
            document.cases.push(case);
        }
    }
    let failures = rounds.failures;
    for (prefix, pauses) in [("", our_pauses), ("qemu_", qemu_pauses)] {
        if let Some((_, pause)) = pauses.iter().find(|(gib, _)| (gib - 16.0).abs() < 0.5) {
            document.summary.insert(format!("{prefix}pause_ms_16g"), json!(pause));
        }
        if let Some(slope) = slope(&pauses) {
            document.summary.insert(format!("{prefix}pause_slope_ms_per_gib"), json!(slope));
        }
    }
    document.summary.insert("goals".into(), json!(goals));
    document.summary.insert("rounds".into(), json!(options.repeats));
    document.summary.insert("failures".into(), json!(failures));
    Outcome { document, failures }
}

/// Runs one side once.
fn once(side: Side, spec: &GuestSpec, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    // One process has the guest. The kernel can reclaim the page cache of the file.
    room_for(spec.memory)?;
    let fail = |error: std::io::Error| Stop::Fail(format!("a folder for the file: {error}"));
    let folder = tempfile::Builder::new().prefix("vmferry-bench-").tempdir().map_err(fail)?;
    enough_disk(folder.path(), if side == Side::OursSince { 2 * spec.memory } else { spec.memory })?;
    let file = folder.path().join("guest");
    match side {
        Side::Ours | Side::OursSince => {
            Ok(ours.run(&GuestSpec { since: side == Side::OursSince, ..spec.clone() }, &file)?)
        }
        Side::Qemu => {
            let spec = QemuSpec {
                memory: spec.memory,
                workload: spec.workload(),
                warm_up: spec.warm_up,
                ..QemuSpec::default()
            };
            Ok(qemu::snapshot(&spec, &file)?)
        }
    }
}

/// Checks that the file system of `folder` has room for a file of `bytes` bytes.
fn enough_disk(folder: &Path, bytes: u64) -> Result<(), Stop> {
    let found = rustix::fs::statvfs(folder).map_err(|error| Stop::Fail(format!("statvfs: {error}")))?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if free < bytes + DISK_RESERVE {
        let (needed, free) = ((bytes + DISK_RESERVE) >> 20, free >> 20);
        return Err(Stop::Skip(format!("needs {needed} MiB of disk, {free} MiB are free")));
    }
    Ok(())
}

fn case(name: String, spec: &GuestSpec, runs: &SideRuns<Side, Run>) -> Case {
    if let Some(why) = &runs.skipped {
        return Case::skipped(name, why);
    }
    let mut case = Case::new(name)
        .param("memory_mib", spec.memory >> 20)
        .param("program", runs.side.name())
        .param("workload", spec.workload())
        .param("rounds", runs.rounds.len());
    let mut add = |name: &str, of: &dyn Fn(&Run) -> Option<f64>| {
        case.spread(name, Spread::of(runs.rounds.iter().flatten().filter_map(of)));
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    add("pause_ms", &|run| run.pause.map(ms));
    add("total_ms", &|run| Some(ms(run.total)));
    add("guest_speed_kept", &|run| Some(run.during? / run.before?));
    add("stall_max_ms", &|run| run.stall_max.map(ms));
    add("written_mib", &|run| Some(to_f64(run.bytes) / GIB * 1024.0));
    add("waits", &|run| run.waits.map(to_f64));
    case
}

/// Returns the slope of the line through `points` with the least squares of the distances, or
/// `None` for fewer than two points.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = to_f64(points.len() as u64);
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let above: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let below: f64 = points.iter().map(|point| (point.0 - x) * (point.0 - x)).sum();
    (points.len() > 1 && below > 0.0).then(|| above / below)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runner whose pause grows with the memory.
    struct Growing;

    impl OurRunner for Growing {
        fn run(&mut self, spec: &GuestSpec, _: &Path) -> Result<Run, OurError> {
            Ok(Run {
                pause: Some(Duration::from_secs_f64(2e-3 + 1e-3 * to_f64(spec.memory) / GIB)),
                total: Duration::from_secs(1),
                before: Some(200.0),
                during: Some(100.0),
                stall_max: None,
                bytes: spec.memory,
                waits: Some(0),
            })
        }
    }

    #[test]
    fn slope_and_largest_pause_are_in_the_summary() {
        let memories = [256 << 20, 1 << 30, 16 << 30].to_vec();
        let options = Options { memories, repeats: 1, only: vec!["vmferry".into()], ..Options::quick() };
        let Outcome { document, failures } = run(&options, &mut Growing, &mut |_| ());
        assert_eq!(document.cases.len(), 6, "a complete snapshot and an increment of each guest");
        assert_eq!(failures, [""; 0]);
        if document.cases.iter().any(|case| case.skipped.is_some()) {
            return vmferry_testkit::skip(vmferry_testkit::Need::Program, document.skipped_text());
        }
        let close = |name: &str, want: f64| {
            let found = document.summary[name].as_f64().unwrap();
            assert!((found - want).abs() < 1e-6, "{name}: {found}");
        };
        close("pause_slope_ms_per_gib", 1.0);
        close("pause_ms_16g", 18.0);
        let goals = document.summary["goals"].as_array().unwrap();
        let got: Vec<_> = goals.iter().map(|goal| goal["got"].as_f64().unwrap()).collect();
        assert!(got.len() == 3 && (got[2] - 18.0).abs() < 1e-6, "{goals:?}");
        assert!((document.cases[0].metrics["guest_speed_kept"] - 0.5).abs() < 1e-9);
        assert!(table(&document).contains("256M/vmferry"));
        assert_eq!(slope(&[(1.0, 2.0)]), None);
    }
}
