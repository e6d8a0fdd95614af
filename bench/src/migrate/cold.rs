//! `vmferry-bench migrate --cold`: moves to a target whose memory was never touched.
//!
//! Each side runs with memory that the target allocates when pages arrive, and with memory that the
//! target has allocated before. The ratio of their times within a round shows what page faults
//! cost.
//!
//! | case | memory of the target |
//! |---|---|
//! | `fresh` | on huge pages, and free memory of the host was touched before |
//! | `fresh-4k` | the same on pages of 4 KiB |
//! | `cold` | as `fresh`, but free memory of the host was not touched. A host that is a virtual machine may have returned it to the machine below, which then allocates each page again |

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Map, Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::report::{FIGURES, by_round, figure, insert};
use super::{CaseSpec, OurRunner, Outcome, qemu_spec};
use crate::goal::{self, Figure};
use crate::host;
use crate::qemu;
use crate::result::MigrationResult;
use crate::rounds::{Rounds, Stop, enough_memory};

/// Goal for the time of a move into cold memory, as a multiple of the time into warm memory.
const COLD_TO_WARM: f64 = 1.3;

/// Goal for the time of a move whose source announces pages, as a multiple of the time without
/// announcements.
const AUTO_TO_COLD: f64 = 1.03;

/// Goal for the target's guest memory that did not arrive, as a share of the memory that arrived.
const WASTED: f64 = 0.05;

/// Time at which the target allocates its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TargetMemory {
    /// Default of the program.
    #[default]
    Default,
    /// Allocation of announced pages before they arrive.
    Auto,
    /// Allocation of a page by its first write.
    Cold,
    /// Allocation of all memory before the migration.
    Warm,
}

impl TargetMemory {
    /// Returns the value of the option `--prealloc`, or `None` for the default.
    pub fn prealloc(self) -> Option<&'static str> {
        match self {
            TargetMemory::Default => None,
            TargetMemory::Auto => Some("auto"),
            TargetMemory::Cold => Some("off"),
            TargetMemory::Warm => Some("on"),
        }
    }
}

/// Program that moves the guest, its connections, and the memory of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColdSide {
    /// vmferry's migration.
    Ours {
        /// Number of parallel channels.
        channels: u32,
        /// Memory of the target.
        memory: TargetMemory,
    },
    /// QEMU's migration.
    Qemu {
        /// Number of multifd channels. `None` means a single stream.
        multifd: Option<u32>,
        /// Memory of the target. QEMU's default is cold.
        memory: TargetMemory,
    },
}

impl ColdSide {
    /// Returns the side that differs only in the memory, which is `memory`.
    fn with(self, memory: TargetMemory) -> Self {
        match self {
            ColdSide::Ours { channels, .. } => ColdSide::Ours { channels, memory },
            ColdSide::Qemu { multifd, .. } => ColdSide::Qemu { multifd, memory },
        }
    }
}

impl fmt::Display for ColdSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = match self {
            ColdSide::Ours { channels, memory } => {
                write!(f, "ours-{channels}")?;
                memory
            }
            ColdSide::Qemu { multifd: None, memory } => {
                f.write_str("qemu-single")?;
                memory
            }
            ColdSide::Qemu { multifd: Some(channels), memory } => {
                write!(f, "qemu-multifd-{channels}")?;
                memory
            }
        };
        f.write_str(match memory {
            TargetMemory::Default => "",
            TargetMemory::Auto => "-auto",
            TargetMemory::Cold => "-cold",
            TargetMemory::Warm => "-warm",
        })
    }
}

/// Selection of a bench of cold targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColdOptions {
    /// Guests that are run.
    pub cases: Vec<CaseSpec>,
    /// Numbers of parallel channels.
    pub channels: Vec<u32>,
    /// Number of rounds.
    pub repeats: usize,
    /// Texts that select sides by name, as in `cold/ours-2`. Empty selects all.
    pub only: Vec<String>,
}

impl ColdOptions {
    /// Returns the options of `--quick`: three rounds with two channels.
    pub fn quick() -> Self {
        ColdOptions { channels: vec![2], repeats: 3, ..Self::full() }
    }

    /// Returns the full options: seven rounds of idle guests.
    ///
    /// The guests of `fresh` and `fresh-4k` have 512 MiB of random data in 768 MiB of memory. The
    /// memory that is touched and freed before each of their migrations has the same size. A host
    /// that is a virtual machine may return larger amounts of free memory before the migration uses
    /// them. The guest of `cold` has 1126 MiB of random data in 2 GiB.
    pub fn full() -> Self {
        let fresh = CaseSpec {
            name: "fresh".into(),
            memory: 768 << 20,
            vcpus: 1,
            workload: "idle,data=512M,fill=random".into(),
            data: 512 << 20,
            downtime_limit: Duration::from_millis(300),
            warm_up: Duration::from_millis(500),
            ..CaseSpec::default()
        };
        let small = CaseSpec { name: "fresh-4k".into(), small_pages: true, ..fresh.clone() };
        // A host that reports free pages to the machine below it does so within seconds.
        let cold = CaseSpec {
            name: "cold".into(),
            memory: 2 << 30,
            workload: "idle,data=1126M,fill=random".into(),
            data: 1126 << 20,
            given_back: true,
            warm_up: Duration::from_secs(5),
            ..fresh.clone()
        };
        ColdOptions { cases: vec![fresh, small, cold], channels: vec![1, 2], repeats: 7, only: Vec::new() }
    }

    fn wants(&self, case: &CaseSpec, side: ColdSide) -> bool {
        let name = format!("{}/{side}", case.name);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Returns the sides of a case.
fn sides(channels: &[u32]) -> impl Iterator<Item = ColdSide> {
    use TargetMemory::{Auto, Cold, Warm};
    let ours = |channels| [Warm, Cold, Auto].map(|memory| ColdSide::Ours { channels, memory });
    let theirs = |channels| [Warm, Cold].map(|memory| ColdSide::Qemu { multifd: multifd(channels), memory });
    channels.iter().flat_map(move |channels| ours(*channels).into_iter().chain(theirs(*channels)))
}

/// Returns the number of multifd channels of QEMU that correspond to `channels` channels of
/// vmferry.
fn multifd(channels: u32) -> Option<u32> {
    (channels > 1).then_some(channels)
}

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<ColdSide, MigrationResult>;

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &ColdOptions, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("migrate", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    let mut targets = Vec::new();
    for spec in &options.cases {
        let runs = rounds.run(
            sides(&options.channels).filter(|side| options.wants(spec, *side)),
            |side| format!("{}/{side}", spec.name),
            |side, _| run_side(spec, side, ours),
        );
        targets.extend(add_case(&mut document, spec, &runs));
    }
    let failures = rounds.failures;
    document.summary.insert("rounds".into(), options.repeats.into());
    document.summary.insert("targets".into(), targets.into());
    document.summary.insert("failures".into(), failures.clone().into());
    Outcome { document, failures }
}

fn run_side(spec: &CaseSpec, side: ColdSide, ours: &mut dyn OurRunner) -> Result<MigrationResult, Stop> {
    // Source, target, and the memory that is touched before the migration.
    enough_memory(spec.memory)?;
    match side {
        ColdSide::Ours { channels, memory } => {
            Ok(ours.run(&CaseSpec { target: memory, ..spec.clone() }, channels, false)?)
        }
        ColdSide::Qemu { multifd, memory } => {
            Ok(qemu::migrate(&qemu_spec(&CaseSpec { target: memory, ..spec.clone() }, multifd))?)
        }
    }
}

/// Adds the sides of a case to the document, and its ratios to the summary. Returns the goals.
fn add_case(document: &mut Document, spec: &CaseSpec, sides: &[SideRuns]) -> Vec<Value> {
    let (mut targets, mut summary) = (Vec::new(), Map::new());
    for runs in sides {
        let mut case = case_of(spec, runs);
        let mut ratios = BTreeMap::new();
        for (name, other) in compared(runs.side) {
            let other = sides.iter().find(|runs| runs.side == other);
            if let Some(ratio) = other.and_then(|other| time_to(runs, other)) {
                case.spread(name, Some(ratio));
                insert(&mut ratios, name, ratio);
            }
        }
        if let ColdSide::Ours { channels, memory: TargetMemory::Auto } = runs.side {
            targets.extend(goals(spec, &case));
            if channels == 2
                && let Some(ratio) = Figure::of(&case, "cold_to_warm")
            {
                document.summary.insert(format!("{}_to_warm", spec.name), ratio.median.into());
            }
        }
        summary.insert(runs.side.to_string(), json!(ratios));
        document.cases.push(case);
    }
    document.summary.insert(spec.name.clone(), summary.into());
    targets
}

/// Returns the sides whose time `side` is compared with, and the names of the ratios.
fn compared(side: ColdSide) -> Vec<(&'static str, ColdSide)> {
    use TargetMemory::{Auto, Cold, Warm};
    let (ColdSide::Ours { memory, .. } | ColdSide::Qemu { memory, .. }) = side;
    let mut compared = Vec::new();
    if memory != Warm {
        compared.push(("cold_to_warm", side.with(Warm)));
    }
    if memory == Auto {
        compared.push(("auto_to_cold", side.with(Cold)));
    }
    if let ColdSide::Ours { channels, .. } = side {
        let theirs = if memory == Warm { Warm } else { Cold };
        compared.push(("total_vs_qemu", ColdSide::Qemu { multifd: multifd(channels), memory: theirs }));
    }
    compared
}

/// Returns the total time of `runs`, divided by that of `other` in the same round.
fn time_to(runs: &SideRuns, other: &SideRuns) -> Option<Spread> {
    let total = figure("total_ms");
    Spread::of_ratios(&by_round(runs, total), &by_round(other, total))
}

/// Returns the verdicts on the goals for a side whose source announces pages.
fn goals(spec: &CaseSpec, case: &Case) -> Vec<Value> {
    let goals = [("cold_to_warm", COLD_TO_WARM), ("auto_to_cold", AUTO_TO_COLD), ("wasted", WASTED)];
    let side = case.params.get("side").and_then(Value::as_str).unwrap_or_default();
    let verdict = |(name, bound): (&str, f64)| {
        goal::at_most(format!("{}/{side} {name}", spec.name), bound, Figure::of(case, name))
    };
    goals.into_iter().filter_map(verdict).collect()
}

fn case_of(spec: &CaseSpec, runs: &SideRuns) -> Case {
    let name = format!("{}/{}", spec.name, runs.side);
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    }
    .param("case", spec.name.as_str())
    .param("side", runs.side.to_string())
    .param("rounds", runs.rounds.iter().flatten().count())
    .param("memory_bytes", spec.memory)
    .param("vcpus", spec.vcpus)
    .param("workload", spec.workload.as_str());
    for (name, figure) in FIGURES {
        case.spread(name, Spread::of(by_round(runs, *figure).into_iter().flatten()));
    }
    case
}
