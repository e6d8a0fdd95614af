//! Scenario of a guest that reboots, moves and shuts down.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::pace::stretched;
use crate::scenarios::vm::Guest;
use anyhow::{Result, ensure};

/// Checks that a reboot keeps the process, and that the guest's own drivers receive the power
/// button after a move.
pub(super) fn ends(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = Guest { devices: vec!["--on-reset".into(), "restart".into()], ..Guest::usual() };
    let source = rig.boot(&guest)?;
    ready(&source)?;
    let pid = source.status()?["vm"]["pid"].clone();
    source.skip()?;
    source.enter("reboot -f")?;
    source.up(rig.patience())?;
    ensure!(source.status()?["vm"]["pid"] == pid, "the process is another one");
    ready(&source)?;

    let target = rig.awaiting(&guest)?;
    rig.carry(&source, &target, &["--mode", "precopy", "--verify"])?;
    // A distribution has a daemon that listens to the button. In this guest the shell does.
    target.shell(
        "(dd if=/dev/input/event0 of=/dev/null bs=24 count=1 2>/dev/null; poweroff -f) & echo now-listening",
        "now-listening",
    )?;
    std::thread::sleep(stretched(seconds(1)));
    target.command(&["powerdown"])?;
    let status = target.end(rig.patience())?;
    ensure!(status == 0, "after its power button the process ended with status {status}: {}", target.said());
    Ok(Verdict::Passed)
}
