//! Free pages: pages whose content the guest does not need.

use crate::VmError;
use crate::{Gpa, Layout, PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, RegionId};
use std::fmt::Debug;
use vmferry_bitmap::Bitmap;

/// Way in which a source of free pages answers a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerMode {
    /// The source answers at once, from a record that the guest keeps up to date. The guest may be
    /// running or paused. [`FreePages::poll`] returns the whole answer within about a millisecond.
    AtOnce,
    /// The guest itself answers, and must run to do so. The answer may never arrive.
    ByGuest,
}

/// Answer, or part of an answer, from [`FreePages::poll`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Number of the question, as passed to [`FreePages::request`].
    pub question: u64,
    /// True for the last part of the answer.
    pub complete: bool,
}

/// Source of free pages, such as a balloon device.
///
/// # Contract
/// > For each page of an answer there was an instant at which the page was free: after that
/// > instant, the guest does not read a byte of the page before it has written that byte. The
/// > instant lies after the call of [`request`](Self::request) with the number of the question, and
/// > before the return of the [`poll`](Self::poll) that reported the page.
///
/// A guest that breaks this contract harms only itself.
///
/// A guest breaks this contract if it expects a free page to keep a certain content, as with page
/// poisoning, or with memory that is set to zeros when it is freed (`VIRTIO_BALLOON_F_PAGE_POISON`
/// with any value). Such a guest must have no source of free pages, because a free page reads on
/// the target as zeros *or as an old version of the page*.
///
/// The engine calls all methods on one thread. No method may block until the guest acts.
pub trait FreePages: Send + Debug {
    /// Returns the way in which this source answers. The result may change only from
    /// [`AtOnce`](AnswerMode::AtOnce) to [`ByGuest`](AnswerMode::ByGuest), in a call of
    /// [`poll`](Self::poll) that returns a complete answer.
    fn answer_mode(&self) -> AnswerMode;

    /// Asks which pages are free, and returns without waiting for the answer. If an earlier
    /// question is still open, this call closes it and drops the rest of its answer. The engine
    /// passes a different number as `question` each time.
    ///
    /// # Errors
    /// If the guest cannot be asked. The migration continues without free pages.
    fn request(&mut self, question: u64) -> Result<(), VmError>;

    /// Adds to `report` the free pages that the guest has named since the last call. All pages that
    /// one call adds belong to the same question. Returns `None` if there is no new part of an
    /// answer.
    ///
    /// # Errors
    /// If the source cannot answer any more. The engine then calls [`stop`](Self::stop), and the
    /// migration continues without free pages.
    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError>;

    /// Closes the open question, if there is one. Afterwards the guest may use the pages that it
    /// kept unused for the answer. The engine calls this method before it pauses the guest, and at
    /// the end of every migration.
    fn stop(&mut self);
}

/// Free pages of an answer.
///
/// The report contains only pages of the guest's layout. It counts other pages that the answer
/// names as [`outside`](Self::outside).
#[derive(Debug)]
pub struct FreeReport {
    layout: Layout,
    pages: PageSet,
    outside: u64,
    /// True if pages were added since the last [`clear`](Self::clear).
    used: bool,
}

impl FreeReport {
    /// Returns an empty report about memory with this layout.
    #[must_use]
    pub fn new(layout: &Layout) -> Self {
        Self { layout: layout.clone(), pages: PageSet::empty(layout), outside: 0, used: false }
    }

    /// Returns the free pages.
    #[must_use]
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// Returns the number of pages that the answer names and that are not in the guest's layout.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.outside
    }

    /// Removes all pages, for the next question.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.used) {
            self.pages.clear();
            self.outside = 0;
        }
    }

    /// Adds the pages of `pages`. If `pages` is a set for another layout, no page is added, and all
    /// of its pages count as [`outside`](Self::outside).
    pub fn add_pages(&mut self, pages: &PageSet) {
        self.used = true;
        let fits = |((id, own), (other, map)): ((RegionId, &Bitmap), (RegionId, &Bitmap))| {
            id == other && own.len() == map.len()
        };
        if self.pages.iter().count() == pages.iter().count() && self.pages.iter().zip(pages.iter()).all(fits)
        {
            self.pages.union(pages);
        } else {
            self.outside = self.outside.saturating_add(pages.count());
        }
    }

    /// Adds the pages of `run`. Pages that the region does not have, or whose region does not
    /// exist, count as [`outside`](Self::outside).
    pub fn add(&mut self, region: RegionId, run: PageRun) {
        self.used = true;
        let pages = self.layout.region(region).map_or(0, crate::Region::pages);
        let end = run.first.0.saturating_add(run.count).min(pages);
        let range = run.first.0.min(end)..end;
        self.outside = self.outside.saturating_add(run.count - (range.end - range.start));
        if let Some(map) = self.pages.region_mut(region) {
            map.set_range(range);
        }
    }

    /// Adds the pages that lie completely within the `len` bytes that start at `gpa`. Pages in
    /// holes between regions count as [`outside`](Self::outside).
    pub fn add_range(&mut self, gpa: Gpa, len: u64) {
        self.used = true;
        let first = gpa.0.div_ceil(PAGE_SIZE);
        let end = gpa.0.saturating_add(len) >> PAGE_SHIFT;
        let mut outside = end.saturating_sub(first);
        for region in self.layout.regions() {
            let base = region.gpa.0 >> PAGE_SHIFT;
            let (from, to) = (first.max(base), end.min(base + region.pages()));
            if from < to {
                outside -= to - from;
                if let Some(map) = self.pages.region_mut(region.id) {
                    map.set_range(from - base..to - base);
                }
            }
        }
        self.outside = self.outside.saturating_add(outside);
    }

    /// Adds the pages that are set in a bitmap of `pages` bits. Bit `n` stands for page `n` of the
    /// guest's memory, counted from 0 in the order of addresses. Holes between regions have no
    /// bits, and bits beyond the last page are ignored.
    ///
    /// `word(i)` returns the 64 bits from bit `64 * i` on. It may be called several times for the
    /// same word, and the word may change between these calls.
    pub fn add_map(&mut self, pages: u64, word: impl Fn(u64) -> u64) {
        self.used = true;
        let mut begin = 0;
        for region in self.layout.regions() {
            let Some(map) = self.pages.region_mut(region.id) else { continue };
            let have = pages.saturating_sub(begin).min(region.pages());
            for at in (0..have).step_by(64) {
                let (from, shift) = ((begin + at) / 64, (begin + at) % 64);
                let mut bits = word(from) >> shift;
                if shift > 0 && (from + 1) * 64 < pages {
                    bits |= word(from + 1) << (64 - shift);
                }
                let bits = bits & (u64::MAX >> (64 - (have - at).min(64)));
                if bits != 0 {
                    map.union_word(usize::try_from(at / 64).unwrap_or(usize::MAX), bits);
                }
            }
            begin += region.pages();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;
    use proptest::prelude::*;

    fn layout(low: u64, high: u64) -> Layout {
        let region = |id, gpa: u64, pages: u64| Region { id: RegionId(id), gpa: Gpa(gpa), len: pages << 12 };
        Layout::new(vec![region(0, 0, low), region(5, 4 << 30, high)]).unwrap()
    }

    fn count(report: &FreeReport, id: u32) -> u64 {
        report.pages().region(RegionId(id)).unwrap().count()
    }

    #[test]
    fn what_lies_outside_memory_is_counted_and_nothing_else() {
        let mut report = FreeReport::new(&layout(100, 50));
        report.add(RegionId(0), PageRun::from(90..110));
        assert_eq!((count(&report, 0), report.outside()), (10, 10));
        report.add(RegionId(1), PageRun::from(0..7));
        report.add(RegionId(5), PageRun::from(u64::MAX - 3..u64::MAX));
        assert_eq!((report.pages().count(), report.outside()), (10, 20));
        report.clear();
        // The range starts in the middle of page 98, spans the hole between the regions, and ends
        // at the last address.
        report.add_range(Gpa((98 << 12) + 1), u64::MAX);
        let whole = (u64::MAX >> 12) - 99;
        assert_eq!((count(&report, 0), count(&report, 5), report.outside()), (1, 50, whole - 51));
        report.clear();
        report.add_pages(&PageSet::full(&layout(100, 51)));
        assert_eq!((report.pages().count(), report.outside()), (0, 151));
        report.add_pages(&PageSet::full(&layout(100, 50)));
        assert_eq!((report.pages().count(), report.outside()), (150, 151));
        report.clear();
        for (gpa, len) in [(1, 4094), (0, 4095), (4095, 4096), (u64::MAX, u64::MAX), (u64::MAX, 0)] {
            report.add_range(Gpa(gpa), len);
        }
        assert_eq!((report.pages().count(), report.outside()), (0, 0));
    }

    proptest! {
        #[test]
        fn map_bits_skip_the_holes_between_regions(
            low in 1u64..300,
            high in 1u64..300,
            words in prop::collection::vec(any::<u64>(), 12),
            pages in 0u64..700,
        ) {
            let mut report = FreeReport::new(&layout(low, high));
            report.add_map(pages, |at| words[usize::try_from(at).unwrap()]);
            let bit = |n: u64| n < pages && words[usize::try_from(n / 64).unwrap()] >> (n % 64) & 1 == 1;
            for (id, first, count) in [(0, 0, low), (5, low, high)] {
                let map = report.pages().region(RegionId(id)).unwrap();
                for page in 0..count {
                    prop_assert_eq!(map.test(page), bit(first + page));
                }
            }
        }
    }
}
