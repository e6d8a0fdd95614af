//! Time: the guest's clock from TSC ticks, paces and periods.

/// Clock that converts TSC ticks to nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TscClock {
    /// Ticks at time 0.
    base: u64,
    /// Nanoseconds per tick, times 2^32.
    scale: u64,
}

impl TscClock {
    /// Returns a clock that reads 0 at `base` ticks, for a TSC of `khz` kHz (at least 1).
    #[must_use]
    pub fn new(khz: u32, base: u64) -> Self {
        Self { base, scale: (1_000_000 << 32) / u64::from(khz.max(1)) }
    }

    /// Returns the nanoseconds at `tsc` ticks; 0 before the base.
    #[must_use]
    #[inline]
    pub fn ns(&self, tsc: u64) -> u64 {
        let ticks = tsc.saturating_sub(self.base);
        #[expect(clippy::cast_possible_truncation, reason = "2^64 ns are 584 years")]
        let ns = ((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64;
        ns
    }
}

/// Limit of an event to `rate` times a second.
///
/// A late vCPU catches up, but only up to a debt. Time in which a vCPU was stopped (a blackout) is
/// lost, as for a real guest, and shows as fewer writes instead of as a burst after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacer {
    rate: u64,
    /// Longest debt in nanoseconds.
    debt_ns: u64,
    next_ns: u64,
    /// Fractions of a nanosecond in units of `1 / rate`, below `rate`.
    fraction: u64,
}

const SECOND_NS: u64 = 1_000_000_000;

impl Pacer {
    /// Returns a pace of `rate` per second (at most 10^9; 0 means never), which catches up at most
    /// `debt_ns` nanoseconds.
    #[must_use]
    pub fn new(rate: u64, debt_ns: u64) -> Self {
        Self { rate: rate.min(SECOND_NS), debt_ns, next_ns: 0, fraction: 0 }
    }

    /// Returns true if the event is due. Each `true` counts as one event.
    #[inline]
    pub fn due(&mut self, now_ns: u64) -> bool {
        if self.rate == 0 || now_ns < self.next_ns {
            // A clock that went far back (another host) must not stop the workload for as long.
            if self.rate != 0 && self.next_ns - now_ns > 2 * SECOND_NS {
                self.next_ns = now_ns;
            }
            return false;
        }
        self.next_ns = self.next_ns.max(now_ns.saturating_sub(self.debt_ns)) + SECOND_NS / self.rate;
        self.fraction += SECOND_NS % self.rate;
        if self.fraction >= self.rate {
            self.fraction -= self.rate;
            self.next_ns += 1;
        }
        true
    }
}

/// Period that does not catch up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every {
    period_ns: u64,
    last_ns: u64,
}

impl Every {
    /// Returns a period of `period_ns` nanoseconds. The first one begins at `now_ns`.
    #[must_use]
    pub fn new(period_ns: u64, now_ns: u64) -> Self {
        Self { period_ns, last_ns: now_ns }
    }

    /// Returns true if a period is over or the clock went backwards. The next period then begins.
    #[inline]
    pub fn due(&mut self, now_ns: u64) -> bool {
        // A clock that went back wraps to a huge difference.
        let due = now_ns.wrapping_sub(self.last_ns) >= self.period_ns;
        if due {
            self.last_ns = now_ns;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_nanoseconds() {
        let clock = TscClock::new(2_000_000, 1000);
        assert_eq!(clock.ns(1000), 0);
        assert_eq!(clock.ns(999), 0);
        assert_eq!(clock.ns(1000 + 2_000_000_000), SECOND_NS);
        let odd = TscClock::new(2_893_202, 0);
        let hour = odd.ns(2_893_202_000 * 3600);
        assert!(hour.abs_diff(3600 * SECOND_NS) < 10_000, "{hour}");
    }

    fn count(pacer: &mut Pacer, from_ns: u64, to_ns: u64, step: usize) -> u64 {
        (from_ns..to_ns).step_by(step).map(|now| u64::from(pacer.due(now))).sum()
    }

    #[test]
    fn a_pace_is_kept() {
        for rate in [1000, 99_991, 100_000, 333_333] {
            let mut pacer = Pacer::new(rate, 1_000_000);
            count(&mut pacer, 0, 10_000_000, 500);
            let done = count(&mut pacer, 10_000_000, SECOND_NS + 10_000_000, 500);
            assert!(done.abs_diff(rate) <= 1, "{rate}: {done}");
        }
        assert_eq!(count(&mut Pacer::new(0, 1000), 0, SECOND_NS, 1_000_000), 0);
    }

    #[test]
    fn short_delays_are_caught_up_and_long_ones_are_lost() {
        let mut pacer = Pacer::new(100_000, 1_000_000);
        assert_eq!(count(&mut pacer, 0, 1_000_000, 1000), 100);
        // 0.5 ms late: all 50 events follow. 100 ms late: only the debt of 1 ms follows, 100
        // events.
        assert_eq!(count(&mut pacer, 1_500_000, 1_501_000, 10), 51);
        assert_eq!(count(&mut pacer, 101_500_000, 101_502_000, 10), 101);
    }

    #[test]
    fn clock_that_goes_back_does_not_stop_the_pace() {
        let mut pacer = Pacer::new(1000, 1_000_000);
        assert!(pacer.due(500 * SECOND_NS));
        assert!(!pacer.due(5));
        assert!(pacer.due(6));
        let mut every = Every::new(100, 1000);
        assert!(!every.due(1099));
        assert!(every.due(1100));
        assert!(!every.due(1199));
        assert!(every.due(7));
        assert!(!every.due(8));
    }
}
