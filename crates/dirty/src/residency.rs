//! Detection of the pages that may hold anything other than zeros.

use crate::{Backing, MappedRegion, TrackerError};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_sys::pagemap::{IS_PFNZERO, IS_PRESENT, IS_SWAPPED, Match, PageRegion, Pagemap};
use vmferry_sys::{SysError, memfd};

/// Maximum number of runs that one scan returns. The buffer takes 6 KiB of the stack.
const RUNS: usize = 256;

/// Opens the pagemap of this process, which [`touched`] reads, and keeps it open for the life of
/// the process. Call this function when guest memory is created, because confined threads cannot
/// open the file later. If the file cannot be opened, `touched` tries again and returns the error.
pub fn prepare() {
    // `touched` tries again, and returns the error.
    let _ = Pagemap::own();
}

/// Adds the pages of `run` that may hold anything other than zeros to `touched`, a bitmap of the
/// whole region.
///
/// Whether a page is resident in memory does not answer this question, because a page with data may
/// not be resident. The function uses another criterion for each [`Backing`]:
///
/// * Anonymous memory: a page counts as touched if it is present or swapped out. A page that was
///   swapped out has data, although `mincore` reports it as not resident. A page that the kernel is
///   moving to another physical page counts as swapped out. The kernel's shared zero page, which a
///   read of untouched memory maps, does not count as touched, because the first write replaces it
///   with another page.
/// * memfd: a page counts as touched if it has an entry in the page table, or if the file has data
///   for it (`SEEK_DATA`), which includes pages that are swapped out. The page table is not
///   sufficient, because it lacks the pages that were written through another mapping of the file,
///   in this process or another. The file is asked only where the page table has no entry, because
///   a search for the end of data (`SEEK_HOLE`) takes time for each page of data.
/// * Privately mapped file: the criterion of a memfd. A page that was written through this mapping
///   has an entry, and all other pages have the content of the file.
/// * Other memory: every page counts as touched.
///
/// The result is valid only for the moment of the call. Therefore the caller must protect the pages
/// first, so that a later harvest reports each page that is touched afterwards. If the kernel has
/// no `PAGEMAP_SCAN`, the function reads the entries of the pagemap instead. These entries do not
/// identify the zero page, so it then counts as touched.
///
/// # Errors
/// Returns [`TrackerError::NoPages`] if `run` is not in the region, [`TrackerError::Length`] if
/// `touched` does not have the length of the region, and [`TrackerError::Host`] if the kernel does
/// not report the pages. Pages that were added before the error stay in `touched`.
pub fn touched(region: &MappedRegion, run: PageRun, touched: &mut Bitmap) -> Result<(), TrackerError> {
    let span = region.span_of(run)?;
    if touched.len() != region.pages() {
        return Err(TrackerError::Length { region: region.id, have: region.pages(), bits: touched.len() });
    }
    match &region.backing {
        Backing::Other => touched.set_range(run.range()),
        Backing::Memfd { file, offset } | Backing::PrivateFile { file, offset } => {
            data(region, (file.as_fd(), *offset), span, touched).map_err(TrackerError::host(region.id))?;
        }
        Backing::Anonymous => {
            populated(region, span, touched).map_err(TrackerError::host(region.id))?;
        }
    }
    Ok(())
}

/// Returns the first page of `run` that may hold anything other than zeros, or a page before it, or
/// `None` if there is no such page. The criteria are those of [`touched`]. The cost does not depend
/// on the number of untouched pages before the result.
///
/// # Errors
/// Returns [`TrackerError::NoPages`] if `run` is not in the region, and [`TrackerError::Host`] if
/// the kernel does not report the pages.
pub fn next_touched(region: &MappedRegion, run: PageRun) -> Result<Option<u64>, TrackerError> {
    let span = region.span_of(run)?;
    let entry = match first_entry(&span).map_err(TrackerError::host(region.id))? {
        FirstEntry::Unknown => return Ok(Some(run.first.0).filter(|_| run.count > 0)),
        FirstEntry::Is(entry) => entry,
    };
    let data = match &region.backing {
        Backing::Other => Some(span.start).filter(|_| run.count > 0),
        Backing::Anonymous => None,
        Backing::Memfd { file, offset } | Backing::PrivateFile { file, offset } => {
            let before = span.start..entry.unwrap_or(span.end);
            let within = before.start - region.host + offset..before.end - region.host + offset;
            let first = memfd::first_data(file.as_fd(), within).map_err(TrackerError::host(region.id))?;
            first.map(|data| data - offset + region.host)
        }
    };
    let first = data.into_iter().chain(entry).min();
    Ok(first.map(|address| region.pages_at(address..span.end).start))
}

/// First address with an entry in the page table.
enum FirstEntry {
    Is(Option<u64>),
    /// The kernel has no `PAGEMAP_SCAN`.
    Unknown,
}

fn first_entry(span: &Range<u64>) -> Result<FirstEntry, SysError> {
    let entry = Match { any: IS_PRESENT | IS_SWAPPED, ..Match::default() };
    match Pagemap::own()?.first(span, entry) {
        Err(error) if has_no_scan(&error) => Ok(FirstEntry::Unknown),
        first => first.map(FirstEntry::Is),
    }
}

/// Returns true if the kernel has no `PAGEMAP_SCAN`. Such a kernel returns `ENOTTY`, and an
/// emulator of user programs `ENOSYS`.
pub(crate) fn has_no_scan(error: &SysError) -> bool {
    matches!(error.errno(), Some(libc::ENOTTY | libc::ENOSYS))
}

/// Adds to `touched` the pages of a file that have an entry in the page table or data in the file.
fn data(
    region: &MappedRegion,
    (file, offset): (BorrowedFd<'_>, u64),
    span: Range<u64>,
    touched: &mut Bitmap,
) -> Result<(), SysError> {
    let base = region.host;
    let ask = |addresses: Range<u64>, touched: &mut Bitmap| {
        memfd::data_ranges(file, addresses.start - base + offset..addresses.end - base + offset, |data| {
            touched.set_range(region.pages_at(data.start - offset + base..data.end - offset + base));
        })
    };
    let (mut at, mut failed, mut runs) = (span.start, Ok(()), [PageRegion::default(); RUNS]);
    let nothing =
        Match { inverted: IS_PRESENT | IS_SWAPPED, all: IS_PRESENT | IS_SWAPPED, ..Match::default() };
    let scanned = Pagemap::own()?.for_each(span.clone(), nothing, &mut runs, |gap| {
        touched.set_range(region.pages_at(at..gap.start));
        at = gap.end;
        if failed.is_ok() {
            failed = ask(gap.start..gap.end, touched);
        }
    });
    match scanned {
        Err(error) if has_no_scan(&error) => return ask(span, touched),
        scanned => scanned.and(failed)?,
    }
    touched.set_range(region.pages_at(at..span.end));
    Ok(())
}

fn populated(region: &MappedRegion, span: Range<u64>, touched: &mut Bitmap) -> Result<(), SysError> {
    let what = Match {
        inverted: IS_PFNZERO,
        all: IS_PFNZERO,
        any: IS_PRESENT | IS_SWAPPED,
        report: 0,
        protect: false,
    };
    let map = Pagemap::own()?;
    let mut runs = [PageRegion::default(); RUNS];
    let scanned = map.for_each(span.clone(), what, &mut runs, |run| {
        touched.set_range(region.pages_at(run.start..run.end));
    });
    match scanned {
        Err(error) if has_no_scan(&error) => {
            map.for_each_populated_entry(span, |run| touched.set_range(region.pages_at(run)))
        }
        other => other.map(|_| ()),
    }
}
