//! The kernel for processors with AVX-512 as of Ice Lake and Zen 4.

use super::avx2::nonzero_words;
use super::{BLOCK_WORDS, Batch, Block, Kernel, Work, by_hops, edges_of};
use std::arch::x86_64::{
    __m512i, _mm512_cmpeq_epi64_mask, _mm512_loadu_si512, _mm512_maskz_loadu_epi64, _mm512_movepi64_mask,
    _mm512_or_si512, _mm512_set1_epi64, _mm512_setzero_si512, _mm512_test_epi64_mask,
};

/// Words of a vector.
const LANES: usize = 8;

/// Proof that the processor has F, BW, DQ, VL and VPOPCNTDQ of AVX-512, and what AVX2 machines have.
///
/// Invariant: only [`Avx512::detect`] makes one, and it looks for every feature that functions here are compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Result<Self, &'static str> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vpopcntdq")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        if found { Ok(Self(())) } else { Err("this processor has no AVX-512 with VPOPCNTDQ") }
    }
}

impl Kernel for Avx512 {
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

    #[inline]
    fn work<W: Work>(self, work: W) -> W::Out {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,avx2,bmi1,bmi2,lzcnt,popcnt")]
        fn here<W: Work>(kernel: Avx512, work: W) -> W::Out {
            work.run(kernel)
        }
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { here(self, work) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn nonzero(words: &[u64], batch: &mut Batch) -> u32 {
    // Eight masks of eight lanes have to go one by one from mask registers to a word; packing as AVX2 does is faster.
    let look = |block: &Block| nonzero_words(block);
    by_hops(words, batch, |hop| is_empty(hop), look, |rest| lanes_where(rest, |vector| test(vector)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn edges(block: &[u64], open: bool) -> u64 {
    let zero = !lanes_where(block, |vector| test(vector));
    let ones = lanes_where(block, |vector| _mm512_cmpeq_epi64_mask(vector, _mm512_set1_epi64(-1)));
    let ends_set = lanes_where(block, |vector| _mm512_movepi64_mask(vector));
    edges_of(zero, ones, ends_set, open) & (u64::MAX >> (BLOCK_WORDS - block.len()))
}

#[target_feature(enable = "avx512f")]
fn test(vector: __m512i) -> u8 {
    _mm512_test_epi64_mask(vector, vector)
}

/// The words of `block` (at most 64) for which `pick` has a bit; none behind its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn lanes_where(block: &[u64], pick: impl Fn(__m512i) -> u8) -> u64 {
    let (vectors, rest) = block.as_chunks::<LANES>();
    let mut mask = 0;
    for (index, vector) in vectors.iter().enumerate() {
        mask |= u64::from(pick(load(vector))) << (index * LANES);
    }
    if !rest.is_empty() {
        let lanes = u8::MAX >> (LANES - rest.len());
        // SAFETY: `lanes` has a bit for each word of `rest` and no other, and masked lanes are not read.
        let vector = unsafe { _mm512_maskz_loadu_epi64(lanes, rest.as_ptr().cast()) };
        mask |= u64::from(pick(vector) & lanes) << (vectors.len() * LANES);
    }
    mask
}

/// Whether all words are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn is_empty(words: &[u64]) -> bool {
    let mut all = [_mm512_setzero_si512(); 4];
    let (vectors, rest) = words.as_chunks::<LANES>();
    let (quads, singles) = vectors.as_chunks::<4>();
    for quad in quads {
        for (all, vector) in all.iter_mut().zip(quad) {
            *all = _mm512_or_si512(*all, load(vector));
        }
    }
    for vector in singles {
        all[0] = _mm512_or_si512(all[0], load(vector));
    }
    let all = _mm512_or_si512(_mm512_or_si512(all[0], all[1]), _mm512_or_si512(all[2], all[3]));
    test(all) == 0 && rest.iter().fold(0, |all, word| all | word) == 0
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(words: &[u64; LANES]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes that are read, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}
