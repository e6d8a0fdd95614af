//! Simulated guest. The content of a page is the number of its last write, or 0 if it was never
//! written.

use super::rng::Rng;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmferry_bitmap::Bitmap;

/// Way of finding the guest's writes, like those of real trackers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tracking {
    /// A harvest protects the harvested pages again.
    AtHarvest,
    /// A harvest leaves pages unprotected. Writes to them are not seen until the pages are
    /// protected one by one.
    ByHand,
    /// Like KVM's log: every page is marked from the start. A harvest leaves marks, and protecting
    /// a page removes its mark.
    Log,
}

#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    protected: bool,
    marked: bool,
}

/// Knowledge of the guest about its free pages, and its reports.
#[derive(Debug, Default)]
pub(super) struct Freedom {
    /// Pages that are not read before they are written.
    pub(super) free: Vec<bool>,
    /// Pages that were reported as free although they were in use. Their content is the guest's own
    /// responsibility.
    pub(super) lied: Vec<bool>,
    /// Pages in use that the guest reports as free, per mille.
    pub(super) lies: u64,
    /// Last question, if it was not stopped.
    pub(super) open: Option<u64>,
    /// Reports that the engine has not read: question, pages, and whether the answer is complete.
    pub(super) said: Vec<(u64, Vec<usize>, bool)>,
}

impl Freedom {
    /// Returns the pages of `range` that the guest reports as free now.
    pub(super) fn look(&mut self, rng: &mut Rng, range: std::ops::Range<usize>) -> Vec<usize> {
        let mut named = Vec::new();
        for page in range {
            let lie = !self.free[page] && rng.per_mille(self.lies);
            self.lied[page] |= lie;
            if self.free[page] || lie {
                named.push(page);
            }
        }
        named
    }

    /// Returns true if the content of this page matters.
    pub(super) fn counts(&self, page: usize) -> bool {
        !self.free[page] && !self.lied[page]
    }
}

/// The guest's memory on the source.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) pages: Vec<u64>,
    flags: Vec<Flags>,
    kind: Tracking,
    writes: u64,
    freedom: Arc<Mutex<Freedom>>,
}

impl Memory {
    pub(super) fn new(rng: &mut Rng) -> Self {
        let count = 4 + rng.index(28);
        let kind = [Tracking::AtHarvest, Tracking::ByHand, Tracking::Log][rng.index(3)];
        let mut memory = Self {
            pages: vec![0; count],
            flags: vec![Flags::default(); count],
            kind,
            writes: 1,
            freedom: Arc::default(),
        };
        let lies = if rng.per_mille(200) { 1 + rng.below(500) } else { 0 };
        *memory.freedom() =
            Freedom { free: vec![false; count], lied: vec![false; count], lies, ..Freedom::default() };
        for _ in 0..count {
            memory.write(rng);
        }
        for _ in 0..rng.index(count) {
            memory.free(rng);
        }
        memory
    }

    pub(super) fn freedom(&self) -> MutexGuard<'_, Freedom> {
        self.freedom.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn share_freedom(&self) -> Arc<Mutex<Freedom>> {
        Arc::clone(&self.freedom)
    }

    /// Returns true if the content of this page matters.
    pub(super) fn counts(&self, page: usize) -> bool {
        self.freedom().counts(page)
    }

    /// Frees a page, as the guest. Its content does not matter any more.
    pub(super) fn free(&self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        self.freedom().free[page] = true;
    }

    /// Writes a page, as the guest. A free page is then in use.
    pub(super) fn write(&mut self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        self.freedom().free[page] = false;
        self.write_page(rng, page);
    }

    /// Writes a page in use, as the VMM.
    pub(super) fn write_in_use(&mut self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        if !self.freedom().free[page] {
            self.write_page(rng, page);
        }
    }

    fn write_page(&mut self, rng: &mut Rng, page: usize) {
        self.writes += 1;
        // Some pages become zero again.
        self.pages[page] = if rng.per_mille(100) { 0 } else { self.writes };
        let flags = &mut self.flags[page];
        if flags.protected {
            *flags = Flags { protected: false, marked: true };
        }
    }

    pub(super) fn start_tracking(&mut self) {
        let (protected, marked) = (self.kind == Tracking::AtHarvest, self.kind == Tracking::Log);
        self.flags.fill(Flags { protected, marked });
    }

    /// Adds the pages that were written.
    pub(super) fn harvest(&mut self, into: &mut Bitmap) {
        for (flags, page) in self.flags.iter_mut().zip(0..) {
            if flags.marked {
                into.set(page);
                if self.kind == Tracking::Log {
                    continue;
                }
                *flags = Flags { protected: self.kind == Tracking::AtHarvest, marked: false };
            }
        }
    }

    pub(super) fn protect(&mut self, page: usize) {
        match self.kind {
            Tracking::AtHarvest => {}
            Tracking::ByHand => self.flags[page].protected = true,
            Tracking::Log => self.flags[page] = Flags { protected: true, marked: false },
        }
    }
}
