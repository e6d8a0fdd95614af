//! What a system call's refusal means.

use crate::PAGE_SIZE;
use std::io;

/// A call that the kernel refused, or that would have been wrong to make.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SysError {
    /// The kernel answered with an error.
    #[error("{call} on {target}: {source} ({meaning})")]
    Refused {
        /// The call, by its name in the kernel's documentation.
        call: &'static str,
        /// What it was made on, for example `slot 1` or an address range.
        target: String,
        /// What the kernel said.
        source: io::Error,
        /// What that means for this call, and what can be done.
        meaning: &'static str,
    },
    /// A buffer is too small for what the kernel would write to it.
    #[error("{call} on {target}: the buffer has {have} words, the kernel needs {need}")]
    Buffer {
        /// The call that was not made.
        call: &'static str,
        /// What it would have been made on.
        target: String,
        /// Words of 64 bits in the buffer.
        have: usize,
        /// Words of 64 bits that the kernel reads or writes.
        need: usize,
    },
    /// An address or a length that is not a whole number of pages, or that wraps around.
    #[error("{call} on {target}: not whole pages of 4096 bytes within the address space")]
    NotPages {
        /// The call that was not made.
        call: &'static str,
        /// What it would have been made on.
        target: String,
    },
    /// The kernel counts in larger pages.
    #[error("{call}: the kernel's pages have {bytes} bytes; use a kernel with pages of 4096 bytes")]
    HostPages {
        /// The call that was not made.
        call: &'static str,
        /// Bytes in a page of the kernel.
        bytes: libc::c_long,
    },
    /// The kernel has userfaultfd, but not all that was asked for.
    #[error("userfaultfd lacks the features {missing:#x}: {}", needs(*.missing))]
    Features {
        /// `UFFD_FEATURE_*` bits that were asked for and are not there.
        missing: u64,
    },
}

impl SysError {
    /// The error of the last call, explained by `meaning`.
    pub(crate) fn last(
        call: &'static str,
        target: impl FnOnce() -> String,
        meaning: impl FnOnce(i32) -> &'static str,
    ) -> Self {
        Self::from_io(call, target(), io::Error::last_os_error(), meaning)
    }

    /// `source` explained by `meaning`.
    pub(crate) fn from_io(
        call: &'static str,
        target: String,
        source: io::Error,
        meaning: impl FnOnce(i32) -> &'static str,
    ) -> Self {
        let meaning = meaning(source.raw_os_error().unwrap_or(0));
        Self::Refused { call, target, source, meaning }
    }

    /// The kernel's error number, if it was the kernel that refused.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Which kernel has the userfaultfd features `missing`.
fn needs(missing: u64) -> &'static str {
    use crate::uffd::{
        FEATURE_MINOR_HUGETLBFS, FEATURE_MISSING_HUGETLBFS, FEATURE_MISSING_SHMEM, FEATURE_THREAD_ID,
    };
    let shared = FEATURE_MISSING_SHMEM | FEATURE_MISSING_HUGETLBFS | FEATURE_THREAD_ID;
    if missing & !shared == 0 {
        "missing pages of shared memory, and whose a fault is, need Linux 4.14 or newer"
    } else if missing & !(shared | FEATURE_MINOR_HUGETLBFS) == 0 {
        "missing parts of huge pages need Linux 5.13 or newer"
    } else {
        "write tracking needs Linux 6.7 or newer"
    }
}

/// Refuses `call` on a kernel with larger pages than [`PAGE_SIZE`].
///
/// A kernel for aarch64 may have pages of 16 or 64 KiB. KVM's dirty log and the page map count in these
/// pages, and `madvise` drops whole ones. The wrong guest pages would count as dirty, or be dropped.
pub(crate) fn need_small_pages(call: &'static str) -> Result<(), SysError> {
    // SAFETY: sysconf reads a value that the C library keeps. Confined threads may call it: no system call is made.
    small_pages(call, unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
}

fn small_pages(call: &'static str, bytes: libc::c_long) -> Result<(), SysError> {
    if u64::try_from(bytes) == Ok(PAGE_SIZE) { Ok(()) } else { Err(SysError::HostPages { call, bytes }) }
}

/// The sentence for error numbers that a call does not explain better.
pub(crate) fn common(errno: i32) -> &'static str {
    match errno {
        libc::EBADF => "the file descriptor is not open or is of another kind",
        libc::EFAULT => "an address is not mapped in this process",
        libc::EINVAL => "the kernel does not know this request or refuses its arguments",
        libc::EINTR => "a signal interrupted it",
        libc::ENOMEM => "the host has no memory left for it",
        libc::ENOSYS => "the kernel, or the emulator that runs this program, has no such call",
        libc::ENOTTY => "the kernel has no such request",
        libc::EPERM | libc::EACCES => "this user may not do that",
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
