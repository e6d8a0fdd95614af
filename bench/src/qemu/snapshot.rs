//! Snapshots of a running guest by QEMU (capability `background-snapshot`).

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::machine::{Machine, Setup};
use super::serial::{self, Serial};
use super::{
    AFTER_LIMIT, MIGRATION_LIMIT, POLL, QemuError, QemuSpec, READY_LIMIT, UNLIMITED_BYTES_PER_S, available,
    guest_folder,
};
use crate::link::Link;
use crate::snapshot::Run;

/// Guest that is not moved.
struct Guest {
    machine: Machine,
    serial: Serial,
}

impl Guest {
    /// Reads the guest's output. Fails if the guest reports damage or the process has ended.
    fn look(&mut self) -> Result<&Serial, QemuError> {
        self.machine.still_runs()?;
        self.serial.read()?;
        Ok(&self.serial)
    }

    /// Reads the guest's output until `done` returns true.
    fn until(
        &mut self,
        (what, limit): (&'static str, Duration),
        done: impl Fn(&Serial) -> bool,
    ) -> Result<(), QemuError> {
        let deadline = Instant::now() + limit;
        while !done(self.look()?) {
            if Instant::now() > deadline {
                let detail = format!("{}; {}", self.machine.last_words(), self.serial.last_words());
                return Err(QemuError::Timeout { side: "source", what, limit, detail });
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// Boots the guest, lets it run, writes one background snapshot of it to `file`, and checks that it
/// continues.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure.
pub fn snapshot(spec: &QemuSpec, file: &Path) -> Result<Run, QemuError> {
    available()?;
    let (folder, kernel) = guest_folder()?;
    let cmdline = serial::cmdline(spec)?;
    let setup =
        Setup { folder: folder.path(), kernel: &kernel, cmdline: &cmdline, spec, link: &Link::Loopback };
    let path = || Machine::serial_path(folder.path(), "source");
    // The guest stays in one process, so the second end of the line is never written.
    let ends = [path(), folder.path().join("none")];
    let mut guest = Guest { machine: Machine::start("source", false, setup)?, serial: Serial::new(ends) };
    guest.until(("the guest's READY", READY_LIMIT), Serial::is_ready)?;
    let ready = Instant::now();
    guest.until(("reports of the guest", READY_LIMIT), |serial| {
        serial.timeline().reaches(ready + spec.warm_up)
    })?;
    let capability = json!({ "capabilities": [{ "capability": "background-snapshot", "state": true }] });
    guest.machine.execute("migrate-set-capabilities", capability)?;
    guest.machine.execute("migrate-set-parameters", json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S }))?;
    let begin = Instant::now();
    let uri = format!("file:{}", file.display());
    guest.machine.execute("migrate", json!({ "uri": uri }))?;
    while !is_completed(&mut guest.machine)? {
        if begin.elapsed() > MIGRATION_LIMIT {
            let detail = guest.machine.last_words();
            let what = "the end of the snapshot";
            return Err(QemuError::Timeout { side: "source", what, limit: MIGRATION_LIMIT, detail });
        }
        guest.look()?;
        std::thread::sleep(POLL);
    }
    let end = Instant::now();
    guest.until(("a report of the guest", AFTER_LIMIT), |serial| serial.timeline().reaches(end))?;
    let (stop, resume) = (guest.machine.when("STOP"), guest.machine.when("RESUME"));
    let timeline = guest.serial.timeline();
    let run = Run {
        pause: stop.zip(resume).map(|(stop, resume)| resume.saturating_duration_since(stop)),
        total: end - begin,
        before: timeline.writes_per_s(begin - spec.warm_up, begin),
        during: timeline.writes_per_s(begin, end),
        stall_max: timeline.stall_max(begin, Instant::now()),
        bytes: std::fs::metadata(file).map_err(QemuError::io("find its file"))?.len(),
        waits: None,
    };
    guest.machine.quit();
    Ok(run)
}

/// Returns whether the snapshot is complete.
fn is_completed(machine: &mut Machine) -> Result<bool, QemuError> {
    let status = machine
        .query("query-migrate", "status", |answer| Some(answer.get("status")?.as_str()?.to_owned()))?;
    match status.as_str() {
        "completed" => Ok(true),
        "failed" | "cancelled" => Err(QemuError::Migration { status, detail: machine.last_words() }),
        _ => Ok(false),
    }
}
