//! Which pages may hold anything but zeros.

use crate::{Backing, MappedRegion, TrackerError};
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_sys::pagemap::{IS_PFNZERO, IS_PRESENT, IS_SWAPPED, Match, PageRegion, Pagemap};
use vmferry_sys::{SysError, memfd};

/// Runs read from the kernel at a time: 6 KiB of stack.
const RUNS: usize = 256;

/// Opens what [`touched`] looks into, once in the process, for threads that will not be able to: whoever makes guest memory calls it.
pub fn prepare() {
    // Without /proc, whoever looks is told so then.
    let _ = Pagemap::own();
}

/// Adds to `touched`, a bitmap of the whole region, those pages of `run` that may hold anything but zeros.
///
/// "Not resident" is another question with another answer, and no safe one here:
///
/// * Anonymous memory: a page that was swapped out is not resident (`mincore` says so) but full of data. So a page is
///   touched if it is present or swapped out, a page under migration within the host counting as swapped. The kernel's
///   shared page of zeros, which a read of untouched memory maps, is not touched: a write to it maps another page.
/// * memfd: what other mappings of the file wrote, in this process or another, is data although this mapping's page
///   table has nothing. So the file is asked for its data (`SEEK_DATA`), which includes what is swapped out.
///
/// The answer is about a moment. The caller protects the pages first, so that one touched afterwards is harvested.
/// Where the kernel has no `PAGEMAP_SCAN` the pagemap's entries are read instead (they do not tell the page of zeros).
///
/// # Errors
/// If `run` is not in the region, `touched` is not as long as the region, or the host does not answer. Pages that were
/// added before the error are in `touched`.
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
        // ENOTTY comes from a kernel without the request, ENOSYS from an emulator of user programs.
        Err(error) if matches!(error.errno(), Some(libc::ENOTTY | libc::ENOSYS)) => {
            map.for_each_populated_entry(span, |run| touched.set_range(region.pages_at(run)))
        }
        other => other,
    }
}
