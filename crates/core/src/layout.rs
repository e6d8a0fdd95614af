//! Memory layout of a guest: its regions.

use crate::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun, RegionId};

/// Maximum number of regions of a layout. KVM allows more slots, but no supported machine needs
/// more, and a number that a peer sends must have a limit.
pub const MAX_REGIONS: usize = 64;
/// Maximum number of pages of all regions of a layout together. They have 64 TiB, as many bytes as
/// a physical address space of 46 bits.
pub const MAX_PAGES: u64 = 1 << (46 - 12);

/// Memory region, which is contiguous both in the guest-physical address space and in the process
/// that maps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Region {
    /// Number of the region, unique in a layout.
    pub id: RegionId,
    /// Guest-physical address of the first byte.
    pub gpa: Gpa,
    /// Length in bytes: a multiple of 4 KiB, and not 0.
    pub len: u64,
}

impl Region {
    /// Returns the number of 4 KiB pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len >> PAGE_SHIFT
    }

    /// Returns the run of all pages of the region.
    #[must_use]
    pub fn run(&self) -> PageRun {
        PageRun::from(0..self.pages())
    }
}

/// Reason why regions do not form a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There is no region, or there are more than [`MAX_REGIONS`].
    #[error("a guest has 1 to {MAX_REGIONS} memory regions, not {0}")]
    RegionCount(usize),
    /// A region does not start at a multiple of 4 KiB, or its length is 0 or not a multiple of 4
    /// KiB.
    #[error("{id} at {gpa} with {len} bytes is not made of whole 4 KiB pages")]
    NotPages {
        /// Number of the region.
        id: RegionId,
        /// Guest-physical address of the region.
        gpa: Gpa,
        /// Length of the region in bytes.
        len: u64,
    },
    /// Two regions have the same number.
    #[error("{0} occurs twice")]
    Twice(RegionId),
    /// Two regions overlap, or a region ends beyond the address space.
    #[error("{0} overlaps another region or the end of the address space")]
    Overlap(RegionId),
    /// The regions have more pages than [`MAX_PAGES`].
    #[error("the regions have {0} pages; at most {MAX_PAGES} can be moved")]
    TooLarge(u64),
}

/// All regions of a guest, in the order of their guest-physical addresses.
///
/// Invariants: the numbers of the regions are unique, regions do not overlap, each region consists
/// of whole pages, and all regions together have at most [`MAX_PAGES`] pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<Region>,
}

impl Layout {
    /// Creates a layout from `regions`, which are checked and sorted by guest-physical address.
    ///
    /// # Errors
    /// Returns the [`LayoutError`] that describes why the regions cannot form the memory of a
    /// guest.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, LayoutError> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(LayoutError::RegionCount(regions.len()));
        }
        regions.sort_by_key(|r| r.gpa);
        let (mut pages, mut end) = (0u64, 0u64);
        for (index, region) in regions.iter().enumerate() {
            let Region { id, gpa, len } = *region;
            if len == 0 || !len.is_multiple_of(PAGE_SIZE) || !gpa.0.is_multiple_of(PAGE_SIZE) {
                return Err(LayoutError::NotPages { id, gpa, len });
            }
            if regions[..index].iter().any(|r| r.id == id) {
                return Err(LayoutError::Twice(id));
            }
            if gpa.0 < end {
                return Err(LayoutError::Overlap(id));
            }
            end = gpa.0.checked_add(len).ok_or(LayoutError::Overlap(id))?;
            pages = pages.saturating_add(region.pages());
        }
        if pages > MAX_PAGES {
            return Err(LayoutError::TooLarge(pages));
        }
        Ok(Self { regions })
    }

    /// Returns the regions in the order of their guest-physical addresses.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the region with number `id`, or `None` if there is no such region.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&Region> {
        self.regions.iter().find(|r| r.id == id)
    }

    /// Returns the index of region `id` in [`Layout::regions`], or `None` if there is no such
    /// region.
    #[must_use]
    pub fn position(&self, id: RegionId) -> Option<usize> {
        self.regions.iter().position(|r| r.id == id)
    }

    /// Returns the number of pages of all regions together.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.regions.iter().map(Region::pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(id: u32, gpa: u64, len: u64) -> Region {
        Region { id: RegionId(id), gpa: Gpa(gpa), len }
    }

    #[test]
    fn regions_are_ordered_and_found() {
        let layout = Layout::new(vec![region(1, 4 << 30, 8192), region(0, 0, 4096)]).unwrap();
        assert_eq!(layout.regions()[0].id, RegionId(0));
        assert_eq!(layout.position(RegionId(1)), Some(1));
        assert_eq!(layout.pages(), 3);
        assert_eq!(layout.region(RegionId(7)), None);
    }

    #[test]
    fn rejects_regions_that_are_no_layout() {
        let refused = |regions| Layout::new(regions).unwrap_err();
        assert_eq!(refused(vec![]), LayoutError::RegionCount(0));
        assert!(matches!(refused(vec![region(0, 0, 100)]), LayoutError::NotPages { .. }));
        assert!(matches!(refused(vec![region(0, 1, 4096)]), LayoutError::NotPages { .. }));
        assert!(matches!(refused(vec![region(0, 0, 0)]), LayoutError::NotPages { .. }));
        assert_eq!(refused(vec![region(0, 0, 4096), region(0, 8192, 4096)]), LayoutError::Twice(RegionId(0)));
        assert_eq!(
            refused(vec![region(0, 0, 8192), region(1, 4096, 4096)]),
            LayoutError::Overlap(RegionId(1))
        );
        assert_eq!(refused(vec![region(0, u64::MAX - 4095, 4096)]), LayoutError::Overlap(RegionId(0)));
        assert!(matches!(refused(vec![region(0, 0, 1 << 60)]), LayoutError::TooLarge(_)));
    }
}
