//! Memory for values that live as long as the guest.

use crate::memory::{FreeRam, pointer};
use vmferry_guest_abi::PAGE_SIZE;

/// Contiguous memory that is given out in pieces and never taken back.
#[derive(Debug)]
pub(crate) struct Carver {
    at: u64,
    end: u64,
}

impl Carver {
    /// Takes `bytes` bytes out of `free`. Panics if there is not enough.
    ///
    /// # Safety
    /// The ranges in `free` must be mapped and have no other user.
    pub(crate) unsafe fn new(free: &mut FreeRam, bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE_SIZE);
        let at = free.take(pages).expect("no memory for the allocator's tables; give the guest more memory");
        Self { at, end: at + pages * PAGE_SIZE }
    }

    /// Returns `count` values, each made by a call of `make` with its index, aligned to at least
    /// `align` (a power of two). Panics if there is not enough memory left.
    pub(crate) fn slice<T>(
        &mut self,
        align: u64,
        count: usize,
        mut make: impl FnMut(usize) -> T,
    ) -> &'static mut [T] {
        let start = self.at.next_multiple_of(align.max(align_of::<T>() as u64));
        self.at = start + (size_of::<T>() * count) as u64;
        assert!(self.at <= self.end, "the allocator's tables are larger than calculated");
        let values: *mut T = pointer(start);
        for index in 0..count {
            // SAFETY: by the contract of `new` this memory is mapped and has no other user; no
            // other piece has it, as `at` only grows.
            unsafe { values.add(index).write(make(index)) };
        }
        // SAFETY: as above; all values have been written, and the memory is never used for anything
        // else.
        unsafe { core::slice::from_raw_parts_mut(values, count) }
    }
}
