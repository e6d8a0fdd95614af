//! Page bitmaps: one bit a page, in 64-bit words.
//!
//! [`Bitmap`] belongs to one owner; [`AtomicBitmap`] is marked by many writers at once and harvested by swapping its
//! words. Both give their pages as runs (`Range<u64>` of page indexes), never as single bits, because whoever consumes
//! them (a clear ioctl, a `writev`) works on runs. Nothing here allocates after construction.
//!
//! Bit `i` stands in word `i / 64` at position `i % 64`, the layout of `KVM_GET_DIRTY_LOG`, so a kernel log is merged
//! word by word.
#![forbid(unsafe_code)]

mod atomic;
mod plain;

pub use atomic::AtomicBitmap;
pub use plain::{Bitmap, Runs};

/// Bits in a word.
pub const WORD_BITS: u64 = 64;

/// How many words hold `len` bits.
#[must_use]
pub fn words_for(len: u64) -> usize {
    usize::try_from(len.div_ceil(WORD_BITS)).expect("a bitmap of the address space fits in memory indexes")
}

/// The word that holds bit `bit`, and the bit's mask in it.
fn place(bit: u64) -> (usize, u64) {
    let word = usize::try_from(bit / WORD_BITS).expect("checked against len by the caller");
    (word, 1 << (bit % WORD_BITS))
}

/// Mask of the bits `from..to` (0 <= from < to <= 64) of one word.
fn mask(from: u64, to: u64) -> u64 {
    (u64::MAX >> (WORD_BITS - (to - from))) << from
}

/// Calls `each(word index, mask)` for every word that `first..end` touches.
fn for_each_word(range: std::ops::Range<u64>, mut each: impl FnMut(usize, u64)) {
    let mut bit = range.start;
    while bit < range.end {
        let base = bit - bit % WORD_BITS;
        let to = (range.end - base).min(WORD_BITS);
        each(place(bit).0, mask(bit - base, to));
        bit = base + WORD_BITS;
    }
}
