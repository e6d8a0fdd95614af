//! Upgrades of QEMU: the guest continues in a new process of this host, without a copy of its
//! memory.
//!
//! QEMU calls the mode `cpr-transfer` (QEMU, docs/devel/migration/CPR.rst). The memory is a memfd,
//! whose descriptor the old process passes to the new one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::machine::{Machine, Setup};
use super::serial::Serial;
use super::{
    AFTER_LIMIT, MIGRATION_LIMIT, POLL, QemuError, QemuSpec, READY_LIMIT, available, completed, guest_folder,
    serial,
};
use crate::link::Link;

/// Times of an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upgrade {
    /// Time of the migration, as QEMU reports it in milliseconds.
    pub total: Duration,
    /// Downtime, as QEMU reports it in milliseconds.
    pub downtime: Duration,
    /// Time from the start of the new process until it waits for the guest.
    pub ready: Duration,
}

/// Boots the guest, lets it run, and upgrades it once.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure, including a guest that lost a page.
pub fn upgrade(spec: &QemuSpec) -> Result<Upgrade, QemuError> {
    available()?;
    let (folder, kernel) = guest_folder()?;
    let cmdline = serial::cmdline(spec)?;
    let spec = &QemuSpec { upgrade: true, ..spec.clone() };
    let setup =
        Setup { folder: folder.path(), kernel: &kernel, cmdline: &cmdline, spec, link: &Link::Loopback };
    let mut source = Machine::start("source", false, setup)?;
    let paths = ["source", "destination"].map(|side| Machine::serial_path(folder.path(), side));
    let mut serial = Serial::new(paths);
    wait(&mut source, &mut serial, ("the guest's READY", READY_LIMIT), Serial::is_ready)?;
    let warm = Instant::now() + spec.warm_up;
    let limit = spec.warm_up + READY_LIMIT;
    wait(&mut source, &mut serial, ("a report", limit), |serial| serial.timeline().reaches(warm))?;

    let [main, descriptors] = ["main", "cpr"].map(|name| folder.path().join(name));
    let channel = |kind: &str, path: &std::path::Path| json!({ "channel-type": kind, "addr": { "transport": "socket", "type": "unix", "path": path } });
    let channels = json!([channel("main", &main), channel("cpr", &descriptors)]);
    source.execute("migrate-set-parameters", json!({ "mode": "cpr-transfer" }))?;
    let (start, mut ready) = (Instant::now(), Duration::ZERO);
    let mut destination = Machine::succeed(setup, [&main, &descriptors], || {
        ready = start.elapsed();
        source.execute("migrate", json!({ "channels": channels })).map(drop)
    })?;
    let info = loop {
        if let Some(info) = completed(&mut source, &destination)? {
            break info;
        }
        if start.elapsed() > MIGRATION_LIMIT {
            return Err(late(&source, &serial, ("the end of the migration", MIGRATION_LIMIT)));
        }
        std::thread::sleep(POLL);
    };
    source.quit();
    let after = Instant::now() + spec.after;
    let limit = spec.after + AFTER_LIMIT;
    wait(&mut destination, &mut serial, ("a report", limit), |serial| serial.timeline().reaches(after))?;
    destination.quit();
    times(&info, ready)
}

/// Waits until the output of the guest on `machine` fulfils `done`.
fn wait(
    machine: &mut Machine,
    serial: &mut Serial,
    awaited: (&'static str, Duration),
    done: impl Fn(&Serial) -> bool,
) -> Result<(), QemuError> {
    let deadline = Instant::now() + awaited.1;
    loop {
        machine.still_runs()?;
        serial.read()?;
        if done(serial) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(late(machine, serial, awaited));
        }
        std::thread::sleep(POLL);
    }
}

fn late(machine: &Machine, serial: &Serial, (what, limit): (&'static str, Duration)) -> QemuError {
    let detail = format!("{}; {}", machine.last_words(), serial.last_words());
    QemuError::Timeout { side: machine.side(), what, limit, detail }
}

/// Returns the times in the answer to `query-migrate`.
fn times(info: &Value, ready: Duration) -> Result<Upgrade, QemuError> {
    let time = |missing: &'static str| {
        let ms = info.get(missing).and_then(Value::as_u64);
        ms.map(Duration::from_millis).ok_or_else(|| QemuError::Answer {
            side: "source",
            command: "query-migrate".into(),
            answer: info.to_string(),
            missing,
        })
    };
    Ok(Upgrade { total: time("total-time")?, downtime: time("downtime")?, ready })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::tests::is_skipped;

    #[test]
    fn answer_without_a_downtime_is_an_error() {
        let info = json!({ "total-time": 95, "downtime": 13 });
        let ms = Duration::from_millis;
        let expected = Upgrade { total: ms(95), downtime: ms(13), ready: ms(7) };
        assert_eq!(times(&info, ms(7)).unwrap(), expected);
        assert!(times(&json!({ "total-time": 95 }), ms(7)).unwrap_err().to_string().contains("downtime"));
    }

    /// Upgrades a small guest. Skipped without QEMU or KVM.
    #[test]
    fn loaded_guest_continues_in_a_new_process() {
        if is_skipped() {
            return;
        }
        let spec = QemuSpec {
            memory: 128 << 20,
            workload: "uniform,ws=16M,rate=20k,fill=random".into(),
            warm_up: Duration::from_millis(300),
            after: Duration::from_millis(300),
            ..QemuSpec::default()
        };
        let upgrade = upgrade(&spec).unwrap();
        assert!(upgrade.downtime <= upgrade.total, "{upgrade:?}");
    }
}
