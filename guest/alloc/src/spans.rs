//! Memory of the allocator, and the numbering of its frames.

use crate::Block;
use core::fmt;
use vmferry_guest_abi::PAGE_SIZE;

/// Maximum number of ranges of an allocator's memory.
pub const MAX_SPANS: usize = 32;

/// Number of frames of the largest block.
const ALIGN: u64 = 1 << vmferry_guest_abi::balloon::MAX_ORDER;

/// Maximum number of frames: links have 28 bits, and one value is the end of a list.
const MAX_FRAMES: u64 = crate::word::NIL as u64;

/// Range of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    /// Guest-physical address of the first page.
    pub(crate) start: u64,
    pub(crate) pages: u64,
    /// Frame of the first page, congruent to its page number modulo 1024.
    pub(crate) frame: u64,
    /// Bit of the first page in the map of free pages.
    pub(crate) bit: u64,
}

/// Ranges of memory of an allocator. Frames are numbered across all ranges, so that holes need no
/// words. A block of frames is aligned exactly if its address is: each range begins at a frame
/// congruent to its page number modulo 1024, so no block lies in two ranges.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    spans: [Span; MAX_SPANS],
    count: usize,
}

/// Reason for which a range cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpansError {
    /// There are [`MAX_SPANS`] ranges already.
    TooMany,
    /// The memory exceeds the number of frames: about 1 TiB.
    TooMuch,
    /// The range is not made of whole pages, is empty, or begins before the end of the previous
    /// range.
    Invalid,
}

impl fmt::Display for SpansError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooMany => "more than 32 ranges of memory",
            Self::TooMuch => "more memory than the allocator can number, 1 TiB",
            Self::Invalid => "a range of memory that is empty, unaligned or out of order",
        })
    }
}

impl core::error::Error for SpansError {}

impl Spans {
    /// Returns an empty set of ranges.
    #[must_use]
    pub const fn new() -> Self {
        Self { spans: [Span { start: 0, pages: 0, frame: 0, bit: 0 }; MAX_SPANS], count: 0 }
    }

    /// Adds guest-physical memory from `start` to `end` (exclusive), after all earlier ranges.
    /// `bit` is the first page's bit in a map of free pages (see
    /// `vmferry_guest_abi::balloon::FreeMap`).
    ///
    /// # Errors
    /// Returns a [`SpansError`]. Nothing was added then.
    pub fn add(&mut self, start: u64, end: u64, bit: u64) -> Result<(), SpansError> {
        let last = self.spans().last();
        let behind = last.is_none_or(|last| start >= last.start + last.pages * PAGE_SIZE);
        if start >= end || !(start | end).is_multiple_of(PAGE_SIZE) || !behind {
            return Err(SpansError::Invalid);
        }
        let frame = self.frames().next_multiple_of(ALIGN) + start / PAGE_SIZE % ALIGN;
        let span = Span { start, pages: (end - start) / PAGE_SIZE, frame, bit };
        if span.frame.checked_add(span.pages).is_none_or(|frames| frames > MAX_FRAMES) {
            return Err(SpansError::TooMuch);
        }
        *self.spans.get_mut(self.count).ok_or(SpansError::TooMany)? = span;
        self.count += 1;
        Ok(())
    }

    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans[..self.count]
    }

    /// Returns the number of frames, which is the number of words that the allocator needs: pages,
    /// and up to 2046 for each range.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.spans().last().map_or(0, |last| last.frame + last.pages)
    }

    /// Returns the maximum number of words that an allocator of `pages` pages in `ranges` ranges
    /// needs.
    #[must_use]
    pub fn frames_at_most(pages: u64, ranges: u64) -> u64 {
        pages + ranges * 2 * (ALIGN - 1)
    }

    /// Returns the number of pages of memory.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.spans().iter().map(|span| span.pages).sum()
    }

    #[inline]
    fn of(&self, frame: u32) -> Option<&Span> {
        let frame = u64::from(frame);
        self.spans().iter().find(|span| (span.frame..span.frame + span.pages).contains(&frame))
    }

    /// Returns the guest-physical address of a block, or 0 if its frame is not in the ranges.
    #[must_use]
    #[inline]
    pub fn gpa(&self, block: Block) -> u64 {
        self.of(block.frame).map_or(0, |span| span.start + (u64::from(block.frame) - span.frame) * PAGE_SIZE)
    }

    /// Returns the bit of a block's first page in the map of free pages.
    #[inline]
    pub(crate) fn bit(&self, frame: u32) -> Option<u64> {
        self.of(frame).map(|span| span.bit + (u64::from(frame) - span.frame))
    }
}

impl Default for Spans {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_aligned_as_addresses_are() {
        let mut spans = Spans::new();
        spans.add(0x12_3000, 0x80_0000, 0x23).unwrap();
        spans.add(1 << 32, (1 << 32) + 0x5000, 0x7ff).unwrap();
        for (frame, gpa) in
            [(0x123, 0x12_3000), (0x7ff, 0x7f_f000), (0x800, 1 << 32), (0x804, (1 << 32) + 0x4000)]
        {
            assert_eq!(spans.gpa(Block { frame, order: 0 }), gpa);
        }
        assert_eq!((spans.frames(), spans.pages()), (0x805, 0x800 - 0x123 + 5));
        assert!(spans.frames() <= Spans::frames_at_most(spans.pages(), 2));
        assert_eq!((spans.bit(0x123), spans.bit(0x801), spans.bit(0x122)), (Some(0x23), Some(0x800), None));
        assert_eq!(spans.gpa(Block { frame: 0x805, order: 0 }), 0);
    }

    #[test]
    fn invalid_range_is_refused() {
        let mut spans = Spans::new();
        for (start, end) in [(0x1000, 0x1000), (0x1001, 0x2000), (0x1000, 0x2001), (0x2000, 0x1000)] {
            assert_eq!(spans.add(start, end, 0), Err(SpansError::Invalid));
        }
        spans.add(0x4000, 0x5000, 0).unwrap();
        assert_eq!(spans.add(0x3000, 0x5000, 0), Err(SpansError::Invalid));
        assert_eq!(spans.add(0x5000, 1 << 52, 0), Err(SpansError::TooMuch));
        for more in 1..MAX_SPANS as u64 {
            spans.add(0x4000 + more * 0x2000, 0x5000 + more * 0x2000, 0).unwrap();
        }
        assert_eq!(spans.add(1 << 30, 1 << 31, 0), Err(SpansError::TooMany));
    }
}
