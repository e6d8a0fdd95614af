//! The bitmap that many threads mark.

use crate::scan::BLOCK_WORDS;
use crate::scan::walk::take_index;
use crate::{Bitmap, for_each_word, place, words_for};
#[cfg(all(test, not(miri)))]
use shuttle::sync::atomic::{AtomicU64, Ordering};
use std::ops::Range;
#[cfg(any(not(test), miri))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A bitmap that is marked by any number of threads and harvested by one.
///
/// The order that keeps a page from being lost: a writer writes the page *and then* marks it (`Release`); the harvester
/// swaps the word out (`Acquire`) *and then* reads the page. Either the harvest sees the mark, and its read sees the
/// write; or the mark comes later and is found by the next harvest. Marking first would let a harvest take the mark,
/// read the old page, and leave the write without one.
///
/// A summary has a bit for each 64 words, so that a harvest of a nearly clean guest costs what its marks cost. A writer marks
/// the word first and then, only if it is clear, the summary's bit: a read of a line that is seldom written, instead of a
/// second read-modify-write. A harvester takes the summary's bit first and then the words. All four are sequentially
/// consistent, because neither side may overtake itself (each writes one place and reads the other): either the writer sees
/// the bit clear and sets it anew, for the next harvest; or it saw the bit before the harvester took it, and then the
/// harvester sees the mark. On x86 that costs nothing over the release and acquire that the words need anyway: the
/// read-modify-writes are full barriers, and the loads are plain. The unit tests run this code, and wrong orders of it, in
/// every interleaving of a few threads.
#[derive(Debug)]
pub struct AtomicBitmap {
    words: Vec<AtomicU64>,
    /// Bit `b % 64` of word `b / 64` is clear only where words `64 * b ..` are zero, or their writer is about to set it.
    summary: Vec<AtomicU64>,
    len: u64,
    #[cfg(test)]
    flaw: Flaw,
}

/// A way to get the order wrong, for tests that show that it matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// A writer marks the summary and then the word.
    SummaryFirst,
    /// A writer leaves the summary to whoever marked the page before.
    OnlyTheFirst,
    /// A harvester takes the words and then the summary's bit.
    WordsFirst,
}

impl AtomicBitmap {
    /// An empty bitmap of `len` pages.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let words = words_for(len);
        Self {
            words: zeros(words),
            summary: zeros(words.div_ceil(BLOCK_WORDS * 64)),
            len,
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    /// Pages that this bitmap speaks of, set or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no page is set at the moment.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // A writer may have marked a word and not yet the summary, but then its mark did not happen before this call.
        self.summary.iter().enumerate().all(|(at, word)| {
            let mut blocks = word.load(Ordering::SeqCst);
            while blocks != 0 {
                if self.block(at * 64 + take_index(&mut blocks)).any(|(_, w)| w.load(Ordering::SeqCst) != 0) {
                    return false;
                }
            }
            true
        })
    }

    /// Marks `page`, after it was written. Says whether it was marked before.
    ///
    /// # Panics
    /// If `page >= len`.
    pub fn set(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.mark(word, bit) & bit != 0
    }

    /// Marks the pages `mask` of a word, then the summary; gives the word as it was.
    #[inline]
    fn mark(&self, word: usize, mask: u64) -> u64 {
        #[cfg(test)]
        if self.flaw == Flaw::SummaryFirst {
            self.summarize(word);
        }
        let was = self.words[word].fetch_or(mask, Ordering::SeqCst);
        #[cfg(test)]
        if self.flaw == Flaw::SummaryFirst || self.flaw == Flaw::OnlyTheFirst && was & mask == mask {
            return was;
        }
        // Also if all were set: whoever set them may not have come to the summary yet.
        self.summarize(word);
        was
    }

    /// Marks the summary for `word`, after it was marked.
    #[inline]
    fn summarize(&self, word: usize) {
        let (at, bit) = place((word / BLOCK_WORDS) as u64);
        if self.summary[at].load(Ordering::SeqCst) & bit == 0 {
            self.summary[at].fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// The words of block `block`, with their indexes.
    fn block(&self, block: usize) -> impl Iterator<Item = (usize, &AtomicU64)> {
        let first = block * BLOCK_WORDS;
        let words = &self.words[first..self.words.len().min(first + BLOCK_WORDS)];
        (first..).zip(words)
    }

    /// Marks the pages of `range`, after they were written: one read-modify-write a word, not one a page.
    ///
    /// # Panics
    /// If `range` ends beyond `len`.
    pub fn set_range(&self, range: Range<u64>) {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_word(range, |word, mask| {
            self.mark(word, mask);
        });
    }

    /// Clears `page`; says whether it was marked.
    ///
    /// # Panics
    /// If `page >= len`.
    pub fn test_and_clear(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.words[word].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Whether `page` is marked at the moment.
    ///
    /// # Panics
    /// If `page >= len`.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.words[word].load(Ordering::Acquire) & bit != 0
    }

    /// Returns the marks of the 64 pages from `64 * index` on as they are at the moment; none of pages beyond the end.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.words.get(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Moves every mark into `into` and returns how many were moved.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn harvest(&self, into: &mut Bitmap) -> u64 {
        assert_eq!(self.len, into.len(), "bitmaps of the same region");
        let mut moved = 0;
        for (at, word) in self.summary.iter().enumerate() {
            // A clean word is only read: a swap would take its cache line from the writers.
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut blocks = self.take_blocks(word);
            while blocks != 0 {
                for (index, word) in self.block(at * 64 + take_index(&mut blocks)) {
                    if word.load(Ordering::SeqCst) != 0 {
                        let bits = word.swap(0, Ordering::SeqCst);
                        moved += u64::from(bits.count_ones());
                        into.union_word(index, bits);
                    }
                }
            }
            #[cfg(test)]
            if self.flaw == Flaw::WordsFirst {
                word.store(0, Ordering::SeqCst);
            }
        }
        moved
    }

    /// Takes the blocks that a word of the summary names, before their words are looked at.
    #[inline]
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests plant a flaw here"))]
    fn take_blocks(&self, word: &AtomicU64) -> u64 {
        #[cfg(test)]
        if self.flaw == Flaw::WordsFirst {
            return word.load(Ordering::SeqCst);
        }
        word.swap(0, Ordering::SeqCst)
    }
}

// Shuttle maps stacks of its own, which Miri cannot; under Miri, tests/atomic.rs uses this with real threads.
#[cfg(all(test, not(miri)))]
#[path = "atomic_tests.rs"]
mod tests;
