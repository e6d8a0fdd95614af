//! Going through a bitmap at once, with a closure: what the fastest loops are made of.
//!
//! The words at the two ends of a range are cut and visited by hand; the kernel sees whole words only.

use super::{
    BATCH_BLOCKS, BATCH_WORDS, BLOCK_WORDS, Batch, CROWDED_WORDS, DENSE_WORDS, Kernel, POSITION_WORDS,
    Positions, Work, split_at_line,
};
use crate::{WORD_BITS, place};
use std::ops::Range;

/// A range of bits as words: `head` and `tail` are cut, those between are whole.
pub(crate) struct Cut {
    /// Index and bits to keep of the first word. None: the range is empty.
    pub(crate) head: Option<(usize, u64)>,
    /// Index and bits to keep of the last word. If it is the first too, both masks apply to it.
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

/// The words of a range in the order of a walk: at most one that is cut, those that are whole, at most one that is cut.
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

/// Page number of a word's first bit.
#[inline(always)]
pub(crate) fn base_of(word: usize) -> u64 {
    word as u64 * WORD_BITS
}

/// Takes the lowest set bit out of `bits` (not 0) and gives its place.
#[inline(always)]
pub(crate) fn take_lowest(bits: &mut u64) -> u64 {
    let at = bits.trailing_zeros();
    *bits &= *bits - 1;
    u64::from(at)
}

/// [`take_lowest`], as an index.
#[inline(always)]
pub(crate) fn take_index(bits: &mut u64) -> usize {
    let at = bits.trailing_zeros();
    *bits &= *bits - 1;
    at as usize
}

/// Whether every bit is set. Looks at a block at a time.
#[inline(always)]
fn all_set(words: &[u64]) -> bool {
    words.chunks(BLOCK_WORDS).all(|block| block.iter().fold(u64::MAX, |all, word| all & word) == u64::MAX)
}

/// See [`super::Scanner::fold_bits`].
///
/// The folded value goes from hand to hand by value in all of these. A function that is compiled for other instructions is
/// never inlined into its caller, so what a closure captured stays in memory there; what is passed on stays in registers.
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

/// The bits of a block, which begins `words`, and whose words in `mask` (not 0) are not zero.
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
    // At least once: one word is by far the most likely number where the bitmap is sparse, and this form expects it.
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

/// The bits of words of which most have several. Work of its own, so that it is compiled as a function of its own and takes no
/// registers from the loop over words that have few.
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

/// See [`super::Scanner::fold_runs`].
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
        // Whether the last batch lay within a run: then the next is looked at for that first, which is reading it once.
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

/// Makes runs of the words that it is shown.
///
/// Invariant: if `open`, the pages `start .. 64 * upto` are set and no run that has them was given out; if not, every run
/// that ends at or below `64 * upto` was. Words at and beyond `upto` that are passed over are zero.
pub(crate) struct RunState {
    open: bool,
    start: u64,
    upto: usize,
}

impl RunState {
    pub(crate) fn new(word: usize) -> Self {
        Self { open: false, start: 0, upto: word }
    }

    /// Ends a run that reached to the end of the last word that was looked at, if `word` is not the next.
    #[inline(always)]
    fn pass_over<B, F: FnMut(B, Range<u64>) -> B>(&mut self, word: usize, folded: B, fold: &mut F) -> B {
        if self.open && word != self.upto {
            self.open = false;
            return fold(folded, self.start..base_of(self.upto));
        }
        folded
    }

    /// Looks at `word`; those that were passed over since the last one are zero.
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

    /// The runs that start or end in `word`, before which a run is `open` or not.
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
        // Edges now alternate between starts and ends, beginning with a start.
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

    /// Looks at a batch of words that begins with word `at`, of which a kernel found `top` and `masks`.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "two of them are the fold, which is to stay in registers")]
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

    /// Looks at a block of which most words are set, by its edges.
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
        // Within a long run reading is enough.
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

    /// Ends a run that is still open, at `end` at the latest.
    #[inline(always)]
    fn finish<B, F: FnMut(B, Range<u64>) -> B>(self, end: u64, folded: B, fold: &mut F) -> B {
        if self.open { fold(folded, self.start..base_of(self.upto).min(end)) } else { folded }
    }
}

/// See [`super::Scanner::count`].
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

/// `into |= from`, word by word.
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

/// `into &= !from`, word by word.
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

/// `into |= log` where `log` has bits, and the runs of the bits that `into` did not have.
pub(crate) struct Merge<'a, F> {
    pub(crate) into: &'a mut [u64],
    /// At most as many words as `into`.
    pub(crate) log: &'a [u64],
    /// The index that `into`'s first word has in what is reported.
    pub(crate) first: usize,
    /// Bits of the log's last word that count.
    pub(crate) keep_last: u64,
    /// Told of the runs of new bits.
    pub(crate) each: F,
}

/// Words that are merged at once: with the new ones beside them they stay in the L1 cache. A whole number of hops.
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
            // Where the log is empty the set is not even read.
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
