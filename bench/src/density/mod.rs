//! `vmferry-bench density`: number of guests that fit on a host if they return free memory, and its
//! cost.
//!
//! The published test runs a fleet. Its guests allocate, touch and free most of their memory, one
//! after another, and stay. The memory limit holds three of them at their peak.
//!
//! Single guests show the residue of each way of reporting, and its effect on the speed and tail
//! latency of the allocator. The ways are: no reports, synchronous, asynchronous and by hypercall.
//! The patterns are: all at once, fragmented and repeated. Guests without reports also show the
//! price of hints: of walking the free lists on demand, and of keeping a map of free pages.
//!
//! The same guest also runs under QEMU, without reports and with `free-page-reporting=on`.

mod budget;
mod figures;
mod goals;
mod report;
mod spec;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use vmferry_report::json::Document;

use crate::cases;
use crate::host;
use crate::qemu;
use crate::rounds::{Rounds, SideRuns, Stop, room_for};
use crate::warm::Warm;
use figures::{Filled, Single};
use spec::MOST_GUESTS;

pub use crate::rounds::{OurError, Outcome};
pub use budget::{Budget, NoBudget};
pub use figures::Told;
pub use spec::{Fleet, GuestSpec, HintMode, One, Options, Pattern, ReportMode, Scale, Vmm, Way};
pub use vmferry_report::benches::density::{page, table};

/// Interval at which a guest is polled. It is long enough to cost the guest nothing.
const POLL: Duration = Duration::from_millis(20);
/// Time that a guest gets to return freed memory. What is left afterwards counts as residue.
const WARM_UP: Duration = Duration::from_secs(1);

/// Runner of guests. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Returns the frequency of the guest's time stamp counter in kHz, which a guest cannot measure
    /// under QEMU.
    fn tsc_khz(&mut self) -> Option<u32>;

    /// Starts the guest of `spec` in a separate process, within `budget` if there is one.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the guest, which skips the
    /// side. Every other error is a failure. A guest that is killed within its budget before it
    /// answers is not an error but [`Started::Killed`].
    fn start(&mut self, spec: &GuestSpec, budget: Option<&Budget>) -> Result<Started, OurError>;
}

/// Result of a guest's start.
#[derive(Debug)]
pub enum Started {
    /// The guest runs.
    Runs(Box<dyn Guest>),
    /// The kernel killed the guest.
    Killed,
}

/// Running guest. Dropping the value ends the guest.
pub trait Guest: std::fmt::Debug {
    /// Returns whether the guest's process has been killed.
    ///
    /// # Errors
    ///
    /// Fails if the process ended in any other way.
    fn killed(&mut self) -> Result<bool, OurError>;

    /// Returns the guest's allocator statistics, or `None` if there are none yet.
    ///
    /// # Errors
    ///
    /// Fails if the guest's process does not answer.
    fn told(&mut self) -> Result<Option<Told>, OurError>;

    /// Returns the resident memory of the guest's process in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the file of the kernel cannot be read.
    fn resident(&mut self) -> Result<u64, OurError>;
}

/// Returns the resident memory of a process in bytes, as the kernel counts it page by page.
///
/// # Errors
///
/// Fails if the process has ended.
pub fn resident(pid: u32) -> io::Result<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let rss = rollup.lines().find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"));
    let kib: u64 = rss.and_then(|rss| rss.parse().ok()).ok_or_else(|| io::Error::other("no Rss"))?;
    Ok(kib << 10)
}

/// Runners of both VMMs' guests.
struct Runners<'a> {
    ours: &'a mut dyn OurRunner,
    /// Frequency of the guest's time stamp counter in kHz, if it is known.
    tsc_khz: Option<u32>,
}

impl Runners<'_> {
    fn start(&mut self, spec: &GuestSpec, budget: Option<&Budget>) -> Result<Started, Stop> {
        match spec.report.vmm {
            Vmm::Ours => Ok(self.ours.start(spec, budget)?),
            Vmm::Qemu => Ok(qemu::start_guest(spec, budget, self.tsc_khz)?),
        }
    }
}

/// Runs the bench. Calls `progress` with the name of each run that begins.
pub fn run(options: &Options, ours: &mut dyn OurRunner, progress: &mut dyn FnMut(&str)) -> Outcome {
    let mut document = Document::new("density", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);

    let mut runners = Runners { tsc_khz: ours.tsc_khz(), ours };
    let mut bases = BTreeMap::new();
    let sides = in_turn(&mut rounds, options, "one", &options.ones, usize::MAX, |one| {
        let spec = options.single(one);
        room_for(spec.memory)?;
        let vmm = spec.report.vmm;
        let base = match bases.get(&vmm) {
            Some(base) => *base,
            None => *bases.entry(vmm).or_insert(base(&spec, options.limit, &mut runners)?),
        };
        single(&spec, options.limit, base, &mut runners)
    });
    let params = [("memory_bytes", options.one.0.into()), ("alloc_bytes", options.one.1.into())];
    cases::add(&mut document, ("one", &params), &sides, Single::figures);
    report::add_slowdown(&mut document, &sides);

    let scale = options.scale;
    let sides = in_turn(&mut rounds, options, "fleet", &options.fleets, options.fleet_repeats, |fleet| {
        room_for(scale.budget)?;
        fill(&options.of_fleet(fleet), scale.budget, options.limit, &mut runners)
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

/// Runs all selected sides of a group in turn.
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

/// Returns the resident bytes and used pages of a guest that allocates next to nothing.
fn base(spec: &GuestSpec, limit: Duration, runners: &mut Runners<'_>) -> Result<(u64, u64), Stop> {
    let spec = GuestSpec { alloc: 4096 * u64::from(spec.vcpus), rounds: 1, frag: 0, ..*spec };
    let base = single(&spec, limit, (0, 0), runners)?;
    Ok((base.resident, base.told.used_pages))
}

/// Runs one guest until it has returned what it freed.
fn single(
    spec: &GuestSpec,
    limit: Duration,
    base: (u64, u64),
    runners: &mut Runners<'_>,
) -> Result<Single, Stop> {
    drop(Warm::hold(spec.alloc));
    let Started::Runs(mut guest) = runners.start(spec, None)? else { return Err(killed()) };
    let told = loop_until(limit, || {
        if guest.killed()? { Err(killed()) } else { Ok(guest.told()?.filter(|told| told.done)) }
    })?;
    let mut told = told.ok_or_else(|| late(limit))?;
    let until = Instant::now() + WARM_UP;
    // Without reports the guest is done now. It is still polled twice, as all others are.
    for look in 0.. {
        std::thread::sleep(POLL);
        told = guest.told()?.unwrap_or(told);
        let reported = spec.report.mode == ReportMode::Off || told.unreported_pages == 0;
        if look > 0 && reported || Instant::now() > until {
            break;
        }
    }
    if told.corrupt > 0 {
        return Err(Stop::Fail(format!("the guest found {} damaged pages", told.corrupt)));
    }
    Ok(Single { told, resident: guest.resident()?, base })
}

/// Starts guests one after another until the kernel kills one of them.
fn fill(spec: &GuestSpec, bytes: u64, limit: Duration, runners: &mut Runners<'_>) -> Result<Filled, Stop> {
    let budget = Budget::new(bytes).map_err(|why| Stop::Skip(why.to_string()))?;
    let start = Instant::now();
    // Dropped before the budget, because a cgroup can only be removed when its processes have
    // ended.
    let mut guests: Vec<Box<dyn Guest>> = Vec::new();
    let mut filled = Filled::default();
    let fails = |error: std::io::Error| Stop::Fail(format!("the cgroup: {error}"));
    while filled.guests < MOST_GUESTS {
        match runners.start(spec, Some(&budget))? {
            Started::Runs(guest) => guests.push(guest),
            Started::Killed => filled.killed = true,
        }
        if filled.killed || !finishes(&mut guests, spec, limit)? {
            // A guest must have been killed because of the cgroup's limit, and for no other reason.
            if budget.kills().map_err(fails)? == 0 {
                return Err(Stop::Fail("a guest was killed, but not because of the cgroup's limit".into()));
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

/// Waits until the last of `guests` has finished and returned what it can. Returns `false` if a
/// guest was killed.
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
            // The guest is being killed, or does not answer yet.
            return Ok(None);
        };
        if !told.done {
            return Ok(None);
        }
        let since: Instant = *done_at.get_or_insert_with(Instant::now);
        let reported = spec.report.mode == ReportMode::Off || told.unreported_pages == 0;
        Ok((reported || since.elapsed() > WARM_UP).then_some(true))
    })?;
    end.ok_or_else(|| late(limit))
}

/// Calls `look` until it returns a value, or until `limit` has passed.
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
