//! How the filling of a guest's memory is getting on.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets of a histogram: the last is for 2^22 us, four seconds, and more.
const BUCKETS: usize = 24;

/// Where the filling of a guest's memory stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FillState {
    /// Pages are on their way.
    #[default]
    Filling,
    /// All are there.
    Completed,
    /// Some cannot be had. The guest runs, as long as it does not need them; a vCPU that does sleeps.
    Failed,
    /// Somebody ended it before all were there.
    Stopped,
}

/// A look at memory that is filled while its guest runs.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct LazyProgress {
    /// Where it stands.
    pub state: FillState,
    /// Pages with content that there are.
    pub pages: u64,
    /// Those of them that are in memory.
    pub placed: u64,
    /// Pages of zeros that were touched.
    pub zero_pages: u64,
    /// Times that somebody waited for a page.
    pub faults: u64,
    /// Pages that cannot be had.
    pub failed_pages: u64,
    /// Why the first of them cannot, and which it is.
    pub error: Option<String>,
    /// From hearing of a fault to its page being in memory: how many took less than 1 us, 2 us, 4 us, and so on; the last
    /// is for all that took longer. Without those whose page another thread was just bringing.
    pub hist_us: Vec<u64>,
}

/// Times in buckets of powers of two microseconds.
#[derive(Debug, Default)]
pub(super) struct Histogram([AtomicU64; BUCKETS]);

impl Histogram {
    pub(super) fn add(&self, time: Duration) {
        let bits = u64::BITS - u64::try_from(time.as_micros()).unwrap_or(u64::MAX).leading_zeros();
        let bucket = usize::try_from(bits).map_or(BUCKETS - 1, |bits| bits.min(BUCKETS - 1));
        self.0[bucket].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Vec<u64> {
        self.0.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_their_buckets() {
        let histogram = Histogram::default();
        for us in [0, 1, 2, 3, 1023, 1024, 1 << 40] {
            histogram.add(Duration::from_micros(us));
        }
        let buckets = histogram.read();
        let some: Vec<_> = buckets.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        assert_eq!(some, [(0, &1), (1, &1), (2, &2), (10, &1), (11, &1), (BUCKETS - 1, &1)]);
    }
}
