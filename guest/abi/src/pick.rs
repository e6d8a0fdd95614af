//! Choice of the next page to write: a small random number generator and the patterns of writes.

use crate::math::{exp, expm1_over, ln, ln1p_over, truncate};
use crate::{Pattern, Theta};

/// Step of [`Prng`]: the fraction of the golden ratio in 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Scrambles a number. This is a bijection of 64 bits in which every input bit changes about half
/// of the output bits.
///
/// The function is the finalizer of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
/// number generators", OOPSLA 2014, with the constants of Stafford's variant 13).
#[inline]
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fast generator with 64 bits of state, splitmix64. For workloads, not for secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prng(u64);

impl Prng {
    /// Returns a generator whose sequence depends on `seed` alone.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ STEP))
    }

    /// Returns 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Returns a number below `limit`; 0 if `limit` is 0. The bias is below `limit / 2^64`.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// Returns a number in `[0, 1)` with 53 random bits.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let bits = (self.bits() >> 11) as f64;
        bits / 9_007_199_254_740_992.0
    }

    pub(crate) fn state(self) -> u64 {
        self.0
    }

    pub(crate) fn from_state(state: u64) -> Self {
        Self(state)
    }
}

/// Distribution of ranks `1..=n` in proportion to `rank^-theta`, drawn without a table.
///
/// The method is rejection-inversion (W. Hörmann, G. Derflinger: "Rejection-inversion to generate
/// variates from monotone discrete distributions", ACM TOMACS 6.3, 1996): invert the integral of
/// the density, round, and reject the few draws where the rounding left the histogram. A sample
/// needs less than 1.1 draws.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Zipf {
    n: f64,
    theta: f64,
    /// Lower end of the inverted range: the integral from 1 to 1.5, less the weight of rank 1.
    low: f64,
    /// Upper end of the inverted range: the integral to `n + 0.5`.
    high: f64,
    /// Rounding distance up to which a draw is accepted without a further check.
    sure: f64,
}

impl Zipf {
    fn new(n: u64, theta: Theta) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "page counts are far below 2^53")]
        let n = n.max(1) as f64;
        let mut zipf = Self { n, theta: theta.get(), low: 0.0, high: 0.0, sure: 0.0 };
        zipf.low = zipf.integral(1.5) - 1.0;
        zipf.high = zipf.integral(n + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    /// Returns `x^-theta`.
    fn weight(&self, x: f64) -> f64 {
        exp(-self.theta * ln(x))
    }

    /// Returns the integral of the weight from 1 to `x`: `(x^(1-theta) - 1) / (1 - theta)`, which
    /// is `ln x` at `theta == 1`.
    fn integral(&self, x: f64) -> f64 {
        let log = ln(x);
        expm1_over((1.0 - self.theta) * log) * log
    }

    /// Returns the `x` up to which the integral is `area`.
    fn inverse(&self, area: f64) -> f64 {
        // Rounding may move the product slightly below -1 at the far end, where the logarithm has
        // no value.
        let t = (area * (1.0 - self.theta)).max(-1.0 + 1e-15);
        exp(ln1p_over(t) * area)
    }

    /// Returns a rank in `0..n`.
    fn draw(&self, prng: &mut Prng) -> u64 {
        loop {
            let area = self.high + prng.unit() * (self.low - self.high);
            let x = self.inverse(area).clamp(1.0, self.n);
            let rank = truncate(x + 0.5);
            #[expect(clippy::cast_precision_loss, reason = "ranks are page counts, far below 2^53")]
            let k = (rank as f64).clamp(1.0, self.n);
            if k - x <= self.sure || area >= self.integral(k + 0.5) - self.weight(k) {
                return u64::try_from(truncate(k)).unwrap_or(1) - 1;
            }
        }
    }
}

/// Picker of the next page to write among `pages` pages, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Picker {
    pages: u64,
    prng: Prng,
    next: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Never,
    Uniform,
    Sequential,
    /// Ranks are scattered over the pages by `rank * stride % pages`, so that hot pages are not
    /// neighbours.
    Zipf {
        zipf: Zipf,
        stride: u64,
    },
}

impl Picker {
    /// Returns the picker of one vCPU for its own `pages` pages. Its sequence depends on `seed`
    /// alone.
    #[must_use]
    pub fn new(pattern: Pattern, pages: u64, seed: u64) -> Self {
        let kind = match pattern {
            _ if pages == 0 => Kind::Never,
            Pattern::Idle => Kind::Never,
            Pattern::Uniform => Kind::Uniform,
            Pattern::Sequential => Kind::Sequential,
            Pattern::Zipf(theta) => {
                Kind::Zipf { zipf: Zipf::new(pages, theta), stride: coprime_stride(pages) }
            }
        };
        Self { pages, prng: Prng::new(seed), next: 0, kind }
    }

    /// Returns the next page to write, below the number of pages, or `None` for an idle pattern.
    #[inline]
    pub fn pick(&mut self) -> Option<u64> {
        match &self.kind {
            Kind::Never => None,
            Kind::Uniform => Some(self.prng.below(self.pages)),
            Kind::Sequential => {
                let page = self.next;
                self.next = if page + 1 >= self.pages { 0 } else { page + 1 };
                Some(page)
            }
            Kind::Zipf { zipf, stride } => {
                let rank = zipf.draw(&mut self.prng);
                let scattered = u128::from(rank) * u128::from(*stride) % u128::from(self.pages);
                u64::try_from(scattered).ok()
            }
        }
    }

    pub(crate) fn state(&self) -> [u64; 2] {
        [self.prng.state(), self.next]
    }

    pub(crate) fn set_state(&mut self, [prng, next]: [u64; 2]) {
        self.prng = Prng::from_state(prng);
        self.next = if next < self.pages { next } else { 0 };
    }
}

/// Returns a number near 0.618 of `pages` without a common divisor, so that multiples of it visit
/// every page once.
fn coprime_stride(pages: u64) -> u64 {
    let start = (pages / 1000 * 618 + pages % 1000 * 618 / 1000).max(1);
    (start..=pages.max(start)).find(|stride| gcd(*stride, pages) == 1).unwrap_or(1)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn uniform_is_uniform() {
        let mut picker = Picker::new(Pattern::Uniform, 100, 1);
        let mut counts = vec![0u32; 100];
        for _ in 0..100_000 {
            counts[usize::try_from(picker.pick().unwrap()).unwrap()] += 1;
        }
        // 1000 are expected for each, with a standard deviation of 31.
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn sequential_visits_every_page_in_order() {
        let mut picker = Picker::new(Pattern::Sequential, 3, 1);
        let pages: Vec<u64> = (0..7).filter_map(|_| picker.pick()).collect();
        assert_eq!(pages, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn idle_and_empty_pick_nothing() {
        assert_eq!(Picker::new(Pattern::Idle, 100, 1).pick(), None);
        assert_eq!(Picker::new(Pattern::Uniform, 0, 1).pick(), None);
    }

    /// Compares the counts of the hottest ranks with `rank^-theta / sum`, within five standard
    /// deviations.
    fn check_zipf(theta: f64, n: u64) {
        let draws = 200_000u32;
        let zipf = Zipf::new(n, Theta::new(theta).unwrap());
        let mut prng = Prng::new(42);
        let mut counts = HashMap::<u64, u32>::new();
        for _ in 0..draws {
            let rank = zipf.draw(&mut prng);
            assert!(rank < n);
            *counts.entry(rank).or_default() += 1;
        }
        let sum: f64 = (1..=n).map(|k| (k as f64).powf(-theta)).sum();
        for rank in [0, 1, 2, 5, 10, 50] {
            if rank >= n {
                continue;
            }
            let p = ((rank + 1) as f64).powf(-theta) / sum;
            let expected = p * f64::from(draws);
            let deviation = (expected * (1.0 - p)).sqrt();
            let got = f64::from(counts.get(&rank).copied().unwrap_or(0));
            assert!(
                (got - expected).abs() <= 5.0 * deviation + 1.0,
                "theta {theta} rank {rank}: {got} of {expected}"
            );
        }
    }

    #[test]
    fn zipf_has_the_distribution() {
        for theta in [0.5, 0.99, 1.0, 1.2, 2.0, 8.0] {
            check_zipf(theta, 1000);
        }
        check_zipf(0.99, 1);
        check_zipf(1.1, 2);
    }

    #[test]
    fn scattered_ranks_are_a_permutation() {
        for pages in [1, 2, 3, 10, 999, 1000, 4096, 16_384] {
            let stride = coprime_stride(pages);
            let visited: HashSet<u64> = (0..pages).map(|rank| rank * stride % pages).collect();
            assert_eq!(visited.len() as u64, pages, "{pages}");
        }
    }

    proptest! {
        #[test]
        fn zipf_stays_in_range(theta in 0.001f64..8.0, pages in 1u64..1 << 34, seed: u64) {
            let mut picker = Picker::new(Pattern::Zipf(Theta::new(theta).unwrap()), pages, seed);
            for _ in 0..20 {
                prop_assert!(picker.pick().unwrap() < pages);
            }
        }

        #[test]
        fn below_stays_below(limit in 1u64.., seed: u64) {
            prop_assert!(Prng::new(seed).below(limit) < limit);
        }
    }
}
