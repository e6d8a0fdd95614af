//! Where everything lies in a snapshot file.

use super::{SNAPSHOT_HEADER_BYTES, TABLE_BYTES, TABLE_PAGES};
use vmferry_core::{Layout, PAGE_SIZE, PageIndex, PageRun, RegionId};

/// Parts before the contents begin at multiples of a page.
const ALIGN: u64 = PAGE_SIZE;
/// The contents of a region begin at multiples of a huge page, so that they can be mapped by huge pages.
const DATA_ALIGN: u64 = 2 << 20;

/// Where a region lies in the file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPlace {
    /// The region.
    pub id: RegionId,
    /// Its pages.
    pub pages: u64,
    /// Its index: the checksum of each of its tables, 8 bytes each.
    pub index: u64,
    /// Its tables, [`TABLE_BYTES`] each.
    pub tables: u64,
    /// Its contents: page `p` at `data + p * 4096`.
    pub data: u64,
}

impl RegionPlace {
    /// How many tables it has.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.pages.div_ceil(TABLE_PAGES as u64)
    }

    /// Bytes of its index.
    #[must_use]
    pub fn index_bytes(&self) -> u64 {
        8 * self.blocks()
    }

    /// The pages of table `block`.
    #[must_use]
    pub fn run(&self, block: u64) -> PageRun {
        let first = block * TABLE_PAGES as u64;
        PageRun::from(first..(first + TABLE_PAGES as u64).min(self.pages))
    }

    /// Where table `block` begins.
    #[must_use]
    pub fn table(&self, block: u64) -> u64 {
        self.tables + block * TABLE_BYTES as u64
    }

    /// Where the content of `page` begins.
    #[must_use]
    pub fn content(&self, page: PageIndex) -> u64 {
        self.data + page.offset()
    }
}

/// Where everything lies. It follows from the layout of memory and two lengths, so a file cannot say anything else, and
/// parts cannot overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotMap {
    /// The description of the machine.
    pub machine: u64,
    /// The device state.
    pub state: u64,
    /// The regions, in the layout's order.
    pub regions: Vec<RegionPlace>,
    /// The whole file's length.
    pub len: u64,
}

impl SnapshotMap {
    /// The map of a snapshot of `layout` with so many bytes of machine and state, both within their limits.
    #[must_use]
    pub fn new(layout: &Layout, machine_bytes: u32, state_bytes: u32) -> Self {
        // Nothing overflows: a layout has at most 2^34 pages (MAX_PAGES), and 64 regions add less than 2^28 bytes of
        // padding to their 2^46 bytes of contents, 2^37 of tables and 2^28 of indexes.
        let machine = SNAPSHOT_HEADER_BYTES as u64;
        let state = (machine + u64::from(machine_bytes)).next_multiple_of(ALIGN);
        let mut end = state + u64::from(state_bytes);
        let mut take = |bytes: u64, align: u64| {
            let start = end.next_multiple_of(align);
            end = start + bytes;
            start
        };
        let mut regions: Vec<RegionPlace> = layout
            .regions()
            .iter()
            .map(|r| RegionPlace { id: r.id, pages: r.pages(), index: 0, tables: 0, data: 0 })
            .collect();
        // Whoever opens the file reads its beginning up to the last index, and no further.
        regions.iter_mut().for_each(|place| place.index = take(place.index_bytes(), ALIGN));
        regions.iter_mut().for_each(|place| place.tables = take(place.blocks() * TABLE_BYTES as u64, ALIGN));
        regions.iter_mut().for_each(|place| place.data = take(place.pages * PAGE_SIZE, DATA_ALIGN));
        Self { machine, state, regions, len: end }
    }
}
