//! `vmferry-bench branch`: pause of a guest that is branched, time until a child runs, and memory
//! of many children.
//!
//! The memory of the guest is touched completely. Each round branches a new guest, because a later
//! branch of a guest copies its memory. QEMU cannot branch a guest. The side `file` shows the other
//! way to a copy of a guest: `migrate --keep-running` to a file, and an on-demand restore.
//!
//! The case `cold` starts a guest from a snapshot that is not in the page cache (`run --shared`).
//! It measures the time until the guest has used its working set, with and without a working set
//! that an earlier run has recorded.
//!
//! The density case branches a guest several times within a memory cgroup. Parent and children then
//! write a part of their memory. The figure is the memory that the cgroup uses.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::Value;
use vmferry_report::benches::branch::DENSITY_GOAL_GIB;
use vmferry_report::by_memory::{CHILD_RUNS_GOAL_MS, PAUSE_GOAL_MS};
use vmferry_report::json::Document;

use crate::cases::{self, Figures, metric};
use crate::density::Budget;
use crate::first_touch::{self, Sharing, Touches};
use crate::goal;
use crate::host;
use crate::reaper::to_f64;
use crate::rounds::{Rounds, Stop, room_for};

pub use crate::rounds::{OurError, Outcome};
pub use vmferry_report::benches::branch::{page, table};

const GIB: u64 = 1 << 30;
/// Memory of the guest beside its content, in bytes: its tables and its counters.
const BESIDE: u64 = 192 << 20;
/// Number of children of the density case.
const CHILDREN: u32 = 32;

/// Kind of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Threads of a process.
    Process,
    /// A virtual machine.
    Kvm,
}

impl Kind {
    /// Returns the name of the kind, in the format of the option `--guest`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Kvm => "kvm",
        }
    }
}

/// Way to a copy of a running guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `vmferry branch`.
    Branch,
    /// A copy in a file, and an on-demand restore of the file.
    File,
}

/// Side of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    /// Kind of the guest.
    pub kind: Kind,
    /// Way to the copy.
    pub way: Way,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Branch => "branch",
            Way::File => "file",
        };
        write!(f, "{}-{way}", self.kind.name())
    }
}

/// Side of the case `cold`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdSide {
    /// Kind of the guest.
    pub kind: Kind,
    /// True if a recorded working set is brought in.
    pub prefetch: bool,
}

impl fmt::Display for ColdSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.prefetch { "prefetch" } else { "on-demand" };
        write!(f, "{}-{way}", self.kind.name())
    }
}

/// Guest that is started from a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdSpec {
    /// Side of the comparison.
    pub side: ColdSide,
    /// Bytes of the guest's memory that have content.
    pub touched: u64,
    /// Bytes that the guest writes at random.
    pub working_set: u64,
}

impl ColdSpec {
    /// Returns the memory of the guest in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.touched + BESIDE
    }

    /// Returns the workload argument.
    #[must_use]
    pub fn workload(&self) -> String {
        format!("uniform,ws={},data={},rate=0,fill=random", self.working_set, self.touched)
    }

    /// Returns the number of random writes after which the guest has used nearly all of its working
    /// set (1 - exp(-4), 98 %).
    #[must_use]
    pub fn writes(&self) -> u64 {
        4 * (self.working_set >> 12)
    }
}

/// Times of one start from a snapshot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cold {
    /// Time from the command until the guest ran, in ms.
    pub runs_ms: f64,
    /// Time from the command until the guest had used its working set, in ms.
    pub used_ms: f64,
    /// Number of pages of the recorded working set.
    pub recorded: Option<u64>,
}

/// Guest that is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSpec {
    /// Side of the comparison.
    pub side: Side,
    /// Bytes of the guest's memory that have content.
    pub touched: u64,
    /// Bytes that the guest writes again and again.
    pub working_set: u64,
    /// Number of writes per second.
    pub rate: u32,
    /// Number of children.
    pub children: u32,
}

impl GuestSpec {
    /// Returns the memory of the guest in bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.touched + BESIDE
    }

    /// Returns the workload argument.
    #[must_use]
    pub fn workload(&self) -> String {
        let Self { touched, working_set, rate, .. } = self;
        format!("sequential,ws={working_set},data={touched},rate={rate},fill=random")
    }

    /// Returns the time in which the guest writes all of its working set.
    #[must_use]
    pub fn sweep(&self) -> Duration {
        Duration::from_secs_f64(to_f64(self.working_set >> 12) / f64::from(self.rate))
    }
}

/// Times of one copy in ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Run {
    /// Time for which the original was paused.
    pub pause_ms: f64,
    /// Time from the command until the last child ran.
    pub runs_ms: f64,
    /// Time from the command until it ended.
    pub total_ms: f64,
    /// Writes of the guest during the second after the command, divided by those of the second
    /// before it.
    pub speed_kept: Option<f64>,
}

impl Run {
    fn figures(&self) -> Figures {
        let all = [
            ("pause_ms", Some(self.pause_ms)),
            ("child_runs_ms", Some(self.runs_ms)),
            ("total_ms", Some(self.total_ms)),
            ("guest_speed_kept", self.speed_kept),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

/// Memory of a fleet of children.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fleet {
    /// Bytes that the cgroup uses when all children have written their working set.
    pub used: u64,
    /// Time for which the parent was paused, in ms.
    pub pause_ms: f64,
    /// Time from the command until the last child ran, in ms.
    pub runs_ms: f64,
}

/// Runner of guests. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Starts the guest of `spec`, copies it, and ends all processes.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the guest, which skips the
    /// side.
    fn copy(&mut self, spec: &GuestSpec) -> Result<Run, OurError>;

    /// Starts the guest of `spec` within `budget`, branches it, and waits until all guests have
    /// written their working set.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the guest, which skips the
    /// side.
    fn fleet(&mut self, spec: &GuestSpec, budget: &Budget) -> Result<Fleet, OurError>;

    /// Writes a snapshot of the guest of `spec`, removes it from the page cache, starts a guest
    /// from it, and waits until this guest has used its working set.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the guest, which skips the
    /// side.
    fn cold(&mut self, spec: &ColdSpec) -> Result<Cold, OurError>;
}

/// Options of the bench.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of rounds.
    pub repeats: usize,
    /// Sizes of the guests in bytes.
    pub sizes: Vec<u64>,
    /// Texts of which the name of a case must contain one. Empty for all cases.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the options of a short run.
    #[must_use]
    pub fn quick() -> Self {
        Self { repeats: 1, sizes: vec![GIB / 4, GIB, 4 * GIB], only: Vec::new() }
    }

    /// Returns the options of a full run.
    #[must_use]
    pub fn full() -> Self {
        Self { repeats: 5, sizes: vec![GIB / 4, GIB, 4 * GIB, 16 * GIB], only: Vec::new() }
    }

    fn selected(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only.as_str()))
    }
}

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("branch", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for touched in &options.sizes {
        let group = format!("memory-{}m", touched >> 20);
        let ways = [Way::Branch, Way::File].into_iter();
        let sides = ways.flat_map(|way| [Kind::Process, Kind::Kvm].map(|kind| Side { kind, way }));
        let sides = rounds.run(
            sides.filter(|side| options.selected(&format!("{group}/{side}"))),
            |side| format!("{group}/{side}"),
            |side, _| {
                let spec = memory_spec(side, *touched);
                room_for(spec.memory())?;
                Ok(ours.copy(&spec)?)
            },
        );
        cases::add(&mut document, (&group, &[("touched_bytes", (*touched).into())]), &sides, Run::figures);
    }
    run_cold(options, ours, &mut rounds, &mut document);
    run_first_touch(options, &mut rounds, &mut document);
    let fleets = [Kind::Process, Kind::Kvm].map(|kind| Side { kind, way: Way::Branch }).into_iter();
    let fleets = rounds.run(
        fleets.filter(|side| options.selected(&format!("density/{side}"))),
        |side| format!("density/{side}"),
        |side, _| run_fleet(&fleet_spec(side), ours),
    );
    cases::add(&mut document, ("density", &[("children", CHILDREN.into())]), &fleets, |fleet| {
        let used = to_f64(fleet.used) / to_f64(GIB);
        BTreeMap::from([("used_gib", used), ("pause_ms", fleet.pause_ms), ("child_runs_ms", fleet.runs_ms)])
    });
    let failures = rounds.failures;
    finish(&mut document, options, &failures);
    Outcome { document, failures }
}

fn run_cold(options: &Options, ours: &mut dyn OurRunner, rounds: &mut Rounds<'_>, document: &mut Document) {
    let ways = [false, true].into_iter();
    let sides = ways.flat_map(|prefetch| [Kind::Process, Kind::Kvm].map(|kind| ColdSide { kind, prefetch }));
    let (touched, working_set) = (GIB, GIB / 8);
    let sides = rounds.run(
        sides.filter(|side| options.selected(&format!("cold/{side}"))),
        |side| format!("cold/{side}"),
        |side, _| {
            let spec = ColdSpec { side, touched, working_set };
            // The page cache holds the file beside the original and the copy.
            room_for(2 * spec.memory())?;
            Ok(ours.cold(&spec)?)
        },
    );
    cases::add(document, ("cold", &[("touched_bytes", touched.into())]), &sides, |cold| {
        let pages = cold.recorded.map(|pages| ("recorded_pages", to_f64(pages)));
        [("child_runs_ms", cold.runs_ms), ("set_used_ms", cold.used_ms)].into_iter().chain(pages).collect()
    });
}

fn run_first_touch(options: &Options, rounds: &mut Rounds<'_>, document: &mut Document) {
    let name = |way: Sharing| format!("first-touch/{way}");
    let ways = [Sharing::Private, Sharing::MinorFaults].into_iter();
    let ways = ways.filter(|way| options.selected(&name(*way)));
    let ways = rounds.run(ways, name, |way, _| {
        first_touch::measure(way).map_err(|error| Stop::Skip(format!("{way}: {error}")))
    });
    cases::add(document, ("first-touch", &[]), &ways, |touches: &Touches| {
        BTreeMap::from([("read_us", touches.read_us), ("write_us", touches.write_us)])
    });
}

fn memory_spec(side: Side, touched: u64) -> GuestSpec {
    GuestSpec { side, touched, working_set: 64 << 20, rate: 20_000, children: 1 }
}

/// Guests of 1 GiB that write 5 % of their memory.
fn fleet_spec(side: Side) -> GuestSpec {
    GuestSpec { side, touched: GIB - BESIDE, working_set: GIB / 20, rate: 10_000, children: CHILDREN }
}

fn run_fleet(spec: &GuestSpec, ours: &mut dyn OurRunner) -> Result<Fleet, Stop> {
    let most = 4 * GIB;
    room_for(most)?;
    let budget = Budget::new(most).map_err(|why| Stop::Skip(why.to_string()))?;
    Ok(ours.fleet(spec, &budget)?)
}

/// Returns the growth of the pause in ms for each GiB of memory, by the smallest and the largest
/// guest.
fn slope(document: &Document, options: &Options, kind: Kind) -> Option<f64> {
    let (first, last) = (options.sizes.first()?, options.sizes.last()?);
    let pause = |touched: u64| pause(document, touched, kind);
    let gib = to_f64(last - first) / to_f64(GIB);
    (gib > 0.0).then_some((pause(*last)? - pause(*first)?) / gib)
}

fn pause(document: &Document, touched: u64, kind: Kind) -> Option<f64> {
    metric(document, &format!("memory-{}m", touched >> 20), Side { kind, way: Way::Branch }, "pause_ms")
}

/// Returns the time until the working set was used with prefetch, divided by that without.
fn prefetch_ratio(document: &Document, kind: Kind) -> Option<f64> {
    let used = |prefetch| metric(document, "cold", ColdSide { kind, prefetch }, "set_used_ms");
    Some(used(true)? / used(false)?)
}

fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let mut summary: Vec<(&str, Value)> =
        vec![("rounds", options.repeats.into()), ("failures", failures.into())];
    let kvm = Side { kind: Kind::Kvm, way: Way::Branch };
    let figures = [
        ("pause_ms_16g", pause(document, 16 * GIB, Kind::Kvm)),
        ("pause_slope_ms_per_gib", slope(document, options, Kind::Kvm)),
        ("child_runs_ms", metric(document, "memory-4096m", kvm, "child_runs_ms")),
        ("density_gib_32", metric(document, "density", kvm, "used_gib")),
        ("prefetch_to_on_demand", prefetch_ratio(document, Kind::Kvm)),
    ];
    summary.extend(figures.into_iter().filter_map(|(name, value)| Some((name, value?.into()))));
    let figure = |group: &str, name: &str| cases::figure(document, group, kvm, name);
    let goals = [
        goal::at_most("pause of 16 GiB, ms", PAUSE_GOAL_MS, figure("memory-16384m", "pause_ms")),
        goal::at_most("child of 4 GiB runs, ms", CHILD_RUNS_GOAL_MS, figure("memory-4096m", "child_runs_ms")),
        goal::at_most("32 children of 1 GiB, GiB", DENSITY_GOAL_GIB, figure("density", "used_gib")),
    ];
    summary.push(("goals", goals.into_iter().flatten().collect::<Vec<_>>().into()));
    document.summary.extend(summary.into_iter().map(|(name, value)| (name.to_owned(), value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guests whose pause grows by 1 ms for each GiB, and whose memory is fixed.
    struct Fake;

    impl OurRunner for Fake {
        fn copy(&mut self, spec: &GuestSpec) -> Result<Run, OurError> {
            if spec.side.kind == Kind::Process {
                return Err(OurError::Unavailable("no processes".into()));
            }
            let pause_ms = 1.0 + to_f64(spec.touched) / to_f64(GIB);
            Ok(Run { pause_ms, runs_ms: 10.0, total_ms: 12.0, speed_kept: None })
        }

        fn fleet(&mut self, _: &GuestSpec, budget: &Budget) -> Result<Fleet, OurError> {
            assert!(budget.used().is_ok());
            Ok(Fleet { used: 3 * GIB / 2, pause_ms: 1.0, runs_ms: 9.0 })
        }

        fn cold(&mut self, spec: &ColdSpec) -> Result<Cold, OurError> {
            let prefetch = spec.side.prefetch;
            let used_ms = if prefetch { 50.0 } else { 200.0 };
            Ok(Cold { runs_ms: 8.0, used_ms, recorded: prefetch.then_some(spec.working_set >> 12) })
        }
    }

    #[test]
    fn summary_has_the_slope_and_skipped_sides_have_a_reason() {
        let options = Options { repeats: 2, sizes: vec![GIB / 4, 2 * GIB], only: vec!["memory".into()] };
        let Outcome { document, failures } = run(&options, &mut Fake, &mut |_| ());
        assert!(failures.is_empty(), "{failures:?}");
        let slope = document.summary["pause_slope_ms_per_gib"].as_f64().unwrap();
        assert!((slope - 1.0).abs() < 1e-6, "{slope}");
        assert!(!document.summary.contains_key("pause_ms_16g"), "16 GiB were not measured");
        let skipped = document.cases.iter().filter(|case| case.skipped.is_some()).count();
        assert_eq!(skipped, 4);
        assert!(table(&document).contains("memory-256m/kvm-branch"));
    }

    #[test]
    fn prefetch_is_compared_with_a_start_on_demand() {
        let options = Options { repeats: 1, sizes: vec![GIB], only: vec!["cold".into()] };
        let Outcome { document, failures } = run(&options, &mut Fake, &mut |_| ());
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!(document.summary["prefetch_to_on_demand"].as_f64(), Some(0.25));
        let names: Vec<_> = document.cases.iter().map(|case| case.name.as_str()).collect();
        let want =
            ["cold/process-on-demand", "cold/kvm-on-demand", "cold/process-prefetch", "cold/kvm-prefetch"];
        assert_eq!(names, want);
    }

    #[test]
    fn guests_of_the_density_case_write_five_percent() {
        let spec = fleet_spec(Side { kind: Kind::Kvm, way: Way::Branch });
        assert_eq!(spec.memory(), GIB);
        assert_eq!(spec.working_set, GIB / 20);
        assert!(spec.sweep() < Duration::from_secs(2));
    }
}
