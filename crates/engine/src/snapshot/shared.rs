//! Start of a guest whose memory is a snapshot file that it shares with other processes.

use super::open::{Expected, RestoreError, SnapshotPages};
use super::uri;
use super::working_set::{Prefetch, PrefetchProgress, Recording};
use crate::branch::{received, start_shared};
use crate::target::Received;
use crate::vm::warn_if_panics_abort;
use crate::{MigrateError, random};
use rustix::fs::Mode;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use vmferry_core::{RegionFile, TargetVm, VmError};
use vmferry_wire::{MigrationId, RegionOffsets, WorkingSet, WorkingSetError};

/// Starts the guest in the file at `path` in `vm`, with the file as its memory.
///
/// The file is mapped privately: all guests that run from it share the pages that they have not
/// written. No page is read before the guest uses it, so the guest starts at once. Because several
/// guests can run from one file, each of them gets a new identity
/// ([`TargetVm::renew_identity`](crate::TargetVm::renew_identity)).
///
/// The header, the machine description, the device state, the indexes and the tables are checked.
/// The pages are not compared with their digests before the guest uses them. Use
/// [`restore_on_demand`](crate::restore_on_demand) if the file may be damaged.
///
/// The file must not change while it is mapped. If it is truncated, the process ends when it
/// accesses a page beyond the end.
///
/// # Errors
/// If the file cannot be opened, if another user than its owner may write to it, or if it does not
/// contain a complete guest that fits the machine of `vm`. The guest has not run.
pub fn restore_shared(vm: &mut dyn TargetVm, path: &Path) -> Result<Received, MigrateError> {
    restore_shared_with(vm, path, SharedSettings::default()).map(|restore| restore.received)
}

/// Settings of [`restore_shared_with`].
///
/// The working set of a guest are the pages of the snapshot that the guest uses after its start. A
/// first run [records](Self::record) it, and later runs [bring it in](Self::prefetch) before the
/// guest needs it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharedSettings {
    /// Working set to bring in, from [`read_working_set`](crate::read_working_set). A thread reads
    /// and maps its pages in their order while the guest runs. The default is `None`.
    pub prefetch: Option<WorkingSet>,
    /// True to record the working set of the guest. Pages that are brought in would be recorded,
    /// too, so do not set both fields. The default is false.
    pub record: bool,
}

/// Guest that runs from a file which it shares with other processes.
///
/// Dropping the value ends the prefetch and the recording. The guest continues to run.
#[derive(Debug)]
pub struct SharedRestore {
    received: Received,
    prefetch: Option<Prefetch>,
    recording: Option<Recording>,
}

impl SharedRestore {
    /// Returns the report of the restored guest.
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// Returns a function that returns the progress of the prefetch. Other threads can call it at
    /// any time. Returns `None` if no working set is brought in.
    pub fn watch_prefetch(&self) -> Option<impl Fn() -> PrefetchProgress + Send + Sync + use<>> {
        self.prefetch.as_ref().map(Prefetch::watch)
    }

    /// Ends the recording, and returns the pages that the guest has used until now, in the order of
    /// their use as far as it is known. Returns `None` if nothing is recorded. Write the result of
    /// [`WorkingSet::encode`] to a file.
    ///
    /// While a recording runs, the memory of the guest is registered with a userfaultfd. Therefore
    /// end the recording before the guest is migrated, branched or saved, or its writes are
    /// tracked.
    ///
    /// # Errors
    /// If the thread that records has panicked.
    pub fn finish_recording(&mut self) -> Result<Option<WorkingSet>, VmError> {
        self.recording.take().map(Recording::finish).transpose()
    }
}

/// Starts the guest in the file at `path` in `vm`, as [`restore_shared`] does, and records its
/// working set or brings it in.
///
/// # Errors
/// In the cases of [`restore_shared`], and [`MigrateError::WorkingSet`] if the working set belongs
/// to another snapshot. The guest has not run.
pub fn restore_shared_with(
    vm: &mut dyn TargetVm,
    path: &Path,
    settings: SharedSettings,
) -> Result<SharedRestore, MigrateError> {
    warn_if_panics_abort();
    let uri = uri(path);
    let file = File::open(path).map_err(|source| MigrateError::File { uri: uri.clone(), source })?;
    start(vm, (path, file), &uri, settings).map_err(|stop| match stop {
        Stop::File(source) => MigrateError::File { uri, source },
        Stop::Snapshot(source) => MigrateError::Snapshot { uri, source },
        Stop::WorkingSet(source) => MigrateError::WorkingSet { uri, source },
        Stop::Other(error) => error,
    })
}

/// Reason why the guest was not started.
enum Stop {
    File(io::Error),
    Snapshot(RestoreError),
    WorkingSet(WorkingSetError),
    Other(MigrateError),
}

impl<E: Into<RestoreError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Snapshot(error.into())
    }
}

fn start(
    vm: &mut dyn TargetVm,
    (path, file): (&Path, File),
    uri: &str,
    settings: SharedSettings,
) -> Result<SharedRestore, Stop> {
    only_its_owner_writes(&file).map_err(Stop::File)?;
    let mapped = Arc::new(OwnedFd::from(file.try_clone().map_err(Stop::File)?));
    let ahead = file.try_clone().map_err(Stop::File)?;
    let (machine, memory) = (vm.config(), vm.memory());
    let expected = Expected { machine: &machine, layout: memory.layout() };
    let pages = SnapshotPages::open(path, file, Some(expected))?;
    if !pages.is_complete() {
        return Err(RestoreError::Increment.into());
    }
    if let Some(set) = &settings.prefetch {
        set.check(pages.id(), vm.memory().layout()).map_err(Stop::WorkingSet)?;
    }
    check_tables(&pages)?;
    let region = |place: &RegionOffsets| RegionFile {
        region: place.id,
        file: Arc::clone(&mapped),
        offset: place.data,
    };
    let regions: Vec<_> = pages.places().iter().map(region).collect();
    let begin = |vm: &mut dyn TargetVm| begin(vm, &pages, ahead, settings);
    let (load, (prefetch, recording)) = start_shared(vm, &regions, &pages.sections()?, begin)?;
    let new = MigrationId(random().map_err(Stop::Other)?);
    let received = received(new, pages.id(), uri.to_owned(), load);
    Ok(SharedRestore { received, prefetch, recording })
}

/// Starts the threads for the working set.
fn begin(
    vm: &mut dyn TargetVm,
    pages: &SnapshotPages,
    file: File,
    settings: SharedSettings,
) -> Result<(Option<Prefetch>, Option<Recording>), VmError> {
    let prefetch = |set| Prefetch::start(set, vm.memory(), file, pages.places());
    let prefetch = settings.prefetch.map(prefetch).transpose()?;
    if !settings.record {
        return Ok((prefetch, None));
    }
    let recording = Recording::start(WorkingSet::new(pages.id()), vm.used_pages()?, vm.memory())?;
    Ok((prefetch, Some(recording)))
}

/// Checks that only the owner of the file can write to it.
fn only_its_owner_writes(file: &File) -> io::Result<()> {
    let mode = Mode::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    if mode.intersects(Mode::WGRP | Mode::WOTH) {
        let why = "users other than its owner may write to the file, and a write would change the memory of \
                   a running guest; remove this permission (chmod go-w)";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

/// Reads all tables and checks them against the indexes and the header.
fn check_tables(pages: &SnapshotPages) -> Result<(), RestoreError> {
    let mut found = 0;
    for (position, place) in pages.places().iter().enumerate() {
        for block in 0..place.blocks() {
            found += pages.block(position, block)?.map_or(0, |pages| pages.contents());
        }
    }
    let expected = pages.contents();
    if found == expected { Ok(()) } else { Err(RestoreError::Pages { found, expected }) }
}
