//! A process `vmferry run` whose failures a bench provokes.

use super::program;
use crate::density::Budget;
use crate::slow_disk::SlowDisk;
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
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

/// Process of a side.
enum Process {
    Child(Child),
    /// Process that another program has started.
    Other {
        id: u32,
        handle: OwnedFd,
    },
}

impl Process {
    fn id(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Other { id, .. } => *id,
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match self {
            Self::Child(child) => Ok(rustix::process::kill_process(Pid::from_child(child), signal)?),
            Self::Other { handle, .. } => Ok(pidfd_send_signal(handle, signal)?),
        }
    }

    /// Waits for the end of the process, at most for the time `within`. Returns whether it has
    /// ended.
    fn ends(&mut self, within: Duration) -> Result<bool> {
        let deadline = Instant::now() + within;
        loop {
            let ended = match self {
                Self::Child(child) => child.try_wait()?.is_some(),
                Self::Other { handle, .. } => {
                    poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&Timespec::default()))? > 0
                }
            };
            if ended || Instant::now() >= deadline {
                return Ok(ended);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A process `vmferry run` and its control socket. The process is killed on drop.
pub(super) struct Side {
    process: Process,
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
    /// Command that executes the rest of its arguments as the process.
    pub(super) within: Option<Command>,
}

impl Side {
    /// Starts a process, and waits until its control socket answers.
    pub(super) fn start(start: Start<'_>, folder: &Path, name: &str) -> Result<Self> {
        let Start { guest, memory, args, slow, budget, within } = start;
        let api = folder.join(name);
        let exe = program::vmferry()?;
        let mut command = match within {
            None => Command::new(exe),
            Some(mut command) => {
                command.arg(exe);
                command
            }
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
        let process = Process::Child(command.spawn()?);
        let mut side = Self { process, client: None, dead: false, budget, log };
        if let Some(budget) = &side.budget {
            budget.adopt(side.pid())?;
        }
        side.connect(&api)?;
        Ok(side)
    }

    /// Takes over the process `id`, which another program has started. The process writes its
    /// messages to the file `log`.
    pub(super) fn adopt(id: u32, log: PathBuf) -> Result<Self> {
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw).context("no process")?;
        let process = Process::Other { id, handle: pidfd_open(pid, PidfdFlags::empty())? };
        Ok(Self { process, client: None, dead: false, budget: None, log })
    }

    /// Waits until the control socket at `api` answers, and connects to it.
    pub(super) fn connect(&mut self, api: &Path) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(client) = Client::connect(api) {
                self.client = Some(client);
                return Ok(());
            }
            if self.process.ends(Duration::ZERO)? || Instant::now() > deadline {
                bail!("the process of {} did not start: {}", api.display(), self.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
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
            ensure!(self.ends(PATIENCE)?, "the process was killed, and does not end");
        }
        Ok(killed)
    }

    /// Waits for the end of the process, at most for the time `within`. Returns whether it has
    /// ended.
    pub(super) fn ends(&mut self, within: Duration) -> Result<bool> {
        self.dead = self.dead || self.process.ends(within)?;
        Ok(self.dead)
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
            if status.is_none() && self.ends(Duration::ZERO)? {
                bail!("the process has ended while waiting for {what}: {}", self.said());
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
            if let Process::Child(child) = &mut self.process
                && let Some(status) = child.try_wait()?
            {
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
        self.signal(Signal::KILL)?;
        ensure!(self.ends(PATIENCE)?, "the process does not end after SIGKILL");
        Ok(())
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Checks that the guest runs on this side, and continues to write.
    pub(super) fn goes_on(&mut self) -> Result<()> {
        let writes = |status: &Value| status["vm"]["guest"]["writes"].as_u64();
        let before = self.wait("the guest's statistics", |status| writes(status).is_some())?;
        self.wait("the guest making progress", |status| writes(status) > writes(&before)).map(drop)
    }

    /// Checks that the guest runs on this side, continues to write, and finds all its pages
    /// undamaged.
    pub(super) fn whole(&mut self) -> Result<()> {
        self.goes_on()?;
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

    /// Returns the URI on which the target listens.
    pub(super) fn incoming(&mut self) -> Result<String> {
        let status = self.wait("the target listening", |status| status["vm"]["incoming"].is_string())?;
        Ok(status["vm"]["incoming"].as_str().context("no URI")?.to_owned())
    }

    /// Returns the TCP address on which the target listens.
    pub(super) fn address(&mut self) -> Result<SocketAddr> {
        let uri = self.incoming()?;
        Ok(uri.strip_prefix("tcp:").context("no TCP port")?.parse()?)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
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
        if !self.dead {
            let _ = self.kill();
        }
    }
}
