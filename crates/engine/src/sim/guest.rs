//! The simulated guest: a page is the number of the write that it holds, 0 if it was never written.

use super::rng::Rng;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmferry_bitmap::Bitmap;

/// What finds the guest's writes, in the ways that real trackers do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tracking {
    /// A harvest protects again what it takes.
    AtHarvest,
    /// A harvest takes; pages stay unprotected, and writes to them unseen, until they are protected one by one.
    ByHand,
    /// As KVM's log: every page is marked from the start; a harvest leaves marks as they are, and protecting a page one by one
    /// takes its mark.
    Log,
}

#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    protected: bool,
    marked: bool,
}

/// What the guest knows of its free pages, and what it says of them.
#[derive(Debug, Default)]
pub(super) struct Freedom {
    /// Pages that nobody reads before writing them.
    pub(super) free: Vec<bool>,
    /// Pages that were said to be free and were not: what becomes of them is the guest's own doing.
    pub(super) lied: Vec<bool>,
    /// Pages in use that it says are free, in a thousand.
    pub(super) lies: u64,
    /// The question that it was asked last, and was not told to stop with.
    pub(super) open: Option<u64>,
    /// What it has said, and the engine has not heard: for which question, which pages, whether that was all.
    pub(super) said: Vec<(u64, Vec<usize>, bool)>,
}

impl Freedom {
    /// The pages of `range` that it says are free now.
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

    /// Whether anybody will miss what this page holds.
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

    /// Whether anybody will miss what this page holds.
    pub(super) fn counts(&self, page: usize) -> bool {
        self.freedom().counts(page)
    }

    /// The guest frees a page. What it holds counts no more.
    pub(super) fn free(&self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        self.freedom().free[page] = true;
    }

    /// The guest writes a page, which it takes into use if it is free.
    pub(super) fn write(&mut self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        self.freedom().free[page] = false;
        self.write_page(rng, page);
    }

    /// The VMM writes a page, of those that are in use.
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
