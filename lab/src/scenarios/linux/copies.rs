//! Scenario of a guest that is copied while it continues to run.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};

/// Identity of a guest, as its kernel knows it.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    /// VM generation ID in hexadecimal.
    id: String,
    /// Number of events about a new ID from the event device.
    events: u64,
}

/// Checks that a copy has another VM generation ID than its original, and that its kernel handles
/// the event about the new ID.
///
/// Whether the kernel then reseeds its random number generator is not checked: Debian's cloud
/// kernel has no driver for the ID.
pub(super) fn identity(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    // The confined process may write files only in this folder.
    let folder = ["--migrate-dir", "/tmp"].map(str::to_owned).to_vec();
    let guest = Guest { devices: folder, ..Guest::usual() };
    let original = rig.boot(&guest)?;
    ready(&original)?;
    original.shell("cat /sys/bus/acpi/devices/VMGENCTR:00/path", "\\_SB_.VGEN")?;
    let before = identity_of(&original)?;
    ensure!(before.events == 0, "its kernel received an event about a new ID before the copy: {before:?}");
    let file = format!("file:/tmp/lab-{}-copy", std::process::id());
    original.command(&["migrate", &file, "--keep-running"])?;
    let name = rig.name("copy");
    let copy = Vm::restored(&rig.local, &rig.boot, &guest, &rig.lab.folder, &name, &file)?;
    copy.shell("echo kept-$kept", "kept-42")?;
    let after = identity_of(&copy)?;
    ensure!(after.id != before.id, "the copy has its original's ID: {after:?}");
    ensure!(after.events == 1, "its kernel did not receive the event about its new ID: {after:?}");
    ensure!(identity_of(&original)? == before, "the original has changed: it was {before:?}");
    rig.power_off(&copy)?;
    rig.power_off(&original)?;
    Ok(Verdict::Passed)
}

/// Reads the identity by the guest's shell. The ID is at the address in ACPI's `ADDR`, which the
/// kernel lets root read.
fn identity_of(vm: &Vm) -> Result<Identity> {
    vm.skip()?;
    vm.enter(
        "echo id-$(devmem 0xfe010 64)-$(devmem 0xfe018 64)-$(awk '/ 7-edge +ACPI:Ged/ {print $2}' /proc/interrupts)",
    )?;
    let answer =
        vm.wait("the guest's ID", seconds(60), |line| line.trim().strip_prefix("id-").map(str::to_owned))?;
    let (id, events) = answer.rsplit_once('-').context("no count of events")?;
    let events = events.parse().with_context(|| format!("'{answer}' has no count of events"))?;
    Ok(Identity { id: id.to_owned(), events })
}
