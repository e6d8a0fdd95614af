//! A guest that is to go: what is asked for, and what became of it.

use crate::advice::advised;
use crate::api::{MigrateRequest, Place, Shared};
use crate::choices::{ModeArg, OnTimeoutArg};
use crate::fence::Asked;
use crate::guest::Machine;
use crate::{Status, output, plan, sandbox};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::mpsc::SyncSender;
use vmferry_baselines::Policy;
use vmferry_engine::{
    Connect, MigrationState, Report, Settings, Sockets, TrackerKind, Uri, migrate, save, save_copy,
};

/// Moves the guest away, if that can be begun; says where it is then, and as what this process ends if it is gone. Whoever asked is answered when it has begun; how it goes on is
/// asked for by `status`.
pub(super) fn begin(
    machine: &mut Machine,
    shared: &Shared,
    request: &MigrateRequest,
    reply: &SyncSender<Result<Value, String>>,
) -> Option<(Place, Status)> {
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
            let _ = reply.send(Err(format!("{error:#}")));
            None
        }
    }
}

/// A migration that can begin.
struct Prepared {
    uri: Uri,
    /// Sockets that were passed as `uri`, if they were.
    sockets: Option<Sockets>,
    tracker: Option<TrackerKind>,
    reaper: Policy,
    settings: Settings,
}

fn prepare(request: &MigrateRequest, shared: &Shared) -> Result<Prepared> {
    if let (Place::Paused, Some(why)) = (shared.place(), needs_a_running_guest(request)) {
        bail!("the guest is paused, and {why}; resume the guest first");
    }
    let tracker = tracker(request.tracker.as_deref())?;
    let reaper = request.reaper.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let uri: Uri = request.uri.parse()?;
    sandbox::goes_to(&uri, &shared.sandbox)?;
    if matches!(uri, Uri::Fd(_)) && (request.plan || request.mode == ModeArg::Auto) {
        bail!(
            "{uri}: a plan measures the link over connections of its own, and passed sockets are for the migration; leave --plan and --mode auto"
        );
    }
    if request.keep_running && !matches!(uri, Uri::File(_)) {
        bail!(
            "a guest that goes on here can only be copied into a file; leave --keep-running, or use file:PATH"
        );
    }
    if let (Uri::File(_), Some(option)) = (&uri, of_no_use_for_files(request)) {
        bail!(
            "{option} is of no use for a guest that goes into a file, which stands still for that; leave it out"
        );
    }
    let settings = request.settings(shared.tls.as_ref())?;
    let fence =
        settings.fence.clone().or_else(|| shared.fence.clone()).filter(|_| !matches!(uri, Uri::File(_)));
    let settings = Settings { stay_awake: shared.stay_awake, fence, ..settings };
    shared.all_here()?;
    // Last of what can be refused: they are used up by that.
    let sockets = match &uri {
        Uri::Fd(names) => {
            let sockets = shared.descriptors.take(names).and_then(|all| Ok(Sockets::new(all)?));
            Some(sockets.with_context(|| uri.to_string())?.named(uri.to_string()))
        }
        _ => None,
    };
    let asked = settings.fence.clone().map(Asked::start).transpose()?;
    // From here on, before the answer: whoever asks for the status next must not see an older migration's.
    let goes_over = request.mode != ModeArg::Precopy || request.on_timeout == OnTimeoutArg::Postcopy;
    shared.begin_migration(asked, goes_over && !matches!(uri, Uri::File(_)));
    Ok(Prepared { uri, sockets, tracker, reaper, settings })
}

/// Reason for which a request is for a running guest only, if it is.
fn needs_a_running_guest(request: &MigrateRequest) -> Option<&'static str> {
    if request.uri.starts_with("file:") {
        return Some("a file does not keep that: the guest would run when it is restored");
    }
    let measures = request.plan || request.mode == ModeArg::Auto;
    measures.then_some("a plan (--plan, --mode auto) measures how a running guest writes")
}

/// An option that asks for something that does not happen there.
fn of_no_use_for_files(request: &MigrateRequest) -> Option<&'static str> {
    [
        ("--mode", request.mode != ModeArg::default()),
        ("--verify", request.verify),
        ("--plan", request.plan),
        ("--timeout", request.timeout_ms.is_some()),
        ("--max-bandwidth", request.max_bandwidth.is_some()),
        ("--fence", request.fence.is_some()),
    ]
    .into_iter()
    .find_map(|(option, said)| said.then_some(option))
}

/// The tracker that a request asks for; `None` for what the guest's kind does best.
pub(crate) fn tracker(name: Option<&str>) -> Result<Option<TrackerKind>> {
    Ok(match name {
        None | Some("auto") => None,
        Some("log") => Some(TrackerKind::Log),
        Some("ring") => Some(TrackerKind::Ring),
        Some("wp") => Some(TrackerKind::Wp),
        Some(other) => bail!("there is no tracker '{other}'; use auto, log, ring or wp"),
    })
}

/// Moves the guest and says where it is then.
fn move_away(
    machine: &mut Machine,
    shared: &Shared,
    request: &MigrateRequest,
    (uri, connector, tracker): (&Uri, &dyn Connect, Option<TrackerKind>),
    settings: &Settings,
) -> (Place, Status) {
    let monitor = shared.monitor();
    let start = shared.start();
    shared.speed.record();
    let mut scores = None;
    let result = match uri {
        Uri::File(path) if request.keep_running => save_copy(machine.source(), path, &monitor),
        Uri::File(path) => save(machine.source(), path, &monitor),
        _ if request.plan || request.mode == ModeArg::Auto => {
            let planned = plan::moved(machine, shared, request, (uri, tracker), settings);
            planned.map(|(moved, scored)| {
                scores = Some(scored);
                moved
            })
        }
        _ => migrate(machine.source(), connector, tracker, settings, &monitor),
    };
    let after = shared.probe.stats().ok();
    let here = machine.place();
    let place = result.as_ref().map_or(here, |report| place_after(report, request.keep_running, here));
    let lost = result.as_ref().is_ok_and(|report| report.state == MigrationState::Lost);
    let told = result.map_err(|error| advised(&error, uri));
    let told = told.and_then(|report| serde_json::to_value(report).map_err(|error| error.to_string()));
    let mut report = told.unwrap_or_else(|error| output::not_begun(&error));
    report["guest"] = start.document(&report, after.as_ref());
    let left = output::left_ms(&report);
    let mut points = shared.speed.recorded(start.began);
    points.retain(|[at, _]| left.is_none_or(|left| *at <= left));
    // Milliseconds since the beginning, writes a second.
    report["guest"]["speed"] = json!({ "points": points });
    if let Some(scores) = scores {
        report["plan"] = scores;
    }
    shared.end_migration(report, place);
    (place, if lost { Status::Lost } else { Status::Done })
}

/// Place of the guest after a migration. It is `here` if it is this side's.
fn place_after(report: &Report, keep_running: bool, here: Place) -> Place {
    match report.state {
        _ if report.stands_still => Place::Paused,
        MigrationState::Completed if keep_running => here,
        // Where it is lost it ran elsewhere; nothing that is here of it may run.
        MigrationState::Completed | MigrationState::Lost => Place::Moved,
        MigrationState::Unknown => Place::Unknown,
        _ => here,
    }
}
