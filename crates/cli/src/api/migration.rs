//! QMP commands for migrations.

use super::machine::Api;
use super::options::Options;
use super::ram::{Ram, number};
use super::{GuestPlace, Order};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_control::{Answer, Arguments, QmpError};
use vmferry_engine::{MigrationState, Progress};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Migrate {
    uri: Option<String>,
    channels: Option<Vec<Channel>>,
    /// Ignored: `migrate` always detaches.
    #[serde(rename = "detach")]
    _detach: Option<bool>,
    #[serde(default)]
    resume: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Incoming {
    uri: Option<String>,
    channels: Option<Vec<Channel>>,
    #[serde(rename = "exit-on-error")]
    exit_on_error: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recover {
    uri: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Channel {
    channel_type: String,
    addr: Address,
}

#[derive(Deserialize)]
#[serde(tag = "transport", rename_all = "kebab-case", deny_unknown_fields)]
enum Address {
    Socket(Socket),
    File { filename: String },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
enum Socket {
    Inet { host: String, port: String },
    Unix { path: String },
    Fd { str: String },
}

/// Returns the address that `uri` or `channels` give.
fn address(uri: Option<String>, channels: Option<Vec<Channel>>) -> Result<String, QmpError> {
    match (uri, channels.as_deref()) {
        (Some(uri), None) => Ok(uri),
        (None, Some([Channel { channel_type, addr }])) if channel_type == "main" => Ok(match addr {
            Address::Socket(Socket::Inet { host, port }) if host.contains(':') => {
                format!("tcp:[{host}]:{port}")
            }
            Address::Socket(Socket::Inet { host, port }) => format!("tcp:{host}:{port}"),
            Address::Socket(Socket::Unix { path }) => format!("unix:{path}"),
            Address::Socket(Socket::Fd { str }) => format!("fd:{str}"),
            Address::File { filename } => format!("file:{filename}"),
        }),
        (None, Some(_)) => {
            Err(QmpError::generic("channels: exactly one channel is supported, of channel-type main"))
        }
        (Some(_), Some(_)) => Err(QmpError::generic("uri and channels exclude each other; give one")),
        (None, None) => Err(QmpError::generic("need either 'uri' or 'channels' argument")),
    }
}

impl Api {
    /// Executes `migrate`, which starts a migration and does not wait for its end.
    pub(super) fn migrate(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Migrate { uri, channels, resume, .. } = arguments.read()?;
        let uri = address(uri, channels)?;
        let shared = &self.0;
        if resume {
            if shared.place() != GuestPlace::Moving {
                return Err(QmpError::generic("Cannot resume if there is no paused migration"));
            }
            // The link is taken up to the previous target, which has the pages.
            return shared.answer("recover", &json!({})).map(Answer::new).map_err(refused);
        }
        let options = shared.options();
        let request = options.request(&uri, shared.insecure);
        shared.order(Order::Migrate(Box::new(request))).map_err(refused)?;
        // A QMP client ends this process itself when it has read what it needs.
        shared.stay.store(true, Ordering::Release);
        Ok(Answer::done())
    }

    /// Executes `migrate-incoming`.
    pub(super) fn migrate_incoming(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Incoming { uri, channels, exit_on_error } = arguments.read()?;
        let uri = address(uri, channels)?;
        if exit_on_error == Some(false) {
            return Err(QmpError::generic("exit-on-error: a process whose guest did not arrive always ends"));
        }
        let uri = uri.parse().map_err(|error| QmpError::generic(format!("{error}")))?;
        self.0.wait_at(uri).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes `migrate_cancel`. QMP demands success also without a migration.
    pub(super) fn migrate_cancel(&self) -> Result<Answer, QmpError> {
        if self.0.place() == GuestPlace::Moving {
            self.0.answer("cancel", &json!({})).map_err(refused)?;
        }
        Ok(Answer::done())
    }

    /// Executes `migrate-start-postcopy`.
    pub(super) fn start_postcopy(&self) -> Result<Answer, QmpError> {
        if !self.0.options().has("postcopy-ram") {
            return Err(QmpError::generic(
                "Enable postcopy with migrate-set-capabilities (postcopy-ram) before the start of migration",
            ));
        }
        self.0.answer("switch", &json!({})).map_err(refused)?;
        Ok(Answer::done())
    }

    /// Executes `migrate-pause`, which cuts the link of a postcopy migration.
    pub(super) fn migrate_pause(&self) -> Result<Answer, QmpError> {
        match self.0.under_way() {
            Some(handle) if handle.progress().state == MigrationState::Postcopy => {
                handle.pause();
                Ok(Answer::done())
            }
            _ => Err(QmpError::generic("migrate-pause is for a migration in postcopy, and at its source")),
        }
    }

    /// Executes `migrate-recover` at the target, which keeps waiting for the source at the same
    /// address.
    pub(super) fn migrate_recover(&self, arguments: Arguments) -> Result<Answer, QmpError> {
        let Recover { uri } = arguments.read()?;
        let paused =
            self.0.postcopy().is_some_and(|postcopy| postcopy.state == MigrationState::PostcopyPaused);
        if !paused {
            return Err(QmpError::generic(
                "Migrate recover can only be run at the target of a paused postcopy migration; at the source use migrate with resume",
            ));
        }
        match self.0.incoming() {
            Some(at) if at == uri => Ok(Answer::done()),
            at => Err(QmpError::generic(format!(
                "the target keeps waiting for its source at {}; it cannot wait at another address",
                at.unwrap_or_default()
            ))),
        }
    }

    /// Changes the settings. Fails during a migration, which keeps its settings.
    pub(super) fn set_options(
        &self,
        set: impl FnOnce(&mut super::options::Options) -> Result<(), QmpError>,
    ) -> Result<Answer, QmpError> {
        if self.0.place() == GuestPlace::Moving {
            return Err(QmpError::generic(
                "There's a migration process in progress, which keeps its settings",
            ));
        }
        self.0.change_options(set)?;
        Ok(Answer::done())
    }

    /// Executes `query-migrate`.
    pub(super) fn query_migrate(&self) -> Answer {
        let shared = &self.0;
        let (total, options) = (shared.memory(), shared.options());
        let (value, ended) = match shared.latest() {
            (Some(report), _) => (of_report(&report, total, &options), true),
            (None, Some(handle)) => {
                let report = handle.report();
                let mut info = of_progress(&handle.progress(), total, &options, handle.cancelled());
                let cache = report.delta_cache.as_ref().filter(|_| options.has("xbzrle"));
                if let Some(cache) = cache.and_then(|cache| serde_json::to_value(cache).ok()) {
                    info["xbzrle-cache"] = xbzrle(&cache, report.bytes.delta);
                }
                (info, false)
            }
            (None, None) => (self.of_arrival(), false),
        };
        let answer = Answer::new(value);
        if !ended {
            return answer;
        }
        let shared = Arc::clone(shared);
        answer.on_sent(move || shared.audience.saw())
    }

    /// Returns the migration as the target sees it.
    fn of_arrival(&self) -> Value {
        let shared = &self.0;
        let at = shared.incoming();
        if let Some(postcopy) = shared.postcopy() {
            let ram = Ram::of_postcopy(postcopy.left, postcopy.postcopy.requests, shared.memory());
            return json!({ "status": status(postcopy.state), "ram": ram });
        }
        match (at, shared.place()) {
            (_, GuestPlace::Running | GuestPlace::Paused) if shared.received().is_some() => {
                json!({ "status": "completed" })
            }
            (Some(at), GuestPlace::Awaited) => {
                json!({ "status": "setup", "socket-address": socket_address(&at) })
            }
            _ => json!({}),
        }
    }
}

/// Returns the address of a target in QMP's form. Files and inherited sockets have no address.
fn socket_address(uri: &str) -> Vec<Value> {
    let address = match uri.split_once(':') {
        Some(("tcp", rest)) => rest.rsplit_once(':').map(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            json!({ "type": "inet", "host": host, "port": port })
        }),
        Some(("unix", path)) => Some(json!({ "type": "unix", "path": path })),
        _ => None,
    };
    address.into_iter().collect()
}

pub(super) fn refused(error: anyhow::Error) -> QmpError {
    QmpError::generic(crate::advice::told(&error))
}

/// Returns the QMP name of a state. QMP has no name for an unknown owner; like a lost link, that
/// state needs an action of the operator.
pub(super) fn status(state: MigrationState) -> &'static str {
    match state {
        MigrationState::Setup => "setup",
        MigrationState::Precopy => "active",
        MigrationState::Switchover => "device",
        MigrationState::Postcopy => "postcopy-active",
        MigrationState::PostcopyPaused | MigrationState::Unknown => "postcopy-paused",
        MigrationState::Completed => "completed",
        MigrationState::Cancelled => "cancelled",
        _ => "failed",
    }
}

/// Returns the QMP name of the state of a migration that has ended.
pub(super) fn status_of(report: &Value) -> &'static str {
    match report["outcome"].as_str() {
        Some("completed") => "completed",
        Some("cancelled") => "cancelled",
        Some("unknown") => "postcopy-paused",
        _ => "failed",
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the answer for a running migration. A final state without a report does not count as an
/// end yet.
fn of_progress(progress: &Progress, total: u64, options: &Options, cancelled: bool) -> Value {
    let state = match progress.state {
        _ if cancelled && !progress.runs_on_target => "cancelling",
        MigrationState::Completed if progress.runs_on_target => "postcopy-active",
        MigrationState::Completed | MigrationState::Cancelled | MigrationState::Failed => "device",
        MigrationState::Unknown | MigrationState::Lost => "postcopy-paused",
        state => status(state),
    };
    let ram = Ram::of_progress(progress, total, options.has("multifd"));
    let mut info = json!({ "status": state, "total-time": millis(progress.elapsed), "ram": ram });
    if let Some(downtime) = progress.predicted_downtime {
        info["expected-downtime"] = json!(millis(downtime));
    }
    if let Some(why) = &progress.interrupted {
        info["error-desc"] = json!(why);
    }
    info
}

/// Returns the statistics of deltas in QMP's form. The rates cover the whole migration.
fn xbzrle(cache: &Value, bytes: u64) -> Value {
    let count = |name: &str| cache[name].as_u64().unwrap_or(0);
    let (hits, misses, large) = (count("hits"), count("misses"), count("large"));
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let ratio = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    json!({
        "cache-size": count("limit_bytes"),
        "bytes": bytes,
        "pages": hits,
        "cache-miss": misses,
        "cache-miss-rate": ratio(misses, hits + misses + large),
        "encoding-rate": ratio(hits * 4096, bytes),
        "overflow": large,
    })
}

/// Returns the answer for a migration that has ended.
fn of_report(report: &Value, total: u64, options: &Options) -> Value {
    let state = status_of(report);
    let mut info = json!({
        "status": state,
        "total-time": number(&report["total_ms"]),
        "setup-time": number(&report["setup_ms"]),
        "ram": Ram::of_report(report, total, options.has("multifd")),
    });
    if state == "completed" {
        info["downtime"] = json!(number(&report["downtime_ms"]));
    } else if let Some(why) = report["error"].as_str() {
        info["error-desc"] = json!(why);
    }
    if options.has("xbzrle") && report["delta_cache"].is_object() {
        info["xbzrle-cache"] = xbzrle(&report["delta_cache"], number(&report["bytes"]["delta"]));
    }
    if let Some(vcpus) = report["postcopy"]["vcpus"].as_array().filter(|_| options.has("postcopy-blocktime"))
    {
        let each: Vec<_> = vcpus.iter().map(|vcpu| number(&vcpu["blocked_us"]) / 1000).collect();
        // The last entry contains all threads that are not vCPUs.
        let each = &each[..each.len().saturating_sub(1)];
        info["postcopy-vcpu-blocktime"] = json!(each);
        info["postcopy-blocktime"] = json!(each.iter().max().copied().unwrap_or(0));
    }
    info
}
