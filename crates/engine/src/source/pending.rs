//! The pages that a migration still has to send.
//!
//! While the guest is at the source, a page that the target needs is in one of these places:
//!
//! | place | owner | what takes the page out |
//! |---|---|---|
//! | `PendingPages::next` | the driver | the next pass begins |
//! | `PassPages`, with its turn first or last | all senders and the driver, by atomic claims | the thread that claims it |
//! | a bitmap of one thread | the sender that protects and reads it, or the driver that protects it | it is in a frame, or its turn is last |
//!
//! A page that is in none of them was sent, was never touched, or is in `PendingPages::skipped`; and a write to it brings it back
//! to `next`, by the tracker's next harvest.

use crate::sync::ClaimBitmap;
use std::ops::Range;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{Layout, PageSet, RegionId};

/// The pages that are to be sent, and those that were skipped.
///
/// An answer about free pages must not remove a page that the guest wrote after the question (hazard 8). No set of its own is
/// needed for that. While a pass runs, answers remove pages from the pass only, and a harvest comes after the end of the pass
/// and of its questions. While the guest is paused, the question comes after the harvest, and no harvest comes before its answer.
///
/// Nothing is lost with these sets: a migration that ends without the guest having moved drops them together with its tracker,
/// and the next one begins with every page in `next`.
#[derive(Debug)]
pub(crate) struct PendingPages {
    /// The pages that the next pass sends.
    next: PageSet,
    /// The pass under way.
    pass: Option<Arc<PassPages>>,
    /// Pages that were skipped as free and not sent since. A page that the guest wrote after it was skipped is in `next` too,
    /// until the next pass begins.
    skipped: PageSet,
    skipped_count: u64,
}

impl PendingPages {
    /// Every page is to be sent.
    pub(crate) fn everything(layout: &Layout) -> Self {
        Self { next: PageSet::full(layout), pass: None, skipped: PageSet::empty(layout), skipped_count: 0 }
    }

    /// Returns the set to which a tracker's harvest adds pages.
    ///
    /// # Panics
    /// If a pass is under way: its senders still protect pages, and a harvest in between could find a page that a sender has not
    /// read yet.
    pub(crate) fn next(&mut self) -> &mut PageSet {
        assert!(self.pass.is_none(), "a harvest comes between two passes");
        &mut self.next
    }

    /// Returns how many pages the next pass has.
    pub(crate) fn count(&self) -> u64 {
        self.next.count()
    }

    /// Begins a pass with everything that is to be sent.
    pub(crate) fn begin_pass(&mut self) -> Arc<PassPages> {
        self.end_pass();
        let pass = Arc::new(PassPages::new(&self.next));
        if self.skipped_count > 0 {
            self.skipped.subtract(&self.next);
            self.skipped_count = self.skipped.count();
        }
        self.next.clear();
        Arc::clone(self.pass.insert(pass))
    }

    /// Begins a pass with pages that arrived damaged, whether they are free or not: the target takes the guest only with all of
    /// what it was sent sound. The guest is paused.
    pub(crate) fn begin_repeat(&mut self, set: &PageSet) -> Arc<PassPages> {
        self.end_pass();
        self.unskip(set);
        Arc::clone(self.pass.insert(Arc::new(PassPages::new(set))))
    }

    /// Ends the pass under way, if there is one: what no thread took is still to be sent.
    pub(crate) fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take() {
            pass.add_rest_to(&mut self.next);
        }
    }

    /// Returns the pass under way.
    pub(crate) fn pass(&self) -> Option<&Arc<PassPages>> {
        self.pass.as_ref()
    }

    /// Takes everything, for the target to ask for it; `empty` is an empty set to go on with.
    pub(crate) fn take_all(&mut self, empty: PageSet) -> PageSet {
        self.end_pass();
        let taken = std::mem::replace(&mut self.next, empty);
        self.unskip(&taken);
        taken
    }

    /// Skips the pages that are to be sent and are in `free`; returns how many that are. The guest is paused, and was when it was
    /// asked which pages are free.
    ///
    /// # Panics
    /// If a pass is under way: [`mark_skipped`](Self::mark_skipped) is for its pages.
    pub(crate) fn skip(&mut self, free: &PageSet) -> u64 {
        assert!(self.pass.is_none(), "a pass skips its own pages");
        let mut out = self.next.clone();
        out.retain(free);
        self.next.subtract(&out);
        self.skipped.union(&out);
        let before = std::mem::replace(&mut self.skipped_count, self.skipped.count());
        self.skipped_count.saturating_sub(before)
    }

    /// Marks pages as skipped that were taken out of the pass under way: `pages` of the 64 from `first` on, in the region at
    /// `position`.
    pub(crate) fn mark_skipped(&mut self, position: usize, first: u64, pages: u64) {
        assert!(self.pass.is_some(), "pages are taken out of a pass that is under way");
        if let Some((_, map)) = self.skipped.iter_mut().nth(position) {
            map.union_word(usize::try_from(first / 64).unwrap_or(usize::MAX), pages);
            self.skipped_count += u64::from(pages.count_ones());
        }
    }

    /// The pages of `sent` are sent after all, or named for the target to ask for.
    pub(crate) fn unskip(&mut self, sent: &PageSet) {
        if self.skipped_count > 0 {
            self.skipped.subtract(sent);
            self.skipped_count = self.skipped.count();
        }
    }

    /// Returns the pages that were skipped, and not sent since.
    pub(crate) fn skipped(&self) -> &PageSet {
        &self.skipped
    }

    /// Returns how many pages were skipped, and not sent since.
    pub(crate) fn skipped_count(&self) -> u64 {
        self.skipped_count
    }

    /// These sets: `next`, `skipped`. For models that keep them elsewhere between two steps.
    #[cfg(test)]
    pub(crate) fn of([next, skipped]: [PageSet; 2], pass: Option<Arc<PassPages>>) -> Self {
        let skipped_count = skipped.count();
        Self { next, pass, skipped, skipped_count }
    }

    #[cfg(test)]
    pub(crate) fn sets(&self) -> [&PageSet; 2] {
        [&self.next, &self.skipped]
    }
}

/// When a page has its turn within a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// In the order of addresses.
    First,
    /// After all pages whose turn is first: the guest may still say, in time, that the page is free.
    Last,
}

/// The pages of a pass that no thread has taken, shared by the channels' senders and the driver, which skips free pages.
///
/// A page is in `first`, or in `last`, or one thread has it. Only that thread protects the page: a protection forgets the writes
/// since the one before, and the thread that has the page has not read it yet. A page goes from `first` to a sender, for good; or
/// from `first` to the driver, which protects it and puts it into `last`; and from `last` to a sender, or to the driver, which
/// skips it, both for good.
#[derive(Debug)]
pub(crate) struct PassPages {
    parts: Vec<Part>,
    pages: u64,
}

#[derive(Debug)]
struct Part {
    id: RegionId,
    first: ClaimBitmap,
    last: ClaimBitmap,
}

impl PassPages {
    fn new(set: &PageSet) -> Self {
        let part = |(id, map): (RegionId, &Bitmap)| Part {
            id,
            first: ClaimBitmap::new(map),
            last: ClaimBitmap::new(&Bitmap::new(map.len())),
        };
        let parts: Vec<_> = set.iter().map(part).collect();
        Self { parts, pages: set.count() }
    }

    /// Returns how many pages the pass began with.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the regions by position, with how many pages they have.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (usize, RegionId, u64)> + '_ {
        self.parts.iter().enumerate().map(|(position, part)| (position, part.id, part.first.len()))
    }

    /// Returns whether any page of the region at `position` still awaits that turn.
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

    /// Takes what is left of `chunk`, which begins at a multiple of 64, into `mine`, a bitmap of the region. Returns whether that
    /// was any page.
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
    pub(crate) fn postpone(&self, position: usize, first: u64, pages: u64) {
        self.parts[position].last.give_64(first, pages);
    }

    /// Adds the pages that no thread took. The pass has ended.
    fn add_rest_to(&self, into: &mut PageSet) {
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

    /// With some pages postponed already.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::unscheduled;
    use vmferry_core::{Gpa, Region};

    fn layout() -> Layout {
        Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 100 << 12 }]).unwrap()
    }

    fn set(pages: &[u64]) -> PageSet {
        let mut set = PageSet::empty(&layout());
        pages.iter().for_each(|page| {
            set.region_mut(RegionId(0)).unwrap().set(*page);
        });
        set
    }

    fn take_all(pass: &PassPages, turn: Turn) -> Vec<u64> {
        let mut mine = Bitmap::new(100);
        pass.take(0, turn, 0..100, &mut mine);
        mine.bits().collect()
    }

    #[test]
    fn harvested_page_is_taken_once() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            assert_eq!(pending.count(), 100);
            let pass = pending.begin_pass();
            assert_eq!((pass.pages(), pending.count()), (100, 0));
            assert_eq!(take_all(&pass, Turn::First).len(), 100);
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(7);
            assert_eq!(pending.count(), 1);
            assert_eq!(take_all(&pending.begin_pass(), Turn::First), [7]);
            assert_eq!(pending.count(), 0);
        });
    }

    #[test]
    fn pages_that_a_pass_leaves_are_sent_by_the_next() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            let pass = pending.begin_pass();
            let off = pass.take_64(0, Turn::First, 64, 0b111);
            pass.postpone(0, 64, off);
            assert_eq!(take_all(&pass, Turn::First).len(), 97);
            assert_eq!(pass.take_64(0, Turn::Last, 64, 0b10), 0b10);
            pending.mark_skipped(0, 64, 0b10);
            pending.end_pass();
            assert_eq!((pending.count(), pending.skipped_count()), (2, 1));
            assert_eq!(take_all(&pending.begin_pass(), Turn::First), [64, 66]);
            // Written since: the next pass sends it, and it is skipped no more.
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(65);
            assert_eq!(pending.skipped_count(), 1);
            assert_eq!(take_all(&pending.begin_pass(), Turn::First), [65]);
            assert_eq!(pending.skipped_count(), 0);
        });
    }

    #[test]
    fn paused_guest_has_only_pages_skipped_that_are_to_be_sent() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            take_all(&pending.begin_pass(), Turn::First);
            pending.end_pass();
            pending.next().union(&set(&[1, 2, 3]));
            assert_eq!(pending.skip(&set(&[2, 4, 9])), 1);
            assert_eq!(*pending.skipped(), set(&[2]));
            assert_eq!(pending.take_all(PageSet::empty(&layout())), set(&[1, 3]));
        });
    }
}
