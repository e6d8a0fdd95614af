//! The asking side of the control socket.

use super::machine::PREFIX;
use crate::output;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmferry_control::ClientError;

/// How long an answer may take: longer than the other side waits for its machine, and that longer than a measurement.
const PATIENCE: Duration = Duration::from_secs(45);

/// A connection to a running vmferry.
pub(crate) struct Client {
    inner: vmferry_control::Client,
    path: PathBuf,
}

impl Client {
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let inner = vmferry_control::Client::connect(path, PATIENCE).with_context(|| {
            format!("cannot reach a vmferry at {} (is one running with --api {0}?)", path.display())
        })?;
        Ok(Self { inner, path: path.into() })
    }

    /// Fails if whoever listens is not this user, root, or the owner of a folder in which nobody else can make sockets: a key or a password is not
    /// for just anybody who was quicker.
    pub(crate) fn trusted_with_secrets(&self) -> Result<()> {
        let uid = self.inner.peer_uid().context("it cannot be told whose vmferry that is")?;
        if uid == 0 || uid == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let meta =
            std::fs::metadata(folder).with_context(|| format!("cannot look at {}", folder.display()))?;
        if meta.uid() == uid && meta.mode() & 0o022 == 0 {
            return Ok(());
        }
        bail!(
            "user {uid} listens at {}, and is not given keys or passwords: that is for this user's, root's, or that of the owner of the \
             socket's folder if only that user can write there",
            self.path.display()
        )
    }

    /// Passes `descriptor`, which the other side then knows as `name`.
    pub(crate) fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<()> {
        let passed = self.inner.pass(name, descriptor);
        passed.map(drop).with_context(|| format!("getfd at {}", self.path.display()))
    }

    /// Has the other side close what it was passed as `name`.
    pub(crate) fn close(&mut self, name: &str) -> Result<()> {
        let closed = self.inner.execute("closefd", json!({ "fdname": name }));
        closed.map(drop).with_context(|| format!("closefd at {}", self.path.display()))
    }

    /// Has a command of our own executed, by its name without `x-vmferry-`, and waits for the answer.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.inner
            .execute(&format!("{PREFIX}{command}"), arguments)
            .map(printable)
            .with_context(|| format!("{command} at {}", self.path.display()))
    }
}

/// An answer whose texts move no cursor, wherever they are shown: a guest may have the process that gives it.
fn printable(answer: Value) -> Value {
    match answer {
        Value::String(text) => Value::String(output::printable(&text)),
        Value::Array(all) => all.into_iter().map(printable).collect(),
        Value::Object(all) => {
            all.into_iter().map(|(name, value)| (output::printable(&name), printable(value))).collect()
        }
        other => other,
    }
}

/// Whether a call failed because there is nobody any more who could answer.
pub(crate) fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Ended | ClientError::Broken(_)))
}
