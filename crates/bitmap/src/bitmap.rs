//! Bitmap with one owner, and with a summary, so that costs depend only on the part that has set
//! pages.

use crate::scan::walk::take_index;
use crate::scan::{BATCH_WORDS, BLOCK_WORDS, Batch, Scanner};
use crate::{FlatBitmap, FlatBits, FlatRuns, WORD_BITS, words_for};
use std::ops::Range;

/// Number of pages that one summary bit covers: 16 MiB of guest memory, 512 bytes of bitmap.
///
/// With this value, the summary of a guest of 12 TiB has 96 KiB. It stays in the L2 cache, and
/// takes only about as long to scan as a few thousand words. A finer summary would find single
/// pages sooner, but would cost more where nothing is set. Reading 512 bytes costs about as much as
/// fetching the first of them.
pub(crate) const BLOCK_PAGES: u64 = BLOCK_WORDS as u64 * WORD_BITS;

/// Set of pages with one owner: one bit for each of a fixed number of pages, and a summary.
///
/// Each bit of the summary covers 4096 pages, and is clear only if none of these pages is set. All
/// walks and set operations skip the blocks whose summary bit is clear. Therefore their cost for a
/// nearly clean guest of 12 TiB depends only on its dirty part. The words of a block are not
/// accessed before one of its pages is set, and the kernel allocates memory at the first access, so
/// the memory of a large bitmap depends only on that part, too.
///
/// Setting a page also sets a bit of the summary, in a word that 262,144 pages share and that is
/// therefore usually in a cache. Clearing single pages does not change the summary, because a stale
/// summary bit only costs a read of 512 bytes. Clearing all pages clears the blocks whose summary
/// bit is set. `vmferry-bench scan` measures these costs.
///
/// Invariants: where a bit of `summary` is clear, the words of `flat` that it covers are zero. Bits
/// at and beyond `len` are zero.
pub struct Bitmap {
    flat: FlatBitmap,
    summary: FlatBitmap,
}

impl Clone for Bitmap {
    /// Copies the parts that have set pages only.
    fn clone(&self) -> Self {
        let mut copy = Self::new(self.len());
        copy.union(self);
        copy
    }
}

impl std::fmt::Debug for Bitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bitmap({} of {} set)", self.count(), self.len())
    }
}

impl PartialEq for Bitmap {
    /// Returns whether the same pages are set. The summaries may differ.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.flat == other.flat
    }
}

impl Eq for Bitmap {}

impl From<FlatBitmap> for Bitmap {
    fn from(flat: FlatBitmap) -> Self {
        let mut map = Self { summary: FlatBitmap::new(flat.len().div_ceil(BLOCK_PAGES)), flat };
        map.tighten();
        map
    }
}

impl Bitmap {
    /// Creates an empty bitmap of `len` pages.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self { flat: FlatBitmap::new(len), summary: FlatBitmap::new(len.div_ceil(BLOCK_PAGES)) }
    }

    /// Creates a bitmap of `len` pages that are all set.
    #[must_use]
    pub fn full(len: u64) -> Self {
        Self { flat: FlatBitmap::full(len), summary: FlatBitmap::full(len.div_ceil(BLOCK_PAGES)) }
    }

    /// Returns the underlying bitmap, which has no summary.
    #[doc(hidden)]
    #[must_use]
    pub fn flat(&self) -> &FlatBitmap {
        &self.flat
    }

    /// Returns the underlying bitmap and the summary.
    pub(crate) fn into_parts(self) -> (FlatBitmap, FlatBitmap) {
        (self.flat, self.summary)
    }

    /// Returns the 64 pages from page `64 * index` on. Pages beyond the end are clear.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.flat.words().get(index).copied().unwrap_or(0)
    }

    /// Returns the parts of the bitmap that may have set pages, in order. Each part is the index of
    /// its first word, and its words. All words outside the parts are zero, and words in the parts
    /// may be zero.
    pub fn word_parts(&self) -> impl Iterator<Item = (usize, &[u64])> {
        self.parts(0..self.len()).map(|pages| (words_for(pages.start), self.words(pages)))
    }

    /// Returns the number of pages that the bitmap covers, set or not.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.flat.len()
    }

    /// Returns whether no page is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts(0..self.len()).all(|pages| !Scanner::best().any(self.words(pages)))
    }

    /// Returns whether `page` is set.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    #[must_use]
    pub fn test(&self, page: u64) -> bool {
        self.flat.test(page)
    }

    /// Sets `page` and returns whether it was set before.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn set(&mut self, page: u64) -> bool {
        let was = self.flat.set(page);
        self.summary.set(page / BLOCK_PAGES);
        was
    }

    /// Clears `page` and returns whether it was set before.
    ///
    /// # Panics
    /// Panics if `page >= len`.
    pub fn test_and_clear(&mut self, page: u64) -> bool {
        self.flat.test_and_clear(page)
    }

    /// Sets every page of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn set_range(&mut self, range: Range<u64>) {
        self.flat.set_range(range.clone());
        if !range.is_empty() {
            self.summary.set_range(blocks_of(&range));
        }
    }

    /// Clears every page of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    pub fn clear_range(&mut self, range: Range<u64>) {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        if range.is_empty() {
            return;
        }
        let Self { flat, summary } = self;
        for pages in parts(summary, range.clone()) {
            flat.clear_range(pages);
        }
        // Only blocks that lie completely in the range are known to be empty now.
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

    /// Returns the number of set pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count_range(0..self.len())
    }

    /// Returns the number of set pages in `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn count_range(&self, range: Range<u64>) -> u64 {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        self.parts(range).map(|pages| self.flat.count_range(pages)).sum()
    }

    /// Returns the first set page at or after `page`, or `None` if there is none.
    #[must_use]
    pub fn next_set(&self, page: u64) -> Option<u64> {
        self.bits_in(page.min(self.len())..self.len()).next()
    }

    /// Adds the pages of `other` to the set.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn union(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "bitmaps of the same region");
        for pages in other.parts(0..other.len()) {
            self.flat.union_range(pages, &other.flat);
        }
        self.summary.union(&other.summary);
    }

    /// Removes the pages of `other` from the set.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn subtract(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "bitmaps of the same region");
        for pages in other.parts(0..other.len()) {
            self.flat.subtract_range(pages, &other.flat);
        }
    }

    /// Clears the pages of `range` that are not set in `other`. Pages outside `range` keep their
    /// state.
    ///
    /// # Panics
    /// Panics if the lengths differ or `range` ends beyond `len`.
    pub fn retain_range(&mut self, range: Range<u64>, other: &Self) {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        assert_eq!(self.len(), other.len(), "bitmaps of the same region");
        let Self { flat, summary } = self;
        for pages in parts(summary, range) {
            flat.retain_range(pages, &other.flat);
        }
    }

    /// Adds the pages that are set in `log`, a dirty log in the format of the kernel whose first
    /// bit is page 0. The log may be shorter or longer than the bitmap. Bits beyond `len` are
    /// ignored.
    pub fn union_words(&mut self, log: &[u64]) {
        let words = log.len().min(self.flat.words().len());
        self.union_words_at(0, &log[..words]);
    }

    /// Adds the pages that are set in `bits`, whose first bit is page `64 * word`. Bits beyond
    /// `len` are ignored.
    ///
    /// # Panics
    /// Panics if `bits` has a set bit and the bitmap has no such word.
    pub fn union_word(&mut self, word: usize, bits: u64) {
        if bits != 0 {
            self.flat.union_word(word, bits);
            self.summary.set((word / BLOCK_WORDS) as u64);
        }
    }

    /// Adds the pages that are set in `log`, a dirty log in the format of the kernel whose first
    /// bit is page `64 * first`. Where the log is empty, neither the pages nor the summary is
    /// accessed. Bits beyond `len` are ignored.
    ///
    /// # Panics
    /// Panics if the log has words beyond the last word of this bitmap.
    pub fn union_words_at(&mut self, first: usize, log: &[u64]) {
        assert!(first + log.len() <= self.flat.words().len(), "a log beyond the end of the bitmap");
        let (scanner, mut batch) = (Scanner::best(), Batch::new(log));
        // The blocks of the log must be aligned to the blocks of the summary.
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

    /// Adds pages like [`Self::union_words_at`], and calls `each` with the maximal runs of the
    /// pages that were not set before, in order.
    ///
    /// # Panics
    /// Panics if the log has words beyond the last word of this bitmap.
    pub fn merge_words(&mut self, first: usize, log: &[u64], mut each: impl FnMut(Range<u64>)) {
        let Self { flat, summary } = self;
        let mut last = None;
        flat.merge_words(first, log, |run| {
            let blocks = blocks_of(&run);
            // FlatRuns arrive in order, and a block often has many.
            if last != Some(blocks.end) || blocks.end - blocks.start > 1 {
                last = Some(blocks.end);
                summary.set_range(blocks);
            }
            each(run);
        });
    }

    /// Returns an iterator over the set pages as maximal runs, in order.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        self.runs_in(0..self.len())
    }

    /// Returns an iterator over the set pages of `range` as maximal runs, in order. FlatRuns are
    /// cut at the ends of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn runs_in(&self, range: Range<u64>) -> Runs<'_> {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        Runs { inner: self.flat.runs_in(0..0), parts: self.parts(range) }
    }

    /// Calls `each` with every run that [`Self::runs`] returns.
    pub fn for_each_run(&self, mut each: impl FnMut(Range<u64>)) {
        self.runs().fold((), |(), run| each(run));
    }

    /// Returns an iterator over the set pages, in order.
    #[must_use]
    pub fn bits(&self) -> Bits<'_> {
        self.bits_in(0..self.len())
    }

    /// Returns an iterator over the set pages of `range`, in order.
    ///
    /// # Panics
    /// Panics if `range` ends beyond `len`.
    #[must_use]
    pub fn bits_in(&self, range: Range<u64>) -> Bits<'_> {
        assert!(range.end <= self.len(), "range {range:?} of {}", self.len());
        Bits { inner: self.flat.bits_in(0..0), parts: self.parts(range) }
    }

    /// Calls `each` with every set page, in order.
    pub fn for_each_bit(&self, mut each: impl FnMut(u64)) {
        let scanner = Scanner::best();
        self.parts(0..self.len()).for_each(|pages| scanner.for_each_bit(self.flat.words(), pages, &mut each));
    }

    /// Clears the stale bits of the summary, for which it reads the whole bitmap. This is useful
    /// after many single pages were cleared.
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

    /// Returns the words of `pages`, which start at a word boundary and end at a word boundary or
    /// at the end of the bitmap.
    fn words(&self, pages: Range<u64>) -> &[u64] {
        &self.flat.words()[words_for(pages.start)..words_for(pages.end)]
    }
}

/// Returns the blocks that `range` (not empty) touches.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_PAGES..(range.end - 1) / BLOCK_PAGES + 1
}

/// Maximum number of consecutive empty blocks that are read instead of skipped. Reading the next
/// block in order costs a read of 512 bytes. A skip costs a fetch that no prefetcher foresees, and
/// two or three mispredicted branches.
const JUMP_BLOCKS: u64 = 8;

/// Returns the parts of `range` that may have set pages. All pages outside the parts are clear.
/// Empty blocks separate two parts, so no run of pages crosses from one part to the next.
fn parts(summary: &FlatBitmap, range: Range<u64>) -> Parts<'_> {
    let blocks = if range.is_empty() { 0..0 } else { blocks_of(&range) };
    if blocks.end - blocks.start <= JUMP_BLOCKS {
        // All blocks are one part.
        let next = (summary.count_range(blocks.clone()) > 0).then_some(blocks);
        return Parts { blocks: None, next, range };
    }
    let mut blocks = summary.runs_in(blocks);
    Parts { next: blocks.next(), blocks: Some(blocks), range }
}

#[derive(Debug, Clone)]
struct Parts<'a> {
    /// Runs of summary bits that are in no returned part and not in `next`.
    blocks: Option<FlatRuns<'a>>,
    /// Last result of `blocks`, which is in no returned part yet.
    next: Option<Range<u64>>,
    range: Range<u64>,
}

impl Iterator for Parts<'_> {
    type Item = Range<u64>;

    #[inline]
    fn next(&mut self) -> Option<Range<u64>> {
        let mut blocks = self.next.take()?;
        for more in self.blocks.iter_mut().flatten() {
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

/// Iterator over the runs of a [`Bitmap`]; see [`Bitmap::runs`]. Allocates nothing.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    inner: FlatRuns<'a>,
    parts: Parts<'a>,
}

impl Iterator for Runs<'_> {
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

impl std::iter::FusedIterator for Runs<'_> {}

/// Iterator over the set pages of a [`Bitmap`]; see [`Bitmap::bits`]. Allocates nothing.
#[derive(Debug, Clone)]
pub struct Bits<'a> {
    inner: FlatBits<'a>,
    parts: Parts<'a>,
}

impl Iterator for Bits<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        loop {
            if let Some(bit) = self.inner.next() {
                return Some(bit);
            }
            self.inner.restart(self.parts.next()?);
        }
    }

    fn fold<B, F: FnMut(B, u64) -> B>(self, init: B, mut f: F) -> B {
        let folded = self.inner.clone().fold(init, &mut f);
        self.parts.fold(folded, |folded, pages| self.inner.fold_in(pages, folded, &mut f))
    }
}

impl std::iter::FusedIterator for Bits<'_> {}
