//! Iterators over the set pages and runs of a bitmap.
//!
//! The iterators do the same walk as `scan::walk`, but keep its state between calls of `next`.
//! `fold`, and every method that uses it (`for_each`, `count`, `sum` and others that consume the
//! iterator), runs the walk with a closure, which is faster.

use crate::WORD_BITS;
use crate::scan::walk::{Cut, base_of, take_index, take_lowest};
use crate::scan::{BATCH_WORDS, BLOCK_WORDS, Batch, DENSE_WORDS, Scanner, words_to_line};
use std::ops::Range;

/// Cursor over the nonzero words of a range, block by block.
#[derive(Debug, Clone)]
struct Cursor<'a> {
    words: &'a [u64],
    scanner: Scanner,
    batch: Batch,
    /// Mask of the blocks in the batch that were not visited yet.
    top: u32,
    /// Index of the first word of the batch. `batch_at <= next_batch <= end`.
    batch_at: usize,
    /// Index of the first word after the batch.
    next_batch: usize,
    /// Index after the last word.
    end: usize,
    /// Index of the first word of the block.
    block_at: usize,
    /// Mask of the words in the block that were not visited yet.
    mask: u64,
    /// Mask of the bits of the last word that are within the range.
    keep_last: u64,
}

impl<'a> Cursor<'a> {
    /// Creates a cursor that has nothing to visit yet.
    fn new(scanner: Scanner, words: &'a [u64]) -> Self {
        Self {
            words,
            scanner,
            batch: Batch::new(words),
            top: 0,
            batch_at: 0,
            next_batch: 0,
            end: 0,
            block_at: 0,
            mask: 0,
            keep_last: 0,
        }
    }

    /// Moves to the words of `range` that follow its first word. Returns the index of the first
    /// word, the bits of that word within the range, and the end of the range. For an empty range,
    /// all three are 0.
    fn restart(&mut self, range: Range<u64>) -> (usize, u64, u64) {
        let cut = Cut::new(&range, self.words);
        (self.top, self.mask) = (0, 0);
        let Some((first, keep)) = cut.head else {
            (self.next_batch, self.end) = (0, 0);
            return (0, 0, 0);
        };
        self.next_batch = first + 1;
        (self.end, self.keep_last) = (cut.tail.0 + 1, cut.tail.1);
        (first, self.words[first] & keep, range.end)
    }

    /// Moves to the next block that has set bits, and returns whether there is one.
    #[inline]
    fn next_block(&mut self) -> bool {
        if self.top == 0 && !self.fill() {
            return false;
        }
        let mut top = u64::from(self.top);
        let block = take_index(&mut top);
        self.top &= self.top - 1;
        self.block_at = self.batch_at + block * BLOCK_WORDS;
        self.mask = self.batch.masks[block];
        true
    }

    /// Finds the next batch that has set bits, and returns whether there is one.
    #[inline(never)]
    fn fill(&mut self) -> bool {
        while self.next_batch < self.end {
            let rest = &self.words[self.next_batch..self.end];
            let words = match words_to_line(rest) {
                0 => &rest[..rest.len().min(BATCH_WORDS)],
                unaligned => &rest[..unaligned],
            };
            self.batch_at = self.next_batch;
            self.next_batch += words.len();
            self.top = self.scanner.nonzero(words, &mut self.batch);
            if self.top != 0 {
                return true;
            }
        }
        false
    }

    /// Returns the words of the current block.
    fn block(&self) -> &'a [u64] {
        &self.words[self.block_at..(self.block_at + BLOCK_WORDS).min(self.next_batch)]
    }

    /// Returns the bits of a word after the first one that are within the range.
    #[inline]
    fn word(&self, index: usize) -> u64 {
        let keep = if index + 1 == self.end { self.keep_last } else { u64::MAX };
        self.words[index] & keep
    }
}

/// Iterator over the set bits of a range, in order. Allocates nothing.
#[derive(Debug, Clone)]
pub struct FlatBits<'a> {
    cursor: Cursor<'a>,
    /// Page of the first bit of the current word.
    base: u64,
    /// FlatBits of the current word that were not returned yet.
    bits: u64,
    end: u64,
}

impl<'a> FlatBits<'a> {
    pub(crate) fn new(scanner: Scanner, words: &'a [u64], range: Range<u64>) -> Self {
        let mut bits = Self { cursor: Cursor::new(scanner, words), base: 0, bits: 0, end: 0 };
        bits.restart(range);
        bits
    }

    /// Restarts the iterator with another range of the same words. Cheaper than a new iterator.
    pub(crate) fn restart(&mut self, range: Range<u64>) {
        let (first, bits, end) = self.cursor.restart(range);
        (self.base, self.bits, self.end) = (base_of(first), bits, end);
    }

    /// Folds the set bits of another range of the same words.
    pub(crate) fn fold_in<B>(&self, range: Range<u64>, init: B, f: impl FnMut(B, u64) -> B) -> B {
        self.cursor.scanner.fold_bits(self.cursor.words, range, init, f)
    }

    /// Returns the part of the range whose bits were not returned yet.
    fn rest(&self) -> Range<u64> {
        let mut bits = self.bits;
        let from = self.base + if bits == 0 { WORD_BITS } else { take_lowest(&mut bits) };
        from.min(self.end)..self.end
    }
}

impl Iterator for FlatBits<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        while self.bits == 0 {
            if self.cursor.mask == 0 && !self.cursor.next_block() {
                return None;
            }
            let index = self.cursor.block_at + take_index(&mut self.cursor.mask);
            (self.base, self.bits) = (base_of(index), self.cursor.word(index));
        }
        Some(self.base + take_lowest(&mut self.bits))
    }

    fn fold<B, F: FnMut(B, u64) -> B>(self, init: B, f: F) -> B {
        self.cursor.scanner.fold_bits(self.cursor.words, self.rest(), init, f)
    }
}

impl std::iter::FusedIterator for FlatBits<'_> {}

/// Iterator over the maximal runs of a range, in order; see [`crate::Bitmap::runs`]. Allocates
/// nothing.
///
/// Invariant: if `open` is true, the pages from `start` to the current word are set and no returned
/// run contains them. If `open` is false, every run that ends before or within the current word was
/// returned, except the runs in `edges`. Skipped words from `upto` on are zero.
#[derive(Debug, Clone)]
pub struct FlatRuns<'a> {
    cursor: Cursor<'a>,
    /// Page of the first bit of the current word.
    base: u64,
    /// Starts and ends of runs in the current word that were not processed yet.
    edges: u64,
    open: bool,
    start: u64,
    upto: usize,
    /// True if the block is visited by its edges: every word that is not in the mask continues the
    /// state before it.
    exact: bool,
    end: u64,
}

impl<'a> FlatRuns<'a> {
    pub(crate) fn new(scanner: Scanner, words: &'a [u64], range: Range<u64>) -> Self {
        let cursor = Cursor::new(scanner, words);
        let mut runs =
            Self { cursor, base: 0, edges: 0, open: false, start: 0, upto: 0, exact: false, end: 0 };
        runs.restart(range);
        runs
    }

    /// Restarts the iterator with another range of the same words. Cheaper than a new iterator.
    pub(crate) fn restart(&mut self, range: Range<u64>) {
        let (first, bits, end) = self.cursor.restart(range);
        (self.base, self.edges, self.end) = (base_of(first), bits ^ bits << 1, end);
        (self.open, self.exact, self.upto) = (false, false, first + 1);
    }

    /// Folds the runs of another range of the same words.
    pub(crate) fn fold_in<B>(&self, range: Range<u64>, init: B, f: impl FnMut(B, Range<u64>) -> B) -> B {
        self.cursor.scanner.fold_runs(self.cursor.words, range, init, f)
    }

    /// Closes and returns the run that reached the end of the last visited word, if `word` is not
    /// the next word.
    #[inline]
    fn pass_over(&mut self, word: usize) -> Option<Range<u64>> {
        if self.open && word != self.upto {
            self.open = false;
            self.base = base_of(self.upto - 1);
            return Some(self.start..base_of(self.upto));
        }
        None
    }

    /// Returns the part of the range whose runs were not returned yet.
    fn rest(&self) -> Range<u64> {
        let mut edges = self.edges;
        let from = match (self.open, edges) {
            (true, _) => self.start,
            (false, 0) => self.base + WORD_BITS,
            (false, _) => self.base + take_lowest(&mut edges),
        };
        from.min(self.end)..self.end
    }

    /// Moves to the next block. Returns a run that ends before the block, and whether there is a
    /// next block.
    #[inline]
    fn next_block(&mut self) -> (Option<Range<u64>>, bool) {
        if !self.cursor.next_block() {
            let run = self.open.then(|| self.start..base_of(self.upto).min(self.end));
            (self.open, self.base) = (false, self.end);
            return (run, false);
        }
        self.exact = self.cursor.mask.count_ones() >= DENSE_WORDS;
        if !self.exact {
            return (None, true);
        }
        let run = self.pass_over(self.cursor.block_at);
        let block = self.cursor.block();
        self.cursor.mask = self.cursor.scanner.edges(block, self.open);
        self.upto = self.cursor.block_at + block.len();
        (run, true)
    }

    /// Moves to the next word of the block. Returns a run that ends before that word.
    #[inline]
    fn next_word(&mut self) -> Option<Range<u64>> {
        let index = self.cursor.block_at + take_index(&mut self.cursor.mask);
        let mut run = None;
        if !self.exact {
            run = self.pass_over(index);
            self.upto = index + 1;
        }
        let word = self.cursor.word(index);
        self.base = base_of(index);
        self.edges = word ^ (word << 1 | u64::from(self.open));
        run
    }
}

impl Iterator for FlatRuns<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        loop {
            while self.edges != 0 {
                let edge = self.base + take_lowest(&mut self.edges);
                self.open = !self.open;
                if !self.open {
                    return Some(self.start..edge);
                }
                self.start = edge;
            }
            if self.cursor.mask == 0 {
                let (run, more) = self.next_block();
                if run.is_some() || !more {
                    return run;
                }
                // A block that is visited by its edges may have no edge.
                continue;
            }
            if let Some(run) = self.next_word() {
                return Some(run);
            }
        }
    }

    fn fold<B, F: FnMut(B, Range<u64>) -> B>(self, init: B, f: F) -> B {
        self.cursor.scanner.fold_runs(self.cursor.words, self.rest(), init, f)
    }
}

impl std::iter::FusedIterator for FlatRuns<'_> {}
