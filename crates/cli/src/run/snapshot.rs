//! Snapshot of the running guest of this process: the request and its result.

use super::moving::document;
use crate::advice;
use crate::api::{GuestPlace, RunContext, SnapshotRequest};
use crate::guest::Machine;
use crate::sandbox;
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;
use vmferry_engine::{PauseHook, SnapshotSettings, Uri, snapshot_background};

/// Writes a snapshot of the guest, if the request can be executed. The client gets its answer when
/// the snapshot has begun, and reads the progress with `status`.
pub(super) fn begin(
    machine: &mut Machine,
    shared: &Arc<RunContext>,
    request: &SnapshotRequest,
    reply: &SyncSender<Result<Value, String>>,
) {
    match prepare(request, shared) {
        Ok((uri, path)) => {
            let _ = reply.send(Ok(json!({})));
            take(machine, shared, request, (&uri, &path));
        }
        Err(error) => drop(reply.send(Err(advice::told(&error)))),
    }
}

fn prepare(request: &SnapshotRequest, shared: &RunContext) -> Result<(Uri, PathBuf)> {
    let uri: Uri = request.uri.parse()?;
    let Uri::File(path) = &uri else {
        bail!("a snapshot is written to a file, not to {uri}; use file:PATH");
    };
    let path = path.clone();
    if shared.place() == GuestPlace::Paused {
        bail!(
            "the guest is paused, and a file does not contain this state: the guest would run after the restore; resume the guest first"
        );
    }
    sandbox::goes_to(&uri, &shared.sandbox)?;
    if let Some(base) = &request.since {
        sandbox::goes_to(&Uri::File(base.clone()), &shared.sandbox)?;
    }
    shared.require_all_pages()?;
    // This must happen before the answer: a client that reads the status next must not see an older
    // migration.
    shared.begin_migration(None, false);
    if request.hook_limit_ms.is_some() {
        shared.pause_gate.expect();
    }
    Ok((uri, path))
}

fn take(
    machine: &mut Machine,
    shared: &Arc<RunContext>,
    request: &SnapshotRequest,
    (uri, path): (&Uri, &PathBuf),
) {
    let handle = shared.handle();
    shared.speed.record();
    let mut settings = SnapshotSettings::default();
    settings.buffer = request.snapshot_buffer.unwrap_or(settings.buffer);
    settings.max_bandwidth = request.max_bandwidth;
    settings.verify = request.verify;
    settings.since.clone_from(&request.since);
    settings.in_pause = request.hook_limit_ms.map(|limit| {
        let (shared, handle) = (Arc::clone(shared), Arc::clone(&handle));
        PauseHook::new(move || shared.pause_gate.hold(Duration::from_millis(limit), || handle.cancelled()))
    });
    let result = snapshot_background(machine.source(), path, &settings, &handle);
    shared.pause_gate.close();
    let stopped = result.as_ref().is_ok_and(|report| report.resume_failed);
    let place = if stopped { GuestPlace::Paused } else { machine.place() };
    let report = document(shared, result, uri);
    shared.end_migration(report, place);
}
