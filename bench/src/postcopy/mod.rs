//! `vmferry-bench postcopy`: time for which a guest waits for a missing page.
//!
//! A guest that writes to most of its memory as fast as it can is moved by postcopy, by each side
//! in turn: vmferry with each of its ways for urgent pages, and QEMU. All sides run the same guest
//! image. The wait for a page is measured by the guest's own clock. A vCPU's loop takes well below
//! a microsecond, so a gap of 32 us or more is a wait for a page. Rarely such a gap is a busy
//! processor, so the gaps of the same guest before the migration are reported too. The floor of the
//! same link is measured in the same round.

mod figures;
mod goals;
mod report;
mod spec;
mod watch;

use std::time::Duration;

use vmferry_report::json::Document;

use crate::host;
use crate::link::{Link, Tools};
use crate::pool::{self, Pool};
use crate::qemu;
use crate::rounds::{Rounds, Stop, enough_memory};
use crate::rtt::{self, Floor, SourceCommand};

pub use crate::rounds::{OurError, Outcome};
pub(crate) use figures::histogram;
pub use spec::{Backing, CaseSpec, Options, Purpose, Side, Way};
pub use vmferry_report::benches::postcopy::{page, table};
pub use watch::{Observation, Own, Run, Vcpu};
pub(crate) use watch::{Waits, Window};

/// Interval at which a guest is polled. Its statistics page remembers the longest stalls of 160 ms.
pub const POLL: Duration = Duration::from_millis(20);

/// Observation of the guest, which is the same for all sides.
#[derive(Debug, Clone, Copy)]
pub struct Watch<'a> {
    /// Link that the guest moves over. Each process must be started at its end.
    pub link: &'a Link,
    /// Time for which the guest is observed before the command.
    pub before: Duration,
    /// Longest time for which the guest is observed after the end while [`SpeedBack`] waits. The
    /// guest must report at least once.
    pub after: Duration,
}

/// Runner of vmferry's own side. It is implemented by the caller that has the VMM.
pub trait OurRunner {
    /// Boots the guest of `spec` at the source's end of the link, moves it by postcopy, and ends
    /// both processes.
    ///
    /// The guest is observed before the migration, and after it until [`SpeedBack`] has seen
    /// enough.
    ///
    /// # Errors
    ///
    /// Fails with [`OurError::Unavailable`] if this host cannot run the side, which skips it. Every
    /// other error is a failure.
    fn run(&mut self, spec: &CaseSpec, way: Way, watch: Watch<'_>) -> Result<Run, OurError>;
}

/// Detector of the moment at which a guest has been as fast as before its migration for a while.
#[derive(Debug)]
pub struct SpeedBack {
    /// Writes per second that count as recovered.
    wanted: f64,
    last: Option<(f64, u64)>,
    fast: u32,
}

impl SpeedBack {
    /// Creates a detector from the reports of the guest on the source.
    pub fn new(source: &[Observation]) -> Self {
        let command = source.iter().rfind(|observed| observed.at <= 0.0);
        let speed = source.first().zip(command).and_then(|(first, last)| speed(mark(first), mark(last)));
        SpeedBack { wanted: speed.unwrap_or(0.0) * figures::BACK, last: None, fast: 0 }
    }

    /// Adds a report of the guest on the target, and returns whether the guest has been fast for
    /// long enough.
    pub fn is_back(&mut self, observed: &Observation) -> bool {
        let now = mark(observed);
        let Some(last) = self.last else {
            self.last = Some(now);
            return false;
        };
        // Each interval is most of a window, so that one late report does not make the guest look
        // slow.
        if now.0 - last.0 < 0.08 {
            return false;
        }
        self.fast =
            if speed(last, now).is_some_and(|speed| speed >= self.wanted) { self.fast + 1 } else { 0 };
        self.last = Some(now);
        self.fast >= 5
    }
}

fn mark(observed: &Observation) -> (f64, u64) {
    (observed.at, observed.vcpus.iter().map(|vcpu| vcpu.writes).sum())
}

fn speed(from: (f64, u64), to: (f64, u64)) -> Option<f64> {
    let span = to.0 - from.0;
    (span > 0.0).then(|| crate::reaper::to_f64(to.1.saturating_sub(from.1)) / span)
}

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<Side, Run>;

/// All runs of one case.
#[derive(Debug)]
struct CaseRuns {
    /// Floor of each round. `None` if it could not be measured.
    floors: Vec<Option<Floor>>,
    sides: Vec<SideRuns>,
}

/// Participant of a round.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Floor,
    Side(Side),
}

/// Result of a turn.
#[derive(Debug)]
enum Came {
    Floor(Floor),
    Run(Box<Run>),
}

/// Runs the bench. `source` starts the process that the floor is measured with. Calls `progress`
/// with the name of each run that begins.
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
    let mut document = Document::new("postcopy", host::describe());
    let mut rounds = Rounds::new(options.repeats, progress);
    for spec in &options.cases {
        let sides = spec.sides.iter().copied().filter(|side| options.wants(spec, *side));
        let turns: Vec<Turn> = sides.map(Turn::Side).collect();
        if turns.is_empty() {
            continue;
        }
        let link = Link::of(tools, spec.shape);
        // The huge pages stay reserved until all rounds of the case are over.
        let place = link.and_then(|link| Ok((link, huge_pages(spec, tools)?)));
        rounds.repeats = options.repeats.min(spec.rounds);
        let runs = rounds.run(
            [Turn::Floor].into_iter().chain(turns),
            |turn| match turn {
                Turn::Floor => format!("{}/floor", spec.name),
                Turn::Side(side) => format!("{}/{side}", spec.name),
            },
            |turn, _| {
                let (link, _) = place.as_ref().map_err(|why| Stop::Skip(why.clone()))?;
                let watch = Watch { link, before: options.before, after: options.after };
                match turn {
                    Turn::Floor => Ok(Came::Floor(rtt::floor(link, source)?)),
                    Turn::Side(side) => Ok(Came::Run(Box::new(run_side(spec, side, watch, ours)?))),
                }
            },
        );
        report::add_case(&mut document, options, spec, &sorted(runs));
    }
    let failures = rounds.failures;
    report::finish(&mut document, options, &failures);
    Outcome { document, failures }
}

/// Reserves the huge pages that a case needs for source and target, if it needs any.
///
/// # Errors
///
/// Returns the reason as text if this host does not have such pages.
fn huge_pages(spec: &CaseSpec, tools: &Tools) -> Result<Option<Pool>, String> {
    match spec.backing {
        Backing::Usual | Backing::Small => Ok(None),
        Backing::Thp => match host::transparent_huge_pages().as_str() {
            "always" | "madvise" => Ok(None),
            mode => Err(format!("the host's transparent huge pages are set to {mode}")),
        },
        Backing::Hugetlbfs => {
            let pages = pool::pages_for(spec.memory * 2);
            Pool::reserve(pool::POOL.as_ref(), pages, tools.root).map(Some)
        }
    }
}

/// Separates the floors from the sides.
fn sorted(runs: Vec<crate::rounds::SideRuns<Turn, Came>>) -> CaseRuns {
    let mut sorted = CaseRuns { floors: Vec::new(), sides: Vec::new() };
    for runs in runs {
        match runs.side {
            Turn::Floor => {
                let floor = |came| if let Some(Came::Floor(floor)) = came { Some(floor) } else { None };
                sorted.floors = runs.rounds.into_iter().map(floor).collect();
            }
            Turn::Side(side) => {
                let run = |came| if let Some(Came::Run(run)) = came { Some(*run) } else { None };
                let rounds = runs.rounds.into_iter().map(run).collect();
                sorted.sides.push(SideRuns { side, rounds, skipped: runs.skipped });
            }
        }
    }
    sorted
}

fn run_side(spec: &CaseSpec, side: Side, watch: Watch<'_>, ours: &mut dyn OurRunner) -> Result<Run, Stop> {
    // The memory of guests on huge pages is reserved in the pool already.
    if spec.backing != Backing::Hugetlbfs {
        enough_memory(spec.memory)?;
    }
    Ok(match side {
        Side::Ours(way) => ours.run(spec, way, watch)?,
        Side::Qemu { preempt } => qemu::postcopy(spec, preempt, watch)?,
    })
}

#[cfg(test)]
mod tests;
