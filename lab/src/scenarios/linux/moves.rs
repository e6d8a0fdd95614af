//! Scenarios of moves that succeed.

use super::{Lab, Rig, Verdict};
use crate::scenarios::vm::Guest;
use anyhow::{Context, Result, ensure};

/// Moves a guest once, with `arguments` of `vmferry migrate`.
pub(super) fn once(lab: &mut Lab, arguments: &[&str], cpus: u32) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = Guest { cpus, dirty_ring: arguments.contains(&"ring"), ..Guest::usual() };
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let report = rig.carry(&source, &target, arguments)?;
    if let Some(at) = arguments.iter().position(|argument| *argument == "--tracker") {
        let (wanted, used) = (arguments.get(at + 1).copied(), report["tracker"].as_str());
        ensure!(wanted == used, "the tracker was {used:?}, not {wanted:?}");
    }
    rig.power_off(&target)?;
    Ok(Verdict::Passed)
}

/// Moves a guest ten times. Each process except the first and the last is first a target and then a
/// source.
pub(super) fn ten(lab: &mut Lab) -> Result<Verdict> {
    const MOVES: u32 = 10;
    let mut rig = Rig::new(lab);
    let guest = Guest { dirty_ring: true, ..Guest::usual() };
    let mut vm = rig.boot(&guest)?;
    let mut longest = 0.0_f64;
    for number in 1..=MOVES {
        let target = rig.awaiting(&guest)?;
        let arguments: &[&str] = match number % 3 {
            0 => &["--mode", "postcopy", "--pace", "off"],
            1 => &["--mode", "precopy"],
            _ => &["--mode", "hybrid", "--pace", "off"],
        };
        let report = rig.carry(&vm, &target, arguments).with_context(|| format!("move {number}"))?;
        longest = longest.max(report["downtime_ms"].as_f64().unwrap_or(0.0));
        vm = target;
    }
    rig.lab.figure("moves", MOVES);
    rig.lab.figure("longest_downtime_ms", longest);
    rig.power_off(&vm)?;
    Ok(Verdict::Passed)
}

/// Checks that memory that was used and freed is reported by the guest's own driver and not sent.
pub(super) fn free_pages(lab: &mut Lab) -> Result<Verdict> {
    const FREED_MIB: u64 = 96;
    let mut rig = Rig::new(lab);
    let guest = Guest { memory: "384M", ..Guest::usual() };
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let fill = format!(
        "dd if=/dev/urandom of=/tmp/junk bs=1M count={FREED_MIB} 2>/dev/null; rm /tmp/junk; echo freed"
    );
    source.shell(&fill, "freed")?;
    let report = rig.carry(&source, &target, &["--mode", "precopy", "--free-pages", "on", "--verify"])?;
    let skipped_mib = (report["bytes"]["free_pages_skipped"].as_u64().unwrap_or(0) * 4096) >> 20;
    rig.lab.figure("freed_mib", FREED_MIB);
    rig.lab.figure("skipped_mib", skipped_mib);
    ensure!(
        skipped_mib >= FREED_MIB / 2,
        "only {skipped_mib} MiB of {FREED_MIB} MiB of freed memory were skipped"
    );
    rig.power_off(&target)?;
    Ok(Verdict::Passed)
}

/// Moves a guest to the other machine, with another kernel, another KVM and other clocks.
pub(super) fn between_kernels(lab: &mut Lab) -> Result<Verdict> {
    if lab.plan.peer.is_none() {
        return Ok(Verdict::Skipped("there is only one machine; an emulated run has two".into()));
    }
    let mut rig = Rig::new(lab);
    let guest = Guest { dirty_ring: true, ..Guest::usual() };
    let target = rig.awaiting_on_remote(&guest)?;
    let source = rig.boot(&guest)?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    rig.power_off(&target)?;
    Ok(Verdict::Passed)
}
