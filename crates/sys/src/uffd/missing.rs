//! Faults on missing pages, and placing pages.

use super::{GROUP, REGISTER, Register, Span, Userfaultfd, format_span, whole};
use crate::error::common;
use crate::ioctl::{call, ior, iowr};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;
use std::os::fd::AsFd;

const WAKE: u64 = ior::<Span>(GROUP, 0x02);
const COPY: u64 = iowr::<CopyPages>(GROUP, 0x03);
const ZEROPAGE: u64 = iowr::<FillPages>(GROUP, 0x04);
const CONTINUE: u64 = iowr::<FillPages>(GROUP, 0x07);

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_MINOR: u64 = 1 << 2;

/// Bytes of a message (`struct uffd_msg`).
const MESSAGE: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_WRITE: u64 = 1 << 0;
/// Bit of `_UFFDIO_ZEROPAGE` among the ioctls that a registration offers.
const OFFERS_ZEROPAGE: u64 = 1 << 0x04;

/// Returns the meaning of an error number of the calls that place pages.
fn placing(errno: i32) -> &'static str {
    match errno {
        libc::EEXIST => "the page is already present",
        libc::EAGAIN => "the mapping is being changed at the same time",
        libc::ENOENT => "not all of it is registered for missing pages",
        libc::ESRCH => "the process that owns the memory has ended",
        other => common(other),
    }
}

#[repr(C)]
struct CopyPages {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// Argument of `UFFDIO_ZEROPAGE` and `UFFDIO_CONTINUE`.
#[repr(C)]
struct FillPages {
    range: Span,
    mode: u64,
    filled: i64,
}

const _: () = assert!(size_of::<CopyPages>() == 40 && size_of::<FillPages>() == 32);

/// Returns the result of a call that failed after it had placed `done` bytes. `done` is negative if
/// it had placed none.
fn placed(
    call: &'static str,
    span: &Range<u64>,
    done: i64,
    meaning: fn(i32) -> &'static str,
) -> Result<u64, SysError> {
    let error = std::io::Error::last_os_error();
    match u64::try_from(done) {
        Ok(done) if done > 0 => Ok(done),
        _ => Err(SysError::from_io(call, format_span(span), error, meaning)),
    }
}

/// Message of the kernel to the fault handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A thread accessed a missing page and sleeps until the page is placed.
    Fault {
        /// Address of the access, rounded down to the start of its page.
        address: u64,
        /// True if the access was a write.
        write: bool,
        /// Id of the sleeping thread (`gettid`), or 0 without
        /// [`FEATURE_THREAD_ID`](super::FEATURE_THREAD_ID). If a kernel worker takes the fault on
        /// behalf of a vCPU, this is the id of the worker.
        thread: u32,
    },
    /// Message (`UFFD_EVENT_*`) of a feature that this type does not cover.
    Other(u8),
}

/// Capabilities of memory that was registered for missing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// True if [`Userfaultfd::zero`] works. Otherwise use [`Userfaultfd::copy`] with zeros.
    pub zero: bool,
}

impl Userfaultfd {
    /// Registers the mapped bytes `span` for faults on missing pages.
    ///
    /// From then on, a thread that accesses a missing page sleeps until the page is placed
    /// ([`copy`](Self::copy)), the memory is unregistered, or this userfaultfd is closed.
    ///
    /// # Errors
    /// Returns an error if not all of `span` is mapped, if it is registered with another
    /// userfaultfd, or if the kernel cannot report faults for this kind of memory.
    pub fn register_missing(&self, span: Range<u64>) -> Result<Registered, SysError> {
        self.register("UFFDIO_REGISTER(MISSING)", span, REGISTER_MODE_MISSING)
    }

    /// Registers the mapping `span` of a memfd for faults on missing and on unmapped pages.
    ///
    /// In addition to the effect of [`register_missing`](Self::register_missing), a thread that
    /// accesses a page that is in the file but not in the mapping sleeps until
    /// [`map_present`](Self::map_present) maps the page.
    ///
    /// # Errors
    /// Returns an error in the cases of `register_missing`.
    pub fn register_unmapped(&self, span: Range<u64>) -> Result<Registered, SysError> {
        let mode = REGISTER_MODE_MISSING | REGISTER_MODE_MINOR;
        self.register("UFFDIO_REGISTER(MISSING, MINOR)", span, mode)
    }

    fn register(&self, call_name: &'static str, span: Range<u64>, mode: u64) -> Result<Registered, SysError> {
        let mut argument = Register { range: whole(call_name, &span)?, mode, ioctls: 0 };
        // SAFETY: the structure belongs to the request. Registering delays accesses but changes no
        // content. `copy` decides the content of a page, or the kernel does as usual when this
        // descriptor is closed.
        if unsafe { call(self.fd.as_fd(), REGISTER, &mut argument) } < 0 {
            return Err(SysError::last(
                call_name,
                || format_span(&span),
                |errno| match errno {
                    libc::EBUSY => "another userfaultfd has this memory",
                    libc::EINVAL => {
                        "not all of it is mapped, or the kernel cannot report faults of this kind of memory"
                    }
                    libc::EPERM => "the mapping is not writable",
                    other => common(other),
                },
            ));
        }
        Ok(Registered { zero: argument.ioctls & OFFERS_ZEROPAGE != 0 })
    }

    /// Places a copy of `from`, which must be whole pages, at the address `to`, and wakes the
    /// threads that wait for these pages.
    ///
    /// Each page appears atomically. Returns the number of placed bytes. It is less than
    /// `from.len()` if the call reached a page that is already present, or if the mapping was
    /// changed during the call.
    ///
    /// # Errors
    /// Returns an error if nothing was placed. `EEXIST`: the page is already present (no thread was
    /// woken). `EAGAIN`: the mapping is being changed. `ENOENT`: the address is not registered.
    /// `ESRCH`: the process has ended.
    ///
    /// # Safety
    /// No Rust reference covers `to .. to + from.len()`, because the call gives missing pages new
    /// content. Pages that are present are never changed.
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
        // SAFETY: the structure belongs to the request, and `from` is borrowed for the `len` bytes
        // that the kernel reads. The kernel writes to missing pages of registered memory, and the
        // caller guarantees that no reference covers them.
        if unsafe { call(self.fd.as_fd(), COPY, &mut argument) } >= 0 {
            return Ok(len);
        }
        placed(CALL, &target, argument.copied, placing)
    }

    /// Places pages of zeros at `span` and wakes the threads that wait for them. Returns the number
    /// of placed bytes, like [`copy`](Self::copy).
    ///
    /// # Errors
    /// Returns an error in the cases of [`copy`](Self::copy). `EINVAL` can also mean that this kind
    /// of memory does not support the call ([`Registered::zero`]).
    ///
    /// # Safety
    /// No Rust reference covers `span`, as for [`copy`](Self::copy).
    pub unsafe fn zero(&self, span: Range<u64>) -> Result<u64, SysError> {
        const CALL: &str = "UFFDIO_ZEROPAGE";
        let mut argument = FillPages { range: whole(CALL, &span)?, mode: 0, filled: 0 };
        // SAFETY: the structure belongs to the request. The kernel fills missing pages of
        // registered memory, and the caller guarantees that no reference covers them.
        if unsafe { call(self.fd.as_fd(), ZEROPAGE, &mut argument) } >= 0 {
            return Ok(span.end - span.start);
        }
        placed(CALL, &span, argument.filled, placing)
    }

    /// Maps the pages of the file at the addresses `span`, and wakes the threads that wait for
    /// them. `span` must be a multiple of the page size of the file, for example 2 MiB.
    ///
    /// Returns the number of mapped bytes. It is less than the length of `span` if the call reached
    /// a page that is already mapped, or if the mapping was changed during the call.
    ///
    /// # Errors
    /// Returns an error if nothing was mapped. `EEXIST`: the page is already mapped (no thread was
    /// woken). `EFAULT`: the file has no such page. `EAGAIN`: the mapping is being changed.
    ///
    /// # Safety
    /// No Rust reference covers `span`, as for [`copy`](Self::copy).
    pub unsafe fn map_present(&self, span: Range<u64>) -> Result<u64, SysError> {
        const CALL: &str = "UFFDIO_CONTINUE";
        let mut argument = FillPages { range: whole(CALL, &span)?, mode: 0, filled: 0 };
        // SAFETY: the structure belongs to the request. The kernel maps pages of registered memory
        // that were not mapped, and the caller guarantees that no reference covers them.
        if unsafe { call(self.fd.as_fd(), CONTINUE, &mut argument) } >= 0 {
            return Ok(span.end - span.start);
        }
        placed(CALL, &span, argument.filled, |errno| match errno {
            libc::EFAULT => "the file has no such page",
            other => placing(other),
        })
    }

    /// Wakes the threads that wait for a page of `span`. Each thread retries its access, and waits
    /// again if the page is still missing.
    ///
    /// # Errors
    /// Returns an error only if `span` is not whole pages or the descriptor is not valid.
    pub fn wake(&self, span: Range<u64>) -> Result<(), SysError> {
        const CALL: &str = "UFFDIO_WAKE";
        let mut argument = whole(CALL, &span)?;
        // SAFETY: the structure belongs to the request, and waking changes no memory.
        if unsafe { call(self.fd.as_fd(), WAKE, &mut argument) } < 0 {
            return Err(SysError::last(CALL, || format_span(&span), common));
        }
        Ok(())
    }

    /// Sets the blocking mode. If `blocking` is true, [`next_event`](Self::next_event) sleeps until
    /// a message arrives. A new userfaultfd is non-blocking, and only a non-blocking one can be
    /// polled.
    ///
    /// # Errors
    /// Returns an error only if the descriptor is not valid.
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

    /// Reads the next message. Returns `None` if no message is waiting and this userfaultfd is
    /// non-blocking.
    ///
    /// # Errors
    /// Returns an error if a signal interrupted the call (`EINTR`), or the kernel returns bytes
    /// that are not a message.
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
}

/// Parses Linux's `struct uffd_msg`: the event is at offset 0. In a fault, the flags are at 8, the
/// address at 16 and the thread at 24.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_their_documented_numbers() {
        assert_eq!(COPY, 0xc028_aa03);
        assert_eq!(WAKE, 0x8010_aa02);
        assert_eq!(ZEROPAGE, 0xc020_aa04);
        assert_eq!(CONTINUE, 0xc020_aa07);
    }

    #[test]
    fn messages_are_parsed_as_documented() {
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
    fn new_userfaultfd_has_no_event_and_no_registered_memory() {
        use vmferry_testkit::{Need, skip};
        let uffd = match Userfaultfd::open(0) {
            Ok(uffd) => uffd,
            Err(error) => return skip(Need::Uffd, error),
        };
        assert_eq!(uffd.next_event().unwrap(), None);
        let page = [1; 4096];
        // SAFETY: the first page of the address space is never mapped, so nothing is changed and
        // nothing refers to it.
        let error = unsafe { uffd.copy(PAGE_SIZE, &page) }.unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
        // SAFETY: the first page of the address space is never mapped, so nothing is changed and
        // nothing refers to it.
        let error = unsafe { uffd.zero(PAGE_SIZE..2 * PAGE_SIZE) }.unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
        uffd.wake(PAGE_SIZE..2 * PAGE_SIZE).unwrap();
        // SAFETY: half a page is rejected before any call is made.
        let error = unsafe { uffd.copy(PAGE_SIZE, &page[..2048]) }.unwrap_err();
        assert!(matches!(error, SysError::NotPages { .. }), "{error}");
    }
}
