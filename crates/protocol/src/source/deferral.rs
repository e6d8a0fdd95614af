//! A guest that cannot be stopped yet: the switchover is deferred, and tried again later.
//!
//! A trial pause or the switchover itself may find that the guest's I/O does not come to rest in the
//! time that the guest may be paused, or that stopping takes longer than the downtime limit. The guest
//! then runs on. Each attempt pauses the guest, so attempts follow each other ever more slowly.

use std::time::Duration;

/// Time after the first trial pause that found the pause too long until the next one. It doubles
/// with each further attempt.
pub(super) const TRY_AGAIN: Duration = Duration::from_millis(250);
/// Longest time between two attempts, unless [`LENGTH_SHARE`] asks for more.
pub(super) const LONGEST_BETWEEN: Duration = Duration::from_secs(30);
/// A guest whose stop takes too long is paused for at most one part in this many of its time.
const LENGTH_SHARE: u32 = 100;
/// A guest whose I/O is busy is paused for at most one part in this many of its time. I/O comes to
/// rest by itself at some time, and the attempt must then meet it.
const BUSY_SHARE: u32 = 10;
/// A guest that was paused in vain runs for at least this many times as long before the next attempt.
const RUNS_BETWEEN: u32 = 3;

/// The attempts to stop the guest.
#[derive(Debug, Clone)]
pub(super) struct Deferral {
    /// Reason for which the guest's I/O did not come to rest at the last attempt. `None` if it did.
    busy: Option<String>,
    /// Time at which the last attempt ended.
    pub(super) last: Duration,
    /// Time after `last` until the next attempt.
    wait: Duration,
    /// Number of attempts that found the guest's I/O busy.
    pub(super) count: u64,
    /// Time that the guest was paused at those attempts.
    pub(super) paused: Duration,
}

impl Deferral {
    pub(super) fn new(now: Duration) -> Self {
        Self { busy: None, last: now, wait: TRY_AGAIN / 2, count: 0, paused: Duration::ZERO }
    }

    /// Returns why the guest's I/O was busy at the last attempt.
    pub(super) fn busy(&self) -> Option<&str> {
        self.busy.as_deref()
    }

    /// Returns true if it is time for another attempt.
    pub(super) fn is_due(&self, now: Duration) -> bool {
        now.saturating_sub(self.last) > self.wait
    }

    /// Notes an attempt in which the guest's I/O did not come to rest, and which paused the guest for
    /// `paused`.
    pub(super) fn found_busy(&mut self, now: Duration, paused: Duration, why: String) {
        self.busy = Some(why);
        self.count += 1;
        self.paused += paused;
        self.wait_longer(now, paused, BUSY_SHARE, paused.saturating_mul(RUNS_BETWEEN));
    }

    /// Notes an attempt in which the guest's I/O came to rest.
    pub(super) fn found_quiet(&mut self, now: Duration) {
        self.busy = None;
        self.last = now;
    }

    /// Notes that the last attempt, which paused the guest for `paused`, found that stopping takes
    /// too long.
    pub(super) fn found_too_long(&mut self, now: Duration, paused: Duration) {
        self.wait_longer(now, paused, LENGTH_SHARE, Duration::ZERO);
    }

    fn wait_longer(&mut self, now: Duration, paused: Duration, share: u32, least: Duration) {
        self.last = now;
        let longest = LONGEST_BETWEEN.max(paused.saturating_mul(share));
        self.wait = self.wait.saturating_mul(2).min(longest).max(least);
    }

    /// Hashes what decides, and forgets when it was.
    #[cfg(feature = "model")]
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        let Self { busy, last, wait: _, count: _, paused: _ } = self;
        *last = Duration::ZERO;
        std::hash::Hash::hash(&busy.is_some(), hasher);
    }
}
