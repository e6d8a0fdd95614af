//! A set of pages over all regions.

use crate::{Layout, RegionId};
use vmferry_bitmap::Bitmap;

/// A set of pages over all regions of a [`Layout`]: one bit a page.
///
/// Flat, without the summary that [`vmferry_bitmap::SummaryBitmap`] has. What a pass does to its sets (take a log in, count,
/// add, clear, look at each chunk) was measured for 512 GiB (`cargo run --release -p vmferry-bitmap --example passes`): 12 to
/// 18 ms flat, most of it the log and the chunks, which no summary spares. With one, dirty pages in clusters cost 0.3 to 0.8
/// of that, and single pages and dense sets 1.2 to 2.1 times as much: some milliseconds for those passes that send little,
/// at the expense of the others. Where a summary pays is in marks that few pages of a large guest have
/// ([`vmferry_bitmap::AtomicBitmap`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    maps: Vec<(RegionId, Bitmap)>,
}

impl PageSet {
    /// No page of `layout`.
    #[must_use]
    pub fn empty(layout: &Layout) -> Self {
        Self { maps: layout.regions().iter().map(|r| (r.id, Bitmap::new(r.pages()))).collect() }
    }

    /// Every page of `layout`.
    #[must_use]
    pub fn full(layout: &Layout) -> Self {
        Self { maps: layout.regions().iter().map(|r| (r.id, Bitmap::full(r.pages()))).collect() }
    }

    /// The bitmap of region `id`.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&Bitmap> {
        self.maps.iter().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// The bitmap of region `id`, to change.
    #[must_use]
    pub fn region_mut(&mut self, id: RegionId) -> Option<&mut Bitmap> {
        self.maps.iter_mut().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// The regions and their bitmaps, in the layout's order.
    pub fn iter(&self) -> impl Iterator<Item = (RegionId, &Bitmap)> {
        self.maps.iter().map(|(id, map)| (*id, map))
    }

    /// The regions and their bitmaps, to change, in the layout's order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (RegionId, &mut Bitmap)> {
        self.maps.iter_mut().map(|(id, map)| (*id, map))
    }

    /// How many pages are in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.maps.iter().map(|(_, map)| map.count()).sum()
    }

    /// Whether no page is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.maps.iter().all(|(_, map)| map.is_empty())
    }

    /// Takes every page out.
    pub fn clear(&mut self) {
        self.maps.iter_mut().for_each(|(_, map)| map.clear_all());
    }

    /// Adds the pages of `other`.
    ///
    /// # Panics
    /// If the two are not of one layout.
    pub fn union(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.union(b));
    }

    /// Takes out the pages of `other`.
    ///
    /// # Panics
    /// If the two are not of one layout.
    pub fn subtract(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.subtract(b));
    }

    /// Keeps only the pages that are in `other`, too.
    ///
    /// # Panics
    /// If the two are not of one layout.
    pub fn retain(&mut self, other: &Self) {
        assert_eq!(self.maps.len(), other.maps.len(), "sets of one layout");
        self.maps.iter_mut().zip(&other.maps).for_each(|((_, a), (_, b))| a.retain_range(0..a.len(), b));
    }
}
