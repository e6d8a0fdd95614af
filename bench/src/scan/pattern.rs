//! Generation of bitmaps to scan.

/// Average pages of a run of the clustered pattern: 2 MiB, which is typical for allocators and page
/// caches.
const CLUSTER_PAGES: f64 = 512.0;

/// Number of words that a longer bitmap repeats: 16 MiB, which no branch predictor remembers.
const TILE_WORDS: usize = 2 << 20;

/// Pattern of the set pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Each page is set independently.
    Uniform,
    /// Pages are set in runs of 1 to 1024 pages.
    Clustered,
}

impl Pattern {
    /// Returns the name of the pattern in cases.
    pub(super) fn name(self) -> &'static str {
        match self {
            Pattern::Uniform => "uniform",
            Pattern::Clustered => "clustered",
        }
    }
}

/// Small random generator (xorshift64*), which produces the same bitmap in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number in 0..1 that is not 0.
    #[expect(clippy::cast_precision_loss, reason = "53 bits")]
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an exponentially distributed number with this mean, rounded, and at least 1.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, far below 2^63")]
    fn gap(&mut self, mean: f64) -> u64 {
        (-self.unit().ln() * mean).round().max(1.0) as u64
    }
}

/// Returns `words` words with about the share `density` (0 to 1) of their bits set.
///
/// Every word is written. Otherwise untouched memory would be the kernel's shared zero page, which
/// is read from the cache.
pub(super) fn build(words: usize, density: f64, pattern: Pattern) -> Vec<u64> {
    build_seeded(words, density, pattern, 0)
}

/// Does the same as [`build`], with a different bitmap for each seed.
pub(super) fn build_seeded(words: usize, density: f64, pattern: Pattern, seed: u64) -> Vec<u64> {
    // All memory is first written with another value.
    let mut map = vec![u64::MAX; words];
    std::hint::black_box(&mut map);
    if density >= 1.0 {
        return map;
    }
    map.fill(0);
    if density <= 0.0 {
        return map;
    }
    let tile = words.min(TILE_WORDS);
    fill(&mut map[..tile], density, pattern, seed);
    let (tile, rest) = map.split_at_mut(tile);
    for part in rest.chunks_mut(tile.len()) {
        part.copy_from_slice(&tile[..part.len()]);
    }
    map
}

fn fill(words: &mut [u64], density: f64, pattern: Pattern, seed: u64) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed << 20);
    let bits = words.len() as u64 * 64;
    let mut at = 0;
    loop {
        // A gap of at least one page ends every run. Beyond its first page the gap is exponentially
        // distributed.
        let (gap, run) = match pattern {
            Pattern::Uniform => (geometric(&mut random, density), 1),
            Pattern::Clustered => {
                let gap = random.gap(CLUSTER_PAGES * (1.0 - density) / density);
                (gap, random.next() % 1024 + 1)
            }
        };
        at += gap;
        if at >= bits {
            return;
        }
        for bit in at..(at + run).min(bits) {
            let word = usize::try_from(bit / 64).expect("within the words");
            words[word] |= 1 << (bit % 64);
        }
        at += run;
    }
}

/// Returns the number of clear pages before the next set page, if each page is set with probability
/// `density`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, far below 2^63")]
fn geometric(random: &mut Random, density: f64) -> u64 {
    (random.unit().ln() / (-density).ln_1p()).floor() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_have_the_requested_density() {
        for pattern in [Pattern::Uniform, Pattern::Clustered] {
            for density in [1e-3, 1e-2, 0.1, 0.5] {
                // Large enough for a hundred clusters.
                let map = build(1 << 20, density, pattern);
                let set: u32 = map.iter().map(|word| word.count_ones()).sum();
                let got = f64::from(set) / f64::from(1 << 26);
                assert!((0.75..1.25).contains(&(got / density)), "{pattern:?} {density}: {got}");
            }
        }
        assert!(build(100, 0.0, Pattern::Uniform).iter().all(|word| *word == 0));
        assert!(build(100, 1.0, Pattern::Clustered).iter().all(|word| *word == u64::MAX));
    }

    #[test]
    fn longer_bitmaps_repeat_their_tile() {
        let map = build(TILE_WORDS + 10, 0.01, Pattern::Uniform);
        assert_eq!(map[..10], map[TILE_WORDS..]);
    }
}
