//! Scenario of a guest that continues in another process of its host, without a copy of its memory.

use super::network::{Bridge, GUEST, PORT, TAPS, Talk};
use super::storage::{Image, finish, writer};
use super::{Lab, Rig, Verdict};
use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;

/// Checks that a guest keeps its memory, its flushed records and its connection when it is handed
/// to another process while it writes to its disk and answers on the network.
pub(super) fn handoff(lab: &mut Lab) -> Result<Verdict> {
    if !lab.plan.emulated {
        return Ok(Verdict::Skipped("network interfaces are created only in the emulated machine".into()));
    }
    let Some(image) = Image::of_template(lab)? else { return Ok(Verdict::no_disk()) };
    let guest = |tap: &str| {
        let mut guest = writer(image.path(), 16);
        guest.options.push_str(&format!(" lab.address={GUEST} lab.port={PORT}"));
        let devices = ["--memory-backing", "memfd", "--net", &format!("tap={tap}")].map(str::to_owned);
        guest.devices.extend(devices);
        guest
    };
    let _bridge = Bridge::make()?;
    let mut rig = Rig::new(lab);
    let target = rig.awaiting_locally(&guest(TAPS[1]))?;
    let source = rig.boot(&guest(TAPS[0]))?;
    let before = source.guest_report()?.records.context("it writes no records")?;
    let talk = Talk::start(SocketAddr::from((GUEST, PORT)))?;
    talk.progresses(10)?;
    let report = rig.carry(&source, &target, &["--local"])?;
    ensure!(report["mode"] == "local", "the mode is {}", report["mode"]);
    ensure!(report["bytes"]["raw_pages"] == 0, "{} pages were copied", report["bytes"]["raw_pages"]);
    talk.progresses(10)?;
    let (lines, longest) = talk.finish()?;
    rig.lab.figure("lines", lines);
    rig.lab.figure("longest_silence_ms", longest);
    finish(&mut rig, &target, before, image.path())?;
    Ok(Verdict::Passed)
}
