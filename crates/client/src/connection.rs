//! Connections to control sockets.

use crate::PREFIX;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmferry_control::ClientError;

/// Longest wait for an answer. It is longer than the process waits for its machine, and that is
/// longer than a measurement.
const PATIENCE: Duration = Duration::from_secs(45);

/// No vmferry answers at a control socket. This is the context of the cause.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unreachable {
    /// Path of the control socket.
    pub path: PathBuf,
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot reach a vmferry at {}", self.path.display())
    }
}

/// Connection to the control socket of a process `vmferry run`.
#[derive(Debug)]
pub struct Client {
    inner: vmferry_control::Client,
    path: PathBuf,
}

impl Client {
    /// Connects to the control socket at `path`.
    ///
    /// # Errors
    /// If no process listens there, or it does not answer as a vmferry does.
    pub fn connect(path: &Path) -> Result<Self> {
        let inner = vmferry_control::Client::connect(path, PATIENCE)
            .with_context(|| Unreachable { path: path.into() })?;
        Ok(Self { inner, path: path.into() })
    }

    /// Checks that the process may be given a key or a password.
    ///
    /// It may if it is this user's or root's. It also may if it belongs to the owner of the
    /// socket's folder, and no other user can create sockets in that folder: otherwise another user
    /// could have created the socket first.
    ///
    /// # Errors
    /// If the process belongs to another user, or its user is not known.
    pub fn trusted_with_secrets(&self) -> Result<()> {
        let uid = self.inner.peer_uid().context("the user of the process that listens is unknown")?;
        if uid == 0 || uid == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let meta = std::fs::metadata(folder)
            .with_context(|| format!("cannot read the owner of {}", folder.display()))?;
        if meta.uid() == uid && meta.mode() & 0o022 == 0 {
            return Ok(());
        }
        bail!(
            "user {uid} listens at {}, and is not given keys or passwords: they are only for processes of this user, of root, or of the owner \
             of the socket's folder if no other user can write to the folder",
            self.path.display()
        )
    }

    /// Passes `descriptor`, which the process then knows as `name`.
    ///
    /// # Errors
    /// If the process refuses it or does not answer.
    pub fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<()> {
        let passed = self.inner.pass(name, descriptor);
        passed.map(drop).with_context(|| format!("getfd at {}", self.path.display()))
    }

    /// Closes the descriptor that the process was passed as `name`.
    ///
    /// # Errors
    /// If the process does not have it or does not answer.
    pub fn close(&mut self, name: &str) -> Result<()> {
        let closed = self.inner.execute("closefd", json!({ "fdname": name }));
        closed.map(drop).with_context(|| format!("closefd at {}", self.path.display()))
    }

    /// Executes vmferry's own command `command`, named without its prefix `x-vmferry-`, and returns
    /// the answer.
    ///
    /// The texts of the answer contain no control characters: a guest may own the process that
    /// sends it.
    ///
    /// # Errors
    /// If the process refuses the command or does not answer.
    pub fn call(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.inner
            .execute(&format!("{PREFIX}{command}"), arguments)
            .map(clean)
            .with_context(|| format!("{command} at {}", self.path.display()))
    }
}

fn clean(answer: Value) -> Value {
    match answer {
        Value::String(text) => Value::String(printable(&text)),
        Value::Array(all) => all.into_iter().map(clean).collect(),
        Value::Object(all) => all.into_iter().map(|(name, value)| (printable(&name), clean(value))).collect(),
        other => other,
    }
}

/// Returns `text` with its control characters replaced, except line ends: text of another process
/// must not move the cursor of a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Returns whether a call failed because the process has ended or has closed the connection.
pub fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Ended | ClientError::Broken(_)))
}
