//! `bench postcopy`: how long a guest waits for a page that has not arrived yet.
//!
//! A guest that writes to most of its memory as fast as it can is moved by postcopy, by each side in turn: vmferry with each
//! of its ways for urgent pages, and QEMU. All sides run the same guest file, and what a page took is taken from the guest's
//! own clock: a vCPU's loop takes well below a microsecond, so a gap of 32 us and more is a page that was waited for (or,
//! seldom, a processor that was busy: the same guest's gaps before the migration are reported beside). The floor of the same
//! link is measured in the same round.

mod figures;
mod goals;
mod html;
mod report;
mod spec;
mod watch;

use std::time::Duration;

use crate::host::{Host, available_memory};
use crate::json::Document;
use crate::link::{Link, Shaped, Tools};
use crate::migrate::{OurError, with_sources};
use crate::qemu::{self, QemuError};
use crate::rtt::{self, Floor, SourceCommand};
use crate::stats::turns;

pub use crate::migrate::Outcome;
pub use html::page;
pub use report::table;
pub use spec::{CaseSpec, Options, Purpose, Side, Way};
pub use watch::{Heard, Own, Run, Vcpu};

/// Memory that must stay free beside the guests, in bytes.
const MEMORY_RESERVE: u64 = 512 << 20;

/// Looks at a guest this often: its page of statistics remembers the longest stalls of 160 ms.
pub const POLL: Duration = Duration::from_millis(20);

/// How the guest is watched, which is the same for all sides.
#[derive(Debug, Clone, Copy)]
pub struct Watch<'a> {
    /// Between which two ends it moves: start each process at its own.
    pub link: &'a Link,
    /// How long it is watched before the command.
    pub before: Duration,
    /// How long at least, and at most, it is watched after the end: at least until it reported, at most while
    /// [`SpeedBack`] waits.
    pub after: Duration,
}

/// Runs vmferry's own side: the one thing that this crate leaves to whoever has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec` at the source's end of the link, watches it, moves it by postcopy at once, watches it until
    /// that is done and [`SpeedBack`] has seen enough, and ends both processes.
    ///
    /// # Errors
    /// [`OurError::Unavailable`] when it cannot run here, which skips the side; everything else is a failure.
    fn run(&mut self, spec: &CaseSpec, way: Way, watch: Watch<'_>) -> Result<Run, OurError>;
}

/// Says how long a guest is to be watched after its migration: until it is as fast as before for a while.
#[derive(Debug)]
pub struct SpeedBack {
    /// Writes a second before.
    wanted: f64,
    last: Option<(f64, u64)>,
    fast: u32,
}

impl SpeedBack {
    /// From what was heard on the source.
    pub fn new(source: &[Heard]) -> Self {
        let command = source.iter().rfind(|heard| heard.at <= 0.0);
        let speed = source.first().zip(command).and_then(|(first, last)| speed(mark(first), mark(last)));
        SpeedBack { wanted: speed.unwrap_or(0.0) * figures::BACK, last: None, fast: 0 }
    }

    /// Whether it has been as fast for long enough, now that this was heard, too.
    pub fn is_back(&mut self, heard: &Heard) -> bool {
        let now = mark(heard);
        let Some(last) = self.last else {
            self.last = Some(now);
            return false;
        };
        // Much of a window, so that one late report is no slow guest.
        if now.0 - last.0 < 0.08 {
            return false;
        }
        self.fast =
            if speed(last, now).is_some_and(|speed| speed >= self.wanted) { self.fast + 1 } else { 0 };
        self.last = Some(now);
        self.fast >= 5
    }
}

fn mark(heard: &Heard) -> (f64, u64) {
    (heard.at, heard.vcpus.iter().map(|vcpu| vcpu.writes).sum())
}

fn speed(from: (f64, u64), to: (f64, u64)) -> Option<f64> {
    let span = to.0 - from.0;
    (span > 0.0).then(|| crate::reaper::to_f64(to.1.saturating_sub(from.1)) / span)
}

/// Everything that one side did in one case.
#[derive(Debug)]
struct SideRuns {
    side: Side,
    /// A round in which the side failed has None.
    rounds: Vec<Option<Run>>,
    skipped: Option<String>,
}

/// Where it goes what happens meanwhile.
struct Tell<'a> {
    failures: &'a mut Vec<String>,
    progress: &'a mut dyn FnMut(&str),
}

/// Everything that was done in one case.
#[derive(Debug)]
struct CaseRuns {
    /// One for each round. None: it could not be measured.
    floors: Vec<Option<Floor>>,
    sides: Vec<SideRuns>,
}

/// Runs the bench. `source` starts the process that the floor is measured with; `progress` is told what begins.
pub fn run(
    options: &Options,
    ours: &mut dyn OurRunner,
    source: &SourceCommand,
    progress: &mut dyn FnMut(&str),
) -> Outcome {
    run_with(options, ours, source, &Tools::here(), progress)
}

fn run_with(
    options: &Options,
    ours: &mut dyn OurRunner,
    source: &SourceCommand,
    tools: &Tools,
    progress: &mut dyn FnMut(&str),
) -> Outcome {
    let mut document = Document::new("postcopy", Host::describe());
    let mut failures = Vec::new();
    for spec in &options.cases {
        let wanted = spec.sides.iter().filter(|side| options.wants(spec, **side));
        let mut sides: Vec<SideRuns> =
            wanted.map(|&side| SideRuns { side, rounds: Vec::new(), skipped: None }).collect();
        if sides.is_empty() {
            continue;
        }
        let runs = match spec
            .shape
            .map_or(Ok(Link::Loopback), |shape| Shaped::new(tools, shape).map(Link::Shaped))
        {
            Ok(link) => run_case(
                options,
                spec,
                sides,
                (&link, source),
                ours,
                Tell { failures: &mut failures, progress },
            ),
            Err(why) => {
                sides.iter_mut().for_each(|runs| runs.skipped = Some(why.clone()));
                CaseRuns { floors: Vec::new(), sides }
            }
        };
        report::add_case(&mut document, options, spec, &runs);
    }
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

fn run_case(
    options: &Options,
    spec: &CaseSpec,
    mut sides: Vec<SideRuns>,
    (link, source): (&Link, &SourceCommand),
    ours: &mut dyn OurRunner,
    tell: Tell<'_>,
) -> CaseRuns {
    let mut floors = Vec::new();
    let watch = Watch { link, before: options.before, after: options.after };
    let repeats = options.repeats.min(spec.rounds);
    for round in 0..repeats {
        // What nobody is compared with need not be known.
        if sides.iter().any(|runs| runs.skipped.is_none()) {
            floors.push(
                rtt::floor(link, source)
                    .map_err(|error| {
                        tell.failures.push(format!(
                            "{}/floor, round {}: {}",
                            spec.name,
                            round + 1,
                            with_sources(&error)
                        ));
                    })
                    .ok(),
            );
        }
        for turn in turns(sides.len(), round) {
            let runs = &mut sides[turn];
            if runs.skipped.is_some() {
                continue;
            }
            (tell.progress)(&format!("{}/{}, round {} of {repeats}", spec.name, runs.side, round + 1));
            match run_side(spec, runs.side, watch, ours) {
                Ok(run) => runs.rounds.push(Some(run)),
                Err(Stop::Skip(why)) => runs.skipped = Some(why),
                Err(Stop::Fail(why)) => {
                    runs.rounds.push(None);
                    tell.failures.push(format!("{}/{}, round {}: {why}", spec.name, runs.side, round + 1));
                }
            }
        }
    }
    CaseRuns { floors, sides }
}

/// Why a side gave no result.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    Skip(String),
    Fail(String),
}

fn run_side(spec: &CaseSpec, side: Side, watch: Watch<'_>, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    let needed = spec.memory.saturating_mul(2).saturating_add(MEMORY_RESERVE);
    if let Some(available) = available_memory().filter(|available| *available < needed) {
        let (needed, available) = (needed >> 20, available >> 20);
        return Err(Stop::Skip(format!("needs {needed} MiB of memory, {available} MiB are available")));
    }
    match side {
        Side::Ours(way) => ours.run(spec, way, watch).map_err(|e| match e {
            OurError::Unavailable(why) => Stop::Skip(why),
            OurError::Failed(_) => Stop::Fail(with_sources(&e)),
        }),
        Side::Qemu { preempt } => qemu::postcopy(spec, preempt, watch).map_err(|e| match e {
            QemuError::Unavailable(why) => Stop::Skip(why),
            e => Stop::Fail(with_sources(&e)),
        }),
    }
}

#[cfg(test)]
mod tests;
