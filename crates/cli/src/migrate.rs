//! `vmferry migrate`: makes a running vmferry move its guest, and watches the migration.

use crate::api::{self, Client, MigrateRequest};
use crate::arbiter::{ArbiterArg, ArbiterConfig};
use crate::args::{MigrateArgs, TrackerArg};
use crate::choices::{ChannelsArg, ModeArg, OnTimeoutArg};
use crate::descriptors::{Inherited, PassedDescriptors};
use crate::events::Events;
use crate::progress::Progress;
use crate::usage::wrong_usage;
use crate::{Status, advice, ctrl_c, output, run};
use anyhow::Result;
use serde_json::{Value, json};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmferry_control::ClientError;
use vmferry_engine::{BulkLimit, Uri};

/// Interval at which the status is read.
const POLL: Duration = Duration::from_millis(25);

pub(crate) fn migrate(args: &MigrateArgs, inherited: Inherited) -> Result<Status> {
    let mut request = request(args)?;
    if let Some(why) = run::contradiction(&request, &args.uri) {
        wrong_usage!("{why}");
    }
    // The outputs are opened before the migration, so that a mistyped name fails at
    // once. They are opened before Ctrl-C is caught, because opening a pipe waits for its reader.
    let mut events = args.events.as_deref().map(Events::to).transpose()?;
    let open = if args.json == args.events { output::append } else { output::open };
    let json_out = args.json.as_deref().map(open).transpose()?;
    let stage = ctrl_c::caught(&args.api)?;
    let mut client = Client::connect(&args.api)?;
    if request.has_secrets() {
        client.trusted_with_secrets()?;
    }
    let (uri, handed) = PassedDescriptors::over(&mut client, &args.uri, inherited)?;
    request.uri = uri.to_string();
    let unanswered = match begin(&mut client, "migrate", serde_json::to_value(request)?) {
        Ok(unanswered) => unanswered,
        Err(error) => {
            handed.take_back(&mut client);
            return Err(error);
        }
    };
    stage.begun.store(true, Ordering::Release);
    let mut on_event = |status: &Value| {
        if let Some(events) = &events {
            events.publish(status);
        }
    };
    let report = unanswered
        .unwrap_or_else(|| watch(&mut client, args.max_bandwidth, &stage.interrupted, &mut on_event));
    let detached = report["detached"] == true;
    let status = if detached { Status::Done } else { output::exit_status(&report) };
    let _ = stage.ended.set(status);
    // The result says where the guest is, and must be printed even if no reader takes the rest.
    // Therefore readers are waited for last. The exception is a reader that gets the report after
    // the events in one stream.
    let behind = events.is_some() && args.json == args.events;
    if behind {
        conclude(args, &report, status);
        events.take().into_iter().for_each(|events| events.finish(Duration::MAX));
    }
    if !detached && let Err(error) = print_report(args, json_out, &report, status) {
        output::print_message(&format!("cannot write the report: {}", output::chain(&error)));
    }
    if !behind {
        conclude(args, &report, status);
        events.into_iter().for_each(|events| events.finish(Duration::MAX));
    }
    Ok(status)
}

/// Prints on standard error where the guest is and what to do.
fn conclude(args: &MigrateArgs, report: &Value, status: Status) {
    let uri = &args.uri;
    if report["detached"] == true {
        output::print_message(&format!(
            "the guest runs at {uri}; the rest of its memory follows without this command"
        ));
    } else if report["stands_still"] == true && report["outcome"] == "completed" {
        let why = report["error"].as_str().unwrap_or("no reason was given");
        output::print_message(&format!(
            "{uri} holds a copy of the guest. The guest is stopped at the source because it could not be resumed: {why}. \
             `vmferry resume` tries again"
        ));
    } else if status != Status::Done {
        output::print_message(&advice::advice(report, uri));
    }
}

fn print_report(
    args: &MigrateArgs,
    json_out: Option<impl Write>,
    report: &Value,
    status: Status,
) -> Result<()> {
    match json_out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(report)?)?,
        None if args.events.as_deref() == Some(std::path::Path::new("-")) => {}
        None => {
            let mut shown = report.clone();
            if status != Status::Done {
                // The advice that follows contains the error.
                shown["error"].take();
            }
            output::print(&shown, false)?;
        }
    }
    Ok(())
}

fn request(args: &MigrateArgs) -> Result<MigrateRequest> {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Ok(MigrateRequest {
        uri: args.uri.to_string(),
        mode: args.mode,
        urgent: args.urgent,
        urgent_channels: args.urgent_channels,
        pace: args.pace,
        reconnect_for_ms: millis(args.reconnect_for),
        tracker: tracker(args.tracker),
        reaper: Some(args.reaper.to_string()),
        channels: channels(args),
        downtime_limit_ms: millis(args.downtime_limit),
        max_bandwidth: args.max_bandwidth,
        switchover_bandwidth: args.switchover_bandwidth,
        timeout_ms: args.timeout.map(millis),
        on_timeout: args.on_timeout,
        auto_converge: args.auto_converge,
        plan: args.plan,
        free_pages: args.free_pages,
        squeeze_cache: args.squeeze_cache,
        codec: args.encoding.codec,
        delta: args.encoding.delta,
        delta_cache: args.encoding.delta_cache,
        verify: args.verify,
        keep_running: args.keep_running,
        local: args.local,
        insecure: args.insecure,
        arbiter: args.arbiter.as_ref().map(arbiter).transpose()?,
        tls: args.tls.texts()?,
        peer_timeout_ms: millis(args.peer_timeout),
    })
}

/// Returns the number of bulk channels to request. Of several sockets, those that no other channel
/// needs are bulk channels.
fn channels(args: &MigrateArgs) -> ChannelsArg {
    let sockets = match &args.uri {
        Uri::Fd(names) if names.len() > 1 => u16::try_from(names.len()).unwrap_or(u16::MAX),
        _ => return args.channels.unwrap_or_default(),
    };
    let postcopy = args.mode != ModeArg::Precopy || args.on_timeout == OnTimeoutArg::Postcopy;
    let postcopy = if postcopy {
        args.urgent_channels.saturating_add(u16::from(args.pace.0 == BulkLimit::Auto))
    } else {
        0
    };
    let spare = || ChannelsArg::Count(sockets.saturating_sub(postcopy.saturating_add(1)).max(1));
    args.channels.unwrap_or_else(spare)
}

fn arbiter(arg: &ArbiterArg) -> Result<ArbiterConfig> {
    let texts = arg.texts()?;
    // The texts are checked in this process, which knows the files. Whether plain connections are
    // permitted is checked by the process that has the guest.
    texts.build(true)?;
    Ok(ArbiterConfig::Texts(Box::new(texts)))
}

pub(crate) fn tracker(arg: TrackerArg) -> Option<String> {
    arg.kind().map(|kind| kind.to_string())
}

/// Sends the command that begins a migration or a snapshot. Returns `None` if the process accepted
/// the command. If the process did not answer, it may have begun; then the document says that the
/// result is unknown.
///
/// # Errors
/// Returns an error if the process refused the command.
pub(crate) fn begin(client: &mut Client, command: &str, request: Value) -> Result<Option<Value>> {
    match client.call(command, request) {
        Ok(_) => Ok(None),
        Err(error) if matches!(error.downcast_ref(), Some(ClientError::Refused(_))) => Err(error),
        Err(error) => Ok(Some(unanswered(&error))),
    }
}

/// Shows the progress of a migration until its end, and returns its document. `limit` is its
/// bandwidth limit in bytes per second.
///
/// Ctrl-C cancels the migration while that is possible. After the handover the source cannot cancel
/// it. If the process of the source does not answer, the document says that the owner is unknown.
pub(crate) fn watch(
    client: &mut Client,
    limit: Option<u64>,
    interrupted: &AtomicBool,
    on_event: &mut dyn FnMut(&Value),
) -> Value {
    let mut bar = Progress::new(limit);
    loop {
        let mut status = match client.call("status", json!({})) {
            Ok(status) => status,
            Err(error) => {
                bar.finish();
                return unanswered(&error);
            }
        };
        on_event(&status);
        let handed_over = status["state"].as_str().is_some_and(|state| state.starts_with("postcopy"));
        let awaits = status["progress"]["awaits_recover"] == true;
        if awaits {
            status["error"] = status["progress"]["interrupted"].clone();
        }
        if !status["outcome"].is_null() || awaits {
            bar.finish();
            return status;
        }
        bar.show(&status);
        if interrupted.swap(false, Ordering::AcqRel) {
            if handed_over && status["state"] == "postcopy" {
                bar.finish();
                status["detached"] = json!(true);
                return status;
            }
            if handed_over {
                // The link is lost, so the rest of the memory may not follow. The command ends with
                // the current status.
                status["error"] = status["progress"]["interrupted"].clone();
                bar.finish();
                return status;
            }
            // The cancel is refused only if the migration has just ended, which the next status
            // says.
            let _ = client.call("cancel", json!({}));
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the document of a migration whose source process does not answer.
///
/// The owner is unknown, and the last status does not tell it. The source may have handed the guest
/// over since, or have sent the last missing page and ended as intended.
fn unanswered(error: &anyhow::Error) -> Value {
    if !api::is_gone(error) {
        return json!({
            "state": "unknown", "outcome": "unknown", "source_silent": true, "error": format!("{error:#}")
        });
    }
    json!({ "state": "unknown", "outcome": "unknown", "source_gone": true, "error": format!("{error:#}") })
}
