//! `vmferry-bench upgrade`: a guest continues in a new process of this host, without a copy of its
//! memory, beside QEMU's mode `cpr-transfer`. Then one guest is upgraded many times in a row.

use super::args::BenchArgs;
use super::sample::Sample;
use super::side::{Folder, Side, Start};
use super::{Finished, no_kvm, program};
use crate::cases::{self, Figures};
use crate::goal;
use crate::host;
use crate::qemu::{self, QemuSpec};
use crate::rounds::{OurError, Rounds, Stop, room_for};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vmferry_report::benches::upgrade;
use vmferry_report::by_memory::{UPGRADE_DOWNTIME_GOAL_MS, UPGRADE_TOTAL_GOAL_MS};
use vmferry_report::json::{Case, Document};

/// Memory of the guests in MiB.
const MEMORY_MIB: [u64; 5] = [256, 1024, 4096, 8192, 16384];
/// Memory of the guest to which the goals apply, in MiB.
const GOAL_MIB: u64 = 8192;
/// Largest memory of `--quick` in MiB.
const QUICK_MIB: u64 = 1024;
/// Rounds of each case, and those of `--quick`.
const ROUNDS: [usize; 2] = [5, 2];
/// Upgrades in a row, and those of `--quick`.
const IN_A_ROW: [u32; 2] = [200, 20];
/// Upgrades between two checks of all pages of the guest.
const CHECK_EVERY: u32 = 10;
/// Time for which a guest runs before its upgrade.
const WARM_UP: Duration = Duration::from_millis(500);
/// KiB by which the memory of a late process may exceed that of the first successor.
const MORE_KIB: u64 = 4 << 10;

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
struct Times {
    downtime: f64,
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
    let mut failures = rounds.failures;
    in_a_row(args, IN_A_ROW[which], &mut document, &mut failures)?;
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

/// Upgrades guests many times, and compares a late process with an early one.
fn in_a_row(args: &BenchArgs, count: u32, document: &mut Document, failures: &mut Vec<String>) -> Result<()> {
    for (kind, memory) in [("process", "64M"), ("kvm", "64M")] {
        let name = format!("row/{kind}");
        if !chosen(args, &name) {
            continue;
        }
        if let Some(why) = no_kvm().filter(|_| kind == "kvm") {
            document.cases.push(Case::skipped(name, why));
            continue;
        }
        eprintln!("upgrade: {name}, {count} upgrades");
        let began = Instant::now();
        let mut guest = Guest::start(kind, memory, "uniform,ws=2M,data=16M,rate=20k,fill=random")?;
        let (mut samples, mut longest) = (Vec::new(), Times { downtime: 0.0, total: 0.0, ready: 0.0 });
        for number in 1..=count {
            let times = guest.upgrade().with_context(|| format!("{name}, upgrade {number}"))?;
            longest.downtime = longest.downtime.max(times.downtime);
            longest.total = longest.total.max(times.total);
            if number % CHECK_EVERY == 0 || number == count {
                guest.side.whole().with_context(|| format!("{name}, after upgrade {number}"))?;
                samples.push(Sample::of(guest.pid)?);
            }
        }
        let mut case = Case::new(&*name).param("upgrades", count).param("memory", memory);
        case.metric("total_s", began.elapsed().as_secs_f64());
        case.metric("downtime_max_ms", longest.downtime);
        case.metric("total_max_ms", longest.total);
        judge(&samples, &mut case, failures);
        document.cases.push(case);
    }
    Ok(())
}

/// Compares the last sample with the first one, and records figures and failures.
fn judge(samples: &[Sample], case: &mut Case, failures: &mut Vec<String>) {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return };
    let figures = [
        ("rss_kib", first.rss_kib, last.rss_kib, MORE_KIB),
        ("descriptors", first.descriptors, last.descriptors, 0),
        ("threads", first.threads, last.threads, 0),
    ];
    for (name, early, late, more) in figures {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        for (when, value) in [("early", early), ("late", late)] {
            case.metric(format!("{name}_{when}"), value as f64);
        }
        if late > early + more {
            failures.push(format!("{}: {name} grew from {early} to {late}", case.name));
        }
    }
}

/// Guest whose processes change.
struct Guest {
    side: Side,
    /// Process that has the guest.
    pid: u32,
    /// Process that has the guest after an upgrade. It is no child of this process.
    successor: Option<OwnedFd>,
    // Dropped last: the sockets of the processes are in it.
    folder: Folder,
}

impl Guest {
    /// Starts a guest, and waits until it has filled its memory.
    fn start(guest: &str, memory: &str, workload: &str) -> Result<Self> {
        let folder = Folder::new()?;
        let args = ["--memory-backing", "memfd", "--balloon", "off", "--workload", workload];
        let args = args.map(String::from).into();
        let mut side = Side::start(Start { guest, memory, args, ..Start::default() }, &folder.0, "guest")?;
        side.working()?;
        let pid = side.pid();
        Ok(Self { side, pid, successor: None, folder })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    fn upgrade(&mut self) -> Result<Times> {
        let report = self.file("report.json");
        let mut command = Command::new(program::vmferry()?);
        command.args(["upgrade", "--api"]).arg(self.file("guest"));
        command.arg("--json").arg(&report).arg("--log").arg(self.file("successor.log"));
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "vmferry upgrade: {}: {}", output.status, said.trim());
        let report: Value = serde_json::from_slice(&std::fs::read(&report)?)?;
        let pid = report["upgrade"]["to_pid"].as_i64().context("no new process")?;
        let pid = Pid::from_raw(i32::try_from(pid)?).context("no new process")?;
        self.successor = Some(pidfd_open(pid, PidfdFlags::empty())?);
        self.pid = u32::try_from(pid.as_raw_nonzero().get())?;
        self.side.reconnect(&self.file("guest"))?;
        let ms = |value: &Value| value.as_f64().with_context(|| format!("a time is missing: {report}"));
        Ok(Times {
            downtime: ms(&report["downtime_ms"])?,
            total: ms(&report["total_ms"])?,
            ready: ms(&report["upgrade"]["ready_ms"])?,
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(successor) = &self.successor {
            let _ = pidfd_send_signal(successor, Signal::KILL);
        }
    }
}
