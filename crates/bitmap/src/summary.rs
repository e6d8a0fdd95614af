//! The bitmap whose cost is that of its dirty part.

use crate::scan::walk::take_index;
use crate::scan::{BATCH_WORDS, BLOCK_WORDS, Batch, Scanner};
use crate::{Bitmap, Runs, WORD_BITS, words_for};
use std::ops::Range;

/// Pages that one bit of a summary stands for: 16 MiB of a guest's memory, 512 bytes of its bitmap.
///
/// The summary of 12 TiB is 96 KiB then: it stays in the L2 cache, and is looked through in the time of a few thousand
/// words. A finer one would find single pages sooner and cost more where nothing is set; and 512 bytes are few enough that
/// reading them costs about what fetching the first of them does.
pub(crate) const BLOCK_PAGES: u64 = BLOCK_WORDS as u64 * WORD_BITS;

/// A [`Bitmap`] with a second level: one bit for each 4096 pages, clear only where none of them is set. Whatever goes
/// through the pages, or over them, skips the others, so that a nearly clean guest of 12 TiB costs what its dirty part costs.
///
/// Its upkeep: setting a page sets a second bit, in a word that 262144 pages share and that is in a near cache; clearing
/// single pages does nothing (a bit of the summary may stay set for nothing, and costs reading 512 bytes);
/// clearing everything clears what the summary names. `vmferry-bench scan` measures it.
///
/// Invariant: where a bit of `summary` is clear, the words of `flat` that it stands for are zero.
#[derive(Clone)]
pub struct SummaryBitmap {
    flat: Bitmap,
    summary: Bitmap,
}

impl std::fmt::Debug for SummaryBitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SummaryBitmap({} of {} set)", self.count(), self.len())
    }
}

impl PartialEq for SummaryBitmap {
    /// Whether the same pages are set; summaries may differ.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.flat == other.flat
    }
}

impl Eq for SummaryBitmap {}

impl From<Bitmap> for SummaryBitmap {
    fn from(flat: Bitmap) -> Self {
        let mut map = Self { summary: Bitmap::new(flat.len().div_ceil(BLOCK_PAGES)), flat };
        map.tighten();
        map
    }
}

impl SummaryBitmap {
    /// An empty bitmap of `len` pages.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self { flat: Bitmap::new(len), summary: Bitmap::new(len.div_ceil(BLOCK_PAGES)) }
    }

    /// A bitmap of `len` pages, all set.
    #[must_use]
    pub fn full(len: u64) -> Self {
        Self { flat: Bitmap::full(len), summary: Bitmap::full(len.div_ceil(BLOCK_PAGES)) }
    }

    /// The pages without the summary.
    #[must_use]
    pub fn flat(&self) -> &Bitmap {
        &self.flat
    }

    /// Pages that this bitmap speaks of, set or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.flat.len()
    }

    /// Whether no page is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts(0..self.len()).all(|pages| !Scanner::best().any(self.words(pages)))
    }

    /// Whether `page` is set.
    ///
    /// # Panics
    /// If `page >= len`.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        self.flat.test(page)
    }

    /// Sets `page`; says whether it was set before.
    ///
    /// # Panics
    /// If `page >= len`.
    pub fn set(&mut self, page: u64) -> bool {
        let was = self.flat.set(page);
        self.summary.set(page / BLOCK_PAGES);
        was
    }

    /// Clears `page`; says whether it was set before.
    ///
    /// # Panics
    /// If `page >= len`.
    pub fn test_and_clear(&mut self, page: u64) -> bool {
        self.flat.test_and_clear(page)
    }

    /// Sets every page of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond `len`.
    pub fn set_range(&mut self, range: Range<u64>) {
        self.flat.set_range(range.clone());
        if !range.is_empty() {
            self.summary.set_range(blocks_of(&range));
        }
    }

    /// Clears every page of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond `len`.
    pub fn clear_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        if range.is_empty() {
            return;
        }
        let Self { flat, summary } = self;
        for pages in parts(summary, range.clone()) {
            flat.clear_range(pages);
        }
        // Only blocks that are wholly in the range are known to be empty now.
        let whole = range.start.div_ceil(BLOCK_PAGES)..if range.end == flat.len() {
            summary.len()
        } else {
            range.end / BLOCK_PAGES
        };
        if whole.start < whole.end {
            summary.clear_range(whole);
        }
    }

    /// Clears every page.
    pub fn clear_all(&mut self) {
        self.clear_range(0..self.len());
    }

    /// How many pages are set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count_range(0..self.len())
    }

    /// How many pages of `range` are set.
    ///
    /// # Panics
    /// If `range` ends beyond `len`.
    #[must_use]
    pub fn count_range(&self, range: Range<u64>) -> u64 {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        self.parts(range).map(|pages| self.flat.count_range(pages)).sum()
    }

    /// Adds the pages of `other`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn union(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "bitmaps of the same region");
        for pages in other.parts(0..other.len()) {
            self.flat.union_range(pages, &other.flat);
        }
        self.summary.union(&other.summary);
    }

    /// Removes the pages of `other`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn subtract(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "bitmaps of the same region");
        for pages in other.parts(0..other.len()) {
            self.flat.subtract_range(pages, &other.flat);
        }
    }

    /// Keeps only the pages of `range` that are set in `other`; pages outside `range` stay as they are.
    ///
    /// # Panics
    /// If the lengths differ or `range` ends beyond them.
    pub fn retain_range(&mut self, range: Range<u64>, other: &Self) {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        let Self { flat, summary } = self;
        for pages in parts(summary, range) {
            flat.retain_range(pages, &other.flat);
        }
    }

    /// Adds a log of words, as a kernel hands it out, whose first bit is page `64 * first`. Where the log is empty, neither
    /// the pages nor the summary is touched. Bits beyond `len` are ignored.
    ///
    /// # Panics
    /// If the log has words beyond this bitmap's.
    pub fn union_words(&mut self, first: usize, log: &[u64]) {
        let (scanner, mut batch) = (Scanner::best(), Batch::new(log));
        // The log's blocks are to be those of the summary.
        let (head, rest) = log.split_at(log.len().min((BLOCK_WORDS - first % BLOCK_WORDS) % BLOCK_WORDS));
        let mut at = first;
        for words in std::iter::once(head).chain(rest.chunks(BATCH_WORDS)) {
            let mut top = u64::from(scanner.nonzero(words, &mut batch));
            while top != 0 {
                let from = take_index(&mut top) * BLOCK_WORDS;
                let block = &words[from..words.len().min(from + BLOCK_WORDS)];
                self.flat.union_words_at(at + from, block);
                self.summary.set(((at + from) / BLOCK_WORDS) as u64);
            }
            at += words.len();
        }
    }

    /// [`Self::union_words`], and calls `each` with the maximal runs of the pages that were not set before, in order.
    ///
    /// # Panics
    /// If the log has words beyond this bitmap's.
    pub fn merge_words(&mut self, first: usize, log: &[u64], mut each: impl FnMut(Range<u64>)) {
        let Self { flat, summary } = self;
        let mut last = None;
        flat.merge_words(first, log, |run| {
            let blocks = blocks_of(&run);
            // Runs come in order, many to a block.
            if last != Some(blocks.end) || blocks.end - blocks.start > 1 {
                last = Some(blocks.end);
                summary.set_range(blocks);
            }
            each(run);
        });
    }

    /// The set pages as maximal runs, in order.
    #[must_use]
    pub fn runs(&self) -> SummaryRuns<'_> {
        self.runs_in(0..self.len())
    }

    /// The set pages of `range` as maximal runs, in order; runs are cut at the ends of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond `len`.
    #[must_use]
    pub fn runs_in(&self, range: Range<u64>) -> SummaryRuns<'_> {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        SummaryRuns { inner: self.flat.runs_in(0..0), parts: self.parts(range) }
    }

    /// Calls `each` with what [`Self::runs`] gives.
    pub fn for_each_run(&self, mut each: impl FnMut(Range<u64>)) {
        self.runs().fold((), |(), run| each(run));
    }

    /// Calls `each` with every set page, in order.
    pub fn for_each_bit(&self, mut each: impl FnMut(u64)) {
        let scanner = Scanner::best();
        self.parts(0..self.len()).for_each(|pages| scanner.for_each_bit(self.flat.words(), pages, &mut each));
    }

    /// Clears the bits of the summary that stand for nothing any more: worth it after many single pages were cleared.
    /// Reads all pages.
    pub fn tighten(&mut self) {
        let Self { flat, summary } = self;
        summary.clear_all();
        let scanner = Scanner::best();
        for (block, words) in (0..).zip(flat.words().chunks(BLOCK_WORDS)) {
            if scanner.any(words) {
                summary.set(block);
            }
        }
    }

    fn parts(&self, range: Range<u64>) -> Parts<'_> {
        parts(&self.summary, range)
    }

    /// The words of `pages`, which begin with a word and end with one or with the bitmap.
    fn words(&self, pages: Range<u64>) -> &[u64] {
        &self.flat.words()[words_for(pages.start)..words_for(pages.end)]
    }
}

/// The blocks that `range` (not empty) touches.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_PAGES..(range.end - 1) / BLOCK_PAGES + 1
}

/// Empty blocks that are gone over rather than jumped over. Going on costs what reading 512 bytes in order does; a jump
/// costs a fetch that no prefetcher foresees and two or three branches that no predictor does.
const JUMP_BLOCKS: u64 = 8;

/// The parts of `range` outside which the summary knows all to be empty. Between two of them are empty blocks, so no run of
/// pages crosses from one to the next.
fn parts(summary: &Bitmap, range: Range<u64>) -> Parts<'_> {
    let blocks = if range.is_empty() { 0..0 } else { blocks_of(&range) };
    let mut blocks = summary.runs_in(blocks);
    Parts { next: blocks.next(), blocks, range }
}

#[derive(Debug, Clone)]
struct Parts<'a> {
    blocks: Runs<'a>,
    /// The blocks that `blocks` gave last and that are in no part yet.
    next: Option<Range<u64>>,
    range: Range<u64>,
}

impl Iterator for Parts<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        let mut blocks = self.next.take()?;
        for more in self.blocks.by_ref() {
            if more.start - blocks.end > JUMP_BLOCKS {
                self.next = Some(more);
                break;
            }
            blocks.end = more.end;
        }
        let start = (blocks.start * BLOCK_PAGES).max(self.range.start);
        Some(start..(blocks.end * BLOCK_PAGES).min(self.range.end))
    }
}

/// The runs of a [`SummaryBitmap`]; see [`SummaryBitmap::runs`]. Allocates nothing.
#[derive(Debug, Clone)]
pub struct SummaryRuns<'a> {
    inner: Runs<'a>,
    parts: Parts<'a>,
}

impl Iterator for SummaryRuns<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        loop {
            if let Some(run) = self.inner.next() {
                return Some(run);
            }
            self.inner.restart(self.parts.next()?);
        }
    }

    fn fold<B, F: FnMut(B, Range<u64>) -> B>(self, init: B, mut f: F) -> B {
        let folded = self.inner.clone().fold(init, &mut f);
        self.parts.fold(folded, |folded, pages| self.inner.fold_in(pages, folded, &mut f))
    }
}

impl std::iter::FusedIterator for SummaryRuns<'_> {}
