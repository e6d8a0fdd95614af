//! Writers of a background snapshot: they copy the blocks of the guest, unprotect them, and write
//! the copies to the file.

use super::Snapshot;
use super::copies::{BLOCK_PAGES, Block, Claimed, UNIT_PAGES, units};
use super::since::Comparison;
use crate::snapshot::image::Image;
use crate::snapshot::write::Stop;
use std::os::unix::fs::FileExt;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageDigest, PageRun};
use vmferry_wire::{PageTable, TABLE_PAGES};

/// Number of bytes of a block.
pub(super) const BLOCK_BYTES: usize = TABLE_PAGES * PAGE_BYTES;
/// A page of zeros.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// State of one writer.
pub(super) struct Writer<'a> {
    snapshot: &'a Snapshot<'a>,
    image: &'a Image<'a>,
    /// Guarded blocks of each region.
    guarded: &'a [Bitmap],
    /// Copy of the block that is being written. Pages that were never touched are not in the copy,
    /// and keep the bytes of another block.
    buffer: Vec<u8>,
    /// Touched pages of the block.
    touched: [bool; TABLE_PAGES],
    /// Touched pages of the region at this position, as far as its blocks were copied.
    map: Option<(usize, Bitmap)>,
    /// For an increment, the comparison with its base.
    comparison: Option<Comparison<'a>>,
}

impl<'a> Writer<'a> {
    /// Returns a writer of blocks of `image`.
    pub(super) fn new(snapshot: &'a Snapshot<'a>, image: &'a Image<'a>, guarded: &'a [Bitmap]) -> Self {
        let buffer = vec![0; BLOCK_BYTES];
        let comparison = snapshot.since.as_ref().map(Comparison::new);
        Self { snapshot, image, guarded, buffer, touched: [false; TABLE_PAGES], map: None, comparison }
    }

    /// Writes blocks until none is left, or the snapshot is given up.
    pub(super) fn work(&mut self) -> Result<(), Stop> {
        let copies = &self.snapshot.copies;
        while let Some(block) = copies.next() {
            if copies.stopped() || self.snapshot.handle.cancelled() {
                return Err(Stop::Cancelled);
            }
            let run = self.image.places()[block.position].run(block.number);
            let written = self.put(block, run)?;
            let bytes = usize::try_from(written * PAGE_SIZE).unwrap_or(usize::MAX);
            self.snapshot.handle.counters.count_frame(bytes, written, run.count - written);
            let stop = || copies.stopped() || self.snapshot.handle.cancelled();
            self.snapshot.pacer.wait(bytes, stop);
        }
        Ok(())
    }

    /// Puts a block into the file. Returns the number of pages that were written.
    fn put(&mut self, block: Block, run: PageRun) -> Result<u64, Stop> {
        let guarded = self.guarded[block.position].test(block.number);
        // A block that is not guarded is zero. In an increment, it may have had content before.
        if !guarded && !self.comparison.as_ref().is_some_and(|own| own.since().has_block(block)) {
            return Ok(0);
        }
        let now = if guarded {
            self.copy(block, run)?;
            self.digests(run)
        } else {
            PageTable::default()
        };
        let contents = now.contents();
        let table = match &mut self.comparison {
            Some(comparison) => comparison.differences(block, run, &now, &self.buffer),
            None => now,
        };
        self.write(block, run, &table)?;
        self.image.put_table(block.position, block.number, &table, contents)?;
        Ok(table.contents())
    }

    /// Copies the pages of the block as they were at the instant of the snapshot, and lifts the
    /// protection of those that no fault thread has copied.
    fn copy(&mut self, block: Block, run: PageRun) -> Result<(), Stop> {
        let claimed = self.snapshot.copies.claim(block);
        self.find_touched(block.position, run)?;
        self.copy_mine(block, run, claimed)?;
        self.unprotect_mine(block, run, claimed)?;
        self.snapshot.copies.unprotected(block);
        self.take_theirs(block, run, claimed)
    }

    /// Finds the pages of the block that may have content.
    ///
    /// The pages that this writer has claimed are protected. Therefore a page that is found
    /// untouched was untouched at the instant of the snapshot.
    fn find_touched(&mut self, position: usize, run: PageRun) -> Result<(), Stop> {
        let place = &self.image.places()[position];
        let map = match &mut self.map {
            Some((own, map)) if *own == position => map,
            other => &mut other.insert((position, Bitmap::new(place.pages))).1,
        };
        self.snapshot.memory.touched(place.id, run, map)?;
        self.touched.fill(false);
        for page in map.bits_in(run.range()) {
            self.touched[slot(page)] = true;
        }
        Ok(())
    }

    /// Copies the touched pages that this writer has claimed.
    fn copy_mine(&mut self, block: Block, run: PageRun, claimed: Claimed) -> Result<(), Stop> {
        let mut page = run.first.0;
        while page < run.end() {
            let mine =
                |page: &u64| self.touched[slot(*page)] && claimed.is_mine(slot(*page) as u64 / UNIT_PAGES);
            let count = (page..run.end()).take_while(mine).count() as u64;
            if count > 0 {
                let part = PageRun::from(page..page + count);
                let at = slot(page) * PAGE_BYTES;
                let bytes = usize::try_from(part.bytes()).unwrap_or(usize::MAX);
                self.snapshot.copy_live(block.position, part, &mut self.buffer[at..at + bytes])?;
            }
            page += count.max(1);
        }
        Ok(())
    }

    fn unprotect_mine(&self, block: Block, run: PageRun, claimed: Claimed) -> Result<(), Stop> {
        if claimed.all_mine() {
            // One call, so that a huge page stays a huge page.
            return Ok(self.snapshot.unprotect_live(block.position, run)?);
        }
        let mut mine = units().filter(|unit| claimed.is_mine(*unit)).peekable();
        while let Some(first) = mine.next() {
            let mut end = first + 1;
            while mine.next_if_eq(&end).is_some() {
                end += 1;
            }
            let start = run.first.0 + first * UNIT_PAGES;
            let end = (run.first.0 + end * UNIT_PAGES).min(run.end());
            if start < end {
                self.snapshot.unprotect_live(block.position, PageRun::from(start..end))?;
            }
        }
        Ok(())
    }

    /// Takes the units of the block that fault threads have copied.
    fn take_theirs(&mut self, block: Block, run: PageRun, claimed: Claimed) -> Result<(), Stop> {
        let copies = &self.snapshot.copies;
        for unit in units().filter(|unit| !claimed.is_mine(*unit)) {
            let Some(copied) = copies.copied(block, unit) else { return Err(Stop::Cancelled) };
            let part = copies.unit_run(block, unit);
            debug_assert!(part.first.0 >= run.first.0 && part.end() <= run.end());
            let bytes = usize::try_from(part.bytes()).unwrap_or(usize::MAX);
            let at = slot(part.first.0) * PAGE_BYTES;
            self.buffer[at..at + bytes].copy_from_slice(&copied.bytes()[..bytes]);
            for page in part.range() {
                self.touched[slot(page)] = true;
            }
            copies.give_back(copied);
        }
        Ok(())
    }

    /// Returns the digests of the touched pages in the copy of the block.
    fn digests(&self, run: PageRun) -> PageTable {
        let (pages, _) = self.buffer.as_chunks::<PAGE_BYTES>();
        let mut table = PageTable::default();
        let count = usize::try_from(run.count).unwrap_or(pages.len());
        for (at, page) in pages.iter().enumerate().take(count).filter(|(at, _)| self.touched[*at]) {
            table.set(at, (*page != ZEROS).then(|| PageDigest::of(page)));
        }
        table
    }

    /// Writes the pages of the copy that `table` has in the file.
    fn write(&self, block: Block, run: PageRun, table: &PageTable) -> Result<(), Stop> {
        let place = &self.image.places()[block.position];
        let count = usize::try_from(run.count).unwrap_or(TABLE_PAGES);
        let mut at = 0;
        while at < count {
            let length = (at..count).take_while(|at| table.has_content(*at)).count();
            if length > 0 {
                let bytes = &self.buffer[at * PAGE_BYTES..(at + length) * PAGE_BYTES];
                let offset = place.data + (run.first.0 + at as u64) * PAGE_SIZE;
                self.image.file().write_all_at(bytes, offset).map_err(Stop::File)?;
            }
            at += length.max(1);
        }
        Ok(())
    }
}

/// Returns the index of a page in its block.
pub(super) fn slot(page: u64) -> usize {
    usize::try_from(page % BLOCK_PAGES).unwrap_or(0)
}
