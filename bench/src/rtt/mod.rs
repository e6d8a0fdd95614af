//! `bench rtt`: the floor of a remote fault.
//!
//! How long a 4 KiB page takes that another process is asked for over TCP, alone and beside a bulk stream, and how long
//! a fault takes that is resolved on the spot: no postcopy can be faster than their sum. Beside an unpaced stream the
//! page waits in the link's queue; a stream paced below the link's rate leaves none.

mod contest;
mod exchange;
mod fault;
mod link;
mod probe;
mod report;
mod samples;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vmferry_sys::SysError;

use crate::host::Host;
use crate::json::Document;
use crate::migrate::Outcome;
use crate::stats::turns;
use contest::{Contest, Times};
use exchange::{Bulk, Plan, Round};
use fault::Handler;
use link::{Link, SHAPED_GBPS, Shaped, Tools};
use samples::Figures;

pub use exchange::source_main;
pub use report::table;

/// The hidden subcommand that an executable must route to [`source_main`].
pub const SOURCE_SUBCOMMAND: &str = "bench-rtt-source";

/// What stopped a measurement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RttError {
    /// It cannot run on this host or for this user, and why.
    #[error("{0}")]
    Unavailable(String),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The congestion control that was asked for cannot be had.
    #[error("cannot use TCP congestion control {name}: {source}")]
    Congestion {
        /// Its name in Linux.
        name: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A fault could not be handled.
    #[error("cannot handle faults: {0}")]
    Fault(#[source] SysError),
    /// Something is not as it must be.
    #[error("{0}")]
    Usage(String),
}

impl RttError {
    /// For `map_err`: a failed system call while doing `action`.
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| RttError::Io { action, source }
    }
}

/// The command that starts the source's process; what it is to do is appended.
#[derive(Debug, Clone)]
pub struct SourceCommand {
    /// The executable.
    pub program: PathBuf,
    /// What comes before the source's own arguments.
    pub args: Vec<OsString>,
}

impl SourceCommand {
    /// This executable with [`SOURCE_SUBCOMMAND`].
    ///
    /// # Errors
    /// If the executable cannot be found.
    pub fn this_executable() -> Result<Self, RttError> {
        let program = std::env::current_exe().map_err(RttError::io("find this executable"))?;
        Ok(SourceCommand { program, args: vec![SOURCE_SUBCOMMAND.into()] })
    }
}

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// Rounds in which every side has a turn.
    pub repeats: usize,
    /// How long requests are measured in a turn.
    pub measure: Duration,
    /// How long the bulk stream goes on before that, so that it has found its speed.
    pub settle: Duration,
    /// Pages whose faults are measured in a turn.
    pub faults: usize,
    /// Also a link of 10 Gb/s, and the controller with others on its link.
    pub extra: bool,
    /// Only cases whose names have one of these in them. Empty: all.
    pub only: Vec<String>,
}

impl Options {
    /// As exact as it gets.
    pub fn full() -> Self {
        Options {
            repeats: 7,
            measure: Duration::from_millis(2000),
            settle: Duration::from_millis(1000),
            faults: 16384,
            extra: true,
            only: Vec::new(),
        }
    }

    /// Within a minute.
    pub fn quick() -> Self {
        Options {
            repeats: 3,
            measure: Duration::from_millis(700),
            settle: Duration::from_millis(400),
            faults: 4096,
            extra: false,
            only: Vec::new(),
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Between an answer and the next request. Back to back, the answers alone would take 0.5 Gb/s and more, and beside a
/// stream at 90 % of the link they would be the queue.
const GAP: Duration = Duration::from_millis(1);

/// What requests run beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Nothing: the floor, and what the others are compared with.
    Idle,
    /// Nothing, and they follow each other at once. Not what the floor is made of: measured on two cores, a round took
    /// 60 us or 17, by where the scheduler put the two processes (15 with both pinned to one core).
    IdleBackToBack,
    Unpaced,
    /// A stream held to so many percent of the link: of its rate, or on loopback of what the unpaced stream reached.
    Paced(u32),
    /// A stream whose pace the engine's controller finds.
    Found,
}

impl Beside {
    fn name(self) -> String {
        match self {
            Beside::Idle => "idle".into(),
            Beside::IdleBackToBack => "idle-back-to-back".into(),
            Beside::Unpaced => "unpaced".into(),
            Beside::Paced(percent) => format!("paced-{percent}"),
            Beside::Found => "found".into(),
        }
    }

    /// Between an answer and the next request.
    fn gap(self) -> Duration {
        if self == Beside::IdleBackToBack { Duration::ZERO } else { GAP }
    }
}

/// One comparison's link.
#[derive(Debug)]
struct On {
    name: &'static str,
    /// 10^9 bits a second, headers included. None: loopback.
    gbps: Option<u32>,
    /// None: the host's default.
    congestion: Option<&'static str>,
    sides: &'static [Beside],
}

const LINKS: &[On] = &[
    On {
        name: "loopback",
        gbps: None,
        congestion: None,
        sides: &[Beside::Idle, Beside::IdleBackToBack, Beside::Unpaced, Beside::Paced(90), Beside::Found],
    },
    On { name: "shaped-bbr", gbps: Some(SHAPED_GBPS), congestion: Some("bbr"), sides: SHAPED_SIDES },
    On { name: "shaped-cubic", gbps: Some(SHAPED_GBPS), congestion: Some("cubic"), sides: SHAPED_SIDES },
    On { name: "fast-bbr", gbps: Some(FAST_GBPS), congestion: Some("bbr"), sides: FAST_SIDES },
    On { name: "fast-cubic", gbps: Some(FAST_GBPS), congestion: Some("cubic"), sides: FAST_SIDES },
];

/// What the faster shaped link carries, in 10^9 bits a second.
const FAST_GBPS: u32 = 10;

const SHAPED_SIDES: &[Beside] = &[
    Beside::Idle,
    Beside::IdleBackToBack,
    Beside::Unpaced,
    Beside::Paced(90),
    Beside::Paced(95),
    Beside::Found,
];

const FAST_SIDES: &[Beside] = &[Beside::Idle, Beside::Unpaced, Beside::Paced(90), Beside::Found];

/// Contests take long, and say the same after three rounds.
const CONTEST_ROUNDS: usize = 3;

/// One side, and what it came to round by round.
#[derive(Debug)]
struct SideRuns {
    link: &'static str,
    what: What,
    /// A round in which the side failed has None.
    rounds: Vec<Option<Measured>>,
    skipped: Option<String>,
}

/// What a side measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Requests { congestion: Option<&'static str>, beside: Beside },
    Contest { congestion: Option<&'static str>, contest: Contest },
    Faults(Handler),
}

/// One round of one side.
#[derive(Debug, Clone, Copy)]
struct Measured {
    times: Figures,
    bulk_gbps: Option<f64>,
    pace_gbps: Option<f64>,
    /// What the other stream of a contest got, or the same one while its link had its half.
    other_gbps: Option<f64>,
}

impl SideRuns {
    fn new(link: &'static str, what: What) -> Self {
        SideRuns { link, what, rounds: Vec::new(), skipped: None }
    }

    /// It needs no further round.
    fn has_enough(&self) -> bool {
        matches!(self.what, What::Contest { .. }) && self.rounds.len() >= CONTEST_ROUNDS
    }

    /// The case's name.
    fn name(&self) -> String {
        match self.what {
            What::Requests { beside, .. } => format!("{}/{}", self.link, beside.name()),
            What::Contest { contest, .. } => format!("{}/{}", self.link, contest.name()),
            What::Faults(handler) => format!("{}/{}", self.link, handler.name()),
        }
    }
}

/// Runs the bench. `source` starts the process that sends pages; `progress` is told what begins.
pub fn run(options: &Options, source: &SourceCommand, progress: &mut dyn FnMut(&str)) -> Outcome {
    run_with(options, source, &Tools::here(), progress)
}

fn run_with(
    options: &Options,
    source: &SourceCommand,
    tools: &Tools,
    progress: &mut dyn FnMut(&str),
) -> Outcome {
    let mut document = Document::new("rtt", Host::describe());
    let mut failures = Vec::new();
    let mut sides = sides(options);
    let links = Shapes::new(tools, &sides);
    for round in 0..options.repeats {
        for turn in turns(sides.len(), round) {
            if sides[turn].skipped.is_some() || sides[turn].has_enough() {
                continue;
            }
            let name = sides[turn].name();
            progress(&format!("{name}, round {} of {}", round + 1, options.repeats));
            let unpaced = latest_bulk(&sides, sides[turn].link);
            match run_side(options, &sides[turn], unpaced, source, &links) {
                Ok(measured) => sides[turn].rounds.push(Some(measured)),
                Err(RttError::Unavailable(why)) => sides[turn].skipped = Some(why),
                Err(error) => {
                    sides[turn].rounds.push(None);
                    failures.push(format!("{name}, round {}: {error}", round + 1));
                }
            }
        }
    }
    report::add(&mut document, options, &sides, &failures);
    Outcome { document, failures }
}

/// The shaped links, each made once. Err: why this host has none.
struct Shapes(Vec<(&'static str, Result<Link, String>)>);

impl Shapes {
    fn new(tools: &Tools, sides: &[SideRuns]) -> Self {
        let wanted = |on: &&On| sides.iter().any(|side| side.link == on.name);
        let make = |on: &On| (on.name, on.gbps.map_or(Ok(Link::Loopback), |gbps| shape(tools, gbps)));
        Shapes(LINKS.iter().filter(wanted).map(make).collect())
    }

    fn get(&self, name: &str) -> Result<&Link, RttError> {
        match self.0.iter().find(|(link, _)| *link == name) {
            Some((_, Ok(link))) => Ok(link),
            Some((_, Err(why))) => Err(RttError::Unavailable(why.clone())),
            None => Err(RttError::Usage(format!("there is no link {name}"))),
        }
    }
}

fn shape(tools: &Tools, gbps: u32) -> Result<Link, String> {
    Shaped::new(tools, gbps).map(Link::Shaped)
}

/// The sides that are wanted, in the order of the first round: unpaced before paced, which needs its speed.
fn sides(options: &Options) -> Vec<SideRuns> {
    let links = || LINKS.iter().filter(|on| options.extra || on.gbps != Some(FAST_GBPS));
    let requests = links().flat_map(|on| {
        let side = |beside: &Beside| What::Requests { congestion: on.congestion, beside: *beside };
        on.sides.iter().map(move |beside| SideRuns::new(on.name, side(beside)))
    });
    let contests = links().filter(|on| options.extra && on.gbps == Some(SHAPED_GBPS)).flat_map(|on| {
        let side = |contest| What::Contest { congestion: on.congestion, contest };
        Contest::ALL.into_iter().map(move |contest| SideRuns::new(on.name, side(contest)))
    });
    let faults =
        [Handler::Blocking, Handler::Spinning].map(|handler| SideRuns::new("fault", What::Faults(handler)));
    requests.chain(contests).chain(faults).filter(|side| options.wants(&side.name())).collect()
}

/// What the unpaced stream of `link` reached last, in 10^9 bits a second.
fn latest_bulk(sides: &[SideRuns], link: &str) -> Option<f64> {
    let unpaced = sides.iter().find(|side| {
        side.link == link && matches!(side.what, What::Requests { beside: Beside::Unpaced, .. })
    })?;
    unpaced.rounds.iter().rev().flatten().find_map(|round| round.bulk_gbps)
}

fn run_side(
    options: &Options,
    side: &SideRuns,
    unpaced: Option<f64>,
    source: &SourceCommand,
    links: &Shapes,
) -> Result<Measured, RttError> {
    let empty = || RttError::Usage("nothing was measured".into());
    let (congestion, beside) = match side.what {
        What::Faults(handler) => {
            let times = fault::measure(handler, options.faults)?.figures().ok_or_else(empty)?;
            return Ok(Measured { times, bulk_gbps: None, pace_gbps: None, other_gbps: None });
        }
        What::Contest { congestion, contest } => {
            let link = links.get(side.link)?;
            let round = contest::measure(link, contest, congestion, Times::FULL, source)?;
            return Ok(Measured {
                times: round.rtt.figures().ok_or_else(empty)?,
                bulk_gbps: Some(round.bulk_gbps),
                pace_gbps: None,
                other_gbps: Some(round.other_gbps),
            });
        }
        What::Requests { congestion, beside } => (congestion, beside),
    };
    let plan = plan(options, congestion, beside, capacity(side.link, unpaced))?;
    let Round { rtt, bulk_gbps, pace_gbps } = exchange::measure(links.get(side.link)?, plan, source)?;
    Ok(Measured { times: rtt.figures().ok_or_else(empty)?, bulk_gbps, pace_gbps, other_gbps: None })
}

/// What a link carries, in 10^9 bits a second: loopback, as much as an unpaced stream has reached.
fn capacity(link: &str, unpaced: Option<f64>) -> Option<f64> {
    let shaped = LINKS.iter().find(|on| on.name == link).and_then(|on| on.gbps);
    shaped.map(f64::from).or(unpaced)
}

fn plan<'a>(
    options: &Options,
    congestion: Option<&'a str>,
    beside: Beside,
    capacity_gbps: Option<f64>,
) -> Result<Plan<'a>, RttError> {
    let bulk = match beside {
        Beside::Idle | Beside::IdleBackToBack => Bulk::None,
        Beside::Unpaced => Bulk::Unpaced,
        Beside::Paced(percent) => {
            let capacity = capacity_gbps.ok_or_else(|| {
                RttError::Unavailable(
                    "paced by what an unpaced stream reaches, which was not measured".into(),
                )
            })?;
            Bulk::Paced(pace(capacity, percent))
        }
        Beside::Found => Bulk::Found,
    };
    Ok(Plan {
        congestion,
        gap: beside.gap(),
        bulk,
        // An idle link has no speed to find; but the processes have to start.
        settle: match bulk {
            Bulk::None => options.settle / 8,
            // The start of the controller takes a quarter of a second, and its first cuts are not its last.
            Bulk::Found => options.settle * 2,
            _ => options.settle,
        },
        measure: options.measure,
    })
}

/// `percent` percent of a rate in 10^9 bits a second, in bytes a second.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and far below 2^53")]
fn pace(gbps: f64, percent: u32) -> u64 {
    (gbps * 1e9 / 8.0 * f64::from(percent) / 100.0).max(1.0) as u64
}

#[cfg(test)]
mod tests;
