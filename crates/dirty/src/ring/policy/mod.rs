//! When to harvest.

mod aimd;
mod fixed;
mod gears;
mod predict;

use super::core::RingView;
use aimd::Aimd;
use fixed::Fixed;
use gears::Gears;
use predict::Predict;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// When the reaper harvests the rings, and what a vCPU does whose ring is full.
///
/// The published policies come with the surroundings that they were published in: one lock; every ring is harvested when
/// one is full; occupancy is the sum over all vCPUs divided by the size of one ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Every second.
    Fixed,
    /// Six gears from 1000 to 80 ms by how full the rings were: up at once, down after six harvests that wanted it.
    Gears,
    /// Halves the sleep when the rings were full, adds to it when they were not.
    Aimd,
    /// Looks without harvesting, and harvests each ring as late as is safe; a full ring is harvested alone.
    #[default]
    Predict,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fixed, Self::Gears, Self::Aimd, Self::Predict];

    fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Gears => "gears",
            Self::Aimd => "aimd",
            Self::Predict => "predict",
        }
    }

    /// Whether a full ring has all rings harvested, under one lock.
    pub(crate) fn harvests_all(self) -> bool {
        self != Self::Predict
    }

    /// The shortest and the longest that its reaper ever sleeps.
    #[must_use]
    pub fn sleeps(self) -> (Duration, Duration) {
        match self {
            Self::Fixed => (fixed::SLEEP, fixed::SLEEP),
            Self::Gears => (gears::SLEEPS[gears::SLEEPS.len() - 1], gears::SLEEPS[0]),
            Self::Aimd => (aimd::SHORTEST, aimd::LONGEST),
            Self::Predict => (predict::SHORTEST, predict::LONGEST),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no reaper policy; there are fixed, gears, aimd and predict")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let policy = Self::ALL.into_iter().find(|policy| policy.name() == text);
        policy.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// What a published policy sees of a harvest of all rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reaped {
    /// Pages harvested from all rings.
    pub(crate) pages: u64,
    /// Entries of one ring.
    pub(crate) entries: u32,
    /// Whether a vCPU found its ring full since the harvest before.
    pub(crate) went_full: bool,
}

impl Reaped {
    /// Occupancy in whole tenths: 0.29 is 2, and more than one ring's worth is more than 10.
    pub(crate) fn tenths(self) -> u64 {
        self.pages.saturating_mul(10) / u64::from(self.entries)
    }
}

/// The rings, as the reaper's thread and the simulation have them.
pub(crate) trait World {
    type Error;

    /// Time on a clock that only goes forward; the same as [`RingView::emptied_at`].
    fn now(&self) -> Duration;

    /// Entries of one ring, and how many of them a vCPU can fill.
    fn sizes(&self) -> (u32, u32);

    /// Shows each ring, without taking anything.
    fn look(&mut self, views: &mut Vec<RingView>);

    /// Harvests all rings under the one lock; says how many pages that were.
    fn harvest_all(&mut self) -> Result<u64, Self::Error>;

    /// Harvests these.
    fn harvest(&mut self, rings: &[usize]) -> Result<u64, Self::Error>;
}

/// A policy at work.
#[derive(Debug)]
pub(crate) struct Pace {
    kind: Kind,
    views: Vec<RingView>,
    due: Vec<usize>,
    /// Full exits that the last turn had seen.
    full_exits: u64,
}

#[derive(Debug)]
enum Kind {
    Fixed(Fixed),
    Gears(Gears),
    Aimd(Aimd),
    Predict(Predict),
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    /// How long to sleep before the next one.
    pub(crate) sleep: Duration,
    /// Whether it harvested.
    pub(crate) harvested: bool,
}

impl Pace {
    /// The policy, before its first turn, which comes after the sleep that is returned, too.
    pub(crate) fn new(policy: Policy, world: &impl World) -> (Self, Duration) {
        let (entries, _) = world.sizes();
        let (kind, first) = match policy {
            Policy::Fixed => (Kind::Fixed(Fixed), fixed::SLEEP),
            Policy::Gears => (Kind::Gears(Gears::default()), gears::SLEEPS[0]),
            Policy::Aimd => (Kind::Aimd(Aimd::default()), aimd::LONGEST),
            Policy::Predict => (Kind::Predict(Predict::new(entries, world.now())), predict::GUARD),
        };
        (Self { kind, views: Vec::new(), due: Vec::new(), full_exits: 0 }, first)
    }

    /// What the reaper does when it wakes up.
    pub(crate) fn turn<W: World>(&mut self, world: &mut W) -> Result<Turn, W::Error> {
        if let Kind::Predict(predict) = &mut self.kind {
            world.look(&mut self.views);
            let (_, usable) = world.sizes();
            let begin = world.now();
            let sleep = predict.look(begin, usable, &self.views, &mut self.due);
            if !self.due.is_empty() {
                let pages = world.harvest(&self.due)?;
                predict.took(pages, world.now().saturating_sub(begin));
            }
            return Ok(Turn { sleep, harvested: !self.due.is_empty() });
        }
        let pages = world.harvest_all()?;
        world.look(&mut self.views);
        let full_exits = self.views.iter().map(|view| view.full_exits).sum();
        let went_full = full_exits != std::mem::replace(&mut self.full_exits, full_exits);
        let reaped = Reaped { pages, entries: world.sizes().0, went_full };
        let sleep = match &mut self.kind {
            Kind::Fixed(fixed) => fixed.next(reaped),
            Kind::Gears(gears) => gears.next(reaped),
            Kind::Aimd(aimd) => aimd.next(reaped),
            Kind::Predict(_) => unreachable!("returned above"),
        };
        Ok(Turn { sleep, harvested: true })
    }

    /// How many entries of `ring` are expected to be in use at the next turn at most: more are a reason to wake up.
    pub(crate) fn watermark(&self, ring: usize) -> Option<u32> {
        match &self.kind {
            Kind::Predict(predict) => Some(predict.watermark(ring)),
            _ => None,
        }
    }

    /// The entries of `ring` that were in use at the last turn.
    pub(crate) fn used(&self, ring: usize) -> u32 {
        self.views.get(ring).map_or(0, |view| view.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_as_on_the_command_line() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "Fixed".parse::<Policy>().unwrap_err().to_string();
        assert!(error.contains("`Fixed` is no reaper policy; there are fixed, gears"), "{error}");
    }

    #[test]
    fn occupancy_is_counted_in_tenths_of_one_ring() {
        let tenths = |pages| Reaped { pages, entries: 4096, went_full: false }.tenths();
        // A tenth of 4096 is 409.6.
        assert_eq!([0, 409, 410, 819, 820, 4096, 8192].map(tenths), [0, 0, 1, 1, 2, 10, 20]);
    }
}
