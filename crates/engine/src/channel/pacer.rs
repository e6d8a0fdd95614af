//! Bandwidth limit, shared by all channels of a migration.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum duration of a single sleep. It is short, so that a cancel is noticed soon.
const SLICE: Duration = Duration::from_millis(50);
/// Time in ns by which the channels may be behind the schedule and still catch up. A burst is
/// therefore at most as long as this time.
const BURST: u64 = 10_000_000;

/// Pacer that assigns time slots of one schedule. A sender of `n` bytes takes the next `n / rate`
/// seconds of the schedule.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Bytes per second. Zero for no limit.
    rate: AtomicU64,
    began: Instant,
    /// Time at which the schedule is free again, in ns since `began`.
    free_at: AtomicU64,
}

impl Pacer {
    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate: AtomicU64::new(rate.unwrap_or(0)), began: Instant::now(), free_at: AtomicU64::new(0) }
    }

    /// Changes the rate. Slots that were already assigned do not change. Later slots have the new
    /// rate, and begin now.
    pub(crate) fn set(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        self.free_at.fetch_min(self.now(), Ordering::Relaxed);
    }

    /// Waits until `bytes` bytes may be sent, or until `stop` returns true.
    pub(crate) fn wait(&self, bytes: usize, stop: impl Fn() -> bool) {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 {
            return;
        }
        let now = self.now();
        let cost = u64::try_from(bytes as u128 * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX);
        let slot = |free_at: u64| free_at.max(now.saturating_sub(BURST));
        let begins = self
            .free_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free_at| {
                Some(slot(free_at).saturating_add(cost))
            })
            .map_or(now, slot);
        loop {
            let ahead = Duration::from_nanos(begins.saturating_sub(self.now()));
            if ahead.is_zero() || stop() {
                return;
            }
            std::thread::sleep(ahead.min(SLICE));
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_share_one_rate() {
        let pacer = Pacer::new(Some(10_000_000));
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..10).for_each(|_| pacer.wait(100_000, || false)));
            }
        });
        // 2 MB at 10 MB/s take 200 ms. The last slot begins 10 ms before its end, and a burst of 10
        // ms is allowed.
        assert!(began.elapsed() >= Duration::from_millis(175), "{:?}", began.elapsed());
    }

    #[test]
    fn another_rate_holds_at_once() {
        let pacer = Pacer::new(Some(1));
        pacer.wait(1_000_000, || true);
        pacer.set(Some(10_000_000));
        let began = Instant::now();
        // At the old rate the first of these calls would wait for eleven days.
        (0..2).for_each(|_| pacer.wait(1_000_000, || began.elapsed() > vmferry_testkit::PATIENCE));
        assert!(began.elapsed() >= Duration::from_millis(85), "{:?}", began.elapsed());
        assert!(began.elapsed() < vmferry_testkit::PATIENCE, "{:?}", began.elapsed());
        pacer.set(None);
        pacer.wait(usize::MAX, || false);
    }

    #[test]
    fn a_stop_ends_the_wait() {
        let pacer = Pacer::new(Some(1));
        pacer.wait(1_000_000, || true);
        pacer.wait(1_000_000, || true);
    }
}
