//! State of the pages of this process, as the kernel reports it: `PAGEMAP_SCAN` and, on kernels
//! without this request, the entries of the pagemap (Linux
//! `Documentation/admin-guide/mm/pagemap.rst`, `PAGEMAP_SCAN(2const)`).

use crate::error::{common, need_small_pages};
use crate::ioctl::{call, iowr};
use crate::{PAGE_SIZE, SysError};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const SCAN: u64 = iowr::<ScanArg>(b'f', 16);
const SCAN_NAME: &str = "PAGEMAP_SCAN";

/// Category `PAGE_IS_WPALLOWED`: asynchronous write protection covers the page.
pub const IS_WPALLOWED: u64 = 1 << 0;
/// Category `PAGE_IS_WRITTEN`: the page is not write-protected, so it was written since it was last
/// protected.
pub const IS_WRITTEN: u64 = 1 << 1;
/// Category `PAGE_IS_FILE`: the page belongs to a file or a memfd.
pub const IS_FILE: u64 = 1 << 2;
/// Category `PAGE_IS_PRESENT`: the page is mapped.
pub const IS_PRESENT: u64 = 1 << 3;
/// Category `PAGE_IS_SWAPPED`: the page is swapped out, or the kernel is moving it to another
/// physical page, or its entry is only a marker of write protection.
pub const IS_SWAPPED: u64 = 1 << 4;
/// Category `PAGE_IS_PFNZERO`: the shared zero page of the kernel is mapped.
pub const IS_PFNZERO: u64 = 1 << 5;
/// Category `PAGE_IS_HUGE`: the page is part of a huge page.
pub const IS_HUGE: u64 = 1 << 6;

const WP_MATCHING: u64 = 1 << 0;
const CHECK_WPASYNC: u64 = 1 << 1;

/// Filter of a scan. A page matches if it has all categories of `all` and, unless `any` is 0, at
/// least one category of `any`. The categories in `inverted` are flipped before the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// Categories (`IS_*`) that are flipped, so that each of them counts as present if it is
    /// absent.
    pub inverted: u64,
    /// Categories that a page must have.
    pub all: u64,
    /// Categories of which a page must have at least one, unless the field is 0.
    pub any: u64,
    /// Categories to report in [`PageRegion::categories`]. Fewer categories make longer runs.
    ///
    /// If `all` requests only [`IS_WRITTEN`], some kernels take a fast path that also reports pages
    /// that do not exist.
    pub report: u64,
    /// True to write-protect matching pages in the same step, so that a page is reported only after
    /// it has been protected. The scan fails if a page in the range is not registered for
    /// asynchronous write protection.
    pub protect: bool,
}

/// Run of pages with the same categories.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageRegion {
    /// Address of the first page.
    pub start: u64,
    /// Address after the last page.
    pub end: u64,
    /// Requested categories of the pages, after inversion.
    pub categories: u64,
}

#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArg>() == 96 && size_of::<PageRegion>() == 24);

/// Open file `/proc/self/pagemap`, which every process may open. The file describes the process
/// that opened it, even if a forked child uses it.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

/// Result of [`Pagemap::scan`]: number of runs and extent of the scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    /// Number of runs that were written to the buffer.
    pub runs: usize,
    /// End address of the examined pages. It is less than the requested end if the buffer became
    /// full.
    pub upto: u64,
}

impl Pagemap {
    /// Opens the pagemap of this process.
    ///
    /// # Errors
    /// Returns an error if /proc is not mounted or the kernel has no pagemap.
    pub fn open() -> Result<Self, SysError> {
        need_small_pages("open of /proc/self/pagemap")?;
        let path = "/proc/self/pagemap";
        match File::open(path) {
            Ok(file) => Ok(Self { file }),
            Err(error) => Err(SysError::from_io("open", path.to_owned(), error, |errno| match errno {
                libc::ENOENT => "/proc is not mounted, or the kernel has no pagemap",
                other => common(other),
            })),
        }
    }

    /// Returns the pagemap of this process, which the first call opens for all threads. The file
    /// stays open, so that threads that are confined later can use it.
    ///
    /// # Errors
    /// Returns an error if /proc is not mounted or the kernel has no pagemap. The next call tries
    /// again.
    pub fn own() -> Result<&'static Self, SysError> {
        static OWN: OnceLock<Pagemap> = OnceLock::new();
        if let Some(own) = OWN.get() {
            return Ok(own);
        }
        let opened = Self::open()?;
        Ok(OWN.get_or_init(|| opened))
    }

    /// Searches the addresses `span` for pages that match `what`, and writes their runs to `out`
    /// until `out` is full.
    ///
    /// # Errors
    /// Returns [`SysError::NotPages`] if `span` is not whole pages or `out` is empty, and otherwise
    /// the error of the kernel. `ENOTTY` means that the kernel is older than 6.7, and `EPERM` means
    /// that `protect` is true and the memory is not registered for asynchronous write protection.
    ///
    /// After an error with `protect`, pages of `span` may have been protected without being
    /// reported. A write tracker must then treat all pages of `span` as written.
    pub fn scan(&self, span: &Range<u64>, what: Match, out: &mut [PageRegion]) -> Result<Scanned, SysError> {
        self.scan_some(span, what, out, 0)
    }

    /// Returns the address of the first page of `span` that matches `what`, or `None` if no page
    /// matches.
    ///
    /// The kernel skips a part of the address space without page tables in one step, so the cost
    /// does not depend on the size of that part.
    ///
    /// # Errors
    /// Returns an error in the cases of [`scan`](Self::scan).
    pub fn first(&self, span: &Range<u64>, what: Match) -> Result<Option<u64>, SysError> {
        let mut found = [PageRegion::default()];
        let scanned = self.scan_some(span, what, &mut found, 1)?;
        Ok(found[..scanned.runs].first().map(|run| run.start))
    }

    /// Scans like [`scan`](Self::scan), and stops after `most` pages, unless `most` is 0.
    fn scan_some(
        &self,
        span: &Range<u64>,
        what: Match,
        out: &mut [PageRegion],
        most: u64,
    ) -> Result<Scanned, SysError> {
        let target = || format!("addresses {:#x}..{:#x}", span.start, span.end);
        if !span.start.is_multiple_of(PAGE_SIZE) || !span.end.is_multiple_of(PAGE_SIZE) || out.is_empty() {
            return Err(SysError::NotPages { call: SCAN_NAME, target: target() });
        }
        let mut argument = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: if what.protect { WP_MATCHING | CHECK_WPASYNC } else { 0 },
            start: span.start,
            end: span.end,
            walk_end: span.start,
            vec: out.as_mut_ptr().addr() as u64,
            vec_len: out.len() as u64,
            max_pages: most,
            category_inverted: what.inverted,
            category_mask: what.all,
            category_anyof_mask: what.any,
            return_mask: what.report,
        };
        // SAFETY: the structure belongs to the request. The kernel writes at most `vec_len` runs to
        // `vec`, which is `out` and exclusively borrowed. Protection is asynchronous
        // (CHECK_WPASYNC), so no read or write can observe it.
        let runs = unsafe { call(self.file.as_fd(), SCAN, &mut argument) };
        match usize::try_from(runs) {
            Ok(runs) => Ok(Scanned { runs: runs.min(out.len()), upto: argument.walk_end }),
            Err(_) => Err(SysError::last(SCAN_NAME, target, |errno| match errno {
                libc::ENOTTY => "the kernel is older than Linux 6.7",
                libc::EPERM => "the memory is not under asynchronous write protection",
                other => common(other),
            })),
        }
    }

    /// Calls `each` with every run of pages in `span` that match `what`, and returns the time that
    /// the scans took without `each`. `out` is the buffer for the scans and must not be empty.
    ///
    /// # Errors
    /// Returns an error in the cases of [`scan`](Self::scan). `each` has received the runs that
    /// were found before the error.
    pub fn for_each(
        &self,
        span: Range<u64>,
        what: Match,
        out: &mut [PageRegion],
        mut each: impl FnMut(PageRegion),
    ) -> Result<Duration, SysError> {
        let (mut rest, mut scanning) = (span, Duration::ZERO);
        while rest.start < rest.end {
            let began = Instant::now();
            let found = self.scan(&rest, what, out)?;
            scanning += began.elapsed();
            out[..found.runs].iter().copied().for_each(&mut each);
            if found.upto <= rest.start {
                // The kernel always advances by at least one page. The check prevents an endless
                // loop if it does not.
                let target = format!("addresses {:#x}..{:#x}", rest.start, rest.end);
                let stuck = std::io::Error::from_raw_os_error(libc::EIO);
                return Err(SysError::from_io(SCAN_NAME, target, stuck, |_| "the scan does not advance"));
            }
            rest.start = found.upto;
        }
        Ok(scanning)
    }

    /// Calls `each` with every page of `span` that is present or swapped out, read from the 64-bit
    /// entries of the pagemap.
    ///
    /// This function replaces [`for_each`](Self::for_each) on kernels without `PAGEMAP_SCAN`. It is
    /// slower, because it reads 8 bytes for each page.
    ///
    /// # Errors
    /// Returns an error if the pagemap cannot be read.
    pub fn for_each_populated_entry(
        &self,
        span: Range<u64>,
        mut each: impl FnMut(Range<u64>),
    ) -> Result<(), SysError> {
        const ENTRIES: u64 = 512;
        let mut buffer = [0; 8 * 512];
        let mut at = span.start;
        while at < span.end {
            let pages = ((span.end - at) / PAGE_SIZE).min(ENTRIES);
            if pages == 0 {
                break;
            }
            let bytes = &mut buffer[..usize::try_from(pages * 8).expect("at most 4096")];
            self.file.read_exact_at(bytes, at / PAGE_SIZE * 8).map_err(|error| {
                SysError::from_io("read", format!("/proc/self/pagemap for address {at:#x}"), error, common)
            })?;
            for (entry, page) in bytes.as_chunks::<8>().0.iter().zip((at..).step_by(4096)) {
                // Bit 63: present. Bit 62: swapped.
                if u64::from_ne_bytes(*entry) >> 62 != 0 {
                    each(page..page + PAGE_SIZE);
                }
            }
            at += pages * PAGE_SIZE;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn the_request_has_its_documented_number() {
        assert_eq!(SCAN, 0xc060_6610);
    }

    #[test]
    fn scan_and_entries_agree_on_what_is_populated() {
        let len = 300 * 4096;
        // SAFETY: a new anonymous mapping that this test owns.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .unwrap();
        // SAFETY: this test owns the mapping and does not use it yet.
        unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxNoHugepage) }.unwrap();
        let written: Vec<usize> =
            (0..300).filter(|page| page % 7 == 3 || (100..140).contains(page)).collect();
        for page in &written {
            // SAFETY: the page is in the mapping.
            unsafe { start.cast::<u8>().add(page * 4096).write_volatile(1) };
        }
        let base = start.addr() as u64;
        let span = base..base + len as u64;
        let index = |address: u64| usize::try_from((address - base) / 4096).unwrap();
        let map = Pagemap::open().unwrap();
        let mut entries = Vec::new();
        map.for_each_populated_entry(span.clone(), |run| entries.push(index(run.start))).unwrap();
        assert_eq!(entries, written);
        // A buffer of three runs makes the function scan many times.
        let what = Match { any: IS_PRESENT | IS_SWAPPED, report: IS_PRESENT, ..Match::default() };
        let mut scanned = Vec::new();
        let result = map.for_each(span, what, &mut [PageRegion::default(); 3], |run| {
            scanned.extend(index(run.start)..index(run.end));
        });
        match result {
            Ok(_) => {
                assert_eq!(scanned, written);
                let from = |page: usize| base + page as u64 * 4096..base + len as u64;
                let first = |page| map.first(&from(page), what).unwrap().map(index);
                assert_eq!(
                    [first(0), first(4), first(101), first(298)],
                    [Some(3), Some(10), Some(101), None]
                );
            }
            Err(error) => {
                let emulated = vmferry_testkit::emulator().is_some();
                // The answer of qemu-user depends on its version.
                let unknown =
                    error.errno() == Some(libc::ENOTTY) || (emulated && error.errno() == Some(libc::ENOSYS));
                assert!(unknown, "{error}");
                vmferry_testkit::skip(vmferry_testkit::Need::Kernel, format!("PAGEMAP_SCAN: {error}"));
            }
        }
        // SAFETY: mapped above, and not used any more.
        unsafe { munmap(start, len) }.unwrap();
    }
}
