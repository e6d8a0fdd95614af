//! Both sessions and the run loop, which are the ones that ship, against each other: a fake clock; links that delay, stall, lose, damage, let one channel
//! overtake another and carry only so much; hosts that fail at any step; people who cancel. One number makes one run, and the same
//! number the same run. For tests and for the command `cargo sim`: behind the feature `sim`, nothing that ships has it.
//!
//! `here` and `there` are the hosts of the run loop (`run.rs`): they take the place of the drivers' sockets,
//! threads, memory and VM. The loop itself runs here: the order of requests, answers, timers and inputs, and what follows
//! from each. Requests are levels that stay, timers fire late, and a loop that was woken may run late. Tests of the drivers
//! have to find a mistake in how a driver performs an action.
//!
//! Checked in every run: the guest never runs on both sides; it runs on the target only after the commit and only with
//! the memory that it had; once the target was told to run it, it comes back only by the target's word; of a guest that
//! runs before its memory is there no page comes twice, none is older than what the guest wrote, and if no host dies they
//! all come; no page is missed that the guest has not said to be free, though guests free pages, use them again, and lie;
//! whoever says how it ended is right; it ends. Half of the migrations have a fence, which is slow, out of reach, or heard late: it
//! gives the guest to one side, and unless a host dies the other learns of it. And so that a quiet simulation means something, defects are
//! planted and must be found.

mod defect;
mod faults;
mod fence;
#[cfg(any(test, feature = "hostile"))]
mod fuzz;
mod guest;
mod here;
mod here_free;
mod here_lazy;
mod here_pass;
mod here_steps;
mod judge;
mod link;
mod rng;
mod there;
mod there_lazy;
mod world;

/// The source's session and what it is fed, under one name as the target's are.
mod source {
    pub(super) use crate::source::Outcome;
    #[cfg(any(test, feature = "hostile"))]
    pub(super) use crate::source::{MigrationMode, OnTimeout, Settings, session::Session};
    #[cfg(any(test, feature = "hostile"))]
    pub(super) use vmferry_protocol::source::Pass;
    pub(super) use vmferry_protocol::source::{Action, Event};
}

#[cfg(feature = "hostile")]
pub use fuzz::{drive_source, drive_target};

use crate::fence::Ruling;
use crate::source::Outcome;
use crate::target::session::Outcome as TargetOutcome;
use world::{Defect, Ending, World};

/// A run that kept every promise.
#[derive(Debug)]
pub struct Run(Ending);

impl Run {
    /// How many things happened in it.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.0.steps
    }

    /// Which of [`kinds`] it is of, by position.
    pub fn kinds(&self) -> impl Iterator<Item = usize> + '_ {
        let of = |(at, (_, is)): (usize, &Kind)| is(&self.0).then_some(at);
        KINDS.iter().enumerate().filter_map(of)
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Makes the run of that seed.
///
/// # Errors
/// Which promise was broken.
pub fn run(seed: u64) -> Result<Run, String> {
    run_with(seed, Defect::None)
}

/// Makes the run of that seed with one of [`planted`] in it, if it has one of that name.
///
/// # Errors
/// Which promise was broken.
pub fn run_planted(seed: u64, defect: &str) -> Result<Run, String> {
    let named = |planted: &&Defect| format!("{planted:?}") == defect;
    let defect = Defect::PLANTED.iter().find(named).ok_or_else(|| format!("no defect is named {defect}"))?;
    run_with(seed, *defect)
}

/// The defects that can be planted.
pub fn planted() -> impl Iterator<Item = String> {
    Defect::PLANTED.iter().map(|defect| format!("{defect:?}"))
}

/// What runs are counted by.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|(what, _)| *what)
}

fn run_with(seed: u64, defect: Defect) -> Result<Run, String> {
    let world = || World::new(seed, defect).run().map(Run);
    #[cfg(test)]
    let world = || crate::sync::unscheduled(world);
    world()
}

type Kind = (&'static str, fn(&Ending) -> bool);

/// What is counted.
const KINDS: [Kind; 33] = [
    ("completed in precopy", |end| end.source == Some(Outcome::Completed) && !end.lazy),
    ("completed in postcopy without a break", |end| end.whole() && end.interruptions == 0),
    ("completed in postcopy after one", |end| end.whole() && end.interruptions == 1),
    ("completed in postcopy after several", |end| end.whole() && end.interruptions > 1),
    ("cancelled", |end| matches!(end.source, Some(Outcome::Cancelled(_)))),
    ("failed before the commit", |end| !end.committed && end.failed()),
    ("given back after it", |end| end.committed && end.failed() && end.interruptions == 0),
    ("given back over a new link", |end| end.committed && end.failed() && end.interruptions > 0),
    ("unknown, and moved", |end| end.unknown() && end.target == Some(TargetOutcome::Completed)),
    ("unknown, and not", |end| end.unknown() && end.target != Some(TargetOutcome::Completed)),
    ("lost", |end| matches!(end.source, Some(Outcome::Lost(_)))),
    ("source died, guest whole", |end| end.source.is_none() && end.target == Some(TargetOutcome::Completed)),
    ("guest dead with its hosts", |end| end.crashed && end.committed && end.target.is_none()),
    ("with damaged pages sent again", |end| end.resent > 0),
    ("moved by precopy without free pages", |end| end.moved() && !end.lazy && end.skipped > 0),
    ("moved by postcopy without free pages", |end| end.moved() && end.lazy && end.skipped > 0),
    ("moved early by itself", |end| end.lazy && end.moved() && end.did("postcopy")),
    ("moved after it slowed the guest by itself", |end| end.moved() && end.did("throttle")),
    ("with advice and nothing else to do", |end| end.did("advice")),
    ("with answers about free pages dropped", |end| end.dropped > 0),
    ("given back by the fence, precopy", |end| {
        !end.lazy_mode && end.failed() && end.ruling == Some(Ruling::Source)
    }),
    ("given back by the fence, postcopy", |end| {
        end.lazy_mode && end.failed() && end.ruling == Some(Ruling::Source)
    }),
    ("known by the fence to have moved", |end| {
        !end.lazy_mode && end.moved() && end.ruling == Some(Ruling::Target { runs: true })
    }),
    ("claimed by a target that died", |end| {
        end.unknown() && end.ruling == Some(Ruling::Target { runs: false })
    }),
    ("moved by precopy once its I/O was at rest", |end| end.moved() && !end.lazy && end.put_off > 0),
    ("moved by postcopy once its I/O was at rest", |end| end.moved() && end.lazy && end.put_off > 0),
    ("moved to a target that had prepared itself", |end| end.moved() && end.prepared),
    ("moved by precopy while its operator had paused it", |end| end.moved() && !end.lazy && end.paused),
    ("moved by postcopy while its operator had paused it", |end| end.moved() && end.lazy && end.paused),
    ("moved over a narrow link", |end| end.moved() && end.slow),
    ("moved through a stall", |end| end.moved() && end.stalls > 0),
    ("moved though a stall was taken for a loss", |end| end.moved() && end.outlasted > 0 && end.lazy),
    ("failed by a stall that was taken for a loss", |end| end.failed() && end.outlasted > 0),
];

impl Ending {
    fn whole(&self) -> bool {
        self.source == Some(Outcome::Completed) && self.lazy
    }

    fn did(&self, what: &str) -> bool {
        self.course.iter().any(|change| change == what)
    }

    fn moved(&self) -> bool {
        self.source == Some(Outcome::Completed)
    }

    fn failed(&self) -> bool {
        matches!(self.source, Some(Outcome::Failed(_)))
    }

    fn unknown(&self) -> bool {
        matches!(self.source, Some(Outcome::Unknown(_)))
    }
}

#[cfg(test)]
mod tests;
