//! Saving a guest to a file.

use super::write::{Stop, Written, write};
use super::{ms, uri};
use crate::demand::still_arrives;
use crate::handle::{MigrationHandle, MigrationState};
use crate::report::{Bytes, Downtime, MigrationKind, PassReport, Report};
use crate::vm::warn_if_panics_abort;
use crate::{MigrateError, random};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use vmferry_core::{SourceVm, VmError};
use vmferry_wire::{MigrationId, SnapshotMap};

/// Temporary file. The file is removed when the value is dropped, unless the file has got its final
/// name.
struct Partial {
    path: PathBuf,
    named: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.named {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

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
    if let Some(stream) = vm.streams().map_err(MigrateError::Vm)?.first() {
        let why = format!(
            "the guest cannot be saved in a file: its device state {} is a stream, which only a target takes",
            stream.name()
        );
        return Err(MigrateError::Vm(VmError::new(why)));
    }
    let known = Report { id: id.to_string(), kind: MigrationKind::File, ..Report::default() };
    handle.begin(began, known);
    let (mut partial, file) = create(path, id).map_err(failed)?;
    // If the file system does not allow a file of this length, the error is found here, while the
    // guest still runs. The file is one hole so far.
    file.set_len(SnapshotMap::new(vm.memory().layout(), 0, 0).len).map_err(failed)?;
    handle.update(|progress| progress.state = MigrationState::Switchover);
    let pause = Instant::now();
    let copy = afterwards == Afterwards::GoesOn;
    let written = write(vm, &file, (id, copy), handle).and_then(|written| {
        file.sync_all().map_err(Stop::File)?;
        give_name(&partial.path, path).map_err(Stop::File)?;
        partial.named = true;
        // Some network file systems cannot sync a directory. The directory then still has the
        // entry.
        let _ = File::open(folder(path)).and_then(|folder| folder.sync_all());
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

fn already_exists() -> io::Error {
    let why =
        "the file exists already, and may be the only copy of a guest: move it away, or choose another name";
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}

/// Renames a file without replacing another file.
fn give_name(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags};
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(already_exists()),
        // The file system does not support NOREPLACE.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)
        }
        Err(error) => Err(error.into()),
    }
}

/// Creates the temporary file in the folder of `path`. Fails if `path` exists.
fn create(path: &Path, id: MigrationId) -> io::Result<(Partial, File)> {
    if path.symlink_metadata().is_ok() {
        return Err(already_exists());
    }
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
    name.push(format!(".partial-{id}"));
    let path = path.with_file_name(name);
    // Readable by its owner only, because the file contains the memory of a guest.
    let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
    Ok((Partial { path, named: false }, file))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
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
