//! Small random generator with one seed, so that a run can be repeated from its number alone.

/// Generator splitmix64.
#[derive(Debug, Clone)]
pub(super) struct Rng {
    state: u64,
    /// Choices that are made in advance, two bytes each. They are used first.
    script: std::collections::VecDeque<u8>,
}

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        let state = seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x2545_f491_4f6c_dd1d;
        Self { state, script: std::collections::VecDeque::new() }
    }

    /// Returns a generator that uses the choices in `bytes`, and then continues like seed 0. A
    /// fuzzer or an attacker makes the choices.
    #[cfg(feature = "hostile")]
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { script: bytes.iter().copied().collect(), ..Self::new(0) }
    }

    /// Returns up to `most` bytes of the remaining choices, which are then used up.
    #[cfg(feature = "hostile")]
    pub(super) fn bytes(&mut self, most: usize) -> Vec<u8> {
        self.script.drain(..most.min(self.script.len())).collect()
    }

    pub(super) fn next(&mut self) -> u64 {
        if let Some(low) = self.script.pop_front() {
            return u64::from(u16::from_le_bytes([low, self.script.pop_front().unwrap_or(0)]));
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..end`. `end` must not be 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(super) fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("less than a usize")
    }

    /// Returns true with this probability, per mille.
    pub(super) fn per_mille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    /// Returns a latency that is mostly short and sometimes long, so that events overtake each
    /// other.
    pub(super) fn latency(&mut self, most: u64) -> u64 {
        let bound = match self.below(10) {
            0 => most * 20,
            1..=3 => most,
            _ => most / 10 + 1,
        };
        1 + self.below(bound.max(1))
    }
}
