//! Pages whose content does not count, because the guest says that they are free.
//!
//! # Why no write is lost
//! A page may be left out of what is sent if there is an instant `T` with two properties:
//!
//! 1. *At `T` the page is free*: whoever uses it after `T` writes it before reading it.
//! 2. *Every write after `T` is found*: the page was protected ([`Protect`](crate::Protect)) before `T`.
//!
//! The target then has zeros or an old version of the page, which nobody reads: whoever uses the page writes it first (1), that
//! write is found by a harvest, and the page is sent (2). Nothing that was written before `T` counts.
//!
//! The source of answers promises (1) for some instant between the call of [`FreePages::ask`] and the return of the
//! [`FreePages::poll`] that brings the page. (2) is the engine's business, and not to be had for nothing: a log that is
//! "initially set" (hazards.md 3) tracks a page only after it was protected once, and to protect all of memory before the first
//! page is sent would have that page wait for 4 to 5 ms for each GiB. So the order is, in each pass:
//!
//! | step | what for |
//! |---|---|
//! | The pass begins: its pages go to the senders. | The first page waits for nothing. |
//! | A source that answers [at once](Answers::AtOnce) is asked. | To know which pages are worth the trouble; nothing is left out because of this answer. From a source that has to [ask the guest](Answers::ByGuest) an answer is dear: all pages are taken to be worth it. |
//! | Those pages are *taken* from the senders, chunk by chunk, by the atomic bit that also says who sends them. | A page that was sent must not be protected a second time: that would forget a write since. |
//! | They are protected, and put behind all others of this pass. | 4 to 5 ms/GiB, beside the senders and not before them; a page that is protected sooner than it is sent may be sent twice. |
//! | The source is asked: `T` comes after the protection. | (2) holds for whatever this answer names. |
//! | What it names, and no sender has begun with, is left out. | (1) and (2). |
//! | What it does not name is sent at the end of this pass. | Nobody waits for an answer. |
//!
//! Only pages that the pass was given ([`base`](crate::source::pending)) can be left out; what a harvest finds later is in another
//! set, which no answer touches. A pass ends with its questions: an answer that comes after it is dropped and counted, because
//! the harvest in between may have found a write to a page that it names. The page of such a write belongs to the next pass, and
//! can be left out of that one, by questions that are asked after the harvest.
//!
//! That free pages stay unused until the guest is told that they may be used (Linux isolates the pages that it hints) would make
//! a `T` as late as that, and pages could be protected when the answer has come. The engine does not count on it: a guest that is
//! short of memory takes such pages back before it is told.
//!
//! While the guest is paused nobody writes, so (2) holds for nothing: what it keeps [itself](Answers::AtOnce) is asked once more
//! after the last harvest, and its answer counts at once.
//!
//! # In postcopy
//! A page that is left out is not named among those that the target lacks. The target finds it not populated and answers a
//! fault on it with zeros; or it has an old version.

use crate::vm::VmError;
use std::fmt::Debug;
use vmferry_bitmap::Bitmap;
use vmferry_memory::{Gpa, Layout, PAGE_SHIFT, PAGE_SIZE, PageRun, PageSet, RegionId};

/// How a source of free pages answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answers {
    /// At once: it reads what the guest keeps up to date, whether the guest runs or not. Its [`FreePages::poll`] brings the whole
    /// answer, in a millisecond or so.
    AtOnce,
    /// When the guest, which must run for that, gets to it; perhaps never.
    ByGuest,
}

/// What [`FreePages::poll`] brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The question that it answers, as it was given to [`FreePages::ask`].
    pub question: u64,
    /// Nothing more comes for this question.
    pub complete: bool,
}

/// Says which pages of a guest are free.
///
/// # What it promises
/// > If a page is in an answer, there was an instant, after the call of [`ask`](Self::ask) with this question's number and before
/// > the return of the [`poll`](Self::poll) that brought the page, at which the page was free: whoever uses it after that instant
/// > writes each byte of it before reading it.
///
/// A guest that lies about that harms itself and nobody else.
///
/// A guest that expects something of a page that it has freed does not fulfil this (page poisoning, or zeros from
/// initialisation at the time of the free; `VIRTIO_BALLOON_F_PAGE_POISON` with whatever value): then there must be no source. On
/// the target such a page reads as zeros *or as an old version of it*.
///
/// One thread calls all methods; none may wait for the guest.
pub trait FreePages: Send + Debug {
    /// How it answers; does not change.
    fn answers(&self) -> Answers;

    /// Asks which pages are free, and returns at once. A question that is still open is thereby closed: what is yet to come
    /// for it is not wanted any more. `question` is another number each time.
    ///
    /// # Errors
    /// If the guest cannot be asked. The migration goes on without.
    fn ask(&mut self, question: u64) -> Result<(), VmError>;

    /// Adds to `report` what has come since the last call, of one question; `None` if nothing has.
    ///
    /// # Errors
    /// If there will be no more answers. The migration goes on without; this source is told to [`stop`](Self::stop), and asked no
    /// more.
    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError>;

    /// No more answers are wanted, and whatever the guest keeps unused for the open question may be used. Called before the guest
    /// is paused, and however the migration ends. Does nothing if no question is open.
    fn stop(&mut self);
}

/// Pages that are said to be free. Whatever is said, only pages of the guest get in.
#[derive(Debug)]
pub struct FreeReport {
    layout: Layout,
    pages: PageSet,
    outside: u64,
    /// Whether anything was added: clearing is not for nothing.
    used: bool,
}

impl FreeReport {
    /// An empty report about memory that is laid out like this.
    #[must_use]
    pub fn new(layout: &Layout) -> Self {
        Self { layout: layout.clone(), pages: PageSet::empty(layout), outside: 0, used: false }
    }

    /// The pages that are in it.
    #[must_use]
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// How many pages were named that the guest does not have.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.outside
    }

    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.used) {
            self.pages.clear();
            self.outside = 0;
        }
    }

    /// Adds the pages of `pages`, a set of the guest's memory; if it is one of other memory, nothing.
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

    /// Adds the pages of `run`.
    pub fn add(&mut self, region: RegionId, run: PageRun) {
        self.used = true;
        let pages = self.layout.region(region).map_or(0, vmferry_memory::Region::pages);
        let end = run.first.0.saturating_add(run.count).min(pages);
        let range = run.first.0.min(end)..end;
        self.outside = self.outside.saturating_add(run.count - (range.end - range.start));
        if let Some(map) = self.pages.region_mut(region) {
            map.set_range(range);
        }
    }

    /// Adds the pages that lie wholly within `len` bytes from `gpa` on; holes between regions have none.
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

    /// Adds the pages that are set in a bitmap of `pages` bits, whose bit `n` is the `n`-th page of the guest's memory by ascending
    /// address: holes have no bits. `word(i)` is asked for the bitmap's word `i`, at most twice each, which may change meanwhile.
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
    use proptest::prelude::*;
    use vmferry_memory::Region;

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
        // From the middle of the first page of a hole's neighbour, through the hole, to the end of the last address.
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
        fn a_map_is_squeezed_and_unfolded(
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
