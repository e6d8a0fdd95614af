//! Clock of the guest. It continues during a pause and across a migration, so that the guest sees
//! its downtime.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Clock that counts nanoseconds since the guest was started, across all hosts on which the guest
/// has run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    base: Instant,
    /// Guest time at `base`, in ns.
    offset: u64,
}

/// Reading of the guest's clock from which another host continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SavedClock {
    /// Guest time, in ns.
    pub(crate) ns: u64,
    /// Wall-clock time of the reading, in ns since 1970.
    pub(crate) realtime_ns: u64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { base: Instant::now(), offset: 0 }
    }

    pub(crate) fn ns(&self) -> u64 {
        self.offset.saturating_add(u64::try_from(self.base.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn save(&self) -> SavedClock {
        SavedClock { ns: self.ns(), realtime_ns: realtime_ns() }
    }

    /// Returns a clock that continues from `saved`, advanced by the wall-clock time that has passed
    /// since the reading, because the guest must see its downtime (hazards.md 14). If the target's
    /// wall clock is behind that of the source, the guest's clock continues from `saved` and does
    /// not go back.
    pub(crate) fn restore(saved: SavedClock) -> Self {
        let passed = realtime_ns().saturating_sub(saved.realtime_ns);
        Self { base: Instant::now(), offset: saved.ns.saturating_add(passed) }
    }
}

fn realtime_ns() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_goes_on_across_a_move() {
        let clock = Clock::new();
        let saved = clock.save();
        std::thread::sleep(Duration::from_millis(5));
        let moved = Clock::restore(saved);
        assert!(moved.ns() >= saved.ns + 5_000_000);
        let behind = Clock::restore(SavedClock { realtime_ns: u64::MAX, ..saved });
        assert!(
            behind.ns() >= saved.ns,
            "the guest's clock does not go back on a host whose clock is behind"
        );
    }
}
