//! What vmferry's balloon has beyond the virtio specification: inflation by ranges, the shared map of free pages, reports by a
//! bare hypercall.
//!
//! The features are in the fourth bank of 32 feature bits (virtio 1.2, section 2.2 leaves bits 50 to 127 to the device type). A
//! driver sees them only if it selects that bank, which no stock driver does: asking is what makes them offered.

use crate::PAGE_SIZE;

/// Feature bit: the queue [`RANGES_QUEUE`] exists.
pub const FEATURE_RANGES: u32 = 96;

/// Feature bit: the driver may publish a [map of its free pages](FreeMap) through the configuration space.
pub const FEATURE_FREE_MAP: u32 = 97;

/// Feature bit: writes to [`REPORT_PORT`] are taken.
pub const FEATURE_HYPERCALL: u32 = 98;

/// Index of the queue that inflates and deflates by ranges, behind any that the specification may come to name.
///
/// A buffer is one or more device-readable descriptors that together hold a [`RangesHeader`] and as many [`Range`]s as it says, and
/// nothing else. The device takes all of it before it marks the buffer as used.
pub const RANGES_QUEUE: u16 = 16;

/// Most ranges in one buffer.
pub const MAX_RANGES: u32 = 65_536;

/// Where the fields of [`FreeMap`] lie in the device's configuration space, in bytes; each is a little-endian 64-bit word. The driver
/// writes `GPA` last. A write of 0 to it withdraws the map.
pub mod free_map {
    /// Offset of [`FreeMap::pages`](super::FreeMap::pages).
    pub const PAGES: u64 = 0x40;
    /// Offset of [`FreeMap::gpa`](super::FreeMap::gpa).
    pub const GPA: u64 = 0x48;
}

/// A bitmap that the guest keeps of its free pages, in its own memory.
///
/// Bit `n` (of little-endian 64-bit words) is the `n`-th page of the guest's RAM in the order of the PVH memory map's RAM entries, by
/// ascending address: holes, such as the one below 4 GiB, have no bits. A set bit says that the page is free *now*: nobody reads it
/// before having written it. The guest clears the bit before its first write to the page, and sets it after its last; on x86-64
/// stores are seen in that order, so a host that tracks writes, then reads the bit as set, sees every later write as a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMap {
    /// Where the bitmap begins, a multiple of 4096.
    pub gpa: u64,
    /// How many bits it has: all pages of RAM.
    pub pages: u64,
}

/// First bytes of a buffer on [`RANGES_QUEUE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangesHeader {
    /// [`INFLATE`] or [`DEFLATE`], little-endian.
    pub what: u32,
    /// How many ranges follow: `1 <= count <= MAX_RANGES`, little-endian.
    pub count: u32,
}

/// The ranges go to the host: their content is lost.
pub const INFLATE: u32 = 1;

/// The ranges are the guest's again, and read as zeros.
pub const DEFLATE: u32 = 2;

/// Guest memory, in whole pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Where it begins, a multiple of 4096, little-endian.
    pub gpa: u64,
    /// Its length in bytes, a multiple of 4096 and not 0, little-endian.
    pub len: u64,
}

/// Port of the hypercall that reports free blocks: a 32-bit write of the page number of a page that holds [`REPORT_ENTRIES`]
/// [entries](report_entry). The write returns when the host has dropped them all.
pub const REPORT_PORT: u16 = 0xf6;

/// Entries in a page of reports, and blocks in a guest's buffer of freed ones.
pub const REPORT_ENTRIES: usize = 512;

/// Largest order of a block: 4 MiB.
pub const MAX_ORDER: u32 = 10;

/// Least order of a freed block that a guest reports at once: 2 MiB, which is what hosts back memory with. To drop less takes a huge
/// page apart, so that everything around it, still in use, costs the guest a fault a page.
pub const REPORT_FROM: u32 = 9;

/// An entry of a page of reports: the block of `1 << order` pages at `gpa`. An entry of 0 is empty.
#[must_use]
pub const fn report_entry(gpa: u64, order: u32) -> u64 {
    gpa | (order as u64 + 1)
}

/// The block that an entry names, as address and length in bytes; `None` if it is empty or cannot be a block.
#[must_use]
pub const fn reported(entry: u64) -> Option<Range> {
    let order = match entry % PAGE_SIZE {
        0 => return None,
        more => more - 1,
    };
    let gpa = entry - entry % PAGE_SIZE;
    if order > MAX_ORDER as u64 || !gpa.is_multiple_of(PAGE_SIZE << order) {
        return None;
    }
    Some(Range { gpa, len: PAGE_SIZE << order })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_names_the_block_it_was_made_of_and_nothing_else() {
        for order in 0..=MAX_ORDER {
            let gpa = 3 * (PAGE_SIZE << order);
            assert_eq!(reported(report_entry(gpa, order)), Some(Range { gpa, len: PAGE_SIZE << order }));
        }
        for wrong in [0, 12, PAGE_SIZE, PAGE_SIZE + 2, (PAGE_SIZE << 11) + 12] {
            assert_eq!(reported(wrong), None, "{wrong:#x}");
        }
    }
}
