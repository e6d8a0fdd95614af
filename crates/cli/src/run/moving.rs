//! A guest that is to go: what is asked for, and what became of it.

use crate::api::{MigrateRequest, Place, Shared};
use crate::choices::{ModeArg, OnTimeoutArg};
use crate::fence::Asked;
use crate::guest::Machine;
use crate::{Status, output, plan, sandbox};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::sync::mpsc::SyncSender;
use vmferry_dirty::Policy;
use vmferry_engine::{MigrationState, Report, Settings, TrackerKind, Uri, migrate, save, save_copy};
use vmferry_guest_abi::StatsSnapshot;

/// Moves the guest away, if that can be begun; says where it is then, and as what this process ends if it is gone. Whoever asked is answered when it has begun; how it goes on is
/// asked for by `status`.
pub(super) fn begin(
    machine: &mut Machine,
    shared: &Shared,
    request: &MigrateRequest,
    reply: &SyncSender<Result<Value, String>>,
) -> Option<(Place, Status)> {
    match prepare(request, shared) {
        Ok((uri, tracker, reaper, settings)) => {
            machine.set_reaper(reaper);
            let _ = reply.send(Ok(json!({})));
            Some(move_away(machine, shared, request, (&uri, tracker), &settings))
        }
        Err(error) => {
            let _ = reply.send(Err(format!("{error:#}")));
            None
        }
    }
}

fn prepare(
    request: &MigrateRequest,
    shared: &Shared,
) -> Result<(Uri, Option<TrackerKind>, Policy, Settings)> {
    if shared.place() == Place::Paused {
        bail!("the guest is paused; resume it first, so that it runs on the other side");
    }
    let tracker = tracker(request.tracker.as_deref())?;
    let reaper = request.reaper.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let uri = request.uri.parse()?;
    sandbox::goes_to(&uri, &shared.sandbox)?;
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
    let asked = settings.fence.clone().map(Asked::start).transpose()?;
    // From here on, before the answer: whoever asks for the status next must not see an older migration's.
    let goes_over = request.mode != ModeArg::Precopy || request.on_timeout == OnTimeoutArg::Postcopy;
    shared.begin_migration(asked, goes_over && !matches!(uri, Uri::File(_)));
    Ok((uri, tracker, reaper, settings))
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
    (uri, tracker): (&Uri, Option<TrackerKind>),
    settings: &Settings,
) -> (Place, Status) {
    let monitor = shared.monitor();
    let start = shared.start();
    shared.speed.record();
    let stats_before = shared.probe.stats().ok();
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
        _ => migrate(machine.source(), uri, tracker, settings, &monitor),
    };
    let after = shared.probe.stats().ok();
    let place = result.as_ref().map_or(Place::Running, |report| place_after(report, request.keep_running));
    let lost = result.as_ref().is_ok_and(|report| report.state == MigrationState::Lost);
    let told = result.map_err(|error| error.to_string());
    let told = told.and_then(|report| serde_json::to_value(report).map_err(|error| error.to_string()));
    let mut report = told.unwrap_or_else(|error| output::not_begun(&error));
    report["guest"] = start.document(&report, after.as_ref());
    let left = output::left_ms(&report);
    let mut points = shared.speed.recorded(start.began);
    points.retain(|[at, _]| left.is_none_or(|left| *at <= left));
    let stalls = stats_before.as_ref().zip(after.as_ref()).map(|(before, after)| {
        let seen = stall_sum_us(after) - stall_sum_us(before);
        (seen, seen - accounted_us(&report, after.cpus().len(), left.is_none()))
    });
    report["guest"]["stall_sum_us"] = json!(stalls.map(|(seen, _)| seen));
    report["guest"]["stall_residue_us"] = json!(stalls.map(|(_, residue)| residue));
    // Milliseconds since the beginning, writes a second.
    report["guest"]["speed"] = json!({ "points": points });
    if let Some(scores) = scores {
        report["plan"] = scores;
    }
    shared.end_migration(report, place);
    (place, if lost { Status::Lost } else { Status::Done })
}

/// Returns the sum of all stalls that the guest has seen by its own clock, of all vCPUs together.
fn stall_sum_us(stats: &StatsSnapshot) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "microseconds for people")]
    stats.cpus().iter().map(|cpu| cpu.stall_sum_us as f64).sum()
}

/// Returns the time for which vCPUs stood still at the source, in microseconds and of all vCPUs together, by the causes that `report` names.
/// The switchover is one of them only for a guest that `stayed`: otherwise it ends at the target.
fn accounted_us(report: &Value, cpus: usize, stayed: bool) -> f64 {
    let of = |value: &Value| value.as_f64().unwrap_or(0.0);
    let held: f64 = report["throttle"]["held_ms"].as_array().into_iter().flatten().map(of).sum();
    let switchover = if stayed { of(&report["downtime_ms"]) + of(&report["verify_ms"]) } else { 0.0 };
    let stopped = of(&report["put_off_ms"]) + of(&report["trial_pause_ms"]) + switchover;
    #[expect(clippy::cast_precision_loss, reason = "a number of vCPUs")]
    let stopped = stopped * cpus as f64;
    of(&report["ring"]["full_stall_us"]) + (held + stopped) * 1e3
}

fn place_after(report: &Report, keep_running: bool) -> Place {
    match report.state {
        _ if report.stands_still => Place::Paused,
        MigrationState::Completed if keep_running => Place::Running,
        // Where it is lost it ran elsewhere; nothing that is here of it may run.
        MigrationState::Completed | MigrationState::Lost => Place::Moved,
        MigrationState::Unknown => Place::Unknown,
        _ => Place::Running,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_at_the_source_is_accounted_for_once() {
        let report = json!({
            "downtime_ms": 40.0, "verify_ms": 2.0, "put_off_ms": 8.0, "trial_pause_ms": 1.5,
            "ring": { "full_stall_us": 700 }, "throttle": { "held_ms": [20.0, 0.25] },
        });
        assert_eq!(accounted_us(&report, 2, false), 700.0 + 20_250.0 + 2.0 * 9_500.0);
        assert_eq!(accounted_us(&report, 2, true), 700.0 + 20_250.0 + 2.0 * 51_500.0);
        assert_eq!(accounted_us(&json!({ "ring": null, "throttle": null }), 1, true), 0.0);
    }
}
