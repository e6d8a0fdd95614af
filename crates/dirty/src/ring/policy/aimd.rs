//! The reaper that halves and adds.

use super::Reaped;
use std::time::Duration;

/// The bounds of its sleep. As proposed.
pub(crate) const SHORTEST: Duration = Duration::from_millis(100);
/// The other bound.
pub(crate) const LONGEST: Duration = Duration::from_secs(1);

/// What is added to a sleep that was short enough. As proposed.
const STEP: Duration = Duration::from_millis(20);

/// Above 0.8 of occupancy the sleep is halved, up to 0.2 it grows by [`STEP`], in between it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aimd {
    sleep: Duration,
}

impl Default for Aimd {
    fn default() -> Self {
        Self { sleep: LONGEST }
    }
}

impl Aimd {
    pub(crate) fn next(&mut self, reaped: Reaped) -> Duration {
        let (pages, entries) = (u128::from(reaped.pages), u128::from(reaped.entries));
        let sleep = if pages * 10 > entries * 8 {
            self.sleep / 2
        } else if pages * 10 <= entries * 2 {
            self.sleep + STEP
        } else {
            self.sleep
        };
        self.sleep = sleep.clamp(SHORTEST, LONGEST);
        self.sleep
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_above_eight_tenths_adds_up_to_two_and_stays_between() {
        let mut aimd = Aimd::default();
        let mut next = |pages| aimd.next(Reaped { pages, entries: 1000, went_full: false }).as_millis();
        assert_eq!([800, 801, 801, 500].map(&mut next), [1000, 500, 250, 250]);
        assert_eq!([201, 200, 0].map(&mut next), [250, 270, 290]);
        assert_eq!([999, 9999, 9999].map(&mut next), [145, 100, 100], "not below 100 ms");
        let last = (0..100).map(|_| next(0)).last();
        assert_eq!(last, Some(1000), "not above a second");
    }
}
