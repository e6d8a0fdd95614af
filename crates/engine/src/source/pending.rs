//! The pages that are still to be sent.

use super::flight::Flight;
use std::sync::Arc;
use vmferry_core::{Layout, PageSet};

/// Two sets, not one (hazards.md 8): `base` is what was to be sent anyway, `since` what was harvested later. An answer about
/// free pages may take pages out of `base` only, because whatever is in `since` was written after the question was asked. One
/// set could not tell the two apart, and a late answer would lose a write.
///
/// A pass takes `base` with it: from then on it is the pass's [`Flight`], which senders take pages out of. What is left of a
/// flight when its pass ends goes to `since`, before that pass's harvest.
///
/// Nothing is lost with these sets either: a migration that ends without the guest having moved drops them together
/// with its tracker, and the next one begins with every page in `base` again.
#[derive(Debug)]
pub(crate) struct Pending {
    base: PageSet,
    since: PageSet,
    flight: Option<Arc<Flight>>,
    /// Pages that were left out as free and not sent since: none of them is in the sets above, unless it was written later.
    skipped: PageSet,
    skipped_count: u64,
}

impl Pending {
    /// Every page is to be sent.
    pub(crate) fn everything(layout: &Layout) -> Self {
        let empty = || PageSet::empty(layout);
        let (since, skipped) = (empty(), empty());
        Self { base: PageSet::full(layout), since, flight: None, skipped, skipped_count: 0 }
    }

    /// Where a tracker's harvest goes.
    pub(crate) fn since(&mut self) -> &mut PageSet {
        &mut self.since
    }

    /// How many pages are to be sent.
    pub(crate) fn count(&self) -> u64 {
        if self.base.is_empty() || self.since.is_empty() {
            return self.base.count() + self.since.count();
        }
        let mut both = self.base.clone();
        both.union(&self.since);
        both.count()
    }

    /// A pass begins with everything that is to be sent.
    pub(crate) fn take_off(&mut self) -> Arc<Flight> {
        self.land();
        self.settle();
        if self.skipped_count > 0 {
            self.skipped.subtract(&self.base);
            self.recount();
        }
        let flight = Arc::new(Flight::new(&self.base));
        self.base.clear();
        self.flight = Some(Arc::clone(&flight));
        flight
    }

    /// Pages that arrived damaged are sent again, whether they are free or not: the target takes the guest only with all of what
    /// it was sent sound. The guest is paused.
    pub(crate) fn resend(&mut self, set: &PageSet) -> Arc<Flight> {
        self.land();
        self.forget_skipped(set);
        let flight = Arc::new(Flight::new(set));
        self.flight = Some(Arc::clone(&flight));
        flight
    }

    /// The pass under way has ended: what it left is still to be sent.
    pub(crate) fn land(&mut self) {
        if let Some(flight) = self.flight.take() {
            flight.left_over(&mut self.since);
        }
    }

    /// The pass that is under way.
    pub(crate) fn flight(&self) -> Option<&Arc<Flight>> {
        self.flight.as_ref()
    }

    /// Whatever was harvested is now what is to be sent anyway: questions that are asked from now on may take it out.
    pub(crate) fn settle(&mut self) {
        self.base.union(&self.since);
        self.since.clear();
    }

    /// Takes everything, for the target to ask for it; `empty` is an empty set to go on with.
    pub(crate) fn take(&mut self, empty: PageSet) -> PageSet {
        self.land();
        self.settle();
        let taken = std::mem::replace(&mut self.base, empty);
        self.forget_skipped(&taken);
        taken
    }

    /// Leaves out what is to be sent anyway and is in `free`; returns how many pages. The guest is paused, and was when it was
    /// asked what is free.
    pub(crate) fn leave_out(&mut self, free: &PageSet) -> u64 {
        let mut out = self.base.clone();
        out.retain(free);
        self.base.subtract(&out);
        self.skipped.union(&out);
        self.recount()
    }

    /// Pages that a pass had are left out: of the region at `position`, the 64 from `first` on.
    pub(crate) fn left_out(&mut self, position: usize, first: u64, pages: u64) {
        if let Some((_, map)) = self.skipped.iter_mut().nth(position) {
            map.union_word(usize::try_from(first / 64).unwrap_or(usize::MAX), pages);
            self.skipped_count += u64::from(pages.count_ones());
        }
    }

    /// Pages that are sent after all, or named for the target to ask for.
    pub(crate) fn forget_skipped(&mut self, sent: &PageSet) {
        if self.skipped_count > 0 {
            self.skipped.subtract(sent);
            self.recount();
        }
    }

    fn recount(&mut self) -> u64 {
        let before = std::mem::replace(&mut self.skipped_count, self.skipped.count());
        self.skipped_count.saturating_sub(before)
    }

    /// Pages that were left out, and not sent since.
    pub(crate) fn skipped(&self) -> &PageSet {
        &self.skipped
    }

    /// How many these are.
    pub(crate) fn skipped_count(&self) -> u64 {
        self.skipped_count
    }

    /// These sets: `base`, `since`, `skipped`. For models that keep them elsewhere between two steps.
    #[cfg(test)]
    pub(crate) fn of([base, since, skipped]: [PageSet; 3], flight: Option<Arc<Flight>>) -> Self {
        let skipped_count = skipped.count();
        Self { base, since, flight, skipped, skipped_count }
    }

    #[cfg(test)]
    pub(crate) fn sets(&self) -> [&PageSet; 3] {
        [&self.base, &self.since, &self.skipped]
    }
}

#[cfg(test)]
mod tests {
    use super::super::flight::Turn;
    use super::*;
    use crate::sync::unscheduled;
    use vmferry_bitmap::Bitmap;
    use vmferry_core::{Gpa, Region, RegionId};

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

    fn take_all(flight: &Flight, turn: Turn) -> Vec<u64> {
        let mut mine = Bitmap::new(100);
        flight.take(0, turn, 0..100, &mut mine);
        mine.bits().collect()
    }

    #[test]
    fn what_was_harvested_is_taken_once() {
        unscheduled(|| {
            let mut pending = Pending::everything(&layout());
            assert_eq!(pending.count(), 100);
            let flight = pending.take_off();
            assert_eq!((flight.pages(), pending.count()), (100, 0));
            assert_eq!(take_all(&flight, Turn::First).len(), 100);
            pending.land();
            pending.since().region_mut(RegionId(0)).unwrap().set(7);
            assert_eq!(pending.count(), 1);
            assert_eq!(take_all(&pending.take_off(), Turn::First), [7]);
            assert_eq!(pending.count(), 0);
        });
    }

    #[test]
    fn what_a_pass_leaves_is_sent_by_the_next() {
        unscheduled(|| {
            let mut pending = Pending::everything(&layout());
            let flight = pending.take_off();
            let off = flight.take_64(0, Turn::First, 64, 0b111);
            flight.put_off(0, 64, off);
            assert_eq!(take_all(&flight, Turn::First).len(), 97);
            assert_eq!(flight.take_64(0, Turn::Last, 64, 0b10), 0b10);
            pending.left_out(0, 64, 0b10);
            pending.land();
            assert_eq!((pending.count(), pending.skipped_count()), (2, 1));
            assert_eq!(take_all(&pending.take_off(), Turn::First), [64, 66]);
            // Written since: it is skipped no more.
            pending.since().region_mut(RegionId(0)).unwrap().set(65);
            assert_eq!(pending.skipped_count(), 1);
            assert_eq!(take_all(&pending.take_off(), Turn::First), [65]);
            assert_eq!(pending.skipped_count(), 0);
        });
    }

    #[test]
    fn an_answer_leaves_out_only_what_was_settled_when_it_was_asked_for() {
        unscheduled(|| {
            let mut pending = Pending::everything(&layout());
            take_all(&pending.take_off(), Turn::First);
            pending.land();
            pending.since().union(&set(&[1, 2, 3]));
            pending.settle();
            pending.since().union(&set(&[4, 5]));
            assert_eq!(pending.leave_out(&set(&[2, 4, 9])), 1);
            assert_eq!(*pending.skipped(), set(&[2]));
            assert_eq!(pending.take(PageSet::empty(&layout())), set(&[1, 3, 4, 5]));
        });
    }
}
