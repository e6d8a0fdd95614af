//! Migration requests in the format of the control socket.

use crate::stalls::Channels;
use serde::Serialize;
use std::time::Duration;
use vmferry_engine::Settings;

/// Arguments of `x-vmferry-migrate`. The process refuses an unknown value.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct MigrateRequest {
    pub(super) uri: String,
    /// Migration mode: `precopy`, `postcopy` or `hybrid`.
    pub(super) mode: &'static str,
    /// Way of urgent pages: `shared`, `interleaved` or `dedicated`.
    pub(super) urgent: &'static str,
    pub(super) urgent_channels: u16,
    /// Pacing: `auto` or `off`.
    pub(super) pace: &'static str,
    pub(super) reconnect_for_ms: u64,
    pub(super) tracker: Option<&'static str>,
    pub(super) reaper: Option<String>,
    pub(super) channels: Channels,
    pub(super) downtime_limit_ms: u64,
    /// Limit in bytes per second.
    pub(super) max_bandwidth: Option<u64>,
    pub(super) timeout_ms: Option<u64>,
    /// Action taken when the timeout expires: `cancel`, `switch` or `postcopy`.
    pub(super) on_timeout: &'static str,
    /// vCPUs that auto-converge throttles: `off`, `all` or `writers`.
    pub(super) auto_converge: &'static str,
    /// Set if the migration is predicted first and the prediction is scored.
    pub(super) plan: bool,
    /// Skipping of free pages: `on`, `off`, or `wait=MS`.
    pub(super) free_pages: String,
    /// Compression of pages: `auto`, `raw`, `lz4` or `zstd`.
    pub(super) codec: &'static str,
    /// Deltas against earlier versions: `auto`, `on` or `off`.
    pub(super) delta: &'static str,
    /// Memory for the earlier versions in bytes. `None` means the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta_cache: Option<u64>,
    /// Set if the guest stays at the source, which is possible for a file only.
    pub(super) keep_running: bool,
    /// Set if the memory is handed over by descriptors instead of being copied.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) local: bool,
    pub(super) insecure: bool,
    pub(super) peer_timeout_ms: u64,
}

impl MigrateRequest {
    /// Returns a request with the settings that `vmferry migrate` has without options.
    pub(super) fn to(uri: &str) -> Self {
        let settings = Settings::default();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            uri: uri.into(),
            mode: "precopy",
            urgent: "dedicated",
            urgent_channels: settings.urgent_channels,
            pace: "auto",
            reconnect_for_ms: millis(settings.reconnect_for),
            tracker: None,
            reaper: None,
            channels: Channels::Auto,
            downtime_limit_ms: millis(settings.downtime_limit),
            max_bandwidth: None,
            timeout_ms: None,
            on_timeout: "cancel",
            auto_converge: "off",
            plan: false,
            free_pages: "on".into(),
            codec: "raw",
            delta: "off",
            delta_cache: None,
            keep_running: false,
            local: false,
            insecure: false,
            peer_timeout_ms: millis(settings.peer_timeout),
        }
    }
}
