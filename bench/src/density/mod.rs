//! `vmferry-bench density`: how many guests fit a host whose guests give back what they free, and what that costs them.
//!
//! The published test: guests that allocate, touch and free most of their memory, one after another, and stay, under a limit that
//! holds three of them at their largest. And single guests, for what each leaves behind and how its allocator's speed and tail
//! suffer: without reports, synchronous, asynchronous, by hypercall; in one go, fragmented, again and again.

mod budget;
mod figures;
mod goals;
mod report;
mod spec;

use std::fmt::Display;
use std::time::{Duration, Instant};

use vmferry_report::json::Document;

use crate::cases;
use crate::host::{self, available_memory};
use crate::rounds::{MEMORY_RESERVE, Rounds, SideRuns, Stop};
use crate::warm::Warm;
use figures::{Filled, Single};
use spec::MOST_GUESTS;

pub use crate::rounds::{OurError, Outcome};
pub use budget::{Budget, NoBudget};
pub use figures::Told;
pub use spec::{Fleet, GuestSpec, One, Options, Pattern, ReportMode, Scale};
pub use vmferry_report::benches::density::{page, table};

/// Between two looks at a guest: seldom enough to cost it nothing.
const POLL: Duration = Duration::from_millis(20);
/// How long a guest that has freed everything may take to give it back before what is left counts as left.
const SETTLE: Duration = Duration::from_secs(1);

/// Runs guests: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Starts the guest of `spec` in a process of its own, within `budget` if there is one.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the side; everything else is a failure. With a budget, a guest
    /// that is killed before it could be asked anything is [`Started::Killed`].
    fn start(&mut self, spec: &GuestSpec, budget: Option<&Budget>) -> Result<Started, OurError>;
}

/// What became of a guest that was to start.
#[derive(Debug)]
pub enum Started {
    /// It runs.
    Runs(Box<dyn Guest>),
    /// The kernel killed it.
    Killed,
}

/// A running guest, which ends when it is dropped.
pub trait Guest: std::fmt::Debug {
    /// Whether its process has been killed.
    ///
    /// # Errors
    /// If it ended in any other way.
    fn killed(&mut self) -> Result<bool, OurError>;

    /// What it says of itself. None: nothing yet.
    ///
    /// # Errors
    /// If it cannot be asked.
    fn told(&mut self) -> Result<Option<Told>, OurError>;

    /// Resident memory of its process, in bytes.
    ///
    /// # Errors
    /// If the kernel does not say.
    fn resident(&mut self) -> Result<u64, OurError>;
}

/// Runs the bench. `progress` is told what begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("density", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);

    let mut base = None;
    let sides = in_turn(&mut rounds, options, "one", &options.ones, usize::MAX, |one| {
        let spec = options.single(one);
        room_for(spec.memory)?;
        let base = match base {
            Some(base) => base,
            None => *base.insert(self::base(&spec, options.limit, ours)?),
        };
        single(&spec, options.limit, base, ours)
    });
    let params = [("memory_bytes", options.one.0.into()), ("alloc_bytes", options.one.1.into())];
    cases::add(&mut document, ("one", &params), &sides, Single::figures);
    report::add_slowdown(&mut document, &sides);

    let scale = options.scale;
    let sides = in_turn(&mut rounds, options, "fleet", &options.fleets, 1, |fleet| {
        room_for(scale.budget)?;
        fill(&options.of_fleet(fleet), scale.budget, options.limit, ours)
    });
    let params = [
        ("budget_bytes", scale.budget.into()),
        ("memory_bytes", scale.guest.into()),
        ("alloc_bytes", scale.alloc.into()),
    ];
    cases::add(&mut document, ("fleet", &params), &sides, Filled::figures);

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
    most: usize,
    mut once: impl FnMut(S) -> Result<R, Stop>,
) -> Vec<SideRuns<S, R>> {
    let name = |side: S| format!("{group}/{side}");
    let wanted = sides.iter().copied().filter(|side| options.wants(&name(*side)));
    rounds.run_at_most(wanted, |_| most, name, |side, _| once(side))
}

/// Whether this host can hold so many bytes.
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

/// Resident bytes and used pages of a guest that allocates nothing worth mentioning.
fn base(spec: &GuestSpec, limit: Duration, ours: &mut dyn OurRunner) -> Result<(u64, u64), Stop> {
    let spec = GuestSpec { alloc: 4096 * u64::from(spec.vcpus), rounds: 1, frag: 0, ..*spec };
    let base = single(&spec, limit, (0, 0), ours)?;
    Ok((base.resident, base.told.used_pages))
}

/// A guest on its own, until it has given back what it freed.
fn single(
    spec: &GuestSpec,
    limit: Duration,
    base: (u64, u64),
    ours: &mut dyn OurRunner,
) -> Result<Single, Stop> {
    drop(Warm::hold(spec.alloc));
    let Started::Runs(mut guest) = ours.start(spec, None)? else { return Err(killed()) };
    let told = loop_until(limit, || {
        if guest.killed()? { Err(killed()) } else { Ok(guest.told()?.filter(|told| told.done)) }
    })?;
    let mut told = told.ok_or_else(|| late(limit))?;
    let until = Instant::now() + SETTLE;
    // Without reports it is over now; two looks more, as for all others.
    for look in 0.. {
        std::thread::sleep(POLL);
        told = guest.told()?.unwrap_or(told);
        let settled = spec.report.mode == ReportMode::Off || told.unreported_pages == 0;
        if look > 0 && settled || Instant::now() > until {
            break;
        }
    }
    if told.corrupt > 0 {
        return Err(Stop::Fail(format!("the guest found {} damaged pages", told.corrupt)));
    }
    Ok(Single { told, resident: guest.resident()?, base })
}

/// Guests one after another, until one of them is killed.
fn fill(spec: &GuestSpec, bytes: u64, limit: Duration, ours: &mut dyn OurRunner) -> Result<Filled, Stop> {
    let budget = Budget::new(bytes).map_err(|why| Stop::Skip(why.to_string()))?;
    let start = Instant::now();
    // Dropped before the budget, as they end first.
    let mut guests: Vec<Box<dyn Guest>> = Vec::new();
    let mut filled = Filled::default();
    let fails = |error: std::io::Error| Stop::Fail(format!("the cgroup: {error}"));
    while filled.guests < MOST_GUESTS {
        match ours.start(spec, Some(&budget))? {
            Started::Runs(guest) => guests.push(guest),
            Started::Killed => filled.killed = true,
        }
        if filled.killed || !finishes(&mut guests, spec, limit)? {
            // Whoever ended must have been killed for this, and for nothing else.
            if budget.kills().map_err(fails)? == 0 {
                return Err(Stop::Fail("a guest was killed, but not for the cgroup's limit".into()));
            }
            filled.killed = true;
            break;
        }
        filled.guests += 1;
        filled.used = budget.used().map_err(fails)?;
        filled.took = start.elapsed();
    }
    drop(guests);
    Ok(filled)
}

/// Waits until the last of `guests` has done all it was to do and given back what it can. `false`: one of them was killed.
fn finishes(guests: &mut [Box<dyn Guest>], spec: &GuestSpec, limit: Duration) -> Result<bool, Stop> {
    let mut done_at = None;
    let end = loop_until(limit, || {
        for guest in &mut *guests {
            if guest.killed()? {
                return Ok(Some(false));
            }
        }
        room_for(0)?;
        let Some(last) = guests.last_mut() else { return Ok(Some(false)) };
        let Ok(Some(told)) = last.told() else {
            // It is just being killed, or does not talk yet.
            return Ok(None);
        };
        if !told.done {
            return Ok(None);
        }
        let since: Instant = *done_at.get_or_insert_with(Instant::now);
        let settled = spec.report.mode == ReportMode::Off || told.unreported_pages == 0;
        Ok((settled || since.elapsed() > SETTLE).then_some(true))
    })?;
    end.ok_or_else(|| late(limit))
}

/// Asks `look` until it has something, or for so long.
fn loop_until<T>(
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>, Stop>,
) -> Result<Option<T>, Stop> {
    let deadline = Instant::now() + limit;
    loop {
        let found = look()?;
        if found.is_some() || Instant::now() > deadline {
            return Ok(found);
        }
        std::thread::sleep(POLL);
    }
}

fn killed() -> Stop {
    Stop::Fail("the guest was killed".into())
}

fn late(limit: Duration) -> Stop {
    Stop::Fail(format!("the guest did not finish within {limit:?}"))
}

#[cfg(test)]
mod tests;
