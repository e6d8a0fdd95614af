//! Scenarios of a disk that is written to while its guest moves.

use super::{Lab, Rig, Verdict, seconds};
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Disk image in a file, which is removed on drop.
#[derive(Debug)]
pub(super) struct Image(PathBuf);

impl Image {
    /// Copies the template of the plan. `None` if there is no template.
    pub(super) fn of_template(lab: &Lab) -> Result<Option<Self>> {
        let Some(template) = &lab.plan.disk else { return Ok(None) };
        let image = Self(Path::new("/tmp").join(format!("lab-disk-{}.img", std::process::id())));
        std::fs::copy(template, image.path())
            .with_context(|| format!("cannot copy {}", template.display()))?;
        Ok(Some(image))
    }

    /// Returns another image, which does not exist yet.
    pub(super) fn beside(&self, name: &str) -> Self {
        Self(self.0.with_extension(format!("{name}.img")))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Checks that all flushed records exist after two moves under load, and that the file system is
/// clean.
pub(super) fn disk(lab: &mut Lab) -> Result<Verdict> {
    let Some(image) = Image::of_template(lab)? else { return Ok(Verdict::no_disk()) };
    let mut rig = Rig::new(lab);
    let guest = writer(image.path(), 16);
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let before = source.guest_report()?.records.context("it writes no records")?;
    rig.carry(&source, &target, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    // The second move starts on the first one's target.
    let next = rig.awaiting(&guest)?;
    rig.carry(&target, &next, &["--mode", "postcopy", "--pace", "off"])?;
    finish(&mut rig, &next, before, image.path())?;
    Ok(Verdict::Passed)
}

/// Checks moves whose switchover begins while a slow disk still has many writes to do.
///
/// The switchover is deferred: the guest is stopped for no longer than the limit, continues, and
/// moves when the disk has caught up.
pub(super) fn slow(lab: &mut Lab) -> Result<Verdict> {
    /// Data for which the disk needs much longer than the move's passes, in MiB.
    const MIB: u32 = 16;
    let Some(device) = lab.plan.slow_disk.clone() else {
        return Ok(Verdict::Skipped("there is no slow disk; the emulated machine has one".into()));
    };
    let mut rig = Rig::new(lab);
    let guest = writer(&device, 8);
    let mut source = rig.boot(&guest)?;
    let before = source.guest_report()?.records.context("it writes no records")?;
    for move_by in [
        &["--mode", "precopy", "--tracker", "ring", "--verify"][..],
        &["--mode", "postcopy", "--pace", "off"],
    ] {
        let target = rig.awaiting(&guest)?;
        // In the background, because the command ends only when the disk has all data.
        source.enter(&format!(
            "rm -f /disk/much /tmp/there; (dd if=/dev/zero of=/disk/much bs=1M count={MIB} conv=fsync 2>/dev/null; touch /tmp/there) &"
        ))?;
        let whole = format!("[ \"$(stat -c %s /disk/much)\" = {} ]", MIB << 20);
        source.shell(&format!("until {whole}; do sleep 1; done; echo all-written"), "all-written")?;
        let report = rig.carry(&source, &target, move_by)?;
        let deferrals = report["put_off"].as_u64().unwrap_or(0);
        rig.lab.figure(&format!("put_off_by_{}", move_by[1]), deferrals);
        ensure!(deferrals > 0, "no switchover was deferred: the disk was not slow");
        target.enter("until [ -e /tmp/there ]; do sleep 1; done; echo all-there")?;
        target.wait("the disk", seconds(120), |said| {
            said.trim_start().starts_with("all-there").then_some(())
        })?;
        source = target;
    }
    finish(&mut rig, &source, before, &device)?;
    Ok(Verdict::Passed)
}

/// Returns a guest that writes records to the disk `path`.
pub(super) fn writer(path: &Path, stress_mib: u32) -> Guest {
    Guest {
        dirty_ring: true,
        options: format!("lab.stress_mib={stress_mib} lab.records=/disk/records"),
        devices: vec!["--disk".into(), path.to_string_lossy().into_owned()],
        ..Guest::usual()
    }
}

/// Ends the guest, and checks that the disk `path` has all its records, more than `before` the
/// moves, and a clean file system.
pub(super) fn finish(rig: &mut Rig<'_>, vm: &Vm, before: u64, path: &Path) -> Result<()> {
    let guest_report = vm.verified("stop-records")?.guest_report;
    let records = guest_report.records.unwrap_or(0);
    ensure!(records > before, "it wrote {before} records before its moves and none afterwards");
    super::judge::content(&guest_report)?;
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
