//! Doubly linked lists of blocks in the allocator's words.

use crate::word::{Kind, NIL, Word};
use crate::{Block, ORDERS};

/// Words of all frames.
#[derive(Debug)]
pub(crate) struct Words<'a>(&'a mut [u64]);

impl<'a> Words<'a> {
    /// Returns words of any content, after resetting all to [`Kind::Inside`].
    pub(crate) fn new(words: &'a mut [u64]) -> Self {
        words.fill(0);
        Self(words)
    }

    #[cfg(test)]
    pub(crate) fn frames(&self) -> usize {
        self.0.len()
    }

    /// Returns the word of a frame. A frame after the last one is [`Kind::Inside`], so no block is
    /// ever found there.
    #[inline]
    pub(crate) fn get(&self, frame: u32) -> Word {
        Word::unpack(self.0.get(frame as usize).copied().unwrap_or(0))
    }

    #[inline]
    pub(crate) fn set(&mut self, frame: u32, word: Word) {
        self.0[frame as usize] = word.pack();
    }
}

/// Blocks of one kind, with a list for each order. The newest block is first.
#[derive(Clone, Debug)]
pub(crate) struct Lists {
    heads: [u32; ORDERS],
    /// Bit mask of the orders: bit `order` is set exactly if the list of that order has a block.
    nonempty: u32,
    kind: Kind,
    pub(crate) pages: u64,
}

impl Lists {
    pub(crate) const fn new(kind: Kind) -> Self {
        Self { heads: [NIL; ORDERS], nonempty: 0, kind, pages: 0 }
    }

    /// Returns the smallest order of at least `order` that has a block.
    #[inline]
    pub(crate) fn order_from(&self, order: u32) -> Option<u32> {
        let orders = self.nonempty >> order;
        (orders != 0).then(|| order + orders.trailing_zeros())
    }

    /// Returns the largest order that has a block.
    #[inline]
    pub(crate) fn largest(&self) -> Option<u32> {
        self.nonempty.checked_ilog2()
    }

    /// Returns the first block of an order.
    #[inline]
    pub(crate) fn first(&self, order: u32) -> Option<Block> {
        let frame = self.heads[order as usize];
        (frame != NIL).then_some(Block { frame, order })
    }

    #[inline]
    pub(crate) fn insert(&mut self, words: &mut Words<'_>, block: Block) {
        let head = &mut self.heads[block.order as usize];
        let word = Word { next: *head, prev: NIL, order: block.order, kind: self.kind };
        words.set(block.frame, word);
        if *head != NIL {
            let next = words.get(*head);
            words.set(*head, Word { prev: block.frame, ..next });
        }
        *head = block.frame;
        self.nonempty |= 1 << block.order;
        self.pages += block.pages();
    }

    /// Takes a block of this kind out of its list. The block's word is left unchanged: the caller
    /// writes another one.
    #[inline]
    pub(crate) fn remove(&mut self, words: &mut Words<'_>, block: Block) {
        let word = words.get(block.frame);
        debug_assert!(word.kind == self.kind && word.order == block.order);
        if word.next != NIL {
            let next = words.get(word.next);
            words.set(word.next, Word { prev: word.prev, ..next });
        }
        if word.prev == NIL {
            self.heads[block.order as usize] = word.next;
            if word.next == NIL {
                self.nonempty &= !(1 << block.order);
            }
        } else {
            let prev = words.get(word.prev);
            words.set(word.prev, Word { next: word.next, ..prev });
        }
        self.pages -= block.pages();
    }
}
