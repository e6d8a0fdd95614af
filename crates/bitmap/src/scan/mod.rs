//! Finding what is set, as fast as memory can be read.
//!
//! A kernel looks at words by the block (64 words, 512 bytes, 4096 pages) and answers with a mask of the words that are
//! worth a look; whoever walks the bitmap ([`walk`], the iterators) visits only those. Two things decide its speed:
//!
//! - *Few surprises for the branch predictor.* On a sparse bitmap a mispredicted branch costs more than reading a
//!   kilobyte. So masks are computed without branches, for a whole batch of blocks, before any of them is looked at.
//! - *Nothing but reading where nothing is set.* After an empty hop (4 KiB) the next one is first only or-ed together,
//!   at the speed of the cache, and looked at by words only if something is in it.
//!
//! Unsafe code is in `avx2` and `avx512` only. Their kernels are values that can be made only on a processor that has the
//! instructions, so whoever holds one may use it.

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector loads, and calls of what needs the processor's features")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector loads and stores, and calls of what needs the processor's features")]
mod avx512;
mod portable;
pub(crate) mod walk;

use crate::{Bits, Runs};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;

/// Words of a block: as many as a mask has bits.
pub(crate) const BLOCK_WORDS: usize = 64;
/// Blocks of a batch: as many as its upper mask has bits. 16 KiB: a batch stays in the L1 cache until it was visited.
pub(crate) const BATCH_BLOCKS: usize = 32;
/// Words of a batch.
pub(crate) const BATCH_WORDS: usize = BATCH_BLOCKS * BLOCK_WORDS;
/// Blocks of a hop. On an empty bitmap the check at the end of each costs less than a tenth of reading 4 KiB.
const HOP_BLOCKS: usize = 8;
/// Words of a hop.
const HOP_WORDS: usize = HOP_BLOCKS * BLOCK_WORDS;
/// A block of which at least as many words are set is asked for its edges, one of fewer is visited word by word. Edges cost
/// about what visiting eight words does, and spare the visits within runs only.
pub(crate) const DENSE_WORDS: u32 = 16;
/// A block of which at least as many words are set is likely to have several bits in each, by an unforeseeable number.
pub(crate) const CROWDED_WORDS: u32 = 56;

/// Words of a bitmap that is hardly in a cache: 8 MiB, of 256 GiB of pages.
const FAR_WORDS: usize = 1 << 20;

/// One block.
type Block = [u64; BLOCK_WORDS];

/// What a kernel found in up to [`BATCH_WORDS`] words.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    /// For each block the words that are not zero. Valid only where the upper mask has a bit: nobody writes the others.
    pub(crate) masks: [u64; BATCH_BLOCKS],
    /// Whether the last hop was empty, so that the next is worth the cheap look first.
    quiet: bool,
    /// Whether the words are too many for a cache, and come from memory.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only the AVX-512 kernel looks"))]
    far: bool,
}

impl Batch {
    /// For a walk over these words.
    #[inline(always)]
    pub(crate) fn new(words: &[u64]) -> Self {
        Self { masks: [0; BATCH_BLOCKS], quiet: true, far: words.len() >= FAR_WORDS }
    }
}

/// Words whose bits [`Kernel::positions`] finds at once.
pub(crate) const POSITION_WORDS: usize = 16;

/// Room for the numbers of bits: not filled beforehand, which would cost more than most walks.
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

/// What differs from processor to processor.
pub(crate) trait Kernel: Copy {
    /// Whether there is a way to [`Self::positions`] that is better than a loop over each word.
    const HAS_POSITIONS: bool;

    /// The blocks of `words` (at most [`BATCH_WORDS`]) that have a word that is not zero; their words in `batch.masks`.
    fn nonzero(self, words: &[u64], batch: &mut Batch) -> u32;

    /// The words of `block` (at most [`BLOCK_WORDS`]) in which a run starts or ends, given whether a run is `open` at its
    /// beginning. An end stands at the first bit behind the run.
    fn edges(self, block: &[u64], open: bool) -> u64;

    /// The numbers of the bits that are set in `words` (at most [`POSITION_WORDS`]), in order.
    fn positions<'a>(self, words: &[u64], into: &'a mut Positions) -> &'a [u16];

    /// Does `work`, compiled for this processor.
    fn work<W: Work>(self, work: W) -> W::Out;
}

/// Something to do with any kernel. Implementations are `#[inline(always)]`, so that they are compiled anew within each
/// kernel's `work`, with its instructions.
pub(crate) trait Work {
    type Out;
    fn run<K: Kernel>(self, kernel: K) -> Self::Out;
}

/// Looks through words with the instructions that this processor has.
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
    /// The fastest scanner that this processor has. Chosen once.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Scanner> = OnceLock::new();
        *BEST.get_or_init(|| {
            let found = Self::all().into_iter().find_map(|(_, scanner)| scanner.ok());
            found.unwrap_or(Self(Level::Portable(portable::Portable)))
        })
    }

    /// Every scanner by name, fastest first, or what this processor lacks for it.
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

    /// Its name: `avx512`, `avx2` or `portable`.
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
    /// If `range` ends beyond the words.
    pub fn for_each_bit(self, words: &[u64], range: Range<u64>, mut each: impl FnMut(u64)) {
        self.fold_bits(words, range, (), |(), bit| each(bit));
    }

    /// Folds the set bits of `words` within `range` (in bits), in order. Faster than a closure with captured state: the
    /// value stays in registers.
    ///
    /// # Panics
    /// If `range` ends beyond the words.
    pub fn fold_bits<B>(self, words: &[u64], range: Range<u64>, init: B, fold: impl FnMut(B, u64) -> B) -> B {
        self.work(walk::FoldBits { words, range, init, fold })
    }

    /// Calls `each` with every maximal run of set bits of `words` within `range` (in bits), in order; runs are cut at the
    /// ends of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond the words.
    pub fn for_each_run(self, words: &[u64], range: Range<u64>, mut each: impl FnMut(Range<u64>)) {
        self.fold_runs(words, range, (), |(), run| each(run));
    }

    /// Folds the maximal runs of set bits of `words` within `range` (in bits), in order; see [`Self::fold_bits`].
    ///
    /// # Panics
    /// If `range` ends beyond the words.
    pub fn fold_runs<B>(
        self,
        words: &[u64],
        range: Range<u64>,
        init: B,
        fold: impl FnMut(B, Range<u64>) -> B,
    ) -> B {
        self.work(walk::FoldRuns { words, range, init, fold })
    }

    /// The set bits of `words` within `range` (in bits), in order.
    ///
    /// # Panics
    /// If `range` ends beyond the words.
    #[must_use]
    pub fn bits(self, words: &[u64], range: Range<u64>) -> Bits<'_> {
        Bits::new(self, words, range)
    }

    /// The maximal runs of set bits of `words` within `range` (in bits), in order; cut at the ends of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond the words.
    #[must_use]
    pub fn runs(self, words: &[u64], range: Range<u64>) -> Runs<'_> {
        Runs::new(self, words, range)
    }

    /// How many bits of `words` are set.
    #[must_use]
    pub fn count(self, words: &[u64]) -> u64 {
        self.work(walk::Count { words })
    }

    /// Whether a bit of `words` is set. Stops at the first.
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

/// How many of `words` a walk takes before the rest begins at a cache line, so that no load of the rest spans two lines.
/// Few words are not worth it.
#[inline(always)]
pub(crate) fn words_to_line(words: &[u64]) -> usize {
    const LINE_BYTES: usize = 64;
    const WORTH_WORDS: usize = 4 * BLOCK_WORDS;
    if words.len() < WORTH_WORDS { 0 } else { words.as_ptr().align_offset(LINE_BYTES).min(words.len()) }
}

/// The words before a cache line begins, and the others.
#[inline(always)]
pub(crate) fn split_at_line(words: &[u64]) -> (&[u64], &[u64]) {
    words.split_at(words_to_line(words))
}

/// Goes through a batch hop by hop, as every kernel does: `empty` is the cheap look at a hop, `look` the branchless one at a
/// block, `look_rest` that at a part of one.
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
    // Hops are of a length that the compiler knows, and the rest is not.
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

/// From three masks of a block's words to its edges. A word is quiet if no run is open before it and it is zero, or if one
/// is open and all its bits are set; a run is open before it if the word before ends in a set bit.
#[inline(always)]
fn edges_of(zero: u64, ones: u64, ends_set: u64, open: bool) -> u64 {
    let opened = ends_set << 1 | u64::from(open);
    !((zero & !opened) | (ones & opened))
}
