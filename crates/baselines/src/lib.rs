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
//! | `aimd-own` | `aimd`, but a vCPU whose ring is full harvests only its own ring | not published: `aimd` without the conditions below |
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
//! `aimd-own` runs under the conditions of `predict` instead. No lock excludes harvests of
//! different rings from each other, and a full ring is harvested alone. The occupancy is the fill
//! of the fullest ring. A ring that was full since the last harvest counts as full, although its
//! vCPU has emptied it.
//!
//! [`Aimd`] has the constants of `aimd` as data, so that a sweep can look for better ones.
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
    /// Does the same as `Aimd`, but harvests each ring on its own ([`Aimd::OWN_RINGS`]).
    AimdOwn,
    /// Default policy, [`Predict`].
    #[default]
    Predict,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Fixed, Self::Gears, Self::Aimd, Self::AimdOwn, Self::Predict];

    /// Returns the shortest and the longest time for which the reaper sleeps under this policy.
    #[must_use]
    pub fn sleeps(self) -> (Duration, Duration) {
        match self {
            Self::Fixed => (FIXED, FIXED),
            Self::Gears => (GEARS[FASTEST].sleep, GEARS[0].sleep),
            Self::Aimd => (Aimd::PROPOSED.shortest, Aimd::PROPOSED.longest),
            Self::AimdOwn => (Aimd::OWN_RINGS.shortest, Aimd::OWN_RINGS.longest),
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
            Self::AimdOwn => "aimd-own",
            Self::Predict => Predict.name(),
        }
    }

    fn harvests_all(&self) -> bool {
        match self {
            Self::Fixed | Self::Gears => true,
            Self::Aimd => Aimd::PROPOSED.harvests_all(),
            Self::AimdOwn => Aimd::OWN_RINGS.harvests_all(),
            Self::Predict => Predict.harvests_all(),
        }
    }

    fn begin(&self, rings: &dyn Rings) -> Box<dyn HarvestSchedule> {
        match self {
            Self::Fixed => Box::new(Baseline::new(Fixed, Occupancy::Sum)),
            Self::Gears => Box::new(Baseline::new(Gears::default(), Occupancy::Sum)),
            Self::Aimd => Aimd::PROPOSED.begin(rings),
            Self::AimdOwn => Aimd::OWN_RINGS.begin(rings),
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
#[error("`{0}` is not a reaper policy; use fixed, gears, aimd, aimd-own or predict")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let policy = Self::ALL.into_iter().find(|policy| policy.name() == text);
        policy.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// Settings of the policy `aimd`, as a policy.
///
/// The sleep is halved after a harvest with a high occupancy. The sleep grows by a constant after
/// harvests with a low occupancy, and stays the same in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aimd {
    /// Occupancy in percent above which the sleep is halved.
    pub above_percent: u64,
    /// Occupancy in percent up to which the sleep grows.
    pub up_to_percent: u64,
    /// Shortest sleep.
    pub shortest: Duration,
    /// Longest sleep, which is also the first one.
    pub longest: Duration,
    /// Time by which the sleep grows.
    pub step: Duration,
    /// Number of harvests in a row with a low occupancy after which the sleep grows, at least 1.
    /// With 1, the sleep grows at each of them.
    pub after: u32,
    /// True if each ring is harvested on its own, and the fullest ring determines the occupancy.
    pub own_rings: bool,
}

impl Aimd {
    /// Settings that were proposed.
    pub const PROPOSED: Self = Self {
        above_percent: 80,
        up_to_percent: 20,
        shortest: Duration::from_millis(100),
        longest: Duration::from_secs(1),
        step: Duration::from_millis(20),
        after: 1,
        own_rings: false,
    };

    /// Settings that were proposed, with a harvest of each ring on its own.
    pub const OWN_RINGS: Self = Self { own_rings: true, ..Self::PROPOSED };
}

impl ReaperPolicy for Aimd {
    fn name(&self) -> &str {
        if self.own_rings { "aimd-own" } else { "aimd" }
    }

    fn harvests_all(&self) -> bool {
        !self.own_rings
    }

    fn begin(&self, _: &dyn Rings) -> Box<dyn HarvestSchedule> {
        let occupancy = if self.own_rings { Occupancy::Fullest } else { Occupancy::Sum };
        Box::new(Baseline::new(AimdRule::new(*self), occupancy))
    }
}

/// Result of a harvest of all rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reaped {
    /// Number of pages that determine the occupancy.
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

/// Rule that chooses the sleep after a harvest.
trait Rule {
    /// Returns the time to sleep before the first harvest.
    fn first_sleep(&self) -> Duration;

    /// Returns the time to sleep after the harvest `reaped`.
    fn next(&mut self, reaped: Reaped) -> Duration;
}

/// Number of pages that a baseline compares with the size of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Occupancy {
    /// Sum of the pages of all rings, which one lock protects during the harvest.
    Sum,
    /// Entries of the fullest ring before the harvest. A ring that was full since the previous
    /// harvest counts as full.
    Fullest,
}

/// State of a baseline for one period of tracking. It harvests all rings each time the reaper wakes
/// up, and its rule chooses the sleep.
#[derive(Debug)]
struct Baseline<R> {
    rule: R,
    occupancy: Occupancy,
    views: Vec<RingView>,
    /// Indexes of all rings.
    all: Vec<usize>,
    /// Number of full exits of all rings at the previous wake-up.
    full_exits: u64,
}

impl<R: Rule> Baseline<R> {
    fn new(rule: R, occupancy: Occupancy) -> Self {
        Self { rule, occupancy, views: Vec::new(), all: Vec::new(), full_exits: 0 }
    }

    /// Observes the rings, and returns true if a ring was full since the previous call.
    fn went_full(&mut self, rings: &mut dyn Rings) -> bool {
        rings.observe(&mut self.views);
        let full_exits = self.views.iter().map(|view| view.full_exits).sum();
        full_exits != std::mem::replace(&mut self.full_exits, full_exits)
    }

    fn harvest(&mut self, rings: &mut dyn Rings) -> Result<Reaped, TrackerError> {
        let entries = rings.entries();
        match self.occupancy {
            Occupancy::Sum => {
                let pages = rings.harvest_all()?;
                let went_full = self.went_full(rings);
                Ok(Reaped { pages, entries, went_full })
            }
            Occupancy::Fullest => {
                let went_full = self.went_full(rings);
                let fullest = self.views.iter().map(|view| view.used).max().unwrap_or(0);
                let pages = u64::from(if went_full { entries } else { fullest });
                self.all.clear();
                self.all.extend(0..self.views.len());
                rings.harvest(&self.all)?;
                Ok(Reaped { pages, entries, went_full })
            }
        }
    }
}

impl<R: Rule> HarvestSchedule for Baseline<R> {
    fn first_sleep(&self) -> Duration {
        self.rule.first_sleep()
    }

    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
        let reaped = self.harvest(rings)?;
        Ok(self.rule.next(reaped))
    }
}

/// Sleep of the rule `fixed`.
const FIXED: Duration = Duration::from_secs(1);

/// Rule `fixed`: always sleeps for one second.
#[derive(Debug, Default)]
struct Fixed;

impl Rule for Fixed {
    fn first_sleep(&self) -> Duration {
        FIXED
    }

    fn next(&mut self, _: Reaped) -> Duration {
        FIXED
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
    fn first_sleep(&self) -> Duration {
        GEARS[0].sleep
    }

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

/// Rule `aimd`, with the settings of [`Aimd`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AimdRule {
    settings: Aimd,
    sleep: Duration,
    /// Number of harvests in a row with a low occupancy since the sleep last changed.
    low: u32,
}

impl AimdRule {
    fn new(settings: Aimd) -> Self {
        Self { settings, sleep: settings.longest, low: 0 }
    }
}

impl Rule for AimdRule {
    fn first_sleep(&self) -> Duration {
        self.settings.longest
    }

    fn next(&mut self, reaped: Reaped) -> Duration {
        let Aimd { above_percent, up_to_percent, shortest, longest, step, after, .. } = self.settings;
        let (pages, entries) = (u128::from(reaped.pages) * 100, u128::from(reaped.entries));
        self.low = if pages <= entries * u128::from(up_to_percent) { self.low + 1 } else { 0 };
        if pages > entries * u128::from(above_percent) {
            self.sleep /= 2;
        } else if self.low >= after.max(1) {
            (self.sleep, self.low) = (self.sleep + step, 0);
        }
        // `Duration::clamp` would panic if the bounds were in the wrong order.
        self.sleep = self.sleep.max(shortest).min(longest);
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
        assert!(Policy::ALL.iter().all(|policy| error.contains(policy.name())), "{error}");
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
        let mut aimd = AimdRule::new(Aimd::PROPOSED);
        let mut next = |pages| aimd.next(Reaped { pages, entries: 1000, went_full: false }).as_millis();
        assert_eq!([800, 801, 801, 500].map(&mut next), [1000, 500, 250, 250]);
        assert_eq!([201, 200, 0].map(&mut next), [250, 270, 290]);
        assert_eq!([999, 9999, 9999].map(&mut next), [145, 100, 100], "not below 100 ms");
        let last = (0..100).map(|_| next(0)).last();
        assert_eq!(last, Some(1000), "not above a second");
    }

    #[test]
    fn aimd_grows_after_the_given_number_of_low_harvests_in_a_row() {
        let settings = Aimd { after: 3, longest: Duration::from_millis(400), ..Aimd::PROPOSED };
        let mut aimd = AimdRule { sleep: Duration::from_millis(200), ..AimdRule::new(settings) };
        let mut next = |pages| aimd.next(Reaped { pages, entries: 100, went_full: false }).as_millis();
        assert_eq!([0, 0, 0, 0, 0, 0].map(&mut next), [200, 200, 220, 220, 220, 240]);
        assert_eq!([0, 0, 50, 0, 0, 0].map(&mut next), [240, 240, 240, 240, 240, 260], "in a row");
        assert_eq!(aimd.first_sleep().as_millis(), 400);
    }

    /// Rings with a given state, which count how they are harvested.
    #[derive(Default)]
    struct Given {
        views: Vec<RingView>,
        /// Rings of each harvest. Empty for a harvest under the common lock.
        harvests: Vec<Vec<usize>>,
    }

    impl Rings for Given {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn entries(&self) -> u32 {
            100
        }

        fn usable(&self) -> u32 {
            100
        }

        fn observe(&mut self, views: &mut Vec<RingView>) {
            views.clone_from(&self.views);
        }

        fn harvest(&mut self, rings: &[usize]) -> Result<u64, TrackerError> {
            self.harvests.push(rings.to_vec());
            Ok(rings.iter().map(|ring| u64::from(self.views[*ring].used)).sum())
        }

        fn harvest_all(&mut self) -> Result<u64, TrackerError> {
            self.harvests.push(Vec::new());
            Ok(self.views.iter().map(|view| u64::from(view.used)).sum())
        }
    }

    /// Returns the sleep in milliseconds after a harvest of two rings with 45 entries each, and
    /// after a harvest of empty rings of which one was full, with the rings of both harvests.
    fn two_steps(policy: Policy) -> ([u128; 2], Vec<Vec<usize>>) {
        let mut rings = Given { views: vec![RingView::default(); 2], ..Given::default() };
        let mut schedule = policy.begin(&rings);
        rings.views.iter_mut().for_each(|view| view.used = 45);
        let first = schedule.step(&mut rings).unwrap().as_millis();
        rings.views.iter_mut().for_each(|view| view.used = 0);
        rings.views[1].full_exits = 1;
        let second = schedule.step(&mut rings).unwrap().as_millis();
        ([first, second], rings.harvests)
    }

    #[test]
    fn aimd_adds_up_the_rings_and_misses_a_ring_that_its_vcpu_has_emptied() {
        assert!(Policy::Aimd.harvests_all());
        // 90 of 100 entries halve the sleep, and the empty rings add to it.
        assert_eq!(two_steps(Policy::Aimd), ([500, 520], vec![vec![], vec![]]));
    }

    #[test]
    fn aimd_own_looks_at_the_fullest_ring_and_notices_a_full_one() {
        assert!(!Policy::AimdOwn.harvests_all());
        // 45 of 100 entries keep the sleep, and the full ring halves it.
        assert_eq!(two_steps(Policy::AimdOwn), ([1000, 500], vec![vec![0, 1], vec![0, 1]]));
    }
}
