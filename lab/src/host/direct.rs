//! Run of the scenarios on this host's own KVM.
//!
//! KVM does not report its capabilities completely: modules have various names, and a nested KVM
//! may lack any feature. Therefore a Linux guest is booted to find out.

use super::Whole;
use super::machine::LEASH;
use super::run::{Watch, under_way};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmferry_lab::plan::Plan;
use vmferry_lab::record::{self, Record};

/// Longest time of a guest's boot. On a KVM with all features it takes two seconds.
const PATIENCE: Duration = Duration::from_secs(8);
const TICK: Duration = Duration::from_millis(100);

/// Returns the plan with the paths of this host.
pub(crate) fn plan(scenarios: Vec<String>, share: &Path, whole: &Whole) -> Plan {
    let inside = |name: &str| share.join("in").join(name);
    Plan {
        scenarios,
        results: share.join("results"),
        vmferry: inside("vmferry"),
        kernel: inside("kernel"),
        kernel_lacks: whole.guest.reporting_lacks(),
        poisoning: whole.poisoning(&share.join("in")),
        vmlinux: inside("vmlinux"),
        initrd: inside("initrd"),
        disk: Some(inside("disk.img")),
        slow_disk: None,
        fsck: Some(inside("e2fsck")),
        peer: None,
        emulated: false,
    }
}

/// Returns the reason why this host's KVM cannot be used, or `None` if a Linux guest boots on it.
pub(crate) fn lacks(plan: &Plan, folder: &Path) -> Result<Option<String>> {
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Ok(Some(format!("/dev/kvm: {error}")));
    }
    let (serial, errors) = (folder.join("probe.log"), folder.join("probe-errors.log"));
    let mut command = leashed(&plan.vmferry)?;
    command.args(["run", "--memory", "192M", "--cpus", "1", "--cmdline", "console=ttyS0 quiet", "--kernel"]);
    command.arg(&plan.kernel).arg("--initrd").arg(&plan.initrd).arg("--serial").arg(&serial);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&errors)?);
    let mut guest = Ended(command.spawn().context("cannot start vmferry")?);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = std::fs::read(&serial).unwrap_or_default();
        if String::from_utf8_lossy(&said).contains("LAB-GUEST-UP") {
            return Ok(None);
        }
        if let Some(status) = guest.0.try_wait()? {
            let why = std::fs::read_to_string(&errors).unwrap_or_default();
            return Ok(Some(format!("it cannot boot a Linux guest ({status}): {}", why.trim())));
        }
        if Instant::now() > deadline {
            return Ok(Some(format!("it cannot boot a Linux guest within {} s", PATIENCE.as_secs())));
        }
        std::thread::sleep(TICK);
    }
}

/// Runs the plan in the file `path` on this host.
pub(crate) fn run(agent: &Path, path: &Path, plan: &Plan, folder: &Path) -> Result<Vec<Record>> {
    let mut command = leashed(agent)?;
    command.arg("run").arg(path).stdin(Stdio::null());
    command.stdout(std::fs::File::create(folder.join("agent.log"))?);
    let mut agent = Ended(command.spawn().context("cannot start lab-agent")?);
    let mut watch = Watch::new(plan.results.clone(), Instant::now())?;
    while agent.0.try_wait()?.is_none() {
        watch.look()?;
        std::thread::sleep(TICK);
    }
    watch.look()?;
    let mut records = record::read(&plan.results)?;
    records.extend(under_way(&plan.results, &records));
    Ok(records)
}

/// Returns a command that ends with this process, however this process ends.
fn leashed(program: &Path) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([LEASH, &std::process::id().to_string()]).arg(PathBuf::from(program));
    Ok(command)
}

/// Child process that is killed on drop.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
