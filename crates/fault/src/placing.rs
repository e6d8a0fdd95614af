//! Placing pages in the mapping that the guest sees.

use crate::error::FaultError;
use crate::shards::ShardedRegion;
use std::ops::Range;
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PAGE_SHIFT, PAGE_SIZE, PageRun, Placed};
use vmferry_sys::uffd::Userfaultfd;

/// Maximum number of attempts to place a page while its mapping is being changed: with [`PAUSE`]
/// between them, a tenth of a second.
const ATTEMPTS: u32 = 1000;
const PAUSE: Duration = Duration::from_micros(100);

/// Content to place.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The given bytes.
    Bytes(&'a [u8]),
    /// Zeros, placed by the kernel.
    Zeros,
    /// Zeros, placed as copies of a page of zeros.
    CopiedZeros,
}

impl<'a> Source<'a> {
    /// Returns the content of `part`, which lies in `run`, out of the content of `run`.
    pub(crate) fn part(self, run: PageRun, part: PageRun) -> Self {
        match self {
            Self::Bytes(bytes) => {
                // Both indexes fit: `bytes` is as long as `run`.
                let at =
                    |page: u64| usize::try_from((page - run.first.0) << PAGE_SHIFT).unwrap_or(usize::MAX);
                Self::Bytes(&bytes[at(part.first.0)..at(part.end())])
            }
            other => other,
        }
    }

    /// Places the content that starts `done` bytes into this source at the addresses `span`.
    /// Returns the number of bytes that the host placed at once.
    ///
    /// # Safety
    /// The contract of [`Userfaultfd::copy`].
    unsafe fn place(
        self,
        uffd: &Userfaultfd,
        span: Range<u64>,
        done: usize,
    ) -> Result<u64, vmferry_sys::SysError> {
        static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
        // SAFETY: the caller guarantees the contract of this function.
        unsafe {
            match self {
                Self::Bytes(bytes) => uffd.copy(span.start, &bytes[done..]),
                Self::Zeros => uffd.zero(span),
                Self::CopiedZeros => uffd.copy(span.start, &ZEROS),
            }
        }
    }
}

/// Places the pages of `part`, which lies in the shard of `uffd`, and skips the pages that are
/// present. The kernel stops at the first present page and reports how much it placed.
///
/// Invariant: 0 <= placed pages + present pages <= part.count, and every page below `at` is one or
/// the other.
pub(crate) fn fill_part(
    uffd: &Userfaultfd,
    place: &ShardedRegion,
    part: PageRun,
    source: Source<'_>,
    placed: &mut Placed,
) -> Result<(), FaultError> {
    let span = place.span(part);
    let mut at = span.start;
    // First address of the present pages up to `at` whose sleeping threads must still be woken.
    let mut present = None;
    let mut attempts = 0;
    let wake = |present: &mut Option<u64>, at: u64| match present.take() {
        // A thread that placed the page through userfaultfd has woken the threads that slept on it.
        // A writer that put the page into a memfd through another mapping has not.
        Some(from) => uffd.wake(from..at).map_err(FaultError::host(place.id)),
        None => Ok(()),
    };
    while at < span.end {
        let done = usize::try_from(at - span.start).unwrap_or(usize::MAX);
        // SAFETY: the address is inside a region for which the caller of `UffdMemory::new`
        // guarantees the contract.
        match unsafe { source.place(uffd, at..span.end, done) } {
            Ok(bytes) => {
                wake(&mut present, at)?;
                placed.pages += bytes >> PAGE_SHIFT;
                at += bytes;
                attempts = 0;
            }
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                present.get_or_insert(at);
                placed.already_present += 1;
                at += PAGE_SIZE;
                attempts = 0;
            }
            Err(error) if matches!(error.errno(), Some(libc::EAGAIN | libc::EINTR)) => {
                attempts += 1;
                if attempts > ATTEMPTS {
                    wake(&mut present, at)?;
                    return Err(FaultError::Unstable {
                        region: place.id,
                        page: part.first.0 + (at - span.start) / PAGE_SIZE,
                    });
                }
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                wake(&mut present, at)?;
                return Err(FaultError::Host { region: place.id, source: error });
            }
        }
    }
    wake(&mut present, at)
}

/// Maps the huge page `block` of `place`, which exists in the file, and wakes the threads that
/// sleep on it.
pub(crate) fn map_huge_page(
    uffd: &Userfaultfd,
    place: &ShardedRegion,
    block: PageRun,
) -> Result<(), FaultError> {
    let span = place.span(block);
    for _ in 0..ATTEMPTS {
        // SAFETY: the address is inside a region for which the caller of `UffdMemory::new`
        // guarantees the contract.
        match unsafe { uffd.map_present(span.clone()) } {
            Ok(_) => return Ok(()),
            Err(error) => match error.errno() {
                // The thread that mapped the page woke the threads that slept at that time, but not
                // those that began to sleep since.
                Some(libc::EEXIST) => return uffd.wake(span).map_err(FaultError::host(place.id)),
                Some(libc::EAGAIN | libc::EINTR) => std::thread::sleep(PAUSE),
                _ => return Err(FaultError::Host { region: place.id, source: error }),
            },
        }
    }
    Err(FaultError::Unstable { region: place.id, page: block.first.0 })
}
