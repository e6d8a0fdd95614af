//! Pages that a migration still has to send.
//!
//! While the source owns the guest, a page that the target needs is in one of these places:
//!
//! | place | owner | what takes the page out |
//! |---|---|---|
//! | `PendingPages::next` | the driver | the next pass begins |
//! | `PassPages`, with the turn first or last | all senders and the driver, by atomic claims | the thread that claims the page |
//! | a bitmap of one thread | the sender that protects and reads the page, or the driver that protects it | the page is put into a frame, or its turn becomes last |
//!
//! A page that is in none of these places was sent, was never touched, or is in
//! `PendingPages::skipped`. A write to such a page returns it to `next`, by the tracker's next
//! harvest.

use crate::sync::ClaimBitmap;
use std::ops::Range;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{Layout, PageSet, RegionId};

/// Pages that are to be sent, and pages that were skipped.
///
/// An answer about free pages must not remove a page that the guest wrote after the question
/// (hazard 8). No additional set is needed to ensure that:
///
/// - While a pass runs, answers remove pages from the pass only. A harvest comes after the end of
///   the pass and of its questions.
/// - While the guest is paused, the question comes after the harvest, and no harvest comes before
///   its answer.
///
/// It is safe to drop these sets. A migration that ends without having moved the guest drops them
/// together with its tracker, and the next migration begins with every page in `next`.
#[derive(Debug)]
pub(crate) struct PendingPages {
    /// Pages that the next pass sends.
    next: PageSet,
    /// The current pass.
    pass: Option<Arc<PassPages>>,
    /// Pages that were skipped as free and not sent since.
    ///
    /// A page that the guest wrote after the page was skipped is also in `next`, until the next
    /// pass begins.
    skipped: PageSet,
    skipped_count: u64,
}

impl PendingPages {
    /// Creates the sets with every page still to be sent.
    pub(crate) fn everything(layout: &Layout) -> Self {
        Self { next: PageSet::full(layout), pass: None, skipped: PageSet::empty(layout), skipped_count: 0 }
    }

    /// Returns the set to which a tracker's harvest adds pages.
    ///
    /// # Panics
    /// If a pass is in progress. Its senders still protect pages, and the harvest could find a page
    /// that a sender has not read yet.
    pub(crate) fn next(&mut self) -> &mut PageSet {
        assert!(self.pass.is_none(), "a harvest comes between two passes");
        &mut self.next
    }

    /// Returns the number of pages of the next pass.
    pub(crate) fn count(&self) -> u64 {
        self.next.count()
    }

    /// Begins a pass with all pages that are to be sent.
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

    /// Begins a pass with the pages of `set`, which had a digest mismatch, even if they are free.
    /// The guest must be paused.
    ///
    /// Free pages are included, because the target accepts the guest only if every page that it has
    /// received matches its digest.
    pub(crate) fn begin_repeat(&mut self, set: &PageSet) -> Arc<PassPages> {
        self.end_pass();
        self.unskip(set);
        Arc::clone(self.pass.insert(Arc::new(PassPages::new(set))))
    }

    /// Ends the current pass, if there is one. Pages that no thread took are still to be sent.
    pub(crate) fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take() {
            pass.add_remaining_to(&mut self.next);
        }
    }

    /// Returns the current pass.
    pub(crate) fn pass(&self) -> Option<&Arc<PassPages>> {
        self.pass.as_ref()
    }

    /// Takes all pages that are to be sent, for the target to request them. `empty` is an empty set
    /// that replaces them.
    pub(crate) fn take_all(&mut self, empty: PageSet) -> PageSet {
        self.end_pass();
        let taken = std::mem::replace(&mut self.next, empty);
        self.unskip(&taken);
        taken
    }

    /// Skips the pages that are to be sent and are in `free`. Returns the number of pages that are
    /// skipped now and were not before.
    ///
    /// The guest must be paused, and must have been paused when it was asked which pages are free.
    ///
    /// # Panics
    /// If a pass is in progress. Use [`mark_skipped`](Self::mark_skipped) for the pages of a pass.
    pub(crate) fn skip(&mut self, free: &PageSet) -> u64 {
        assert!(self.pass.is_none(), "a pass skips its own pages");
        let mut out = self.next.clone();
        out.retain(free);
        self.next.subtract(&out);
        self.skipped.union(&out);
        let before = std::mem::replace(&mut self.skipped_count, self.skipped.count());
        self.skipped_count.saturating_sub(before)
    }

    /// Marks pages that were taken out of the current pass as skipped. `pages` is a mask of these
    /// pages among the 64 pages from `first` on, in the region at `position`.
    ///
    /// # Panics
    /// If no pass is in progress.
    pub(crate) fn mark_skipped(&mut self, position: usize, first: u64, pages: u64) {
        assert!(self.pass.is_some(), "pages are taken out of a pass that is under way");
        if let Some((_, map)) = self.skipped.iter_mut().nth(position) {
            map.union_word(usize::try_from(first / 64).unwrap_or(usize::MAX), pages);
            self.skipped_count += u64::from(pages.count_ones());
        }
    }

    /// Removes the pages of `sent` from the skipped pages, because they are sent or named to the
    /// target as missing.
    pub(crate) fn unskip(&mut self, sent: &PageSet) {
        if self.skipped_count > 0 {
            self.skipped.subtract(sent);
            self.skipped_count = self.skipped.count();
        }
    }

    /// Returns the pages that were skipped and not sent since.
    pub(crate) fn skipped(&self) -> &PageSet {
        &self.skipped
    }

    /// Returns the number of pages that were skipped and not sent since.
    pub(crate) fn skipped_count(&self) -> u64 {
        self.skipped_count
    }

    /// Creates the sets from `next`, `skipped` and the current pass. For models that keep them
    /// elsewhere between two steps.
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

/// Turn of a page within a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageTurn {
    /// The page is sent in the order of addresses.
    First,
    /// The page is sent after all pages whose turn is first. Until then the guest may report the
    /// page as free.
    Last,
}

/// The pages of a pass that no thread has taken. The channels' senders share the set with the
/// driver, which skips free pages.
///
/// A page is in `first`, or in `last`, or one thread has taken it. Only that thread protects the
/// page: a protection discards the writes recorded since the previous protection, and only a thread
/// that has not read the page yet may do so.
///
/// A page moves in one of these ways:
///
/// - from `first` to a sender, permanently;
/// - from `first` to the driver, which protects the page and puts it into `last`;
/// - from `last` to a sender, or to the driver, which skips the page. Both are permanent.
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

    /// Returns the number of pages that the pass began with.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the position, the identifier and the number of pages of each region.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (usize, RegionId, u64)> + '_ {
        self.parts.iter().enumerate().map(|(position, part)| (position, part.id, part.first.len()))
    }

    /// Returns true if any page of the region at `position` still awaits `turn`.
    pub(crate) fn has(&self, position: usize, turn: PageTurn) -> bool {
        self.of(position, turn).left() > 0
    }

    fn of(&self, position: usize, turn: PageTurn) -> &ClaimBitmap {
        let part = &self.parts[position];
        match turn {
            PageTurn::First => &part.first,
            PageTurn::Last => &part.last,
        }
    }

    /// Takes the remaining pages of `chunk` that await `turn` into `mine`, a bitmap of the region.
    /// Returns true if there was any.
    ///
    /// `chunk` must begin at a multiple of 64.
    pub(crate) fn take(&self, position: usize, turn: PageTurn, chunk: Range<u64>, mine: &mut Bitmap) -> bool {
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

    /// Takes those pages of `wanted` that still await `turn`. `wanted` is a mask of the 64 pages
    /// from `first` on. Returns the taken pages as a mask.
    pub(crate) fn take_64(&self, position: usize, turn: PageTurn, first: u64, wanted: u64) -> u64 {
        self.of(position, turn).take_64(first, wanted)
    }

    /// Returns pages that were taken to the pass, with their turn last. The pages must be
    /// protected.
    pub(crate) fn postpone(&self, position: usize, first: u64, pages: u64) {
        self.parts[position].last.give_64(first, pages);
    }

    /// Adds the pages that no thread took to `into`. The pass must have ended.
    fn add_remaining_to(&self, into: &mut PageSet) {
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

    /// Creates a pass in which the pages of `last` are postponed already.
    #[cfg(test)]
    pub(crate) fn of_parts(first: &PageSet, last: &PageSet, pages: u64) -> Self {
        let part = |((id, first), (_, last)): ((RegionId, &Bitmap), (_, &Bitmap))| Part {
            id,
            first: ClaimBitmap::new(first),
            last: ClaimBitmap::new(last),
        };
        Self { parts: first.iter().zip(last.iter()).map(part).collect(), pages }
    }

    /// Returns the pages of the region at `position` that await their first and their last turn.
    #[cfg(test)]
    pub(crate) fn sets(&self, position: usize) -> [Bitmap; 2] {
        [PageTurn::First, PageTurn::Last].map(|turn| self.of(position, turn).snapshot())
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

    fn take_all(pass: &PassPages, turn: PageTurn) -> Vec<u64> {
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
            assert_eq!(take_all(&pass, PageTurn::First).len(), 100);
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(7);
            assert_eq!(pending.count(), 1);
            assert_eq!(take_all(&pending.begin_pass(), PageTurn::First), [7]);
            assert_eq!(pending.count(), 0);
        });
    }

    #[test]
    fn pages_that_a_pass_leaves_are_sent_by_the_next() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            let pass = pending.begin_pass();
            let off = pass.take_64(0, PageTurn::First, 64, 0b111);
            pass.postpone(0, 64, off);
            assert_eq!(take_all(&pass, PageTurn::First).len(), 97);
            assert_eq!(pass.take_64(0, PageTurn::Last, 64, 0b10), 0b10);
            pending.mark_skipped(0, 64, 0b10);
            pending.end_pass();
            assert_eq!((pending.count(), pending.skipped_count()), (2, 1));
            assert_eq!(take_all(&pending.begin_pass(), PageTurn::First), [64, 66]);
            // The guest has written the page since. The next pass sends it, so it is not skipped
            // any more.
            pending.end_pass();
            pending.next().region_mut(RegionId(0)).unwrap().set(65);
            assert_eq!(pending.skipped_count(), 1);
            assert_eq!(take_all(&pending.begin_pass(), PageTurn::First), [65]);
            assert_eq!(pending.skipped_count(), 0);
        });
    }

    #[test]
    fn paused_guest_has_only_pages_skipped_that_are_to_be_sent() {
        unscheduled(|| {
            let mut pending = PendingPages::everything(&layout());
            take_all(&pending.begin_pass(), PageTurn::First);
            pending.end_pass();
            pending.next().union(&set(&[1, 2, 3]));
            assert_eq!(pending.skip(&set(&[2, 4, 9])), 1);
            assert_eq!(*pending.skipped(), set(&[2]));
            assert_eq!(pending.take_all(PageSet::empty(&layout())), set(&[1, 3]));
        });
    }
}
