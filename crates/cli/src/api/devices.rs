//! QMP commands for the guest and its devices.

use super::machine::Api;
use super::migration::refused;
use super::{GuestPlace, Order};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::UNIX_EPOCH;
use vmferry_control::{Answer, Arguments, ErrorClass, QmpError};
use vmferry_engine::MigrationState;
use vmferry_vmm::BalloonHandle;

/// Path of the balloon in QEMU's object tree, for a device with the id `balloon0`; and its short
/// name.
const BALLOON: [&str; 2] = ["/machine/peripheral/balloon0", "balloon0"];

/// Property of QEMU's balloon that offers free page reporting. QEMU fixes its value at the start;
/// vmferry can change the value while the guest runs.
const REPORTING: &str = "free-page-reporting";

/// Memory statistics of a guest: vmferry's names, which are those of the specification, and QMP's
/// names.
const STATS: [(&str, &str); 16] = [
    ("swap_in", "stat-swap-in"),
    ("swap_out", "stat-swap-out"),
    ("major_faults", "stat-major-faults"),
    ("minor_faults", "stat-minor-faults"),
    ("free", "stat-free-memory"),
    ("total", "stat-total-memory"),
    ("available", "stat-available-memory"),
    ("caches", "stat-disk-caches"),
    ("hugetlb_allocations", "stat-htlb-pgalloc"),
    ("hugetlb_failures", "stat-htlb-pgfail"),
    ("oom_kills", "stat-oom-kills"),
    ("allocation_stalls", "stat-alloc-stalls"),
    ("async_scans", "stat-async-scans"),
    ("direct_scans", "stat-direct-scans"),
    ("async_reclaims", "stat-async-reclaims"),
    ("direct_reclaims", "stat-direct-reclaims"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Balloon {
    value: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Property {
    path: String,
    property: String,
    value: Option<Value>,
}

impl Api {
    /// Executes `query-status`.
    pub(super) fn query_status(&self) -> Value {
        use MigrationState::{PostcopyPaused, Switchover, Unknown};
        let moving = self.0.under_way().map(|handle| handle.progress());
        // While its owner is unknown, the guest is stopped here.
        let undecided = moving.as_ref().is_some_and(|progress| {
            progress.state == Unknown || progress.state == PostcopyPaused && !progress.runs_on_target
        });
        let moving = moving.map(|progress| progress.state);
        let status = match (self.0.place(), moving) {
            (GuestPlace::Awaited, _) => "inmigrate",
            (GuestPlace::Moving, _) if undecided => "finish-migrate",
            (GuestPlace::Moving, Some(Switchover)) | (GuestPlace::Unknown, _) => "finish-migrate",
            (GuestPlace::Moving, Some(MigrationState::Postcopy | MigrationState::PostcopyPaused))
            | (GuestPlace::Moved, _) => "postmigrate",
            (GuestPlace::Paused, _) => "paused",
            (GuestPlace::Moving, _) if self.0.held() => "paused",
            (GuestPlace::Running | GuestPlace::Moving, _) => "running",
            (GuestPlace::Ended, _) => "shutdown",
        };
        json!({ "running": status == "running", "status": status })
    }

    /// Executes `stop`, also for a guest that is stopped.
    pub(super) fn stop(&self) -> Result<Answer, QmpError> {
        if self.0.place() != GuestPlace::Paused {
            self.0.order(Order::Pause).map_err(refused)?;
        }
        Ok(Answer::done())
    }

    /// Executes `cont`, also for a guest that runs.
    pub(super) fn cont(&self) -> Result<Answer, QmpError> {
        if self.0.place() != GuestPlace::Running {
            self.0.order(Order::Resume).map_err(refused)?;
        }
        Ok(Answer::done())
    }

    fn the_balloon(&self) -> Result<BalloonHandle, QmpError> {
        self.0.probe.balloon().ok_or_else(|| QmpError {
            class: ErrorClass::DeviceNotActive,
            desc: "No balloon device has been activated; KVM guests have one with --balloon on".to_owned(),
        })
    }

    /// Executes `balloon`, which sets the memory of the guest.
    pub(super) fn balloon(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Balloon { value } = arguments.read()?;
        let balloon = self.the_balloon()?;
        let target = value.min(balloon.status().memory);
        crate::balloon::answer(&self.0, &json!({ "target": target })).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes `query-balloon`.
    pub(super) fn query_balloon(&self) -> Result<Answer, QmpError> {
        Ok(json!({ "actual": self.the_balloon()?.actual() }).into())
    }

    /// Executes `qom-get`. The balloon's statistics and its switch for free page reporting are the
    /// only properties.
    pub(super) fn qom_get(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let wanted: Property = arguments.read()?;
        if wanted.value.is_some() {
            return Err(QmpError::generic("Parameter 'value' is unexpected"));
        }
        let balloon = self.object(&wanted)?;
        match &*wanted.property {
            "guest-stats" => Ok(guest_stats(&balloon).into()),
            "guest-stats-polling-interval" => Ok(json!(balloon.stats_interval()).into()),
            REPORTING => Ok(json!(balloon.status().reporting).into()),
            other => Err(no_property(other)),
        }
    }

    /// Executes `qom-set`. Only the interval of the balloon's statistics and free page reporting
    /// can be set.
    pub(super) fn qom_set(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let wanted: Property = arguments.read()?;
        let balloon = self.object(&wanted)?;
        match &*wanted.property {
            "guest-stats-polling-interval" => {
                let seconds =
                    wanted.value.as_ref().and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok());
                balloon.set_stats_interval(seconds.ok_or_else(|| {
                    QmpError::generic("guest-stats-polling-interval must be a number of seconds, 0 for never")
                })?);
                Ok(Answer::done())
            }
            REPORTING => {
                let on = wanted.value.as_ref().and_then(Value::as_bool);
                let on = on.ok_or_else(|| QmpError::generic(format!("{REPORTING} must be true or false")))?;
                crate::balloon::answer(&self.0, &json!({ "reporting": on })).map_err(refused)?;
                Ok(Answer::done())
            }
            "guest-stats" => {
                Err(QmpError::generic("Property 'virtio-balloon-device.guest-stats' is not writable"))
            }
            other => Err(no_property(other)),
        }
    }

    fn object(&self, wanted: &Property) -> Result<BalloonHandle, QmpError> {
        if BALLOON.contains(&&*wanted.path)
            && let Some(balloon) = self.0.probe.balloon()
        {
            return Ok(balloon);
        }
        let path: String = wanted.path.chars().take(120).collect();
        Err(QmpError { class: ErrorClass::DeviceNotFound, desc: format!("Device '{path}' not found") })
    }

    /// Executes `query-cpus-fast`.
    pub(super) fn query_cpus(&self) -> Value {
        let each = vcpu_threads().into_iter().map(|(index, thread)| {
            json!({
                "cpu-index": index,
                "qom-path": format!("/machine/unattached/device[{index}]"),
                "thread-id": thread,
                "target": "x86_64",
                "props": { "socket-id": 0, "core-id": index, "thread-id": 0 },
            })
        });
        each.collect()
    }

    /// Executes `query-kvm`.
    pub(super) fn query_kvm(&self) -> Value {
        let enabled = self.0.probe.kvm().is_some();
        json!({ "enabled": enabled, "present": enabled || std::path::Path::new("/dev/kvm").exists() })
    }
}

fn no_property(name: &str) -> QmpError {
    let name: String = name.chars().take(80).collect();
    QmpError::generic(format!("Property 'virtio-balloon-device.{name}' not found"))
}

/// Returns the last statistics of the guest and their time. QMP demands all ones for missing
/// values.
fn guest_stats(balloon: &BalloonHandle) -> Value {
    let status = balloon.status();
    let stat =
        |(own, name): &(&str, &str)| ((*name).to_owned(), json!(status.stats.get(own).unwrap_or(u64::MAX)));
    let at = status.stats_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    json!({
        "stats": STATS.iter().map(stat).collect::<Map<_, _>>(),
        "last-update": at.map_or(0, |at| at.as_secs()),
    })
}

/// Returns the vCPU threads of this process: vCPU index and thread id, sorted.
fn vcpu_threads() -> Vec<(u32, u32)> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let mut threads: Vec<_> = tasks
        .filter_map(|task| {
            let task = task.ok()?;
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            let index = name.trim_end().strip_prefix("vcpu")?.get(1..)?.parse().ok()?;
            Some((index, task.file_name().to_str()?.parse().ok()?))
        })
        .collect();
    threads.sort_unstable();
    threads
}
