//! The digest of a page straight out of live memory.
//!
//! The CRC library wants a `&[u8]`, which guest memory cannot be, so its pages would have to be copied first, and the
//! copy costs half as much again as the digest. A CRC is the remainder of the page, taken as a polynomial, and a block
//! can be *folded* onto the block behind it without changing that remainder (Gopal et al., "Fast CRC Computation for
//! Generic Polynomials Using PCLMULQDQ", Intel 2009). So a page is folded onto its last 64 bytes by vector loads, which
//! need only an address, and the library does those 64 bytes, which are ours.

/// Generator of CRC-64/NVME, lowest power in the highest bit.
#[cfg(target_arch = "x86_64")]
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// `x^power` modulo the generator, lowest power in the highest bit.
#[cfg(target_arch = "x86_64")]
const fn power_of_x(power: u32) -> u64 {
    let (mut value, mut done) = (1 << 63, 0);
    while done < power {
        let carry = value & 1;
        value >>= 1;
        if carry != 0 {
            value ^= POLYNOMIAL;
        }
        done += 1;
    }
    value
}

/// Bytes that are left of a page.
pub(crate) const FOLDED_BYTES: usize = 64;

/// Whether [`fold_page`] may be called on this CPU.
#[inline]
pub(crate) fn available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::fold_page;

/// Never called: [`available`] is false here.
///
/// # Safety
/// None.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn fold_page(_: *const u8) -> [u8; FOLDED_BYTES] {
    unreachable!("no folding on this architecture")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{FOLDED_BYTES, power_of_x};
    use crate::PAGE_BYTES;
    use std::arch::x86_64::{
        __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set_epi64,
        _mm512_storeu_si512, _mm512_ternarylogic_epi64,
    };

    /// Vectors folded side by side: one multiplication takes several cycles, so several are under way at once.
    const LANES: usize = 4;
    const VECTOR: usize = 64;
    const BLOCK: usize = LANES * VECTOR;
    /// How far ahead memory is asked for, in bytes: the hardware stops at the end of a page, just where the next begins.
    const AHEAD: usize = 512;

    /// The factors that move a vector `bits` further: of the lower and of the higher half of each 128 bits. One power
    /// less than the distance, because the product of two reversed polynomials is the reversed product times x.
    const fn factors(bits: u32) -> [i64; 2] {
        [power_of_x(bits + 63).cast_signed(), power_of_x(bits - 1).cast_signed()]
    }

    const BY_BLOCK: [i64; 2] = factors(8 * BLOCK as u32);
    const BY_VECTOR: [i64; 2] = factors(8 * VECTOR as u32);

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
        // The exclusive or of all three.
        _mm512_ternarylogic_epi64::<0x96>(low, high, onto)
    }

    /// 64 bytes that have the same remainder as the page at `from`, as of one read of each of its bytes.
    ///
    /// # Safety
    /// [`available`](super::available) is true, and a page at `from` is mapped readable. Others may write it meanwhile.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(crate) unsafe fn fold_page(from: *const u8) -> [u8; FOLDED_BYTES] {
        // SAFETY: `at` is at most PAGE_BYTES - VECTOR in every call below, and the page is mapped.
        let load = |at: usize| unsafe { _mm512_loadu_si512(from.add(at).cast()) };
        let by_block = in_each_lane(BY_BLOCK);
        let mut state = [load(0), load(VECTOR), load(2 * VECTOR), load(3 * VECTOR)];
        for block in (BLOCK..PAGE_BYTES).step_by(BLOCK) {
            for (lane, state) in state.iter_mut().enumerate() {
                let at = block + lane * VECTOR;
                // A hint: it never faults, wherever it points.
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD).cast());
                *state = fold(*state, by_block, load(at));
            }
        }
        let by_vector = in_each_lane(BY_VECTOR);
        let [first, second, third, last] = state;
        let folded = fold(fold(fold(first, by_vector, second), by_vector, third), by_vector, last);
        let mut bytes = [0; FOLDED_BYTES];
        // SAFETY: the array has the 64 bytes of a vector.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), folded) };
        bytes
    }
}
