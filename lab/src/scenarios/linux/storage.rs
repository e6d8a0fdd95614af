//! A disk that is written to while its guest moves.

use super::{Lab, Rig, Verdict};
use crate::scenarios::vm::Guest;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

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
    let checker = lab.plan.fsck.clone();
    let mut rig = Rig::new(lab);
    let guest = Guest {
        dirty_ring: true,
        options: "lab.stress_mib=16 lab.records=/disk/records".into(),
        devices: vec!["--disk".into(), image.to_string_lossy().into_owned()],
        ..Guest::usual()
    };
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let before = source.told()?.records.context("it writes no records")?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    // A second one writes on where the first went on.
    let next = rig.awaiting(&guest)?;
    rig.carry(&target, &next, &["--mode", "postcopy", "--pace", "off"])?;
    let after = next.verified("stop-records")?.told;
    let records = after.records.unwrap_or(0);
    ensure!(records > before, "it wrote {before} records before its moves and none since");
    super::judge::content(&after)?;
    rig.lab.figure("records", records);
    next.shell("umount /disk && echo unmounted", "unmounted")?;
    rig.power_off(&next)?;
    match checker {
        Some(checker) => check(&checker, image)?,
        None => rig.lab.figure("fsck", "not run: no static e2fsck"),
    }
    Ok(Verdict::Passed)
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
