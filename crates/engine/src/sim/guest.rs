//! The simulated guest: a page is the number of the write that it holds, 0 if it was never written.

use super::rng::Rng;

/// What finds the guest's writes, in the two ways that real trackers do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tracking {
    /// A harvest protects again what it takes.
    AtHarvest,
    /// A harvest takes; pages stay unprotected, and writes to them unseen, until they are protected one by one.
    ByHand,
}

#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    protected: bool,
    marked: bool,
}

/// The guest's memory on the source.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) pages: Vec<u64>,
    flags: Vec<Flags>,
    kind: Tracking,
    writes: u64,
}

impl Memory {
    pub(super) fn new(rng: &mut Rng) -> Self {
        let count = 4 + rng.index(28);
        let kind = if rng.per_mille(500) { Tracking::AtHarvest } else { Tracking::ByHand };
        let mut memory =
            Self { pages: vec![0; count], flags: vec![Flags::default(); count], kind, writes: 1 };
        for _ in 0..count {
            memory.write(rng);
        }
        memory
    }

    pub(super) fn write(&mut self, rng: &mut Rng) {
        let page = rng.index(self.pages.len());
        self.writes += 1;
        // Some pages become zero again.
        self.pages[page] = if rng.per_mille(100) { 0 } else { self.writes };
        let flags = &mut self.flags[page];
        if flags.protected {
            *flags = Flags { protected: false, marked: true };
        }
    }

    pub(super) fn start_tracking(&mut self) {
        let protected = self.kind == Tracking::AtHarvest;
        self.flags.fill(Flags { protected, marked: false });
    }

    /// Adds the pages that were written.
    pub(super) fn harvest(&mut self, into: &mut [bool]) {
        for (flags, into) in self.flags.iter_mut().zip(into) {
            if flags.marked {
                *into = true;
                *flags = Flags { protected: self.kind == Tracking::AtHarvest, marked: false };
            }
        }
    }

    pub(super) fn protect(&mut self, page: usize) {
        if self.kind == Tracking::ByHand {
            self.flags[page].protected = true;
        }
    }
}
