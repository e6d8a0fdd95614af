//! Kernel that needs no special processor features.

use super::{BLOCK_WORDS, Batch, Kernel, Positions, Work, by_hops, edges_of};

/// Number of words in a cache line.
const LINE_WORDS: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

impl Kernel for Portable {
    const HAS_POSITIONS: bool = false;

    fn nonzero(self, words: &[u64], batch: &mut Batch) -> u32 {
        by_hops(words, batch, |hop| or(hop) == 0, |block| block_nonzero(block), block_nonzero)
    }

    fn edges(self, block: &[u64], open: bool) -> u64 {
        let (mut zero, mut ones, mut ends_set) = (0, 0, 0);
        for (at, &word) in block.iter().enumerate() {
            zero |= u64::from(word == 0) << at;
            ones |= u64::from(word == u64::MAX) << at;
            ends_set |= (word >> 63) << at;
        }
        edges_of(zero, ones, ends_set, open) & block_mask(block.len())
    }

    fn positions<'a>(self, _: &[u64], _: &'a mut Positions) -> &'a [u16] {
        unreachable!("never called: HAS_POSITIONS is false")
    }

    #[inline]
    fn work<W: Work>(self, work: W) -> W::Out {
        work.run(self)
    }
}

/// Returns the mask with a bit for each word of a block of `len` (1..=64) words.
fn block_mask(len: usize) -> u64 {
    u64::MAX >> (BLOCK_WORDS - len)
}

fn or(words: &[u64]) -> u64 {
    words.iter().fold(0, |all, word| all | word)
}

/// Returns the mask of the nonzero words of a block, line by line. This is fast because most lines
/// of a sparse block are empty, and every compiler vectorizes the OR of a line.
fn block_nonzero(block: &[u64]) -> u64 {
    let mut mask = 0;
    for (index, line) in block.chunks(LINE_WORDS).enumerate() {
        if or(line) != 0 {
            for (at, &word) in line.iter().enumerate() {
                mask |= u64::from(word != 0) << (index * LINE_WORDS + at);
            }
        }
    }
    mask
}
