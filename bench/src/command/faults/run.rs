//! One fault at one moment: two processes, a loaded guest, and what became of it.

use super::link::{Harm, Link};
use super::plan::{End, Fault, Phase};
use crate::command::request::MigrateRequest;
use crate::command::side::{Folder, PATIENCE, Side, Start};
use crate::density::Budget;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long a side may be silent. Three times this is what a step may take.
const PEER_TIMEOUT: &str = "1s";
/// How long a side is stopped: longer than that.
const STOPPED: Duration = Duration::from_millis(4500);
/// How long a state has to last to be one.
const LASTS: Duration = Duration::from_millis(4000);
/// What a side is left with, besides what it has, when it is short of memory: less than a pass brings.
const LEAST_MEMORY: u64 = 1 << 20;
/// What it has before.
const ALL_MEMORY: u64 = 1 << 30;
pub(super) const LOAD: &str = "uniform,ws=16M,data=40M,rate=20k,fill=random";

/// What is to be done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) guest: &'static str,
    pub(super) mode: &'static str,
    pub(super) phase: Phase,
    pub(super) fault: Fault,
    /// Whether an etcd decides who owns the guest.
    pub(super) fenced: bool,
}

/// What became of the guest, and how long that took after the fault.
pub(super) struct Ran {
    pub(super) end: End,
    pub(super) took: Duration,
    /// The kernel killed a side for its memory.
    pub(super) killed: bool,
}

/// A migration that ended before its moment: nothing was done to it yet, but on a busy host a second of silence comes by itself.
#[derive(Debug)]
struct Early {
    phase: Phase,
    status: Value,
}

impl std::fmt::Display for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "it never came to {}: {}", self.phase, self.status)
    }
}

impl std::error::Error for Early {}

/// So often is such a one begun. What was begun again is counted and said.
const ATTEMPTS: u32 = 3;

impl Case {
    /// What both sides have of it.
    pub(super) fn start(self) -> Start<'static> {
        Start { guest: self.guest, memory: "64M", ..Start::default() }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fence = if self.fenced { "+etcd" } else { "" };
        write!(f, "{}/{}{fence}/{}/{}", self.guest, self.mode, self.phase, self.fault)
    }
}

/// Does the harm at its moment, and finds out what became of the guest; and in which attempt.
pub(super) fn run(case: Case, fence: Option<&str>) -> Result<(Ran, u32)> {
    let mut attempt = 1;
    loop {
        match once(case, fence) {
            Err(error) if attempt < ATTEMPTS && error.is::<Early>() => {
                eprintln!("faults: {case} once more: {error:#}");
                attempt += 1;
            }
            ended => return Ok((ended?, attempt)),
        }
    }
}

fn once(case: Case, fence: Option<&str>) -> Result<Ran> {
    let folder = Folder::new()?;
    let fence: Vec<String> = fence.into_iter().flat_map(|fence| ["--fence".into(), fence.into()]).collect();
    let with =
        |args: &[&str]| [&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>()[..], &fence].concat();
    let limit = |fault| (case.fault == fault).then(|| Budget::new(ALL_MEMORY)).transpose();
    let start = Start {
        args: with(&["--incoming", "tcp:127.0.0.1:0", "--peer-timeout", PEER_TIMEOUT]),
        budget: limit(Fault::PressTarget)?,
        other_clock: case.fault == Fault::Clock,
        ..case.start()
    };
    let mut target = Side::start(start, &folder.0, "target")?;
    let start =
        Start { args: with(&["--workload", LOAD]), budget: limit(Fault::PressSource)?, ..case.start() };
    let mut source = Side::start(start, &folder.0, "source")?;
    let link = Link::to(target.address()?)?;
    source.working()?;
    reach(case, &link, &mut source).with_context(|| format!("the target: {}", target.said()))?;
    let began = Instant::now();
    apply(case.fault, &link, &mut source, &mut target)?;
    let end = watch(case, &mut source, &mut target)
        .with_context(|| format!("source: {}; target: {}", source.said(), target.said()))?;
    let took = began.elapsed();
    let killed = source.starved()? || target.starved()?;
    match end {
        End::Moved => target.whole()?,
        End::Stayed => source.whole()?,
        End::Unknown | End::Lost | End::Died => {}
    }
    Ok(Ran { end, took, killed })
}

/// Has the guest migrate as far as the fault's moment, and holds it there.
fn reach(case: Case, link: &Link, source: &mut Side) -> Result<()> {
    link.hold_at(match case.phase {
        // First it has to come that far.
        Phase::Paused | Phase::Recovery => Phase::Postcopy,
        phase => phase,
    });
    source.say("migrate", serde_json::to_value(request(case, link)?)?)?;
    if !link.reached(PATIENCE) {
        bail!(Early { phase: case.phase, status: source.status().unwrap_or_default() });
    }
    if matches!(case.phase, Phase::Paused | Phase::Recovery) {
        link.harm(Harm::Cut, None);
        link.release();
        source.wait("the loss of the link", |status| status["progress"]["awaits_recover"] == true)?;
        if case.phase == Phase::Recovery {
            link.hold_at(Phase::Recovery);
            source.say("recover", json!({}))?;
            if !link.reached(PATIENCE) {
                bail!("the link was not taken up again: {}", source.status().unwrap_or_default());
            }
        }
    }
    Ok(())
}

fn request(case: Case, link: &Link) -> Result<MigrateRequest> {
    let mode = match case.mode {
        "precopy" => "precopy",
        "postcopy" => "postcopy",
        _ => "hybrid",
    };
    let paused = matches!(case.phase, Phase::Paused | Phase::Recovery);
    Ok(MigrateRequest {
        mode,
        max_bandwidth: Some(60_000_000),
        // Passes go on until the clock ends them, so that there are later ones, and what follows is the mode's own end: stopping takes
        // longer than nothing, however little a guest writes on a busy host.
        downtime_limit_ms: 0,
        timeout_ms: Some(2500),
        on_timeout: if case.mode == "hybrid" { "postcopy" } else { "switch" },
        peer_timeout_ms: 1000,
        reconnect_for_ms: if paused { 0 } else { 20_000 },
        ..MigrateRequest::to(&link.uri())
    })
}

fn apply(fault: Fault, link: &Link, source: &mut Side, target: &mut Side) -> Result<()> {
    match fault {
        // From the start.
        Fault::Clock | Fault::SlowDisk => {}
        Fault::PressSource | Fault::PressTarget => {
            let side = if fault == Fault::PressSource { source } else { target };
            side.budget().context("no limit of memory")?.squeeze(LEAST_MEMORY)?;
        }
        Fault::KillSource => source.kill()?,
        Fault::KillTarget => target.kill()?,
        Fault::StopSource | Fault::StopTarget => {
            let side = if fault == Fault::StopSource { source } else { target };
            side.signal(Signal::STOP)?;
            link.release();
            std::thread::sleep(STOPPED);
            side.signal(Signal::CONT)?;
        }
        Fault::CutAll => link.harm(Harm::Cut, None),
        Fault::Cut(channel) => link.harm(Harm::Cut, Some(channel)),
        Fault::Stall(channel) => link.harm(Harm::Stall, Some(channel)),
        Fault::Corrupt(channel) => link.harm(Harm::Corrupt, Some(channel)),
        Fault::Truncate(channel) => link.harm(Harm::Truncate, Some(channel)),
    }
    link.release();
    Ok(())
}

/// Waits until it is known what becomes of the guest. It never runs on both sides.
fn watch(case: Case, source: &mut Side, target: &mut Side) -> Result<End> {
    let (began, mut seen) = (Instant::now(), None);
    loop {
        let (_, _) = (source.starved()?, target.starved()?);
        let (here, there) = (source.status(), target.status());
        let runs =
            |status: &Option<Value>| status.as_ref().is_some_and(|status| status["vm"]["place"] == "running");
        if runs(&here) && runs(&there) && source.status().is_some_and(|now| runs(&Some(now))) {
            bail!("TWO RUNNERS: source {here:?}, target {there:?}");
        }
        let end = judge(case, (source, target), here.as_ref(), there.as_ref());
        // What a moment shows may be a step on the way; what lasts, or what is final by itself, counts.
        let since = match (end, seen) {
            (Some(end), Some((before, since))) if before == end => since,
            _ => Instant::now(),
        };
        seen = end.map(|end| (end, since));
        match seen {
            Some((end @ (End::Moved | End::Stayed), _)) => return Ok(end),
            // A source that has said so ends.
            Some((End::Lost, _)) if !source.dead() => return Ok(End::Lost),
            Some((end, since)) if since.elapsed() > LASTS => return Ok(end),
            _ => {}
        }
        if began.elapsed() > PATIENCE {
            bail!("nobody knows what became of the guest: source {here:?}, target {there:?}");
        }
        let paused = here.as_ref().is_some_and(|status| status["progress"]["awaits_recover"] == true);
        if paused
            || (target.dead() && here.as_ref().is_some_and(|status| status["state"] == "postcopy-paused"))
        {
            // As an operator does: who knows that the target is gone gives it up, everybody else tries again.
            let arguments = if target.dead() { json!({ "take": false }) } else { json!({}) };
            let _ = source.say("recover", arguments);
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// What the two sides' words come to at this moment.
fn judge(
    case: Case,
    (source, target): (&mut Side, &mut Side),
    here: Option<&Value>,
    there: Option<&Value>,
) -> Option<End> {
    let target_has_it = there.is_some_and(|status| status["vm"]["place"] == "running");
    let all_there = target_has_it
        && there.is_some_and(|status| status["state"].is_null() || status["state"] == "completed");
    if source.dead() {
        return Some(match (target_has_it, all_there) {
            (true, true) => End::Moved,
            (true, false) => End::Lost,
            _ => End::Died,
        });
    }
    let outcome = here.and_then(|status| status["outcome"].as_str());
    match outcome {
        Some("completed") | None if here.is_none() && all_there => Some(End::Moved),
        Some("completed") => {
            (all_there || target.dead()).then_some(if target.dead() { End::Lost } else { End::Moved })
        }
        Some("failed" | "cancelled") => {
            here.is_some_and(|status| status["vm"]["place"] == "running").then_some(End::Stayed)
        }
        Some("unknown") => Some(End::Unknown),
        Some("lost") => Some(End::Lost),
        // The fence says that the guest is the target's, and nothing more for as long as it lasts.
        None if case.fenced && target.dead() && here.is_some_and(|status| status["state"] == "unknown") => {
            Some(End::Unknown)
        }
        // A source that ends when its report was read.
        _ if here.is_none() && case.fault != Fault::KillSource && all_there => Some(End::Moved),
        _ => None,
    }
}
