//! Allocator of the bare-metal guest, which gives freed memory back to the host.
//!
//! * [`Buddy`] allocates blocks of 4 KiB to 4 MiB from the frames of [`Spans`]. Its lists know the
//!   free blocks that were reported to the host.
//! * [`FreeBuffer`] notes the blocks that a vCPU has freed, without a lock.
//! * [`Heap`] is the allocator of one vCPU: it allocates, frees, and reports when its buffer is
//!   full or when nothing has been freed for some time.
//! * [`Churn`] is the workload `alloc=`: allocate, touch, check, free.
//!
//! The trait [`Machine`] covers the differences between the guest and a test on the host: the lock,
//! the clock, memory, and the channel to the host.
//!
//! # The lock
//! One lock protects the whole allocator. It is held for one allocation or free (well below a
//! microsecond), or for a portion of [`PORTION`] blocks when blocks are isolated, put back or
//! hinted. It is never held during communication with the host.
//!
//! The crate has no dependencies besides the guest's ABI, needs no allocator and contains no unsafe
//! code.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod batch;
mod buddy;
mod buffer;
mod churn;
mod free_map;
mod heap;
mod lists;
mod spans;
mod word;

pub use batch::Batch;
pub use buddy::{Buddy, Pages, Taken};
pub use buffer::FreeBuffer;
pub use churn::{Churn, Progress};
pub use free_map::FreeBits;
pub use heap::{FLUSH_NS, Heap, IDLE_NS, Machine, PORTION, Relief, Reports};
pub use spans::{MAX_SPANS, Spans, SpansError};

/// Number of block orders: 0 (4 KiB) to 10 (4 MiB).
pub const ORDERS: usize = vmferry_guest_abi::balloon::MAX_ORDER as usize + 1;

/// Number of freed blocks that a vCPU notes before it reports them.
pub const SYNC_ENTRIES: usize = vmferry_guest_abi::balloon::REPORT_ENTRIES;

/// Number of freed blocks that a vCPU notes before another one reports them, in the asynchronous
/// variant.
pub const ASYNC_ENTRIES: usize = 1000;

/// Block of `1 << order` contiguous frames, aligned to its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// First frame. See [`Spans::gpa`].
    pub frame: u32,
    /// Order, `0..=10`.
    pub order: u32,
}

impl Block {
    /// Returns the size in pages.
    #[must_use]
    #[inline]
    pub fn pages(self) -> u64 {
        1 << self.order
    }

    /// Returns the size in bytes.
    #[must_use]
    #[inline]
    pub fn bytes(self) -> u64 {
        vmferry_guest_abi::PAGE_SIZE << self.order
    }

    /// Returns true if all of `other` lies in this block.
    #[must_use]
    #[inline]
    pub fn contains(self, other: Self) -> bool {
        other.order <= self.order && (other.frame ^ self.frame) >> self.order == 0
    }
}

/// Allocated blocks of one owner, chained through the allocator's own words, so that they need no
/// other memory.
#[derive(Debug)]
pub struct List {
    pub(crate) head: u32,
    /// Number of pages in all blocks.
    pub(crate) pages: u64,
}

impl List {
    /// Returns an empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { head: word::NIL, pages: 0 }
    }

    /// Returns the number of pages in all blocks.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns true if the list has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head == word::NIL
    }
}

impl Default for List {
    fn default() -> Self {
        Self::new()
    }
}
