//! Fault on a missing page that the same host resolves: the part of a remote fault without the
//! network.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use vmferry_sys::uffd::{Event, Userfaultfd};

use super::RttError;
use super::samples::Samples;

const PAGE: usize = 4096;

/// Way in which the handler waits for faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handler {
    /// The handler sleeps in `read`.
    Blocking,
    /// The handler polls with no timeout, which costs a processor.
    Spinning,
}

impl Handler {
    pub(super) fn name(self) -> &'static str {
        match self {
            Handler::Blocking => "blocking",
            Handler::Spinning => "spinning",
        }
    }
}

/// Private anonymous memory that is accessed only through raw pointers.
///
/// Invariant: `start .. start + len` is one mapping that only this value owns, and no Rust
/// reference covers any part of it.
#[derive(Debug)]
struct Missing {
    start: *mut u8,
    len: usize,
}

impl Missing {
    fn new(pages: usize) -> io::Result<Self> {
        let len = pages.checked_mul(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice changes no other
        // mapping.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        let memory = Missing { start: start.cast(), len };
        // Without huge pages each fault is for one page.
        // SAFETY: the range is the mapping made above, and the advice changes no content.
        unsafe { madvise(start, len, Advice::LinuxNoHugepage)? };
        Ok(memory)
    }

    fn span(&self) -> Range<u64> {
        let start = self.start.addr() as u64;
        start..start + self.len as u64
    }

    /// Reads the first word of page `index`. Sleeps until the page is present.
    fn touch(&self, index: usize) -> u64 {
        assert!(index < self.len / PAGE, "page {index} is outside");
        // SAFETY: the word lies in the mapping (just checked) and is aligned. Only the kernel
        // writes to it, once, before this read returns.
        unsafe { self.start.wrapping_add(index * PAGE).cast::<u64>().read_volatile() }
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        // SAFETY: only this value owns the mapping, and nothing refers to it. After a failure it
        // stays mapped until the process ends.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

/// Touches `pages` missing pages one after the other, and measures each touch. Another thread
/// resolves the faults.
///
/// # Errors
///
/// Fails with [`RttError::Unavailable`] if userfaultfd is not available on this host or to this
/// user.
pub(super) fn measure(handler: Handler, pages: usize) -> Result<Samples, RttError> {
    let uffd = Userfaultfd::open(0).map_err(|error| RttError::Unavailable(error.to_string()))?;
    let memory = Missing::new(pages).map_err(RttError::io("map memory"))?;
    uffd.set_blocking(handler == Handler::Blocking).map_err(RttError::Fault)?;
    uffd.register_missing(memory.span()).map_err(RttError::Fault)?;
    let span = memory.span();
    let touched = AtomicBool::new(false);
    let (samples, handled) = std::thread::scope(|scope| {
        let worker = std::thread::Builder::new()
            .name("fault-handler".into())
            .spawn_scoped(scope, || {
                let handled = handle(&uffd, handler, &span, pages, &touched);
                if handled.is_err() {
                    // Without a handler the next touch would never return. After the unregistration
                    // it finds an empty page instead, which `touch_all` reports.
                    let _ = uffd.unregister(span.clone());
                }
                handled
            })
            .map_err(RttError::io("start a thread"))?;
        let samples = touch_all(&memory, pages);
        touched.store(true, Ordering::Release);
        let handled = worker.join().unwrap_or_else(|_| Err(RttError::Usage("the handler panicked".into())));
        Ok((samples, handled))
    })?;
    // An error of the handler causes the error of the touches, so it is reported first.
    handled?;
    samples
}

fn touch_all(memory: &Missing, pages: usize) -> Result<Samples, RttError> {
    let mut samples = Samples::default();
    let mut wrong = None;
    for index in 0..pages {
        let start = Instant::now();
        let word = memory.touch(index);
        samples.push(start.elapsed());
        // The loop continues, because the handler waits for a fault of every page.
        if word != stamp(index) {
            wrong = wrong.or(Some(index));
        }
    }
    match wrong {
        None => Ok(samples),
        Some(index) => {
            Err(RttError::Usage(format!("page {index} does not have the content that was placed in it")))
        }
    }
}

/// Returns the first word of page `index`. It is never zero, because an unhandled page starts with
/// zero.
fn stamp(index: usize) -> u64 {
    index as u64 + 1
}

/// Resolves one fault of each page.
fn handle(
    uffd: &Userfaultfd,
    handler: Handler,
    span: &Range<u64>,
    pages: usize,
    touched: &AtomicBool,
) -> Result<(), RttError> {
    let mut page = [0xa5; PAGE];
    let mut resolved = 0;
    while resolved < pages && !touched.load(Ordering::Acquire) {
        if handler == Handler::Spinning && !ready(uffd)? {
            continue;
        }
        let address = match uffd.next_event() {
            Ok(Some(Event::Fault { address, .. })) => address,
            Ok(_) => continue,
            Err(error) if error.errno() == Some(libc::EINTR) => continue,
            Err(error) => return Err(RttError::Fault(error)),
        };
        let index = usize::try_from((address - span.start) / PAGE as u64).unwrap_or(usize::MAX);
        page[..8].copy_from_slice(&stamp(index).to_ne_bytes());
        resolved += place(uffd, address, &page)?;
    }
    Ok(())
}

/// Places a page. Returns the number of pages that became present: 0 if the page was already there.
fn place(uffd: &Userfaultfd, address: u64, page: &[u8; PAGE]) -> Result<usize, RttError> {
    loop {
        // SAFETY: faults come only from the registered memory, which is a `Missing`: no reference
        // covers it.
        match unsafe { uffd.copy(address, page) } {
            Ok(_) => return Ok(1),
            Err(error) if error.errno() == Some(libc::EEXIST) => return Ok(0),
            Err(error) if error.errno() == Some(libc::EAGAIN) => {}
            Err(error) => return Err(RttError::Fault(error)),
        }
    }
}

/// Returns whether there is a fault to read.
fn ready(uffd: &Userfaultfd) -> Result<bool, RttError> {
    let mut polled = [PollFd::new(uffd, PollFlags::IN)];
    match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(RttError::io("poll a userfaultfd")(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::{Need, skip};

    #[test]
    fn faults_are_resolved_and_timed() {
        for handler in [Handler::Blocking, Handler::Spinning] {
            let samples = match measure(handler, 64) {
                Ok(samples) => samples,
                Err(RttError::Unavailable(why)) => return skip(Need::Uffd, why),
                Err(error) => panic!("{handler:?}: {error}"),
            };
            let figures = samples.figures().unwrap();
            assert_eq!(figures.count, 64);
            // A touch of a present page takes nanoseconds. Two thread switches take longer.
            assert!(figures.p50_us > 0.5, "{handler:?}: {figures:?}");
            assert!(figures.p50_us <= figures.p99_us && figures.p99_us <= figures.max_us);
        }
    }

    #[test]
    fn page_with_wrong_content_is_reported() {
        // The memory is not registered, so the kernel provides empty pages.
        let memory = Missing::new(2).unwrap();
        let error = touch_all(&memory, 2).unwrap_err();
        assert!(error.to_string().contains("page 0"), "{error}");
    }
}
