//! Bitmap without a summary.

use crate::scan::Scanner;
use crate::scan::walk::{AndNot, Merge, Or};
use crate::words::Words;
use crate::{FlatBits, FlatRuns, Part, for_each_part, for_each_word, place, tail_mask, words_for};
use std::ops::Range;

/// Bitmap of a fixed number of pages without a summary. [`Bitmap`](crate::Bitmap) consists of two
/// of these, and benches compare it with this type.
///
/// Invariant: bits at and beyond `len` in the last word are zero, so counting and scanning need no
/// special case.
#[derive(Clone, PartialEq, Eq)]
pub struct FlatBitmap {
    words: Words,
    len: u64,
}

impl std::fmt::Debug for FlatBitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FlatBitmap({} of {} set)", self.count(), self.len)
    }
}

impl FlatBitmap {
    /// Creates an empty bitmap of `len` pages.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self { words: Words::zeroed(words_for(len)), len }
    }

    /// Creates a bitmap of `len` pages that are all set.
    #[must_use]
    pub fn full(len: u64) -> Self {
        let mut map = Self::new(len);
        map.set_range(0..len);
        map
    }

    /// Returns the number of pages that the bitmap covers, set or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether no page is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !Scanner::best().any(&self.words)
    }

    /// Returns the words, lowest pages first. Bits at and beyond `len` are zero.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the words.
    pub(crate) fn into_words(self) -> Words {
        self.words
    }

    /// Returns whether `page` is set.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.words[word] & bit != 0
    }

    /// Sets `page` and returns whether it was set before.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn set(&mut self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        let was = self.words[word] & bit != 0;
        self.words[word] |= bit;
        was
    }

    /// Clears `page` and returns whether it was set before.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn test_and_clear(&mut self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        let was = self.words[word] & bit != 0;
        self.words[word] &= !bit;
        was
    }

    /// Sets every page of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn set_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_part(range, |part| match part {
            Part::Cut(word, mask) => self.words[word] |= mask,
            Part::Whole(words) => self.words[words].fill(u64::MAX),
        });
    }

    /// Clears every page of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn clear_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_part(range, |part| match part {
            Part::Cut(word, mask) => self.words[word] &= !mask,
            Part::Whole(words) => self.words[words].fill(0),
        });
    }

    /// Clears every page.
    pub fn clear_all(&mut self) {
        self.words.fill(0);
    }

    /// Returns the number of set pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        Scanner::best().count(&self.words)
    }

    /// Returns the number of set pages in `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn count_range(&self, range: Range<u64>) -> u64 {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        let mut count = 0;
        for_each_part(range, |part| match part {
            Part::Cut(word, mask) => count += u64::from((self.words[word] & mask).count_ones()),
            Part::Whole(words) => count += Scanner::best().count(&self.words[words]),
        });
        count
    }

    /// Adds the pages of `other` to the set.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn union(&mut self, other: &Self) {
        self.union_range(0..self.len, other);
    }

    /// Removes the pages of `other` from the set.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn subtract(&mut self, other: &Self) {
        self.subtract_range(0..self.len, other);
    }

    /// Adds the pages of `range` that are set in `other`.
    ///
    /// # Panics
    /// Panics if the lengths differ or `range` ends beyond `len`.
    pub fn union_range(&mut self, range: Range<u64>, other: &Self) {
        assert_eq!(self.len, other.len, "bitmaps of the same region");
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_part(range, |part| match part {
            Part::Cut(word, mask) => self.words[word] |= other.words[word] & mask,
            Part::Whole(words) => {
                Scanner::best().work(Or { into: &mut self.words[words.clone()], from: &other.words[words] })
            }
        });
    }

    /// Removes the pages of `range` that are set in `other`.
    ///
    /// # Panics
    /// Panics if the lengths differ or `range` ends beyond `len`.
    pub fn subtract_range(&mut self, range: Range<u64>, other: &Self) {
        assert_eq!(self.len, other.len, "bitmaps of the same region");
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_part(range, |part| match part {
            Part::Cut(word, mask) => self.words[word] &= !(other.words[word] & mask),
            Part::Whole(words) => Scanner::best()
                .work(AndNot { into: &mut self.words[words.clone()], from: &other.words[words] }),
        });
    }

    /// Clears the pages of `range` that are not set in `other`. Pages outside `range` keep their
    /// state.
    ///
    /// # Panics
    /// Panics if the lengths differ or `range` ends beyond `len`.
    pub fn retain_range(&mut self, range: Range<u64>, other: &Self) {
        assert_eq!(self.len, other.len, "bitmaps of the same region");
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_word(range, |word, mask| self.words[word] &= other.words[word] | !mask);
    }

    /// Adds the pages that are set in `log`, a dirty log in the format of the kernel whose first
    /// bit is page 0. The log may be shorter or longer than the bitmap. FlatBits beyond `len` are
    /// ignored.
    pub fn union_words(&mut self, log: &[u64]) {
        Scanner::best().work(Or { into: &mut self.words, from: log });
        self.trim();
    }

    /// Adds the pages that are set in `log`, a dirty log whose first bit is page `64 * first`.
    /// FlatBits beyond `len` are ignored.
    ///
    /// # Panics
    /// Panics if the log has words beyond the last word of this bitmap.
    pub fn union_words_at(&mut self, first: usize, log: &[u64]) {
        let into = &mut self.words[first..first + log.len()];
        Scanner::best().work(Or { into, from: log });
        self.trim();
    }

    /// Adds the pages that are set in `bits`, whose first bit is page `64 * word`. FlatBits beyond
    /// `len` are ignored.
    ///
    /// # Panics
    /// Panics if the bitmap has no such word.
    pub fn union_word(&mut self, word: usize, bits: u64) {
        self.words[word] |= bits;
        if word + 1 == self.words.len() {
            self.trim();
        }
    }

    fn trim(&mut self) {
        if let Some(last) = self.words.last_mut() {
            *last &= tail_mask(self.len);
        }
    }

    /// Adds the pages that are set in `log`, a dirty log whose first bit is page `64 * first`, and
    /// reports the pages that are new.
    ///
    /// Calls `each` with the maximal runs of the pages that were not set before, in order. Merging
    /// and reporting take one pass over the log. Where the log is empty, the pass does not read the
    /// bitmap. FlatBits beyond `len` are ignored.
    ///
    /// # Panics
    /// Panics if the log has words beyond the last word of this bitmap.
    pub fn merge_words(&mut self, first: usize, log: &[u64], each: impl FnMut(Range<u64>)) {
        let into = &mut self.words[first..first + log.len()];
        let ends = first + log.len() == words_for(self.len);
        let keep_last = if ends { tail_mask(self.len) } else { u64::MAX };
        Scanner::best().work(Merge { into, log, first, keep_last, each });
    }

    /// Returns an iterator over the set pages as maximal runs, in order.
    #[must_use]
    pub fn runs(&self) -> FlatRuns<'_> {
        self.runs_in(0..self.len)
    }

    /// Returns an iterator over the set pages of `range` as maximal runs, in order. FlatRuns are
    /// cut at the ends of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn runs_in(&self, range: Range<u64>) -> FlatRuns<'_> {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        Scanner::best().runs(&self.words, range)
    }

    /// Calls `each` with every run that [`Self::runs`] returns. If `each` accumulates a value,
    /// `runs().fold()` is faster.
    pub fn for_each_run(&self, each: impl FnMut(Range<u64>)) {
        Scanner::best().for_each_run(&self.words, 0..self.len, each);
    }

    /// Returns an iterator over the set pages, in order.
    #[must_use]
    pub fn bits(&self) -> FlatBits<'_> {
        self.bits_in(0..self.len)
    }

    /// Returns an iterator over the set pages of `range`, in order.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn bits_in(&self, range: Range<u64>) -> FlatBits<'_> {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        Scanner::best().bits(&self.words, range)
    }

    /// Calls `each` with every page that [`Self::bits`] returns. If `each` accumulates a value,
    /// `bits().fold()` is faster.
    pub fn for_each_bit(&self, each: impl FnMut(u64)) {
        Scanner::best().for_each_bit(&self.words, 0..self.len, each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn naive_runs(bits: &[bool]) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (i, _) in bits.iter().enumerate().filter(|(_, set)| **set) {
            let i = i as u64;
            match runs.last_mut() {
                Some(run) if run.end == i => run.end = i + 1,
                _ => runs.push(i..i + 1),
            }
        }
        runs
    }

    fn from_bools(bits: &[bool]) -> FlatBitmap {
        let mut map = FlatBitmap::new(bits.len() as u64);
        for (i, _) in bits.iter().enumerate().filter(|(_, set)| **set) {
            map.set(i as u64);
        }
        map
    }

    proptest! {
        #[test]
        fn runs_are_the_maximal_runs(bits in prop::collection::vec(prop::bool::weighted(0.3), 0..500)) {
            let map = from_bools(&bits);
            prop_assert_eq!(map.runs().collect::<Vec<_>>(), naive_runs(&bits));
            prop_assert_eq!(map.count(), bits.iter().filter(|b| **b).count() as u64);
            prop_assert_eq!(map.is_empty(), !bits.contains(&true));
        }

        #[test]
        fn runs_in_a_range_equal_the_runs_of_the_bitmap_cut_to_it(
            bits in prop::collection::vec(prop::bool::weighted(0.8), 1..500), a in 0u64..500, b in 0u64..500,
        ) {
            let len = bits.len() as u64;
            let (a, b) = (a.min(b).min(len), a.max(b).min(len));
            let cut: Vec<bool> = bits.iter().enumerate().map(|(i, s)| *s && (a..b).contains(&(i as u64))).collect();
            let map = from_bools(&bits);
            prop_assert_eq!(map.runs_in(a..b).collect::<Vec<_>>(), naive_runs(&cut));
            prop_assert_eq!(map.count_range(a..b), from_bools(&cut).count());
        }

        #[test]
        fn set_range_and_clear_range_change_exactly_their_pages(len in 1u64..400, ops in prop::collection::vec((any::<bool>(), 0u64..400, 0u64..400), 0..8)) {
            let mut map = FlatBitmap::new(len);
            let mut model = vec![false; usize::try_from(len).unwrap()];
            for (set, a, b) in ops {
                let (a, b) = (a.min(b).min(len), a.max(b).min(len));
                if set { map.set_range(a..b) } else { map.clear_range(a..b) }
                model[usize::try_from(a).unwrap()..usize::try_from(b).unwrap()].fill(set);
            }
            prop_assert_eq!(map, from_bools(&model));
        }

        #[test]
        fn set_operations_work_bit_by_bit(pairs in prop::collection::vec((any::<bool>(), any::<bool>()), 1..300), a in 0u64..300, b in 0u64..300) {
            let left: Vec<bool> = pairs.iter().map(|p| p.0).collect();
            let right: Vec<bool> = pairs.iter().map(|p| p.1).collect();
            let (mut union, mut minus, mut kept) = (from_bools(&left), from_bools(&left), from_bools(&left));
            union.union(&from_bools(&right));
            minus.subtract(&from_bools(&right));
            let (a, b) = (a.min(b).min(left.len() as u64), a.max(b).min(left.len() as u64));
            kept.retain_range(a..b, &from_bools(&right));
            prop_assert_eq!(union, from_bools(&pairs.iter().map(|p| p.0 | p.1).collect::<Vec<_>>()));
            prop_assert_eq!(minus, from_bools(&pairs.iter().map(|p| p.0 & !p.1).collect::<Vec<_>>()));
            let want: Vec<bool> = pairs.iter().enumerate()
                .map(|(i, p)| if (a..b).contains(&(i as u64)) { p.0 & p.1 } else { p.0 }).collect();
            prop_assert_eq!(kept, from_bools(&want));
        }
    }

    #[test]
    fn bits_beyond_the_end_of_a_kernel_log_are_ignored() {
        let mut map = FlatBitmap::new(70);
        map.union_words(&[0, u64::MAX]);
        assert_eq!(map.count(), 6);
        map.union_word(1, u64::MAX);
        assert!(map.runs().eq(std::iter::once(64..70)));
    }

    #[test]
    fn set_and_clear_return_the_previous_state() {
        let mut map = FlatBitmap::new(130);
        assert!(!map.set(129));
        assert!(map.set(129));
        assert!(map.test(129));
        assert!(map.test_and_clear(129));
        assert!(!map.test_and_clear(129));
        assert!(map.is_empty());
    }
}
