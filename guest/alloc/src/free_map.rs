//! Map of free pages, which a host reads.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Bits of `vmferry_guest_abi::balloon::FreeMap`. They are written only under the allocator's lock,
/// and the host may read them at any time.
#[derive(Clone, Copy, Debug)]
pub struct FreeBits<'a> {
    words: &'a [AtomicU64],
}

impl<'a> FreeBits<'a> {
    /// Returns a map of `64 * words.len()` pages.
    #[must_use]
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self { words }
    }

    /// Marks pages as free after their last use. Earlier writes to the pages are ordered before the
    /// mark.
    pub(crate) fn set(&self, bit: u64, pages: u64) {
        // On x86-64 this only keeps the compiler from moving a write to the page after the bit.
        fence(Ordering::Release);
        self.each(bit, pages, |word, mask| {
            word.store(word.load(Ordering::Relaxed) | mask, Ordering::Relaxed)
        });
    }

    /// Marks pages as in use before they are used. Later writes to the pages are ordered after the
    /// mark.
    pub(crate) fn clear(&self, bit: u64, pages: u64) {
        self.each(bit, pages, |word, mask| {
            word.store(word.load(Ordering::Relaxed) & !mask, Ordering::Relaxed)
        });
        fence(Ordering::Release);
    }

    fn each(&self, bit: u64, pages: u64, change: impl Fn(&AtomicU64, u64)) {
        let (mut at, end) = (bit, bit + pages);
        while at < end {
            let (word, first) = (at / 64, at % 64);
            let count = (64 - first).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << first;
            if let Some(word) = usize::try_from(word).ok().and_then(|word| self.words.get(word)) {
                change(word, mask);
            }
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn ranges_of_bits_are_set_and_cleared() {
        let words: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let bits = FreeBits::new(&words);
        let set = |bit: u64| {
            words[usize::try_from(bit / 64).unwrap()].load(Ordering::Relaxed) >> (bit % 64) & 1 == 1
        };
        bits.set(60, 70);
        assert!((0..256).all(|bit| set(bit) == (60..130).contains(&bit)));
        bits.clear(64, 64);
        assert!((0..256).all(|bit| set(bit) == ((60..64).contains(&bit) || (128..130).contains(&bit))));
        bits.set(255, 100);
        assert!(set(255));
    }
}
