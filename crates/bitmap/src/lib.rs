//! Bitmaps of guest pages: one bit for each page, in 64-bit words.
//!
//! | type | use |
//! |---|---|
//! | [`AtomicBitmap`] | many threads mark pages, one thread harvests them |
//! | [`Bitmap`] | a set of pages with one owner |
//! | [`ClaimBitmap`] | threads take pages out of a set, each page once |
//! | [`Scanner`] | finds set bits with the fastest implementation for the processor: AVX-512, AVX2 or portable |
//!
//! [`AtomicBitmap`], [`Bitmap`] and [`ClaimBitmap`] have a second level, the summary, with one bit
//! for each 4096 pages. A walk skips the parts in which no page is set, and these parts take no
//! memory before a page in them is set. Therefore time and memory depend on the pages in the set,
//! not on the size of the guest.
//!
//! Bit `i` is in word `i / 64` at position `i % 64`. `KVM_GET_DIRTY_LOG` uses the same layout, so a
//! dirty log from the kernel can be merged word by word.
//!
//! All types return pages as runs (`Range<u64>` of page indexes), because ioctls and `writev` work
//! on runs. Set pages can also be iterated one by one. Marking, merging, harvesting and iterating
//! do not allocate.
//!
//! ```
//! use vmferry_bitmap::{AtomicBitmap, Bitmap};
//!
//! // Device threads mark what they have written.
//! let marks = AtomicBitmap::new(1 << 20);
//! marks.set_range(100..200);
//! marks.set(4711);
//!
//! // A harvest takes the marks, and adds them to a set.
//! let mut dirty = Bitmap::new(1 << 20);
//! assert_eq!(marks.harvest(&mut dirty), 101);
//! assert!(marks.is_empty());
//!
//! let runs: Vec<_> = dirty.runs().collect();
//! assert_eq!(runs, [100..200, 4711..4712]);
//! ```
// Unsafe code is allowed in scan/avx2.rs, scan/avx512.rs and words.rs only.
#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]

mod atomic;
mod bitmap;
mod claims;
mod flat;
mod iter;
mod scan;
#[expect(unsafe_code, reason = "memory from the kernel, and plain words as atomic words")]
mod words;

pub use atomic::AtomicBitmap;
pub use bitmap::{Bitmap, Bits, Runs};
pub use claims::ClaimBitmap;
#[doc(hidden)]
pub use flat::FlatBitmap;
pub use iter::{FlatBits, FlatRuns};
pub use scan::Scanner;

use std::ops::Range;

/// Number of bits in a word.
pub const WORD_BITS: u64 = 64;

/// Returns the number of words that hold `len` bits.
#[must_use]
pub fn words_for(len: u64) -> usize {
    usize::try_from(len.div_ceil(WORD_BITS)).expect("a bitmap of the address space fits in memory indexes")
}

/// Returns the index of the word that holds bit `bit`, and the mask of the bit in that word.
fn place(bit: u64) -> (usize, u64) {
    let word = usize::try_from(bit / WORD_BITS).expect("checked against len by the caller");
    (word, 1 << (bit % WORD_BITS))
}

/// Returns the mask of the bits `from..to` (0 <= from < to <= 64) of one word.
fn mask(from: u64, to: u64) -> u64 {
    (u64::MAX >> (WORD_BITS - (to - from))) << from
}

/// Calls `each` with the index of every word that `range` touches, and the mask of the bits in that
/// word.
fn for_each_word(range: Range<u64>, mut each: impl FnMut(usize, u64)) {
    let mut bit = range.start;
    while bit < range.end {
        let base = bit - bit % WORD_BITS;
        let to = (range.end - base).min(WORD_BITS);
        each(place(bit).0, mask(bit - base, to));
        bit = base + WORD_BITS;
    }
}

/// Returns the mask of the valid bits in the last word of a bitmap of `len` bits.
fn tail_mask(len: u64) -> u64 {
    match len % WORD_BITS {
        0 => u64::MAX,
        tail => mask(0, tail),
    }
}

/// Part of a range of bits.
enum Part {
    /// Some bits of one word: index of the word and mask of the bits.
    Cut(usize, u64),
    /// Whole words.
    Whole(Range<usize>),
}

/// Calls `each` for the parts of `range`, at most three.
fn for_each_part(range: Range<u64>, mut each: impl FnMut(Part)) {
    if range.is_empty() {
        return;
    }
    let (first, last) = (place(range.start).0, place(range.end - 1).0);
    let (from, to) = (range.start % WORD_BITS, (range.end - 1) % WORD_BITS + 1);
    if first == last {
        return each(Part::Cut(first, mask(from, to)));
    }
    each(Part::Cut(first, mask(from, WORD_BITS)));
    each(Part::Whole(first + 1..last));
    each(Part::Cut(last, mask(0, to)));
}
