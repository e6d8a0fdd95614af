//! Offsets of all parts of a snapshot file.

use super::{SNAPSHOT_HEADER_BYTES, TABLE_BYTES, TABLE_PAGES};
use vmferry_core::{Layout, PAGE_SIZE, PageIndex, PageRun, RegionId};

/// Alignment of the parts before the contents, in bytes: a page.
const ALIGN: u64 = PAGE_SIZE;
/// Alignment of the contents of a region, in bytes. It is the size of a huge page, so that the
/// contents can be mapped with huge pages.
const DATA_ALIGN: u64 = 2 << 20;

/// Offsets of a region's parts in the file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionOffsets {
    /// Id of the region.
    pub id: RegionId,
    /// Number of pages of the region.
    pub pages: u64,
    /// Offset of the index, which contains the checksum of each table of the region in 8 bytes.
    pub index: u64,
    /// Offset of the first table. Each table has [`TABLE_BYTES`] bytes.
    pub tables: u64,
    /// Offset of the contents. The content of page `p` begins at `data + p * 4096`.
    pub data: u64,
}

impl RegionOffsets {
    /// Returns the number of tables of the region.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.pages.div_ceil(TABLE_PAGES as u64)
    }

    /// Returns the length of the index in bytes.
    #[must_use]
    pub fn index_bytes(&self) -> u64 {
        8 * self.blocks()
    }

    /// Returns the pages whose digests are in table `block`, counted from 0.
    #[must_use]
    pub fn run(&self, block: u64) -> PageRun {
        let first = block * TABLE_PAGES as u64;
        PageRun::from(first..(first + TABLE_PAGES as u64).min(self.pages))
    }

    /// Returns the offset of table `block`.
    #[must_use]
    pub fn table(&self, block: u64) -> u64 {
        self.tables + block * TABLE_BYTES as u64
    }

    /// Returns the offset of the content of `page`.
    #[must_use]
    pub fn content(&self, page: PageIndex) -> u64 {
        self.data + page.offset()
    }
}

/// Offsets of all parts of a snapshot file, in bytes. They are computed from the memory layout and
/// two lengths, so a file cannot contain wrong offsets, and its parts cannot overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotMap {
    /// Offset of the description of the machine.
    pub machine: u64,
    /// Offset of the device state.
    pub state: u64,
    /// Offsets of the regions, in the order of the layout.
    pub regions: Vec<RegionOffsets>,
    /// Length of the whole file in bytes.
    pub len: u64,
}

impl SnapshotMap {
    /// Returns the offsets for a snapshot of `layout`, with the lengths of the machine description
    /// and of the device state. Both lengths must be within their limits.
    #[must_use]
    pub fn new(layout: &Layout, machine_bytes: u32, state_bytes: u32) -> Self {
        // No sum overflows. A layout has at most 2^34 pages (MAX_PAGES). Besides the 2^46 bytes of
        // contents, there are 2^37 bytes of tables, 2^28 bytes of indexes, and less than 2^28 bytes
        // of padding for 64 regions.
        let machine = SNAPSHOT_HEADER_BYTES as u64;
        let state = (machine + u64::from(machine_bytes)).next_multiple_of(ALIGN);
        let mut end = state + u64::from(state_bytes);
        let mut take = |bytes: u64, align: u64| {
            let start = end.next_multiple_of(align);
            end = start + bytes;
            start
        };
        let mut regions: Vec<RegionOffsets> = layout
            .regions()
            .iter()
            .map(|r| RegionOffsets { id: r.id, pages: r.pages(), index: 0, tables: 0, data: 0 })
            .collect();
        // A reader that opens the file reads it only up to the end of the last index, so the
        // indexes come first.
        regions.iter_mut().for_each(|place| place.index = take(place.index_bytes(), ALIGN));
        regions.iter_mut().for_each(|place| place.tables = take(place.blocks() * TABLE_BYTES as u64, ALIGN));
        regions.iter_mut().for_each(|place| place.data = take(place.pages * PAGE_SIZE, DATA_ALIGN));
        Self { machine, state, regions, len: end }
    }
}
