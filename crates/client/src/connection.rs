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

/// Maximum time to wait for an answer. It is longer than the time for which the process waits for
/// its machine, which in turn is longer than a measurement.
const PATIENCE: Duration = Duration::from_secs(45);

/// Context of an error that a connection attempt returns: no vmferry process answers at the control
/// socket. The cause is the source of the error.
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

/// Connection to the control socket of a `vmferry run` process.
#[derive(Debug)]
pub struct Client {
    inner: vmferry_control::Client,
    path: PathBuf,
}

impl Client {
    /// Connects to the control socket at `path`.
    ///
    /// # Errors
    /// Returns an error with the context [`Unreachable`] if no process listens at `path`, or if the
    /// process does not answer like a vmferry.
    pub fn connect(path: &Path) -> Result<Self> {
        let inner = vmferry_control::Client::connect(path, PATIENCE)
            .with_context(|| Unreachable { path: path.into() })?;
        Ok(Self { inner, path: path.into() })
    }

    /// Returns the path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the user id of the process. It can be that of any user who was able to create the
    /// socket.
    ///
    /// # Errors
    /// Returns an error if the kernel does not report the user.
    pub fn peer_uid(&self) -> Result<u32> {
        self.inner.peer_uid().context("the user of the process that listens is unknown")
    }

    /// Returns the process id of the process.
    ///
    /// # Errors
    /// Returns an error if the kernel does not report the process.
    pub fn peer_pid(&self) -> Result<i32> {
        self.inner.peer_pid().context("the process that listens is unknown")
    }

    /// Checks that the process may receive a key or a password.
    ///
    /// A process of this user or of root may. A process of another user may only if that user owns
    /// the folder of the socket and no other user can write to the folder, because otherwise
    /// another user could have created the socket first.
    ///
    /// # Errors
    /// Returns an error if the process may not receive secrets, or if its user cannot be
    /// determined.
    pub fn trusted_with_secrets(&self) -> Result<()> {
        let uid = self.peer_uid()?;
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

    /// Passes `descriptor` to the process, which keeps it under the name `name` (`getfd`).
    ///
    /// # Errors
    /// Returns an error if the process refuses the descriptor or does not answer.
    pub fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<()> {
        let passed = self.inner.pass(name, descriptor);
        passed.map(drop).with_context(|| format!("getfd at {}", self.path.display()))
    }

    /// Makes the process close the descriptor that it has under the name `name` (`closefd`).
    ///
    /// # Errors
    /// Returns an error if the process has no such descriptor or does not answer.
    pub fn close(&mut self, name: &str) -> Result<()> {
        let closed = self.inner.execute("closefd", json!({ "fdname": name }));
        closed.map(drop).with_context(|| format!("closefd at {}", self.path.display()))
    }

    /// Executes a command that only vmferry has, and returns the answer. `command` is its name
    /// without the prefix `x-vmferry-`.
    ///
    /// Control characters in the answer are replaced, because a guest may have taken over the
    /// process that sends it.
    ///
    /// # Errors
    /// Returns an error if the process refuses the command or does not answer.
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

/// Returns `text` with all control characters except line feeds replaced, because text from another
/// process must not move the cursor of a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Returns true if a call failed because the process has ended or has closed the connection.
pub fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Ended | ClientError::Broken(_)))
}
