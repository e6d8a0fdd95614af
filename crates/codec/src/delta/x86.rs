//! Comparisons of pages by AVX2 and AVX-512, and prefetches.

use super::{Difference, GROUP_BYTES, Group, Masks, by_groups};
use crate::Page;
use std::arch::x86_64::{
    _MM_HINT_ET0, _mm_prefetch, _mm256_castsi256_pd, _mm256_cmpeq_epi8, _mm256_cmpeq_epi64,
    _mm256_loadu_si256, _mm256_movemask_epi8, _mm256_movemask_pd, _mm512_cmpneq_epi8_mask,
    _mm512_cmpneq_epi64_mask, _mm512_loadu_si512,
};

/// Proof that the processor has AVX2 and POPCNT.
///
/// Invariant: only [`Avx2::detect`] creates a value, and it checks every feature that the functions
/// for AVX2 are compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Result<Self, &'static str> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt");
        if found { Ok(Self(())) } else { Err("this processor has no AVX2") }
    }

    pub(super) fn compare(self, old: &Page, new: &Page, limit: usize) -> Option<Difference> {
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { compare_avx2(old, new, limit) }
    }
}

#[target_feature(enable = "avx2,popcnt")]
fn compare_avx2(old: &Page, new: &Page, limit: usize) -> Option<Difference> {
    by_groups(old, new, limit, |old, new| group_avx2(old, new))
}

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn group_avx2(old: &Group, new: &Group) -> (u64, u32) {
    let load = |bytes: &[u8; 32]| {
        // SAFETY: the reference covers the 32 bytes that are read, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    };
    let (mut equal, mut bytes) = (0, 0);
    for (index, (old, new)) in old.as_chunks().0.iter().zip(new.as_chunks().0).enumerate() {
        let lanes = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(load(old), load(new))));
        equal |= u64::from(lanes.cast_unsigned()) << (index * 4);
    }
    // Most groups are unchanged, so the bytes are compared only where words differ.
    if equal != u64::MAX {
        for (old, new) in old.as_chunks().0.iter().zip(new.as_chunks().0) {
            bytes += _mm256_movemask_epi8(_mm256_cmpeq_epi8(load(old), load(new))).count_zeros();
        }
    }
    (!equal, bytes)
}

/// Proof that the processor has AVX-512F, AVX-512BW and POPCNT.
///
/// Invariant: only [`Avx512::detect`] creates a value, and it checks every feature that the
/// functions for AVX-512 are compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Result<Self, &'static str> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("popcnt");
        if found { Ok(Self(())) } else { Err("this processor has no AVX-512 with BW") }
    }

    pub(super) fn compare(self, old: &Page, new: &Page, limit: usize) -> Option<Difference> {
        // SAFETY: `self` proves that the processor has the features (see the type's invariant).
        unsafe { compare_avx512(old, new, limit) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,popcnt")]
fn compare_avx512(old: &Page, new: &Page, limit: usize) -> Option<Difference> {
    by_groups(old, new, limit, |old, new| group_avx512(old, new))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,popcnt")]
fn group_avx512(old: &Group, new: &Group) -> (u64, u32) {
    let load = |bytes: &[u8; 64]| {
        // SAFETY: the reference covers the 64 bytes that are read, and the load needs no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    };
    let (mut mask, mut bytes) = (0, 0);
    for (index, (old, new)) in old.as_chunks().0.iter().zip(new.as_chunks().0).enumerate() {
        mask |= u64::from(_mm512_cmpneq_epi64_mask(load(old), load(new))) << (index * 8);
    }
    // Most groups are unchanged, so the bytes are compared only where words differ.
    if mask != 0 {
        for (old, new) in old.as_chunks().0.iter().zip(new.as_chunks().0) {
            bytes += _mm512_cmpneq_epi8_mask(load(old), load(new)).count_ones();
        }
    }
    (mask, bytes)
}

/// Prefetches the lines of `page` that have a word in `masks`, in order to write them.
#[inline]
pub(super) fn prefetch_changed(page: &Page, masks: &Masks) {
    const LINE: usize = 64;
    for (group, mask) in masks.iter().enumerate().filter(|(_, mask)| **mask != 0) {
        for (line, words) in mask.to_le_bytes().into_iter().enumerate() {
            if words != 0 {
                prefetch(&raw const page[group * GROUP_BYTES + line * LINE]);
            }
        }
    }
}

/// Prefetches a cache line that will be written soon.
#[inline]
fn prefetch(at: *const u8) {
    #![allow(unused_unsafe, reason = "the intrinsic is unsafe in older versions of Rust")]
    // SAFETY: a prefetch has no visible effect, and no address makes it fault.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) }
}
