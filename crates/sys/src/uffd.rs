//! userfaultfd (Linux `Documentation/admin-guide/mm/userfaultfd.rst`, `userfaultfd(2)`, `ioctl_userfaultfd(2)`).
//!
//! Write protection, only of the asynchronous kind: the kernel itself lifts the protection of a page at its first write,
//! nobody handles faults, and [`pagemap`](crate::pagemap) tells which pages lost their protection.
//!
//! Missing pages: whoever touches one sleeps until somebody who reads the faults here places the page.

use crate::error::common;
use crate::ioctl::{call, call_value, io, ior, iowr};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

const GROUP: u8 = 0xaa;
const NEW: u64 = io(GROUP, 0x00);
const API: u64 = iowr::<Api>(GROUP, 0x3f);
const REGISTER: u64 = iowr::<Register>(GROUP, 0x00);
const UNREGISTER: u64 = ior::<Span>(GROUP, 0x01);
const WAKE: u64 = ior::<Span>(GROUP, 0x02);
const COPY: u64 = iowr::<CopyPages>(GROUP, 0x03);
const ZEROPAGE: u64 = iowr::<ZeroPages>(GROUP, 0x04);
const WRITEPROTECT: u64 = iowr::<WriteProtect>(GROUP, 0x06);

const API_VERSION: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const USER_MODE_ONLY: i32 = 1;

/// Bytes of a message (`struct uffd_msg`).
const MESSAGE: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_WRITE: u64 = 1 << 0;
/// `_UFFDIO_ZEROPAGE` among the ioctls that a registration offers.
const OFFERS_ZEROPAGE: u64 = 1 << 0x04;

/// What an error number of the calls that place pages means.
fn placing(errno: i32) -> &'static str {
    match errno {
        libc::EEXIST => "the page is there already",
        libc::EAGAIN => "the mapping is being changed at the same time",
        libc::ENOENT => "not all of it is registered for missing pages",
        libc::ESRCH => "the process that owns the memory is gone",
        other => common(other),
    }
}

/// What an ordinary user who needs [`Access::Full`] can do.
const PERMIT: &str = "this user may not handle faults of system calls and of KVM: set the sysctl \
     vm.unprivileged_userfaultfd to 1, or give the user access to /dev/userfaultfd, or the process CAP_SYS_PTRACE";

/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: write protection of private anonymous memory.
pub const FEATURE_WP: u64 = 1 << 0;
/// `UFFD_FEATURE_MISSING_SHMEM`: missing pages of memfds, too.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// `UFFD_FEATURE_THREAD_ID`: faults say whose they are.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
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

#[repr(C)]
struct CopyPages {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct ZeroPages {
    range: Span,
    mode: u64,
    zeroed: i64,
}

const _: () = assert!(size_of::<CopyPages>() == 40 && size_of::<ZeroPages>() == 32);
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

/// What the kernel says to whoever handles faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Somebody touched a missing page, and sleeps.
    Fault {
        /// The touched address, rounded down to its page.
        address: u64,
        /// It was a write.
        write: bool,
        /// Who sleeps, as its `gettid` says; 0 without [`FEATURE_THREAD_ID`]. A fault that KVM lets a kernel worker
        /// take for a vCPU carries that worker's id.
        thread: u32,
    },
    /// A message (`UFFD_EVENT_*`) of a feature that this type knows nothing of.
    Other(u8),
}

/// What can be done with memory that was registered for missing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// [`Userfaultfd::zero`] works; where it does not, [`Userfaultfd::copy`] of zeros does.
    pub zero: bool,
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

    /// Registers the mapped bytes `span` for faults on missing pages: from now on whoever touches a page of them that
    /// is not there sleeps until it was placed ([`copy`](Self::copy)) or this userfaultfd is gone.
    ///
    /// # Errors
    /// If they are not all mapped, belong to another userfaultfd, or are of a kind whose faults cannot be handled.
    pub fn register_missing(&self, span: Range<u64>) -> Result<Registered, SysError> {
        const CALL: &str = "UFFDIO_REGISTER(MISSING)";
        let mut argument = Register { range: whole(CALL, &span)?, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: the structure is the request's. Registering delays accesses, it changes no content: what a page
        // comes to hold is decided by `copy`, or, when this descriptor is closed, by the kernel, as if it never was.
        if unsafe { call(self.fd.as_fd(), REGISTER, &mut argument) } < 0 {
            return Err(SysError::last(
                CALL,
                || show(&span),
                |errno| match errno {
                    libc::EBUSY => "another userfaultfd has this memory",
                    libc::EINVAL => "not all of it is mapped, or it is memory whose faults cannot be handled",
                    libc::EPERM => "the mapping is not writable",
                    other => common(other),
                },
            ));
        }
        Ok(Registered { zero: argument.ioctls & OFFERS_ZEROPAGE != 0 })
    }

    /// Places a copy of `from`, whole pages, at the address `to`, all at once for whoever looks, and wakes who waits
    /// there. Returns the bytes placed: fewer than asked for if the mapping was changed in the middle.
    ///
    /// # Errors
    /// If nothing was placed. `EEXIST`: the page is there already (nobody was woken), `EAGAIN`: the mapping is just
    /// being changed, `ENOENT`: it is not registered, `ESRCH`: the process is gone.
    ///
    /// # Safety
    /// The caller upholds that no Rust reference covers `to .. to + from.len()`: missing pages read as something else
    /// after this call than a reference may have promised. Pages that are there are never changed.
    pub unsafe fn copy(&self, to: u64, from: &[u8]) -> Result<u64, SysError> {
        const CALL: &str = "UFFDIO_COPY";
        let len = from.len() as u64;
        let target = to..to.saturating_add(len);
        let span = whole(CALL, &target)?;
        let mut argument = CopyPages {
            to: span.start,
            from: from.as_ptr().addr() as u64,
            len: span.len,
            mode: 0,
            copied: 0,
        };
        // SAFETY: the structure is the request's, and `from` is borrowed for the `len` bytes that the kernel reads. It
        // writes to pages of registered memory that were missing, and our caller upholds that no reference covers them.
        if unsafe { call(self.fd.as_fd(), COPY, &mut argument) } >= 0 {
            return Ok(len);
        }
        let error = std::io::Error::last_os_error();
        match u64::try_from(argument.copied) {
            Ok(copied) if copied > 0 => Ok(copied),
            _ => Err(SysError::from_io(CALL, show(&target), error, placing)),
        }
    }

    /// Places pages of zeros at `span`, and wakes who waits there. Returns the bytes placed, as [`copy`](Self::copy) does.
    ///
    /// # Errors
    /// As for [`copy`](Self::copy). `EINVAL` also if the memory is of a kind that has no such call
    /// ([`Registered::zero`]).
    ///
    /// # Safety
    /// The caller upholds that no Rust reference covers `span`, as for [`copy`](Self::copy).
    pub unsafe fn zero(&self, span: Range<u64>) -> Result<u64, SysError> {
        const CALL: &str = "UFFDIO_ZEROPAGE";
        let mut argument = ZeroPages { range: whole(CALL, &span)?, mode: 0, zeroed: 0 };
        // SAFETY: the structure is the request's. The kernel fills pages of registered memory that were missing, and
        // our caller upholds that no reference covers them.
        if unsafe { call(self.fd.as_fd(), ZEROPAGE, &mut argument) } >= 0 {
            return Ok(span.end - span.start);
        }
        let error = std::io::Error::last_os_error();
        match u64::try_from(argument.zeroed) {
            Ok(zeroed) if zeroed > 0 => Ok(zeroed),
            _ => Err(SysError::from_io(CALL, show(&span), error, placing)),
        }
    }

    /// Wakes who waits for a page of `span`; each tries its access again, and waits again if the page is still missing.
    ///
    /// # Errors
    /// None that whole pages and a valid descriptor give.
    pub fn wake(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_WAKE";
        let mut argument = whole(CALL, &span)?;
        // SAFETY: the structure is the request's; waking changes no memory.
        if unsafe { call(self.fd.as_fd(), WAKE, &mut argument) } < 0 {
            return Err(SysError::last(CALL, || show(&span), common));
        }
        Ok(())
    }

    /// Whether [`next_event`](Self::next_event) sleeps until there is one. A new one does not sleep, and only one that
    /// does not sleep can be polled.
    ///
    /// # Errors
    /// None that a valid descriptor gives.
    pub fn set_blocking(&self, blocking: bool) -> Result<(), SysError> {
        let set = || {
            let mut flags = rustix::fs::fcntl_getfl(&self.fd)?;
            flags.set(rustix::fs::OFlags::NONBLOCK, !blocking);
            rustix::fs::fcntl_setfl(&self.fd, flags)
        };
        set().map_err(|error| {
            SysError::from_io("fcntl(F_SETFL)", "a userfaultfd".to_owned(), error.into(), common)
        })
    }

    /// Takes the next message. None: there is none, and this userfaultfd does not block.
    ///
    /// # Errors
    /// If a signal interrupted it (`EINTR`), or the kernel sends something that is no message.
    pub fn next_event(&self) -> Result<Option<Event>, SysError> {
        const CALL: &str = "read";
        let failed = |error| SysError::from_io(CALL, "a userfaultfd".to_owned(), error, common);
        let mut message = [0; MESSAGE];
        match rustix::io::read(&self.fd, &mut message) {
            Ok(MESSAGE) => Ok(Some(parse(&message))),
            Ok(_) => Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
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
        Ok(())
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

/// Linux `struct uffd_msg`: the event at 0; of a fault, its flags at 8, its address at 16 and its thread at 24.
fn parse(message: &[u8; MESSAGE]) -> Event {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    match message[0] {
        EVENT_PAGEFAULT => Event::Fault {
            address: word(16) & !(PAGE_SIZE - 1),
            write: word(8) & FAULT_WRITE != 0,
            thread: u32::from_ne_bytes([message[24], message[25], message[26], message[27]]),
        },
        other => Event::Other(other),
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
        assert_eq!(COPY, 0xc028_aa03);
        assert_eq!(WAKE, 0x8010_aa02);
        assert_eq!(ZEROPAGE, 0xc020_aa04);
    }

    #[test]
    fn messages_are_read_as_documented() {
        let mut message = [0; MESSAGE];
        message[0] = EVENT_PAGEFAULT;
        message[8] = 1;
        message[16..24].copy_from_slice(&0x7000_1234_u64.to_ne_bytes());
        message[24..28].copy_from_slice(&77_u32.to_ne_bytes());
        assert_eq!(parse(&message), Event::Fault { address: 0x7000_1000, write: true, thread: 77 });
        message[8] = 0;
        assert_eq!(parse(&message), Event::Fault { address: 0x7000_1000, write: false, thread: 77 });
        message[0] = 0x15;
        assert_eq!(parse(&message), Event::Other(0x15));
    }

    #[test]
    fn nothing_is_there_to_read_or_to_place_at_first() {
        use std::io::{Write as _, stdout};
        let uffd = match Userfaultfd::open(0) {
            Ok(uffd) => uffd,
            Err(error) => return writeln!(stdout(), "not run: {error}").unwrap(),
        };
        assert_eq!(uffd.next_event().unwrap(), None);
        let page = [1; 4096];
        // SAFETY: the first page of the address space is mapped nowhere, so nothing is changed and nothing refers to it.
        let error = unsafe { uffd.copy(PAGE_SIZE, &page) }.unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
        // SAFETY: as above.
        let error = unsafe { uffd.zero(PAGE_SIZE..2 * PAGE_SIZE) }.unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
        uffd.wake(PAGE_SIZE..2 * PAGE_SIZE).unwrap();
        // SAFETY: half a page is refused before any call is made.
        let error = unsafe { uffd.copy(PAGE_SIZE, &page[..2048]) }.unwrap_err();
        assert!(matches!(error, SysError::NotPages { .. }), "{error}");
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
