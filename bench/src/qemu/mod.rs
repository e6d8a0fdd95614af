//! Migrates the bare-metal guest with QEMU: what vmferry is compared with.
//!
//! Two QEMU processes on this host, the guest's own file as `-kernel`, migration over loopback TCP. Times,
//! bytes and downtime are QEMU's (`query-migrate`); the guest's speed is what the guest says on its serial
//! line; processor time is the kernel's.

mod balloon;
mod error;
mod machine;
mod postcopy;
mod qmp;
mod serial;
mod timeline;

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::host::kvm_usable;
use crate::link::Link;
use crate::reaper;
use crate::result::MigrationResult;
use crate::warm::Warm;
use machine::{Machine, Setup};
use serial::Serial;

pub use balloon::{Balloon, inflate, move_freed};
pub use error::QemuError;
pub use postcopy::postcopy;

/// How long a guest may take from power-on until its memory is filled.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// How long a migration may take.
const MIGRATION_LIMIT: Duration = Duration::from_secs(120);

/// How long the guest may take to report from the destination.
const AFTER_LIMIT: Duration = Duration::from_secs(10);

/// Between two looks at a migration: often enough not to matter, seldom enough to cost nothing.
const POLL: Duration = Duration::from_millis(10);

/// The longest downtime that QEMU accepts (qapi/migration.json: 2000 s): any will do.
const ANY_DOWNTIME_MS: u64 = 2_000_000;

/// More than any link: QEMU's own default would be 128 MiB/s.
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// The machine and the migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuSpec {
    /// Guest memory in bytes.
    pub memory: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// The guest's workload, as on its command line.
    pub workload: String,
    /// multifd with so many channels. None: a single stream.
    pub multifd: Option<u32>,
    /// The dirty ring with so many entries. None: the dirty log.
    pub dirty_ring: Option<u32>,
    /// `downtime-limit`.
    pub downtime_limit: Duration,
    /// `max-bandwidth` in bytes a second. None: more than any link.
    pub max_bandwidth: Option<u64>,
    /// After so long, any downtime will do. None: never.
    pub switch_after: Option<Duration>,
    /// How long the guest runs before it is migrated; its speed before is taken from this time.
    pub settle: Duration,
    /// How much of the time after the migration is looked at.
    pub after: Duration,
    /// A microvm with a balloon, whose guest is moved when it has freed what it allocates. None: a PC without.
    pub balloon: Option<Balloon>,
}

impl Default for QemuSpec {
    /// One vCPU with 512 MiB, idle; a single stream, the dirty log, QEMU's own downtime limit.
    fn default() -> Self {
        QemuSpec {
            memory: 512 << 20,
            vcpus: 1,
            workload: "idle".into(),
            multifd: None,
            dirty_ring: None,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            switch_after: None,
            settle: Duration::from_secs(1),
            after: Duration::from_millis(400),
            balloon: None,
        }
    }
}

/// Boots the guest, lets it settle, migrates it once, sees that it goes on, and ends both processes.
///
/// # Errors
/// [`QemuError::Unavailable`] when QEMU or KVM cannot be used here: skip the case. Everything else is a
/// failure, a guest that lost a page among them.
pub fn migrate(spec: &QemuSpec) -> Result<MigrationResult, QemuError> {
    watch(spec).map(|(result, _)| result)
}

/// The same, with what the guest wrote when; 0 is the command to migrate.
///
/// # Errors
/// As [`migrate`].
pub fn watch(spec: &QemuSpec) -> Result<(MigrationResult, reaper::Timeline), QemuError> {
    available()?;
    let folder = tempfile::Builder::new()
        .prefix("vmferry-bench-")
        .tempdir()
        .map_err(QemuError::io("create a folder for its sockets"))?;
    let kernel = folder.path().join("guest.elf");
    fs::write(&kernel, vmferry_guest_image::ELF).map_err(QemuError::io("write the guest's file"))?;
    let cmdline = serial::cmdline(spec)?;
    let setup =
        Setup { folder: folder.path(), kernel: &kernel, cmdline: &cmdline, spec, link: &Link::Loopback };

    let mut pair = Pair {
        source: Machine::start("source", false, setup)?,
        destination: Machine::start("destination", true, setup)?,
        serial: Serial::new([
            Machine::serial_path(folder.path(), "source"),
            Machine::serial_path(folder.path(), "destination"),
        ]),
    };
    pair.wait_until_ready()?;
    if spec.balloon.is_some() {
        pair.wait_until_freed()?;
    }
    let warm = Warm::hold(spec.memory);
    pair.let_run(spec.settle)?;
    drop(warm);
    let result = pair.migrate(spec)?;
    pair.source.quit();
    pair.destination.quit();
    Ok(result)
}

/// Whether QEMU can run guests here: [`QemuError::Unavailable`] if not.
pub fn available() -> Result<(), QemuError> {
    kvm_usable().map_err(|why| QemuError::Unavailable(format!("no KVM: {why}")))?;
    if crate::host::qemu_version().is_none() {
        return Err(QemuError::Unavailable(format!("{} is not installed", crate::host::QEMU)));
    }
    Ok(())
}

/// Source, destination, and the serial line that goes from one to the other with the guest.
#[derive(Debug)]
struct Pair {
    source: Machine,
    destination: Machine,
    serial: Serial,
}

impl Pair {
    /// Waits until the guest has filled its memory and each vCPU has reported once since: a report says
    /// what was done since the one before, so speed is known from then on.
    fn wait_until_ready(&mut self) -> Result<(), QemuError> {
        let deadline = Instant::now() + READY_LIMIT;
        let mut ready_at = None;
        loop {
            let serial = self.look()?;
            if serial.is_ready() {
                let since = *ready_at.get_or_insert_with(Instant::now);
                if serial.timeline().reaches(since) {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                return Err(self.late("source", "the guest's READY and first report", READY_LIMIT));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until the guest has done a round of allocations.
    fn wait_until_freed(&mut self) -> Result<(), QemuError> {
        let deadline = Instant::now() + READY_LIMIT;
        while self.look()?.rounds() == 0 {
            if Instant::now() > deadline {
                return Err(self.late("source", "the end of its allocations", READY_LIMIT));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn let_run(&mut self, span: Duration) -> Result<(), QemuError> {
        let end = Instant::now() + span;
        while Instant::now() < end {
            self.look()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Reads what the guest said, and fails when it reports damage or a process is gone.
    fn look(&mut self) -> Result<&Serial, QemuError> {
        self.source.still_runs()?;
        self.destination.still_runs()?;
        self.serial.read()?;
        Ok(&self.serial)
    }

    fn late(&self, side: &'static str, what: &'static str, limit: Duration) -> QemuError {
        let machine = if side == "source" { &self.source } else { &self.destination };
        let detail = format!("{}; {}", machine.last_words(), self.serial.last_words());
        QemuError::Timeout { side, what, limit, detail }
    }

    fn migrate(&mut self, spec: &QemuSpec) -> Result<(MigrationResult, reaper::Timeline), QemuError> {
        self.configure(spec)?;
        let uri = self.listen()?;
        let settled = Instant::now();
        let (source_cpu, destination_cpu) = (self.source.cpu_meter()?, self.destination.cpu_meter()?);
        let start = Instant::now();
        self.source.execute("migrate", json!({ "uri": uri }))?;
        let info = self.wait_until_complete(start, spec.switch_after)?;
        let end = Instant::now();
        let used = |meter: crate::cpu::CpuMeter| meter.used().map_err(QemuError::io("read its CPU time"));
        let (cpu_source, cpu_destination) = (used(source_cpu)?, used(destination_cpu)?);
        self.see_that_it_goes_on(end, spec.after)?;

        let timeline = self.serial.timeline();
        let after = Instant::now();
        let result = MigrationResult {
            cpu_source,
            cpu_destination,
            writes_before: timeline.writes_per_s(settled - spec.settle, settled),
            writes_during: timeline.writes_per_s(start, end),
            writes_after: timeline.writes_per_s(end, end + spec.after),
            stall_max: timeline.stall_max(start, after),
            ..from_info(&info)?
        };
        Ok((result, timeline.since(start)))
    }

    fn configure(&mut self, spec: &QemuSpec) -> Result<(), QemuError> {
        let capabilities = json!({
            "capabilities": [{ "capability": "multifd", "state": spec.multifd.is_some() }]
        });
        let mut parameters = json!({
            "max-bandwidth": spec.max_bandwidth.unwrap_or(UNLIMITED_BYTES_PER_S),
            "downtime-limit": u64::try_from(spec.downtime_limit.as_millis()).unwrap_or(u64::MAX),
        });
        if let Some(channels) = spec.multifd {
            parameters["multifd-channels"] = channels.into();
        }
        for machine in [&mut self.source, &mut self.destination] {
            machine.execute("migrate-set-capabilities", capabilities.clone())?;
            machine.execute("migrate-set-parameters", parameters.clone())?;
        }
        Ok(())
    }

    /// Lets the destination listen on a free port of loopback, and says where.
    fn listen(&mut self) -> Result<String, QemuError> {
        self.destination.execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" }))?;
        let port = self.destination.ask("query-migrate", "socket-address", |answer| {
            Some(answer.get("socket-address")?.get(0)?.get("port")?.as_str()?.to_owned())
        })?;
        Ok(format!("tcp:127.0.0.1:{port}"))
    }

    /// Waits for the end and gives QEMU's account of it.
    fn wait_until_complete(
        &mut self,
        start: Instant,
        mut switch_after: Option<Duration>,
    ) -> Result<Value, QemuError> {
        loop {
            let (status, info) = self.source.ask("query-migrate", "status", |answer| {
                Some((answer.get("status")?.as_str()?.to_owned(), answer.clone()))
            })?;
            match status.as_str() {
                "completed" => return Ok(info),
                "failed" | "cancelled" | "cancelling" => {
                    let words = info.get("error-desc").and_then(Value::as_str).unwrap_or("without a reason");
                    let detail = format!(
                        "{words}; source: {}; destination: {}",
                        self.source.last_words(),
                        self.destination.last_words()
                    );
                    return Err(QemuError::Migration { status, detail });
                }
                _ if start.elapsed() > MIGRATION_LIMIT => {
                    return Err(self.late("source", "the end of the migration", MIGRATION_LIMIT));
                }
                _ => {}
            }
            if switch_after.take_if(|limit| start.elapsed() > *limit).is_some() {
                let any = json!({ "downtime-limit": ANY_DOWNTIME_MS });
                self.source.execute("migrate-set-parameters", any)?;
            }
            self.look()?;
            std::thread::sleep(POLL);
        }
    }

    /// The guest must run on the destination, report from there, and have found no damage.
    fn see_that_it_goes_on(&mut self, end: Instant, after: Duration) -> Result<(), QemuError> {
        let deadline = end + AFTER_LIMIT;
        while !self.look()?.timeline().reaches(end + after) {
            if Instant::now() > deadline {
                return Err(self.late("destination", "a report of the guest", AFTER_LIMIT));
            }
            std::thread::sleep(POLL);
        }
        if !self.destination.ask("query-status", "running", |answer| answer.get("running")?.as_bool())? {
            return Err(self.late("destination", "the running guest", AFTER_LIMIT));
        }
        Ok(())
    }
}

/// What `query-migrate` says of a migration that is complete (QEMU, qapi/migration.json: times in milliseconds).
fn from_info(info: &Value) -> Result<MigrationResult, QemuError> {
    let number = |value: Option<&Value>, missing: &'static str| {
        value.and_then(Value::as_u64).ok_or_else(|| QemuError::Answer {
            side: "source",
            command: "query-migrate".into(),
            answer: info.to_string(),
            missing,
        })
    };
    let ram = info.get("ram");
    let of_ram = |name: &'static str| number(ram.and_then(|ram| ram.get(name)), name);
    Ok(MigrationResult {
        total: Duration::from_millis(number(info.get("total-time"), "total-time")?),
        downtime: Duration::from_millis(number(info.get("downtime"), "downtime")?),
        data_bytes: of_ram("normal-bytes")?,
        wire_bytes: Some(of_ram("transferred")?),
        passes: Some(of_ram("dirty-sync-count")?),
        ..MigrationResult::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::{Need, skip};

    #[test]
    fn qemus_account_is_read() {
        let info = json!({"status": "completed", "total-time": 502, "downtime": 40, "setup-time": 3,
            "ram": {"normal-bytes": 4096, "transferred": 5000, "dirty-sync-count": 3, "duplicate": 7}});
        let result = from_info(&info).unwrap();
        assert_eq!((result.total, result.downtime), (Duration::from_millis(502), Duration::from_millis(40)));
        assert_eq!((result.data_bytes, result.wire_bytes, result.passes), (4096, Some(5000), Some(3)));
        let error = from_info(&json!({"total-time": 1, "ram": {}})).unwrap_err().to_string();
        assert!(error.contains("downtime") && error.contains("total-time"), "{error}");
    }

    /// Skips the calling test if QEMU or KVM cannot be used here.
    pub(super) fn is_skipped() -> bool {
        let need = if kvm_usable().is_err() { Need::Kvm } else { Need::Qemu };
        available().map_err(|why| skip(need, why)).is_err()
    }

    /// The whole way with a small guest, where QEMU and KVM are there.
    #[test]
    fn a_loaded_guest_moves() {
        if is_skipped() {
            return;
        }
        let spec = QemuSpec {
            memory: 128 << 20,
            workload: "uniform,ws=16M,rate=20k,fill=random".into(),
            multifd: Some(2),
            settle: Duration::from_millis(500),
            ..QemuSpec::default()
        };
        let result = migrate(&spec).unwrap();
        assert!(result.data_bytes >= 16 << 20, "{result:?}");
        assert!(result.downtime <= result.total, "{result:?}");
        assert!(result.writes_before.unwrap() > 0.0 && result.writes_after.unwrap() > 0.0, "{result:?}");
    }
}
