//! Guest memory, which consists of mappings of this process.
//!
//! RAM lies below 3 GiB, and what does not fit there lies above 4 GiB. The gigabyte in between is
//! for devices, as on every PC. Each of the two parts is one region, one mapping and one KVM memory
//! slot, all with the same number.

mod drop;
mod mapping;
mod marks;
mod pool;
mod ram;

pub(crate) use drop::DropError;
pub use mapping::MemoryError;
pub use marks::WriteMarks;
pub use pool::{Advice, HUGE_PAGE_BYTES, HugePagePool};
pub use ram::{GuestRam, RamRegion};

use vmferry_core::{Gpa, Layout, LayoutError, Region, RegionId};

/// Upper limit of the low RAM, below the hole for devices.
pub const LOW_RAM_END: u64 = 3 << 30;
/// Start of the high RAM, above the hole.
pub const HIGH_RAM_START: u64 = 4 << 30;

/// Returns the layout of the RAM of a guest with `memory` bytes.
///
/// # Errors
/// Returns an error if `memory` is not whole pages, or more than a layout may have.
pub fn layout_for(memory: u64) -> Result<Layout, LayoutError> {
    let low = memory.min(LOW_RAM_END);
    let mut regions = vec![Region { id: RegionId(0), gpa: Gpa(0), len: low }];
    if memory > low {
        regions.push(Region { id: RegionId(1), gpa: Gpa(HIGH_RAM_START), len: memory - low });
    }
    Layout::new(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_split_around_the_hole() {
        let small = layout_for(1 << 30).unwrap();
        assert_eq!(small.regions().len(), 1);
        assert_eq!(small.regions()[0].len, 1 << 30);
        assert_eq!(layout_for(LOW_RAM_END).unwrap().regions().len(), 1);
        let large = layout_for(5 << 30).unwrap();
        assert_eq!(large.regions()[0].len, LOW_RAM_END);
        assert_eq!(large.regions()[1].gpa, Gpa(HIGH_RAM_START));
        assert_eq!(large.regions()[1].len, 2 << 30);
        assert!(layout_for(100).is_err());
        assert!(layout_for(!4095).is_err());
    }
}
