//! File locks that belong to an open file description, not to a process (`fcntl(2)`,
//! `F_OFD_SETLK`).
//!
//! The kernel releases such a lock when the last descriptor of the open file is closed, even if the
//! process crashes. The lock stays if the process opens the same file again and closes that
//! descriptor. Network file systems such as NFS can enforce these locks between hosts.

use crate::SysError;
use crate::error::common;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Kind of a lock, which decides the locks that other open files may hold at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Other open files may hold shared locks. The file must be open for reading.
    Shared,
    /// No other open file may hold a lock. The file must be open for writing.
    Exclusive,
}

/// Locks all of `file` without waiting, or changes the kind of its lock. Returns false if another
/// open file holds a conflicting lock.
///
/// # Errors
/// Returns an error if the file is not open in the mode that the kind of lock needs, or if its file
/// system does not support locks.
pub fn try_lock(file: BorrowedFd<'_>, kind: LockKind) -> Result<bool, SysError> {
    let kind = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    };
    match set(file, kind) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.errno(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Releases the lock of `file`, if it has one.
///
/// # Errors
/// Returns the error of the file system.
pub fn unlock(file: BorrowedFd<'_>) -> Result<(), SysError> {
    set(file, libc::F_UNLCK)
}

fn set(file: BorrowedFd<'_>, kind: libc::c_int) -> Result<(), SysError> {
    let whole = libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or(libc::c_short::MAX),
        l_whence: 0,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    loop {
        // SAFETY: the kernel reads the `flock` structure during the call.
        let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) };
        if done == 0 {
            return Ok(());
        }
        let error = SysError::last(
            "fcntl(F_OFD_SETLK)",
            || "a whole file".to_owned(),
            |errno| match errno {
                libc::EAGAIN | libc::EACCES => "another open file holds a conflicting lock",
                libc::ENOLCK => {
                    "the file system has no free lock; on NFS, check that the lock service runs on both hosts"
                }
                libc::EOPNOTSUPP | libc::ENOSYS => "this file system does not support locks",
                other => common(other),
            },
        );
        if error.errno() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    /// Opens the same file twice.
    fn twice() -> [File; 2] {
        let path = std::env::temp_dir().join(format!("vmferry-lock-{}", std::process::id()));
        let open =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let files = [open(), open()];
        std::fs::remove_file(&path).unwrap();
        // The name is reused between the two calls only if another process with the same process id
        // runs this test.
        files
    }

    #[test]
    fn locks_belong_to_open_files() {
        let [one, other] = twice();
        let lock = |file: &File, kind| try_lock(file.as_fd(), kind).unwrap();
        assert!(lock(&one, LockKind::Exclusive) && lock(&one, LockKind::Exclusive));
        assert!(!lock(&other, LockKind::Exclusive) && !lock(&other, LockKind::Shared));
        unlock(one.as_fd()).unwrap();
        unlock(one.as_fd()).unwrap();
        assert!(lock(&other, LockKind::Shared) && lock(&one, LockKind::Shared));
        assert!(!lock(&one, LockKind::Exclusive));
        // A copy of the descriptor refers to the same open file: the lock stays until both are
        // closed.
        let copy = other.try_clone().unwrap();
        drop(other);
        assert!(!lock(&one, LockKind::Exclusive));
        drop(copy);
        assert!(lock(&one, LockKind::Exclusive));
    }

    #[test]
    fn a_file_that_cannot_be_written_cannot_be_locked_exclusively() {
        let file = File::open("/proc/self/exe").unwrap();
        let error = try_lock(file.as_fd(), LockKind::Exclusive).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EBADF), "{error}");
    }
}
