//! Regions of guest memory as they are mapped in this process.

use crate::TrackerError;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, RegionId};

/// Backing of a mapping.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. Shared anonymous memory is a memfd without a name and does not
    /// belong to this variant.
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// File that is mapped.
        file: Arc<OwnedFd>,
        /// Offset in the file at which the region starts, in bytes.
        offset: u64,
    },
    /// Any other backing, for example a memfd of huge pages, which does not report its written
    /// pages (`SEEK_DATA` finds data everywhere). Every page counts as touched.
    Other,
}

/// Source of marks: the pages of one region that were written or dropped in a way that no tracker
/// detects.
///
/// Device models and loaders make such writes, also through the kernel. [`AtomicBitmap`] is one
/// source. For the dirty bitmap of another memory library, implement this trait to take the pages
/// that the library has recorded.
///
/// # Order
/// A writer writes the page, and then marks it with at least release order.
/// [`harvest`](Self::harvest) takes the mark with at least acquire order, and the engine reads the
/// page later. Then either the harvest takes the mark and the read sees the write, or the next
/// harvest takes the mark.
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
    /// Address of the first byte in this process, at a page boundary.
    pub host: u64,
    /// Length of the region in bytes, whole pages.
    pub len: u64,
    /// Backing of the mapping.
    pub backing: Backing,
    /// Pages that were written or dropped in a way that the tracker cannot detect. Each page is
    /// marked after the write or the drop. One bit for each page of the region.
    pub marks: Option<Arc<dyn Marks>>,
    /// Receives every page that the tracker takes out of `marks` or finds written. One bit for each
    /// page of the region. A VMM that uses `marks` itself needs this bitmap: see
    /// [`LogSlot::returned_pages`](crate::LogSlot::returned_pages).
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

/// Calls `collect`, which adds pages to `map`, and hands back the added pages, even if `collect`
/// fails half-way. Without `returned_pages` this costs nothing.
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

/// Takes all marks and hands them back. The marks may be discarded, because all pages that were
/// written before tracking started are sent anyway. A write that happens during the call is either
/// complete, and then the first pass reads it, or it is marked afterwards, and then the first
/// harvest finds it.
pub(crate) fn forget(marks: Option<&dyn Marks>, returned_pages: Option<&AtomicBitmap>) {
    if let Some(marks) = marks {
        let mut scratch = Bitmap::new(marks.pages());
        marks.harvest(&mut scratch);
        if let Some(returned_pages) = returned_pages {
            scratch.for_each_run(|run| returned_pages.set_range(run));
        }
    }
}
