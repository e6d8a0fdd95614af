//! `vmferry-bench free-page`: time to learn a guest's free pages, and its benefit for a migration.
//!
//! The bench has these groups, and runs the sides of each in turn:
//! - `learn`: the host learns the free pages of an idle guest of 8 GiB that has touched little
//!   memory, by inflating a balloon, by hints on demand, or by a map that the guest keeps.
//! - `drop`: a guest gives touched memory back, by page size and by the way in which the host drops
//!   it.
//! - `move`: a guest migrates after it has touched and freed most of its memory. The host's page
//!   tables then do not show which memory is in use.
//! - `low`: a guest allocates most of its memory while a part of it is in the balloon, is kept back
//!   for a question of the host, or is being reported.
//! - `wait-1gbit`, `wait-10gbit`, `wait-loopback`: the same guest names its free pages on demand,
//!   and the source waits for the answer before it sends the first page.

mod figures;
mod goals;
mod report;
mod spec;

use std::fmt::Display;

use vmferry_report::json::Document;

use crate::cases;
use crate::host;
use crate::link::{Link, Tools};
use crate::qemu;
use crate::rounds::{Rounds, SideRuns, Stop, enough_memory, room_for};

pub use crate::rounds::{OurError, Outcome};
pub use figures::{Given, Inflation, Learned, LowMemory, Moved};
pub use spec::{
    AnswerWait, Claim, Drop, FreePageSource, Give, InflateBy, Learn, LearnSpec, LowSpec, Move, MoveSpec,
    Options, WaitLink, Way,
};
pub use vmferry_report::benches::free_page::{page, table};

/// Runner of vmferry's own sides. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Returns the frequency of the guest's time stamp counter in kHz, which a guest cannot measure
    /// on every machine.
    fn tsc_khz(&mut self) -> Option<u32>;

    /// Boots an idle guest with one vCPU, and learns its free pages.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the side, which skips it. Every
    /// other error is a failure.
    fn learn(&mut self, spec: &LearnSpec, way: Way) -> Result<Learned, OurError>;

    /// Boots a guest that touches and frees `touched` bytes, and makes it give them back by ranges.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`learn`](Self::learn).
    fn give(&mut self, touched: u64, how: Drop) -> Result<Given, OurError>;

    /// Boots the guest of `spec` and migrates it after it has freed what it allocated.
    ///
    /// The migration goes to another process over loopback with one channel. The guest must find
    /// its memory unchanged.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`learn`](Self::learn).
    fn migrate(&mut self, spec: &MoveSpec, source: FreePageSource) -> Result<Moved, OurError>;

    /// Boots the guest of `spec` with one vCPU, and runs its rounds under `claim`. The guest must
    /// find its memory unchanged.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`learn`](Self::learn).
    fn low(&mut self, spec: &LowSpec, claim: Claim) -> Result<LowMemory, OurError>;

    /// Does the same as [`migrate`](Self::migrate) over `link`, with a guest that names its free
    /// pages on demand, and a source that waits for the answer before it sends the first page.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`migrate`](Self::migrate).
    fn migrate_after(&mut self, spec: &MoveSpec, wait: AnswerWait, link: &Link) -> Result<Moved, OurError>;
}

/// Runs the bench. Calls `progress` with the name of each run that begins.
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
            Move::Ours(source) => Ok(ours.migrate(spec, source)?),
            Move::Qemu { hints } => Ok(qemu::move_freed(spec, hints, tsc_khz)?),
        }
    });
    let params = [("memory_bytes", spec.memory.into()), ("workload", spec.workload().into())];
    cases::add(&mut document, ("move", &params), &sides, Moved::figures);
    for link in &options.wait_links {
        wait_on(*link, &mut document, &mut rounds, options, ours);
    }

    let spec = &options.low;
    let sides = in_turn(&mut rounds, options, "low", &options.claims, |claim| {
        room_for(spec.memory)?;
        Ok(ours.low(spec, claim)?)
    });
    let params = [("memory_bytes", spec.memory.into()), ("workload", spec.workload().into())];
    cases::add(&mut document, ("low", &params), &sides, LowMemory::figures);

    let failures = rounds.failures;
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

/// Runs the group of migrations over one link whose source waits for the guest's answer.
fn wait_on(
    WaitLink { group, shape }: WaitLink,
    document: &mut Document,
    rounds: &mut Rounds<'_>,
    options: &Options,
    ours: &mut dyn OurRunner,
) {
    if !options.waits.iter().any(|wait| options.wants(&format!("{group}/{wait}"))) {
        return;
    }
    let spec = &options.moved;
    let link = Link::of(&Tools::here(), shape);
    let sides = in_turn(rounds, options, group, &options.waits, |wait| {
        enough_memory(spec.memory)?;
        let link = link.as_ref().map_err(|why| Stop::Skip(why.clone()))?;
        Ok(ours.migrate_after(spec, wait, link)?)
    });
    let params = [
        ("memory_bytes", spec.memory.into()),
        ("workload", spec.workload().into()),
        ("link_gbps", shape.map(|shape| crate::reaper::to_f64(shape.bits_per_s) / 1e9).into()),
    ];
    cases::add(document, (group, &params), &sides, Moved::figures);
}

/// Runs all selected sides of a group in turn.
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

#[cfg(test)]
mod tests;
