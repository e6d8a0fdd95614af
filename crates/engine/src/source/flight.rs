//! The pages of a pass, from when it begins until it ends.

use crate::sync::ClaimBitmap;
use std::ops::Range;
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageSet, RegionId};

/// When in a pass a page has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// In order.
    First,
    /// After all that have theirs first: the guest may yet say, in time, that it is free.
    Last,
}

/// The pages of a pass that nobody has begun with, shared by the channels' senders and by who leaves pages out.
///
/// A page is in `first`, or in `last`, or one thread holds it, and that thread alone protects it: a page's protection forgets
/// writes since the one before, and whoever holds the page has not read it yet. It goes from `first` to a sender, for good; or
/// from `first` to the driver, which protects it and puts it into `last`; and from `last` to a sender, or to the driver, for
/// good: it is left out.
#[derive(Debug)]
pub(crate) struct Flight {
    parts: Vec<Part>,
    pages: u64,
}

#[derive(Debug)]
struct Part {
    id: RegionId,
    first: ClaimBitmap,
    last: ClaimBitmap,
}

impl Flight {
    pub(crate) fn new(set: &PageSet) -> Self {
        let part = |(id, map): (RegionId, &Bitmap)| Part {
            id,
            first: ClaimBitmap::new(map),
            last: ClaimBitmap::new(&Bitmap::new(map.len())),
        };
        let parts: Vec<_> = set.iter().map(part).collect();
        Self { parts, pages: set.count() }
    }

    /// How many pages the pass began with.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// The regions by position, with how many pages they have.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (usize, RegionId, u64)> + '_ {
        self.parts.iter().enumerate().map(|(position, part)| (position, part.id, part.first.len()))
    }

    /// Whether any page of the region at `position` still awaits that turn.
    pub(crate) fn has(&self, position: usize, turn: Turn) -> bool {
        self.of(position, turn).left() > 0
    }

    fn of(&self, position: usize, turn: Turn) -> &ClaimBitmap {
        let part = &self.parts[position];
        match turn {
            Turn::First => &part.first,
            Turn::Last => &part.last,
        }
    }

    /// Takes what is left of `chunk`, which begins at a multiple of 64, into `mine`, a bitmap of the region. Says whether that
    /// was anything.
    pub(crate) fn take(&self, position: usize, turn: Turn, chunk: Range<u64>, mine: &mut Bitmap) -> bool {
        let from = self.of(position, turn);
        let mut any = false;
        for first in chunk.clone().step_by(64) {
            let bits = from.take_64(first, u64::MAX >> (64 - (chunk.end - first).min(64)));
            if bits != 0 {
                any = true;
                mine.union_word(usize::try_from(first / 64).unwrap_or(usize::MAX), bits);
            }
        }
        any
    }

    /// Takes what is left of `wanted`, 64 pages from `first` on, that await that turn.
    pub(crate) fn take_64(&self, position: usize, turn: Turn, first: u64, wanted: u64) -> u64 {
        self.of(position, turn).take_64(first, wanted)
    }

    /// Gives back pages that were taken, to have their turn last. They are protected.
    pub(crate) fn put_off(&self, position: usize, first: u64, pages: u64) {
        self.parts[position].last.give_64(first, pages);
    }

    /// Adds what nobody took. The pass has ended.
    pub(crate) fn left_over(&self, into: &mut PageSet) {
        for part in &self.parts {
            for bits in [&part.first, &part.last] {
                if bits.left() > 0
                    && let Some(map) = into.region_mut(part.id)
                {
                    map.union(&bits.snapshot());
                }
            }
        }
    }

    /// With some pages put off already.
    #[cfg(test)]
    pub(crate) fn of_parts(first: &PageSet, last: &PageSet, pages: u64) -> Self {
        let part = |((id, first), (_, last)): ((RegionId, &Bitmap), (_, &Bitmap))| Part {
            id,
            first: ClaimBitmap::new(first),
            last: ClaimBitmap::new(last),
        };
        Self { parts: first.iter().zip(last.iter()).map(part).collect(), pages }
    }

    /// Both sets of the region at `position`, as tests look at them.
    #[cfg(test)]
    pub(crate) fn sets(&self, position: usize) -> [Bitmap; 2] {
        [Turn::First, Turn::Last].map(|turn| self.of(position, turn).snapshot())
    }
}
