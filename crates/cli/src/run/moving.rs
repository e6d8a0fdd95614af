//! Migration of the guest of this process: the request and its result.

use crate::advice::{self, advised};
use crate::api::{GuestPlace, MigrateRequest, RunContext};
use crate::arbiter::ArbiterThread;
use crate::balloon::squeeze::Squeeze;
use crate::choices::{AutoConvergeArg, CodecArg, DeltaArg, ModeArg, OnTimeoutArg};
use crate::guest::Machine;
use crate::{Status, output, plan, sandbox};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::mpsc::SyncSender;
use vmferry_baselines::Policy;
use vmferry_engine::{
    Connect, MigrateError, MigrationState, Report, Settings, Sockets, TrackerKind, Uri, migrate, save,
    save_copy,
};

/// Migrates the guest, if the request can be executed. Returns the place of the guest afterwards,
/// and the exit status of this process if the guest is gone. The client gets its answer when the
/// migration has begun, and reads the progress with `status`.
pub(super) fn begin(
    machine: &mut Machine,
    shared: &RunContext,
    request: &MigrateRequest,
    reply: &SyncSender<Result<Value, String>>,
) -> Option<(GuestPlace, Status)> {
    match prepare(request, shared) {
        Ok(Prepared { uri, sockets, tracker, reaper, settings }) => {
            machine.set_reaper(reaper);
            let _ = reply.send(Ok(json!({})));
            let connector: &dyn Connect = match &sockets {
                Some(sockets) => sockets,
                None => &uri,
            };
            Some(move_away(machine, shared, request, (&uri, connector, tracker), &settings))
        }
        Err(error) => {
            let _ = reply.send(Err(advice::told(&error)));
            None
        }
    }
}

/// A migration that can begin.
struct Prepared {
    uri: Uri,
    /// Sockets that were passed as `uri`, if any.
    sockets: Option<Sockets>,
    tracker: Option<TrackerKind>,
    reaper: Policy,
    settings: Settings,
}

fn prepare(request: &MigrateRequest, shared: &RunContext) -> Result<Prepared> {
    if let (GuestPlace::Paused, Some(why)) = (shared.place(), needs_a_running_guest(request)) {
        bail!("the guest is paused, and {why}; resume the guest first");
    }
    let tracker = tracker(request.tracker.as_deref())?;
    let reaper = request.reaper.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let uri: Uri = request.uri.parse()?;
    sandbox::goes_to(&uri, &shared.sandbox)?;
    if let Some(why) = contradiction(request, &uri) {
        bail!(why);
    }
    // A handoff does not leave the host, and descriptors do not pass through encryption.
    let settings = request.settings(shared.tls.as_ref().filter(|_| !request.local))?;
    let arbiter =
        settings.arbiter.clone().or_else(|| shared.arbiter.clone()).filter(|_| !matches!(uri, Uri::File(_)));
    let settings = Settings { stay_awake: shared.stay_awake, arbiter, ..settings };
    shared.require_all_pages()?;
    // The sockets are taken last, because a refusal after this point would waste them.
    let sockets = match &uri {
        Uri::Fd(names) => {
            let sockets = shared.descriptors.take(names).and_then(|all| Ok(Sockets::new(all)?));
            Some(sockets.with_context(|| uri.to_string())?.named(uri.to_string()))
        }
        _ => None,
    };
    let asked = settings.arbiter.clone().map(ArbiterThread::start).transpose()?;
    // This must happen before the answer: a client that reads the status next must not see an older
    // migration.
    let goes_over = request.mode != ModeArg::Precopy || request.on_timeout == OnTimeoutArg::Postcopy;
    shared.begin_migration(asked, goes_over && !matches!(uri, Uri::File(_)));
    Ok(Prepared { uri, sockets, tracker, reaper, settings })
}

/// Returns why the options of a request contradict each other; `None` if they fit together.
pub(crate) fn contradiction(request: &MigrateRequest, uri: &Uri) -> Option<String> {
    if matches!(uri, Uri::Fd(_)) && (request.plan || request.mode == ModeArg::Auto) {
        return Some(format!(
            "a plan measures the link over its own connections, and {uri} carries only the migration; omit --plan and --mode auto"
        ));
    }
    if request.local
        && let Some(why) = unfit_for_handoff(request, uri)
    {
        return Some(why);
    }
    if request.keep_running && !matches!(uri, Uri::File(_)) {
        return Some(format!(
            "the guest cannot keep running at the source if it moves to {uri}; omit --keep-running, or use file:PATH"
        ));
    }
    let option = of_no_use_for_files(request).filter(|_| matches!(uri, Uri::File(_)))?;
    Some(format!("{option} has no effect for {uri}, because the guest is stopped for a file; omit {option}"))
}

/// Returns why a handoff inside this host cannot have these options; `None` if it can.
fn unfit_for_handoff(request: &MigrateRequest, uri: &Uri) -> Option<String> {
    if !matches!(uri, Uri::Unix(_) | Uri::Fd(_)) {
        return Some(format!(
            "--local passes the guest's memory over a Unix socket, and {uri} is none; use unix:PATH, or omit --local"
        ));
    }
    let option = [
        ("--mode", request.mode != ModeArg::default()),
        ("--tracker", request.tracker.is_some()),
        ("--verify", request.verify),
        ("--plan", request.plan),
        ("--max-bandwidth", request.max_bandwidth.is_some()),
        ("--auto-converge", request.auto_converge != AutoConvergeArg::default()),
        ("--codec", request.codec != CodecArg::default()),
        ("--delta", request.delta != DeltaArg::default()),
        ("--squeeze-cache", request.squeeze_cache.is_some()),
        ("--tls-cert", request.tls.is_some()),
        ("--on-timeout postcopy", request.on_timeout == OnTimeoutArg::Postcopy),
    ]
    .into_iter()
    .find_map(|(option, said)| said.then_some(option))?;
    Some(format!("{option} has no effect with --local, which sends no pages; omit {option}"))
}

/// Returns why the request needs a running guest; `None` if it does not.
fn needs_a_running_guest(request: &MigrateRequest) -> Option<&'static str> {
    if request.uri.starts_with("file:") {
        return Some("a file does not contain this state: the guest would run after the restore");
    }
    if request.squeeze_cache.is_some() {
        return Some("only a running guest can drop page cache (--squeeze-cache)");
    }
    let measures = request.plan || request.mode == ModeArg::Auto;
    measures.then_some("a plan (--plan, --mode auto) measures how a running guest writes")
}

/// Returns the first option that has no effect for a file.
fn of_no_use_for_files(request: &MigrateRequest) -> Option<&'static str> {
    [
        ("--mode", request.mode != ModeArg::default()),
        ("--verify", request.verify),
        ("--plan", request.plan),
        ("--timeout", request.timeout_ms.is_some()),
        ("--max-bandwidth", request.max_bandwidth.is_some()),
        ("--fence", request.arbiter.is_some()),
        ("--squeeze-cache", request.squeeze_cache.is_some()),
    ]
    .into_iter()
    .find_map(|(option, said)| said.then_some(option))
}

/// Returns the requested tracker; `None` for the best one for the kind of guest.
pub(crate) fn tracker(name: Option<&str>) -> Result<Option<TrackerKind>> {
    Ok(match name {
        None | Some("auto") => None,
        Some("log") => Some(TrackerKind::Log),
        Some("ring") => Some(TrackerKind::Ring),
        Some("wp") => Some(TrackerKind::Wp),
        Some(other) => bail!("there is no tracker '{other}'; use auto, log, ring or wp"),
    })
}

/// Migrates the guest. Returns its place afterwards.
fn move_away(
    machine: &mut Machine,
    shared: &RunContext,
    request: &MigrateRequest,
    (uri, connector, tracker): (&Uri, &dyn Connect, Option<TrackerKind>),
    settings: &Settings,
) -> (GuestPlace, Status) {
    let handle = shared.handle();
    shared.speed.record();
    let mut scores = None;
    // The squeeze ends at the next pause of the guest, or with this function.
    let mut squeeze = None;
    let mut prepare = || {
        let begun = |arg| Squeeze::perform(shared.probe.balloon(), arg, &|| handle.cancelled());
        squeeze = request.squeeze_cache.map(begun);
        if squeeze.is_some() {
            shared.end_planning();
        }
    };
    let plans = request.plan || request.mode == ModeArg::Auto;
    if !plans {
        prepare();
    }
    let result = match uri {
        Uri::File(path) if request.keep_running => save_copy(machine.source(), path, &handle),
        Uri::File(path) => save(machine.source(), path, &handle),
        _ if plans => {
            // The planning pauses the guest, so the guest is squeezed afterwards.
            let planned = plan::moved(machine, shared, request, (uri, tracker), settings, &mut prepare);
            planned.map(|(moved, scored)| {
                scores = Some(scored);
                moved
            })
        }
        _ => migrate(machine.source(), connector, tracker, settings, &handle),
    };
    let here = machine.place();
    let place = result.as_ref().map_or(here, |report| place_after(report, request.keep_running, here));
    let lost = result.as_ref().is_ok_and(|report| report.state == MigrationState::Lost);
    let mut report = document(shared, result, uri);
    if let Some(scores) = scores {
        report["plan"] = scores;
    }
    if let Some(squeeze) = squeeze {
        report["squeeze"] = squeeze.document();
    }
    shared.end_migration(report, place);
    (place, if lost { Status::Lost } else { Status::Done })
}

/// Returns the document of a migration or a snapshot that has ended.
pub(super) fn document(shared: &RunContext, result: Result<Report, MigrateError>, uri: &Uri) -> Value {
    let (start, after) = (shared.start(), shared.probe.stats().ok());
    let told = result.map_err(|error| advised(&error, uri));
    let told = told.and_then(|report| serde_json::to_value(report).map_err(|error| error.to_string()));
    let mut report = told.unwrap_or_else(|error| output::not_begun(&error));
    report["guest"] = start.document(&report, after.as_ref());
    let left = output::left_ms(&report);
    let mut points = shared.speed.recorded(start.began);
    points.retain(|[at, _]| left.is_none_or(|left| *at <= left));
    // Points are milliseconds since the beginning, and writes per second.
    report["guest"]["speed"] = json!({ "points": points });
    report
}

/// Returns the place of the guest after a migration. It is `here` if the source still owns the
/// guest.
fn place_after(report: &Report, keep_running: bool, here: GuestPlace) -> GuestPlace {
    match report.state {
        _ if report.resume_failed => GuestPlace::Paused,
        MigrationState::Completed if keep_running => here,
        // A lost guest ran at the target, so its remains at the source must not run.
        MigrationState::Completed | MigrationState::Lost => GuestPlace::Moved,
        MigrationState::Unknown => GuestPlace::Unknown,
        _ => here,
    }
}
