//! Deferred switchover: the guest cannot be stopped yet, and the source tries again later.
//!
//! A trial pause or the switchover itself may find that the guest's I/O does not quiesce in the
//! time for which the guest may be paused, or that stopping the guest takes longer than the
//! downtime limit. The guest then continues to run. Because each attempt pauses the guest, the
//! intervals between attempts grow.

use std::time::Duration;

/// Time between the first attempt that was in vain and the next attempt. This time doubles with
/// each further attempt.
pub(super) const TRY_AGAIN: Duration = Duration::from_millis(250);
/// Longest time between two attempts, unless [`LENGTH_SHARE`] or [`BUSY_SHARE`] results in a longer
/// time.
pub(super) const LONGEST_BETWEEN: Duration = Duration::from_secs(30);
/// Ratio that raises the longest time between two attempts, for a guest that takes too long to
/// stop: the longest time is at least the last pause times this ratio.
const LENGTH_SHARE: u32 = 100;
/// Same ratio for a guest whose I/O is busy. It is smaller, because such a guest can be stopped
/// whenever its I/O is idle, and attempts must be frequent enough to find such a moment.
const BUSY_SHARE: u32 = 10;
/// Minimum ratio of the time until the next attempt to the last pause, for a guest whose I/O is
/// busy.
const RUNS_BETWEEN: u32 = 3;

/// Attempts to stop the guest.
#[derive(Debug, Clone)]
pub(super) struct Deferral {
    /// I/O that did not quiesce at the last attempt. `None` if the I/O quiesced.
    busy: Option<String>,
    /// Time at which the last attempt ended.
    pub(super) last: Duration,
    /// Time after `last` until the next attempt.
    wait: Duration,
    /// Number of attempts that found the guest's I/O busy.
    pub(super) count: u64,
    /// Total time for which the guest was paused at these attempts.
    pub(super) paused: Duration,
}

impl Deferral {
    pub(super) fn new(now: Duration) -> Self {
        Self { busy: None, last: now, wait: TRY_AGAIN / 2, count: 0, paused: Duration::ZERO }
    }

    /// Returns the I/O that did not quiesce at the last attempt.
    pub(super) fn busy(&self) -> Option<&str> {
        self.busy.as_deref()
    }

    /// Returns true if it is time for another attempt.
    pub(super) fn is_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.last) > self.wait
    }

    /// Records an attempt in which the guest's I/O did not quiesce because of `why`, and which
    /// paused the guest for `paused`.
    pub(super) fn found_busy(&mut self, now: Duration, paused: Duration, why: String) {
        self.busy = Some(why);
        self.count += 1;
        self.paused += paused;
        self.wait_longer(now, paused, BUSY_SHARE, paused.saturating_mul(RUNS_BETWEEN));
    }

    /// Records an attempt in which the guest's I/O quiesced.
    pub(super) fn found_quiet(&mut self, now: Duration) {
        self.busy = None;
        self.last = now;
    }

    /// Records that the last attempt, which paused the guest for `paused`, found that stopping the
    /// guest takes too long.
    pub(super) fn found_too_long(&mut self, now: Duration, paused: Duration) {
        self.wait_longer(now, paused, LENGTH_SHARE, Duration::ZERO);
    }

    fn wait_longer(&mut self, now: Duration, paused: Duration, share: u32, least: Duration) {
        self.last = now;
        let longest = LONGEST_BETWEEN.max(paused.saturating_mul(share));
        self.wait = self.wait.saturating_mul(2).min(longest).max(least);
    }

    /// Hashes the fields that affect decisions, and clears the time stamps.
    #[cfg(feature = "model")]
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        let Self { busy, last, wait: _, count: _, paused: _ } = self;
        *last = Duration::ZERO;
        std::hash::Hash::hash(&busy.is_some(), hasher);
    }
}
