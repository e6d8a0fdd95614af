//! A disk that is written to while its guest moves.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::scenarios::rig::attempt;
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Records are flushed all the time; after the move each of them is there, and the file system is clean.
pub(super) fn disk(lab: &mut Lab) -> Result<Verdict> {
    let Some(template) = lab.plan.disk.clone() else {
        return Ok(Verdict::Skipped("mkfs.ext4 is not here, so there is no disk".into()));
    };
    let image = Path::new("/tmp").join(format!("lab-disk-{}.img", std::process::id()));
    std::fs::copy(&template, &image).with_context(|| format!("cannot copy {}", template.display()))?;
    let result = on(lab, &image);
    let _ = std::fs::remove_file(&image);
    result
}

fn on(lab: &mut Lab, image: &Path) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = writer(image, 16);
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let before = source.told()?.records.context("it writes no records")?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    // A second one writes on where the first went on.
    let next = rig.awaiting(&guest)?;
    rig.carry(&target, &next, &["--mode", "postcopy", "--pace", "off"])?;
    finish(&mut rig, &next, before, image)?;
    Ok(Verdict::Passed)
}

/// A move whose pause comes while much that was written has yet to get to a slow disk: it is given up in time, the guest goes on, and moves
/// when the disk has caught up.
pub(super) fn slow(lab: &mut Lab) -> Result<Verdict> {
    /// Takes the disk longer than the move, and than the guest may stand still for it.
    const MIB: u32 = 16;
    let Some(device) = lab.plan.slow_disk.clone() else {
        return Ok(Verdict::Skipped("there is no disk that is slow; the emulated machine has one".into()));
    };
    let mut rig = Rig::new(lab);
    let guest = writer(&device, 8);
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let before = ready(&source)?;
    // In the background: its end waits for the disk.
    source.enter(&format!(
        "(dd if=/dev/zero of=/disk/much bs=1M count={MIB} conv=fsync 2>/dev/null; touch /tmp/there) &"
    ))?;
    let whole = format!("[ \"$(stat -c %s /disk/much)\" = {} ]", MIB << 20);
    source.shell(&format!("until {whole}; do sleep 1; done; echo all-written"), "all-written")?;
    let began = Instant::now();
    let (report, status) = attempt(&source, &target.uri()?, &["--mode", "precopy", "--tracker", "ring"])?;
    rig.lab.figure("given_up_after_s", began.elapsed().as_secs_f64());
    let why = report["error"].as_str().unwrap_or_default().to_owned();
    // The rest of the words are the same each time.
    rig.lab.figure("given_up", why.rsplit(": ").next().unwrap_or_default());
    ensure!(
        (status, report["outcome"].as_str()) == (1, Some("failed")),
        "it ended with status {status} as {}, though the disk was not ready: {why}",
        report["outcome"]
    );
    ensure!(why.contains("within"), "the error does not say for how long it waited: {why}");
    rig.stays(&source, &before, 12_000.0)?;
    source.skip()?;
    source.enter("until [ -e /tmp/there ]; do sleep 1; done; echo all-there")?;
    source.wait("the disk", seconds(120), |said| said.trim_start().starts_with("all-there").then_some(()))?;
    let target = rig.awaiting(&guest)?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    finish(&mut rig, &target, before.told.records.unwrap_or(0), &device)?;
    Ok(Verdict::Passed)
}

/// A guest that writes records to the disk `path`.
fn writer(path: &Path, stress_mib: u32) -> Guest {
    Guest {
        dirty_ring: true,
        options: format!("lab.stress_mib={stress_mib} lab.records=/disk/records"),
        devices: vec!["--disk".into(), path.to_string_lossy().into_owned()],
        ..Guest::usual()
    }
}

/// Ends the guest: all of its records are on the disk `path`, more than `before` its moves, and the file system is clean.
fn finish(rig: &mut Rig<'_>, vm: &Vm, before: u64, path: &Path) -> Result<()> {
    let told = vm.verified("stop-records")?.told;
    let records = told.records.unwrap_or(0);
    ensure!(records > before, "it wrote {before} records before its moves and none since");
    super::judge::content(&told)?;
    rig.lab.figure("records", records);
    vm.shell("umount /disk && echo unmounted", "unmounted")?;
    rig.power_off(vm)?;
    match rig.lab.plan.fsck.clone() {
        Some(checker) => check(&checker, path)?,
        None => rig.lab.figure("fsck", "not run: no static e2fsck"),
    }
    Ok(())
}

fn check(checker: &Path, image: &Path) -> Result<()> {
    let output = Command::new(checker)
        .args(["-f", "-n"])
        .arg(image)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", checker.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    ensure!(output.status.success(), "the file system is not clean ({}): {}", output.status, said.trim());
    Ok(())
}
