//! Guests under QEMU that allocate, touch and free memory, for comparison with vmferry's guests.
//!
//! The guest's statistics are read with `pmemsave`, as in [`postcopy`](mod@super::postcopy).
//! Therefore both VMMs' guests are measured by the same counters, and no report goes over the
//! serial line.

use std::fmt;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use serde_json::json;
use tempfile::TempDir;
use vmferry_guest_abi::{
    AllocSnapshot, GuestArgs, STATS_BYTES, STATS_GPA, StatsError, StatsSink, StatsSnapshot, alloc_stats_bytes,
};

use super::balloon::Balloon;
use super::machine::{Machine, Setup};
use super::{QemuError, QemuSpec, available, word_of};
use crate::density::{Budget, Guest, GuestSpec, OurError, ReportMode, Started, Told, resident};
use crate::link::Link;

/// Starts the guest of `spec` in a microvm, within `budget` if there is one.
///
/// QEMU takes back reported pages (`free-page-reporting=on`) if the guest reports any.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure.
pub(crate) fn start_guest(
    spec: &GuestSpec,
    budget: Option<&Budget>,
    tsc_khz: Option<u32>,
) -> Result<Started, QemuError> {
    available()?;
    let (folder, kernel) = super::guest_folder()?;
    let line = format!("workload={} {}", spec.workload(), spec.args());
    let args: GuestArgs = line.parse().map_err(|e| QemuError::Usage(format!("{line}: {e}")))?;
    let args = GuestArgs { stats: StatsSink::Page, cpus: Some(spec.vcpus), tsc_khz, ..args };
    let reporting = spec.report.mode != ReportMode::Off;
    let balloon = Some(Balloon { hints: false, reporting, guest_args: String::new() });
    let machine = QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload(),
        balloon,
        ..QemuSpec::default()
    };
    let setup = Setup {
        folder: folder.path(),
        kernel: &kernel,
        cmdline: &args.to_string(),
        spec: &machine,
        link: &Link::Loopback,
    };
    let kills = || budget.and_then(|budget| budget.kills().ok()).unwrap_or(0);
    let before = kills();
    match Machine::start_within("source", false, setup, budget) {
        Ok(machine) => {
            let page = folder.path().join("statistics");
            Ok(Started::Runs(Box::new(QemuGuest { machine, page, vcpus: spec.vcpus, _folder: folder })))
        }
        // The kernel killed this process or another one of the budget while this one started.
        Err(_) if kills() > before => Ok(Started::Killed),
        Err(error) => Err(error),
    }
}

/// Running QEMU process, and the file through which its guest's statistics are read.
struct QemuGuest {
    machine: Machine,
    page: PathBuf,
    vcpus: u32,
    // Dropped last: the machine's sockets are in it.
    _folder: TempDir,
}

impl fmt::Debug for QemuGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QemuGuest({})", self.machine.id())
    }
}

impl QemuGuest {
    /// Reads the two pages of statistics, which follow each other.
    fn statistics(&mut self) -> Result<Vec<u8>, QemuError> {
        let Some(name) = self.page.to_str() else {
            return Err(QemuError::Usage("the folder for temporary files has no name in UTF-8".into()));
        };
        let size = STATS_BYTES + alloc_stats_bytes(self.vcpus.into());
        self.machine.execute("pmemsave", json!({ "val": STATS_GPA, "size": size, "filename": name }))?;
        let bytes = fs::read(&self.page).map_err(QemuError::io("read the guest's statistics"))?;
        // The pages of the file count as memory of the process that wrote them.
        fs::remove_file(&self.page).map_err(QemuError::io("remove the guest's statistics"))?;
        Ok(bytes)
    }
}

impl Guest for QemuGuest {
    fn killed(&mut self) -> Result<bool, OurError> {
        match self.machine.ended().map_err(failed)? {
            None => Ok(false),
            Some(status) if status.signal() == Some(libc::SIGKILL) => Ok(true),
            Some(_) => Err(failed(QemuError::Ended { side: "source", detail: self.machine.last_words() })),
        }
    }

    fn told(&mut self) -> Result<Option<Told>, OurError> {
        told(&self.statistics().map_err(failed)?).map_err(failed)
    }

    fn resident(&mut self) -> Result<u64, OurError> {
        resident(self.machine.id()).map_err(|error| failed(QemuError::io("read its resident memory")(error)))
    }
}

/// Returns the guest's allocator statistics from a copy of both pages. Returns `None` if there are
/// none yet or the guest was writing them.
fn told(bytes: &[u8]) -> Result<Option<Told>, QemuError> {
    let alloc = bytes.get(usize::try_from(STATS_BYTES).unwrap_or(usize::MAX)..).unwrap_or_default();
    let pages =
        (StatsSnapshot::read(|word| word_of(bytes, word)), AllocSnapshot::read(|word| word_of(alloc, word)));
    match pages {
        // QEMU does not report how much of the memory it dropped, or the time for this.
        (Ok(stats), Ok(alloc)) => Ok(Some(Told::of(&alloc, stats.corrupt()))),
        (Err(StatsError::NotYet | StatsError::Busy { .. }), _)
        | (_, Err(StatsError::NotYet | StatsError::Busy { .. })) => Ok(None),
        (Err(error), _) | (_, Err(error)) => Err(QemuError::Guest(error.to_string())),
    }
}

fn failed(error: QemuError) -> OurError {
    match error {
        QemuError::Unavailable(why) => OurError::Unavailable(why),
        error => OurError::Failed(Box::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::is_skipped;
    use super::*;
    use crate::density::{Vmm, Way};
    use std::time::{Duration, Instant};

    /// Boots a guest with two vCPUs that reports what it frees. Skipped without QEMU or KVM.
    #[test]
    fn reported_memory_leaves_qemu() {
        if is_skipped() {
            return;
        }
        let finished = |mode: ReportMode| {
            let report = Way { vmm: Vmm::Qemu, ..mode.into() };
            let alloc = 64 << 20;
            let spec = GuestSpec { memory: 256 << 20, vcpus: 2, alloc, rounds: 1, frag: 0, report };
            let tsc_khz =
                vmferry_vmm::Vm::new(vmferry_vmm::VmOptions::new(16 << 20, 1)).ok().map(|vm| vm.tsc_khz());
            let Started::Runs(mut guest) = start_guest(&spec, None, tsc_khz).unwrap() else {
                panic!("killed")
            };
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                assert!(!guest.killed().unwrap());
                let told = guest.told().unwrap();
                let all_reported = |told: &Told| mode == ReportMode::Off || told.unreported_pages == 0;
                if let Some(told) = told.filter(|told| told.done && all_reported(told)) {
                    assert_eq!((told.freed_bytes, told.corrupt), (alloc, 0), "{told:?}");
                    return (told, guest.resident().unwrap());
                }
                assert!(Instant::now() < deadline, "{told:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let ((off, kept), (on, left)) = (finished(ReportMode::Off), finished(ReportMode::Sync));
        assert_eq!(off.report_bytes, 0, "{off:?}");
        // One vCPU may allocate what the other has freed before it is reported, and the host may
        // make huge pages of what is left. Therefore not all of the 64 MiB count.
        assert!(on.report_bytes >= 32 << 20, "{on:?}");
        assert!(left + (32 << 20) < kept, "{left} bytes are resident with reports, and {kept} without");
    }
}
