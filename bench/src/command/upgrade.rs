//! `vmferry-bench upgrade`: a guest continues in a new process of this host, without a copy of its
//! memory, beside QEMU's mode `cpr-transfer`.

use super::args::BenchArgs;
use super::side::{Folder, Side, Start};
use super::{Finished, no_kvm, program};
use crate::cases::{self, Figures};
use crate::goal;
use crate::host;
use crate::qemu::{self, QemuSpec};
use crate::rounds::{OurError, Rounds, Stop, room_for};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use vmferry_report::benches::upgrade;
use vmferry_report::by_memory::{UPGRADE_DOWNTIME_GOAL_MS, UPGRADE_TOTAL_GOAL_MS};
use vmferry_report::json::Document;

/// Memory of the guests in MiB.
const MEMORY_MIB: [u64; 5] = [256, 1024, 4096, 8192, 16384];
/// Memory of the guest to which the goals apply, in MiB.
const GOAL_MIB: u64 = 8192;
/// Largest memory of `--quick` in MiB.
const QUICK_MIB: u64 = 1024;
/// Rounds of each case, and those of `--quick`.
const ROUNDS: [usize; 2] = [5, 2];
/// Time for which a guest runs before its upgrade.
const WARM_UP: Duration = Duration::from_millis(500);

/// Program whose guest is upgraded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    Ours,
    Qemu,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "ours",
            Self::Qemu => "qemu-cpr",
        })
    }
}

/// Times of one upgrade in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) downtime: f64,
    total: f64,
    /// Time until the new process waits for the guest.
    ready: f64,
}

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let which = usize::from(args.quick);
    let mut document = Document::new("upgrade", host::describe());
    let mut progress = |what: &str| eprintln!("upgrade: {what}");
    let repeats = args.rounds.map_or(ROUNDS[which], usize::from);
    let mut rounds = Rounds::new(repeats, &mut progress);
    for mib in MEMORY_MIB.into_iter().filter(|mib| !args.quick || *mib <= QUICK_MIB) {
        compare(args, mib, &mut rounds, &mut document);
    }
    let failures = rounds.failures;
    for (name, metric) in [("upgrade_downtime_ms", "downtime_ms"), ("upgrade_total_ms", "total_ms")] {
        if let Some(value) = largest(&document, metric) {
            document.summary.insert(name.into(), json!(value));
        }
    }
    let figure = |metric: &str| cases::figure(&document, &group(GOAL_MIB), Program::Ours, metric);
    let goals = [
        goal::at_most("downtime of 8 GiB, ms", UPGRADE_DOWNTIME_GOAL_MS, figure("downtime_ms")),
        goal::at_most("total of 8 GiB, ms", UPGRADE_TOTAL_GOAL_MS, figure("total_ms")),
    ];
    let goals: Vec<Value> = goals.into_iter().flatten().collect();
    document.summary.insert("goals".into(), json!(goals));
    document.summary.insert("rounds".into(), json!(repeats));
    document.summary.insert("failures".into(), json!(failures));
    let (table, page) = (upgrade::table(&document), upgrade::page(&document));
    Ok(Finished { document, table, page: Some(page), failures })
}

/// Returns the metric `name` of vmferry's case with the largest memory that ran.
fn largest(document: &Document, name: &str) -> Option<f64> {
    let of = |mib: u64| cases::metric(document, &group(mib), Program::Ours, name);
    MEMORY_MIB.into_iter().rev().find_map(of)
}

fn group(mib: u64) -> String {
    format!("{mib}M")
}

fn chosen(args: &BenchArgs, name: &str) -> bool {
    args.only.is_empty() || args.only.iter().any(|only| name.contains(only.as_str()))
}

/// Upgrades guests of `mib` MiB under both programs in turn.
fn compare(args: &BenchArgs, mib: u64, rounds: &mut Rounds<'_>, document: &mut Document) {
    let group = group(mib);
    let name = |side: Program| format!("{group}/{side}");
    let sides: Vec<_> =
        [Program::Ours, Program::Qemu].into_iter().filter(|side| chosen(args, &name(*side))).collect();
    let runs = rounds.run(sides, name, |side, _| {
        // Both processes have the same pages. The rest is for their page tables.
        room_for((mib << 20) / 16 * 17)?;
        match side {
            Program::Ours => ours(mib),
            Program::Qemu => theirs(mib),
        }
    });
    let workload = workload(mib);
    cases::add(document, (&group, &[("workload", json!(workload))]), &runs, |times| {
        Figures::from([("downtime_ms", times.downtime), ("total_ms", times.total), ("ready_ms", times.ready)])
    });
}

/// Returns the workload of a guest that has filled most of its memory.
fn workload(mib: u64) -> String {
    format!("uniform,ws=64M,data={}M,rate=20k,fill=random", mib / 8 * 7)
}

fn theirs(mib: u64) -> Result<Times, Stop> {
    let spec =
        QemuSpec { memory: mib << 20, workload: workload(mib), warm_up: WARM_UP, ..QemuSpec::default() };
    let upgrade = qemu::upgrade(&spec)?;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    Ok(Times { downtime: ms(upgrade.downtime), total: ms(upgrade.total), ready: ms(upgrade.ready) })
}

fn ours(mib: u64) -> Result<Times, Stop> {
    if let Some(why) = no_kvm() {
        return Err(OurError::Unavailable(why).into());
    }
    let once = || {
        let mut guest = Guest::start("kvm", &format!("{mib}M"), &workload(mib))?;
        std::thread::sleep(WARM_UP);
        let times = guest.upgrade()?;
        guest.side.whole()?;
        Ok(times)
    };
    once().map_err(|error: anyhow::Error| OurError::Failed(error.into()).into())
}

/// Guest whose processes change.
pub(super) struct Guest {
    /// Process that has the guest.
    pub(super) side: Side,
    // Dropped last: the sockets of the processes are in it.
    pub(super) folder: Folder,
}

impl Guest {
    /// Starts a guest, and waits until it has filled its memory.
    pub(super) fn start(guest: &str, memory: &str, workload: &str) -> Result<Self> {
        let folder = Folder::new()?;
        let dir = folder.0.display().to_string();
        let args =
            ["--memory-backing", "memfd", "--balloon", "off", "--migrate-dir", &dir, "--workload", workload];
        let args = args.map(String::from).into();
        let mut side = Side::start(Start { guest, memory, args, ..Start::default() }, &folder.0, "guest")?;
        side.working()?;
        Ok(Self { side, folder })
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    pub(super) fn upgrade(&mut self) -> Result<Times> {
        let report = self.file("report.json");
        let mut command = Command::new(program::vmferry()?);
        command.args(["upgrade", "--api"]).arg(self.file("guest"));
        command.arg("--json").arg(&report).arg("--log").arg(self.file("successor.log"));
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "vmferry upgrade: {}: {}", output.status, said.trim());
        let report: Value = serde_json::from_slice(&std::fs::read(&report)?)?;
        let pid = u32::try_from(report["upgrade"]["to_pid"].as_u64().context("no new process")?)?;
        let mut successor = Side::adopt(pid, self.file("successor.log"))?;
        successor.connect(&self.file("guest"))?;
        // Dropping the old process ends it.
        self.side = successor;
        let ms = |value: &Value| value.as_f64().with_context(|| format!("a time is missing: {report}"));
        Ok(Times {
            downtime: ms(&report["downtime_ms"])?,
            total: ms(&report["total_ms"])?,
            ready: ms(&report["upgrade"]["ready_ms"])?,
        })
    }
}
