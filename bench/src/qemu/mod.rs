//! Migrations of the bare-metal guest with QEMU, for comparison with vmferry.
//!
//! Two QEMU processes on this host run the same guest image as `-kernel`, and migrate it over
//! loopback TCP. Times, bytes and downtime come from QEMU (`query-migrate`). The guest's speed
//! comes from the guest's serial line. Processor time comes from the kernel.

mod balloon;
mod cpr;
mod density;
mod error;
mod machine;
mod postcopy;
mod qmp;
mod serial;
mod snapshot;
mod stalls;
mod timeline;

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cpu::CpuMeter;
use crate::host::kvm_usable;
use crate::link::Link;
use crate::reaper;
use crate::result::MigrationResult;
use crate::warm::Warm;
use machine::{Machine, Setup};
use serial::Serial;

pub use balloon::{Balloon, inflate, move_freed};
pub use cpr::{Upgrade, upgrade};
pub(crate) use density::start_guest;
pub use error::QemuError;
pub use postcopy::postcopy;
pub use snapshot::snapshot;
pub use stalls::stalls;

/// Longest time from power-on until the guest has filled its memory.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// Longest time of a migration.
const MIGRATION_LIMIT: Duration = Duration::from_secs(120);

/// Longest time until the guest reports from the target.
const AFTER_LIMIT: Duration = Duration::from_secs(10);

/// Interval at which a migration is polled. It is short enough for the resolution and long enough
/// to cost nothing.
const POLL: Duration = Duration::from_millis(10);

/// Longest downtime limit that QEMU accepts (qapi/migration.json: 2000 s). Any downtime is below
/// it.
const ANY_DOWNTIME_MS: u64 = 2_000_000;

/// Bandwidth limit above that of any link. QEMU's default is 128 MiB/s.
const UNLIMITED_BYTES_PER_S: u64 = 1 << 40;

/// Connections of a migration by QEMU, and the encoding of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// One connection.
    Single,
    /// One connection with the capability `xbzrle`: pages that were written again are sent as
    /// differences.
    Xbzrle {
        /// QEMU's `xbzrle-cache-size` in bytes, a power of two.
        cache: u64,
    },
    /// Several connections, with the capability `multifd`.
    Multifd {
        /// Number of channels.
        channels: u32,
        /// Compression of the pages, at QEMU's default level.
        compression: Compression,
    },
}

impl Stream {
    /// Returns the stream without an encoding: multifd with this number of channels, or a single
    /// connection for `None`.
    pub(crate) fn plain(multifd: Option<u32>) -> Self {
        let plain = |channels| Self::Multifd { channels, compression: Compression::None };
        multifd.map_or(Self::Single, plain)
    }
}

/// QEMU's `multifd-compression`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Pages are sent as they are.
    None,
    /// zlib, at level 1.
    Zlib,
    /// Zstandard, at level 1.
    Zstd,
}

impl Compression {
    /// Returns QEMU's name.
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// Specification of the machine and the migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuSpec {
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Workload, as on the guest's command line.
    pub workload: String,
    /// File that is loaded into the guest's memory. The guest does not change it.
    pub initrd: Option<PathBuf>,
    /// Connections that carry the pages, and their encoding.
    pub stream: Stream,
    /// Number of entries of the dirty ring. `None` means the dirty log.
    pub dirty_ring: Option<u32>,
    /// QEMU's `downtime-limit`.
    pub downtime_limit: Duration,
    /// QEMU's `max-bandwidth` in bytes per second. `None` means no limit.
    pub max_bandwidth: Option<u64>,
    /// True if QEMU's auto-converge throttles the vCPUs, step by step.
    pub auto_converge: bool,
    /// Time after which any downtime is accepted. `None` means never.
    pub switch_after: Option<Duration>,
    /// Time for which the guest runs before it is migrated. Its speed before is measured in this
    /// time.
    pub warm_up: Duration,
    /// Interval at which [`stalls`] reads the guest during the migration. Each read takes processor
    /// time of the source.
    pub observe: Duration,
    /// Time for which the guest is observed after the migration.
    pub after: Duration,
    /// Balloon of a microvm, whose guest is migrated after it has freed what it allocates. `None`
    /// means a PC without a balloon.
    pub balloon: Option<Balloon>,
    /// True if the target allocates its memory at its start.
    pub prealloc: bool,
    /// True if the target's memory is a memfd, which the kernel maps with pages of 4 KiB unless
    /// huge pages for shared memory are on. QEMU has no other option for such pages.
    pub small_pages: bool,
    /// True if free memory of the host is not touched before the migration.
    pub given_back: bool,
    /// True if the memory of both processes can be mapped by other processes, for [`upgrade`].
    pub upgrade: bool,
}

impl Default for QemuSpec {
    /// Returns one idle vCPU with 512 MiB, a single stream, the dirty log, and QEMU's default
    /// downtime limit.
    fn default() -> Self {
        QemuSpec {
            memory: 512 << 20,
            vcpus: 1,
            workload: "idle".into(),
            initrd: None,
            stream: Stream::Single,
            dirty_ring: None,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            auto_converge: false,
            switch_after: None,
            warm_up: Duration::from_secs(1),
            observe: crate::stalls::POLL,
            after: Duration::from_millis(400),
            balloon: None,
            prealloc: false,
            small_pages: false,
            given_back: false,
            upgrade: false,
        }
    }
}

/// Boots the guest, lets it run, migrates it once, checks that it continues, and ends both
/// processes.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure, including a guest that lost a page.
pub fn migrate(spec: &QemuSpec) -> Result<MigrationResult, QemuError> {
    watch(spec).map(|(result, _)| result)
}

/// Creates a folder for the sockets of QEMU, with the file of the measuring guest. Returns both.
fn guest_folder() -> Result<(TempDir, PathBuf), QemuError> {
    let folder = tempfile::Builder::new()
        .prefix("vmferry-bench-")
        .tempdir()
        .map_err(QemuError::io("create a folder for its sockets"))?;
    let kernel = folder.path().join("guest.elf");
    fs::write(&kernel, vmferry_guest_image::ELF).map_err(QemuError::io("write the guest's file"))?;
    Ok((folder, kernel))
}

/// Does the same as [`migrate`], and also returns the guest's writes over time. Time 0 is the
/// command to migrate.
///
/// # Errors
///
/// Fails in the same cases as [`migrate`].
pub fn watch(spec: &QemuSpec) -> Result<(MigrationResult, reaper::Timeline), QemuError> {
    available()?;
    let (folder, kernel) = guest_folder()?;
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
    let warm = (!spec.given_back).then(|| Warm::hold(spec.memory));
    pair.let_run(spec.warm_up)?;
    drop(warm);
    let result = pair.migrate(spec)?;
    pair.source.quit();
    pair.destination.quit();
    Ok(result)
}

/// Checks that QEMU can run guests on this host.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if KVM or QEMU is missing.
pub fn available() -> Result<(), QemuError> {
    kvm_usable().map_err(|why| QemuError::Unavailable(format!("no KVM: {why}")))?;
    if crate::host::qemu_version().is_none() {
        return Err(QemuError::Unavailable(format!("{} is not installed", crate::host::QEMU)));
    }
    Ok(())
}

/// Returns a word of a copy of guest memory. Words beyond its end, which belong to vCPUs that do
/// not exist, are 0.
fn word_of(bytes: &[u8], word: usize) -> u64 {
    let word = bytes.get(word * 8..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Source and target, and the serial line, which moves from one to the other with the guest.
#[derive(Debug)]
struct Pair {
    source: Machine,
    destination: Machine,
    serial: Serial,
}

impl Pair {
    /// Waits until the guest has filled its memory and each vCPU has reported once afterwards. A
    /// report covers the time since the one before, so the speed is known from then on.
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

    /// Waits until the guest has finished a round of allocations.
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

    /// Reads the guest's output. Fails if the guest reports damage or a process has ended.
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
        configure([&mut self.source, &mut self.destination], spec)?;
        let uri = listen(&mut self.destination, Ipv4Addr::LOCALHOST)?;
        let warmed_up = Instant::now();
        let (source_cpu, destination_cpu) = (self.source.cpu_meter()?, self.destination.cpu_meter()?);
        let start = Instant::now();
        self.source.execute("migrate", json!({ "uri": uri }))?;
        let info = self.wait_until_complete(start, spec.switch_after)?;
        let end = Instant::now();
        let (cpu_source, cpu_destination) = (used(&source_cpu)?, used(&destination_cpu)?);
        self.check_guest_continues(end, spec.after)?;

        let timeline = self.serial.timeline();
        let after = Instant::now();
        let result = MigrationResult {
            cpu_source,
            cpu_destination,
            writes_before: timeline.writes_per_s(warmed_up - spec.warm_up, warmed_up),
            writes_during: timeline.writes_per_s(start, end),
            writes_after: timeline.writes_per_s(end, end + spec.after),
            stall_max: timeline.stall_max(start, after),
            ..from_info(&info)?
        };
        Ok((result, timeline.since(start)))
    }

    /// Waits for the end of the migration, and returns QEMU's account of it.
    fn wait_until_complete(
        &mut self,
        start: Instant,
        mut switch_after: Option<Duration>,
    ) -> Result<Value, QemuError> {
        loop {
            if let Some(info) = completed(&mut self.source, &self.destination)? {
                return Ok(info);
            }
            if start.elapsed() > MIGRATION_LIMIT {
                return Err(self.late("source", "the end of the migration", MIGRATION_LIMIT));
            }
            if switch_after.take_if(|limit| start.elapsed() > *limit).is_some() {
                let any = json!({ "downtime-limit": ANY_DOWNTIME_MS });
                self.source.execute("migrate-set-parameters", any)?;
            }
            self.look()?;
            std::thread::sleep(POLL);
        }
    }

    /// Checks that the guest runs on the target, reports from there, and has found no damage.
    fn check_guest_continues(&mut self, end: Instant, after: Duration) -> Result<(), QemuError> {
        let deadline = end + AFTER_LIMIT;
        while !self.look()?.timeline().reaches(end + after) {
            if Instant::now() > deadline {
                return Err(self.late("destination", "a report of the guest", AFTER_LIMIT));
            }
            std::thread::sleep(POLL);
        }
        if !self.destination.query("query-status", "running", |answer| answer.get("running")?.as_bool())? {
            return Err(self.late("destination", "the running guest", AFTER_LIMIT));
        }
        Ok(())
    }
}

/// Sets the capabilities and parameters of a precopy migration at both ends.
fn configure(machines: [&mut Machine; 2], spec: &QemuSpec) -> Result<(), QemuError> {
    let (capabilities, parameters) = settings(spec);
    for machine in machines {
        machine.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        machine.execute("migrate-set-parameters", parameters.clone())?;
    }
    Ok(())
}

/// Returns the capabilities and the parameters of a migration (QEMU, qapi/migration.json).
fn settings(spec: &QemuSpec) -> (Value, Value) {
    let capabilities = json!([
        { "capability": "multifd", "state": matches!(spec.stream, Stream::Multifd { .. }) },
        { "capability": "xbzrle", "state": matches!(spec.stream, Stream::Xbzrle { .. }) },
        { "capability": "auto-converge", "state": spec.auto_converge },
    ]);
    let mut parameters = json!({
        "max-bandwidth": spec.max_bandwidth.unwrap_or(UNLIMITED_BYTES_PER_S),
        "downtime-limit": u64::try_from(spec.downtime_limit.as_millis()).unwrap_or(u64::MAX),
    });
    match spec.stream {
        Stream::Single => {}
        Stream::Xbzrle { cache } => parameters["xbzrle-cache-size"] = cache.into(),
        Stream::Multifd { channels, compression } => {
            parameters["multifd-channels"] = channels.into();
            parameters["multifd-compression"] = compression.name().into();
        }
    }
    (capabilities, parameters)
}

/// Makes the target listen on a free port of `address`, and returns its URI.
fn listen(destination: &mut Machine, address: Ipv4Addr) -> Result<String, QemuError> {
    destination.execute("migrate-incoming", json!({ "uri": format!("tcp:{address}:0") }))?;
    let port = destination.query("query-migrate", "socket-address", |answer| {
        Some(answer.get("socket-address")?.get(0)?.get("port")?.as_str()?.to_owned())
    })?;
    Ok(format!("tcp:{address}:{port}"))
}

/// Returns QEMU's account of the migration, or `None` while the migration runs.
///
/// # Errors
///
/// Fails if the migration has ended without success, or is interrupted.
fn completed(source: &mut Machine, destination: &Machine) -> Result<Option<Value>, QemuError> {
    let (status, info) = source.query("query-migrate", "status", |answer| {
        Some((answer.get("status")?.as_str()?.to_owned(), answer.clone()))
    })?;
    match status.as_str() {
        "completed" => Ok(Some(info)),
        "failed" | "cancelled" | "cancelling" | "postcopy-paused" => {
            let words = info.get("error-desc").and_then(Value::as_str).unwrap_or("without a reason");
            let detail = format!(
                "{words}; source: {}; destination: {}",
                source.last_words(),
                destination.last_words()
            );
            Err(QemuError::Migration { status, detail })
        }
        _ => Ok(None),
    }
}

/// Returns the processor time that `meter` has measured.
fn used(meter: &CpuMeter) -> Result<Duration, QemuError> {
    meter.used().map_err(QemuError::io("read its CPU time"))
}

/// Returns the figures of a completed migration from `query-migrate` (QEMU, qapi/migration.json:
/// times in milliseconds).
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
        // Only a migration with XBZRLE has this object.
        delta_pages: info.get("xbzrle-cache").and_then(|cache| cache.get("pages")?.as_u64()),
        ..MigrationResult::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::{Need, skip};

    #[test]
    fn query_migrate_answer_is_parsed() {
        let info = json!({"status": "completed", "total-time": 502, "downtime": 40, "setup-time": 3,
            "ram": {"normal-bytes": 4096, "transferred": 5000, "dirty-sync-count": 3, "duplicate": 7}});
        let result = from_info(&info).unwrap();
        assert_eq!((result.total, result.downtime), (Duration::from_millis(502), Duration::from_millis(40)));
        assert_eq!((result.data_bytes, result.wire_bytes, result.passes), (4096, Some(5000), Some(3)));
        let error = from_info(&json!({"total-time": 1, "ram": {}})).unwrap_err().to_string();
        assert!(error.contains("downtime") && error.contains("total-time"), "{error}");
    }

    #[test]
    fn settings_follow_the_stream() {
        let of = |stream| settings(&QemuSpec { stream, ..QemuSpec::default() });
        let on = |capabilities: &Value, name: &str| {
            let all = capabilities.as_array().unwrap();
            all.iter().find(|own| own["capability"] == name).unwrap()["state"] == true
        };
        let (capabilities, parameters) = of(Stream::Single);
        assert!(!on(&capabilities, "multifd") && !on(&capabilities, "xbzrle"), "{capabilities}");
        assert!(parameters.get("multifd-channels").is_none(), "{parameters}");
        let (capabilities, parameters) = of(Stream::Xbzrle { cache: 64 << 20 });
        assert!(!on(&capabilities, "multifd") && on(&capabilities, "xbzrle"), "{capabilities}");
        assert_eq!(parameters["xbzrle-cache-size"], 64 << 20);
        let (capabilities, parameters) = of(Stream::Multifd { channels: 2, compression: Compression::Zstd });
        assert!(on(&capabilities, "multifd") && !on(&capabilities, "xbzrle"), "{capabilities}");
        let multifd = [&parameters["multifd-channels"], &parameters["multifd-compression"]];
        assert_eq!(multifd, [&json!(2), &json!("zstd")]);
    }

    /// Skips the calling test if QEMU or KVM cannot be used on this host.
    pub(super) fn is_skipped() -> bool {
        let need = if kvm_usable().is_err() { Need::Kvm } else { Need::Qemu };
        available().map_err(|why| skip(need, why)).is_err()
    }

    /// Runs a whole migration of a small guest. Skipped without QEMU or KVM.
    #[test]
    fn loaded_guest_moves_with_multifd() {
        if is_skipped() {
            return;
        }
        let spec = QemuSpec {
            memory: 128 << 20,
            workload: "uniform,ws=16M,rate=20k,fill=random".into(),
            stream: Stream::plain(Some(2)),
            warm_up: Duration::from_millis(500),
            ..QemuSpec::default()
        };
        let result = migrate(&spec).unwrap();
        assert!(result.data_bytes >= 16 << 20, "{result:?}");
        assert!(result.downtime <= result.total, "{result:?}");
        assert!(result.writes_before.unwrap() > 0.0 && result.writes_after.unwrap() > 0.0, "{result:?}");
    }
}
