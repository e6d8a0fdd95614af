//! CRC remainder of a page that is read directly from live memory.
//!
//! The CRC library takes a `&[u8]`. No such reference to guest memory may exist, so each page would
//! have to be copied first, which costs half as much as the digest. A CRC is the remainder of the
//! page, taken as a polynomial. A block can be *folded* onto the block that follows it without
//! changing that remainder (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ", Intel 2009). This module folds a page onto its last 16 bytes by vector loads, which
//! need only an address. The library computes the digest on all CPUs that cannot fold, and the
//! tests compare both results.
//!
//! Polynomials are reversed, as in the definition of the CRC: the lowest bit is the highest power.

/// Generator polynomial of CRC-64/NVME without its highest power, x^64.
#[cfg(target_arch = "x86_64")]
const GENERATOR: u64 = 0x9a6c_9329_ac4b_c9b5;

/// Returns `x^power` modulo the generator.
#[cfg(target_arch = "x86_64")]
const fn power_of_x(power: u32) -> u64 {
    let (mut value, mut done) = (1 << 63, 0);
    while done < power {
        let carry = value & 1;
        value >>= 1;
        if carry != 0 {
            value ^= GENERATOR;
        }
        done += 1;
    }
    value
}

/// Returns x^128 divided by the generator, without the highest power of the quotient, x^64.
#[cfg(target_arch = "x86_64")]
const fn reciprocal() -> u64 {
    let generator = GENERATOR.reverse_bits() as u128;
    // The first step of the long division is known: the quotient starts with x^64.
    let (mut rest, mut quotient, mut bit) = (generator << 64, 0u64, 64);
    while bit > 0 {
        bit -= 1;
        if rest >> (64 + bit) & 1 != 0 {
            quotient |= 1 << bit;
            rest ^= generator << bit | 1 << (64 + bit);
        }
    }
    quotient.reverse_bits()
}

/// Returns true if [`remainder`] may be called on this CPU.
#[inline]
pub(crate) fn available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::remainder;

/// Never called, because [`available`] returns false on this architecture.
///
/// # Safety
/// None.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn remainder(_: *const u8, _: *const u8) -> u64 {
    unreachable!("no folding on this architecture")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{GENERATOR, power_of_x, reciprocal};
    use crate::PAGE_BYTES;
    use std::arch::x86_64::{
        __m128i, __m512i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_cvtsi64_si128, _mm_cvtsi128_si64,
        _mm_prefetch, _mm_srli_si128, _mm_unpackhi_epi64, _mm_xor_si128, _mm512_clmulepi64_epi128,
        _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_set_epi64, _mm512_ternarylogic_epi64,
        _mm512_xor_si512,
    };

    /// Number of vectors that are folded in parallel. One multiplication takes several cycles, so
    /// several run at the same time.
    const LANES: usize = 4;
    const VECTOR: usize = 64;
    const BLOCK: usize = LANES * VECTOR;

    /// Returns the factors that move 128 bits further by `bits`: one for the lower half and one for
    /// the higher half. Each power is one less than the distance, because the product of two
    /// reversed polynomials is the reversed product times x.
    const fn factors(bits: u32) -> [i64; 2] {
        [power_of_x(bits + 63).cast_signed(), power_of_x(bits - 1).cast_signed()]
    }

    const BY_BLOCK: [i64; 2] = factors(2048);
    const BY_VECTOR: [i64; 2] = factors(512);
    const _: () = assert!(8 * BLOCK == 2048 && 8 * VECTOR == 512);
    const BY_3_LANES: [i64; 2] = factors(384);
    const BY_2_LANES: [i64; 2] = factors(256);
    const BY_LANE: [i64; 2] = factors(128);
    /// Factor that moves 64 bits further by 128.
    const BY_128: i64 = power_of_x(127).cast_signed();
    const RECIPROCAL: i64 = reciprocal().cast_signed();

    /// Prefetches a cache line that will be read soon.
    #[inline]
    fn prefetch(at: *const u8) {
        #![allow(unused_unsafe, reason = "the intrinsic is unsafe in older versions of Rust")]
        // SAFETY: a prefetch has no visible effect and does not fault, whatever its address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn in_each_lane([low, high]: [i64; 2]) -> __m512i {
        _mm512_set_epi64(high, low, high, low, high, low, high, low)
    }

    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn fold(state: __m512i, by: __m512i, onto: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(state, by);
        let high = _mm512_clmulepi64_epi128::<0x11>(state, by);
        // Exclusive or of all three operands.
        _mm512_ternarylogic_epi64::<0x96>(low, high, onto)
    }

    /// Returns the page at `from`, times x^64, modulo the generator. Prefetches the page at `next`,
    /// because the hardware prefetcher stops at the end of a page.
    ///
    /// The function may read a byte more than once, because a page that is written during the call
    /// has no correct digest anyway.
    ///
    /// # Safety
    /// [`available`](super::available) must return true, and a page at `from` must be mapped
    /// readable. Other threads and the guest may write the page during the call. `next` may be any
    /// address.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
    pub(crate) unsafe fn remainder(from: *const u8, next: *const u8) -> u64 {
        // SAFETY: `at` is at most PAGE_BYTES - VECTOR in every call below, and the page is mapped.
        let load = |at: usize| unsafe { _mm512_loadu_si512(from.add(at).cast()) };
        let ask_for = |at: usize| prefetch(next.wrapping_add(at));
        let by_block = in_each_lane(BY_BLOCK);
        let mut state = [load(0), load(VECTOR), load(2 * VECTOR), load(3 * VECTOR)];
        (0..LANES).for_each(|lane| ask_for(lane * VECTOR));
        for block in (BLOCK..PAGE_BYTES).step_by(BLOCK) {
            for (lane, state) in state.iter_mut().enumerate() {
                let at = block + lane * VECTOR;
                ask_for(at);
                *state = fold(*state, by_block, load(at));
            }
        }
        let by_vector = in_each_lane(BY_VECTOR);
        let [first, second, third, last] = state;
        reduce(fold(fold(fold(first, by_vector, second), by_vector, third), by_vector, last))
    }

    /// Returns 64 bytes, times x^64, modulo the generator.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
    #[inline]
    fn reduce(bytes: __m512i) -> u64 {
        let ([a, b], [c, d], [e, f]) = (BY_3_LANES, BY_2_LANES, BY_LANE);
        let by = _mm512_set_epi64(0, 0, f, e, d, c, b, a);
        let low = _mm512_clmulepi64_epi128::<0x00>(bytes, by);
        let moved = _mm512_xor_si512(low, _mm512_clmulepi64_epi128::<0x11>(bytes, by));
        let lanes = _mm_xor_si128(
            _mm_xor_si128(_mm512_extracti32x4_epi32::<0>(moved), _mm512_extracti32x4_epi32::<1>(moved)),
            _mm_xor_si128(_mm512_extracti32x4_epi32::<2>(moved), _mm512_extracti32x4_epi32::<3>(bytes)),
        );
        // Times x^64, folded from 192 bits to 128: the lower half moves by 128 bits, the higher
        // half by 64.
        let by = _mm_cvtsi64_si128(BY_128);
        barrett(_mm_xor_si128(_mm_clmulepi64_si128::<0x00>(lanes, by), _mm_srli_si128::<8>(lanes)))
    }

    /// Returns 128 bits modulo the generator, by Barrett's method. Products are shifted by one bit:
    /// see [`factors`].
    #[target_feature(enable = "avx512f,pclmulqdq")]
    #[inline]
    fn barrett(value: __m128i) -> u64 {
        let low = |v: __m128i| _mm_cvtsi128_si64(v).cast_unsigned();
        let high = |v: __m128i| _mm_cvtsi128_si64(_mm_unpackhi_epi64(v, v)).cast_unsigned();
        // Powers 0 to 63 of the quotient. Both factors have an x^64 that the constants leave out.
        let estimate = _mm_clmulepi64_si128::<0x00>(value, _mm_cvtsi64_si128(RECIPROCAL));
        let quotient = low(value) ^ low(estimate) << 1;
        let multiple = _mm_clmulepi64_si128::<0x00>(
            _mm_cvtsi64_si128(quotient.cast_signed()),
            _mm_cvtsi64_si128(GENERATOR.cast_signed()),
        );
        high(value) ^ (high(multiple) << 1 | low(multiple) >> 63)
    }
}
