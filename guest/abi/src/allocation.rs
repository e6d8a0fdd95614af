//! Part of a workload that allocates memory, touches it and frees it again.

use crate::units::write_size;
use core::fmt;

/// Maximum of `frag=`: the number of pages of the largest block.
pub(crate) const MAX_FRAG: u64 = 1 << crate::balloon::MAX_ORDER;

/// `alloc=SIZE[,rounds=N][,frag=N]`: each vCPU allocates its share of this memory, touches all of
/// it, checks and frees it, and starts again.
///
/// Without `frag` the blocks have mixed orders. Order `k` (of 0 to 10) has the probability
/// `2^-(k+1)`, so each order gets about the same number of bytes. The generator is seeded with the
/// vCPU's index and the round. The blocks are freed in another order than they were allocated in.
///
/// With `frag=N` all blocks are single pages, and one in `N` is kept when the others are freed, so
/// that nothing merges into blocks of more than `N - 1` pages. The kept pages are freed when the
/// next round begins. Those of the last round stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes that all vCPUs together allocate in each round, at least a page.
    pub bytes: u64,
    /// Number of rounds, after which the vCPU allocates nothing more; 0 for no end.
    pub rounds: u64,
    /// One page in this many is kept: `2..=1024`, or 0 for none.
    pub frag: u64,
}

impl Allocation {
    /// Returns an allocation of `bytes` bytes in rounds without end, all of which are freed.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { bytes, rounds: 0, frag: 0 }
    }
}

impl fmt::Display for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("alloc=")?;
        write_size(f, self.bytes)?;
        if self.rounds != 0 {
            write!(f, ",rounds={}", self.rounds)?;
        }
        if self.frag != 0 {
            write!(f, ",frag={}", self.frag)?;
        }
        Ok(())
    }
}
