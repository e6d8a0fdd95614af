//! Kernel for processors with AVX-512 as of Ice Lake and Zen 4.

use super::avx2::nonzero_words;
use super::{BATCH_WORDS, Batch, Block, HOP_WORDS, Kernel, POSITION_WORDS, Positions, Work, by_hops};
use std::arch::x86_64::{
    __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi16, _mm512_alignr_epi64, _mm512_loadu_si512,
    _mm512_maskz_compress_epi16, _mm512_maskz_loadu_epi64, _mm512_or_si512, _mm512_set1_epi16,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_slli_epi64, _mm512_srli_epi64, _mm512_storeu_si512,
    _mm512_test_epi64_mask, _mm512_xor_si512,
};

/// Number of words in a vector.
const LANES: usize = 8;

/// Proof that the processor has F, BW, DQ, VL, VBMI2 and VPOPCNTDQ of AVX-512, and the features of
/// the AVX2 kernel.
///
/// Invariant: only [`Avx512::detect`] creates a value, and it checks every feature that the
/// functions of this module are compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Result<Self, &'static str> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("avx512vpopcntdq")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        if found { Ok(Self(())) } else { Err("this processor has no AVX-512 with VBMI2 and VPOPCNTDQ") }
    }
}

impl Kernel for Avx512 {
    const HAS_POSITIONS: bool = true;

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

    #[inline(always)]
    fn positions<'a>(self, words: &[u64], into: &'a mut Positions) -> &'a [u16] {
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { positions(words, into) }
    }

    #[inline]
    fn work<W: Work>(self, work: W) -> W::Out {
        #[inline(never)]
        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx512vpopcntdq,avx2,bmi1,bmi2,lzcnt,popcnt"
        )]
        fn with_features<W: Work>(kernel: Avx512, work: W) -> W::Out {
            work.run(kernel)
        }
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { with_features(self, work) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn nonzero(words: &[u64], batch: &mut Batch) -> u32 {
    if batch.far
        && batch.quiet
        && let Ok(words) = words.try_into()
        && is_empty_far(words)
    {
        return 0;
    }
    // Eight masks of eight lanes would move one by one from mask registers to a word. Packing, as
    // the AVX2 kernel does, is faster.
    let look = |block: &Block| nonzero_words(block);
    by_hops(words, batch, |hop| is_empty(hop), look, |rest| lanes_where(rest, |vector| test(vector)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn edges(block: &[u64], open: bool) -> u64 {
    // Only the last bit of the word before the first one matters.
    let mut before = _mm512_set1_epi64(i64::from(open) << 63);
    lanes_where(block, |vector| {
        let shifted = _mm512_or_si512(
            _mm512_slli_epi64::<1>(vector),
            _mm512_srli_epi64::<63>(_mm512_alignr_epi64::<7>(vector, before)),
        );
        before = vector;
        test(_mm512_xor_si512(vector, shifted))
    })
}

/// Returns the positions of the set bits in `words`, by compressing the numbers of half a word's
/// bits. No branch depends on the content of the words.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,popcnt")]
fn positions<'a>(words: &[u64], into: &'a mut Positions) -> &'a [u16] {
    const HALF_BITS: usize = 32;
    assert!(words.len() <= POSITION_WORDS);
    let mut numbers: __m512i = load(&NUMBERS);
    let to: *mut u16 = into.0.as_mut_ptr().cast();
    let mut found = 0;
    for &word in words {
        for half in [word, word >> HALF_BITS] {
            #[expect(clippy::cast_possible_truncation, reason = "half a word")]
            let half = half as u32;
            let compressed = _mm512_maskz_compress_epi16(half, numbers);
            // SAFETY: `found` is at most 32 for each half before this one, hence at most 64 *
            // POSITION_WORDS - 32, and the store fills 32 numbers from there.
            unsafe { _mm512_storeu_si512(to.add(found).cast(), compressed) };
            found += half.count_ones() as usize;
            numbers = _mm512_add_epi16(numbers, _mm512_set1_epi16(32));
        }
    }
    // SAFETY: the first `found` numbers were written: each store filled 32 numbers, starting at or
    // before the point where the next store began.
    unsafe { std::slice::from_raw_parts(to, found) }
}

/// Numbers 0..32 as 16-bit values, packed into words.
const NUMBERS: [u64; LANES] = {
    let (mut words, mut number) = ([0; LANES], 0);
    while number < 32 {
        words[number / 4] |= (number as u64) << (number % 4 * 16);
        number += 1;
    }
    words
};

#[target_feature(enable = "avx512f")]
fn test(vector: __m512i) -> u8 {
    _mm512_test_epi64_mask(vector, vector)
}

/// Returns the mask of the words in `block` (at most 64) for which `pick` sets a bit. FlatBits
/// beyond the end of `block` are clear.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn lanes_where(block: &[u64], mut pick: impl FnMut(__m512i) -> u8) -> u64 {
    let (vectors, rest) = block.as_chunks::<LANES>();
    let mut mask = 0;
    for (index, vector) in vectors.iter().enumerate() {
        mask |= u64::from(pick(load(vector))) << (index * LANES);
    }
    if !rest.is_empty() {
        let lanes = u8::MAX >> (LANES - rest.len());
        // SAFETY: `lanes` has a bit for each word of `rest` and no other, and masked lanes are not
        // read.
        let vector = unsafe { _mm512_maskz_loadu_epi64(lanes, rest.as_ptr().cast()) };
        mask |= u64::from(pick(vector) & lanes) << (vectors.len() * LANES);
    }
    mask
}

/// Prefetches a cache line that will be read soon.
#[inline]
fn prefetch(at: *const u64) {
    #![allow(unused_unsafe, reason = "the intrinsic is unsafe in older versions of Rust")]
    // SAFETY: a prefetch has no visible effect, whatever address it gets.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
}

/// Returns whether all words of a batch are zero, for words that come from memory.
///
/// The pages of the batch are read in parallel streams, and the next batch is prefetched meanwhile.
/// The prefetchers of a processor work within a page, and sequential loads keep too few of them
/// busy. The parallel streams were measured to be 15 to 20 percent faster. If the words are in a
/// cache, this function is the slower choice.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn is_empty_far(words: &[u64; BATCH_WORDS]) -> bool {
    const STREAMS: usize = BATCH_WORDS / HOP_WORDS;
    let mut all = [_mm512_setzero_si512(); STREAMS];
    let (hops, _) = words.as_chunks::<HOP_WORDS>();
    for line in (0..HOP_WORDS).step_by(LANES) {
        for (all, hop) in all.iter_mut().zip(hops) {
            let at = hop.as_ptr().wrapping_add(line);
            prefetch(at.wrapping_add(BATCH_WORDS));
            // SAFETY: `line` is a multiple of LANES below HOP_WORDS, so the 64 bytes are within
            // `hop`.
            *all = _mm512_or_si512(*all, unsafe { _mm512_loadu_si512(at.cast()) });
        }
    }
    let [a, b, c, d] = all;
    test(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d))) == 0
}

/// Returns whether all words are zero.
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
