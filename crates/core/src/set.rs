//! A set of pages over all regions.

use crate::{Layout, RegionId};
use vmferry_bitmap::Bitmap;

/// Set of pages over all regions of a [`Layout`], with one bit for each page.
///
/// Each bitmap has a summary, so the cost of every operation depends on the part of memory that has
/// pages in the set, not on the size of the guest.
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

    /// Returns the empty set of pages of `regions`, each of which is an id and a number of pages.
    #[must_use]
    pub fn of(regions: impl IntoIterator<Item = (RegionId, u64)>) -> Self {
        Self { maps: regions.into_iter().map(|(id, pages)| (id, Bitmap::new(pages))).collect() }
    }

    /// Returns the set of all pages of `layout`.
    #[must_use]
    pub fn full(layout: &Layout) -> Self {
        Self { maps: layout.regions().iter().map(|r| (r.id, Bitmap::full(r.pages()))).collect() }
    }

    /// Returns the bitmap of region `id`, or `None` if there is no such region.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&Bitmap> {
        self.maps.iter().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// Returns the mutable bitmap of region `id`, or `None` if there is no such region.
    #[must_use]
    pub fn region_mut(&mut self, id: RegionId) -> Option<&mut Bitmap> {
        self.maps.iter_mut().find(|(own, _)| *own == id).map(|(_, map)| map)
    }

    /// Returns an iterator over the regions and their bitmaps, in the order of the layout.
    pub fn iter(&self) -> impl Iterator<Item = (RegionId, &Bitmap)> {
        self.maps.iter().map(|(id, map)| (*id, map))
    }

    /// Returns an iterator over the regions and their mutable bitmaps, in the order of the layout.
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

    /// Removes and returns all pages.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let empty = self.empty_like();
        std::mem::replace(self, empty)
    }

    /// Returns an empty set over the same regions.
    #[must_use]
    pub fn empty_like(&self) -> Self {
        Self { maps: self.maps.iter().map(|(id, map)| (*id, Bitmap::new(map.len()))).collect() }
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

/// Returns the regions and their bitmaps, in the order of the layout.
impl IntoIterator for PageSet {
    type Item = (RegionId, Bitmap);
    type IntoIter = std::vec::IntoIter<(RegionId, Bitmap)>;

    fn into_iter(self) -> Self::IntoIter {
        self.maps.into_iter()
    }
}
