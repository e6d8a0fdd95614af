//! Atomic bitmap that many threads mark concurrently.

use crate::scan::BLOCK_WORDS;
use crate::scan::walk::take_index;
use crate::{Bitmap, for_each_word, place, words_for};
#[cfg(all(test, not(miri)))]
use shuttle::sync::atomic::{AtomicU64, Ordering};
use std::ops::Range;
#[cfg(any(not(test), miri))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(any(not(test), miri))]
type Words = crate::words::AtomicWords;
#[cfg(all(test, not(miri)))]
type Words = Vec<AtomicU64>;

/// Bitmap that any number of threads mark and one thread harvests.
///
/// # Memory order
///
/// A writer writes the page *and then* marks it, with release ordering. The harvester swaps the
/// word out, with acquire ordering, *and then* reads the page. Either the harvest takes the mark,
/// and the harvester's read of the page sees the write, or the mark is set later and the next
/// harvest finds it. If a writer marked the page first, a write could be lost: a harvest could take
/// the mark and read the old content before the write, which would then have no mark.
///
/// A summary has one bit for each block of 64 words, so the cost of a harvest depends on the number
/// of marks, not on the size of the guest. A writer marks the word first. It then reads the summary
/// bit, and sets the bit only if the bit is clear, because reading a rarely written cache line is
/// cheaper than a second read-modify-write. A harvester takes the summary bit first and then the
/// words.
///
/// These accesses are sequentially consistent, because each thread writes one location (word or
/// summary) and then reads the other, and the two accesses must not be reordered. Either the writer
/// sees the summary bit clear and sets the bit again, so that the next harvest finds the mark. Or
/// the writer saw the bit before the harvester took the bit, so the harvester sees the mark in the
/// word. On x86, sequential consistency costs nothing beyond the release and acquire orderings that
/// the words need anyway, because every read-modify-write is a full barrier, and the loads are
/// plain loads.
///
/// The unit tests run this code, and deliberately wrong orders of it, in every interleaving of a
/// few threads.
#[derive(Debug)]
pub struct AtomicBitmap {
    words: Words,
    /// Summary bits: bit `b % 64` of word `b / 64` is clear only if the words of block `b` (from
    /// `64 * b` on) are zero, or if the writer of one of them is about to set the bit.
    summary: Words,
    len: u64,
    #[cfg(test)]
    flaw: Flaw,
}

/// Deliberately wrong order of accesses, for tests that show that the order matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// A writer marks the summary and then the word.
    SummaryFirst,
    /// A writer does not mark the summary if another writer has marked the page before.
    OnlyTheFirst,
    /// A harvester takes the words and then the summary's bit.
    WordsFirst,
}

impl AtomicBitmap {
    /// Creates an empty bitmap of `len` pages.
    #[must_use]
    pub fn new(len: u64) -> Self {
        #[cfg(any(not(test), miri))]
        let zeros = Words::zeroed;
        #[cfg(all(test, not(miri)))]
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

    /// Returns the number of pages that the bitmap covers, marked or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether no page is marked at the moment of the call.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // A writer may have marked a word but not yet the summary. Its mark then did not happen
        // before this call.
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

    /// Marks `page` and returns whether it was marked before. Call this method after writing the
    /// page.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn set(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.mark(word, bit) & bit != 0
    }

    /// Marks the pages of a word that are set in `mask`, then marks the summary, and returns the
    /// previous value of the word.
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
        // The summary is marked even if all bits were set: the writer that set them may not have
        // reached the summary yet.
        self.summarize(word);
        was
    }

    /// Sets the summary bit of `word`. The caller has marked the word.
    #[inline]
    fn summarize(&self, word: usize) {
        let (at, bit) = place((word / BLOCK_WORDS) as u64);
        if self.summary[at].load(Ordering::SeqCst) & bit == 0 {
            self.summary[at].fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// Returns the words of block `block` with their indexes.
    fn block(&self, block: usize) -> impl Iterator<Item = (usize, &AtomicU64)> {
        let first = block * BLOCK_WORDS;
        let words = &self.words[first..self.words.len().min(first + BLOCK_WORDS)];
        (first..).zip(words)
    }

    /// Marks the pages of `range`, with one read-modify-write for each word. Call this method after
    /// writing the pages.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn set_range(&self, range: Range<u64>) {
        assert!(range.end <= self.len, "range {range:?} of {}", self.len);
        for_each_word(range, |word, mask| {
            self.mark(word, mask);
        });
    }

    /// Removes the mark of `page` and returns whether the page was marked.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn test_and_clear(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.words[word].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// Removes the marks of those of the 64 pages from page `64 * index` on that are set in `mask`.
    /// Returns the pages that were marked.
    pub fn take_word(&self, index: usize, mask: u64) -> u64 {
        let Some(word) = self.words.get(index) else { return 0 };
        if word.load(Ordering::Acquire) & mask == 0 {
            return 0;
        }
        word.fetch_and(!mask, Ordering::AcqRel) & mask
    }

    /// Returns whether `page` is marked at the moment of the call.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let (word, bit) = place(page);
        self.words[word].load(Ordering::Acquire) & bit != 0
    }

    /// Returns the marks of the 64 pages from page `64 * index` on, at the moment of the call.
    /// Pages beyond the end of the bitmap have no marks.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.words.get(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Moves all marks into `into` and returns their number.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn harvest(&self, into: &mut Bitmap) -> u64 {
        assert_eq!(self.len, into.len(), "bitmaps of the same region");
        let mut moved = 0;
        for (at, word) in self.summary.iter().enumerate() {
            // A clean word is only read, because a swap would take its cache line from the writers.
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

    /// Takes the block bits of one summary word. The caller reads the words of those blocks
    /// afterwards.
    #[inline]
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "tests inject a flaw in this function"))]
    fn take_blocks(&self, word: &AtomicU64) -> u64 {
        #[cfg(test)]
        if self.flaw == Flaw::WordsFirst {
            return word.load(Ordering::SeqCst);
        }
        word.swap(0, Ordering::SeqCst)
    }
}

// Shuttle maps its own stacks, which Miri does not support. Under Miri, tests/atomic.rs uses real
// threads.
#[cfg(all(test, not(miri)))]
#[path = "atomic_tests.rs"]
mod tests;
