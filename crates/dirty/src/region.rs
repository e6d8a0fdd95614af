//! Regions of guest memory as they are mapped in this process.

use crate::TrackerError;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, RegionId};

/// What a mapping is made of.
#[derive(Debug, Clone)]
pub enum Backing {
    /// Private anonymous memory. (Shared anonymous memory is a memfd without a name: it is not this.)
    Anonymous,
    /// A memfd, or another file on tmpfs, mapped shared.
    Memfd {
        /// The file.
        file: Arc<OwnedFd>,
        /// Where in the file the region starts, in bytes.
        offset: u64,
    },
    /// Anything else, such as a memfd of huge pages, which does not tell what was written (`SEEK_DATA` finds data
    /// everywhere): every page counts as touched.
    Other,
}

/// Source of marks: the pages of one region that were written or dropped in a way that no tracker sees.
///
/// Device models, loaders and the kernel on their behalf make such writes. [`AtomicBitmap`] is one source.
/// The dirty bitmap of another memory library can be another: this trait takes what that library has recorded.
///
/// # Order
/// A writer writes the page, and then marks it with at least release order. [`harvest`](Self::harvest) takes the
/// mark with at least acquire order, and the engine reads the page later. Then either the harvest takes the mark
/// and the read sees the write, or the next harvest takes the mark.
pub trait Marks: fmt::Debug + Send + Sync {
    /// Returns the number of pages that can be marked, which is the number of pages of the region.
    fn pages(&self) -> u64;

    /// Moves every mark into `dirty`, a bitmap of [`pages`](Self::pages) pages. Bits that are set there stay set.
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

/// A region of guest memory, mapped readable and writable in this process.
#[derive(Debug, Clone)]
pub struct MappedRegion {
    /// Its name in the migration.
    pub id: RegionId,
    /// Address of its first byte in this process, at a page boundary.
    pub host: u64,
    /// Its length in bytes, whole pages.
    pub len: u64,
    /// What it is made of.
    pub backing: Backing,
    /// Pages that were written or dropped in a way that the tracker cannot see; each marked after it happened. One bit
    /// for each page of the region.
    pub marks: Option<Arc<dyn Marks>>,
    /// Receives every page that the tracker takes out of `marks` or finds written; one bit for each page of the region. A VMM that uses
    /// `marks` for itself needs this: see [`LogSlot::handed_back`](crate::LogSlot::handed_back).
    pub handed_back: Option<Arc<AtomicBitmap>>,
}

impl MappedRegion {
    /// How many pages it has.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len >> PAGE_SHIFT
    }

    /// Its addresses.
    pub(crate) fn span(&self) -> Range<u64> {
        self.host..self.host.saturating_add(self.len)
    }

    /// The addresses of `run`, which is checked against the region.
    pub(crate) fn span_of(&self, run: PageRun) -> Result<Range<u64>, TrackerError> {
        if run.end() > self.pages() {
            return Err(TrackerError::NoPages { region: self.id, have: self.pages(), run });
        }
        Ok(self.host + run.first.offset()..self.host + (run.end() << PAGE_SHIFT))
    }

    /// The pages at `addresses`, which lie in the region; parts of a page count as that page.
    pub(crate) fn pages_at(&self, addresses: Range<u64>) -> Range<u64> {
        let first = addresses.start.saturating_sub(self.host) >> PAGE_SHIFT;
        let end = addresses.end.saturating_sub(self.host).div_ceil(PAGE_SIZE);
        first.min(self.pages())..end.min(self.pages())
    }

    /// Checks what a tracker relies on.
    pub(crate) fn check(&self) -> Result<(), TrackerError> {
        let whole = self.len != 0
            && self.len.is_multiple_of(PAGE_SIZE)
            && self.host.is_multiple_of(PAGE_SIZE)
            && self.host.checked_add(self.len).is_some();
        if !whole {
            return Err(TrackerError::NotPages(self.id));
        }
        check_marks(self.id, self.pages(), self.marks.as_deref().map(Marks::pages))?;
        check_marks(self.id, self.pages(), self.handed_back.as_deref().map(AtomicBitmap::len))
    }
}

/// Checks that marks of `bits` pages, if there are marks, are one bit for each of `pages`.
pub(crate) fn check_marks(region: RegionId, pages: u64, bits: Option<u64>) -> Result<(), TrackerError> {
    match bits {
        Some(bits) if bits != pages => Err(TrackerError::Length { region, have: pages, bits }),
        _ => Ok(()),
    }
}

/// The bitmap of region `id` in `set`, if it has the right length.
pub(crate) fn map_of(set: &mut PageSet, id: RegionId, pages: u64) -> Result<&mut Bitmap, TrackerError> {
    let map = set.region_mut(id).ok_or(TrackerError::NoRegion(id))?;
    if map.len() != pages {
        return Err(TrackerError::Length { region: id, have: pages, bits: map.len() });
    }
    Ok(map)
}

/// Has `collect` add pages to `map`, and hands back what it added, also where it fails half-way. Without `handed_back` this costs nothing.
pub(crate) fn collect(
    map: &mut Bitmap,
    handed_back: Option<&AtomicBitmap>,
    collect: impl FnOnce(&mut Bitmap) -> Result<(), TrackerError>,
) -> Result<(), TrackerError> {
    let Some(handed_back) = handed_back else { return collect(map) };
    let mut found = Bitmap::new(map.len());
    let collected = collect(&mut found);
    found.for_each_run(|run| handed_back.set_range(run));
    map.union(&found);
    collected
}

/// Takes all marks and hands them back: what was written before tracking started is sent anyway. A write that is being marked at the same
/// time is either done, and then the first pass reads it, or marked after this, and then the first harvest finds it.
pub(crate) fn forget(marks: Option<&dyn Marks>, handed_back: Option<&AtomicBitmap>) {
    if let Some(marks) = marks {
        let mut scratch = Bitmap::new(marks.pages());
        marks.harvest(&mut scratch);
        if let Some(handed_back) = handed_back {
            scratch.for_each_run(|run| handed_back.set_range(run));
        }
    }
}
