//! Detection of the pages that may hold anything but zeros.

use crate::{Backing, MappedRegion, TrackerError};
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_sys::pagemap::{IS_PFNZERO, IS_PRESENT, IS_SWAPPED, Match, PageRegion, Pagemap};
use vmferry_sys::{SysError, memfd};

/// Number of runs that one read from the kernel returns: 6 KiB of stack.
const RUNS: usize = 256;

/// Opens the pagemap that [`touched`] reads, once for the process. The creator of guest memory
/// calls this function, because confined threads cannot open the file later.
pub fn prepare() {
    // Without /proc, `touched` returns the error.
    let _ = Pagemap::own();
}

/// Adds those pages of `run` that may hold anything but zeros to `touched`, a bitmap of the whole
/// region.
///
/// Such a page need not be resident, and a resident page may hold zeros, so residency is not a safe
/// criterion:
///
/// * Anonymous memory: a page that was swapped out is not resident (`mincore` says so) but has
///   data. Therefore a page counts as touched if it is present or swapped out. A page under
///   migration within the host counts as swapped. The kernel's shared zero page, which a read of
///   untouched memory maps, does not count as touched: a write maps another page in its place.
/// * memfd: data that was written through another mapping of the file, in this process or another,
///   is not in the page table of this mapping. Therefore the function asks the file for its data
///   (`SEEK_DATA`), which includes swapped-out pages.
///
/// The result holds for one moment. The caller must protect the pages first, so that a page that is
/// touched afterwards is harvested. If the kernel has no `PAGEMAP_SCAN`, the entries of the pagemap
/// are read instead (they do not identify the zero page).
///
/// # Errors
/// Returns an error if `run` is not in the region, `touched` does not have the length of the
/// region, or the host does not report the pages. Pages that were added before the error stay in
/// `touched`.
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
        other => other,
    }
}
