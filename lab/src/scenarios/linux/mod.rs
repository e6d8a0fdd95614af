//! Scenarios with Linux guests: an unmodified distribution's kernel, which boots, works and moves.

mod copies;
mod ends;
mod handoff;
mod instants;
mod judge;
mod moves;
mod network;
mod refused;
mod reporting;
mod storage;

use super::rig::{Rig, migrate};
use super::vm::{Guest, Seen, Vm};
use super::{Lab, Scenario, Verdict};
use crate::guest_report::GuestReport;
use crate::pace;
use anyhow::{Result, ensure};
use judge::Move;
use reporting::FreeContent;
use serde_json::Value;
use std::time::{Duration, Instant};

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

const fn scenario(
    name: &'static str,
    about: &'static str,
    quick: bool,
    usually: u64,
    run: fn(&mut Lab) -> Result<Verdict>,
) -> Scenario {
    Scenario { name, about, quick, machines: 1, limit: seconds(usually * 3 + 60), run }
}

pub(super) const SCENARIOS: &[Scenario] = &[
    scenario("linux-boot", "boots, has a shell on its console, and powers off", true, 20, |lab| {
        boots(&mut Rig::new(lab))
    }),
    scenario("linux-elf", "boots from the ELF file (PVH) instead of the bzImage", false, 15, |lab| {
        let mut rig = Rig::new(lab);
        rig.boot.kernel.clone_from(&rig.lab.plan.vmlinux);
        boots(&mut rig)
    }),
    scenario("linux-precopy-ring", "moves by precopy with dirty rings", true, 30, |lab| {
        moves::once(lab, &["--mode", "precopy", "--tracker", "ring", "--verify"], 1)
    }),
    scenario("linux-precopy-log", "moves by precopy with the dirty log", false, 30, |lab| {
        moves::once(lab, &["--mode", "precopy", "--tracker", "log", "--verify"], 1)
    }),
    scenario("linux-postcopy", "moves by postcopy", true, 60, |lab| {
        moves::once(lab, &["--mode", "postcopy", "--pace", "off"], 1)
    }),
    scenario("linux-hybrid", "moves by precopy, and then by postcopy", false, 60, |lab| {
        moves::once(lab, &["--mode", "hybrid", "--tracker", "ring", "--pace", "off"], 1)
    }),
    scenario("linux-smp", "a guest of two processors moves", false, 40, |lab| {
        moves::once(lab, &["--mode", "precopy", "--tracker", "ring", "--verify"], 2)
    }),
    scenario("linux-disk", "flushed records exist after a move under load", true, 45, storage::disk),
    scenario(
        "linux-slow-disk",
        "a slow disk defers the switchover, and the guest moves later: by precopy, then by postcopy",
        false,
        250,
        storage::slow,
    ),
    scenario("linux-tcp", "a connection survives a move", true, 45, network::tcp),
    scenario(
        "linux-free-pages",
        "pages that the guest's driver reports as free are not sent",
        false,
        50,
        moves::free_pages,
    ),
    scenario(
        "linux-reporting",
        "the driver reports a deleted file's memory, the host takes it back, and the guest moves",
        false,
        60,
        |lab| reporting::reports(lab, FreeContent::Any),
    ),
    scenario(
        "linux-reporting-zeros",
        "the same with init_on_free=1: dropped pages read as zeros",
        false,
        70,
        |lab| reporting::reports(lab, FreeContent::Zeros),
    ),
    scenario(
        "linux-reporting-poison",
        "the same with page_poison=1: the host keeps the reported pages",
        false,
        90,
        |lab| reporting::reports(lab, FreeContent::Poison),
    ),
    scenario(
        "linux-cancelled",
        "a move is cancelled, and a later one succeeds",
        false,
        50,
        refused::cancelled,
    ),
    scenario(
        "linux-target-killed",
        "the target is killed during a move, and the guest continues",
        true,
        40,
        refused::killed,
    ),
    scenario(
        "linux-ends",
        "reboots in its process, moves, and shuts down by its power button",
        false,
        90,
        ends::ends,
    ),
    scenario(
        "linux-copy",
        "a copy has a new ID, and its kernel receives the event",
        false,
        45,
        copies::identity,
    ),
    scenario(
        "linux-snapshot",
        "a snapshot in the background is one instant of memory and disk, and the guest continues",
        true,
        60,
        instants::snapshot,
    ),
    scenario(
        "linux-branch",
        "branches continue from one instant beside their parent",
        true,
        50,
        instants::branch,
    ),
    scenario(
        "linux-handoff",
        "continues in another process without a copy of its memory, with its disk and connection",
        true,
        60,
        handoff::handoff,
    ),
    scenario("linux-ten-moves", "ten moves back and forth in a row", false, 120, moves::ten),
    Scenario {
        machines: 2,
        ..scenario(
            "linux-two-kernels",
            "moves from one machine to another one with its own kernel",
            true,
            45,
            moves::between_kernels,
        )
    },
];

impl Rig<'_> {
    /// Boots a guest, waits until it works, and records the duration as a figure.
    fn boot(&mut self, guest: &Guest) -> Result<Vm> {
        let name = self.name("guest");
        let began = Instant::now();
        let vm = Vm::boot(&self.local, &self.boot, guest, &self.lab.folder, &name)?;
        vm.up(self.patience())?;
        self.lab.figure("boot_s", began.elapsed().as_secs_f64());
        Ok(vm)
    }

    /// Moves the guest, and checks that the move succeeds and nothing was lost.
    fn carry(&mut self, source: &Vm, target: &Vm, arguments: &[&str]) -> Result<Value> {
        let before = ready(source)?;
        let watch = pace::Watch::start()?;
        let report = migrate(source, &target.uri()?, arguments)?;
        let status = source.end(seconds(30))?;
        ensure!(status == 0, "the source's process ended with status {status}: {}", source.said());
        // The shell must be the same one, with the variable that it was given before.
        target.shell("echo kept-$kept", "kept-42")?;
        let after = target.verified("verify")?;
        drop(watch);
        self.note(&report, &after.guest_report);
        let of = |name: &str| report[name].as_f64().unwrap_or(0.0);
        // The comparison of all pages is not part of the downtime, but the guest is stopped for it.
        let downtime_ms = of("downtime_ms") + of("verify_ms");
        let postcopy = report["postcopy"]["ms"].as_f64().unwrap_or(0.0);
        // While pages are missing, the guest waits for them one after the other.
        let stall = self.stall() + Duration::from_secs_f64(postcopy / 1e3);
        Move {
            before: &before,
            after: &after,
            downtime_ms,
            slack: self.slack(),
            emulated: self.lab.plan.emulated,
            stall,
        }
        .judge()?;
        Ok(report)
    }

    /// Checks a guest after a move that failed: the guest continues on the source with all its
    /// data, and was stopped for at most `downtime_ms`.
    fn stays(&self, source: &Vm, before: &Seen, downtime_ms: f64) -> Result<()> {
        source.shell("echo kept-$kept", "kept-42")?;
        let after = source.verified("verify")?;
        Move {
            before,
            after: &after,
            downtime_ms,
            slack: self.slack(),
            emulated: self.lab.plan.emulated,
            stall: self.stall(),
        }
        .judge()
    }

    /// Records the figures of a move.
    fn note(&mut self, report: &Value, after: &GuestReport) {
        for name in ["total_ms", "downtime_ms", "tracker"] {
            self.lab.figure(name, report[name].clone());
        }
        self.lab.figure("wire_mib", report["bytes"]["wire"].as_u64().unwrap_or(0) >> 20);
        self.lab.figure("gap_ms", after.gap_ms);
        if let Some(faults) = report["postcopy"]["faults"].as_u64() {
            self.lab.figure("faults", faults);
        }
    }
}

/// Returns a guest's report before a move. Gaps count from this report on. The guest's shell is
/// given a variable to keep.
fn ready(vm: &Vm) -> Result<Seen> {
    vm.shell("kept=$((6*7)); echo kept-$kept", "kept-42")?;
    let seen = vm.verified("verify")?;
    println!("{}", vm.vcpus()?);
    judge::content(&seen.guest_report)?;
    Ok(seen)
}

fn boots(rig: &mut Rig<'_>) -> Result<Verdict> {
    let guest = Guest { cpus: 2, ..Guest::usual() };
    let vm = rig.boot(&guest)?;
    let guest_report = ready(&vm)?.guest_report;
    ensure!(guest_report.cpus == 2, "{} of 2 processors are on", guest_report.cpus);
    ensure!(
        guest_report.complaints.is_empty(),
        "its kernel reports errors: {:?}; {}",
        guest_report.complaints,
        vm.vcpus()?
    );
    vm.shell("uname -r | sed s/^/kernel-/", "kernel-")?;
    rig.power_off(&vm)?;
    Ok(Verdict::Passed)
}
