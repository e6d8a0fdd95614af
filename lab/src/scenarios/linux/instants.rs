//! Scenarios of one instant of a running guest: a snapshot in the background, and branches.

use super::storage::{Image, finish, writer};
use super::{Lab, Rig, Verdict, ready};
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;

/// Checks that a snapshot of a guest that writes to its memory and its disk can be restored with a
/// copy of the disk from the same pause, and that the original continues.
pub(super) fn snapshot(lab: &mut Lab) -> Result<Verdict> {
    let Some(image) = Image::of_template(lab)? else { return Ok(Verdict::no_disk()) };
    let copy = image.beside("copy");
    let mut rig = Rig::new(lab);
    // The confined process may write files only in this folder.
    let folder = ["--migrate-dir", "/tmp"].map(str::to_owned);
    let guest = |disk: &Path| {
        let mut guest = writer(disk, 16);
        guest.devices.extend(folder.clone());
        guest
    };
    let original = rig.boot(&guest(image.path()))?;
    let before = ready(&original)?;
    let records = original.guest_report()?.records.context("it writes no records")?;
    let uri = format!("file:/tmp/lab-{}-snapshot", std::process::id());
    let hook = format!("cp '{}' '{}'", image.path().display(), copy.path().display());
    let said = original.command(&["snapshot", &uri, "--verify", "--freeze-hook", &hook, "--json", "-"])?;
    let report: Value = serde_json::from_str(&said).context("the report of the snapshot is not JSON")?;
    ensure!(report["outcome"] == "completed", "the snapshot is {}: {}", report["outcome"], report["error"]);
    let paused = report["downtime_ms"].as_f64().context("no time of the pause")?;
    rig.lab.figure("paused_ms", paused);
    rig.lab.figure("total_ms", report["total_ms"].clone());
    rig.stays(&original, &before, paused)?;
    finish(&mut rig, &original, records, image.path())?;

    let name = rig.name("restored");
    let restored = Vm::restored(&rig.local, &rig.boot, &guest(copy.path()), &rig.lab.folder, &name, &uri)?;
    restored.shell("echo kept-$kept", "kept-42")?;
    finish(&mut rig, &restored, records, copy.path())?;
    let _ = std::fs::remove_file(uri.trim_start_matches("file:"));
    Ok(Verdict::Passed)
}

/// Number of guests that branch off.
const CHILDREN: u32 = 2;

/// Checks that branches of a guest continue from one instant beside it, each with its own memory.
pub(super) fn branch(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let memfd = ["--memory-backing", "memfd"].map(str::to_owned).to_vec();
    let guest = Guest { devices: memfd, ..Guest::usual() };
    let parent = rig.boot(&guest)?;
    let before = ready(&parent)?;
    let folder = format!("/tmp/lab-{}-branches", std::process::id());
    let count = CHILDREN.to_string();
    let said = parent.command(&["branch", "--count", &count, "--api-dir", &folder, "--json", "-"])?;
    let report: Value = serde_json::from_str(&said).context("the report of the branch is not JSON")?;
    let paused = report["pause_ms"].as_f64().context("no time of the pause")?;
    rig.lab.figure("paused_ms", paused);
    rig.lab.figure("total_ms", report["total_ms"].clone());
    let children: Vec<Vm> =
        (0..CHILDREN).map(|child| Vm::branched(&parent, Path::new(&folder), child)).collect();
    for child in &children {
        let (told, next) = (child.guest_report()?, child.guest_report()?);
        let written = before.guest_report.stress_writes;
        ensure!(told.stress_writes > written, "a branch no longer writes to its memory");
        ensure!(next.ticks > told.ticks, "the clock thread of a branch has stopped");
        // A branch has no console input, so it cannot be asked for all checks. It checks the pages
        // that it writes.
        ensure!(next.stress_wrong == 0, "{} pages of a branch have changed", next.stress_wrong);
        let new: Vec<_> =
            next.complaints.iter().filter(|line| !before.guest_report.complaints.contains(line)).collect();
        ensure!(new.is_empty(), "the kernel of a branch reports errors: {new:?}");
    }
    rig.stays(&parent, &before, paused)?;
    for child in &children {
        child.command(&["quit"])?;
    }
    rig.power_off(&parent)?;
    let _ = std::fs::remove_dir_all(&folder);
    Ok(Verdict::Passed)
}
