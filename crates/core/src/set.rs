//! A set of pages over all regions.

use crate::{Layout, RegionId};
use vmferry_bitmap::Bitmap;

/// Set of pages over all regions of a [`Layout`], with one bit for each page.
///
/// The set has no summary level, unlike [`vmferry_bitmap::SummaryBitmap`]. The work of a pass on
/// its sets (read a log, count, add, clear, look at each chunk) was measured for 512 GiB (`cargo
/// run --release -p vmferry-bitmap --example passes`). It takes 12 to 18 ms without a summary. Most
/// of that is the log and the chunks, where a summary saves nothing. With a summary, dirty pages in
/// clusters cost 0.3 to 0.8 of that time, and single pages and dense sets cost 1.2 to 2.1 times as
/// much. A summary would save some milliseconds for passes that send little, at the expense of the
/// others. A summary is useful for marks on few pages of a large guest
/// ([`vmferry_bitmap::AtomicBitmap`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    maps: Vec<(RegionId, Bitmap)>,
}

impl PageSet {
    /// Returns the empty set of pages of `layout`.
    #[must_use]
    pub fn empty(layout: &Layout) -> Self {
        Self { maps: layout.regions().iter().map(|r| (r.id, Bitmap::new(r.pages()))).collect() }
    }

    /// Returns the set of all pages of `layout`.
    #[must_use]
    pub fn full(layout: &Layout) -> Self {
        Self { maps: layout.regions().iter().map(|r| (r.id, Bitmap::full(r.pages()))).collect() }
    }

    /// Returns the bitmap of region `id`.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&Bitmap> {
        self.maps.iter().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// Returns the bitmap of region `id` for changes.
    #[must_use]
    pub fn region_mut(&mut self, id: RegionId) -> Option<&mut Bitmap> {
        self.maps.iter_mut().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// Returns the regions and their bitmaps, in the order of the layout.
    pub fn iter(&self) -> impl Iterator<Item = (RegionId, &Bitmap)> {
        self.maps.iter().map(|(id, map)| (*id, map))
    }

    /// Returns the regions and their bitmaps for changes, in the order of the layout.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (RegionId, &mut Bitmap)> {
        self.maps.iter_mut().map(|(id, map)| (*id, map))
    }

    /// Returns the number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.maps.iter().map(|(_, map)| map.count()).sum()
    }

    /// Returns true if no page is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.maps.iter().all(|(_, map)| map.is_empty())
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.maps.iter_mut().for_each(|(_, map)| map.clear_all());
    }

    /// Adds the pages of `other`.
    ///
    /// # Panics
    /// If the two sets have different numbers of regions, or regions of different sizes.
    pub fn union(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.union(b));
    }

    /// Removes the pages of `other`.
    ///
    /// # Panics
    /// If the two sets have different numbers of regions, or regions of different sizes.
    pub fn subtract(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.subtract(b));
    }

    /// Removes the pages that are not in `other`.
    ///
    /// # Panics
    /// If the two sets have different numbers of regions, or regions of different sizes.
    pub fn retain(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.retain_range(0..a.len(), b));
    }
}
