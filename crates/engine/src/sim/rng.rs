//! A small generator with one seed, so that a run can be had again from its number alone.

/// splitmix64.
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `0..end`, `end` not 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(super) fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("less than a usize")
    }

    /// True this many times in a thousand.
    pub(super) fn per_mille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    /// Mostly short, sometimes long: what makes things overtake each other.
    pub(super) fn latency(&mut self, most: u64) -> u64 {
        let bound = match self.below(10) {
            0 => most * 20,
            1..=3 => most,
            _ => most / 10 + 1,
        };
        1 + self.below(bound.max(1))
    }
}
