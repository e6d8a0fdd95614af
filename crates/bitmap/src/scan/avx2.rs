//! Kernel for processors with AVX2: nearly all x86-64 processors since 2013.

use super::{BLOCK_WORDS, Batch, Block, Kernel, Positions, Work, by_hops, edges_of};
use std::arch::x86_64::{
    __m256i, _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_epi8,
    _mm256_movemask_pd, _mm256_or_si256, _mm256_packs_epi16, _mm256_packs_epi32, _mm256_permutevar8x32_epi32,
    _mm256_set1_epi64x, _mm256_setr_epi8, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_testz_si256,
};

/// Number of words in a vector.
const LANES: usize = 4;
/// Number of words that one call of [`zeros`] handles: half a block.
const HALF: usize = 32;

/// Proof that the processor has AVX2, BMI1, BMI2, LZCNT and POPCNT.
///
/// Invariant: only [`Avx2::detect`] creates a value, and it checks every feature that the functions
/// of this module are compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Result<Self, &'static str> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        if found { Ok(Self(())) } else { Err("this processor has no AVX2 with BMI2") }
    }
}

impl Kernel for Avx2 {
    const HAS_POSITIONS: bool = false;

    #[inline(always)]
    fn nonzero(self, words: &[u64], batch: &mut Batch) -> u32 {
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { nonzero(words, batch) }
    }

    #[inline(always)]
    fn edges(self, block: &[u64], open: bool) -> u64 {
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { edges(block, open) }
    }

    fn positions<'a>(self, _: &[u64], _: &'a mut Positions) -> &'a [u16] {
        unreachable!("never called: HAS_POSITIONS is false")
    }

    #[inline]
    fn work<W: Work>(self, work: W) -> W::Out {
        #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
        fn with_features<W: Work>(kernel: Avx2, work: W) -> W::Out {
            work.run(kernel)
        }
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { with_features(self, work) }
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn nonzero(words: &[u64], batch: &mut Batch) -> u32 {
    by_hops(
        words,
        batch,
        |hop| is_empty(hop),
        |block| nonzero_words(block),
        |rest| {
            !lanes_where(rest, |vector| is_zero(vector), |word| word == 0)
                & (u64::MAX >> (BLOCK_WORDS - rest.len()))
        },
    )
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn edges(block: &[u64], open: bool) -> u64 {
    let zero = lanes_where(block, |vector| is_zero(vector), |word| word == 0);
    let ones = lanes_where(
        block,
        |vector| _mm256_cmpeq_epi64(vector, _mm256_set1_epi64x(-1)),
        |word| word == u64::MAX,
    );
    // `movemask` takes the top bits of the lanes, so the words themselves can be used.
    let ends_set = lanes_where(block, |vector| vector, |word| word >> 63 != 0);
    edges_of(zero, ones, ends_set, open) & (u64::MAX >> (BLOCK_WORDS - block.len()))
}

#[inline]
#[target_feature(enable = "avx2")]
fn is_zero(vector: __m256i) -> __m256i {
    _mm256_cmpeq_epi64(vector, _mm256_setzero_si256())
}

/// Returns the mask of the words in `block` (at most 64) for which `pick` sets the top bit of the
/// lane or `pick_word` returns true.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes_where(block: &[u64], pick: impl Fn(__m256i) -> __m256i, pick_word: impl Fn(u64) -> bool) -> u64 {
    let (vectors, rest) = block.as_chunks::<LANES>();
    let mut mask = 0;
    for (index, vector) in vectors.iter().enumerate() {
        let lanes = _mm256_movemask_pd(_mm256_castsi256_pd(pick(load(vector))));
        mask |= u64::from(lanes.cast_unsigned()) << (index * LANES);
    }
    for (index, &word) in rest.iter().enumerate() {
        mask |= u64::from(pick_word(word)) << (vectors.len() * LANES + index);
    }
    mask
}

/// Returns the mask of the nonzero words of a block.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn nonzero_words(block: &Block) -> u64 {
    let (halves, _) = block.as_chunks::<HALF>();
    !(u64::from(zeros(&halves[0])) | u64::from(zeros(&halves[1])) << HALF)
}

/// Returns the mask of the zero words of half a block. Packing the comparisons costs half as much
/// as a mask of each vector.
#[inline]
#[target_feature(enable = "avx2")]
fn zeros(half: &[u64; HALF]) -> u32 {
    let (vectors, _) = half.as_chunks::<LANES>();
    let pair =
        |at: usize| _mm256_packs_epi32(is_zero(load(&vectors[2 * at])), is_zero(load(&vectors[2 * at + 1])));
    let quad = |at: usize| _mm256_packs_epi16(pair(2 * at), pair(2 * at + 1));
    // Each word is two bytes now. One more packing makes it one byte.
    let bytes = _mm256_packs_epi16(quad(0), quad(1));
    // Packing works within 128-bit halves. Byte 2v + l of the lower half is word 4v + l of vector
    // v, and the upper half has the words 4v + 2 + l. The group g of four bytes of each half has
    // the vectors 2g and 2g + 1.
    let groups = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    #[rustfmt::skip]
    let order = _mm256_setr_epi8(
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
        0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
    );
    _mm256_movemask_epi8(_mm256_shuffle_epi8(groups, order)).cast_unsigned()
}

/// Returns whether all words are zero.
#[inline]
#[target_feature(enable = "avx2")]
fn is_empty(words: &[u64]) -> bool {
    let mut all = [_mm256_setzero_si256(); 4];
    let (vectors, rest) = words.as_chunks::<LANES>();
    let (quads, singles) = vectors.as_chunks::<4>();
    for quad in quads {
        for (all, vector) in all.iter_mut().zip(quad) {
            *all = _mm256_or_si256(*all, load(vector));
        }
    }
    for vector in singles {
        all[0] = _mm256_or_si256(all[0], load(vector));
    }
    let all = _mm256_or_si256(_mm256_or_si256(all[0], all[1]), _mm256_or_si256(all[2], all[3]));
    _mm256_testz_si256(all, all) != 0 && rest.iter().fold(0, |all, word| all | word) == 0
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(words: &[u64; LANES]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes that are read, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}
