//! The bare-metal guest's allocator, and how it gives freed memory back to its host.
//!
//! * [`Buddy`] allocates blocks of 4 KiB to 4 MiB, of the frames that [`Spans`] name. Its lists know which free blocks the host has
//!   been told of.
//! * [`FreeBuffer`] notes what a vCPU has freed, without a lock.
//! * [`Heap`] is one vCPU's side of it all: it allocates, frees, and reports when its buffer is full or when all is quiet.
//! * [`Churn`] is the workload `alloc=`: allocate, touch, check, free.
//!
//! What differs between the guest and a test on the host is behind one trait, [`Machine`]: the lock, the clock, memory, and the way
//! to the host.
//!
//! # The lock
//! One lock for the whole allocator. It is held for one allocation or free (well below a microsecond), or for a portion of
//! [`PORTION`] blocks when blocks are isolated, put back or hinted, and never while the host is spoken to.
//!
//! The crate has no dependencies besides the guest's ABI, needs no allocator and contains no unsafe code.
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
pub use heap::{FLUSH_NS, Heap, IDLE_NS, Machine, PORTION, Reports};
pub use spans::{MAX_SPANS, Spans, SpansError};

/// Orders of blocks: 0 (4 KiB) to 10 (4 MiB).
pub const ORDERS: usize = vmferry_guest_abi::balloon::MAX_ORDER as usize + 1;

/// Freed blocks that a vCPU notes before it reports them.
pub const SYNC_ENTRIES: usize = vmferry_guest_abi::balloon::REPORT_ENTRIES;

/// Freed blocks that a vCPU notes before another one reports them, in the asynchronous variant.
pub const ASYNC_ENTRIES: usize = 1000;

/// `1 << order` contiguous frames, aligned to their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// The first frame; see [`Spans::gpa`].
    pub frame: u32,
    /// `0..=10`.
    pub order: u32,
}

impl Block {
    /// Pages in it.
    #[must_use]
    #[inline]
    pub fn pages(self) -> u64 {
        1 << self.order
    }

    /// Bytes in it.
    #[must_use]
    #[inline]
    pub fn bytes(self) -> u64 {
        vmferry_guest_abi::PAGE_SIZE << self.order
    }

    /// Whether all of `other` lies in it.
    #[must_use]
    #[inline]
    pub fn contains(self, other: Self) -> bool {
        other.order <= self.order && (other.frame ^ self.frame) >> self.order == 0
    }
}

/// Allocated blocks of one owner, chained through the allocator's own words: no memory besides them.
#[derive(Debug)]
pub struct List {
    pub(crate) head: u32,
    /// Pages in all its blocks.
    pub(crate) pages: u64,
}

impl List {
    /// An empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { head: word::NIL, pages: 0 }
    }

    /// Pages in all its blocks.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether it has none.
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
