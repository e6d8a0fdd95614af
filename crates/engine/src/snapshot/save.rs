//! Saving a guest to a file.

use super::file::NewFile;
use super::write::{Stop, Written, write};
use super::{ms, uri};
use crate::demand::still_arrives;
use crate::handle::{MigrationHandle, MigrationState};
use crate::report::{Bytes, Downtime, MigrationKind, PassReport, Report};
use crate::vm::warn_if_panics_abort;
use crate::{MigrateError, random};
use std::path::Path;
use std::time::Instant;
use vmferry_core::{SourceVm, VmError};
use vmferry_wire::{MigrationId, SnapshotMap};

/// State of the guest on this host after the save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Afterwards {
    Gone,
    GoesOn,
}

/// Moves the guest of `vm` to the file at `path`: pauses the guest, and writes its memory and its
/// device state.
///
/// If [`Report::state`] is [`MigrationState::Completed`], the guest is in the file, and must not
/// run on this host any more. Otherwise the guest runs on this host again, unless resuming it
/// failed ([`Report::resume_failed`]).
///
/// # Errors
/// If the save could not begin: the file exists already or cannot be created, pages of the guest
/// are still arriving, or the VM has device state that can only be sent as a stream. The guest is
/// not affected. An existing file is never replaced.
pub fn save(vm: &mut dyn SourceVm, path: &Path, handle: &MigrationHandle) -> Result<Report, MigrateError> {
    store(vm, path, handle, Afterwards::Gone)
}

/// Copies the guest of `vm` to the file at `path`. The guest is paused while the file is written.
///
/// Afterwards, the guest continues on this host, whether or not the file was written, unless
/// resuming it failed ([`Report::resume_failed`]). The file is marked as a copy, so that each
/// restore of the file creates a guest with a new identity
/// ([`TargetVm::renew_identity`](crate::TargetVm::renew_identity)).
///
/// # Errors
/// As for [`save`].
pub fn save_copy(
    vm: &mut dyn SourceVm,
    path: &Path,
    handle: &MigrationHandle,
) -> Result<Report, MigrateError> {
    store(vm, path, handle, Afterwards::GoesOn)
}

fn store(
    vm: &mut dyn SourceVm,
    path: &Path,
    handle: &MigrationHandle,
    afterwards: Afterwards,
) -> Result<Report, MigrateError> {
    let began = Instant::now();
    warn_if_panics_abort();
    if still_arrives(&vm.memory()) {
        return Err(MigrateError::StillArriving);
    }
    let failed = |source| MigrateError::File { uri: uri(path), source };
    let id = MigrationId(random()?);
    refuse_streams(vm)?;
    let known = Report { id: id.to_string(), kind: MigrationKind::File, ..Report::default() };
    handle.begin(began, known);
    let mut new = NewFile::create(path, id).map_err(failed)?;
    // If the file system does not allow a file of this length, the error is found here, while the
    // guest still runs. The file is one hole so far.
    new.file().set_len(SnapshotMap::new(vm.memory().layout(), 0, 0).len).map_err(failed)?;
    handle.update(|progress| progress.state = MigrationState::Switchover);
    let pause = Instant::now();
    let copy = afterwards == Afterwards::GoesOn;
    let written = write(vm, new.file(), (id, copy), handle).and_then(|written| {
        new.sync().map_err(Stop::File)?;
        new.name().map_err(Stop::File)?;
        Ok(written)
    });
    if !copy
        && written.is_ok()
        && let Err(error) = vm.release()
    {
        tracing::warn!("the guest is in the file, but cannot be restored before this process ends: {error}");
    }
    let resumed = if copy || written.is_err() { vm.resume() } else { Ok(()) };
    let (mut report, state) = match &written {
        Ok(written) => (account(written), MigrationState::Completed),
        Err(Stop::Cancelled) if resumed.is_ok() => (Report::default(), MigrationState::Cancelled),
        Err(_) => (Report::default(), MigrationState::Failed),
    };
    let why = written.err().map(|stop| stop.to_string());
    report.resume_failed = resumed.is_err();
    report.error = match resumed {
        Ok(()) => why,
        Err(error) => {
            let why = why.map_or_else(String::new, |why| format!("{why}; and "));
            Some(format!("{why}the guest could not be resumed: {error}"))
        }
    };
    report.state = state;
    report.outcome = crate::report::word(state);
    (report.id, report.kind) = (id.to_string(), MigrationKind::File);
    (report.total_ms, report.downtime_ms) = (ms(began.elapsed()), ms(pause.elapsed()));
    handle.update(|progress| progress.state = state);
    Ok(report)
}

/// Returns an error if the VM has device state that can only be sent as a stream.
pub(super) fn refuse_streams(vm: &mut dyn SourceVm) -> Result<(), MigrateError> {
    let streams = vm.streams().map_err(MigrateError::Vm)?;
    let Some(stream) = streams.first() else { return Ok(()) };
    let why = format!(
        "the guest cannot be saved in a file: its device state {} is a stream, which only a target takes",
        stream.name()
    );
    Err(MigrateError::Vm(VmError::new(why)))
}

fn account(written: &Written) -> Report {
    let pages = ms(written.took);
    Report {
        downtime: Downtime {
            pause_ms: ms(written.pause),
            device_state_ms: ms(written.state),
            last_pages_ms: pages,
            ..Downtime::default()
        },
        bytes: Bytes {
            wire: written.bytes,
            raw_pages: written.raw_pages,
            zero_pages: written.zero_pages,
            ..Bytes::default()
        },
        passes: vec![PassReport {
            pages: written.raw_pages + written.zero_pages,
            wire_bytes: written.bytes,
            ms: pages,
            ..PassReport::default()
        }],
        throughput_mbps: if pages > 0.0 { written.bytes as f64 * 8e-3 / pages } else { 0.0 },
        ..Report::default()
    }
}
