//! userfaultfd (Linux `Documentation/admin-guide/mm/userfaultfd.rst`, `userfaultfd(2)`, `ioctl_userfaultfd(2)`).
//!
//! Write protection, only of the asynchronous kind: the kernel itself lifts the protection of a page at its first write,
//! nobody handles faults, and [`pagemap`](crate::pagemap) tells which pages lost their protection.
//!
//! Missing pages (`missing`): whoever touches one sleeps until somebody who reads the faults here places the page.

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

/// What an ordinary user who needs [`Access::Full`] can do.
const PERMIT: &str = "this user may not handle faults of system calls and of KVM: set the sysctl \
     vm.unprivileged_userfaultfd to 1, or give the user access to /dev/userfaultfd, or the process CAP_SYS_PTRACE";

/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: write protection of private anonymous memory.
pub const FEATURE_WP: u64 = 1 << 0;
/// `UFFD_FEATURE_MISSING_HUGETLBFS`: missing pages of memfds of huge pages, too.
pub const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
/// `UFFD_FEATURE_MISSING_SHMEM`: missing pages of memfds, too.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// `UFFD_FEATURE_THREAD_ID`: faults say whose they are.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// `UFFD_FEATURE_MINOR_HUGETLBFS`: pages that the file has and the mapping lacks, of memfds of huge pages.
pub const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: of memfds, too.
pub const FEATURE_WP_SHMEM: u64 = 1 << 12;
/// `UFFD_FEATURE_WP_UNPOPULATED`: of pages that are not there yet, too. Implied by [`FEATURE_WP_ASYNC`].
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// `UFFD_FEATURE_WP_ASYNC`: the kernel lifts the protection itself.
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

/// How a userfaultfd was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It also sees faults of the kernel (system calls, KVM).
    Full,
    /// `UFFD_USER_MODE_ONLY`, what an ordinary user gets. In the synchronous modes a fault of the kernel or of KVM is
    /// an error instead of an event. Asynchronous write protection raises no events, so it tracks those writes all the
    /// same (a test shows it for system calls).
    UserModeOnly,
}

/// An open userfaultfd after its handshake.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    access: Access,
}

impl Userfaultfd {
    /// Opens one with `features` (`FEATURE_*`), with as much access as this user may have: the system call, then
    /// `/dev/userfaultfd`, then the system call for user mode only.
    ///
    /// # Errors
    /// If the kernel has no userfaultfd, or not these features, or this user may not have one.
    pub fn open(features: u64) -> Result<Self, SysError> {
        let full = syscall(0).or_else(|_| device());
        match full {
            Ok(fd) => Self::handshake(fd, Access::Full, features),
            Err(_) => Self::open_user_mode_only(features),
        }
    }

    /// Opens one with [`Access::Full`], or none.
    ///
    /// # Errors
    /// As for [`open`](Self::open); if only the permission is missing, how to give it.
    pub fn open_full(features: u64) -> Result<Self, SysError> {
        let fd = syscall(0).or_else(|refused| {
            // What the system call said counts, unless the device was the way that was open to this user.
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

    /// Opens one that any user may have; see [`Access::UserModeOnly`].
    ///
    /// # Errors
    /// As for [`open`](Self::open).
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
        // SAFETY: the structure is the request's; the handshake touches no memory but it.
        if unsafe { call(fd.as_fd(), API, &mut api) } < 0 {
            let error = std::io::Error::last_os_error();
            // A kernel that lacks a feature refuses the whole handshake and clears the structure. Asking for nothing,
            // on another descriptor, tells what it has.
            return Err(match Self::offered() {
                Ok(offered) if features & !offered != 0 => {
                    SysError::Features { missing: features & !offered }
                }
                _ => SysError::from_io("UFFDIO_API", "a userfaultfd".to_owned(), error, common),
            });
        }
        Ok(Self { fd, access })
    }

    /// The features that this kernel offers, as `UFFD_FEATURE_*` bits.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn offered() -> Result<u64, SysError> {
        let fd = syscall(USER_MODE_ONLY)
            .or_else(|_| device())
            .map_err(|error| SysError::from_io("userfaultfd", "this process".to_owned(), error, common))?;
        let mut api = Api { api: API_VERSION, features: 0, ioctls: 0 };
        // SAFETY: as in `handshake`.
        if unsafe { call(fd.as_fd(), API, &mut api) } < 0 {
            return Err(SysError::last("UFFDIO_API", || "a userfaultfd".to_owned(), common));
        }
        Ok(api.features)
    }

    /// How much it sees.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Registers the mapped bytes `span` for write protection. Nothing is protected by that.
    ///
    /// # Errors
    /// If they are not all mapped, belong to another userfaultfd, or are of a kind that cannot be protected.
    pub fn register_wp(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_REGISTER(WP)";
        let mut argument = Register { range: whole(CALL, &span)?, mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the structure is the request's. Asynchronous write protection changes nothing that reads and writes
        // of these bytes can see; if the features are other ones, no page is protected by registering.
        if unsafe { call(self.fd.as_fd(), REGISTER, &mut argument) } < 0 {
            return Err(SysError::last(
                CALL,
                || show(&span),
                |errno| match errno {
                    libc::EBUSY => "another userfaultfd (of a postcopy, or another tracker) has this memory",
                    libc::EINVAL => {
                        "not all of it is mapped, or it is memory that cannot be tracked, such as a file's"
                    }
                    libc::EPERM => "the mapping is not writable",
                    other => common(other),
                },
            ));
        }
        Ok(())
    }

    /// Gives `span` back; its protection is lifted, and who waits for a missing page of it gets an empty one.
    ///
    /// # Errors
    /// If they are not mapped any more.
    pub fn unregister(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_UNREGISTER";
        let mut argument = whole(CALL, &span)?;
        // SAFETY: the structure is the request's; pages become writable again without any fault, and missing ones are
        // again what the kernel makes of them by itself.
        if unsafe { call(self.fd.as_fd(), UNREGISTER, &mut argument) } < 0 {
            return Err(SysError::last(CALL, || show(&span), common));
        }
        // The kernel wakes who waits before it takes the mapping's lock (6.7 and later handle faults under that alone): a
        // fault that begins between the two waits for a descriptor that has forgotten it. From here on none can begin.
        self.wake(span)
    }

    /// Protects all pages of `span`, or lifts the protection of all of them. Protecting a page that is not there leaves
    /// a marker in its page table, which is made for it.
    ///
    /// # Errors
    /// If they are not registered. `EAGAIN` means that the mapping is just being changed by another thread.
    pub fn write_protect(&self, span: Range<u64>, protect: bool) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_WRITEPROTECT";
        let mode = if protect { WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { range: whole(CALL, &span)?, mode };
        // SAFETY: the structure is the request's. In asynchronous mode (the only one that this type is opened for
        // here) a write to a protected page goes through without anybody's help.
        if unsafe { call(self.fd.as_fd(), WRITEPROTECT, &mut argument) } < 0 {
            return Err(SysError::last(
                CALL,
                || show(&span),
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
    own(fd)
}

fn device() -> std::io::Result<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
    let flags = u64::try_from(libc::O_CLOEXEC | libc::O_NONBLOCK).expect("flags are positive");
    // SAFETY: the request takes flags and returns a descriptor.
    own(unsafe { call_value(device.as_fd(), NEW, flags) }.into())
}

fn own(fd: libc::c_long) -> std::io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: the kernel has just made this descriptor for us alone.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// `span` as the kernel takes it.
fn whole(call: &'static str, span: &Range<u64>) -> Result<Span, SysError> {
    let pages = span.start < span.end
        && span.start.is_multiple_of(PAGE_SIZE)
        && span.end.is_multiple_of(PAGE_SIZE)
        && i64::try_from(span.end).is_ok();
    if !pages {
        return Err(SysError::NotPages { call, target: show(span) });
    }
    Ok(Span { start: span.start, len: span.end - span.start })
}

fn show(span: &Range<u64>) -> String {
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
    fn unknown_features_are_named() {
        let error = Userfaultfd::open_user_mode_only(FEATURE_WP | 1 << 60).unwrap_err();
        match error {
            SysError::Features { missing } => assert_eq!(missing, 1 << 60),
            // A sandbox may forbid the call altogether; then the error says so.
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
