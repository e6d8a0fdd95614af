//! The reaper with gears.

use super::Reaped;
use std::time::Duration;

/// How long each gear sleeps. As published.
pub(crate) const SLEEPS: [Duration; 6] = [
    Duration::from_millis(1000),
    Duration::from_millis(500),
    Duration::from_millis(250),
    Duration::from_millis(125),
    Duration::from_millis(100),
    Duration::from_millis(80),
];

const FASTEST: usize = SLEEPS.len() - 1;

/// Harvests that want a lower gear before there is one, not counting the one that shifts. As published.
const DOWN_AFTER: u32 = 5;

/// A gear for each tenth of occupancy, the fastest from one half on.
///
/// Up one gear at once, when a higher one is wanted or a ring went full. Down one gear after more than [`DOWN_AFTER`]
/// harvests in a row that wanted a lower one. As it was published in words, the count restarts when a higher gear is
/// wanted, and neither staying nor a shift down resets it: once it is reached, each further harvest that wants a lower
/// gear gets it. A ring that went full shifts up, and is none of the harvests that count; the count stays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gears {
    gear: usize,
    wanted_lower: u32,
}

impl Gears {
    pub(crate) fn next(&mut self, reaped: Reaped) -> Duration {
        let wanted = usize::try_from(reaped.tenths()).unwrap_or(FASTEST).min(FASTEST);
        if wanted > self.gear {
            self.wanted_lower = 0;
        }
        if wanted > self.gear || reaped.went_full {
            self.gear = (self.gear + 1).min(FASTEST);
        } else if wanted < self.gear {
            self.wanted_lower = self.wanted_lower.saturating_add(1);
            if self.wanted_lower > DOWN_AFTER {
                self.gear -= 1;
            }
        }
        SLEEPS[self.gear]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sleeps in milliseconds for a trace of (occupancy in percent, went full).
    fn trace(gears: &mut Gears, steps: &[(u64, bool)]) -> Vec<u128> {
        let step = |&(percent, went_full): &(u64, bool)| {
            gears.next(Reaped { pages: percent, entries: 100, went_full }).as_millis()
        };
        steps.iter().map(step).collect()
    }

    fn calm(percents: &[u64]) -> Vec<(u64, bool)> {
        percents.iter().map(|&percent| (percent, false)).collect()
    }

    #[test]
    fn each_tenth_has_its_gear() {
        for (percent, sleep) in [
            (0, 1000),
            (9, 1000),
            (10, 500),
            (19, 500),
            (20, 250),
            (30, 125),
            (40, 100),
            (49, 100),
            (50, 80),
            (900, 80),
        ] {
            let mut gears = Gears::default();
            assert_eq!(trace(&mut gears, &calm(&[percent; 9])).last(), Some(&sleep), "{percent} %");
        }
    }

    #[test]
    fn up_one_gear_at_a_time_and_at_once() {
        let mut gears = Gears::default();
        assert_eq!(trace(&mut gears, &calm(&[75; 6])), [500, 250, 125, 100, 80, 80]);
        let mut gears = Gears::default();
        assert_eq!(trace(&mut gears, &[(5, true), (5, true), (5, false)]), [500, 250, 250], "full is enough");
    }

    #[test]
    fn down_after_six_and_then_with_each() {
        let mut gears = Gears { gear: FASTEST, wanted_lower: 0 };
        let sleeps = trace(&mut gears, &calm(&[0; 12]));
        assert_eq!(sleeps, [80, 80, 80, 80, 80, 100, 125, 250, 500, 1000, 1000, 1000]);
    }

    #[test]
    fn staying_keeps_the_count_and_a_higher_wish_restarts_it() {
        let mut gears = Gears { gear: 3, wanted_lower: 0 };
        // Five want lower, one stays, the sixth gets it.
        assert_eq!(trace(&mut gears, &calm(&[0, 0, 0, 0, 0, 35, 0])), [125, 125, 125, 125, 125, 125, 250]);
        let mut gears = Gears { gear: 3, wanted_lower: 0 };
        // Five want lower, one wants higher, and it takes six again.
        assert_eq!(
            trace(&mut gears, &calm(&[0, 0, 0, 0, 0, 45, 0, 0, 0, 0, 0, 0, 0])),
            [125, 125, 125, 125, 125, 100, 100, 100, 100, 100, 100, 125, 250]
        );
    }

    #[test]
    fn a_full_ring_is_no_harvest_that_counts() {
        let mut gears = Gears { gear: 2, wanted_lower: 5 };
        assert_eq!(trace(&mut gears, &[(0, true), (0, false)]), [125, 250]);
    }
}
