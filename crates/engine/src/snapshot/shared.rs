//! Start of a guest whose memory is a snapshot file that it shares with other processes.

use super::open::{Expected, RestoreError, SnapshotPages};
use super::uri;
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
use vmferry_core::{RegionFile, TargetVm};
use vmferry_wire::MigrationId;

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
    warn_if_panics_abort();
    let uri = uri(path);
    let failed = |source| MigrateError::File { uri: uri.clone(), source };
    let file = File::open(path).map_err(failed)?;
    only_its_owner_writes(&file).map_err(failed)?;
    let mapped = Arc::new(OwnedFd::from(file.try_clone().map_err(failed)?));
    let start = |vm: &mut dyn TargetVm| {
        let (machine, memory) = (vm.config(), vm.memory());
        let expected = Expected { machine: &machine, layout: memory.layout() };
        let pages = SnapshotPages::open(path, file, Some(expected))?;
        if !pages.is_complete() {
            return Err(RestoreError::Increment);
        }
        check_tables(&pages)?;
        let region = |place: &vmferry_wire::RegionOffsets| RegionFile {
            region: place.id,
            file: Arc::clone(&mapped),
            offset: place.data,
        };
        let regions: Vec<_> = pages.places().iter().map(region).collect();
        let load = start_shared(vm, &regions, &pages.sections()?)?;
        Ok::<_, RestoreError>((pages.id(), load))
    };
    let new = MigrationId(random()?);
    let (id, load) = start(vm).map_err(|source| MigrateError::Snapshot { uri: uri.clone(), source })?;
    Ok(received(new, id, uri, load))
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
