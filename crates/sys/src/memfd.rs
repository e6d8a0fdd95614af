//! Which parts of a memfd hold data, and dropping them.

use crate::SysError;
use crate::error::common;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Calls `each` with every range of bytes of `within` that holds data, in order (`lseek(2)`, `SEEK_DATA`, `SEEK_HOLE`).
///
/// Data is what was ever written, through any mapping of the file in any process, in memory or swapped out, and not
/// punched out since. Ranges are whole pages, or whole huge pages if the file has them. A memfd made of huge pages
/// (`MFD_HUGETLB`) does not tell: all of it counts as data. The file's offset, which nobody uses with memory, is moved.
///
/// # Errors
/// If `file` is not a file that can tell.
pub fn data_ranges(
    file: BorrowedFd<'_>,
    within: Range<u64>,
    mut each: impl FnMut(Range<u64>),
) -> Result<(), SysError> {
    let mut at = within.start;
    while at < within.end {
        let Some(start) = seek(file, at, libc::SEEK_DATA)? else { return Ok(()) };
        if start >= within.end {
            return Ok(());
        }
        // There is a hole at the end of every file, so None happens only if it was truncated in between.
        let end = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(within.end).clamp(start, within.end);
        if start < end {
            each(start..end);
        }
        // A hole punched between the two calls makes an empty range; look behind it.
        at = end.max(start + 1);
    }
    Ok(())
}

/// Drops the pages at the bytes `within` of `file`, in memory or swapped out (`fallocate(2)`, `FALLOC_FL_PUNCH_HOLE`): for
/// every mapping of the file, in every process, they are missing from now on.
///
/// Says whether they are really gone. A huge page that somebody holds at the moment is not split for a part of it: that
/// part is overwritten with zeros instead, and is there as before.
///
/// # Errors
/// If `file` is no file with pages to drop, or is sealed against writes.
pub fn punch(file: BorrowedFd<'_>, within: Range<u64>) -> Result<bool, SysError> {
    erase(file, within.clone())?;
    Ok(seek(file, within.start, libc::SEEK_DATA)?.is_none_or(|data| data >= within.end))
}

/// Makes the bytes `within` of `file` read as zeros in every mapping: whole pages are dropped, parts of one overwritten.
///
/// # Errors
/// As for [`punch`].
pub fn erase(file: BorrowedFd<'_>, within: Range<u64>) -> Result<(), SysError> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, within.start, within.end - within.start).map_err(|error| {
        let target = format!("offsets {:#x}..{:#x}", within.start, within.end);
        SysError::from_io("fallocate(PUNCH_HOLE)", target, error.into(), |errno| match errno {
            libc::EPERM => "the file is sealed against writes",
            libc::EOPNOTSUPP => "this kind of file cannot drop pages",
            other => common(other),
        })
    })
}

/// Sees to it that the file has pages at the bytes `within`; those that it has stay as they are, others are zeros. A page
/// that is only touched instead, and that the host does not have, is a SIGBUS.
///
/// # Errors
/// If the host has none to give.
pub fn populate(file: BorrowedFd<'_>, within: Range<u64>) -> Result<(), SysError> {
    use rustix::fs::FallocateFlags;
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, within.start, within.end - within.start)
        {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                let target = format!("offsets {:#x}..{:#x}", within.start, within.end);
                return Err(SysError::from_io("fallocate", target, error.into(), |errno| match errno {
                    libc::ENOSPC | libc::ENOMEM => "the host has no (huge) page left for it",
                    other => common(other),
                }));
            }
        }
    }
}

/// The next data or hole at or after `from`; `None` beyond the last.
fn seek(file: BorrowedFd<'_>, from: u64, whence: i32) -> Result<Option<u64>, SysError> {
    let Ok(from) = libc::off_t::try_from(from) else { return Ok(None) };
    // SAFETY: lseek takes numbers only.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    if let Ok(at) = u64::try_from(at) {
        return Ok(Some(at));
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENXIO) {
        return Ok(None);
    }
    Err(SysError::from_io("lseek(SEEK_DATA)", format!("offset {from:#x}"), error, common))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::AsFd;

    fn ranges(fd: BorrowedFd<'_>, within: Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        data_ranges(fd, within, |range| found.push(range)).unwrap();
        found
    }

    #[test]
    fn data_is_what_was_written_and_not_punched_out() {
        let fd = rustix::fs::memfd_create("data-ranges", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 64 * 4096).unwrap();
        assert_eq!(ranges(fd.as_fd(), 0..64 * 4096), []);
        for page in [3, 4, 9, 63] {
            rustix::io::pwrite(&fd, &[1], page * 4096 + 17).unwrap();
        }
        assert_eq!(
            ranges(fd.as_fd(), 0..64 * 4096),
            [3 * 4096..5 * 4096, 9 * 4096..10 * 4096, 63 * 4096..64 * 4096]
        );
        assert_eq!(ranges(fd.as_fd(), 4 * 4096..10 * 4096), [4 * 4096..5 * 4096, 9 * 4096..10 * 4096]);
        assert!(punch(fd.as_fd(), 4 * 4096..5 * 4096).unwrap());
        assert_eq!(ranges(fd.as_fd(), 0..10 * 4096), [3 * 4096..4 * 4096, 9 * 4096..10 * 4096]);
    }

    #[test]
    fn what_cannot_tell_says_so() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let error = data_ranges(reader.as_fd(), 0..4096, |_| {}).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ESPIPE));
    }
}
