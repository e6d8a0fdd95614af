//! The pages that are still to be sent.

use vmferry_memory::{Layout, PageSet};

/// Two sets, not one (traps.md 8): `base` is what was to be sent anyway, `since` what was harvested later. A report of
/// free pages may take pages out of `base` only, because whatever is in `since` was written after the report was asked
/// for. One set could not tell the two apart, and a late report would lose a write.
///
/// Nothing is lost with these sets either: a migration that ends without the guest having moved drops them together
/// with its tracker, and the next one begins with every page in `base` again.
#[derive(Debug)]
pub(crate) struct Pending {
    base: PageSet,
    since: PageSet,
}

impl Pending {
    /// Every page is to be sent.
    pub(crate) fn everything(layout: &Layout) -> Self {
        Self { base: PageSet::full(layout), since: PageSet::empty(layout) }
    }

    /// Where a tracker's harvest goes.
    pub(crate) fn since(&mut self) -> &mut PageSet {
        &mut self.since
    }

    /// How many pages are to be sent.
    pub(crate) fn count(&self) -> u64 {
        // `base` is empty after the first pass, and full before anything is harvested: they never overlap.
        if self.base.is_empty() { self.since.count() } else { self.base.count() }
    }

    /// Takes everything for a pass; `empty` is an empty set to go on with.
    pub(crate) fn take(&mut self, empty: PageSet) -> PageSet {
        self.base.union(&self.since);
        self.since.clear();
        std::mem::replace(&mut self.base, empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_memory::{Gpa, Region, RegionId};

    #[test]
    fn what_was_harvested_is_taken_once() {
        let layout = Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 100 << 12 }]).unwrap();
        let mut pending = Pending::everything(&layout);
        assert_eq!(pending.count(), 100);
        let mut first = pending.take(PageSet::empty(&layout));
        assert_eq!((first.count(), pending.count()), (100, 0));
        pending.since().region_mut(RegionId(0)).unwrap().set(7);
        assert_eq!(pending.count(), 1);
        first.clear();
        let second = pending.take(first);
        assert!(second.region(RegionId(0)).unwrap().test(7));
        assert_eq!((second.count(), pending.count()), (1, 0));
    }
}
