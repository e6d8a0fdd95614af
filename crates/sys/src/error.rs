//! Errors of system calls, with an explanation of each error number.

use crate::PAGE_SIZE;
use std::io;

/// Error of a system call that the kernel refused, or that was not made because its arguments were
/// wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SysError {
    /// The kernel returned an error.
    #[error("{call} on {target}: {source} ({meaning})")]
    Refused {
        /// Name of the call in the kernel's documentation.
        call: &'static str,
        /// Object of the call, for example `slot 1` or an address range.
        target: String,
        /// Error that the kernel returned.
        source: io::Error,
        /// Meaning of the error for this call, with a remedy if there is one.
        meaning: &'static str,
    },
    /// The buffer is smaller than the data that the kernel would read or write.
    #[error("{call} on {target}: the buffer has {have} words, the kernel needs {need}")]
    Buffer {
        /// Name of the call that was not made.
        call: &'static str,
        /// Object of the call.
        target: String,
        /// Number of 64-bit words in the buffer.
        have: usize,
        /// Number of 64-bit words that the kernel reads or writes.
        need: usize,
    },
    /// An address or a length is not a multiple of the page size, or the range is empty or extends
    /// beyond the address space.
    #[error("{call} on {target}: not whole pages of 4096 bytes within the address space")]
    NotPages {
        /// Name of the call that was not made.
        call: &'static str,
        /// Object of the call.
        target: String,
    },
    /// The page size of the kernel is not [`PAGE_SIZE`].
    #[error("{call}: the kernel's pages have {bytes} bytes; use a kernel with pages of 4096 bytes")]
    HostPages {
        /// Name of the call that was not made.
        call: &'static str,
        /// Page size of the kernel, in bytes.
        bytes: libc::c_long,
    },
    /// The kernel has userfaultfd, but not all of the requested features.
    #[error("userfaultfd lacks the features {missing:#x}: {}", needs(*.missing))]
    Features {
        /// Requested `UFFD_FEATURE_*` bits that the kernel does not have.
        missing: u64,
    },
}

impl SysError {
    /// Returns the error of the last call, explained by `meaning`.
    pub(crate) fn last(
        call: &'static str,
        target: impl FnOnce() -> String,
        meaning: impl FnOnce(i32) -> &'static str,
    ) -> Self {
        Self::from_io(call, target(), io::Error::last_os_error(), meaning)
    }

    /// Returns an error with the cause `source`, explained by `meaning`.
    pub(crate) fn from_io(
        call: &'static str,
        target: String,
        source: io::Error,
        meaning: impl FnOnce(i32) -> &'static str,
    ) -> Self {
        let meaning = meaning(source.raw_os_error().unwrap_or(0));
        Self::Refused { call, target, source, meaning }
    }

    /// Returns the error number of the kernel, or `None` if the kernel did not refuse the call.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Returns a text that names the kernel version with the userfaultfd features `missing`.
fn needs(missing: u64) -> &'static str {
    use crate::uffd::{
        FEATURE_MINOR_HUGETLBFS, FEATURE_MISSING_HUGETLBFS, FEATURE_MISSING_SHMEM, FEATURE_THREAD_ID,
    };
    let shared = FEATURE_MISSING_SHMEM | FEATURE_MISSING_HUGETLBFS | FEATURE_THREAD_ID;
    if missing & !shared == 0 {
        "missing pages of shared memory and thread ids of faults need Linux 4.14 or newer"
    } else if missing & !(shared | FEATURE_MINOR_HUGETLBFS) == 0 {
        "missing parts of huge pages need Linux 5.13 or newer"
    } else {
        "write tracking needs Linux 6.7 or newer"
    }
}

/// Returns an error for `call` if the page size of the kernel is not [`PAGE_SIZE`].
///
/// A kernel for aarch64 may have pages of 16 or 64 KiB. The dirty log of KVM and the pagemap have
/// one entry for each of these pages, and `madvise` drops whole ones. With such a kernel, the wrong
/// guest pages would count as dirty or would be dropped.
pub(crate) fn need_small_pages(call: &'static str) -> Result<(), SysError> {
    // SAFETY: sysconf reads a value that the C library keeps. Confined threads may call it, because
    // it makes no system call.
    small_pages(call, unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
}

fn small_pages(call: &'static str, bytes: libc::c_long) -> Result<(), SysError> {
    if u64::try_from(bytes) == Ok(PAGE_SIZE) { Ok(()) } else { Err(SysError::HostPages { call, bytes }) }
}

/// Returns the explanation of an error number for which the call has no better one.
pub(crate) fn common(errno: i32) -> &'static str {
    match errno {
        libc::EBADF => "the file descriptor is not open or is of another kind",
        libc::EFAULT => "an address is not mapped in this process",
        libc::EINVAL => "the kernel does not know this request or rejects its arguments",
        libc::EINTR => "a signal interrupted the call",
        libc::ENOMEM => "the host has not enough free memory",
        libc::ENOSYS => "the kernel, or the emulator that runs this program, has no such call",
        libc::ENOTTY => "the kernel has no such request",
        libc::EPERM | libc::EACCES => "this user has no permission for the call",
        _ => "unexpected",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_with_larger_pages_is_refused_by_size() {
        assert!(small_pages("KVM_GET_DIRTY_LOG", 4096).is_ok());
        let error = small_pages("KVM_GET_DIRTY_LOG", 65536).unwrap_err();
        assert_eq!(
            error.to_string(),
            "KVM_GET_DIRTY_LOG: the kernel's pages have 65536 bytes; use a kernel with pages of 4096 bytes"
        );
        assert_eq!(error.errno(), None);
    }
}
