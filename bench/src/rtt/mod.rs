//! `vmferry-bench rtt`: the floor of a remote fault.
//!
//! The bench measures two times. The first is the time that another process needs to deliver a 4
//! KiB page on request over TCP, with and without a bulk stream. The second is the time of a fault
//! that this host resolves. No postcopy can be faster than their sum. Beside an unpaced stream the
//! page waits in the link's queue. A stream that is paced below the link's rate leaves no queue.

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

/// Hidden subcommand that an executable must route to [`source_main`].
pub const SOURCE_SUBCOMMAND: &str = "bench-rtt-source";

/// Error of a measurement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RttError {
    /// The measurement cannot run on this host or for this user, with the reason.
    #[error("{0}")]
    Unavailable(String),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// Action that failed, for the message.
        action: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// A connection could not be made.
    #[error(transparent)]
    Link(LinkError),
    /// The TCP congestion control is not available.
    #[error("cannot use TCP congestion control {name}: {source}")]
    Congestion {
        /// Name of the algorithm in Linux.
        name: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The bulk stream cannot be paced.
    #[error("cannot pace the bulk stream: {0}")]
    Pace(#[source] io::Error),
    /// A fault could not be handled.
    #[error("cannot handle faults: {0}")]
    Fault(#[source] SysError),
    /// A measurement is invalid, or the caller asked for an impossible one.
    #[error("{0}")]
    Usage(String),
}

impl RttError {
    /// Returns a closure for `map_err` that names the `action` that failed.
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

/// Command that starts the source process. Its mode is appended.
#[derive(Debug, Clone)]
pub struct SourceCommand {
    /// Path of the executable.
    pub program: PathBuf,
    /// Arguments before the source's own.
    pub args: Vec<OsString>,
}

impl SourceCommand {
    /// Returns the command for this executable with [`SOURCE_SUBCOMMAND`].
    ///
    /// # Errors
    ///
    /// Fails if the path of this executable is unknown.
    pub fn this_executable() -> Result<Self, RttError> {
        let program = std::env::current_exe().map_err(RttError::io("find this executable"))?;
        Ok(SourceCommand { program, args: vec![SOURCE_SUBCOMMAND.into()] })
    }
}

/// Extent of the measurements.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of rounds.
    pub repeats: usize,
    /// Time for which requests are measured in a round.
    pub measure: Duration,
    /// Time for which the bulk stream runs before the measurement, so that it reaches its speed.
    pub warm_up: Duration,
    /// Number of pages whose faults are measured in a round.
    pub faults: usize,
    /// Set for additional links of 10 Gb/s, and for the contests.
    pub extra: bool,
    /// Texts that select cases by name. Empty selects all.
    pub only: Vec<String>,
}

impl Options {
    /// Returns the full options, with the highest precision.
    pub fn full() -> Self {
        Options {
            repeats: 7,
            measure: Duration::from_millis(2000),
            warm_up: Duration::from_millis(1000),
            faults: 16384,
            extra: true,
            only: Vec::new(),
        }
    }

    /// Returns the options of `--quick`, which takes less than a minute.
    pub fn quick() -> Self {
        Options {
            repeats: 3,
            measure: Duration::from_millis(700),
            warm_up: Duration::from_millis(400),
            faults: 4096,
            extra: false,
            only: Vec::new(),
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Time between an answer and the next request. Back to back, the answers alone would take 0.5 Gb/s
/// or more. Beside a stream at 90 % of the link they would fill the queue.
const GAP: Duration = Duration::from_millis(1);

/// Bulk stream beside which requests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// No stream. This is the floor, and the base of the comparison.
    Idle,
    /// No stream, with requests back to back. The floor does not use this side: on two cores a
    /// round trip took 60 us or 17 us, depending on where the scheduler put the two processes (15
    /// us with both pinned to one core).
    IdleBackToBack,
    Unpaced,
    /// A stream limited to this percentage of the link's rate. On loopback, the base is the rate
    /// that the unpaced stream reached.
    Paced(u32),
    /// A stream that is paced by the engine's controller.
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

    /// Returns the time between an answer and the next request.
    fn gap(self) -> Duration {
        if self == Beside::IdleBackToBack { Duration::ZERO } else { GAP }
    }
}

/// Link of a comparison.
#[derive(Debug)]
struct On {
    name: &'static str,
    /// Rate in 10^9 bits per second, including headers. `None` means loopback.
    gbps: Option<u32>,
    /// TCP congestion control. `None` means the host's default.
    congestion: Option<&'static str>,
    sides: &'static [Beside],
}

impl On {
    fn make(&self, tools: &Tools) -> Result<Link, String> {
        let Some(gbps) = self.gbps else { return Ok(Link::Loopback) };
        // The sockets set their congestion control themselves.
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

/// Rate of the shaped links in 10^9 bits per second, including headers.
const SHAPED_GBPS: u32 = 2;
/// Rate of the fast links in 10^9 bits per second, including headers.
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

/// Number of rounds of contests. They take long, and their results are stable after three rounds.
const CONTEST_ROUNDS: usize = 3;

/// One side of the comparison.
#[derive(Debug, Clone, Copy)]
struct Side {
    link: &'static str,
    what: What,
}

/// Runs of one side.
type SideRuns = crate::rounds::SideRuns<Side, Measured>;

/// Kind of measurement of a side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Requests { congestion: Option<&'static str>, beside: Beside },
    Contest { congestion: Option<&'static str>, contest: Contest },
    Faults(Handler),
}

/// Result of one side in one round.
#[derive(Debug, Clone, Copy)]
struct Measured {
    times: Figures,
    bulk_gbps: Option<f64>,
    pace_gbps: Option<f64>,
    /// Rate of the other stream of a contest, or of the same stream while its link had half of its
    /// rate, in 10^9 bits per second.
    other_gbps: Option<f64>,
}

impl Side {
    /// Returns the largest number of rounds in which the side runs.
    fn most_rounds(self) -> usize {
        if matches!(self.what, What::Contest { .. }) { CONTEST_ROUNDS } else { usize::MAX }
    }

    /// Returns the name of the case.
    fn name(self) -> String {
        match self.what {
            What::Requests { beside, .. } => format!("{}/{}", self.link, beside.name()),
            What::Contest { contest, .. } => format!("{}/{}", self.link, contest.name()),
            What::Faults(handler) => format!("{}/{}", self.link, handler.name()),
        }
    }
}

/// Lower bound of the time of a remote fault over a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    /// Mean round trip of a page on the idle link, in microseconds.
    pub rtt_us: f64,
    /// Mean time of a fault that this host handles, with a sleeping handler, in microseconds.
    pub local_fault_us: f64,
}

impl Floor {
    /// Returns the sum in microseconds.
    pub fn us(self) -> f64 {
        self.rtt_us + self.local_fault_us
    }
}

/// Measures the floor of a link once, in about half a second.
///
/// # Errors
///
/// Fails with [`RttError::Unavailable`] if userfaultfd is not available on this host or to this
/// user.
pub fn floor(link: &Link, source: &SourceCommand) -> Result<Floor, RttError> {
    let options = Options { measure: Duration::from_millis(300), ..Options::quick() };
    let empty = || RttError::Usage("nothing was measured".into());
    let plan = plan(&options, None, Beside::Idle, None)?;
    let rtt = exchange::measure(link, plan, source)?.rtt.figures().ok_or_else(empty)?;
    let fault = fault::measure(Handler::Blocking, options.faults)?.figures().ok_or_else(empty)?;
    Ok(Floor { rtt_us: rtt.mean_us, local_fault_us: fault.mean_us })
}

/// Runs the bench. `source` starts the process that sends pages. Calls `progress` with the name of
/// each run that begins.
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

/// Links of the selected sides, each created once. `Err` has the reason why this host cannot create
/// it.
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

/// Returns the selected sides in the order of the first round. Unpaced sides come before paced
/// ones, which need their speed.
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

/// Returns the latest rate that the unpaced stream of `link` reached, in 10^9 bits per second.
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

/// Returns the capacity of a link in 10^9 bits per second. For loopback it is the rate that an
/// unpaced stream reached.
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
                    "the pace depends on the rate of an unpaced stream, which was not measured".into(),
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
        // An idle link has no speed to reach, but the processes have to start.
        warm_up: match bulk {
            Bulk::None => options.warm_up / 8,
            // The controller needs a quarter of a second to start, and reduces the pace several
            // times.
            Bulk::Found => options.warm_up * 2,
            _ => options.warm_up,
        },
        measure: options.measure,
    })
}

/// Returns `percent` percent of a rate in 10^9 bits per second, in bytes per second.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and far below 2^53")]
fn pace(gbps: f64, percent: u32) -> u64 {
    (gbps * 1e9 / 8.0 * f64::from(percent) / 100.0).max(1.0) as u64
}

#[cfg(test)]
mod tests;
