//! Protection of all memory while the guest runs, so that few pages are left for the pause.
//!
//! # Blocks that were never touched are not protected
//! A marker in the page table would cost memory for each page that the guest never used, and would
//! prevent huge pages there. Therefore only blocks of 512 pages that have a touched page are
//! protected (*guarded*). A block that is not guarded when the guest is paused was never touched,
//! so it is zero at the instant of the snapshot, whatever the guest writes to it later.
//!
//! # No page is missed
//! While memory is being armed, a fault only lifts the protection of its unit, and then records the
//! unit as written. A round takes the recorded units, and then protects them again. Therefore, in
//! guarded blocks, a page that is not protected is recorded, or a fault thread is between these two
//! steps. [`Arming::close`] excludes such threads: it holds the lock of the phase for writing. The
//! guest is paused by then, so after the last round all pages of guarded blocks are protected.
//!
//! The order of the two steps matters. If the fault thread recorded the unit first, a round could
//! take the record and protect the unit before the thread lifts the protection. The unit would then
//! be writable without a record.

use super::copies::{BLOCK_PAGES, UNIT_PAGES};
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{GuestMemory, PageRun, Region, VmError, WriteProtection};

/// Number of units of a block.
const BLOCK_UNITS: u64 = BLOCK_PAGES / UNIT_PAGES;
/// Maximum number of pages that one call protects: 32 MiB. During the call, vCPUs cannot handle
/// faults in this memory.
const PIECE_PAGES: u64 = 8192;
/// Maximum number of guarded units between two written ones that are protected together. To protect
/// a protected page again costs less than another call.
const MOST_GAP: u64 = 4;
/// Share of the guest's memory below which an untouched part is guarded, too. It bounds the number
/// of untouched parts, each of which is examined again while the guest is paused.
const SMALL_GAP_SHARE: u64 = 128;

/// Units that were written since they were protected, and the number of faults that found them.
#[derive(Debug)]
pub(super) struct Written {
    regions: Vec<AtomicBitmap>,
    faults: AtomicU64,
}

impl Written {
    /// Returns the record for these regions.
    pub(super) fn new(regions: &[Region]) -> Self {
        let units = |region: &Region| AtomicBitmap::new(region.pages().div_ceil(UNIT_PAGES));
        Self { regions: regions.iter().map(units).collect(), faults: AtomicU64::new(0) }
    }

    /// Lifts the protection of the unit of `page`, and records the unit.
    pub(super) fn fault(
        &self,
        protection: &dyn WriteProtection,
        (position, region): (usize, &Region),
        page: u64,
    ) -> Result<(), VmError> {
        let unit = page / UNIT_PAGES;
        let run = PageRun::from(unit * UNIT_PAGES..((unit + 1) * UNIT_PAGES).min(region.pages()));
        protection.unprotect(region.id, run)?;
        self.regions[position].set(unit);
        self.faults.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the number of faults so far.
    pub(super) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

/// Memory that is being armed.
pub(super) struct Arming<'a> {
    memory: &'a dyn GuestMemory,
    protection: &'a dyn WriteProtection,
    written: &'a Written,
    /// Guarded blocks of each region, in the order of the layout.
    guarded: Vec<Bitmap>,
    /// Largest untouched part, in blocks, that is guarded together with its neighbours.
    small_gap: u64,
}

/// Amount of work of a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Round {
    /// Blocks that became guarded.
    pub(super) blocks: u64,
    /// Written units that were protected again.
    pub(super) units: u64,
}

impl Round {
    /// Returns the number of pages that the round has protected, at least.
    pub(super) fn pages(self) -> u64 {
        self.blocks * BLOCK_PAGES + self.units * UNIT_PAGES
    }
}

impl<'a> Arming<'a> {
    /// Prepares to arm `memory`, whose protection has begun. No page is protected yet.
    pub(super) fn new(
        memory: &'a dyn GuestMemory,
        protection: &'a dyn WriteProtection,
        written: &'a Written,
    ) -> Self {
        let blocks = |region: &Region| region.pages().div_ceil(BLOCK_PAGES);
        let regions = memory.layout().regions();
        let all: u64 = regions.iter().map(blocks).sum();
        let guarded = regions.iter().map(|region| Bitmap::new(blocks(region))).collect();
        Self { memory, protection, written, guarded, small_gap: all.div_ceil(SMALL_GAP_SHARE) }
    }

    /// Protects blocks that were touched since the last round, and units that were written since
    /// then. `stop` is called between the parts of the work, and ends it early.
    pub(super) fn round(&mut self, stop: impl Fn() -> bool) -> Result<Round, VmError> {
        let mut round = Round::default();
        for position in 0..self.guarded.len() {
            if stop() {
                break;
            }
            round.blocks += self.guard(position)?;
            round.units += self.protect_written(position)?;
        }
        Ok(round)
    }

    /// Makes the last round, with which the instant of the snapshot is complete, and returns the
    /// guarded blocks of each region. The guest is paused, and no fault is being served: the caller
    /// holds the lock of the phase for writing.
    pub(super) fn close(mut self) -> Result<(Round, Vec<Bitmap>), VmError> {
        let round = self.round(|| false)?;
        Ok((round, self.guarded))
    }

    fn region(&self, position: usize) -> Region {
        self.memory.layout().regions()[position]
    }

    /// Guards and protects the blocks of a region that were touched and are not guarded. Returns
    /// their number.
    fn guard(&mut self, position: usize) -> Result<u64, VmError> {
        let (region, blocks) = (self.region(position), self.guarded[position].len());
        let (mut at, mut new) = (0, 0);
        while at < blocks {
            // The next part of the region that is not guarded.
            let end = self.guarded[position].next_set(at).unwrap_or(blocks);
            if end == at {
                at += self.guarded[position].runs_in(at..blocks).next().map_or(1, |run| run.end - run.start);
                continue;
            }
            let touched = self.touched_blocks(&region, at..end)?;
            for run in touched.runs_in(at..end) {
                // Guarded first: if the call fails, the snapshot is given up.
                self.guarded[position].set_range(run.clone());
                new += run.end - run.start;
                self.protect(&region, run.start * BLOCK_PAGES..run.end * BLOCK_PAGES)?;
            }
            at = end;
        }
        Ok(new)
    }

    /// Returns the blocks of `part` that were touched, with the small gaps between them. `part`
    /// lies between guarded blocks or ends of the region.
    fn touched_blocks(&self, region: &Region, part: std::ops::Range<u64>) -> Result<Bitmap, VmError> {
        let mut touched = Bitmap::new(region.pages().div_ceil(BLOCK_PAGES));
        // Before the first guarded block of a region, there is no neighbour.
        let mut last = part.start.checked_sub(1);
        let mut at = part.start;
        while at < part.end {
            let pages = at * BLOCK_PAGES..(part.end * BLOCK_PAGES).min(region.pages());
            let Some(page) = self.memory.next_touched(region.id, pages.into())? else { break };
            let block = page / BLOCK_PAGES;
            let gap_from = last.map_or(block, |last| last + 1);
            let small = block.saturating_sub(gap_from) < self.small_gap;
            touched.set_range(if small { gap_from.min(block) } else { block }..block + 1);
            last = Some(block);
            at = block + 1;
        }
        Ok(touched)
    }

    /// Protects the units of a region that were written, and returns their number.
    fn protect_written(&self, position: usize) -> Result<u64, VmError> {
        let region = self.region(position);
        let record = &self.written.regions[position];
        let mut units = Bitmap::new(record.len());
        if record.harvest(&mut units) == 0 {
            return Ok(0);
        }
        let guarded = |unit: u64| self.guarded[position].test(unit / BLOCK_UNITS);
        let mut pending: Option<std::ops::Range<u64>> = None;
        for run in units.runs() {
            pending = match pending {
                // The gap has less than a block, so its blocks are those of its two ends.
                Some(before) if run.start - before.end <= MOST_GAP => Some(before.start..run.end),
                Some(before) => {
                    self.protect(&region, before.start * UNIT_PAGES..before.end * UNIT_PAGES)?;
                    Some(run)
                }
                None => Some(run),
            };
            debug_assert!(pending.as_ref().is_some_and(|run| guarded(run.start) && guarded(run.end - 1)));
        }
        if let Some(run) = pending {
            self.protect(&region, run.start * UNIT_PAGES..run.end * UNIT_PAGES)?;
        }
        Ok(units.count())
    }

    /// Protects these pages of `region`, as far as they exist.
    fn protect(&self, region: &Region, pages: std::ops::Range<u64>) -> Result<(), VmError> {
        let end = pages.end.min(region.pages());
        for first in (pages.start..end).step_by(usize::try_from(PIECE_PAGES).unwrap_or(1)) {
            self.protection.protect(region.id, PageRun::from(first..(first + PIECE_PAGES).min(end)))?;
        }
        Ok(())
    }
}
