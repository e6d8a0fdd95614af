//! Walk through a whole range with a closure, used by the fastest loops.
//!
//! The words at the two ends of a range are masked and visited separately. The kernel sees whole
//! words only.

use super::{
    BATCH_BLOCKS, BATCH_WORDS, BLOCK_WORDS, Batch, CROWDED_WORDS, DENSE_WORDS, Kernel, POSITION_WORDS,
    Positions, Work, split_at_line,
};
use crate::{WORD_BITS, place};
use std::ops::Range;

/// Range of bits as words. `head` and `tail` are masked, the words between them are whole.
pub(crate) struct Cut {
    /// Index of the first word and mask of its bits within the range. `None` if the range is empty.
    pub(crate) head: Option<(usize, u64)>,
    /// Index of the last word and mask of its bits within the range. If the last word is also the
    /// first one, both masks apply.
    pub(crate) tail: (usize, u64),
}

impl Cut {
    #[inline(always)]
    pub(crate) fn new(range: &Range<u64>, words: &[u64]) -> Self {
        assert!(range.end <= words.len() as u64 * WORD_BITS, "range {range:?} of {} words", words.len());
        if range.is_empty() {
            return Self { head: None, tail: (0, 0) };
        }
        let (first, (last, _)) = (place(range.start).0, place(range.end - 1));
        let below = u64::MAX << (range.start % WORD_BITS);
        let above = u64::MAX >> (WORD_BITS - 1 - (range.end - 1) % WORD_BITS);
        if first == last {
            return Self { head: Some((first, below & above)), tail: (last, below & above) };
        }
        Self { head: Some((first, below)), tail: (last, above) }
    }
}

/// Words of a range in the order of a walk: at most one masked word, the whole words, at most one
/// masked word.
struct Parts {
    head: Option<(usize, u64)>,
    whole: Range<usize>,
    tail: Option<(usize, u64)>,
}

impl Parts {
    #[inline(always)]
    fn new(range: &Range<u64>, words: &[u64]) -> Self {
        let cut = Cut::new(range, words);
        let Some((first, keep)) = cut.head else { return Self { head: None, whole: 0..0, tail: None } };
        let (last, keep_last) = cut.tail;
        let head = keep != u64::MAX;
        let tail = keep_last != u64::MAX && first != last;
        Self {
            head: head.then_some((first, keep)),
            whole: first + usize::from(head)..last + 1 - usize::from(tail),
            tail: tail.then_some((last, keep_last)),
        }
    }
}

/// Returns the page number of the first bit of a word.
#[inline(always)]
pub(crate) fn base_of(word: usize) -> u64 {
    word as u64 * WORD_BITS
}

/// Removes the lowest set bit from `bits` (not 0) and returns its position.
#[inline(always)]
pub(crate) fn take_lowest(bits: &mut u64) -> u64 {
    let at = bits.trailing_zeros();
    *bits &= *bits - 1;
    u64::from(at)
}

/// Removes the lowest set bit from `bits` (not 0) and returns its position as an index.
#[inline(always)]
pub(crate) fn take_index(bits: &mut u64) -> usize {
    let at = bits.trailing_zeros();
    *bits &= *bits - 1;
    at as usize
}

/// Returns whether every bit is set. Checks one block at a time.
#[inline(always)]
fn all_set(words: &[u64]) -> bool {
    words.chunks(BLOCK_WORDS).all(|block| block.iter().fold(u64::MAX, |all, word| all & word) == u64::MAX)
}

/// Implementation of [`super::Scanner::fold_bits`].
///
/// All folds in this module pass the folded value by value. A function that is compiled for other
/// instructions is never inlined into its caller. In such a function, a captured variable of a
/// closure stays in memory, but a value that is passed on stays in registers.
pub(super) struct FoldBits<'a, B, F> {
    pub(super) words: &'a [u64],
    pub(super) range: Range<u64>,
    pub(super) init: B,
    pub(super) fold: F,
}

impl<B, F: FnMut(B, u64) -> B> Work for FoldBits<'_, B, F> {
    type Out = B;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> B {
        let (mut folded, mut fold) = (self.init, self.fold);
        let parts = Parts::new(&self.range, self.words);
        if let Some((word, keep)) = parts.head {
            folded = bits_of(base_of(word), self.words[word] & keep, folded, &mut fold);
        }
        let mut at = parts.whole.start;
        let (unaligned, whole) = split_at_line(&self.words[parts.whole]);
        for word in unaligned {
            folded = bits_of(base_of(at), *word, folded, &mut fold);
            at += 1;
        }
        let mut batch = Batch::new(whole);
        for words in whole.chunks(BATCH_WORDS) {
            let mut top = u64::from(kernel.nonzero(words, &mut batch));
            while top != 0 {
                let block = take_index(&mut top);
                let (from, mask) = (block * BLOCK_WORDS, batch.masks[block]);
                folded = block_bits(kernel, at + from, &words[from..], mask, folded, &mut fold);
            }
            at += words.len();
        }
        match parts.tail {
            Some((word, keep)) => bits_of(base_of(word), self.words[word] & keep, folded, &mut fold),
            None => folded,
        }
    }
}

/// Folds the bits of a block at the start of `words`. The words in `mask` (not 0) are nonzero.
#[inline(always)]
fn block_bits<K: Kernel, B, F: FnMut(B, u64) -> B>(
    kernel: K,
    at: usize,
    words: &[u64],
    mut mask: u64,
    mut folded: B,
    fold: &mut F,
) -> B {
    if K::HAS_POSITIONS && mask.count_ones() >= CROWDED_WORDS {
        let words = &words[..words.len().min(BLOCK_WORDS)];
        return kernel.work(FoldCrowded { words, at, init: folded, fold });
    }
    // The condition is at the end of the loop, because `mask` has at least one bit, and in a sparse
    // bitmap usually exactly one.
    loop {
        let index = take_index(&mut mask);
        folded = bits_of(base_of(at + index), words[index], folded, fold);
        if mask == 0 {
            return folded;
        }
    }
}

#[inline(always)]
fn bits_of<B, F: FnMut(B, u64) -> B>(base: u64, mut word: u64, mut folded: B, fold: &mut F) -> B {
    if word == u64::MAX {
        return (base..base + WORD_BITS).fold(folded, fold);
    }
    while word != 0 {
        folded = fold(folded, base + take_lowest(&mut word));
    }
    folded
}

/// Fold over words, most of which have several bits. A separate [`Work`] is compiled as a separate
/// function and takes no registers from the loop over words with few bits.
struct FoldCrowded<'a, B, F> {
    words: &'a [u64],
    /// Index of the first word.
    at: usize,
    init: B,
    fold: &'a mut F,
}

impl<B, F: FnMut(B, u64) -> B> Work for FoldCrowded<'_, B, F> {
    type Out = B;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> B {
        let mut positions = Positions::new();
        let (mut folded, mut at) = (self.init, self.at);
        for words in self.words.chunks(POSITION_WORDS) {
            let base = base_of(at);
            if all_set(words) {
                for word in 0..words.len() {
                    let base = base + base_of(word);
                    folded = (base..base + WORD_BITS).fold(folded, &mut *self.fold);
                }
            } else {
                let found = kernel.positions(words, &mut positions);
                folded = found.iter().fold(folded, |folded, at| (self.fold)(folded, base + u64::from(*at)));
            }
            at += words.len();
        }
        folded
    }
}

/// Implementation of [`super::Scanner::fold_runs`].
pub(super) struct FoldRuns<'a, B, F> {
    pub(super) words: &'a [u64],
    pub(super) range: Range<u64>,
    pub(super) init: B,
    pub(super) fold: F,
}

impl<B, F: FnMut(B, Range<u64>) -> B> Work for FoldRuns<'_, B, F> {
    type Out = B;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> B {
        let (mut folded, mut fold) = (self.init, self.fold);
        let parts = Parts::new(&self.range, self.words);
        let mut at = parts.whole.start;
        let mut state = RunState::new(at);
        if let Some((word, keep)) = parts.head {
            folded = state.word(word, self.words[word] & keep, folded, &mut fold);
        }
        let (unaligned, whole) = split_at_line(&self.words[parts.whole]);
        for word in unaligned {
            if *word != 0 {
                folded = state.word(at, *word, folded, &mut fold);
            }
            at += 1;
        }
        let mut batch = Batch::new(whole);
        // True if the last batch lay within a run. The next batch is then first checked for the
        // same, which costs one read.
        let mut full = false;
        for words in whole.chunks(BATCH_WORDS) {
            if full && all_set(words) {
                state.upto = at + words.len();
            } else {
                let top = kernel.nonzero(words, &mut batch);
                folded = state.batch(kernel, at, words, top, &batch.masks, folded, &mut fold);
                full = state.open && state.start <= base_of(at);
            }
            at += words.len();
        }
        if let Some((word, keep)) = parts.tail {
            folded = state.word(word, self.words[word] & keep, folded, &mut fold);
        }
        state.finish(self.range.end, folded, &mut fold)
    }
}

/// State that turns visited words into runs.
///
/// Invariant: if `open` is true, the pages `start .. 64 * upto` are set and no reported run
/// contains them. If `open` is false, every run that ends at or below `64 * upto` was reported.
/// Skipped words at and beyond `upto` are zero.
pub(crate) struct RunState {
    open: bool,
    start: u64,
    upto: usize,
}

impl RunState {
    pub(crate) fn new(word: usize) -> Self {
        Self { open: false, start: 0, upto: word }
    }

    /// Closes the run that reached the end of the last visited word, if `word` is not the next
    /// word.
    #[inline(always)]
    fn pass_over<B, F: FnMut(B, Range<u64>) -> B>(&mut self, word: usize, folded: B, fold: &mut F) -> B {
        if self.open && word != self.upto {
            self.open = false;
            return fold(folded, self.start..base_of(self.upto));
        }
        folded
    }

    /// Visits `word`. The words that were skipped since the last visit are zero.
    #[inline(always)]
    fn word<B, F: FnMut(B, Range<u64>) -> B>(
        &mut self,
        index: usize,
        word: u64,
        mut folded: B,
        fold: &mut F,
    ) -> B {
        folded = self.pass_over(index, folded, fold);
        self.upto = index + 1;
        self.edges_in(index, word, folded, fold)
    }

    /// Reports the runs that start or end in `word`. `self.open` says whether a run is open before
    /// the word.
    #[inline(always)]
    fn edges_in<B, F: FnMut(B, Range<u64>) -> B>(
        &mut self,
        index: usize,
        word: u64,
        mut folded: B,
        fold: &mut F,
    ) -> B {
        let base = base_of(index);
        let mut edges = word ^ (word << 1 | u64::from(self.open));
        if self.open {
            if edges == 0 {
                return folded;
            }
            folded = fold(folded, self.start..base + take_lowest(&mut edges));
        }
        self.open = word >> (WORD_BITS - 1) != 0;
        // The remaining edges alternate between starts and ends, beginning with a start.
        while edges != 0 {
            let start = base + take_lowest(&mut edges);
            if edges == 0 {
                self.start = start;
                return folded;
            }
            folded = fold(folded, start..base + take_lowest(&mut edges));
        }
        folded
    }

    /// Visits a batch that begins with word `at`. `top` and `masks` are the result of a kernel.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "two of them are the fold, which must stay in registers")]
    fn batch<K: Kernel, B, F: FnMut(B, Range<u64>) -> B>(
        &mut self,
        kernel: K,
        at: usize,
        words: &[u64],
        top: u32,
        masks: &[u64; BATCH_BLOCKS],
        mut folded: B,
        fold: &mut F,
    ) -> B {
        let mut top = u64::from(top);
        while top != 0 {
            let block = take_index(&mut top);
            let at = at + block * BLOCK_WORDS;
            let words = &words[block * BLOCK_WORDS..];
            let mut mask = masks[block];
            if mask.count_ones() >= DENSE_WORDS {
                let words = &words[..words.len().min(BLOCK_WORDS)];
                folded = self.dense_block(kernel, at, words, folded, fold);
                continue;
            }
            loop {
                let index = take_index(&mut mask);
                folded = self.word(at + index, words[index], folded, fold);
                if mask == 0 {
                    break;
                }
            }
        }
        folded
    }

    /// Visits a block of which most words are nonzero, by its edges.
    #[inline(always)]
    fn dense_block<K: Kernel, B, F: FnMut(B, Range<u64>) -> B>(
        &mut self,
        kernel: K,
        at: usize,
        words: &[u64],
        mut folded: B,
        fold: &mut F,
    ) -> B {
        folded = self.pass_over(at, folded, fold);
        self.upto = at + words.len();
        // Within a long run, reading the words is enough.
        if self.open && all_set(words) {
            return folded;
        }
        let mut edges = kernel.edges(words, self.open);
        while edges != 0 {
            let index = take_index(&mut edges);
            folded = self.edges_in(at + index, words[index], folded, fold);
        }
        folded
    }

    /// Closes a run that is still open, at `end` at the latest.
    #[inline(always)]
    fn finish<B, F: FnMut(B, Range<u64>) -> B>(self, end: u64, folded: B, fold: &mut F) -> B {
        if self.open { fold(folded, self.start..base_of(self.upto).min(end)) } else { folded }
    }
}

/// Implementation of [`super::Scanner::count`].
pub(super) struct Count<'a> {
    pub(super) words: &'a [u64],
}

impl Work for Count<'_> {
    type Out = u64;

    #[inline(always)]
    fn run<K: Kernel>(self, _: K) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Operation `into |= from`, word by word.
pub(crate) struct Or<'a> {
    pub(crate) into: &'a mut [u64],
    pub(crate) from: &'a [u64],
}

impl Work for Or<'_> {
    type Out = ();

    #[inline(always)]
    fn run<K: Kernel>(self, _: K) {
        self.into.iter_mut().zip(self.from).for_each(|(into, from)| *into |= from);
    }
}

/// Operation `into &= !from`, word by word.
pub(crate) struct AndNot<'a> {
    pub(crate) into: &'a mut [u64],
    pub(crate) from: &'a [u64],
}

impl Work for AndNot<'_> {
    type Out = ();

    #[inline(always)]
    fn run<K: Kernel>(self, _: K) {
        self.into.iter_mut().zip(self.from).for_each(|(into, from)| *into &= !from);
    }
}

/// Operation `into |= log` where `log` has bits. Reports the runs of the bits that `into` did not
/// have.
pub(crate) struct Merge<'a, F> {
    pub(crate) into: &'a mut [u64],
    /// Dirty log, with at most as many words as `into`.
    pub(crate) log: &'a [u64],
    /// Index of the first word of `into` in the whole bitmap, for the reported pages.
    pub(crate) first: usize,
    /// Mask of the valid bits of the last word of the log.
    pub(crate) keep_last: u64,
    /// Closure that receives the runs of new bits.
    pub(crate) each: F,
}

/// Number of words that are merged at once: they and the new bits stay in the L1 cache. A whole
/// number of hops.
const MERGE_WORDS: usize = BATCH_WORDS / 4;

impl<F: FnMut(Range<u64>)> Work for Merge<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        let Some((log_last, log)) = self.log.split_last() else { return };
        let mut each = self.each;
        let mut fold = |(), run| each(run);
        let mut state = RunState::new(self.first);
        let mut at = self.first;
        let (into, into_last) = self.into.split_at_mut(log.len());
        let (mut logged, mut fresh) = (Batch::new(log), Batch::new(&[]));
        let mut news = [0; MERGE_WORDS];
        for (into, log) in into.chunks_mut(MERGE_WORDS).zip(log.chunks(MERGE_WORDS)) {
            // Where the log is empty, the set is not even read.
            if kernel.nonzero(log, &mut logged) != 0 {
                let news = &mut news[..log.len()];
                for ((new, into), log) in news.iter_mut().zip(into).zip(log) {
                    *new = log & !*into;
                    *into |= log;
                }
                let top = kernel.nonzero(news, &mut fresh);
                state.batch(kernel, at, news, top, &fresh.masks, (), &mut fold);
            }
            at += log.len();
        }
        let bits = log_last & self.keep_last;
        state.word(at, bits & !into_last[0], (), &mut fold);
        into_last[0] |= bits;
        state.finish(u64::MAX, (), &mut fold);
    }
}
