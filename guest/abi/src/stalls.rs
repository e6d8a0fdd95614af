//! Stalls: periods in which a vCPU could not run.

/// Number of buckets of the histogram. Bucket `i` counts stalls from `8 << i` microseconds to below
/// twice that. The last bucket counts all longer stalls.
pub const HIST_BUCKETS: usize = 16;

/// Shortest gap between two iterations of the workload's loop that counts as a stall, in
/// nanoseconds.
pub const STALL_MIN_NS: u64 = 8_000;

/// Stalls that a vCPU has seen. All values are cumulative, except the maximum of the window.
///
/// Each iteration of a workload's loop takes well below a microsecond. A gap of 8 us or more is
/// therefore time that was taken from the vCPU: a page fault in the host, a full dirty ring, a
/// throttle, another process, or a switchover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    pub(crate) last_ns: Option<u64>,
    /// Number of stalls.
    pub count: u64,
    /// Sum of the stalls in nanoseconds.
    pub sum_ns: u64,
    /// Longest stall, in nanoseconds.
    pub max_ns: u64,
    /// Longest stall since the last [`take_window`](Self::take_window), in nanoseconds.
    pub(crate) window_max_ns: u64,
    /// Number of stalls by length.
    pub hist: [u64; HIST_BUCKETS],
    /// Sum of the stalls of each length in nanoseconds, from which their average follows.
    pub hist_sum_ns: [u64; HIST_BUCKETS],
}

impl Stalls {
    /// Records an iteration of the loop, and a stall if the previous iteration was too long ago. A
    /// clock that went backwards (a migration to a host with another TSC) is not a stall.
    #[inline]
    pub fn tick(&mut self, now_ns: u64) {
        let gap = self.last_ns.map_or(0, |last| now_ns.saturating_sub(last));
        self.last_ns = Some(now_ns);
        if gap >= STALL_MIN_NS {
            self.record(gap);
        }
    }

    /// Marks the loop as running from now on. The vCPU spent the time since the last tick on
    /// purpose (printing, sleeping).
    pub fn resume(&mut self, now_ns: u64) {
        self.last_ns = Some(now_ns);
    }

    /// Records a stall of `gap_ns` nanoseconds.
    #[cold]
    pub fn record(&mut self, gap_ns: u64) {
        self.count += 1;
        self.sum_ns += gap_ns;
        self.max_ns = self.max_ns.max(gap_ns);
        self.window_max_ns = self.window_max_ns.max(gap_ns);
        let bucket = bucket(gap_ns / 1000);
        self.hist[bucket] += 1;
        self.hist_sum_ns[bucket] += gap_ns;
    }

    /// Returns the longest stall since the last call, in nanoseconds.
    pub fn take_window(&mut self) -> u64 {
        core::mem::take(&mut self.window_max_ns)
    }
}

fn bucket(us: u64) -> usize {
    ((us / 8).max(1).ilog2() as usize).min(HIST_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two() {
        let cases =
            [(8, 0), (15, 0), (16, 1), (31, 1), (32, 2), (8 << 14, 14), ((8 << 15) - 1, 14), (8 << 15, 15)];
        for (us, index) in cases {
            assert_eq!(bucket(us), index, "{us} us");
        }
        assert_eq!(bucket(u64::MAX), 15);
    }

    #[test]
    fn only_gaps_of_eight_microseconds_and_more_count() {
        let mut stalls = Stalls::default();
        for now in [50_000, 57_999, 65_999, 40_000, 41_000] {
            stalls.tick(now);
        }
        assert_eq!((stalls.count, stalls.sum_ns, stalls.max_ns), (1, 8_000, 8_000));
        stalls.resume(1_000_000);
        stalls.tick(1_000_100);
        assert_eq!(stalls.count, 1);
        stalls.tick(2_000_100);
        assert_eq!((stalls.count, stalls.hist[6]), (2, 1));
        assert_eq!((stalls.hist_sum_ns[0], stalls.hist_sum_ns[6]), (8_000, 1_000_000));
        assert_eq!(stalls.take_window(), 1_000_000);
        assert_eq!(stalls.take_window(), 0);
    }
}
