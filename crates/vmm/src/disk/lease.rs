//! Ownership of a disk: the lock that keeps two VMs from writing to one disk.
//!
//! # Order in a migration
//! | source | target |
//! |---|---|
//! | holds the lock since its start | has the file open, has never read it |
//! | vCPUs are paused, requests are quiesced, everything is flushed ([`Vm::save_state`](crate::Vm::save_state)) | |
//! | | loads the state, which shows that it is the same disk |
//! | releases the lock ([`SourceVm::release`](vmferry_engine::SourceVm::release)), then sends the commit | |
//! | | takes the lock, then lets the vCPUs run ([`Vm::start`](crate::Vm::start)) |
//!
//! Until shortly before the commit, the source holds the lock, so that a failure of the link or of
//! the target cannot keep the guest from continuing on the source. Between the release and the
//! take, no VM holds the lock and no guest runs. If the target does not get the lock, it does not
//! run the guest, and reports this. The source then owns the guest, and takes the lock back before
//! it lets the vCPUs run. If the source gets no answer, it does not know whether the target runs
//! the guest, but the lock prevents that both run it: a source that is told to run the guest does
//! not get the lock while the target holds it.
//!
//! The lock covers the whole file, so it also excludes VMMs and tools that lock parts of the file.
//! Its scope depends on the file system: NFS and cluster file systems enforce it between hosts, and
//! a local file system cannot be used by other hosts anyway. The lock of a block device holds only
//! on this host.

use super::DiskError;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use vmferry_sys::lock::{LockKind, try_lock, unlock};

/// Takes the lock of `file`. Does nothing if the file is locked through it already.
pub(super) fn take(file: &File, path: &Path, kind: LockKind) -> Result<(), DiskError> {
    match try_lock(file.as_fd(), kind) {
        Ok(true) => Ok(()),
        Ok(false) => Err(DiskError::InUse { path: path.into(), by: holder(file) }),
        Err(source) => Err(DiskError::Lock { path: path.into(), source }),
    }
}

/// Releases the lock of `file`.
pub(super) fn give_up(file: &File, path: &Path) -> Result<(), DiskError> {
    unlock(file.as_fd()).map_err(|source| DiskError::Lock { path: path.into(), source })
}

/// Returns a description of the holder of a lock on `file`, as far as this process can see it.
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
        None => "an unknown holder (another host, or another user's process)".to_owned(),
    }
}

/// Returns true if process `pid` has the file `id` open and locked through another descriptor than
/// `file`.
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
