//! Simulation of both production sessions and the production run loop against each other, with a
//! simulated clock.
//!
//! Links delay, stall, lose and damage cargo, let one channel overtake another, and have a limited
//! bandwidth. Hosts fail at any step, and operators cancel. A seed determines a run: the same seed
//! gives the same run. The simulation is for tests and for the command `cargo sim`. It is behind
//! the feature `sim`, and in no released program.
//!
//! `source_host` and `target_host` are the hosts of the run loop (`run.rs`) for source and target:
//! they replace the drivers' sockets, threads, memory and VM. The loop itself runs unchanged, with
//! its order of requests, answers, timers and inputs. Requests are levels that stay, timers fire
//! late, and a loop that was woken may run late. Mistakes in how a driver performs an action must
//! be found by tests of the drivers.
//!
//! The following is checked in every run:
//!
//! - The guest never runs on source and target at the same time.
//! - The guest runs on the target only after the commit, and only with the memory that it had.
//! - After the commit, the guest returns to the source only by a message of the target or an answer
//!   of the arbiter.
//! - In postcopy no page arrives twice, no page is older than the guest's writes, and all pages
//!   arrive if no host dies.
//! - In half of the migrations that run passes, pages are sent as deltas. A delta refers to the
//!   version that the target has, unless that page was damaged on the link, and a page that is sent
//!   again is not a delta.
//! - In a handoff inside one host, source and target have the same memory, and it does not change
//!   between the save of the device state and the start of the guest on one of them.
//! - The guest misses no page, except for pages that it reported as free. Guests free pages, use
//!   them again, and report wrong pages.
//! - Reported outcomes are correct.
//! - The run ends.
//!
//! Half of the migrations have an arbiter, which is slow, unreachable, or gets requests late. The
//! arbiter gives the guest to one host, and the other learns of it unless a host dies. Planted
//! defects must be found, so that a simulation without findings has a meaning.

mod arbiter;
mod defect;
mod faults;
#[cfg(any(test, feature = "hostile"))]
mod fuzz;
mod guest;
mod judge;
mod link;
mod rng;
mod source_free;
mod source_host;
mod source_pass;
mod source_postcopy;
mod source_steps;
mod target_host;
mod target_postcopy;
mod versions;
mod world;

/// Source's session and its events, under one name like the target's.
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

use crate::arbiter::Ownership;
use crate::source::Outcome;
use crate::target::session::Outcome as TargetOutcome;
use world::{Defect, Ending, World};

/// Run that broke no promise.
#[derive(Debug)]
pub struct Run(Ending);

impl Run {
    /// Returns the number of steps of the run.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.0.steps
    }

    /// Returns the [`kinds`] of the run, by position.
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

/// Performs the run of this seed.
///
/// # Errors
/// The promise that was broken.
pub fn run(seed: u64) -> Result<Run, String> {
    run_with(seed, Defect::None)
}

/// Performs the run of this seed with one of the [`planted`] defects, if there is one with that
/// name.
///
/// # Errors
/// The promise that was broken.
pub fn run_planted(seed: u64, defect: &str) -> Result<Run, String> {
    let named = |planted: &&Defect| format!("{planted:?}") == defect;
    let defect = Defect::PLANTED.iter().find(named).ok_or_else(|| format!("no defect is named {defect}"))?;
    run_with(seed, *defect)
}

/// Returns the names of the defects that can be planted.
pub fn planted() -> impl Iterator<Item = String> {
    Defect::PLANTED.iter().map(|defect| format!("{defect:?}"))
}

/// Returns the names of the kinds of runs that are counted.
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

/// Kinds of runs that are counted.
const KINDS: [Kind; 39] = [
    ("completed in precopy", |end| end.source == Some(Outcome::Completed) && !end.postcopy),
    ("handed over with its memory", |end| end.local && end.moved()),
    ("not handed over, before the commit", |end| end.local && !end.committed && end.failed()),
    ("not handed over, after the commit", |end| end.local && end.committed && end.failed()),
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
    ("moved with deltas", |end| end.moved() && end.deltas > 0),
    ("moved with deltas, and damaged pages sent again", |end| {
        end.moved() && end.deltas > 0 && end.resent > 0
    }),
    ("moved by precopy without free pages", |end| end.moved() && !end.postcopy && end.skipped > 0),
    ("moved by postcopy without free pages", |end| end.moved() && end.postcopy && end.skipped > 0),
    ("moved early by itself", |end| end.postcopy && end.moved() && end.did("postcopy")),
    ("moved after it slowed the guest by itself", |end| end.moved() && end.did("throttle")),
    ("with advice and nothing else to do", |end| end.did("advice")),
    ("moved after a wait for the guest's free pages", |end| end.moved() && end.answered),
    ("with answers about free pages dropped", |end| end.dropped > 0),
    ("given back by the fence, precopy", |end| {
        !end.postcopy_mode && end.failed() && end.owner == Some(Ownership::Source)
    }),
    ("given back by the fence, postcopy", |end| {
        end.postcopy_mode && end.failed() && end.owner == Some(Ownership::Source)
    }),
    ("known by the fence to have moved", |end| {
        !end.postcopy_mode && end.moved() && end.owner == Some(Ownership::Target { runs: true })
    }),
    ("claimed by a target that died", |end| {
        end.unknown() && end.owner == Some(Ownership::Target { runs: false })
    }),
    ("moved by precopy once its I/O was at rest", |end| end.moved() && !end.postcopy && end.deferrals > 0),
    ("moved by postcopy once its I/O was at rest", |end| end.moved() && end.postcopy && end.deferrals > 0),
    ("moved to a target that had prepared itself", |end| end.moved() && end.prepared),
    ("moved by precopy while its operator had paused it", |end| end.moved() && !end.postcopy && end.paused),
    ("moved by postcopy while its operator had paused it", |end| end.moved() && end.postcopy && end.paused),
    ("moved over a narrow link", |end| end.moved() && end.slow),
    ("moved through a stall", |end| end.moved() && end.stalls > 0),
    ("moved though a stall was taken for a loss", |end| end.moved() && end.outlasted > 0 && end.postcopy),
    ("failed by a stall that was taken for a loss", |end| end.failed() && end.outlasted > 0),
];

impl Ending {
    fn whole(&self) -> bool {
        self.source == Some(Outcome::Completed) && self.postcopy
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
