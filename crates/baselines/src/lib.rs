//! Baselines: published harvest policies for dirty rings, which are kept for comparison with
//! [`Predict`], the default policy.
//!
//! No migration needs a baseline. `vmferry migrate --reaper` selects one by its name, and
//! `vmferry-bench reaper` measures all of them, together with `predict`, in one run.
//!
//! | name | rule | published as |
//! |---|---|---|
//! | `fixed` | always sleeps one second | QEMU's reaper thread |
//! | `gears` | chooses one of six sleeps, from 1000 to 80 ms, by occupancy | patches for QEMU that make the reaper adaptive |
//! | `aimd` | halves the sleep above an occupancy of 0.8, and adds 20 ms up to an occupancy of 0.2 | a proposal in the review of these patches: "20 lines instead of 100" |
//!
//! The rules were written from their published descriptions, not from their code. The published
//! code of `gears` never shifts down, because it increments a pointer instead of the counter to
//! which it points. This crate implements the rule as the text describes it.
//!
//! The baselines run under the conditions for which they were published:
//!
//! - One lock excludes all harvests of the reaper and of full rings from each other.
//! - A vCPU whose ring is full harvests all rings.
//! - Occupancy is the number of pages harvested from all rings, divided by the size of one ring.
//!   With several vCPUs it can exceed 1.
//!
//! The baselines implement [`ReaperPolicy`], the extension point of `vmferry-dirty`. You can
//! implement your own policy in the same way.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use vmferry_dirty::{HarvestSchedule, Predict, ReaperPolicy, RingView, Rings, TrackerError};

/// Harvest policy that can be selected by its name: a baseline, or the default policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Harvests every second.
    Fixed,
    /// Chooses one of six sleeps, the gears, by occupancy. It shifts up one gear at once, and
    /// shifts down one gear after six harvests that wanted a lower gear.
    Gears,
    /// Halves the sleep if the occupancy was above 0.8, and adds 20 ms if it was at most 0.2.
    Aimd,
    /// Default policy, [`Predict`].
    #[default]
    Predict,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Fixed, Self::Gears, Self::Aimd, Self::Predict];

    /// Returns the shortest and the longest time for which the reaper sleeps under this policy.
    #[must_use]
    pub fn sleeps(self) -> (Duration, Duration) {
        match self {
            Self::Fixed => (Fixed::FIRST_SLEEP, Fixed::FIRST_SLEEP),
            Self::Gears => (GEARS[FASTEST].sleep, GEARS[0].sleep),
            Self::Aimd => (AIMD_SHORTEST, AIMD_LONGEST),
            Self::Predict => (Predict::SHORTEST_SLEEP, Predict::LONGEST_SLEEP),
        }
    }
}

impl ReaperPolicy for Policy {
    fn name(&self) -> &str {
        match self {
            Self::Fixed => "fixed",
            Self::Gears => "gears",
            Self::Aimd => "aimd",
            Self::Predict => Predict.name(),
        }
    }

    fn harvests_all(&self) -> bool {
        *self != Self::Predict
    }

    fn begin(&self, rings: &dyn Rings) -> Box<dyn HarvestSchedule> {
        match self {
            Self::Fixed => Box::new(Baseline::<Fixed>::default()),
            Self::Gears => Box::new(Baseline::<Gears>::default()),
            Self::Aimd => Box::new(Baseline::<Aimd>::default()),
            Self::Predict => Predict.begin(rings),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error that parsing a [`Policy`] returns if the text is not the name of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a reaper policy; use fixed, gears, aimd or predict")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let policy = Self::ALL.into_iter().find(|policy| policy.name() == text);
        policy.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// Result of a harvest of all rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reaped {
    /// Number of pages harvested from all rings.
    pages: u64,
    /// Number of entries in one ring.
    entries: u32,
    /// True if the ring of a vCPU was full since the previous harvest.
    went_full: bool,
}

impl Reaped {
    /// Returns the occupancy in percent, rounded down: 0.299 is 29. The result exceeds 100 if more
    /// pages than one ring holds were harvested.
    fn percent(self) -> u64 {
        self.pages.saturating_mul(100) / u64::from(self.entries)
    }
}

/// Published rule that chooses the sleep after a harvest.
trait Rule: Default {
    /// Time to sleep before the first harvest.
    const FIRST_SLEEP: Duration;

    /// Returns the time to sleep after the harvest `reaped`.
    fn next(&mut self, reaped: Reaped) -> Duration;
}

/// State of a baseline for one period of tracking. It harvests all rings each time the reaper wakes
/// up, and its rule chooses the sleep.
#[derive(Debug, Default)]
struct Baseline<R> {
    rule: R,
    views: Vec<RingView>,
    /// Number of full exits of all rings at the previous wake-up.
    full_exits: u64,
}

impl<R: Rule> HarvestSchedule for Baseline<R> {
    fn first_sleep(&self) -> Duration {
        R::FIRST_SLEEP
    }

    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
        let pages = rings.harvest_all()?;
        rings.observe(&mut self.views);
        let full_exits = self.views.iter().map(|view| view.full_exits).sum();
        let went_full = full_exits != std::mem::replace(&mut self.full_exits, full_exits);
        Ok(self.rule.next(Reaped { pages, entries: rings.entries(), went_full }))
    }
}

/// Rule `fixed`: always sleeps for one second.
#[derive(Debug, Default)]
struct Fixed;

impl Rule for Fixed {
    const FIRST_SLEEP: Duration = Duration::from_secs(1);

    fn next(&mut self, _: Reaped) -> Duration {
        Self::FIRST_SLEEP
    }
}

/// Gear of the rule `gears`.
#[derive(Debug, Clone, Copy)]
struct Gear {
    /// Lowest occupancy in percent that wants this gear, or a faster one.
    from_percent: u64,
    /// Time to sleep in this gear.
    sleep: Duration,
}

const fn gear(from_percent: u64, sleep_ms: u64) -> Gear {
    Gear { from_percent, sleep: Duration::from_millis(sleep_ms) }
}

/// Gears from the slowest to the fastest, as published. The level of a gear is its index.
const GEARS: [Gear; 6] =
    [gear(0, 1000), gear(10, 500), gear(20, 250), gear(30, 125), gear(40, 100), gear(50, 80)];

/// Level of the gear with the shortest sleep.
const FASTEST: usize = GEARS.len() - 1;

/// Returns the level of the gear that a harvest wants.
fn wanted(reaped: Reaped) -> usize {
    let percent = reaped.percent();
    GEARS.iter().rposition(|gear| gear.from_percent <= percent).unwrap_or(0)
}

/// Number of harvests that must want a lower gear before the rule shifts down, as published. The
/// harvest at which the rule shifts is not included.
const DOWN_AFTER: u32 = 5;

/// Rule `gears`, with the gears of [`GEARS`].
///
/// The rule shifts up one gear at once if a harvest wants a higher gear, or if a ring was full. It
/// counts the harvests that want a lower gear, and shifts down one gear at each of them after the
/// first [`DOWN_AFTER`]. As published, only a harvest that wants a higher gear resets the count. A
/// harvest that wants the present gear, and a shift down, leave it unchanged. A harvest after a
/// full ring shifts up without changing the count, even if it wants a lower gear.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Gears {
    /// Level of the present gear.
    level: usize,
    /// Number of harvests that wanted a lower gear, since one wanted a higher gear.
    wanted_lower: u32,
}

impl Rule for Gears {
    const FIRST_SLEEP: Duration = GEARS[0].sleep;

    fn next(&mut self, reaped: Reaped) -> Duration {
        let wanted = wanted(reaped);
        if wanted > self.level {
            self.wanted_lower = 0;
        }
        if wanted > self.level || reaped.went_full {
            self.level = (self.level + 1).min(FASTEST);
        } else if wanted < self.level {
            self.wanted_lower = self.wanted_lower.saturating_add(1);
            if self.wanted_lower > DOWN_AFTER {
                self.level -= 1;
            }
        }
        GEARS[self.level].sleep
    }
}

/// Shortest sleep of `aimd`, as proposed.
const AIMD_SHORTEST: Duration = Duration::from_millis(100);
/// Longest sleep of `aimd`, as proposed.
const AIMD_LONGEST: Duration = Duration::from_secs(1);
/// Time that `aimd` adds to a sleep that was short enough, as proposed.
const AIMD_STEP: Duration = Duration::from_millis(20);

/// Rule `aimd`: the sleep is halved above an occupancy of 0.8, grows by [`AIMD_STEP`] up to an
/// occupancy of 0.2, and stays the same in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Aimd {
    sleep: Duration,
}

impl Default for Aimd {
    fn default() -> Self {
        Self { sleep: AIMD_LONGEST }
    }
}

impl Rule for Aimd {
    const FIRST_SLEEP: Duration = AIMD_LONGEST;

    fn next(&mut self, reaped: Reaped) -> Duration {
        let (pages, entries) = (u128::from(reaped.pages), u128::from(reaped.entries));
        let sleep = if pages * 10 > entries * 8 {
            self.sleep / 2
        } else if pages * 10 <= entries * 2 {
            self.sleep + AIMD_STEP
        } else {
            self.sleep
        };
        self.sleep = sleep.clamp(AIMD_SHORTEST, AIMD_LONGEST);
        self.sleep
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_parses_from_its_name() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "Fixed".parse::<Policy>().unwrap_err().to_string();
        assert!(error.contains("`Fixed` is not a reaper policy; use fixed, gears"), "{error}");
    }

    #[test]
    fn occupancy_is_counted_in_percent_of_one_ring() {
        let percent = |pages| Reaped { pages, entries: 4096, went_full: false }.percent();
        // A tenth of 4096 is 409.6.
        assert_eq!([0, 409, 410, 819, 820, 4096, 8192].map(percent), [0, 9, 10, 19, 20, 100, 200]);
    }

    #[test]
    fn gears_are_those_that_were_published() {
        let gears = GEARS.map(|gear| (gear.from_percent, gear.sleep.as_millis()));
        assert_eq!(gears, [(0, 1000), (10, 500), (20, 250), (30, 125), (40, 100), (50, 80)]);
        let wanted = |pages| wanted(Reaped { pages, entries: 65536, went_full: false });
        // The last page count below each tenth of 65536 entries, and the first one from it on.
        assert_eq!([0, 6553, 6554, 13107, 13108, 19660, 19661].map(wanted), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!([26214, 26215, 32767, 32768, u64::MAX].map(wanted), [3, 4, 4, 5, 5]);
    }

    /// Returns the sleeps in milliseconds for a trace of (occupancy in percent, went full).
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
    fn gears_have_a_gear_for_each_tenth() {
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
    fn gears_shift_up_one_at_a_time_and_at_once() {
        let mut gears = Gears::default();
        assert_eq!(trace(&mut gears, &calm(&[75; 6])), [500, 250, 125, 100, 80, 80]);
        let mut gears = Gears::default();
        assert_eq!(trace(&mut gears, &[(5, true), (5, true), (5, false)]), [500, 250, 250], "full is enough");
    }

    #[test]
    fn gears_shift_down_after_six_harvests_and_then_with_each() {
        let mut gears = Gears { level: FASTEST, wanted_lower: 0 };
        let sleeps = trace(&mut gears, &calm(&[0; 12]));
        assert_eq!(sleeps, [80, 80, 80, 80, 80, 100, 125, 250, 500, 1000, 1000, 1000]);
    }

    #[test]
    fn gears_keep_the_count_when_they_stay_and_restart_it_when_a_higher_gear_is_wanted() {
        let mut gears = Gears { level: 3, wanted_lower: 0 };
        // Five harvests want a lower gear, one stays, and the sixth gets it.
        assert_eq!(trace(&mut gears, &calm(&[0, 0, 0, 0, 0, 35, 0])), [125, 125, 125, 125, 125, 125, 250]);
        let mut gears = Gears { level: 3, wanted_lower: 0 };
        // Five harvests want a lower gear, one wants a higher gear, and the count restarts.
        assert_eq!(
            trace(&mut gears, &calm(&[0, 0, 0, 0, 0, 45, 0, 0, 0, 0, 0, 0, 0])),
            [125, 125, 125, 125, 125, 100, 100, 100, 100, 100, 100, 125, 250]
        );
    }

    #[test]
    fn gears_do_not_count_a_harvest_after_a_full_ring() {
        let mut gears = Gears { level: 2, wanted_lower: 5 };
        assert_eq!(trace(&mut gears, &[(0, true), (0, false)]), [125, 250]);
        assert_eq!(gears, Gears { level: 2, wanted_lower: 6 });
    }

    #[test]
    fn gears_restart_the_count_when_a_full_ring_also_wants_a_higher_gear() {
        let mut gears = Gears { level: 2, wanted_lower: 5 };
        assert_eq!(trace(&mut gears, &[(75, true), (0, false)]), [125, 125]);
        assert_eq!(gears, Gears { level: 3, wanted_lower: 1 });
    }

    #[test]
    fn aimd_halves_above_eight_tenths_adds_up_to_two_and_stays_between() {
        let mut aimd = Aimd::default();
        let mut next = |pages| aimd.next(Reaped { pages, entries: 1000, went_full: false }).as_millis();
        assert_eq!([800, 801, 801, 500].map(&mut next), [1000, 500, 250, 250]);
        assert_eq!([201, 200, 0].map(&mut next), [250, 270, 290]);
        assert_eq!([999, 9999, 9999].map(&mut next), [145, 100, 100], "not below 100 ms");
        let last = (0..100).map(|_| next(0)).last();
        assert_eq!(last, Some(1000), "not above a second");
    }
}
