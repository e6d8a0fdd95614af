//! A guest that is asked to shut down, and one that starts its machine anew.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::pace::stretched;
use crate::scenarios::vm::Guest;
use anyhow::{Result, ensure};

/// The guest's own drivers hear the power button, after a move as before; and a guest that reboots is there again in the same process.
pub(super) fn ends(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = Guest { devices: vec!["--on-reset".into(), "restart".into()], ..Guest::usual() };
    let source = rig.boot(&guest)?;
    ready(&source)?;
    let pid = source.status()?["vm"]["pid"].clone();
    source.skip()?;
    source.enter("reboot -f")?;
    source.up(rig.patience())?;
    ensure!(source.status()?["vm"]["pid"] == pid, "it is another process");
    ready(&source)?;

    let target = rig.awaiting(&guest)?;
    rig.carry(&source, &target, &["--mode", "precopy", "--verify"])?;
    // Whoever listens to the button in a distribution; here it is the shell.
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
