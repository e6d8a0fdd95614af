//! The asking side of the control socket.

use super::machine::PREFIX;
use anyhow::{Context, Result};
use serde_json::Value;
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

    /// Has a command of our own executed, by its name without `x-vmferry-`, and waits for the answer.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.inner
            .execute(&format!("{PREFIX}{command}"), arguments)
            .with_context(|| format!("{command} at {}", self.path.display()))
    }
}

/// Whether a call failed because there is nobody any more who could answer.
pub(crate) fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Ended | ClientError::Broken(_)))
}
