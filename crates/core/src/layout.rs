//! Which regions a guest has.

use crate::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun, RegionId};

/// Most regions a layout may have: KVM allows more slots, but no machine of ours needs them, and a peer's claim must
/// have a bound.
pub const MAX_REGIONS: usize = 64;
/// Most pages a layout may have in all: 64 TiB, the physical address space that KVM guests get.
pub const MAX_PAGES: u64 = 1 << (46 - 12);

/// One region: memory that is contiguous for the guest and for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Region {
    /// Its name in this migration.
    pub id: RegionId,
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Its length in bytes, a multiple of 4 KiB, not 0.
    pub len: u64,
}

impl Region {
    /// How many 4 KiB pages it has.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.len >> PAGE_SHIFT
    }

    /// All its pages.
    #[must_use]
    pub fn run(&self) -> PageRun {
        PageRun::from(0..self.pages())
    }
}

/// What is wrong with a layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No region, or more than [`MAX_REGIONS`].
    #[error("a guest has 1 to {MAX_REGIONS} memory regions, not {0}")]
    RegionCount(usize),
    /// A region that is empty or not made of whole pages, or not at a page boundary.
    #[error("{id} at {gpa} with {len} bytes is not made of whole 4 KiB pages")]
    NotPages {
        /// Which.
        id: RegionId,
        /// Where the guest sees it.
        gpa: Gpa,
        /// Its length in bytes.
        len: u64,
    },
    /// Two regions of one name.
    #[error("{0} is there twice")]
    Twice(RegionId),
    /// Two regions overlap, or one ends beyond the address space.
    #[error("{0} overlaps another region or the end of the address space")]
    Overlap(RegionId),
    /// More pages than [`MAX_PAGES`].
    #[error("the regions have {0} pages; at most {MAX_PAGES} can be moved")]
    TooLarge(u64),
}

/// All regions of a guest, in the order of their guest-physical addresses.
///
/// Invariant: names are unique, regions do not overlap, each is whole pages, together at most [`MAX_PAGES`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<Region>,
}

impl Layout {
    /// Checks and orders `regions`.
    ///
    /// # Errors
    /// [`LayoutError`] if they cannot be one guest's memory.
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

    /// The regions, by guest-physical address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The region named `id`.
    #[must_use]
    pub fn region(&self, id: RegionId) -> Option<&Region> {
        self.regions.iter().find(|r| r.id == id)
    }

    /// The place of region `id` in [`Layout::regions`].
    #[must_use]
    pub fn position(&self, id: RegionId) -> Option<usize> {
        self.regions.iter().position(|r| r.id == id)
    }

    /// Pages of all regions together.
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
    fn what_cannot_be_a_guest_is_refused() {
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
