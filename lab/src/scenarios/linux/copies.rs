//! A guest that is copied while it goes on.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, ensure};

/// What a guest's kernel knows of its identity.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    /// The VM generation ID, in hexadecimal.
    id: String,
    /// How often the event device has told of a new one.
    events: u64,
}

/// The copy has another VM generation ID than its original, and its kernel serves the event that says so. Whether the kernel then seeds its
/// random numbers anew is not looked at: Debian's cloud kernel has no driver for the ID.
pub(super) fn identity(lab: &mut Lab) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    // The process writes files nowhere else.
    let folder = ["--migrate-dir", "/tmp"].map(str::to_owned).to_vec();
    let guest = Guest { devices: folder, ..Guest::usual() };
    let original = rig.boot(&guest)?;
    ready(&original)?;
    original.shell("cat /sys/bus/acpi/devices/VMGENCTR:00/path", "\\_SB_.VGEN")?;
    let before = identity_of(&original)?;
    ensure!(before.events == 0, "its kernel heard of a new ID before it was copied: {before:?}");
    let file = format!("file:/tmp/lab-{}-copy", std::process::id());
    original.command(&["migrate", &file, "--keep-running"])?;
    let name = rig.name("copy");
    let copy = Vm::restored(&rig.here, &rig.boot, &guest, &rig.lab.folder, &name, &file)?;
    copy.shell("echo kept-$kept", "kept-42")?;
    let after = identity_of(&copy)?;
    ensure!(after.id != before.id, "the copy has its original's ID: {after:?}");
    ensure!(after.events == 1, "its kernel did not hear of its new ID: {after:?}");
    ensure!(identity_of(&original)? == before, "the original has changed: it was {before:?}");
    rig.power_off(&copy)?;
    rig.power_off(&original)?;
    Ok(Verdict::Passed)
}

/// Asks the guest's shell. The ID lies where ACPI's `ADDR` says, in memory that the kernel lets its root read.
fn identity_of(vm: &Vm) -> Result<Identity> {
    vm.skip()?;
    vm.enter(
        "echo id-$(devmem 0xfe010 64)-$(devmem 0xfe018 64)-$(awk '/ 7-edge +ACPI:Ged/ {print $2}' /proc/interrupts)",
    )?;
    let answer = vm.wait("the guest telling its ID", seconds(60), |line| {
        line.trim().strip_prefix("id-").map(str::to_owned)
    })?;
    let (id, events) = answer.rsplit_once('-').context("no count of events")?;
    let events = events.parse().with_context(|| format!("'{answer}' has no count of events"))?;
    Ok(Identity { id: id.to_owned(), events })
}
