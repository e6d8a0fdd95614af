//! Parts of a snapshot file besides the contents of its pages: the tables, the indexes, the
//! machine, the device state, and the header, which is written last.

use super::write::Stop;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_core::{Layout, PAGE_SIZE};
use vmferry_wire::{
    MigrationId, PageTable, PartSum, RegionOffsets, SNAPSHOT_HEADER_BYTES, SnapshotBase, SnapshotHeader,
    SnapshotMap, SnapshotRegion, TABLE_BYTES, TableIndex,
};

/// Checksums and counts of a region, which the threads share.
#[derive(Debug)]
struct RegionSums {
    index: Vec<AtomicU64>,
    contents: AtomicU64,
}

/// Part that is encoded, with its length and checksum for the header.
pub(super) type Encoded = (Vec<u8>, PartSum);

/// Snapshot file that is being written.
#[derive(Debug)]
pub(super) struct Image<'a> {
    file: &'a File,
    map: SnapshotMap,
    machine: Encoded,
    state: Encoded,
    regions: Vec<RegionSums>,
    bytes: AtomicU64,
    pages: AtomicU64,
}

/// Identity of a snapshot.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) id: MigrationId,
    /// True if the guest runs on.
    pub(super) copy: bool,
    /// Base, if the file is an increment.
    pub(super) base: Option<SnapshotBase>,
}

/// Amount of data in a complete file.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImageFigures {
    pub(super) bytes: u64,
    /// Pages of the guest with content.
    pub(super) contents: u64,
    /// Pages whose content is in the file.
    pub(super) raw_pages: u64,
}

/// Checksums of all tables that were written, in the order of the layout.
#[derive(Debug)]
pub(super) struct Sums(Vec<(RegionOffsets, TableIndex)>);

impl Sums {
    /// Returns the regions with their indexes.
    pub(super) fn regions(&self) -> impl Iterator<Item = (&RegionOffsets, &TableIndex)> {
        self.0.iter().map(|(place, index)| (place, index))
    }
}

impl<'a> Image<'a> {
    /// Begins the file of a guest with the memory `layout`.
    pub(super) fn new(file: &'a File, layout: &Layout, machine: Encoded, state: Encoded) -> Self {
        let map = SnapshotMap::new(layout, machine.1.bytes, state.1.bytes);
        let sums = |place: &RegionOffsets| RegionSums {
            index: (0..place.blocks()).map(|_| AtomicU64::new(0)).collect(),
            contents: AtomicU64::new(0),
        };
        let regions = map.regions.iter().map(sums).collect();
        Self { file, map, machine, state, regions, bytes: AtomicU64::new(0), pages: AtomicU64::new(0) }
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &'a File {
        self.file
    }

    /// Returns the offsets of all regions, in the order of the layout.
    pub(super) fn places(&self) -> &[RegionOffsets] {
        &self.map.regions
    }

    /// Writes table `block` of the region at `position`, unless the table says nothing. `contents`
    /// is the number of pages of the block with content: in an increment, some of them may be in
    /// the base. Each table is written once.
    pub(super) fn put_table(
        &self,
        position: usize,
        block: u64,
        table: &PageTable,
        contents: u64,
    ) -> Result<(), Stop> {
        let (sums, here) = (&self.regions[position], table.contents());
        debug_assert!(here <= contents, "a page in the file has content");
        sums.contents.fetch_add(contents, Ordering::Relaxed);
        if let Some((bytes, sum)) = table.encode() {
            let at = self.map.regions[position].table(block);
            self.file.write_all_at(&bytes, at).map_err(Stop::File)?;
            // Relaxed suffices, because only this thread writes the entry of this block, and the
            // reader of the sums has joined all threads.
            sums.index[usize::try_from(block).unwrap_or(usize::MAX)].store(sum, Ordering::Relaxed);
            self.pages.fetch_add(here, Ordering::Relaxed);
            self.bytes.fetch_add(TABLE_BYTES as u64 + here * PAGE_SIZE, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the checksums of the tables that were written so far.
    pub(super) fn sums(&self) -> Sums {
        let words = |own: &RegionSums| own.index.iter().map(|sum| sum.load(Ordering::Relaxed)).collect();
        let regions = self.map.regions.iter().zip(&self.regions);
        Sums(regions.map(|(place, own)| (*place, TableIndex::new(words(own)))).collect())
    }

    /// Writes all parts other than tables and contents, the header last. All threads that write
    /// tables have ended.
    pub(super) fn finish(self, layout: &Layout, identity: Identity) -> Result<ImageFigures, Stop> {
        let put = |bytes: &[u8], at| self.file.write_all_at(bytes, at).map_err(Stop::File);
        let (machine, state) = (self.machine, self.state);
        put(&machine.0, self.map.machine)?;
        put(&state.0, self.map.state)?;
        let mut bytes =
            self.bytes.into_inner() + (machine.0.len() + state.0.len() + SNAPSHOT_HEADER_BYTES) as u64;
        let mut regions = Vec::new();
        for ((region, place), own) in layout.regions().iter().zip(&self.map.regions).zip(self.regions) {
            let index = TableIndex::new(own.index.into_iter().map(AtomicU64::into_inner).collect());
            let (encoded, index_sum) = index.encode();
            put(&encoded, place.index)?;
            bytes += encoded.len() as u64;
            regions.push(SnapshotRegion { region: *region, index_sum, contents: own.contents.into_inner() });
        }
        self.file.set_len(self.map.len).map_err(Stop::File)?;
        let Identity { id, copy, base } = identity;
        let header = SnapshotHeader { id, copy, base, machine: machine.1, state: state.1, regions };
        let contents = header.regions.iter().map(|region| region.contents).sum();
        put(&header.encode()?, 0)?;
        Ok(ImageFigures { bytes, contents, raw_pages: self.pages.into_inner() })
    }
}
