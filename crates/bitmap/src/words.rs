//! Atomic words over memory that the allocator has zeroed.

use std::mem::ManuallyDrop;
use std::sync::atomic::AtomicU64;

/// Returns `count` words that are zero.
///
/// The allocator gets zeroed memory from the kernel, which allocates it at the first access.
/// Therefore words that are never accessed take no memory. Creating the atomic words one by one
/// would access all of them.
pub(crate) fn zeroed(count: usize) -> Vec<AtomicU64> {
    atomic(vec![0; count])
}

/// Returns `words` as atomic words, without an access to them.
pub(crate) fn atomic(words: Vec<u64>) -> Vec<AtomicU64> {
    const { assert!(align_of::<AtomicU64>() == align_of::<u64>(), "the allocation keeps its layout") };
    let mut words = ManuallyDrop::new(words);
    // SAFETY: `AtomicU64` has the size and the bit validity of `u64` (guaranteed by std), and the
    // same alignment (asserted above), so the allocation has the layout with which this vector will
    // free it. Pointer, length and capacity are those of a vector that is not used any more.
    unsafe { Vec::from_raw_parts(words.as_mut_ptr().cast(), words.len(), words.capacity()) }
}
