//! Bitmap from which threads claim pages, so that exactly one thread gets each page.

use crate::bitmap::BLOCK_PAGES;
use crate::scan::BLOCK_WORDS;
use crate::scan::walk::take_index;
use crate::words::AtomicWords;
use crate::{Bitmap, for_each_word, place, words_for};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Set from which threads claim pages. If several threads want the same page, exactly one of them
/// gets it.
///
/// One atomic read-modify-write takes a page out of the set, and reports success only to the thread
/// that cleared the bit. That thread then holds the page, and no other thread may put the page back
/// ([`give_64`](Self::give_64)). Therefore, at any instant, each page of the original set is either
/// in the bitmap or held by one thread.
///
/// A summary has one bit for each block of 4096 pages, so that a search for pages skips empty
/// blocks. The bit is set before a page of its block is put into the bitmap, and is never cleared.
///
/// All operations are sequentially consistent. For example, suppose that one thread sets a flag
/// elsewhere and then reads this bitmap, with a fence in between, while another thread takes a page
/// and then reads the flag. Then at least one of the two threads sees the action of the other.
#[derive(Debug)]
pub struct ClaimBitmap {
    words: AtomicWords,
    /// Bit `b % 64` of word `b / 64` is clear only if block `b` has never had a page.
    summary: AtomicWords,
    len: u64,
    left: AtomicU64,
}

impl ClaimBitmap {
    /// Creates a bitmap of the pages in `set`.
    #[must_use]
    pub fn new(set: Bitmap) -> Self {
        let (len, left) = (set.len(), AtomicU64::new(set.count()));
        let (flat, summary) = set.into_parts();
        Self { words: flat.into_words().into(), summary: summary.into_words().into(), len, left }
    }

    /// Creates a bitmap of `len` pages that has none of them.
    #[must_use]
    pub fn empty(len: u64) -> Self {
        let summary = AtomicWords::zeroed(words_for(len.div_ceil(BLOCK_PAGES)));
        Self { words: AtomicWords::zeroed(words_for(len)), summary, len, left: AtomicU64::new(0) }
    }

    /// Returns the number of pages that the bitmap covers, claimed or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether no page is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.left() == 0
    }

    /// Returns the number of pages that are left.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::SeqCst)
    }

    /// Returns whether `page` is still in the bitmap. Returns false for a page beyond the end.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        page < self.len && self.words[word].load(Ordering::SeqCst) & bit != 0
    }

    /// Returns those of the 64 pages from page `64 * index` on that are left. Pages beyond the end
    /// are never left.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.words.get(index).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Returns the first page at or after `page` that may be in the bitmap, or `None` if there is
    /// none. All pages between `page` and the result are not in the bitmap.
    #[must_use]
    pub fn next_block(&self, page: u64) -> Option<u64> {
        let (mut at, bit) = place(page / BLOCK_PAGES);
        let mut from = !(bit - 1);
        loop {
            let mut blocks = self.summary.get(at)?.load(Ordering::SeqCst) & from;
            if blocks != 0 {
                let block = (at * 64 + take_index(&mut blocks)) as u64;
                return Some((block * BLOCK_PAGES).max(page)).filter(|page| *page < self.len);
            }
            (at, from) = (at + 1, u64::MAX);
        }
    }

    /// Returns whether the bitmap still contains any page of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn any(&self, range: Range<u64>) -> bool {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        let mut found = 0;
        for_each_word(range, |word, mask| found |= self.words[word].load(Ordering::SeqCst) & mask);
        found != 0
    }

    /// Takes `page` if it is still in the bitmap, and returns whether this call took the page.
    /// Returns false for a page beyond the end.
    pub fn take(&self, page: u64) -> bool {
        if !self.test(page) {
            return false;
        }
        let (word, bit) = place(page);
        let taken = self.words[word].fetch_and(!bit, Ordering::SeqCst) & bit != 0;
        if taken {
            self.left.fetch_sub(1, Ordering::SeqCst);
        }
        taken
    }

    /// Takes those of the 64 pages from `first` on that are set in `wanted` and still in the
    /// bitmap, and returns them. Bit `i` of `wanted` and of the result is page `first + i`. Pages
    /// beyond the end are never taken.
    ///
    /// # Panics
    /// Panics if `first` is not a multiple of 64.
    pub fn take_64(&self, first: u64, wanted: u64) -> u64 {
        assert!(first.is_multiple_of(64), "page {first} begins no word");
        let (word, _) = place(first);
        let Some(word) = self.words.get(word) else { return 0 };
        // If the wanted pages are already gone, the word is only read, because a read-modify-write
        // would take its cache line from other threads.
        if word.load(Ordering::SeqCst) & wanted == 0 {
            return 0;
        }
        let bits = word.fetch_and(!wanted, Ordering::SeqCst) & wanted;
        self.left.fetch_sub(bits.count_ones().into(), Ordering::SeqCst);
        bits
    }

    /// Puts `pages`, all of which the caller must hold, back into the bitmap. Bit `i` of `pages` is
    /// page `first + i`.
    ///
    /// # Panics
    /// Panics if `first` is not a multiple of 64, or a page lies beyond the end.
    pub fn give_64(&self, first: u64, pages: u64) {
        if pages == 0 {
            return;
        }
        assert!(first.is_multiple_of(64), "page {first} begins no word");
        let end = first + 64 - u64::from(pages.leading_zeros());
        assert!(end <= self.len, "page {} of {}", end - 1, self.len);
        let (word, _) = place(first);
        let (at, block) = place((word / BLOCK_WORDS) as u64);
        if self.summary[at].load(Ordering::SeqCst) & block == 0 {
            self.summary[at].fetch_or(block, Ordering::SeqCst);
        }
        // Count the pages before they can be taken. Thus the count never falls below 0, and a
        // bitmap that has pages does not look empty.
        self.left.fetch_add(pages.count_ones().into(), Ordering::SeqCst);
        let before = self.words[word].fetch_or(pages, Ordering::SeqCst);
        debug_assert_eq!(before & pages, 0, "the caller gave a page that it did not hold");
    }

    /// Takes all pages of `range` that are still in the bitmap. Returns their number, and whether
    /// this call took the last page of the bitmap.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn take_range(&self, range: Range<u64>) -> (u64, bool) {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        let mut taken = 0;
        for_each_word(range, |word, mask| {
            let bits = self.words[word].fetch_and(!mask, Ordering::SeqCst) & mask;
            taken += u64::from(bits.count_ones());
        });
        let last = taken > 0 && self.left.fetch_sub(taken, Ordering::SeqCst) == taken;
        (taken, last)
    }

    /// Takes all pages of `range` that are still in the bitmap, adds them to `into`, and returns
    /// their number. Words without such pages are only read.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`, or `into` is of another length.
    pub fn take_range_into(&self, range: Range<u64>, into: &mut Bitmap) -> u64 {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        assert_eq!(self.len, into.len(), "bitmaps of the same region");
        let mut taken = 0;
        for_each_word(range, |index, mask| {
            let word = &self.words[index];
            if word.load(Ordering::SeqCst) & mask != 0 {
                let bits = word.fetch_and(!mask, Ordering::SeqCst) & mask;
                into.union_word(index, bits);
                taken += u64::from(bits.count_ones());
            }
        });
        if taken > 0 {
            self.left.fetch_sub(taken, Ordering::SeqCst);
        }
        taken
    }

    /// Returns the pages that are left. The result may or may not include pages that other threads
    /// take during the call.
    #[must_use]
    pub fn snapshot(&self) -> Bitmap {
        let mut left = Bitmap::new(self.len);
        for (at, word) in self.summary.iter().enumerate() {
            let mut blocks = word.load(Ordering::SeqCst);
            while blocks != 0 {
                let first = (at * 64 + take_index(&mut blocks)) * BLOCK_WORDS;
                let words = &self.words[first..self.words.len().min(first + BLOCK_WORDS)];
                for (index, word) in (first..).zip(words) {
                    left.union_word(index, word.load(Ordering::SeqCst));
                }
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(len: u64, pages: &[u64]) -> Bitmap {
        let mut set = Bitmap::new(len);
        for page in pages.iter().filter(|page| **page < len) {
            set.set(*page);
        }
        set
    }

    #[test]
    fn search_skips_blocks_that_never_had_a_page() {
        let claims = ClaimBitmap::new(set(1 << 20, &[5, 500_000]));
        assert_eq!(claims.next_block(0), Some(0));
        assert_eq!(claims.next_block(7), Some(7));
        assert_eq!(claims.next_block(4096), Some(500_000 / 4096 * 4096));
        assert_eq!(claims.next_block(600_000), None);
        claims.give_64(640_000, 1);
        assert_eq!(claims.next_block(600_000), Some(640_000 / 4096 * 4096));
        assert_eq!(claims.next_block(1 << 20), None);
        let empty = ClaimBitmap::empty(100);
        assert_eq!((empty.next_block(0), empty.left()), (None, 0));
        empty.give_64(64, 0b110);
        assert_eq!((empty.next_block(0), empty.left()), (Some(0), 2));
    }

    proptest! {
        #[test]
        fn taken_pages_are_gone_and_counted(
            len in 1u64..300,
            pages in prop::collection::vec(0u64..300, 0..100),
            steps in prop::collection::vec((0u8..5, 0u64..310, 0u64..80, any::<u64>()), 0..60),
        ) {
            let mut model = set(len, &pages);
            let claims = ClaimBitmap::new(model.clone());
            for (what, at, count, wanted) in steps {
                match what {
                    0 => prop_assert_eq!(claims.take(at), at < len && model.test_and_clear(at)),
                    1 => {
                        let first = at / 64 * 64;
                        let want: u64 = (0..64)
                            .filter(|i| wanted >> i & 1 == 1 && first + i < len && model.test_and_clear(first + i))
                            .map(|i| 1 << i)
                            .sum();
                        prop_assert_eq!(claims.take_64(first, wanted), want);
                    }
                    2 => {
                        let first = at / 64 * 64;
                        let give: u64 = (0..64)
                            .filter(|i| wanted >> i & 1 == 1 && first + i < len && !model.test(first + i))
                            .map(|i| 1 << i)
                            .sum();
                        (0..64).filter(|i| give >> i & 1 == 1).for_each(|i| { model.set(first + i); });
                        claims.give_64(first, give);
                    }
                    3 => {
                        let range = at.min(len)..(at + count).min(len);
                        let (mut into, mut want) = (Bitmap::new(len), Bitmap::new(len));
                        model.runs_in(range.clone()).for_each(|run| want.set_range(run));
                        prop_assert_eq!(claims.take_range_into(range.clone(), &mut into), want.count());
                        prop_assert_eq!(into, want);
                        model.clear_range(range);
                    }
                    _ => {
                        let range = at.min(len)..(at + count).min(len);
                        let want = model.count_range(range.clone());
                        model.clear_range(range.clone());
                        prop_assert_eq!(claims.take_range(range), (want, want > 0 && model.is_empty()));
                    }
                }
                let range = at.min(len)..(at + count).min(len);
                prop_assert_eq!(claims.any(range.clone()), model.count_range(range) > 0);
                prop_assert_eq!(claims.left(), model.count());
                prop_assert_eq!(&claims.snapshot(), &model);
                // The search never skips a page that is left.
                let next = claims.next_block(at).unwrap_or(len);
                prop_assert_eq!(model.count_range(at.min(len)..next.max(at).min(len)), 0);
            }
        }
    }

    #[test]
    fn each_page_goes_to_exactly_one_of_many_threads() {
        const PAGES: u64 = 10_000;
        let claims = ClaimBitmap::new(Bitmap::full(PAGES));
        let by_page = || (0..PAGES).filter(|page| claims.take(*page)).count() as u64;
        let by_word = || {
            (0..PAGES).step_by(64).map(|first| u64::from(claims.take_64(first, u64::MAX).count_ones())).sum()
        };
        let by_range =
            || (0..PAGES).step_by(10).map(|first| claims.take_range(first..first + 10).0).sum::<u64>();
        let taken: u64 = std::thread::scope(|scope| {
            let takers =
                [scope.spawn(by_page), scope.spawn(by_word), scope.spawn(by_range), scope.spawn(by_page)];
            takers.into_iter().map(|taker| taker.join().unwrap()).sum()
        });
        assert_eq!((taken, claims.left()), (PAGES, 0));
    }
}
