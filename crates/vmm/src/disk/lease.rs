//! Whose a disk is: the lock by which two sides never write one.
//!
//! # The order of a move
//! | source | target |
//! |---|---|
//! | has the lock since it was started | has the file open, has never read it |
//! | vCPUs stand still, requests come to rest, everything is flushed ([`Vm::save_state`](crate::Vm::save_state)) | |
//! | | loads the state, which says that it is the same disk |
//! | gives the lock up ([`SourceVm::release`](vmferry_engine::SourceVm::release)), then sends the commit | |
//! | | takes the lock, then lets the vCPUs run ([`Vm::start`](crate::Vm::start)) |
//!
//! Until the commit the lock stays where the guest is, so that nothing that happens to the link or to the target can keep the guest from
//! going on there. In between nobody has it, and nobody runs. If the target does not get it, it does not run the guest and says so, and
//! the guest is the source's again, which takes the lock back before it lets the vCPUs run. If the source hears nothing at all, it does
//! not know who runs the guest, but the lock does: a source that is told to run it all the same does not get the lock while the target
//! has it.
//!
//! The lock is on all of the file, so it also stands against VMMs and tools that lock parts of it. It is as good as the file system: NFS
//! and cluster file systems carry it to other hosts, a local one has no other hosts. Block devices are locked on this host only.

use super::DiskError;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use vmferry_sys::lock::{LockKind, try_lock, unlock};

/// Takes the lock of `file`; does nothing if it is had already.
pub(super) fn take(file: &File, path: &Path, kind: LockKind) -> Result<(), DiskError> {
    match try_lock(file.as_fd(), kind) {
        Ok(true) => Ok(()),
        Ok(false) => Err(DiskError::InUse { path: path.into(), by: holder(file) }),
        Err(source) => Err(DiskError::Lock { path: path.into(), source }),
    }
}

/// Gives it up.
pub(super) fn give_up(file: &File, path: &Path) -> Result<(), DiskError> {
    unlock(file.as_fd()).map_err(|source| DiskError::Lock { path: path.into(), source })
}

/// Who has a lock on `file`, as far as that can be seen from here.
fn holder(file: &File) -> String {
    let found = file.metadata().ok().and_then(|meta| {
        let processes = fs::read_dir("/proc").ok()?;
        let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.into_iter().find(|pid| locks(*pid, (meta.dev(), meta.ino()), file))
    });
    match found {
        Some(pid) if pid == std::process::id() => "another VM of this process".to_owned(),
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim().escape_debug())
        }
        None => "somebody that cannot be seen from here (another host, or another user's process)".to_owned(),
    }
}

/// Whether process `pid` has the file `id` open, with a lock, other than as `file`.
fn locks(pid: u32, id: (u64, u64), file: &File) -> bool {
    use std::os::fd::AsRawFd;
    let own = (pid == std::process::id()).then(|| file.as_raw_fd().to_string());
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    files.flatten().any(|entry| {
        let number = entry.file_name();
        let same = || fs::metadata(entry.path()).is_ok_and(|meta| (meta.dev(), meta.ino()) == id);
        let info = || fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.display()));
        own.as_deref().is_none_or(|own| number != own)
            && same()
            && info().is_ok_and(|info| info.lines().any(|line| line.starts_with("lock:")))
    })
}
