//! Common parts of scenarios with guests that move.

use super::Lab;
use super::vm::{Boot, Guest, Vm};
use crate::pace;
use crate::peer::RemoteHost;
use crate::programs::{LocalHost, ProgramHost};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::time::Duration;

/// Longest time until the other machine answers.
const OTHER: Duration = Duration::from_secs(60);

/// Tools of a scenario with guests.
#[derive(Debug)]
pub(crate) struct Rig<'a> {
    pub(crate) lab: &'a mut Lab,
    pub(crate) local: Rc<dyn ProgramHost>,
    pub(crate) boot: Boot,
    started: u32,
}

impl<'a> Rig<'a> {
    pub(crate) fn new(lab: &'a mut Lab) -> Self {
        let plan = &lab.plan;
        let boot =
            Boot { vmferry: plan.vmferry.clone(), kernel: plan.kernel.clone(), initrd: plan.initrd.clone() };
        Self { lab, local: Rc::new(LocalHost::default()), boot, started: 0 }
    }

    /// Returns the longest time of a guest's boot.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(if self.lab.plan.emulated { 90 } else { 20 })
    }

    /// Returns the allowed difference between the guest's clocks and the lab's. It is large for an
    /// emulated machine, which is slow and shares its processor.
    pub(crate) fn slack(&self) -> Duration {
        Duration::from_millis(if self.lab.plan.emulated { 2000 } else { 300 })
    }

    /// Returns the longest time for which a guest may get no processor. All parts of a move share
    /// the only processor of an emulated machine. Steps of clocks are limited by
    /// [`slack`](Self::slack).
    pub(crate) fn stall(&self) -> Duration {
        Duration::from_millis(if self.lab.plan.emulated { 10_000 } else { 300 })
    }

    pub(crate) fn name(&mut self, what: &str) -> String {
        self.started += 1;
        format!("{what}{}", self.started)
    }

    /// Starts a target for a guest in another process on this machine.
    pub(crate) fn awaiting(&mut self, guest: &Guest) -> Result<Vm> {
        let name = self.name("target");
        Vm::awaiting(&self.local, &self.boot, guest, &self.lab.folder, &name, Ipv4Addr::LOCALHOST)
    }

    /// Starts a target for a guest that is handed over inside this machine.
    pub(crate) fn awaiting_locally(&mut self, guest: &Guest) -> Result<Vm> {
        let name = self.name("target");
        let uri = format!("unix:/tmp/lab-{}-{name}.handoff", std::process::id());
        Vm::awaiting_at(&self.local, &self.boot, guest, &self.lab.folder, &name, &[&uri])
    }

    /// Starts a target for a guest on the other machine.
    pub(crate) fn awaiting_on_remote(&mut self, guest: &Guest) -> Result<Vm> {
        let address = self.lab.plan.peer.context("the plan names no other machine")?;
        let host: Rc<dyn ProgramHost> = Rc::new(RemoteHost::reach(address, OTHER)?);
        let name = self.name("target");
        let IpAddr::V4(ip) = address.ip() else { bail!("the lab's link has IPv4 only") };
        Vm::awaiting(&host, &self.boot, guest, &self.lab.folder, &name, ip)
    }

    /// Makes the guest power itself off, and checks that its process ends with success.
    pub(crate) fn power_off(&self, vm: &Vm) -> Result<()> {
        vm.enter("poweroff -f")?;
        let status = vm.end(self.patience())?;
        ensure!(status == 0, "after poweroff the process ended with status {status}: {}", vm.said());
        Ok(())
    }
}

/// Moves the guest, checks that the move succeeds, and returns its report.
pub(crate) fn migrate(source: &Vm, uri: &str, arguments: &[&str]) -> Result<Value> {
    let (report, status) = attempt(source, uri, arguments)?;
    judge(&report)?;
    ensure!(status == 0, "`vmferry migrate` ended with status {status}");
    Ok(report)
}

/// Runs `vmferry migrate`, and returns its report and exit status.
pub(crate) fn attempt(source: &Vm, uri: &str, arguments: &[&str]) -> Result<(Value, i32)> {
    let silence = pace::peer_timeout();
    let mut all = vec!["migrate", uri, "--json", "-", "--peer-timeout", &silence];
    all.extend(arguments);
    if !uri.contains("127.0.0.1") && !uri.starts_with("unix:") {
        all.push("--insecure");
    }
    let ran = source.run(&all)?;
    println!("{}{}", ran.errors, ran.output);
    let start = ran.output.find('{').with_context(|| {
        let last = ran.errors.trim().lines().last().unwrap_or_default();
        format!("`vmferry migrate` wrote no report: {last}; output of the source: {}", source.said())
    })?;
    let report: Value = serde_json::Deserializer::from_str(&ran.output[start..])
        .into_iter()
        .next()
        .context("no document")?
        .context("the report is not JSON")?;
    Ok((report, ran.status))
}

/// Checks that vmferry's report describes a completed move without a page that differs.
fn judge(report: &Value) -> Result<()> {
    if report["outcome"] != "completed" {
        bail!("the outcome is {}: {}", report["outcome"], report["error"]);
    }
    ensure!(report["mismatched_pages"] == 0, "{} pages differ", report["mismatched_pages"]);
    Ok(())
}
