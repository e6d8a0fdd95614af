//! Search for set bits at the speed of memory.
//!
//! A kernel examines words in blocks (64 words, 512 bytes, 4096 pages), and returns a mask of the
//! words of each block that need a visit. The callers ([`walk`] and the iterators) visit only those
//! words. Two rules determine the speed:
//!
//! - *Few branch mispredictions.* On a sparse bitmap a mispredicted branch costs more than reading
//!   a kilobyte. Therefore the masks of a whole batch of blocks are computed without branches
//!   before any word is visited.
//! - *Only reads where nothing is set.* After an empty hop (4 KiB) the words of the next hop are
//!   first only or-ed together, at the speed of the cache. Masks are computed only if the result is
//!   not zero.
//!
//! Unsafe code is in `avx2` and `avx512` only. A kernel is a value that can be created only on a
//! processor that has the instructions, so code that holds a kernel may use it.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector loads, and calls of functions that need processor features")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "vector loads and stores, and calls of functions that need processor features"
)]
mod avx512;
mod portable;
pub(crate) mod walk;

use crate::{FlatBits, FlatRuns};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;

/// Number of words in a block: one for each bit of a mask.
pub(crate) const BLOCK_WORDS: usize = 64;
/// Number of blocks in a batch: one for each bit of the upper mask. A batch has 16 KiB, and stays
/// in the L1 cache until its words have been visited.
pub(crate) const BATCH_BLOCKS: usize = 32;
/// Number of words in a batch.
pub(crate) const BATCH_WORDS: usize = BATCH_BLOCKS * BLOCK_WORDS;
/// Number of blocks in a hop. On an empty bitmap the check at the end of each hop costs less than a
/// tenth of reading 4 KiB.
const HOP_BLOCKS: usize = 8;
/// Number of words in a hop.
const HOP_WORDS: usize = HOP_BLOCKS * BLOCK_WORDS;
/// Minimum number of nonzero words in a block that is visited by its edges. A block with fewer is
/// visited word by word. Computing edges costs about as much as visiting eight words, and saves
/// only the visits within runs.
pub(crate) const DENSE_WORDS: u32 = 16;
/// Minimum number of nonzero words in a block whose words are likely to have several bits each, in
/// an unpredictable number.
pub(crate) const CROWDED_WORDS: u32 = 56;

/// Minimum number of words of a bitmap that is unlikely to be in a cache: 8 MiB, for 256 GiB of
/// pages.
const FAR_WORDS: usize = 1 << 20;

/// Words of one block.
type Block = [u64; BLOCK_WORDS];

/// Result of a kernel for up to [`BATCH_WORDS`] words.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    /// Mask of the nonzero words of each block. Valid only where the upper mask has a bit: the
    /// other entries are not written.
    pub(crate) masks: [u64; BATCH_BLOCKS],
    /// True if the last hop was empty, so the cheap check of the next hop is worth its cost.
    quiet: bool,
    /// True if the words are too many for a cache and come from memory.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only the AVX-512 kernel reads this field")
    )]
    far: bool,
}

impl Batch {
    /// Creates the state of a walk over `words`.
    #[inline(always)]
    pub(crate) fn new(words: &[u64]) -> Self {
        Self { masks: [0; BATCH_BLOCKS], quiet: true, far: words.len() >= FAR_WORDS }
    }
}

/// Maximum number of words that one call of [`Kernel::positions`] accepts.
pub(crate) const POSITION_WORDS: usize = 16;

/// Buffer for bit numbers. The buffer is not initialized, because initialization would cost more
/// than most walks.
pub(crate) struct Positions(
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only the AVX-512 kernel fills it"))]
    [MaybeUninit<u16>; POSITION_WORDS * 64],
);

impl Positions {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self([MaybeUninit::uninit(); POSITION_WORDS * 64])
    }
}

/// Operations that differ from processor to processor.
pub(crate) trait Kernel: Copy {
    /// True if [`Self::positions`] is implemented. If false, the caller loops over the bits of each
    /// word.
    const HAS_POSITIONS: bool;

    /// Returns the mask of the blocks of `words` (at most [`BATCH_WORDS`]) that have a nonzero
    /// word, and stores the masks of their words in `batch.masks`.
    fn nonzero(self, words: &[u64], batch: &mut Batch) -> u32;

    /// Returns the mask of the words in `block` (at most [`BLOCK_WORDS`]) in which a run starts or
    /// ends. `open` says that a run is open at the start of the block. A run ends at the first bit
    /// after it.
    fn edges(self, block: &[u64], open: bool) -> u64;

    /// Returns the numbers of the bits that are set in `words` (at most [`POSITION_WORDS`]), in
    /// order.
    fn positions<'a>(self, words: &[u64], into: &'a mut Positions) -> &'a [u16];

    /// FlatRuns `work`, compiled for this processor.
    fn work<W: Work>(self, work: W) -> W::Out;
}

/// Operation that runs with any kernel. Implementations are `#[inline(always)]`, so they are
/// compiled again within each kernel's `work`, with the instructions of that kernel.
pub(crate) trait Work {
    type Out;
    fn run<K: Kernel>(self, kernel: K) -> Self::Out;
}

/// Scanner that finds set bits with the instructions of this processor.
#[derive(Debug, Clone, Copy)]
pub struct Scanner(Level);

#[derive(Debug, Clone, Copy)]
enum Level {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Scanner {
    /// Returns the fastest scanner that this processor supports. The choice is made once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Scanner> = OnceLock::new();
        *BEST.get_or_init(|| {
            let found = Self::all().into_iter().find_map(|(_, scanner)| scanner.ok());
            found.unwrap_or(Self(Level::Portable(portable::Portable)))
        })
    }

    /// Returns the name of every scanner, fastest first, with the scanner or the reason why this
    /// processor does not support it.
    #[must_use]
    pub fn all() -> Vec<(&'static str, Result<Self, &'static str>)> {
        vec![
            #[cfg(target_arch = "x86_64")]
            ("avx512", avx512::Avx512::detect().map(|kernel| Self(Level::Avx512(kernel)))),
            #[cfg(target_arch = "x86_64")]
            ("avx2", avx2::Avx2::detect().map(|kernel| Self(Level::Avx2(kernel)))),
            ("portable", Ok(Self(Level::Portable(portable::Portable)))),
        ]
    }

    /// Returns the name of the scanner: `avx512`, `avx2` or `portable`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "avx512",
        }
    }

    /// Calls `each` with every set bit of `words` within `range` (in bits), in order.
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    pub fn for_each_bit(self, words: &[u64], range: Range<u64>, mut each: impl FnMut(u64)) {
        self.fold_bits(words, range, (), |(), bit| each(bit));
    }

    /// Folds the set bits of `words` within `range` (in bits), in order. A fold is faster than a
    /// closure with captured state, because the value stays in registers.
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    pub fn fold_bits<B>(self, words: &[u64], range: Range<u64>, init: B, fold: impl FnMut(B, u64) -> B) -> B {
        self.work(walk::FoldBits { words, range, init, fold })
    }

    /// Calls `each` with every maximal run of set bits of `words` within `range` (in bits), in
    /// order. FlatRuns are cut at the ends of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    pub fn for_each_run(self, words: &[u64], range: Range<u64>, mut each: impl FnMut(Range<u64>)) {
        self.fold_runs(words, range, (), |(), run| each(run));
    }

    /// Folds the maximal runs of set bits of `words` within `range` (in bits), in order; see
    /// [`Self::fold_bits`].
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    pub fn fold_runs<B>(
        self,
        words: &[u64],
        range: Range<u64>,
        init: B,
        fold: impl FnMut(B, Range<u64>) -> B,
    ) -> B {
        self.work(walk::FoldRuns { words, range, init, fold })
    }

    /// Returns an iterator over the set bits of `words` within `range` (in bits), in order.
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    #[must_use]
    pub fn bits(self, words: &[u64], range: Range<u64>) -> FlatBits<'_> {
        FlatBits::new(self, words, range)
    }

    /// Returns an iterator over the maximal runs of set bits of `words` within `range` (in bits),
    /// in order. FlatRuns are cut at the ends of `range`.
    ///
    /// # Panics
    /// Panics if `range` ends beyond the words.
    #[must_use]
    pub fn runs(self, words: &[u64], range: Range<u64>) -> FlatRuns<'_> {
        FlatRuns::new(self, words, range)
    }

    /// Returns the number of set bits in `words`.
    #[must_use]
    pub fn count(self, words: &[u64]) -> u64 {
        self.work(walk::Count { words })
    }

    /// Returns whether any bit of `words` is set. Stops at the first batch of 2048 words that has a
    /// set bit.
    #[must_use]
    pub fn any(self, words: &[u64]) -> bool {
        let mut batch = Batch::new(words);
        words.chunks(BATCH_WORDS).any(|chunk| self.nonzero(chunk, &mut batch) != 0)
    }

    pub(crate) fn work<W: Work>(self, work: W) -> W::Out {
        match self.0 {
            Level::Portable(kernel) => kernel.work(work),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(kernel) => kernel.work(work),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(kernel) => kernel.work(work),
        }
    }

    pub(crate) fn nonzero(self, words: &[u64], batch: &mut Batch) -> u32 {
        match self.0 {
            Level::Portable(kernel) => kernel.nonzero(words, batch),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(kernel) => kernel.nonzero(words, batch),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(kernel) => kernel.nonzero(words, batch),
        }
    }

    pub(crate) fn edges(self, block: &[u64], open: bool) -> u64 {
        match self.0 {
            Level::Portable(kernel) => kernel.edges(block, open),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(kernel) => kernel.edges(block, open),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(kernel) => kernel.edges(block, open),
        }
    }
}

/// Returns the number of words before the first one that starts a cache line, so that no later load
/// spans two lines. The result is 0 if `words` is too short for that to pay off.
#[inline(always)]
pub(crate) fn words_to_line(words: &[u64]) -> usize {
    const LINE_BYTES: usize = 64;
    const WORTH_WORDS: usize = 4 * BLOCK_WORDS;
    if words.len() < WORTH_WORDS { 0 } else { words.as_ptr().align_offset(LINE_BYTES).min(words.len()) }
}

/// Splits `words` at the start of a cache line; see [`words_to_line`].
#[inline(always)]
pub(crate) fn split_at_line(words: &[u64]) -> (&[u64], &[u64]) {
    words.split_at(words_to_line(words))
}

/// Processes a batch hop by hop; all kernels use this function. `empty` is the cheap check of a
/// hop, `look` computes the mask of a block without branches, and `look_rest` computes the mask of
/// a partial block.
#[inline(always)]
fn by_hops(
    words: &[u64],
    batch: &mut Batch,
    empty: impl Fn(&[u64]) -> bool,
    look: impl Fn(&Block) -> u64,
    look_rest: impl Fn(&[u64]) -> u64,
) -> u32 {
    let (hops, rest) = words.as_chunks::<HOP_WORDS>();
    let (masks, rest_masks) = batch.masks.split_at_mut(hops.len() * HOP_BLOCKS);
    let mut top = 0;
    // The compiler knows the length of a hop. The rest has a variable length.
    for (index, (hop, masks)) in hops.iter().zip(masks.as_chunks_mut::<HOP_BLOCKS>().0).enumerate() {
        if batch.quiet && empty(hop) {
            continue;
        }
        let mut found = 0;
        for (at, (block, mask)) in hop.as_chunks::<BLOCK_WORDS>().0.iter().zip(masks).enumerate() {
            *mask = look(block);
            found |= u32::from(*mask != 0) << at;
        }
        batch.quiet = found == 0;
        top |= found << (index * HOP_BLOCKS);
    }
    if rest.is_empty() || batch.quiet && empty(rest) {
        return top;
    }
    for (at, (block, mask)) in rest.chunks(BLOCK_WORDS).zip(rest_masks).enumerate() {
        *mask = match block.try_into() {
            Ok(block) => look(block),
            Err(_) => look_rest(block),
        };
        top |= u32::from(*mask != 0) << (hops.len() * HOP_BLOCKS + at);
    }
    top
}

/// Computes the edges of a block from three masks of its words. A word has no edge if no run is
/// open before it and it is zero, or if a run is open and all its bits are set. A run is open
/// before a word if the last bit of the previous word is set.
#[inline(always)]
fn edges_of(zero: u64, ones: u64, ends_set: u64, open: bool) -> u64 {
    let opened = ends_set << 1 | u64::from(open);
    !((zero & !opened) | (ones & opened))
}
