//! Regions of guest memory as they are mapped in this process.

use crate::TrackerError;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, RegionId};

/// Kind of memory behind the mapping of a region.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. Shared anonymous memory does not belong to this variant, because
    /// the kernel implements it as an unnamed file on tmpfs.
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
    /// A memfd or another file, mapped privately: a write copies the page for this mapping. No
    /// process may change the file. This is the memory of a guest that was branched, or that is a
    /// branch ([`adopt`](crate::adopt)).
    PrivateFile {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
    /// Any other memory, for example a memfd of huge pages. Such a memfd cannot report which pages
    /// were written, because `SEEK_DATA` finds data everywhere. Therefore every page counts as
    /// touched.
    ///
    /// Shared memory that the kernel can swap out must be [`Memfd`](Self::Memfd): of memory of this
    /// variant, [`WpTracker`](crate::WpTracker) does not find pages that were written and then
    /// swapped out.
    Other,
}

/// Set of marked pages of one region: those that were written or dropped in a way that no tracker
/// detects.
///
/// Device models and loaders make such writes, either directly or through a system call.
/// [`AtomicBitmap`] implements this trait. If the VMM's memory library has its own dirty bitmap,
/// implement this trait for it, so that a harvest takes the pages that the library has recorded.
///
/// # Memory ordering
/// A writer first writes the page, and then marks it with at least release ordering.
/// [`harvest`](Self::harvest) takes the mark with at least acquire ordering, and the engine reads
/// the page later. Therefore, either this harvest takes the mark and the engine reads the new
/// content, or a later harvest takes the mark.
pub trait Marks: fmt::Debug + Send + Sync {
    /// Returns the number of pages that can be marked, which is the number of pages of the region.
    fn pages(&self) -> u64;

    /// Moves every mark into `dirty`, a bitmap of [`pages`](Self::pages) pages. Bits that are
    /// already set in `dirty` stay set.
    ///
    /// A mark must not be lost: it is in `dirty` after this call, or a later call finds it.
    fn harvest(&self, dirty: &mut Bitmap);
}

impl Marks for AtomicBitmap {
    fn pages(&self) -> u64 {
        self.len()
    }

    fn harvest(&self, dirty: &mut Bitmap) {
        Self::harvest(self, dirty);
    }
}

/// Region of guest memory, mapped readable and writable in this process.
#[derive(Debug, Clone)]
pub struct MappedRegion {
    /// Id of the region in the migration.
    pub id: RegionId,
    /// Address of the first byte in this process, a multiple of the page size.
    pub host: u64,
    /// Length of the region in bytes, a multiple of the page size that is not 0.
    pub len: u64,
    /// Kind of memory behind the mapping.
    pub backing: Backing,
    /// Marks for the pages that are written or dropped in a way that the tracker cannot detect. A
    /// page must be marked *after* the write or the drop. The marks must cover exactly the pages of
    /// the region.
    pub marks: Option<Arc<dyn Marks>>,
    /// Bitmap to which the tracker adds every page that it takes out of `marks` or finds written.
    /// It must have one bit for each page of the region. A VMM that uses `marks` itself needs this
    /// bitmap: see [`LogSlot::returned_pages`](crate::LogSlot::returned_pages).
    pub returned_pages: Option<Arc<AtomicBitmap>>,
}

impl MappedRegion {
    /// Returns the number of pages of the region.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len >> PAGE_SHIFT
    }

    /// Returns the addresses of the region.
    pub(crate) fn span(&self) -> Range<u64> {
        self.host..self.host.saturating_add(self.len)
    }

    /// Returns the addresses of `run`, after a check that the region has the pages.
    pub(crate) fn span_of(&self, run: PageRun) -> Result<Range<u64>, TrackerError> {
        if run.end() > self.pages() {
            return Err(TrackerError::NoPages { region: self.id, have: self.pages(), run });
        }
        Ok(self.host + run.first.offset()..self.host + (run.end() << PAGE_SHIFT))
    }

    /// Returns the pages at `addresses`, which lie in the region. A part of a page counts as that
    /// page.
    pub(crate) fn pages_at(&self, addresses: Range<u64>) -> Range<u64> {
        let first = addresses.start.saturating_sub(self.host) >> PAGE_SHIFT;
        let end = addresses.end.saturating_sub(self.host).div_ceil(PAGE_SIZE);
        first.min(self.pages())..end.min(self.pages())
    }

    /// Checks the conditions that a tracker depends on.
    pub(crate) fn check(&self) -> Result<(), TrackerError> {
        let whole = self.len != 0
            && self.len.is_multiple_of(PAGE_SIZE)
            && self.host.is_multiple_of(PAGE_SIZE)
            && self.host.checked_add(self.len).is_some();
        if !whole {
            return Err(TrackerError::NotPages(self.id));
        }
        check_marks(self.id, self.pages(), self.marks.as_deref().map(Marks::pages))?;
        check_marks(self.id, self.pages(), self.returned_pages.as_deref().map(AtomicBitmap::len))
    }
}

/// Checks that marks, if there are any, have one bit for each of `pages`. `bits` is the number of
/// bits.
pub(crate) fn check_marks(region: RegionId, pages: u64, bits: Option<u64>) -> Result<(), TrackerError> {
    match bits {
        Some(bits) if bits != pages => Err(TrackerError::Length { region, have: pages, bits }),
        _ => Ok(()),
    }
}

/// Returns the bitmap of region `id` in `set`, if it has the right length.
pub(crate) fn map_of(set: &mut PageSet, id: RegionId, pages: u64) -> Result<&mut Bitmap, TrackerError> {
    let map = set.region_mut(id).ok_or(TrackerError::NoRegion(id))?;
    if map.len() != pages {
        return Err(TrackerError::Length { region: id, have: pages, bits: map.len() });
    }
    Ok(map)
}

/// Checks the arguments of [`Protect::protect`](vmferry_core::Protect::protect) for a region of
/// `have` pages.
pub(crate) fn check_chunk(
    region: RegionId,
    have: u64,
    chunk: PageRun,
    pages: &Bitmap,
) -> Result<(), TrackerError> {
    if chunk.end() > have {
        return Err(TrackerError::NoPages { region, have, run: chunk });
    }
    if pages.len() != have {
        return Err(TrackerError::Length { region, have, bits: pages.len() });
    }
    Ok(())
}

/// Returns the 64 pages from page `64 * index` on that are in `chunk` and set in `pages`.
pub(crate) fn word_of(chunk: PageRun, pages: &Bitmap, index: u64) -> u64 {
    let below = chunk.first.0.saturating_sub(index * 64).min(64);
    let above = ((index + 1) * 64).saturating_sub(chunk.end()).min(64);
    let keep = if below + above >= 64 { 0 } else { (u64::MAX << below) & (u64::MAX >> above) };
    usize::try_from(index).map_or(0, |at| pages.word(at) & keep)
}

/// Calls `collect`, which adds pages to `map`, and adds the same pages to `returned_pages`, even if
/// `collect` fails after it has added some. Without `returned_pages`, this has no cost.
pub(crate) fn collect(
    map: &mut Bitmap,
    returned_pages: Option<&AtomicBitmap>,
    collect: impl FnOnce(&mut Bitmap) -> Result<(), TrackerError>,
) -> Result<(), TrackerError> {
    let Some(returned_pages) = returned_pages else { return collect(map) };
    let mut found = Bitmap::new(map.len());
    let collected = collect(&mut found);
    found.for_each_run(|run| returned_pages.set_range(run));
    map.union(&found);
    collected
}

/// Takes all marks, and adds them to `returned_pages` if there is such a bitmap. Otherwise the
/// marks are discarded, which is safe because the first pass sends all pages anyway. A write that
/// happens during the call is either complete, so that the first pass reads its result, or it is
/// marked after the call, so that the first harvest finds it.
pub(crate) fn forget(marks: Option<&dyn Marks>, returned_pages: Option<&AtomicBitmap>) {
    if let Some(marks) = marks {
        let mut scratch = Bitmap::new(marks.pages());
        marks.harvest(&mut scratch);
        if let Some(returned_pages) = returned_pages {
            scratch.for_each_run(|run| returned_pages.set_range(run));
        }
    }
}
