//! State of the guest and its migration as JSON, as vmferry's own commands report it.

use super::{GuestPlace, RunContext};
use crate::speed::Sample;
use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use vmferry_engine::MigrationHandle;
use vmferry_engine::plan::Remedy;
use vmferry_guest_abi::{CpuSnapshot, StatsError, StatsSnapshot};

/// Longest wait for a vCPU that is writing its statistics. Writing takes nanoseconds if the vCPU
/// has a processor.
const PATIENCE: Duration = Duration::from_millis(200);

impl RunContext {
    pub(crate) fn status(&self) -> Value {
        let mut status = match self.latest() {
            (Some(report), _) => report,
            (None, Some(handle)) => self.under_way_so_far(&handle),
            (None, None) => match self.postcopy() {
                Some(postcopy) => serde_json::to_value(postcopy).unwrap_or_default(),
                None if self.arrival.undecided().is_some() => {
                    json!({ "state": "unknown", "outcome": null, "error": self.arrival.undecided() })
                }
                None => json!({ "state": null, "outcome": null }),
            },
        };
        status["vm"] = self.vm();
        // Reading it walks the page tables of the guest's memory, which takes 90 ms for each GiB of
        // small pages, and blocks every change of the address space meanwhile. A guest that moves
        // or arrives must not wait for that, and clients request the status of a migration all the
        // time.
        let moves = matches!(self.place(), GuestPlace::Awaited | GuestPlace::Moving);
        let overhead = self.probe.kvm().filter(|_| !moves).and_then(crate::overhead::kib);
        status["vm"]["overhead_kib"] = json!(overhead);
        status
    }

    /// Returns the document of a running migration: the members of the final report, and
    /// `progress`. Values that are not known yet are null.
    fn under_way_so_far(&self, handle: &MigrationHandle) -> Value {
        let mut status = serde_json::to_value(handle.report()).unwrap_or_default();
        let stopped =
            status["phases"].as_array().is_some_and(|all| all.iter().any(|one| one["phase"] == "switchover"));
        if !stopped {
            status["downtime_ms"] = Value::Null;
            let parts = status["downtime"].as_object_mut().into_iter().flatten();
            parts.for_each(|(_, part)| *part = Value::Null);
        }
        if status["passes"].as_array().is_none_or(Vec::is_empty) {
            status["setup_ms"] = Value::Null;
        }
        let stats = self.probe.stats().ok();
        status["guest"] = self.start().document(&status, stats.as_ref());
        let progress = handle.progress();
        status["progress"] = json!(progress);
        if let Some(verdict) = &progress.verdict {
            status["progress"]["verdict"]["help"] =
                verdict.help.iter().map(|remedy| in_options(*remedy)).collect();
        }
        status
    }

    /// Returns the statistics of the guest. A vCPU of a running guest may lose its processor while
    /// it writes them, so this method waits for it.
    fn stats(&self) -> Result<StatsSnapshot, StatsError> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.probe.stats() {
                Err(StatsError::Busy { .. })
                    if self.place() == GuestPlace::Running && Instant::now() < until =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                stats => return stats,
            }
        }
    }

    /// Returns each vCPU's clock and writes. The answer is small enough to be requested many times
    /// a second.
    pub(super) fn writes(&self) -> Result<Value> {
        let stats = self.stats().map_err(|error| anyhow!("{error}"))?;
        Ok(json!({ "vcpus": stats.cpus().iter().map(|cpu| [cpu.t_us, cpu.writes]).collect::<Vec<_>>() }))
    }

    /// Returns each vCPU's clock, writes and stalls.
    pub(super) fn stalls(&self) -> Result<Value> {
        let stats = self.stats().map_err(|error| anyhow!("{error}"))?;
        let vcpu = |cpu: &CpuSnapshot| {
            json!({
                "t_us": cpu.t_us,
                "writes": cpu.writes,
                "reports": cpu.reports,
                "windows": cpu.windows().collect::<Vec<_>>(),
                "hist": cpu.hist,
                "hist_sum_us": cpu.hist_sum_us,
            })
        };
        Ok(json!({ "corrupt": stats.corrupt(), "vcpus": stats.cpus().iter().map(vcpu).collect::<Vec<_>>() }))
    }

    fn vm(&self) -> Value {
        let place = self.place();
        let stats = match self.stats() {
            // The memory of an awaited guest is empty, which must not be reported as an idle guest.
            _ if place == GuestPlace::Awaited => {
                json!({ "state": null, "why": "the guest has not arrived yet" })
            }
            Ok(stats) => {
                let sample = Sample::of(&stats);
                json!({
                    "state": format!("{:?}", stats.state).to_lowercase(),
                    "t_us": sample.t_us,
                    "writes": sample.writes,
                    "writes_per_s": self.speed.recent(),
                    "corrupt": stats.corrupt(),
                    "first_corrupt": stats.first_corrupt().map(|c| format!("{c:?}")),
                    "stall_max_us": stats.cpus().iter().map(|cpu| cpu.stall_max_us).max(),
                    "verify_done": stats.cpus().iter().map(|cpu| cpu.verify_done).min(),
                    "checks": stats.cpus().iter().map(|cpu| cpu.checks).sum::<u64>(),
                })
            }
            Err(error) => json!({ "state": null, "why": error.to_string() }),
        };
        json!({
            "pid": std::process::id(),
            "kind": self.kind,
            "place": place,
            "confinement": self.confinement.get(),
            "incoming": self.incoming(),
            "received": self.received(),
            "restore": self.restore(),
            "prefetch": self.prefetch(),
            "guest": stats,
            "disks": self.probe.kvm().map(crate::disk::describe),
            "net": self.probe.kvm().map(crate::net::describe),
            "rings": self.probe.kvm().and_then(crate::rings::describe),
            "balloon": crate::balloon::describe(&self.probe),
        })
    }
}

/// Returns the text of a remedy, with the option of this command that applies it.
fn in_options(remedy: Remedy) -> Value {
    let option = match remedy {
        Remedy::LongerDowntime { .. } | Remedy::DowntimeAboveStop { .. } | Remedy::LessIo => {
            "--downtime-limit"
        }
        Remedy::Postcopy => "--mode",
        Remedy::SwitchNow => "vmferry switch",
        Remedy::Throttle { .. } => "--auto-converge",
        Remedy::Encode => "--codec auto --delta auto",
        _ => return remedy.to_string().into(),
    };
    format!("{remedy} (`{option}`)").into()
}
