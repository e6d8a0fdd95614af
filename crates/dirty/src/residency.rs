//! Detection of the pages that may hold anything other than zeros.

use crate::{Backing, MappedRegion, TrackerError};
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
/// * memfd: a page counts as touched if the file has data for it (`SEEK_DATA`), which includes
///   pages that are swapped out. The page table is not sufficient, because it lacks the pages that
///   were written through another mapping of the file, in this process or another.
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
        Backing::Memfd { file, offset } => {
            let within = span.start - region.host + offset..span.end - region.host + offset;
            memfd::data_ranges(std::os::fd::AsFd::as_fd(file.as_ref()), within, |data| {
                touched.set_range(
                    region.pages_at(data.start - offset + region.host..data.end - offset + region.host),
                );
            })
            .map_err(TrackerError::host(region.id))?;
        }
        Backing::Anonymous => {
            populated(region, span, touched).map_err(TrackerError::host(region.id))?;
        }
    }
    Ok(())
}

fn populated(
    region: &MappedRegion,
    span: std::ops::Range<u64>,
    touched: &mut Bitmap,
) -> Result<(), SysError> {
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
        // A kernel without the request returns ENOTTY, an emulator of user programs ENOSYS.
        Err(error) if matches!(error.errno(), Some(libc::ENOTTY | libc::ENOSYS)) => {
            map.for_each_populated_entry(span, |run| touched.set_range(region.pages_at(run)))
        }
        other => other.map(|_| ()),
    }
}
