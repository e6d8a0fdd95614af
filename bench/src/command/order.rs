//! A command `vmferry` that a bench starts beside the process of a guest.

use super::program;
use crate::child::Reaped;
use crate::density::Budget;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest time that a command may take. A command waits for at most a minute for a step of another
/// process.
const PATIENCE: Duration = Duration::from_secs(90);

/// Limits of a command and of the processes that it starts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits<'a> {
    pub(super) budget: Option<&'a Budget>,
    /// Number of descriptors.
    pub(super) descriptors: Option<u64>,
}

/// Running command. It is killed on drop.
pub(super) struct Order {
    process: Reaped,
    log: PathBuf,
}

impl Order {
    /// Starts `vmferry` with the arguments `args`. Its messages go into the file `log`.
    pub(super) fn start(args: &[OsString], log: PathBuf, limits: Limits<'_>) -> Result<Self> {
        let vmferry = program::vmferry()?;
        let mut command = match limits.descriptors {
            None => Command::new(vmferry),
            Some(limit) => {
                let mut command = Command::new("sh");
                command.args(["-c", r#"ulimit -n "$0" && exec "$@""#, &limit.to_string()]).arg(vmferry);
                command
            }
        };
        command.args(args);
        if let Some(budget) = limits.budget {
            budget.enter(&mut command)?;
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        Ok(Self { process: Reaped::spawn(&mut command)?, log })
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the end of the command. Returns its messages if it has failed.
    pub(super) fn ended(&mut self) -> Result<Result<(), String>> {
        let status = self.process.wait_for(PATIENCE)?.context("the command does not end")?;
        Ok(if status.success() { Ok(()) } else { Err(format!("{status}: {}", self.said())) })
    }

    /// Returns whether the command has ended.
    pub(super) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.process.wait_for(Duration::ZERO)?.is_some())
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        self.process.child().kill()?;
        self.process.child().wait()?;
        Ok(())
    }

    pub(super) fn signal(&mut self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(self.process.child()), signal)?)
    }

    pub(super) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default().trim().to_owned()
    }
}

/// Returns the arguments `words`, followed by the option `--api` with the path `api`.
pub(super) fn arguments(words: &[&str], api: &Path) -> Vec<OsString> {
    let words = words.iter().map(OsString::from);
    words.chain([OsString::from("--api"), api.into()]).collect()
}
