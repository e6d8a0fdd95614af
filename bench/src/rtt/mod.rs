//! `vmferry-bench rtt`: the floor of a remote fault.
//!
//! How long a 4 KiB page takes that another process is asked for over TCP, alone and beside a bulk stream, and how long
//! a fault takes that is resolved on the spot: no postcopy can be faster than their sum. Beside an unpaced stream the
//! page waits in the link's queue; a stream paced below the link's rate leaves none.

mod contest;
mod exchange;
mod fault;
mod probe;
mod report;
mod samples;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vmferry_report::json::Document;
use vmferry_sys::SysError;

use crate::host;
use crate::link::{Link, LinkError, Shape, Shaped, Tools};
use crate::rounds::{Outcome, Rounds, Stop};
use contest::{Contest, Times};
use exchange::{Bulk, Plan, Round};
use fault::Handler;
use samples::Figures;

pub use exchange::source_main;
pub use vmferry_report::benches::rtt::table;

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
    /// A connection could not be made.
    #[error(transparent)]
    Link(LinkError),
    /// The congestion control that was asked for cannot be had.
    #[error("cannot use TCP congestion control {name}: {source}")]
    Congestion {
        /// Its name in Linux.
        name: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The bulk stream cannot be paced.
    #[error("cannot pace the bulk stream: {0}")]
    Pace(#[source] io::Error),
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

impl From<RttError> for Stop {
    fn from(error: RttError) -> Self {
        match error {
            RttError::Unavailable(why) => Self::Skip(why),
            error => Self::Fail(error.to_string()),
        }
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

impl On {
    fn make(&self, tools: &Tools) -> Result<Link, String> {
        let Some(gbps) = self.gbps else { return Ok(Link::Loopback) };
        // Its sockets ask for their congestion control themselves.
        let shape = Shape { bits_per_s: u64::from(gbps) * 1_000_000_000, congestion: None };
        Shaped::new(tools, shape).map(Link::Shaped)
    }
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

/// What the shaped links carry, in 10^9 bits a second, headers included.
const SHAPED_GBPS: u32 = 2;
/// Likewise, the faster ones.
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

/// One side.
#[derive(Debug, Clone, Copy)]
struct Side {
    link: &'static str,
    what: What,
}

/// What a side came to.
type SideRuns = crate::rounds::SideRuns<Side, Measured>;

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

impl Side {
    /// In how many rounds it has a turn at most.
    fn most_rounds(self) -> usize {
        if matches!(self.what, What::Contest { .. }) { CONTEST_ROUNDS } else { usize::MAX }
    }

    /// The case's name.
    fn name(self) -> String {
        match self.what {
            What::Requests { beside, .. } => format!("{}/{}", self.link, beside.name()),
            What::Contest { contest, .. } => format!("{}/{}", self.link, contest.name()),
            What::Faults(handler) => format!("{}/{}", self.link, handler.name()),
        }
    }
}

/// What no postcopy over a link can be faster than.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    /// Mean round trip of a page on the idle link, in microseconds.
    pub rtt_us: f64,
    /// Mean of a fault that is handled on the spot, by a handler that sleeps, in microseconds.
    pub local_fault_us: f64,
}

impl Floor {
    /// The sum.
    pub fn us(self) -> f64 {
        self.rtt_us + self.local_fault_us
    }
}

/// Measures the floor of a link once, in about half a second.
///
/// # Errors
/// [`RttError::Unavailable`] if this host or this user has no userfaultfd.
pub fn floor(link: &Link, source: &SourceCommand) -> Result<Floor, RttError> {
    let options = Options { measure: Duration::from_millis(300), ..Options::quick() };
    let empty = || RttError::Usage("nothing was measured".into());
    let plan = plan(&options, None, Beside::Idle, None)?;
    let rtt = exchange::measure(link, plan, source)?.rtt.figures().ok_or_else(empty)?;
    let fault = fault::measure(Handler::Blocking, options.faults)?.figures().ok_or_else(empty)?;
    Ok(Floor { rtt_us: rtt.mean_us, local_fault_us: fault.mean_us })
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
    let mut document = Document::new("rtt", host::describe());
    let sides = sides(options);
    let mut links = Links::new(tools, &sides);
    let mut rounds = Rounds::new(options.repeats, progress);
    let sides = rounds.run_at_most(sides, Side::most_rounds, Side::name, |side, so_far| {
        Ok(run_side(options, side, latest_bulk(so_far, side.link), source, &mut links)?)
    });
    let failures = rounds.failures;
    report::add(&mut document, options, &sides, &failures);
    Outcome { document, failures }
}

/// The links that are wanted, each made once. Err: why this host has none.
struct Links(Vec<(&'static str, Result<Link, String>)>);

impl Links {
    fn new(tools: &Tools, sides: &[Side]) -> Self {
        let wanted = |on: &&On| sides.iter().any(|side| side.link == on.name);
        Links(LINKS.iter().filter(wanted).map(|on| (on.name, on.make(tools))).collect())
    }

    fn get(&mut self, name: &str) -> Result<&mut Link, RttError> {
        match self.0.iter_mut().find(|(link, _)| *link == name) {
            Some((_, Ok(link))) => Ok(link),
            Some((_, Err(why))) => Err(RttError::Unavailable(why.clone())),
            None => Err(RttError::Usage(format!("there is no link {name}"))),
        }
    }
}

/// The sides that are wanted, in the order of the first round: unpaced before paced, which needs its speed.
fn sides(options: &Options) -> Vec<Side> {
    let links = || LINKS.iter().filter(|on| options.extra || on.gbps != Some(FAST_GBPS));
    let requests = links().flat_map(|on| {
        let what = |beside: &Beside| What::Requests { congestion: on.congestion, beside: *beside };
        on.sides.iter().map(move |beside| Side { link: on.name, what: what(beside) })
    });
    let contests = links().filter(|on| options.extra && on.gbps == Some(SHAPED_GBPS)).flat_map(|on| {
        let what = |contest| What::Contest { congestion: on.congestion, contest };
        Contest::ALL.into_iter().map(move |contest| Side { link: on.name, what: what(contest) })
    });
    let faults = [Handler::Blocking, Handler::Spinning]
        .map(|handler| Side { link: "fault", what: What::Faults(handler) });
    requests.chain(contests).chain(faults).filter(|side| options.wants(&side.name())).collect()
}

/// What the unpaced stream of `link` reached last, in 10^9 bits a second.
fn latest_bulk(sides: &[SideRuns], link: &str) -> Option<f64> {
    let unpaced = sides.iter().find(|runs| {
        runs.side.link == link && matches!(runs.side.what, What::Requests { beside: Beside::Unpaced, .. })
    })?;
    unpaced.rounds.iter().rev().flatten().find_map(|round| round.bulk_gbps)
}

fn run_side(
    options: &Options,
    side: Side,
    unpaced: Option<f64>,
    source: &SourceCommand,
    links: &mut Links,
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
