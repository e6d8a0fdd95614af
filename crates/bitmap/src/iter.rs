//! Going through a bitmap one answer at a time.
//!
//! The same walk as `scan::walk`, turned inside out: its state stands in the iterator. `fold`, and with it `for_each`,
//! `count`, `sum` and whatever else of `Iterator` goes to the end, is the walk with a closure, which is faster.

use crate::WORD_BITS;
use crate::scan::walk::{Cut, base_of, take_index, take_lowest};
use crate::scan::{BATCH_WORDS, BLOCK_WORDS, Batch, DENSE_WORDS, Scanner, words_to_line};
use std::ops::Range;

/// The words of a range that are not zero, by blocks.
#[derive(Debug, Clone)]
struct Cursor<'a> {
    words: &'a [u64],
    scanner: Scanner,
    batch: Batch,
    /// Blocks of the batch that were not visited yet.
    top: u32,
    /// First word of the batch. `batch_at <= next_batch <= end`.
    batch_at: usize,
    /// First word that no batch had yet.
    next_batch: usize,
    /// Index behind the last word.
    end: usize,
    /// First word of the block.
    block_at: usize,
    /// Words of the block that were not visited yet.
    mask: u64,
    /// Bits to keep of the last word.
    keep_last: u64,
}

impl<'a> Cursor<'a> {
    /// A cursor that has nothing to do yet.
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

    /// Goes to the words behind the first of `range`. Gives that word's index, its bits within the range, and the range's
    /// end, which is 0 for an empty one.
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

    /// Goes to the next block that has something. False: there is none.
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

    /// Finds the next batch that has something.
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

    /// The words of the block.
    fn block(&self) -> &'a [u64] {
        &self.words[self.block_at..(self.block_at + BLOCK_WORDS).min(self.next_batch)]
    }

    /// The bits of a word behind the first that are within the range.
    #[inline]
    fn word(&self, index: usize) -> u64 {
        let keep = if index + 1 == self.end { self.keep_last } else { u64::MAX };
        self.words[index] & keep
    }
}

/// The set bits of a range, in order. Allocates nothing.
#[derive(Debug, Clone)]
pub struct Bits<'a> {
    cursor: Cursor<'a>,
    /// Page of the current word's first bit.
    base: u64,
    /// Bits of the current word that were not given out yet.
    bits: u64,
    end: u64,
}

impl<'a> Bits<'a> {
    pub(crate) fn new(scanner: Scanner, words: &'a [u64], range: Range<u64>) -> Self {
        let mut cursor = Cursor::new(scanner, words);
        let (first, bits, end) = cursor.restart(range);
        Self { cursor, base: base_of(first), bits, end }
    }

    /// The part of the range whose bits were not given out yet.
    fn rest(&self) -> Range<u64> {
        let mut bits = self.bits;
        let from = self.base + if bits == 0 { WORD_BITS } else { take_lowest(&mut bits) };
        from.min(self.end)..self.end
    }
}

impl Iterator for Bits<'_> {
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

impl std::iter::FusedIterator for Bits<'_> {}

/// The maximal runs of a range, in order; see [`crate::Bitmap::runs`]. Allocates nothing.
///
/// Invariant: if `open`, the pages from `start` to the word that is looked at are set and no run that has them was given
/// out; if not, every run that ends within or before that word was, but for those in `edges`. Words from `upto` on that were
/// passed over are zero.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    cursor: Cursor<'a>,
    /// Page of the current word's first bit.
    base: u64,
    /// Starts and ends of runs in the current word that were not passed yet.
    edges: u64,
    open: bool,
    start: u64,
    upto: usize,
    /// Whether the block is asked for its edges: all its other words continue what was before them.
    exact: bool,
    end: u64,
}

impl<'a> Runs<'a> {
    pub(crate) fn new(scanner: Scanner, words: &'a [u64], range: Range<u64>) -> Self {
        let cursor = Cursor::new(scanner, words);
        let mut runs =
            Self { cursor, base: 0, edges: 0, open: false, start: 0, upto: 0, exact: false, end: 0 };
        runs.restart(range);
        runs
    }

    /// Begins anew with another range of the same words, for less than a new iterator costs.
    pub(crate) fn restart(&mut self, range: Range<u64>) {
        let (first, bits, end) = self.cursor.restart(range);
        (self.base, self.edges, self.end) = (base_of(first), bits ^ bits << 1, end);
        (self.open, self.exact, self.upto) = (false, false, first + 1);
    }

    /// Folds the runs of another range of the same words.
    pub(crate) fn fold_in<B>(&self, range: Range<u64>, init: B, f: impl FnMut(B, Range<u64>) -> B) -> B {
        self.cursor.scanner.fold_runs(self.cursor.words, range, init, f)
    }

    /// The run that reached to the end of the last word that was looked at, if the next is not `word`.
    #[inline]
    fn pass_over(&mut self, word: usize) -> Option<Range<u64>> {
        if self.open && word != self.upto {
            self.open = false;
            self.base = base_of(self.upto - 1);
            return Some(self.start..base_of(self.upto));
        }
        None
    }

    /// The part of the range whose runs were not given out yet.
    fn rest(&self) -> Range<u64> {
        let mut edges = self.edges;
        let from = match (self.open, edges) {
            (true, _) => self.start,
            (false, 0) => self.base + WORD_BITS,
            (false, _) => self.base + take_lowest(&mut edges),
        };
        from.min(self.end)..self.end
    }

    /// Goes to the next block. Gives a run that ends before it; false in the second place: there is no block.
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

    /// Goes to the next word of the block. Gives a run that ends before it.
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

impl Iterator for Runs<'_> {
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
                // A block that is asked for its edges may have none.
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

impl std::iter::FusedIterator for Runs<'_> {}
