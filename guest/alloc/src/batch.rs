//! Batches of blocks on the way to the host.

use crate::Block;

/// Fixed-size list of blocks that are isolated or hinted at one time.
#[derive(Debug)]
pub struct Batch<'a> {
    slots: &'a mut [Block],
    /// `len <= most <= slots.len()`
    len: usize,
    most: usize,
}

impl<'a> Batch<'a> {
    /// Returns an empty batch of at most as many blocks as there are slots.
    #[must_use]
    pub fn new(slots: &'a mut [Block]) -> Self {
        let most = slots.len();
        Self { slots, len: 0, most }
    }

    /// Empties the batch and limits it to `most` blocks, at least one.
    pub fn begin(&mut self, most: usize) {
        self.len = 0;
        self.most = most.clamp(1, self.slots.len());
    }

    /// Adds a block. Returns false if there is no room.
    #[inline]
    pub fn push(&mut self, block: Block) -> bool {
        let room = !self.is_full();
        if room {
            self.slots[self.len] = block;
            self.len += 1;
        }
        room
    }

    /// Returns the blocks.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.slots[..self.len]
    }

    /// Returns true if there is no room.
    #[must_use]
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == self.most
    }

    /// Returns true if there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
