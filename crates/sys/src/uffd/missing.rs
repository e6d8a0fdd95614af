//! Faults on missing pages, and placing those.

use super::{GROUP, REGISTER, Register, Span, Userfaultfd, show, whole};
use crate::error::common;
use crate::ioctl::{call, ior, iowr};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;
use std::os::fd::AsFd;

const WAKE: u64 = ior::<Span>(GROUP, 0x02);
const COPY: u64 = iowr::<CopyPages>(GROUP, 0x03);
const ZEROPAGE: u64 = iowr::<ZeroPages>(GROUP, 0x04);
const CONTINUE: u64 = iowr::<MapPages>(GROUP, 0x07);

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_MINOR: u64 = 1 << 2;

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

#[repr(C)]
struct MapPages {
    range: Span,
    mode: u64,
    mapped: i64,
}

const _: () =
    assert!(size_of::<CopyPages>() == 40 && size_of::<ZeroPages>() == 32 && size_of::<MapPages>() == 32);

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
        /// Who sleeps, as its `gettid` says; 0 without [`FEATURE_THREAD_ID`](super::FEATURE_THREAD_ID). A fault that KVM lets a kernel worker
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

impl Userfaultfd {
    /// Registers the mapped bytes `span` for faults on missing pages: from now on whoever touches a page of them that
    /// is not there sleeps until it was placed ([`copy`](Self::copy)) or this userfaultfd is gone.
    ///
    /// # Errors
    /// If they are not all mapped, belong to another userfaultfd, or are of a kind whose faults cannot be handled.
    pub fn register_missing(&self, span: Range<u64>) -> Result<Registered, SysError> {
        self.register("UFFDIO_REGISTER(MISSING)", span, REGISTER_MODE_MISSING)
    }

    /// Like [`register_missing`](Self::register_missing), of a memfd's mapping; and whoever touches a page that the file
    /// has and this mapping does not sleeps as well, until [`map_present`](Self::map_present) maps it.
    ///
    /// # Errors
    /// As for `register_missing`.
    pub fn register_unmapped(&self, span: Range<u64>) -> Result<Registered, SysError> {
        let mode = REGISTER_MODE_MISSING | REGISTER_MODE_MINOR;
        self.register("UFFDIO_REGISTER(MISSING, MINOR)", span, mode)
    }

    fn register(&self, call_name: &'static str, span: Range<u64>, mode: u64) -> Result<Registered, SysError> {
        let mut argument = Register { range: whole(call_name, &span)?, mode, ioctls: 0 };
        // SAFETY: the structure is the request's. Registering delays accesses, it changes no content: what a page
        // comes to hold is decided by `copy`, or, when this descriptor is closed, by the kernel, as if it never was.
        if unsafe { call(self.fd.as_fd(), REGISTER, &mut argument) } < 0 {
            return Err(SysError::last(
                call_name,
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

    /// Maps what the file has at `span`, whole pages of its size, and wakes who waits there. Returns the bytes mapped:
    /// fewer than asked for if the mapping was changed in the middle.
    ///
    /// # Errors
    /// If nothing was mapped. `EEXIST`: it is mapped already (nobody was woken), `EFAULT`: the file has no such page,
    /// `EAGAIN`: the mapping is just being changed.
    ///
    /// # Safety
    /// The caller upholds that no Rust reference covers `span`, as for [`copy`](Self::copy).
    pub unsafe fn map_present(&self, span: Range<u64>) -> Result<u64, SysError> {
        const CALL: &str = "UFFDIO_CONTINUE";
        let mut argument = MapPages { range: whole(CALL, &span)?, mode: 0, mapped: 0 };
        // SAFETY: the structure is the request's. The kernel maps pages of registered memory that were not mapped, and
        // our caller upholds that no reference covers them.
        if unsafe { call(self.fd.as_fd(), CONTINUE, &mut argument) } >= 0 {
            return Ok(span.end - span.start);
        }
        let error = std::io::Error::last_os_error();
        match u64::try_from(argument.mapped) {
            Ok(mapped) if mapped > 0 => Ok(mapped),
            _ => Err(SysError::from_io(CALL, show(&span), error, |errno| match errno {
                libc::EFAULT => "the file has no such page",
                other => placing(other),
            })),
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
        use vmferry_testkit::{Need, skip};
        let uffd = match Userfaultfd::open(0) {
            Ok(uffd) => uffd,
            Err(error) => return skip(Need::Uffd, error),
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
}
