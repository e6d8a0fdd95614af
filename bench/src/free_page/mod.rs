//! `vmferry-bench free-page`: how long it takes to know a guest's free pages, and what that saves when the guest moves.
//!
//! Three questions, each to all its sides in turn: an idle guest of 8 GiB, hardly touched, whose free pages the host is to know, by
//! inflating a balloon, by hints on demand, by a map that the guest keeps; memory that was touched and is given back, by what it is
//! made of and by how it goes; and whole migrations of a guest that has touched and freed most of its memory, so that the host
//! cannot tell from its own page tables what is in use.

mod figures;
mod goals;
mod report;
mod spec;

use std::fmt::Display;

use vmferry_report::json::Document;

use crate::cases;
use crate::host::{self, available_memory};
use crate::qemu;
use crate::rounds::{MEMORY_RESERVE, Rounds, SideRuns, Stop, enough_memory};

pub use crate::rounds::{OurError, Outcome};
pub use figures::{Given, Inflation, Learned, Moved};
pub use spec::{Asking, Drop, Give, InflateBy, Learn, LearnSpec, Move, MoveSpec, Options, Way};
pub use vmferry_report::benches::free_page::{page, table};

/// Runs vmferry's own sides: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Ticks of the processors' clock in a millisecond, which a guest cannot measure on every machine.
    fn tsc_khz(&mut self) -> Option<u32>;

    /// Boots an idle guest of one vCPU and comes to know its free pages.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the side; everything else is a failure.
    fn learn(&mut self, spec: &LearnSpec, way: Way) -> Result<Learned, OurError>;

    /// Boots a guest that touches and frees `touched` bytes, and has it give them back by ranges.
    ///
    /// # Errors
    /// As [`learn`](Self::learn).
    fn give(&mut self, touched: u64, how: Drop) -> Result<Given, OurError>;

    /// Boots the guest of `spec`, waits until it has freed what it allocated, and moves it once over loopback with one channel to
    /// another process, where it must find its memory as it left it.
    ///
    /// # Errors
    /// As [`learn`](Self::learn).
    fn migrate(&mut self, spec: &MoveSpec, asking: Asking) -> Result<Moved, OurError>;
}

/// Runs the bench. `progress` is told what begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("free-page", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);

    let spec = &options.learn;
    let tsc_khz = ours.tsc_khz();
    let sides = in_turn(&mut rounds, options, "learn", &options.ways, |side| match side {
        Learn::Ours(way) => Ok(ours.learn(spec, way)?),
        Learn::Qemu(pages) => Ok(qemu::inflate(spec.memory, spec.inflate, pages, tsc_khz)?),
    });
    let params = [("memory_bytes", spec.memory.into()), ("inflate_bytes", spec.inflate.into())];
    cases::add(&mut document, ("learn", &params), &sides, Learned::figures);

    let sides = in_turn(&mut rounds, options, "drop", &options.drops, |side| {
        room_for(options.touched)?;
        Ok(ours.give(options.touched, side)?)
    });
    cases::add(&mut document, ("drop", &[("bytes", options.touched.into())]), &sides, Given::figures);

    let spec = &options.moved;
    let sides = in_turn(&mut rounds, options, "move", &options.moves, |side| {
        enough_memory(spec.memory)?;
        match side {
            Move::Ours(asking) => Ok(ours.migrate(spec, asking)?),
            Move::Qemu { hints } => Ok(qemu::move_freed(spec, hints, tsc_khz)?),
        }
    });
    let params = [("memory_bytes", spec.memory.into()), ("workload", spec.workload().into())];
    cases::add(&mut document, ("move", &params), &sides, Moved::figures);

    let failures = rounds.failures;
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

/// All wanted sides of a group, in turn.
fn in_turn<S: Copy + Display, R>(
    rounds: &mut Rounds<'_>,
    options: &Options,
    group: &str,
    sides: &[S],
    mut once: impl FnMut(S) -> Result<R, Stop>,
) -> Vec<SideRuns<S, R>> {
    let name = |side: S| format!("{group}/{side}");
    let wanted = sides.iter().copied().filter(|side| options.wants(&name(*side)));
    rounds.run(wanted, name, |side, _| once(side))
}

/// Whether this host can hold so many bytes once.
fn room_for(bytes: u64) -> Result<(), Stop> {
    let needed = bytes.saturating_add(MEMORY_RESERVE);
    match available_memory().filter(|available| *available < needed) {
        None => Ok(()),
        Some(available) => Err(Stop::Skip(format!(
            "needs {} MiB of memory, {} MiB are available",
            needed >> 20,
            available >> 20
        ))),
    }
}

#[cfg(test)]
mod tests;
