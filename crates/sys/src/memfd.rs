//! Data ranges of a memfd, and dropping and allocating its pages.

use crate::SysError;
use crate::error::common;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Calls `each` with every range of bytes in `within` that holds data, in ascending order
/// (`lseek(2)`, `SEEK_DATA`, `SEEK_HOLE`).
///
/// A page holds data if any process has written it, through a mapping or a system call, and it was
/// not punched out since. A read through a mapping also allocates the page, which then holds data.
/// The page may be in memory or swapped out. Ranges are whole pages, or whole huge pages if the
/// file has them. A memfd of huge pages (`MFD_HUGETLB`) does not report holes, so all of it counts
/// as data. The call moves the file offset, which mappings do not use.
///
/// # Errors
/// Returns an error if `file` does not support `SEEK_DATA`.
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
        // Every file has a hole at its end, so `None` means that the file was truncated between the
        // calls.
        let end = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(within.end).clamp(start, within.end);
        if start < end {
            each(start..end);
        }
        // A hole that is punched between the two calls makes an empty range. Continue after it.
        at = end.max(start + 1);
    }
    Ok(())
}

/// Returns the first byte in `within` that holds data, or `None` if there is none, by the criterion
/// of [`data_ranges`].
///
/// # Errors
/// Returns an error if `file` does not support `SEEK_DATA`.
pub fn first_data(file: BorrowedFd<'_>, within: Range<u64>) -> Result<Option<u64>, SysError> {
    Ok(seek(file, within.start, libc::SEEK_DATA)?.filter(|data| *data < within.end))
}

/// Drops the pages at the bytes `within` of `file` (`fallocate(2)`, `FALLOC_FL_PUNCH_HOLE`).
/// Returns true if all of them are gone.
///
/// The pages may be in memory or swapped out. Afterwards they are missing in every mapping of the
/// file, in every process. To drop only part of a huge page, the kernel must split it, which it
/// does not do while the huge page has an additional reference. In that case, the part is
/// overwritten with zeros and is not missing, and the function returns false.
///
/// # Errors
/// Returns an error if `file` does not support the call, or if it is sealed against writes.
pub fn punch(file: BorrowedFd<'_>, within: Range<u64>) -> Result<bool, SysError> {
    erase(file, within.clone())?;
    Ok(seek(file, within.start, libc::SEEK_DATA)?.is_none_or(|data| data >= within.end))
}

/// Makes the bytes `within` of `file` read as zeros in every mapping. Whole pages are dropped, and
/// parts of a page are overwritten.
///
/// # Errors
/// Returns an error in the cases of [`punch`].
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

/// Allocates the pages of `file` at the bytes `within`. Existing pages keep their content, and new
/// pages contain zeros.
///
/// Without this call, the first access to a page raises SIGBUS if the host cannot allocate the
/// page.
///
/// # Errors
/// Returns an error if the host has not enough free pages.
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
                    libc::ENOSPC | libc::ENOMEM => "the host has no (huge) page left for the file",
                    other => common(other),
                }));
            }
        }
    }
}

/// Returns the offset of the next data or hole at or after `from`, or `None` beyond the last one.
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
    fn data_ranges_are_the_written_pages_that_were_not_punched_out() {
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
    fn data_ranges_fails_for_a_pipe() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let error = data_ranges(reader.as_fd(), 0..4096, |_| {}).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ESPIPE));
    }
}
