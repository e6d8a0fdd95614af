//! Placing pages in the mapping that the guest sees.

use crate::error::FaultError;
use crate::stripes::Place;
use std::ops::Range;
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE, PageRun, Placed};
use vmferry_sys::uffd::Userfaultfd;

/// How often placing a page is tried while its mapping is being changed: with [`PAUSE`] between, a tenth of a second.
const ATTEMPTS: u32 = 1000;
const PAUSE: Duration = Duration::from_micros(100);

/// What is placed.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// Zeros.
    Zeros,
    /// Zeros, by copies of a page of zeros.
    CopiedZeros,
}

impl<'a> Source<'a> {
    /// The content of `part` out of that of `run`, in which it lies.
    pub(crate) fn part(self, run: PageRun, part: PageRun) -> Self {
        match self {
            Self::Bytes(bytes) => {
                // Both fit: `bytes` is as long as `run`.
                let at =
                    |page: u64| usize::try_from((page - run.first.0) << PAGE_SHIFT).unwrap_or(usize::MAX);
                Self::Bytes(&bytes[at(part.first.0)..at(part.end())])
            }
            other => other,
        }
    }

    /// Places at the addresses `span`, of which it starts `done` bytes into this source; as many as the host does at once.
    ///
    /// # Safety
    /// As for [`Userfaultfd::copy`].
    unsafe fn place(
        self,
        uffd: &Userfaultfd,
        span: Range<u64>,
        done: usize,
    ) -> Result<u64, vmferry_sys::SysError> {
        static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Bytes(bytes) => uffd.copy(span.start, &bytes[done..]),
                Self::Zeros => uffd.zero(span),
                Self::CopiedZeros => uffd.copy(span.start, &ZEROS),
            }
        }
    }
}

/// Places `part`, all of it in the stripe of `uffd`. The kernel stops at the first page that is there already, having said
/// how much it placed: such pages are stepped over.
///
/// 0 <= pages placed + pages there <= part.count, and every page below `at` is one or the other.
pub(crate) fn fill_part(
    uffd: &Userfaultfd,
    place: &Place,
    part: PageRun,
    source: Source<'_>,
    placed: &mut Placed,
) -> Result<(), FaultError> {
    let span = place.span(part);
    let mut at = span.start;
    // Pages that were there, from this address on up to `at`, whose sleepers are still to be woken.
    let mut there = None;
    let mut attempts = 0;
    let wake = |there: &mut Option<u64>, at: u64| match there.take() {
        // Somebody else placed the page and woke who slept on it; but who put it into a memfd by another way did not.
        Some(from) => uffd.wake(from..at).map_err(FaultError::host(place.id)),
        None => Ok(()),
    };
    while at < span.end {
        let done = usize::try_from(at - span.start).unwrap_or(usize::MAX);
        // SAFETY: inside a region for which `UffdMemory::new`'s caller vouches.
        match unsafe { source.place(uffd, at..span.end, done) } {
            Ok(bytes) => {
                wake(&mut there, at)?;
                placed.pages += bytes >> PAGE_SHIFT;
                at += bytes;
                attempts = 0;
            }
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                there.get_or_insert(at);
                placed.there += 1;
                at += PAGE_SIZE;
                attempts = 0;
            }
            Err(error) if matches!(error.errno(), Some(libc::EAGAIN | libc::EINTR)) => {
                attempts += 1;
                if attempts > ATTEMPTS {
                    wake(&mut there, at)?;
                    return Err(FaultError::Unstable {
                        region: place.id,
                        page: part.first.0 + (at - span.start) / PAGE_SIZE,
                    });
                }
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                wake(&mut there, at)?;
                return Err(FaultError::Host { region: place.id, source: error });
            }
        }
    }
    wake(&mut there, at)
}

/// Maps the huge page `block` of `place`, which the file has, where it belongs, and wakes who sleeps there.
pub(crate) fn show(uffd: &Userfaultfd, place: &Place, block: PageRun) -> Result<(), FaultError> {
    let span = place.span(block);
    for _ in 0..ATTEMPTS {
        // SAFETY: inside a region for which `UffdMemory::new`'s caller vouches.
        match unsafe { uffd.map_present(span.clone()) } {
            Ok(_) => return Ok(()),
            Err(error) => match error.errno() {
                // Whoever mapped it woke who slept then, and not who has come to sleep since.
                Some(libc::EEXIST) => return uffd.wake(span).map_err(FaultError::host(place.id)),
                Some(libc::EAGAIN | libc::EINTR) => std::thread::sleep(PAUSE),
                _ => return Err(FaultError::Host { region: place.id, source: error }),
            },
        }
    }
    Err(FaultError::Unstable { region: place.id, page: block.first.0 })
}
