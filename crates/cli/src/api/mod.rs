//! Commands of the control socket, and the client functions of the command line.

mod alloc;
mod audience;
mod context;
mod describe;
mod devices;
mod event_sender;
mod machine;
mod migration;
mod options;
mod pause_gate;
mod ram;
mod rate;
mod recover;

pub(crate) use context::{GuestPlace, Incoming, Order, PendingOrder, RunContext};
pub(crate) use machine::Api;

use crate::Status;
use crate::arbiter::ArbiterConfig;
use crate::args::{ApiArgs, RecoverArgs};
use crate::balloon::squeeze::SqueezeArg;
use crate::choices::{
    AutoConvergeArg, ChannelsArg, CodecArg, DeltaArg, FreePagesArg, ModeArg, OnTimeoutArg, PaceArg,
    SwitchoverArg, UrgentArg,
};
use crate::tls::TlsTexts;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
pub(crate) use vmferry_client::{Client, is_gone};
use vmferry_engine::{MigrationMode, Settings, Tls};

/// Arguments of `migrate`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct MigrateRequest {
    pub(crate) uri: String,
    #[serde(default)]
    pub(crate) mode: ModeArg,
    #[serde(default)]
    pub(crate) urgent: UrgentArg,
    #[serde(default = "urgent_channels")]
    pub(crate) urgent_channels: u16,
    #[serde(default)]
    pub(crate) pace: PaceArg,
    #[serde(default = "reconnect_for_ms")]
    pub(crate) reconnect_for_ms: u64,
    #[serde(default)]
    pub(crate) tracker: Option<String>,
    #[serde(default)]
    pub(crate) reaper: Option<String>,
    #[serde(default)]
    pub(crate) channels: ChannelsArg,
    pub(crate) downtime_limit_ms: u64,
    #[serde(default)]
    pub(crate) max_bandwidth: Option<u64>,
    #[serde(default)]
    pub(crate) switchover_bandwidth: Option<SwitchoverArg>,
    #[serde(default)]
    pub(crate) timeout_ms: Option<u64>,
    #[serde(default)]
    pub(crate) on_timeout: OnTimeoutArg,
    #[serde(default)]
    pub(crate) auto_converge: AutoConvergeArg,
    /// Predict the migration, and score the prediction.
    #[serde(default)]
    pub(crate) plan: bool,
    #[serde(default)]
    pub(crate) free_pages: FreePagesArg,
    /// Squeeze of the page cache before the first pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) squeeze_cache: Option<SqueezeArg>,
    #[serde(default)]
    pub(crate) codec: CodecArg,
    #[serde(default)]
    pub(crate) delta: DeltaArg,
    /// Memory for the pages that deltas refer to, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) delta_cache: Option<u64>,
    #[serde(default)]
    pub(crate) verify: bool,
    #[serde(default)]
    pub(crate) keep_running: bool,
    /// The target takes over the memory of the guest, on the same host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) local: bool,
    #[serde(default)]
    pub(crate) insecure: bool,
    /// Credentials for encrypted connections. The default is that of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<TlsTexts>,
    /// Arbiter, as in `--fence`. The default is that of the process.
    #[serde(rename = "fence", default, skip_serializing_if = "Option::is_none")]
    pub(crate) arbiter: Option<ArbiterConfig>,
    pub(crate) peer_timeout_ms: u64,
}

/// Arguments of `snapshot`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct SnapshotRequest {
    pub(crate) uri: String,
    /// Path of the snapshot on which the file is based.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<PathBuf>,
    /// Size of the buffer for pages that the guest writes, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) snapshot_buffer: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_bandwidth: Option<u64>,
    #[serde(default)]
    pub(crate) verify: bool,
    /// Longest time for which the guest stays paused for hooks, which the client executes. Without
    /// it, there are no hooks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hook_limit_ms: Option<u64>,
}

fn urgent_channels() -> u16 {
    Settings::default().urgent_channels
}

fn reconnect_for_ms() -> u64 {
    u64::try_from(Settings::default().reconnect_for.as_millis()).unwrap_or(u64::MAX)
}

/// Arguments of `dirty-rate`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct DirtyRateRequest {
    /// Lengths of the windows in milliseconds, ascending.
    pub(crate) windows_ms: Vec<u64>,
    #[serde(default)]
    pub(crate) tracker: Option<String>,
    #[serde(default)]
    pub(crate) reaper: Option<String>,
}

impl DirtyRateRequest {
    /// Returns the duration of the measurement.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_millis(self.windows_ms.last().copied().unwrap_or(0)).min(crate::dirty_rate::LONGEST)
    }
}

impl MigrateRequest {
    /// Returns a request to `uri` with the default settings of the engine.
    pub(crate) fn to(uri: &str) -> Self {
        let Settings { urgent_channels, downtime_limit, peer_timeout, reconnect_for, .. } =
            Settings::default();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            uri: uri.into(),
            urgent_channels,
            reconnect_for_ms: millis(reconnect_for),
            downtime_limit_ms: millis(downtime_limit),
            peer_timeout_ms: millis(peer_timeout),
            ..Self::default()
        }
    }

    /// Returns the settings for the engine, for a migration that begins now. `own` are the
    /// credentials of the process for encrypted connections.
    pub(crate) fn settings(&self, own: Option<&Tls>) -> Result<Settings> {
        let given = self.tls.as_ref().map(TlsTexts::build).transpose().context("tls")?;
        let (channels, adapt_channels) = self.channels.count();
        Ok(Settings {
            tls: given.or_else(|| own.cloned()),
            mode: if self.local { MigrationMode::Local } else { self.mode.into() },
            urgent: self.urgent.into(),
            urgent_channels: self.urgent_channels,
            pace: self.pace.0,
            reconnect_for: Duration::from_millis(self.reconnect_for_ms),
            channels,
            adapt_channels,
            downtime_limit: Duration::from_millis(self.downtime_limit_ms),
            max_bandwidth: self.max_bandwidth,
            switchover_bandwidth: self.switchover_bandwidth.map(Into::into),
            timeout: self.timeout_ms.map(Duration::from_millis),
            on_timeout: self.on_timeout.into(),
            auto_converge: self.auto_converge.into(),
            free_pages: self.free_pages.is_on(),
            free_pages_wait: self.free_pages.wait(),
            codec: self.codec.0,
            deltas: self.delta.into(),
            delta_cache: self.delta_cache,
            verify: self.verify,
            peer_timeout: Duration::from_millis(self.peer_timeout_ms),
            insecure: self.insecure,
            arbiter: self.arbiter.as_ref().map(|arbiter| arbiter.build(self.insecure)).transpose()?,
            ..Settings::default()
        })
    }
}

impl MigrateRequest {
    /// Returns whether the request contains a key or a password.
    pub(crate) fn has_secrets(&self) -> bool {
        self.tls.is_some() || self.arbiter.as_ref().is_some_and(ArbiterConfig::has_secrets)
    }
}

/// Sends a command without arguments, whose answer is not printed.
pub(crate) fn simple(path: &Path, command: &str) -> Result<Status> {
    Client::connect(path)?.call(command, json!({}))?;
    Ok(Status::Done)
}

/// Ends the recording of a working set, and prints its size.
pub(crate) fn record(args: &ApiArgs) -> Result<Status> {
    let answer = Client::connect(&args.api)?.call("record-end", json!({}))?;
    let file = answer["file"].as_str().unwrap_or_default();
    println!("{} pages are in {}", answer["pages"], vmferry_client::printable(file));
    Ok(Status::Done)
}

/// Prints the state of the guest and its migration.
pub(crate) fn status(args: &ApiArgs) -> Result<Status> {
    let status = Client::connect(&args.api)?.call("status", json!({}))?;
    println!("{}", serde_json::to_string_pretty(&status)?);
    Ok(status_of(&status))
}

/// Returns the exit status of `status` for the document that it prints.
fn status_of(document: &Value) -> Status {
    match document["state"].as_str() {
        _ if document["stands_still"] == true => Status::NotResumed,
        Some("unknown" | "postcopy-paused") => Status::Unknown,
        Some("lost") => Status::Lost,
        _ => Status::Done,
    }
}

/// Takes up a lost link, or resolves unknown ownership.
pub(crate) fn recover(args: &RecoverArgs) -> Result<Status> {
    let decision = &args.decision;
    let arguments = match (decision.take, decision.abandon) {
        (true, _) => json!({ "take": true }),
        (_, true) => json!({ "take": false }),
        _ => json!({}),
    };
    Client::connect(&args.api)?.call("recover", arguments)?;
    Ok(Status::Done)
}
