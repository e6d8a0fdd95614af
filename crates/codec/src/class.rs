//! Estimate of how well a page compresses.
//!
//! The estimate samples 256 bytes of a page: eight bytes of each 128, at offsets that differ from
//! one 128 to the next, so that no field of a regular structure is sampled alone. It counts the
//! pairs of equal bytes among the samples. A page of random bytes has 127.5 pairs on average, with
//! a standard deviation of 11.3, because two random bytes are equal with a probability of 1/256.
//! All other contents have more.

use crate::Page;

/// Number of words that are sampled.
const SAMPLES: usize = 32;
/// Number of words between two samples, on average.
const DISTANCE: usize = 16;

/// Minimum number of zero words among the samples of a sparse page.
const SPARSE_WORDS: usize = 24;

/// Maximum number of pairs of a dense page. It is four standard deviations above the mean of random
/// bytes, and corresponds to a collision entropy of 7.57 bits in each byte.
const DENSE_PAIRS: u32 = 173;

/// Class of a page by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Content whose bytes are about equally frequent: random, encrypted or compressed data. No
    /// codec makes it smaller, except if it repeats itself.
    Dense,
    /// Content that is likely to compress: text, code, tables, pointers.
    Mixed,
    /// Content with at least three quarters of zeros. The fastest codec is enough.
    Sparse,
}

impl Class {
    /// All classes.
    pub const ALL: [Self; 3] = [Self::Dense, Self::Mixed, Self::Sparse];

    /// Returns the class of `page`. The result is an estimate from a sample.
    #[must_use]
    pub fn of(page: &Page) -> Self {
        let (words, _) = page.as_chunks::<8>();
        // 5 has no common divisor with the distance, so all 16 offsets occur equally often.
        let samples = (0..SAMPLES).map(|sample| &words[sample * DISTANCE + sample * 5 % DISTANCE]);
        let zero = samples.clone().filter(|word| **word == [0; 8]).count();
        if zero >= SPARSE_WORDS {
            return Self::Sparse;
        }
        let (mut seen, mut pairs) = ([0_u16; 256], 0);
        for byte in samples.flatten() {
            let count = &mut seen[usize::from(*byte)];
            pairs += u32::from(*count);
            *count += 1;
        }
        if pairs <= DENSE_PAIRS { Self::Dense } else { Self::Mixed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::Noise;
    use vmferry_core::PAGE_BYTES;

    /// Returns the number of dense pages among `pages` pages that `fill` creates.
    fn dense(pages: usize, mut fill: impl FnMut(&mut Page)) -> usize {
        let mut page = [0; PAGE_BYTES];
        let mut is_dense = || {
            fill(&mut page);
            Class::of(&page) == Class::Dense
        };
        (0..pages).filter(|_| is_dense()).count()
    }

    #[test]
    fn random_pages_are_dense() {
        let mut noise = Noise::new(1);
        let found = dense(20_000, |page| noise.fill(page));
        assert!(found >= 19_980, "{found} of 20000");
    }

    #[test]
    fn compressible_pages_are_not_dense() {
        let mut noise = Noise::new(2);
        let text = dense(5000, |page| page.fill_with(|| b"etaoin shrdlu,.\n"[noise.below(16)]));
        let pointers = dense(5000, |page| {
            for word in page.as_chunks_mut::<8>().0 {
                *word = (0x7f12_0000_0000 + noise.word() % (64 << 20)).to_le_bytes();
            }
        });
        // Half of all values, which compress to 7/8.
        let nearly = dense(5000, |page| page.fill_with(|| u8::try_from(noise.below(128)).unwrap()));
        assert_eq!((text, pointers, nearly), (0, 0, 0));
    }

    #[test]
    fn pages_of_zeros_are_sparse() {
        let mut page = [0; PAGE_BYTES];
        assert_eq!(Class::of(&page), Class::Sparse);
        page[..512].fill(7);
        assert_eq!(Class::of(&page), Class::Sparse);
        page[..2048].fill(7);
        assert_eq!(Class::of(&page), Class::Mixed);
    }

    #[test]
    fn all_sampled_words_are_distinct() {
        let mut page = [0; PAGE_BYTES];
        // Zero in exactly the sampled words of a page that is random elsewhere.
        Noise::new(3).fill(&mut page);
        let mut cleared = 0;
        for word in 0..PAGE_BYTES / 8 {
            let before = page;
            page[word * 8..word * 8 + 8].fill(0);
            cleared += usize::from(Class::of(&page) == Class::Sparse);
            if Class::of(&page) == Class::Sparse {
                page = before;
            }
        }
        // The page becomes sparse with the 24th sampled word, and each of the last nine does so.
        assert_eq!(cleared, SAMPLES - SPARSE_WORDS + 1);
    }
}
