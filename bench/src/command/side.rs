//! A process `vmferry run` whose failures a bench provokes.

use super::program;
use crate::density::Budget;
use crate::slow_disk::SlowDisk;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use vmferry_client::Client;

/// Longest time to wait for the start of a process, and for any other condition.
pub(super) const PATIENCE: Duration = Duration::from_secs(45);
const REQUEST: u64 = 4711;

/// Folder that is removed on drop.
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vmferry-bench-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = Self(std::env::temp_dir().join(name));
        std::fs::create_dir(&folder.0)?;
        Ok(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process `vmferry run` and its control socket.
pub(super) struct Side {
    child: Child,
    client: Option<Client>,
    /// Set once the process was killed or has ended.
    dead: bool,
    /// Memory budget of the process.
    budget: Option<Budget>,
    /// File that receives the standard error of the process.
    log: PathBuf,
}

/// Settings with which a side is started.
#[derive(Default)]
pub(super) struct Start<'a> {
    pub(super) guest: &'a str,
    pub(super) memory: &'a str,
    /// Further arguments, such as the workload of a source or the address of a target.
    pub(super) args: Vec<String>,
    pub(super) slow: Option<&'a SlowDisk>,
    /// Memory budget of the process.
    pub(super) budget: Option<Budget>,
    /// Set if the monotonic clock of the process is a day ahead.
    pub(super) other_clock: bool,
}

impl Side {
    /// Starts a process, and waits until its control socket answers.
    pub(super) fn start(start: Start<'_>, folder: &Path, name: &str) -> Result<Self> {
        let Start { guest, memory, args, slow, budget, other_clock } = start;
        let api = folder.join(name);
        let exe = program::vmferry()?;
        let mut command = if other_clock {
            let mut command = Command::new("unshare");
            command.args(["--time", "--monotonic", "86400", "--boottime", "86400", "--fork", "--kill-child"]);
            command.arg(exe);
            command
        } else {
            Command::new(exe)
        };
        command
            .args(["run", "--die-with-parent", "--guest", guest, "--memory", memory, "--api"])
            .arg(&api)
            .args(args);
        if let Some(slow) = slow {
            slow.enter(&mut command)?;
        }
        if let Some(budget) = &budget {
            budget.enter(&mut command)?;
        }
        let log = folder.join(format!("{name}.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&log)?);
        let mut side = Self { child: command.spawn()?, client: None, dead: false, budget, log };
        if let Some(budget) = &side.budget {
            budget.adopt(side.child.id())?;
        }
        let deadline = Instant::now() + PATIENCE;
        while side.client.is_none() {
            side.client = Client::connect(&api).ok();
            if side.child.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("the {name} did not start: {}", side.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(side)
    }

    /// Connects to the process that has taken the place of this one at `api`.
    pub(super) fn reconnect(&mut self, api: &Path) -> Result<()> {
        self.client = Some(Client::connect(api)?);
        Ok(())
    }

    /// Returns the last five lines of the log.
    pub(super) fn said(&self) -> String {
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = said.trim().lines().collect();
        lines[lines.len().saturating_sub(5)..].join("; ")
    }

    /// Returns whether the kernel has killed the process because of its memory budget.
    pub(super) fn starved(&mut self) -> Result<bool> {
        let Some(budget) = &self.budget else { return Ok(false) };
        let killed = budget.kills()? > 0;
        if killed && !self.dead {
            self.child.wait()?;
            self.dead = true;
        }
        Ok(killed)
    }

    pub(super) fn status(&mut self) -> Option<Value> {
        let client = self.client.as_mut().filter(|_| !self.dead)?;
        client.call("status", json!({})).ok()
    }

    pub(super) fn command(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.client.as_mut().context("no control socket")?.call(command, arguments)
    }

    pub(super) fn wait(&mut self, what: &str, done: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if let Some(status) = status.as_ref().filter(|status| done(status)) {
                return Ok(status.clone());
            }
            if Instant::now() > deadline {
                bail!("timed out while waiting for {what}: {}", status.unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the process ends by itself with a failure, and checks that it never runs a
    /// guest.
    pub(super) fn refuses(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(!status.success(), "the process ended with success: {}", self.said());
                self.dead = true;
                return Ok(());
            }
            let status = self.status();
            let runs = status.as_ref().is_some_and(|status| status["vm"]["place"] == "running");
            ensure!(!runs, "the guest runs: {status:?}");
            ensure!(Instant::now() < deadline, "the process does not end: {status:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        self.dead = true;
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Checks that the guest runs on this side, continues to write, and finds all its pages
    /// undamaged.
    pub(super) fn whole(&mut self) -> Result<()> {
        let writes = |status: &Value| status["vm"]["guest"]["writes"].as_u64();
        let before = self.wait("the guest's statistics", |status| writes(status).is_some())?;
        self.wait("the guest making progress", |status| writes(status) > writes(&before))?;
        self.command("verify-guest", json!({ "request": REQUEST }))?;
        let checked = self.wait("the guest checking all its pages", |status| {
            let guest = &status["vm"]["guest"];
            guest["verify_done"] == REQUEST || guest["corrupt"].as_u64() > Some(0)
        })?;
        let guest = &checked["vm"]["guest"];
        if guest["corrupt"] != 0 {
            bail!(
                "CORRUPT: the guest finds {} damaged pages, first {}",
                guest["corrupt"],
                guest["first_corrupt"]
            );
        }
        Ok(())
    }

    /// Waits until the guest has filled its memory and runs its workload.
    pub(super) fn working(&mut self) -> Result<()> {
        self.wait("the guest filling its memory", |status| status["vm"]["guest"]["state"] == "running")
            .map(drop)
    }

    /// Returns the address on which the target listens.
    pub(super) fn address(&mut self) -> Result<SocketAddr> {
        let status = self.wait("the target listening", |status| status["vm"]["incoming"].is_string())?;
        let uri = status["vm"]["incoming"].as_str().and_then(|uri| uri.strip_prefix("tcp:"));
        Ok(uri.context("no TCP port")?.parse()?)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn dead(&self) -> bool {
        self.dead
    }

    pub(super) fn budget(&self) -> Option<&Budget> {
        self.budget.as_ref()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.signal(Signal::CONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
