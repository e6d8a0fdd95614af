//! The loop of every comparison: all sides, in turn, round by round.

use std::error::Error;

use vmferry_report::json::Document;

use crate::floor::FloorError;
use crate::host::available_memory;
use crate::qemu::QemuError;

/// Memory that must stay free beside the guests, in bytes.
pub(crate) const MEMORY_RESERVE: u64 = 512 << 20;

/// What a bench came to.
#[derive(Debug)]
pub struct Outcome {
    /// The document of contracts, failures included.
    pub document: Document,
    /// Runs that failed, as opposed to sides that were skipped. A command that gets any exits with 1.
    pub failures: Vec<String>,
}

/// Why whoever has the VMM gave no result for our side.
#[derive(Debug, thiserror::Error)]
pub enum OurError {
    /// It cannot run on this host, and why.
    #[error("{0}")]
    Unavailable(String),
    /// It ran and failed.
    #[error(transparent)]
    Failed(#[from] Box<dyn Error + Send + Sync>),
}

/// Why a side gave no result in a round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It cannot run here: it is left out of the further rounds too.
    Skip(String),
    /// It failed this time.
    Fail(String),
}

impl From<OurError> for Stop {
    fn from(error: OurError) -> Self {
        match error {
            OurError::Unavailable(why) => Self::Skip(why),
            OurError::Failed(_) => Self::Fail(with_sources(&error)),
        }
    }
}

impl From<QemuError> for Stop {
    fn from(error: QemuError) -> Self {
        match error {
            QemuError::Unavailable(why) => Self::Skip(why),
            error => Self::Fail(with_sources(&error)),
        }
    }
}

impl From<FloorError> for Stop {
    fn from(error: FloorError) -> Self {
        Self::Fail(with_sources(&error))
    }
}

/// The order in which `sides` sides run in a round: each round starts with another side, so that none
/// always runs into the state that the same other side left behind.
pub(crate) fn turns(sides: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..sides).map(move |turn| (turn + round) % sides)
}

/// Everything that one side did in one case.
#[derive(Debug)]
pub(crate) struct SideRuns<S, R> {
    pub(crate) side: S,
    /// A round in which the side failed has None.
    pub(crate) rounds: Vec<Option<R>>,
    pub(crate) skipped: Option<String>,
}

/// Runs sides in turn, and keeps what failed.
pub(crate) struct Rounds<'a> {
    /// How many.
    pub(crate) repeats: usize,
    /// Is told what begins.
    pub(crate) progress: &'a mut dyn FnMut(&str),
    /// Runs that failed: in which round, and why.
    pub(crate) failures: Vec<String>,
}

impl<'a> Rounds<'a> {
    pub(crate) fn new(repeats: usize, progress: &'a mut dyn FnMut(&str)) -> Self {
        Self { repeats, progress, failures: Vec::new() }
    }

    /// Runs each of `sides` once a round by `once`, which also sees what all sides came to so far. `name` is what people
    /// read of a side, its case included.
    pub(crate) fn run<S: Copy, R>(
        &mut self,
        sides: impl IntoIterator<Item = S>,
        name: impl Fn(S) -> String,
        once: impl FnMut(S, &[SideRuns<S, R>]) -> Result<R, Stop>,
    ) -> Vec<SideRuns<S, R>> {
        self.run_at_most(sides, |_| usize::MAX, name, once)
    }

    /// Likewise, but a side has a turn only in its first `most` rounds: what takes long needs fewer.
    pub(crate) fn run_at_most<S: Copy, R>(
        &mut self,
        sides: impl IntoIterator<Item = S>,
        most: impl Fn(S) -> usize,
        name: impl Fn(S) -> String,
        mut once: impl FnMut(S, &[SideRuns<S, R>]) -> Result<R, Stop>,
    ) -> Vec<SideRuns<S, R>> {
        let runs = |side| SideRuns { side, rounds: Vec::new(), skipped: None };
        let mut sides: Vec<_> = sides.into_iter().map(runs).collect();
        for round in 0..self.repeats {
            for turn in turns(sides.len(), round) {
                let side = sides[turn].side;
                let repeats = self.repeats.min(most(side));
                if sides[turn].skipped.is_some() || round >= repeats {
                    continue;
                }
                let name = name(side);
                (self.progress)(&format!("{name}, round {} of {repeats}", round + 1));
                let result = once(side, &sides);
                let runs = &mut sides[turn];
                match result {
                    Ok(result) => runs.rounds.push(Some(result)),
                    Err(Stop::Skip(why)) => runs.skipped = Some(why),
                    Err(Stop::Fail(why)) => {
                        runs.rounds.push(None);
                        self.failures.push(format!("{name}, round {}: {why}", round + 1));
                    }
                }
            }
        }
        sides
    }
}

/// Whether this host can hold a guest of so many bytes at both ends. One that would swap or kill measures nothing.
pub(crate) fn enough_memory(guest: u64) -> Result<(), Stop> {
    enough(guest, available_memory())
}

fn enough(guest: u64, available: Option<u64>) -> Result<(), Stop> {
    let needed = guest.saturating_mul(2).saturating_add(MEMORY_RESERVE);
    match available.filter(|available| *available < needed) {
        None => Ok(()),
        Some(available) => Err(Stop::Skip(format!(
            "needs {} MiB of memory, {} MiB are available",
            needed >> 20,
            available >> 20
        ))),
    }
}

/// An error with what caused it, in one line.
fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Many messages already end with their cause.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_memory_skips() {
        assert!(matches!(enough(4 << 30, Some(8 << 30)), Err(Stop::Skip(_))));
        assert_eq!(enough(4 << 30, Some(9 << 30)), Ok(()));
        assert_eq!(enough(4 << 30, None), Ok(()));
    }

    #[test]
    fn a_side_that_cannot_run_is_asked_once_and_one_that_fails_again() {
        let mut told = Vec::new();
        let mut progress = |what: &str| told.push(what.to_owned());
        let mut rounds = Rounds::new(2, &mut progress);
        let sides = rounds.run(
            0..3,
            |side| format!("case/{side}"),
            |side, so_far: &[SideRuns<_, usize>]| match side {
                0 => Err(Stop::Skip("absent".into())),
                1 => Err(Stop::Fail("broken".into())),
                _ => Ok(so_far[2].rounds.len()),
            },
        );
        assert_eq!(rounds.failures, ["case/1, round 1: broken", "case/1, round 2: broken"]);
        assert_eq!(sides[0].skipped.as_deref(), Some("absent"));
        assert_eq!((&sides[1].rounds, &sides[2].rounds), (&vec![None, None], &vec![Some(0), Some(1)]));
        // Another side begins each round.
        assert_eq!(told.len(), 5);
        assert_eq!(told[3], "case/1, round 2 of 2");
    }

    #[test]
    fn a_side_has_no_more_turns_than_it_needs() {
        let mut told = Vec::new();
        let mut progress = |what: &str| told.push(what.to_owned());
        let mut rounds = Rounds::new(3, &mut progress);
        let most = |side| if side == 0 { 2 } else { usize::MAX };
        let sides =
            rounds.run_at_most(0..2, most, |side| side.to_string(), |_, _: &[SideRuns<_, ()>]| Ok(()));
        assert_eq!(sides.iter().map(|runs| runs.rounds.len()).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(
            told,
            ["0, round 1 of 2", "1, round 1 of 3", "1, round 2 of 3", "0, round 2 of 2", "1, round 3 of 3"]
        );
    }

    #[test]
    fn every_side_has_its_turn_in_every_round() {
        assert_eq!(turns(3, 0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(turns(3, 4).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(turns(0, 4).count(), 0);
    }
}
