//! Clock of a migration on a real host.
//!
//! Sessions and the run loop read no clock, because their host tells them the time. Each host takes
//! every time from one [`Clock`], so that all of its time stamps can be compared.

use std::time::{Duration, Instant};

/// Clock that measures the time since a migration began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) began: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Self::start()
    }
}

impl Clock {
    /// Starts a clock.
    pub(crate) fn start() -> Self {
        Self { began: Instant::now() }
    }

    /// Returns the time since the start.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the time since `stamp`.
    pub(crate) fn since(&self, stamp: Duration) -> Duration {
        self.now().saturating_sub(stamp)
    }

    /// Returns the time until `deadline`, or `None` once it has passed.
    pub(crate) fn until(&self, deadline: Duration) -> Option<Duration> {
        deadline.checked_sub(self.now())
    }
}
