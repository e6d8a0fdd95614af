//! Comparison of a snapshot file with the digests of the pages that were written to it.

use crate::handle::MigrationHandle;
use crate::snapshot::image::Sums;
use crate::snapshot::write::Stop;
use std::fs::File;
use std::os::unix::fs::FileExt;
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex};
use vmferry_wire::{
    PageEntry, PageTable, RegionOffsets, SnapshotError, SnapshotPart, TABLE_BYTES, TABLE_PAGES, TableKind,
};

/// Reads all tables and contents of the file, which has reached the disk, and compares them with
/// the checksums of the tables that were written. Returns the number of compared pages.
///
/// The kernel is told to drop its cache of the file before, so that the pages come from the disk as
/// far as the file system permits.
pub(super) fn verify(
    file: &File,
    sums: &Sums,
    kind: TableKind,
    handle: &MigrationHandle,
) -> Result<u64, Stop> {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    let mut buffer = vec![0; TABLE_PAGES * PAGE_BYTES];
    let mut compared = 0;
    for (place, index) in sums.regions() {
        for block in 0..place.blocks() {
            if handle.cancelled() {
                return Err(Stop::Cancelled);
            }
            if let Some(sum) = index.table(block) {
                compared += verify_block(file, kind, (place, block, sum), &mut buffer)?;
            }
        }
    }
    Ok(compared)
}

/// Compares the pages of a block, and returns the number of its pages with content in the file.
fn verify_block(
    file: &File,
    kind: TableKind,
    (place, block, sum): (&RegionOffsets, u64, u64),
    buffer: &mut [u8],
) -> Result<u64, Stop> {
    let (run, at) = (place.run(block), place.table(block));
    let pages = usize::try_from(run.count).unwrap_or(TABLE_PAGES);
    let mut bytes = [0; TABLE_BYTES];
    file.read_exact_at(&mut bytes, at).map_err(Stop::File)?;
    let table = PageTable::decode(&bytes, sum, kind, (place.id, run.first, pages), at)?;
    let buffer = &mut buffer[..pages * PAGE_BYTES];
    file.read_exact_at(buffer, place.content(run.first)).map_err(Stop::File)?;
    for (slot, page) in buffer.as_chunks::<PAGE_BYTES>().0.iter().enumerate() {
        if table.entry(slot) == PageEntry::Base {
            continue;
        }
        let zero = *page == [0; PAGE_BYTES];
        if !table.fits(slot, (!zero).then(|| PageDigest::of(page))) {
            let index = PageIndex(run.first.0 + slot as u64);
            let part = SnapshotPart::Page(place.id, index);
            return Err(SnapshotError::Damaged { part, at: place.content(index) }.into());
        }
    }
    Ok(table.contents())
}
