//! Random numbers with a fixed seed, so that two plans that are made from the same figures are
//! equal.

/// Random number generator SplitMix64 (Steele, Lea, Flood, 2014).
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a uniformly distributed number from 0 (inclusive) to 1 (exclusive).
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns an approximately normally distributed number with mean 0 and standard deviation 1.
    pub(crate) fn gauss(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Returns an exponentially distributed waiting time with mean `mean`.
    pub(crate) fn wait(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Returns a random factor around 1, with a relative standard deviation of about `share`.
    pub(crate) fn around(&mut self, share: f64) -> f64 {
        (self.gauss() * share).exp()
    }
}
