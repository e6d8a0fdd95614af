//! The guest's clock: goes on across a pause and across a move, so that the guest sees its downtime.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Nanoseconds since the guest's start, on every host that it runs on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    base: Instant,
    /// What it read at `base`, in ns.
    offset: u64,
}

/// A reading that another host can go on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SavedClock {
    /// The guest's clock in ns.
    pub(crate) ns: u64,
    /// The hosts' common time at that reading: ns since 1970.
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

    /// Goes on from `saved`, advanced by the time that has passed: hiding the downtime would be a lie to the guest
    /// (hazards.md 14). Hosts whose clocks disagree backwards cannot make it go back.
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
        assert!(behind.ns() >= saved.ns, "a host whose clock is behind does not turn the guest's back");
    }
}
