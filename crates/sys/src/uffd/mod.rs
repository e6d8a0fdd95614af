//! userfaultfd (Linux `Documentation/admin-guide/mm/userfaultfd.rst`, `userfaultfd(2)`,
//! `ioctl_userfaultfd(2)`).
//!
//! *Asynchronous write protection* ([`FEATURE_WP_ASYNC`]): at the first write to a page, the kernel
//! lifts its protection without a fault handler, and [`pagemap`](crate::pagemap) reports the pages
//! that have lost their protection.
//!
//! *Write protection* without this feature: a thread that writes to a protected page sleeps until a
//! fault handler, which reads the fault from the userfaultfd, lifts the protection.
//!
//! *Missing pages:* a thread that accesses a missing page sleeps until a fault handler, which reads
//! the fault from the userfaultfd, places the page.

mod missing;

pub use missing::{Event, Registered};

use crate::error::{common, need_small_pages};
use crate::ioctl::{call, call_value, io, ior, iowr};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

const GROUP: u8 = 0xaa;
const NEW: u64 = io(GROUP, 0x00);
const API: u64 = iowr::<Api>(GROUP, 0x3f);
const REGISTER: u64 = iowr::<Register>(GROUP, 0x00);
const UNREGISTER: u64 = ior::<Span>(GROUP, 0x01);
const WRITEPROTECT: u64 = iowr::<WriteProtect>(GROUP, 0x06);

const API_VERSION: u64 = 0xaa;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const USER_MODE_ONLY: i32 = 1;

/// Advice for an ordinary user who needs [`Access::Full`].
const PERMIT: &str = "this user may not handle faults of system calls and of KVM: set the sysctl \
     vm.unprivileged_userfaultfd to 1, or give the user access to /dev/userfaultfd, or the process CAP_SYS_PTRACE";

/// Feature `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: write protection of private anonymous memory.
pub const FEATURE_WP: u64 = 1 << 0;
/// Feature `UFFD_FEATURE_MISSING_HUGETLBFS`: missing pages of memfds of huge pages.
pub const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
/// Feature `UFFD_FEATURE_MISSING_SHMEM`: missing pages of memfds.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Feature `UFFD_FEATURE_THREAD_ID`: fault messages have the id of the thread.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// Feature `UFFD_FEATURE_MINOR_HUGETLBFS`: faults on pages that are in the file but not in the
/// mapping, for memfds of huge pages.
pub const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
/// Feature `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: write protection of memfds.
pub const FEATURE_WP_SHMEM: u64 = 1 << 12;
/// Feature `UFFD_FEATURE_WP_UNPOPULATED`: write protection of pages that do not exist yet. Implied
/// by [`FEATURE_WP_ASYNC`].
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// Feature `UFFD_FEATURE_WP_ASYNC`: the kernel lifts the write protection itself, without a fault
/// handler.
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Span {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Span,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    range: Span,
    mode: u64,
}

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Span>() == 16);
const _: () = assert!(size_of::<Register>() == 32 && size_of::<WriteProtect>() == 24);

/// Kinds of faults that a userfaultfd receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The userfaultfd also receives faults of the kernel (system calls, KVM).
    Full,
    /// The userfaultfd was opened with `UFFD_USER_MODE_ONLY`, the mode for ordinary users.
    ///
    /// For missing and unmapped pages, an access of the kernel or of KVM fails with an error and is
    /// not reported as an event. Asynchronous write protection raises no events, so it also tracks
    /// the writes of the kernel (a test shows this for system calls).
    UserModeOnly,
}

/// Open userfaultfd after its handshake.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    access: Access,
}

impl Userfaultfd {
    /// Opens a userfaultfd with `features` (`FEATURE_*`) and, if this user may have it,
    /// [`Access::Full`]. Tries the system call, then `/dev/userfaultfd`, and then the system call
    /// with [`Access::UserModeOnly`].
    ///
    /// # Errors
    /// Returns an error if the kernel has no userfaultfd, does not have the features, or does not
    /// permit this user to open one.
    pub fn open(features: u64) -> Result<Self, SysError> {
        let full = syscall(0).or_else(|_| device());
        match full {
            Ok(fd) => Self::handshake(fd, Access::Full, features),
            Err(_) => Self::open_user_mode_only(features),
        }
    }

    /// Opens a userfaultfd with [`Access::Full`].
    ///
    /// # Errors
    /// Returns an error in the cases of [`open`](Self::open), or if this user lacks the permission;
    /// the error then says how to grant it.
    pub fn open_full(features: u64) -> Result<Self, SysError> {
        let fd = syscall(0).or_else(|refused| {
            // The error of the system call is reported, because most users have no access to the
            // device.
            device().map_err(|_| refused)
        });
        let fd = fd.map_err(|error| {
            SysError::from_io("userfaultfd", "this process".to_owned(), error, |errno| match errno {
                libc::ENOSYS => "this kernel is built without userfaultfd",
                libc::EPERM | libc::EACCES => PERMIT,
                other => common(other),
            })
        })?;
        Self::handshake(fd, Access::Full, features)
    }

    /// Opens a userfaultfd with [`Access::UserModeOnly`], which needs no privilege.
    ///
    /// # Errors
    /// Returns an error in the cases of [`open`](Self::open).
    pub fn open_user_mode_only(features: u64) -> Result<Self, SysError> {
        let fd = syscall(USER_MODE_ONLY).map_err(|error| {
            SysError::from_io("userfaultfd", "this process".to_owned(), error, |errno| match errno {
                libc::ENOSYS => "this kernel is built without userfaultfd",
                libc::EPERM => "a sandbox or the sysctl vm.unprivileged_userfaultfd forbids it to this user",
                other => common(other),
            })
        })?;
        Self::handshake(fd, Access::UserModeOnly, features)
    }

    fn handshake(fd: OwnedFd, access: Access, features: u64) -> Result<Self, SysError> {
        need_small_pages("UFFDIO_API")?;
        let mut api = Api { api: API_VERSION, features, ioctls: 0 };
        // SAFETY: the structure belongs to the request, and the handshake touches no other memory.
        if unsafe { call(fd.as_fd(), API, &mut api) } < 0 {
            let error = std::io::Error::last_os_error();
            // A kernel that does not have a feature refuses the whole handshake and clears the
            // structure. A handshake without features, on another descriptor, returns the features
            // of the kernel.
            return Err(match Self::offered() {
                Ok(offered) if features & !offered != 0 => {
                    SysError::Features { missing: features & !offered }
                }
                _ => SysError::from_io("UFFDIO_API", "a userfaultfd".to_owned(), error, common),
            });
        }
        Ok(Self { fd, access })
    }

    /// Returns the features that this kernel offers, as `UFFD_FEATURE_*` bits.
    ///
    /// # Errors
    /// Returns an error in the cases of [`open`](Self::open).
    pub fn offered() -> Result<u64, SysError> {
        let fd = syscall(USER_MODE_ONLY)
            .or_else(|_| device())
            .map_err(|error| SysError::from_io("userfaultfd", "this process".to_owned(), error, common))?;
        let mut api = Api { api: API_VERSION, features: 0, ioctls: 0 };
        // SAFETY: the structure belongs to the request, and the handshake touches no other memory.
        if unsafe { call(fd.as_fd(), API, &mut api) } < 0 {
            return Err(SysError::last("UFFDIO_API", || "a userfaultfd".to_owned(), common));
        }
        Ok(api.features)
    }

    /// Returns the kinds of faults that this userfaultfd receives.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Registers the mapped addresses `span` for write protection. This does not protect any page
    /// yet.
    ///
    /// # Errors
    /// Returns an error if not all of `span` is mapped, if it is registered with another
    /// userfaultfd, or if this kind of memory cannot be protected.
    pub fn register_wp(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_REGISTER(WP)";
        let mut argument = Register { range: whole(CALL, &span)?, mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the structure belongs to the request. Asynchronous write protection changes
        // nothing that reads and writes of these bytes can observe. With other features,
        // registering does not protect any page.
        if unsafe { call(self.fd.as_fd(), REGISTER, &mut argument) } < 0 {
            return Err(SysError::last(
                CALL,
                || format_span(&span),
                |errno| match errno {
                    libc::EBUSY => "another userfaultfd (of a postcopy, or another tracker) has this memory",
                    libc::EINVAL => {
                        "not all of it is mapped, or this kind of memory (such as a mapped file) cannot be tracked"
                    }
                    libc::EPERM => "the mapping is not writable",
                    other => common(other),
                },
            ));
        }
        Ok(())
    }

    /// Unregisters the addresses `span`, and lifts their write protection. A thread that waits for
    /// a missing page of `span` wakes and reads zeros.
    ///
    /// # Errors
    /// Returns an error if `span` is not mapped any more.
    pub fn unregister(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_UNREGISTER";
        let mut argument = whole(CALL, &span)?;
        // SAFETY: the structure belongs to the request. Pages become writable again without a
        // fault, and the kernel fills missing pages as usual.
        if unsafe { call(self.fd.as_fd(), UNREGISTER, &mut argument) } < 0 {
            return Err(SysError::last(CALL, || format_span(&span), common));
        }
        // The kernel wakes the waiting threads before it takes the lock of the mapping (since 6.7,
        // faults are handled under that lock alone). A fault that begins between these two steps
        // would wait for a descriptor with which its memory is no longer registered. After the call
        // above, no such fault can begin, so waking the threads once more is sufficient.
        self.wake(span)
    }

    /// Write-protects all pages of `span`, or lifts the protection of all of them if `protect` is
    /// false, and wakes the threads that wait for one of these pages. For a page that does not
    /// exist, the kernel puts a marker into the page table, which it allocates if necessary. In
    /// private anonymous memory, it does so only with [`FEATURE_WP_UNPOPULATED`].
    ///
    /// # Errors
    /// Returns an error if `span` is not registered for write protection. `EAGAIN` means that
    /// another thread is changing the mapping.
    pub fn write_protect(&self, span: Range<u64>, protect: bool) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_WRITEPROTECT";
        let mode = if protect { WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { range: whole(CALL, &span)?, mode };
        // SAFETY: the structure belongs to the request. In asynchronous mode, a write to a
        // protected page succeeds without a fault handler. Otherwise, the write is delayed until
        // the protection is lifted, and no content changes.
        if unsafe { call(self.fd.as_fd(), WRITEPROTECT, &mut argument) } < 0 {
            return Err(SysError::last(
                CALL,
                || format_span(&span),
                |errno| match errno {
                    libc::ENOENT => "not all of it is registered for write protection",
                    libc::EAGAIN => "the mapping is being changed at the same time",
                    other => common(other),
                },
            ));
        }
        Ok(())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn syscall(flags: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: the system call takes flags and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | flags) };
    owned_fd(fd)
}

fn device() -> std::io::Result<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
    let flags = u64::try_from(libc::O_CLOEXEC | libc::O_NONBLOCK).expect("flags are positive");
    // SAFETY: the request takes flags and returns a descriptor.
    owned_fd(unsafe { call_value(device.as_fd(), NEW, flags) }.into())
}

fn owned_fd(fd: libc::c_long) -> std::io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: the kernel has just created this descriptor, and it has no other owner.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Returns `span` in the format of the kernel, if it is whole pages.
fn whole(call: &'static str, span: &Range<u64>) -> Result<Span, SysError> {
    let pages = span.start < span.end
        && span.start.is_multiple_of(PAGE_SIZE)
        && span.end.is_multiple_of(PAGE_SIZE)
        && i64::try_from(span.end).is_ok();
    if !pages {
        return Err(SysError::NotPages { call, target: format_span(span) });
    }
    Ok(Span { start: span.start, len: span.end - span.start })
}

fn format_span(span: &Range<u64>) -> String {
    format!("addresses {:#x}..{:#x}", span.start, span.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_their_documented_numbers() {
        assert_eq!(NEW, 0xaa00);
        assert_eq!(API, 0xc018_aa3f);
        assert_eq!(REGISTER, 0xc020_aa00);
        assert_eq!(UNREGISTER, 0x8010_aa01);
        assert_eq!(WRITEPROTECT, 0xc018_aa06);
    }

    #[test]
    fn error_names_unknown_features() {
        let error = Userfaultfd::open_user_mode_only(FEATURE_WP | 1 << 60).unwrap_err();
        match error {
            SysError::Features { missing } => assert_eq!(missing, 1 << 60),
            // A sandbox may forbid the call. The error then says so.
            other => assert!(other.to_string().contains("userfaultfd"), "{other}"),
        }
    }

    #[test]
    fn spans_are_whole_pages() {
        assert!(whole("x", &(4096..8192)).is_ok());
        for (start, end) in [(4096, 4096), (8192, 4096), (1, 4096), (4096, 4097), (0, u64::MAX - 4095)] {
            let span = start..end;
            assert!(matches!(whole("x", &span), Err(SysError::NotPages { .. })), "{span:?}");
        }
    }
}
