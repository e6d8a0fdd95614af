//! Allocation of guest memory before it is used.

use crate::{MappedRegion, TrackerError};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use vmferry_core::PageRun;
use vmferry_sys::{SysError, mapping};
use vmferry_thread::{Role, spawn_scoped};

/// Time at which the host allocates the memory of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prealloc {
    /// Each page is allocated when it is first written.
    Off,
    /// All memory is allocated before the guest runs or arrives.
    On,
    /// Each page is allocated when it is first written, except that a target allocates pages that
    /// the source announces shortly before they arrive.
    #[default]
    Auto,
}

/// Reason for which guest memory cannot be allocated before it is used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PopulateError {
    /// The host has not enough free memory.
    #[error(
        "cannot allocate {need} bytes of guest memory: the host has {available} bytes available; free memory on the host, \
         give the guest less memory, or let the host allocate the memory when it is used"
    )]
    Short {
        /// Size of the guest memory in bytes.
        need: u64,
        /// Memory that the host can give without swapping, in bytes.
        available: u64,
    },
    /// The kernel refused to allocate a part of the memory.
    #[error("cannot allocate guest memory: {0}")]
    Refused(#[source] SysError),
    /// A thread could not be started.
    #[error("cannot start a thread that allocates guest memory: {0}")]
    Thread(#[source] io::Error),
}

/// Bytes that one thread populates at a time: 64 MiB.
const PART: u64 = 64 << 20;
/// Maximum number of threads. More threads do not clear memory faster.
const MOST_THREADS: usize = 8;

/// Populates the pages of `run`, so that the first write to them causes no page fault. The content
/// does not change.
///
/// Do not call this function while a userfaultfd handles missing pages of the region. It would wait
/// for each missing page.
///
/// # Errors
/// Returns [`TrackerError::NoPages`] if `run` is not in the region, and [`TrackerError::Host`] if
/// the host refuses. A kernel before 5.14 refuses every call.
pub fn populate(region: &MappedRegion, run: PageRun) -> Result<(), TrackerError> {
    mapping::populate(region.span_of(run)?).map_err(TrackerError::host(region.id))
}

/// Returns the memory that the host can give without swapping, in bytes (`MemAvailable` of
/// `/proc/meminfo`), or `None` if it is unknown.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse().ok())?;
    Some(kib * 1024)
}

/// Populates all memory of `regions` with several threads. Returns false if the kernel cannot
/// populate memory, because it is older than 5.14.
///
/// `available` is the [`available_memory`] of the host, or `None` if the memory of the regions is
/// reserved already. If the kernel ran out of memory during the call, it would not return an error,
/// but end a process.
///
/// # Errors
/// Returns [`PopulateError::Short`] if the regions are larger than `available`, and otherwise the
/// error of the kernel. A part of the memory may have been populated.
pub fn populate_all(regions: &[MappedRegion], available: Option<u64>) -> Result<bool, PopulateError> {
    let need = regions.iter().map(|region| region.len).sum();
    if let Some(available) = available.filter(|available| *available < need) {
        return Err(PopulateError::Short { need, available });
    }
    let parts: Vec<_> = regions
        .iter()
        .flat_map(|region| {
            let end = region.span().end;
            let starts = (region.host..end).step_by(usize::try_from(PART).unwrap_or(usize::MAX));
            starts.map(move |start| start..(start + PART).min(end))
        })
        .collect();
    let (next, failed) = (AtomicUsize::new(0), OnceLock::new());
    let work = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed))
            && failed.get().is_none()
        {
            if let Err(error) = mapping::populate(part.clone()) {
                let _ = failed.set(error);
            }
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for thread in 0..cpus.min(MOST_THREADS).min(parts.len()) {
            spawn_scoped(Role::Device, format!("populate-{thread}"), scope, work)?;
        }
        Ok(())
    })
    .map_err(PopulateError::Thread)?;
    match failed.into_inner() {
        None => Ok(true),
        Some(error) if error.errno() == Some(libc::EINVAL) => Ok(false),
        Some(error) => Err(PopulateError::Refused(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;
    use vmferry_bitmap::Bitmap;
    use vmferry_core::{PageIndex, RegionId};

    /// Anonymous mapping with small pages, unmapped when dropped.
    struct Mapped(MappedRegion);

    impl Mapped {
        fn new(len: u64, access: i32) -> Self {
            let size = usize::try_from(len).unwrap();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            let host = start.addr() as u64;
            // A kernel without huge pages refuses the advice and has nothing to forbid.
            let _ = mapping::allow_huge_pages(host..host + len, false);
            let (marks, returned_pages) = (None, None);
            Self(MappedRegion {
                id: RegionId(0),
                host,
                len,
                backing: Backing::Anonymous,
                marks,
                returned_pages,
            })
        }

        /// Returns the first page and the end of each run of touched pages.
        fn touched(&self) -> Vec<(u64, u64)> {
            let mut touched = Bitmap::new(self.0.pages());
            crate::touched(&self.0, PageRun::new(PageIndex(0), self.0.pages()), &mut touched).unwrap();
            touched.runs().map(|run| (run.start, run.end)).collect()
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            let start = std::ptr::with_exposed_provenance_mut(usize::try_from(self.0.host).unwrap());
            // SAFETY: `new` has mapped the range, and nothing refers to it any more.
            unsafe { libc::munmap(start, usize::try_from(self.0.len).unwrap()) };
        }
    }

    const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

    #[test]
    fn only_the_pages_of_the_run_are_populated() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_WRITE") {
            return;
        }
        let mapped = Mapped::new(64 * 4096, WRITABLE);
        populate(&mapped.0, PageRun::new(PageIndex(3), 9)).unwrap();
        assert_eq!(mapped.touched(), [(3, 12)]);
        let beyond = populate(&mapped.0, PageRun::new(PageIndex(60), 9));
        assert!(matches!(beyond, Err(TrackerError::NoPages { .. })));
    }

    #[test]
    fn all_memory_is_populated_by_several_threads() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_WRITE") {
            return;
        }
        let mapped = [Mapped::new(PART + 4096, WRITABLE), Mapped::new(4096, WRITABLE)];
        let regions = [mapped[0].0.clone(), mapped[1].0.clone()];
        assert!(populate_all(&regions, None).unwrap());
        assert_eq!(mapped.map(|mapped| mapped.touched()), [[(0, PART / 4096 + 1)], [(0, 1)]]);
    }

    /// A mapping that is not writable causes the error that an old kernel returns.
    #[test]
    fn kernel_that_cannot_populate_memory_is_no_error() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_WRITE") {
            return;
        }
        let mapped = Mapped::new(16 * 4096, libc::PROT_READ);
        assert!(!populate_all(std::slice::from_ref(&mapped.0), None).unwrap());
        assert!(populate(&mapped.0, PageRun::new(PageIndex(0), 1)).is_err());
        assert_eq!(mapped.touched(), []);
    }

    #[test]
    fn memory_that_the_host_does_not_have_is_refused_before_any_page_is_populated() {
        let mapped = Mapped::new(16 * 4096, WRITABLE);
        let error = populate_all(std::slice::from_ref(&mapped.0), Some(8 * 4096)).unwrap_err();
        assert!(matches!(error, PopulateError::Short { need: 65_536, available: 32_768 }), "{error}");
        assert_eq!(mapped.touched(), []);
    }
}
