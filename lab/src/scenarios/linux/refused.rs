//! Scenarios of moves that fail: the guest continues on the source, and can be moved afterwards.

use super::{Lab, Rig, Verdict, ready, seconds};
use crate::pace::Limit;
use crate::programs::{Answer, Request};
use crate::scenarios::vm::{Guest, Vm};
use anyhow::{Context, Result, bail, ensure};
use std::time::Duration;

/// Arguments of a move that is so slow that its first pass lasts until it is stopped.
const SLOW: [&str; 6] = ["--mode", "precopy", "--max-bandwidth", "4M/s", "--downtime-limit", "1ms"];

/// Stops a move by `vmferry cancel`. At the end the guest is asked to shut down, does not react,
/// and is ended.
pub(super) fn cancelled(lab: &mut Lab) -> Result<Verdict> {
    stopped(lab, |source, _| source.command(&["cancel"]).map(drop), |rig, vm| rig.terminate(vm))
}

/// Stops a move by killing its target.
pub(super) fn killed(lab: &mut Lab) -> Result<Verdict> {
    stopped(lab, |_, target| target.kill(), |rig, vm| rig.power_off(vm))
}

fn stopped(
    lab: &mut Lab,
    stop: fn(&Vm, &Vm) -> Result<()>,
    end: fn(&Rig<'_>, &Vm) -> Result<()>,
) -> Result<Verdict> {
    let mut rig = Rig::new(lab);
    let guest = Guest { dirty_ring: true, ..Guest::usual() };
    let (source, target) = (rig.boot(&guest)?, rig.awaiting(&guest)?);
    let before = ready(&source)?;
    let mover = rig.begin(&source, &target.uri()?)?;
    under_way(&source)?;
    stop(&source, &target)?;
    let status = ended(&rig, mover)?;
    ensure!(
        status == 1,
        "`vmferry migrate` ended with status {status}, not 1, although the move was stopped"
    );
    rig.stays(&source, &before, 0.0)?;
    // The next move is not stopped.
    let next = rig.awaiting(&guest)?;
    rig.carry(&source, &next, &["--mode", "precopy", "--tracker", "ring", "--verify"])?;
    end(&rig, &next)?;
    Ok(Verdict::Passed)
}

impl Rig<'_> {
    /// Ends the process by two signals. The first SIGTERM presses the power button, on which no
    /// program in this guest acts. The second SIGTERM ends the process.
    fn terminate(&self, vm: &Vm) -> Result<()> {
        let pid = vm.status()?["vm"]["pid"].as_u64().context("the status has no process")?;
        let signal = || {
            let command = ["sh", "-c", &format!("kill -TERM {pid}")].map(str::to_owned).to_vec();
            match self.local.execute(Request::Run { command })? {
                Answer::Ran(ran) if ran.status == 0 => Ok(()),
                other => bail!("cannot signal the process: {other:?}"),
            }
        };
        signal()?;
        let limit = Limit::new(seconds(30));
        while !vm.said().contains("the guest was asked to shut down") {
            ensure!(
                vm.ended()?.is_none() && !limit.is_over(),
                "it did not ask the guest to shut down: {}",
                vm.said()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        vm.shell("echo still-$kept", "still-42")?;
        signal()?;
        let status = vm.end(self.patience())?;
        ensure!(status == 0, "after a second SIGTERM the process ended with status {status}: {}", vm.said());
        Ok(())
    }

    /// Starts a slow move, and returns the number of its process.
    fn begin(&mut self, source: &Vm, uri: &str) -> Result<u32> {
        let mut command = source.subcommand("migrate");
        command.extend([uri].iter().chain(&SLOW).map(ToString::to_string));
        let file = |name: &str| self.lab.folder.join(name);
        let request = Request::Start { command, output: file("migrate.out"), errors: file("migrate.err") };
        match self.local.execute(request)? {
            Answer::Started { id } => Ok(id),
            other => bail!("unexpected: {other:?}"),
        }
    }
}

/// Waits until pages are being sent.
fn under_way(source: &Vm) -> Result<()> {
    let limit = Limit::new(seconds(30));
    loop {
        let status = source.status()?;
        if status["progress"]["pass_done"].as_u64() > Some(0)
            || status["progress"]["wire_bytes"].as_u64() > Some(1 << 20)
        {
            return Ok(());
        }
        ensure!(!limit.is_over(), "the move does not start: {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn ended(rig: &Rig<'_>, mover: u32) -> Result<i32> {
    let limit = Limit::new(seconds(60));
    loop {
        if let Answer::Ended(Some(status)) = rig.local.execute(Request::Ended { id: mover })? {
            return Ok(status);
        }
        ensure!(!limit.is_over(), "`vmferry migrate` does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
}
