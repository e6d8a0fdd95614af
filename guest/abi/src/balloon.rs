//! Balloon extension: numbers and layouts of the additions of vmferry's balloon to virtio 1.2.
//!
//! `docs/balloon-extension.md` specifies the extension: inflation by ranges, a map of free pages,
//! and reports by a hypercall.

use crate::PAGE_SIZE;

/// Vendor ID of a device that may offer the extension, as virtio-mmio reports it.
///
/// The feature bits of the extension mean nothing on a device of another vendor.
pub const VENDOR: u32 = u32::from_le_bytes(*b"vmfy");

/// Feature bit: the queue [`RANGES_QUEUE`] exists.
pub const FEATURE_RANGES: u32 = 96;

/// Feature bit: the driver may publish a [map of its free pages](FreeMap) through the configuration
/// space.
pub const FEATURE_FREE_MAP: u32 = 97;

/// Feature bit: the device accepts writes to [`REPORT_PORT`].
pub const FEATURE_HYPERCALL: u32 = 98;

/// Index of the queue that inflates and deflates by ranges.
///
/// A buffer holds a [`RangesHeader`] and as many [`Range`]s as the header says, and nothing else.
pub const RANGES_QUEUE: u16 = 16;

/// Maximum number of ranges in one buffer.
pub const MAX_RANGES: u32 = 65_536;

/// Offsets of the fields of [`FreeMap`] in the configuration space, in bytes. Each field is a
/// little-endian 64-bit word. The driver writes `GPA` last. A `GPA` of 0 withdraws the map.
pub mod free_map {
    /// Offset of [`FreeMap::pages`](super::FreeMap::pages).
    pub const PAGES: u64 = 0x40;
    /// Offset of [`FreeMap::gpa`](super::FreeMap::gpa).
    pub const GPA: u64 = 0x48;
}

/// Bitmap of the guest's free pages, which the guest keeps in its own memory.
///
/// Bit `n` (of little-endian 64-bit words) is the `n`-th page of the guest's RAM, in the order of
/// the RAM entries of the PVH memory map, by ascending address. Holes, such as the one below 4 GiB,
/// have no bits.
///
/// A set bit means that the page is free now: the guest does not read the page before it has
/// written to it. The guest clears the bit before its first write to the page, and sets the bit
/// after its last. On x86-64 other processors see stores in order. Therefore a host that tracks
/// writes, and then reads the bit as set, finds every later write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMap {
    /// Address of the bitmap, a multiple of 4096.
    pub gpa: u64,
    /// Number of bits: all pages of RAM.
    pub pages: u64,
}

/// First bytes of a buffer on [`RANGES_QUEUE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangesHeader {
    /// [`INFLATE`] or [`DEFLATE`], little-endian.
    pub what: u32,
    /// Number of ranges that follow: `1 <= count <= MAX_RANGES`, little-endian.
    pub count: u32,
}

/// Value of [`RangesHeader::what`]: the host gets the ranges, and their content is lost.
pub const INFLATE: u32 = 1;

/// Value of [`RangesHeader::what`]: the guest uses the ranges again, and they read as zeros.
pub const DEFLATE: u32 = 2;

/// Guest memory, in whole pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address, a multiple of 4096, little-endian.
    pub gpa: u64,
    /// Length in bytes, a multiple of 4096 and not 0, little-endian.
    pub len: u64,
}

/// Port of the hypercall that reports free blocks: a 32-bit write of the page number of a page that
/// holds [`REPORT_ENTRIES`] [entries](report_entry). The write returns when the host has dropped
/// them all.
pub const REPORT_PORT: u16 = 0xf6;

/// Number of entries in a page of reports, and of blocks in a guest's buffer of freed ones.
pub const REPORT_ENTRIES: usize = 512;

/// Largest order of a block: 4 MiB.
pub const MAX_ORDER: u32 = 10;

/// Least order of a freed block that a guest reports at once: 2 MiB, the size of the host's huge
/// pages.
///
/// A smaller block splits a huge page when the host drops it. What is in use around the block then
/// costs the guest a fault for each page.
pub const REPORT_FROM: u32 = 9;

/// Returns the entry of a page of reports for the block of `1 << order` pages at `gpa`. An entry of
/// 0 is empty.
#[must_use]
pub const fn report_entry(gpa: u64, order: u32) -> u64 {
    gpa | (order as u64 + 1)
}

/// Returns the block that an entry names, as address and length in bytes, or `None` if the entry is
/// empty or invalid.
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
    fn entry_decodes_to_its_block_and_invalid_entries_to_none() {
        for order in 0..=MAX_ORDER {
            let gpa = 3 * (PAGE_SIZE << order);
            assert_eq!(reported(report_entry(gpa, order)), Some(Range { gpa, len: PAGE_SIZE << order }));
        }
        for wrong in [0, 12, PAGE_SIZE, PAGE_SIZE + 2, (PAGE_SIZE << 11) + 12] {
            assert_eq!(reported(wrong), None, "{wrong:#x}");
        }
    }
}
