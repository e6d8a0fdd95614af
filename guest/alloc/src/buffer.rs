//! Blocks that a vCPU has freed and not yet reported.

use crate::Block;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Fixed-size buffer of freed blocks, one for each vCPU. Its owner notes blocks in it without a
/// lock until it is full. It then belongs to the reporter (the owner itself, or another vCPU),
/// which empties it and thereby gives it back.
///
/// Entries are hints: the parts of a block that are still free are determined under the allocator's
/// lock when the block is reported.
#[derive(Debug)]
pub struct FreeBuffer<'a> {
    /// Noted blocks as `frame << 8 | order`.
    entries: &'a [AtomicU64],
    /// Number of noted blocks: `len <= entries.len()`. Written by the owner while `handed` is
    /// false, and by the reporter while it is true.
    len: AtomicU64,
    /// True while the buffer belongs to the reporter.
    handed: AtomicBool,
}

impl<'a> FreeBuffer<'a> {
    /// Returns an empty buffer for as many blocks as there are entries, at least one.
    ///
    /// # Panics
    /// Panics if there are no entries.
    #[must_use]
    pub fn new(entries: &'a [AtomicU64]) -> Self {
        assert!(!entries.is_empty(), "a buffer without entries");
        Self { entries, len: AtomicU64::new(0), handed: AtomicBool::new(false) }
    }

    /// Notes a freed block, after dropping the latest entries that have merged into it. Returns
    /// false if there was no room. Only the owner may call this.
    #[inline]
    pub fn note(&self, block: Block) -> bool {
        if self.is_handed() {
            return false;
        }
        let mut len = self.len();
        while len > 0 && block.contains(self.get(len - 1)) {
            len -= 1;
        }
        let room = len < self.entries.len();
        if room {
            self.entries[len].store(u64::from(block.frame) << 8 | u64::from(block.order), Ordering::Relaxed);
            len += 1;
        }
        self.len.store(len as u64, Ordering::Relaxed);
        room
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no room.
    #[must_use]
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len() == self.entries.len()
    }

    /// Returns the noted blocks, the earliest first. Only the owner may call this.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Notes `blocks` in place of all that were noted. Only the owner may call this, while the
    /// buffer is not handed over.
    ///
    /// # Panics
    /// Panics if there are more blocks than entries.
    pub fn replace(&self, blocks: &[Block]) {
        self.len.store(0, Ordering::Relaxed);
        for block in blocks {
            assert!(self.note(*block), "{} blocks for {} entries", blocks.len(), self.entries.len());
        }
    }

    /// Returns true if no block is noted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives the buffer to the reporter. Only the owner may call this.
    pub fn hand_over(&self) {
        self.handed.store(true, Ordering::Release);
    }

    /// Returns true if the buffer belongs to the reporter.
    #[must_use]
    #[inline]
    pub fn is_handed(&self) -> bool {
        self.handed.load(Ordering::Acquire)
    }

    /// Takes the latest entry out. Called by the reporter while the buffer is handed over, or by an
    /// owner that reports itself.
    pub fn pop(&self) -> Option<Block> {
        let len = self.len().checked_sub(1)?;
        self.len.store(len as u64, Ordering::Relaxed);
        Some(self.get(len))
    }

    /// Empties the buffer and gives it back to its owner. Called by the reporter.
    pub fn hand_back(&self) {
        self.len.store(0, Ordering::Relaxed);
        self.handed.store(false, Ordering::Release);
    }

    fn len(&self) -> usize {
        usize::try_from(self.len.load(Ordering::Relaxed)).unwrap_or(0).min(self.entries.len())
    }

    fn get(&self, index: usize) -> Block {
        let entry = self.entries[index].load(Ordering::Relaxed);
        Block {
            frame: u32::try_from(entry >> 8).unwrap_or(crate::word::NIL),
            order: (entry & 0xff).min(10) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn block(frame: u32, order: u32) -> Block {
        Block { frame, order }
    }

    #[test]
    fn merged_blocks_take_one_entry() {
        let entries: Vec<_> = (0..4).map(|_| AtomicU64::new(7)).collect();
        let buffer = FreeBuffer::new(&entries);
        // Frees pages 8 to 15 in ascending order, as the allocator merges them.
        for (frame, order) in [(8, 0), (8, 1), (10, 0), (8, 2), (12, 0), (12, 1), (14, 0), (8, 3)] {
            assert!(buffer.note(block(frame, order)));
        }
        assert_eq!((buffer.pop(), buffer.pop()), (Some(block(8, 3)), None));
    }

    #[test]
    fn full_buffer_accepts_nothing_until_it_is_emptied() {
        let entries: Vec<_> = (0..3).map(|_| AtomicU64::new(0)).collect();
        let buffer = FreeBuffer::new(&entries);
        assert!(buffer.is_empty());
        assert!((0..3).all(|frame| buffer.note(block(2 * frame, 0))));
        assert!(buffer.is_full() && !buffer.note(block(100, 0)));
        // A block that contains the latest entry has room.
        assert!(buffer.note(block(4, 1)) && buffer.is_full());
        buffer.hand_over();
        assert!(!buffer.note(block(0, 10)));
        assert_eq!(buffer.pop(), Some(block(4, 1)));
        buffer.hand_back();
        assert!(buffer.is_empty() && buffer.note(block(0, 0)));
    }
}
