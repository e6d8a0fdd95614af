//! Loop of every comparison: all sides in turn, round by round.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmferry_report::json::Document;

use crate::floor::FloorError;
use crate::host::{available_memory, total_memory};
use crate::qemu::QemuError;

/// Memory in bytes that must stay free besides the guests.
pub(crate) const MEMORY_RESERVE: u64 = 512 << 20;

/// Time in which the kernel frees the memory of guests that have ended.
const FREED_WITHIN: Duration = Duration::from_secs(20);

/// True if the operator has asked for the end of the comparisons of this process. The flag orders
/// no other memory.
static ENDS: AtomicBool = AtomicBool::new(false);

/// Lets all comparisons of this process end after the run that is under way. They keep the results
/// of earlier runs.
pub(crate) fn end() {
    ENDS.store(true, Ordering::Relaxed);
}

/// Returns whether [`end`] was called.
pub(crate) fn ends() -> bool {
    ENDS.load(Ordering::Relaxed)
}

/// Result of a bench.
#[derive(Debug)]
pub struct Outcome {
    /// Document with the results, including the failures.
    pub document: Document,
    /// Runs that failed, in contrast to sides that were skipped. A command with failures exits with
    /// 1.
    pub failures: Vec<String>,
}

/// Reason why the runner of vmferry's side returned no result.
#[derive(Debug, thiserror::Error)]
pub enum OurError {
    /// The side cannot run on this host, with the reason.
    #[error("{0}")]
    Unavailable(String),
    /// The side ran and failed.
    #[error(transparent)]
    Failed(#[from] Box<dyn Error + Send + Sync>),
}

/// Reason why a side has no result in a round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The side cannot run on this host. It is skipped in later rounds too.
    Skip(String),
    /// The side failed in this round.
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

/// Returns the order in which `sides` sides run in a round.
///
/// Each round starts with another side. Otherwise a side would always find the state that the same
/// other side left behind.
pub(crate) fn turns(sides: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..sides).map(move |turn| (turn + round) % sides)
}

/// Runs of one side in one case.
#[derive(Debug)]
pub(crate) struct SideRuns<S, R> {
    pub(crate) side: S,
    /// Result of each round. `None` if the side failed.
    pub(crate) rounds: Vec<Option<R>>,
    pub(crate) skipped: Option<String>,
}

/// Runner of sides in turn, which collects the failures.
pub(crate) struct Rounds<'a> {
    /// Number of rounds.
    pub(crate) repeats: usize,
    /// Function that is called with the name of each run that begins.
    pub(crate) progress: &'a mut dyn FnMut(&str),
    /// Failed runs, each with its round and reason.
    pub(crate) failures: Vec<String>,
    /// True if no further run begins.
    ends: &'a AtomicBool,
}

impl<'a> Rounds<'a> {
    pub(crate) fn new(repeats: usize, progress: &'a mut dyn FnMut(&str)) -> Self {
        Self { repeats, progress, failures: Vec::new(), ends: &ENDS }
    }

    /// Runs each of `sides` once per round by `once`, which also gets the results of all sides so
    /// far. `name` returns the name of a side for messages, including its case.
    pub(crate) fn run<S: Copy, R>(
        &mut self,
        sides: impl IntoIterator<Item = S>,
        name: impl Fn(S) -> String,
        once: impl FnMut(S, &[SideRuns<S, R>]) -> Result<R, Stop>,
    ) -> Vec<SideRuns<S, R>> {
        self.run_at_most(sides, |_| usize::MAX, name, once)
    }

    /// Does the same as `run`, but a side runs only in its first `most` rounds, because a long run
    /// needs fewer.
    ///
    /// After [`end`], no run begins, and a side without a result is skipped. The run that was under
    /// way counts only if it succeeded, because the signal may have ended its processes, too.
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
                let ended = self.ends.load(Ordering::Relaxed);
                if ended || sides[turn].skipped.is_some() || round >= repeats {
                    continue;
                }
                let name = name(side);
                (self.progress)(&format!("{name}, round {} of {repeats}", round + 1));
                let result = once(side, &sides);
                let runs = &mut sides[turn];
                match result {
                    Ok(result) => runs.rounds.push(Some(result)),
                    Err(Stop::Skip(why)) => runs.skipped = Some(why),
                    Err(Stop::Fail(_)) if self.ends.load(Ordering::Relaxed) => {}
                    Err(Stop::Fail(why)) => {
                        runs.rounds.push(None);
                        self.failures.push(format!("{name}, round {}: {why}", round + 1));
                    }
                }
            }
        }
        for runs in sides.iter_mut().filter(|runs| runs.rounds.is_empty()) {
            runs.skipped.get_or_insert_with(|| "the bench was ended before a run of it".to_owned());
        }
        sides
    }
}

/// Checks that this host can hold a guest of `guest` bytes at both ends.
pub(crate) fn enough_memory(guest: u64) -> Result<(), Stop> {
    room_for(guest.saturating_mul(2))
}

/// Checks that this host has `bytes` of free memory, and the reserve. A host that swaps or kills
/// processes measures nothing useful.
///
/// The kernel needs seconds to free the memory of a large guest that has ended, so the check waits
/// for it.
pub(crate) fn room_for(bytes: u64) -> Result<(), Stop> {
    let until = Instant::now() + FREED_WITHIN;
    let fits = room(bytes, total_memory()).is_ok();
    loop {
        let result = room(bytes, available_memory());
        if result.is_ok() || !fits || Instant::now() >= until {
            return result;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn room(bytes: u64, available: Option<u64>) -> Result<(), Stop> {
    let needed = bytes.saturating_add(MEMORY_RESERVE);
    match available.filter(|available| *available < needed) {
        None => Ok(()),
        Some(available) => Err(Stop::Skip(format!(
            "needs {} MiB of memory, {} MiB are available",
            needed >> 20,
            available >> 20
        ))),
    }
}

/// Returns an error and its causes in one line.
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
    fn host_without_enough_memory_skips() {
        assert!(matches!(room(8 << 30, Some(8 << 30)), Err(Stop::Skip(_))));
        assert_eq!(room(8 << 30, Some(9 << 30)), Ok(()));
        assert_eq!(room(8 << 30, None), Ok(()));
    }

    #[test]
    fn unavailable_side_runs_once_and_failing_side_runs_again() {
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
        // Each round begins with another side.
        assert_eq!(told.len(), 5);
        assert_eq!(told[3], "case/1, round 2 of 2");
    }

    #[test]
    fn ended_comparison_keeps_its_results() {
        let ends = AtomicBool::new(false);
        let mut progress = |_: &str| {};
        let mut rounds = Rounds { ends: &ends, ..Rounds::new(3, &mut progress) };
        // The operator ends the bench while the second side runs, which fails for that.
        let sides = rounds.run(
            0..3,
            |side| side.to_string(),
            |side, _: &[SideRuns<_, u32>]| {
                ends.store(side == 1, Ordering::Relaxed);
                if side == 1 { Err(Stop::Fail("it was ended".into())) } else { Ok(side) }
            },
        );
        assert_eq!(rounds.failures, Vec::<String>::new());
        assert_eq!((&sides[0].rounds, &sides[0].skipped), (&vec![Some(0)], &None));
        for side in &sides[1..] {
            assert!(side.rounds.is_empty() && side.skipped.as_deref().unwrap().contains("ended"));
        }
    }

    #[test]
    fn side_runs_at_most_its_own_number_of_rounds() {
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
    fn every_side_runs_in_every_round() {
        assert_eq!(turns(3, 0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(turns(3, 4).collect::<Vec<_>>(), [1, 2, 0]);
        assert_eq!(turns(0, 4).count(), 0);
    }
}
