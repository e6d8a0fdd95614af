//! `bench rtt`: the floor of a remote fault.
//!
//! How long a 4 KiB page takes that another process is asked for over TCP, alone and beside a bulk stream, and how long
//! a fault takes that is resolved on the spot: no postcopy can be faster than their sum. Beside an unpaced stream the
//! page waits in the link's queue; a stream paced below the link's rate leaves none.

mod exchange;
mod fault;
mod report;
mod samples;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vmferry_sys::SysError;

use crate::host::Host;
use crate::json::Document;
use crate::link::{Link, LinkError, Shape, Shaped, Tools};
use crate::rounds::{Outcome, Rounds, Stop};
use exchange::{Bulk, Plan, Round};
use fault::Handler;
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
            only: Vec::new(),
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// The shaped link. Its sockets ask for their congestion control themselves.
const SHAPE: Shape = Shape { bits_per_s: 2_000_000_000, congestion: None };

/// What the shaped link carries, in bits a second, headers included.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
const SHAPED_BITS_PER_S: f64 = SHAPE.bits_per_s as f64;

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
}

impl Beside {
    fn name(self) -> String {
        match self {
            Beside::Idle => "idle".into(),
            Beside::IdleBackToBack => "idle-back-to-back".into(),
            Beside::Unpaced => "unpaced".into(),
            Beside::Paced(percent) => format!("paced-{percent}"),
        }
    }

    /// Between an answer and the next request.
    fn gap(self) -> Duration {
        if self == Beside::IdleBackToBack { Duration::ZERO } else { GAP }
    }
}

/// One comparison's links, each with its congestion control; None: the host's default.
const LINKS: &[(&str, Option<&str>, &[Beside])] = &[
    ("loopback", None, &[Beside::Idle, Beside::IdleBackToBack, Beside::Unpaced, Beside::Paced(90)]),
    ("shaped-bbr", Some("bbr"), SHAPED_SIDES),
    ("shaped-cubic", Some("cubic"), SHAPED_SIDES),
];

const SHAPED_SIDES: &[Beside] =
    &[Beside::Idle, Beside::IdleBackToBack, Beside::Unpaced, Beside::Paced(90), Beside::Paced(95)];

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
    Faults(Handler),
}

/// One round of one side.
#[derive(Debug, Clone, Copy)]
struct Measured {
    times: Figures,
    bulk_gbps: Option<f64>,
    pace_gbps: Option<f64>,
}

impl Side {
    /// The case's name.
    fn name(self) -> String {
        match self.what {
            What::Requests { beside, .. } => format!("{}/{}", self.link, beside.name()),
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
    let mut document = Document::new("rtt", Host::describe());
    let sides = sides(options);
    let shaped = if sides.iter().any(|side| side.link.starts_with("shaped")) {
        Shaped::new(tools, SHAPE).map(Link::Shaped)
    } else {
        Err("not wanted".into())
    };
    let mut rounds = Rounds::new(options.repeats, progress);
    let sides = rounds.run(sides, Side::name, |side, so_far| {
        Ok(run_side(options, side, latest_bulk(so_far, side.link), source, &shaped)?)
    });
    let failures = rounds.failures;
    report::add(&mut document, options, &sides, &failures);
    Outcome { document, failures }
}

/// The sides that are wanted, in the order of the first round: unpaced before paced, which needs its speed.
fn sides(options: &Options) -> Vec<Side> {
    let requests = LINKS.iter().flat_map(|(link, congestion, sides)| {
        sides
            .iter()
            .map(|beside| Side { link, what: What::Requests { congestion: *congestion, beside: *beside } })
    });
    let faults = [Handler::Blocking, Handler::Spinning]
        .map(|handler| Side { link: "fault", what: What::Faults(handler) });
    requests.chain(faults).filter(|side| options.wants(&side.name())).collect()
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
    shaped: &Result<Link, String>,
) -> Result<Measured, RttError> {
    let empty = || RttError::Usage("nothing was measured".into());
    let (congestion, beside) = match side.what {
        What::Faults(handler) => {
            let times = fault::measure(handler, options.faults)?.figures().ok_or_else(empty)?;
            return Ok(Measured { times, bulk_gbps: None, pace_gbps: None });
        }
        What::Requests { congestion, beside } => (congestion, beside),
    };
    let link = match (side.link, shaped) {
        ("loopback", _) => &Link::Loopback,
        (_, Ok(link)) => link,
        (_, Err(why)) => return Err(RttError::Unavailable(why.clone())),
    };
    let plan = plan(options, congestion, beside, capacity(side.link, unpaced))?;
    let Round { rtt, bulk_gbps, pace_gbps } = exchange::measure(link, plan, source)?;
    Ok(Measured { times: rtt.figures().ok_or_else(empty)?, bulk_gbps, pace_gbps })
}

/// What a link carries, in 10^9 bits a second: loopback, as much as an unpaced stream has reached.
fn capacity(link: &str, unpaced: Option<f64>) -> Option<f64> {
    if link == "loopback" { unpaced } else { Some(SHAPED_BITS_PER_S / 1e9) }
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
    };
    Ok(Plan {
        congestion,
        gap: beside.gap(),
        bulk,
        // An idle link has no speed to find; but the processes have to start.
        settle: if bulk == Bulk::None { options.settle / 8 } else { options.settle },
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
