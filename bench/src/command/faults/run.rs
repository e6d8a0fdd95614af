//! One fault at one phase of a migration between two processes with a loaded guest.

use super::link::{Harm, Link};
use super::plan::{End, Fault, Phase};
use super::{branch, disk, snapshot};
use crate::command::request::MigrateRequest;
use crate::command::side::{Folder, PATIENCE, Side, Start};
use crate::density::Budget;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

/// Peer timeout of both sides. Each step of the migration may take three times this long.
const PEER_TIMEOUT: &str = "1s";
/// Time for which a side is stopped. It is longer than every timeout that follows from
/// `PEER_TIMEOUT`.
pub(super) const STOPPED: Duration = Duration::from_millis(4500);
/// Time for which an outcome has to last before it counts.
const LASTS: Duration = Duration::from_millis(4000);
/// Bytes that a side under memory pressure may use beyond what it has. One pass needs more.
pub(super) const LEAST_MEMORY: u64 = 1 << 20;
/// Memory limit of a side in bytes before the pressure begins.
pub(super) const ALL_MEMORY: u64 = 1 << 30;
pub(super) const LOAD: &str = "uniform,ws=16M,data=40M,rate=20k,fill=random";
/// Load whose pages become smaller by compression and by deltas.
const COMPRESSIBLE_LOAD: &str = "uniform,ws=16M,data=40M,rate=20k,fill=text";

/// Combination of guest, mode, phase and fault that is run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) guest: &'static str,
    pub(super) mode: &'static str,
    pub(super) phase: Phase,
    pub(super) fault: Fault,
    /// Set if an arbiter (etcd) decides who owns the guest.
    pub(super) with_arbiter: bool,
    /// Set if pages are sent compressed and as deltas.
    pub(super) encoded: bool,
}

/// Outcome of a case, and the time from the fault until it was known.
pub(super) struct Ran {
    pub(super) end: End,
    pub(super) took: Duration,
    /// Set if the kernel killed a side because of its memory limit.
    pub(super) killed: bool,
}

/// Error of an operation that ended before the phase of the fault.
///
/// The fault was not injected yet. On a busy host a side can be silent for longer than the peer
/// timeout without any fault.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) phase: Phase,
    pub(super) status: Value,
}

impl std::fmt::Display for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the phase {} was not reached: {}", self.phase, self.status)
    }
}

impl std::error::Error for Early {}

/// Attempts of a case whose migration ends before its phase. The document records the number of
/// attempts.
const ATTEMPTS: u32 = 3;

impl Case {
    /// Returns the settings that both sides share.
    pub(super) fn start(self) -> Start<'static> {
        Start { guest: self.guest, memory: "64M", ..Start::default() }
    }

    /// Returns the limit of the bandwidth in bytes per second, at which the migration reaches the
    /// phase of the fault.
    fn bandwidth(self) -> u64 {
        match self.phase {
            _ if !self.encoded => 60_000_000,
            // The first pass is not over at the timeout. Later passes with deltas are so short that
            // no page may be missing at the switchover.
            Phase::Postcopy | Phase::Paused | Phase::Recovery => 6_000_000,
            _ => 20_000_000,
        }
    }

    /// Returns whether the guest is handed over inside this host.
    fn local(self) -> bool {
        self.mode == "local"
    }

    fn load(self) -> &'static str {
        if self.encoded { COMPRESSIBLE_LOAD } else { LOAD }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let arbiter = if self.with_arbiter { "+etcd" } else { "" };
        let codecs = if self.encoded { "+codecs" } else { "" };
        write!(f, "{}/{}{arbiter}{codecs}/{}/{}", self.guest, self.mode, self.phase, self.fault)
    }
}

/// Runs the case up to `ATTEMPTS` times, and returns the outcome and the number of attempts.
pub(super) fn run(case: Case, arbiter: Option<&str>) -> Result<(Ran, u32)> {
    let mut attempt = 1;
    loop {
        let ran = match case.mode {
            "file" => disk::run(case),
            "snapshot" => snapshot::run(case),
            "branch" => branch::run(case),
            _ => once(case, arbiter),
        };
        match ran {
            Err(error) if attempt < ATTEMPTS && error.is::<Early>() => {
                eprintln!("faults: retrying {case}: {error:#}");
                attempt += 1;
            }
            ended => return Ok((ended?, attempt)),
        }
    }
}

fn once(case: Case, arbiter: Option<&str>) -> Result<Ran> {
    let folder = Folder::new()?;
    let arbiter: Vec<String> =
        arbiter.into_iter().flat_map(|arbiter| ["--fence".into(), arbiter.into()]).collect();
    let with = |args: &[&str]| {
        [&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>()[..], &arbiter].concat()
    };
    let limit = |fault| (case.fault == fault).then(|| Budget::new(ALL_MEMORY)).transpose();
    let address = |name: &str| match case.local() {
        true => format!("unix:{}", folder.0.join(name).display()),
        false => "tcp:127.0.0.1:0".to_owned(),
    };
    let incoming = address("move");
    let start = Start {
        args: with(&["--incoming", &incoming, "--peer-timeout", PEER_TIMEOUT]),
        budget: limit(Fault::PressTarget)?,
        within: (case.fault == Fault::Clock).then(another_clock),
        ..case.start()
    };
    let mut target = Side::start(start, &folder.0, "target")?;
    let backing = if case.local() { "memfd" } else { "anonymous" };
    let start = Start {
        args: with(&["--workload", case.load(), "--memory-backing", backing]),
        budget: limit(Fault::PressSource)?,
        ..case.start()
    };
    let mut source = Side::start(start, &folder.0, "source")?;
    let link = Link::to(target.incoming()?.parse()?, &address("link").parse()?)?;
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
        End::Copied | End::Copy => bail!("a move leaves no copy"),
    }
    Ok(Ran { end, took, killed })
}

/// Returns a command that runs its further arguments with a monotonic clock that is a day ahead.
fn another_clock() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--time", "--monotonic", "86400", "--boottime", "86400", "--fork", "--kill-child"]);
    command
}

/// Starts the migration, waits until it reaches the phase of the fault, and holds it there.
fn reach(case: Case, link: &Link, source: &mut Side) -> Result<()> {
    link.hold_at(match case.phase {
        // The link is lost in the postcopy phase, so the migration must reach that first.
        Phase::Paused | Phase::Recovery => Phase::Postcopy,
        phase => phase,
    });
    source.command("migrate", serde_json::to_value(request(case, link)?)?)?;
    if !link.reached(PATIENCE) {
        bail!(Early { phase: case.phase, status: source.status().unwrap_or_default() });
    }
    if matches!(case.phase, Phase::Paused | Phase::Recovery) {
        link.harm(Harm::Cut, None);
        link.release();
        source.wait("the loss of the link", |status| status["progress"]["awaits_recover"] == true)?;
        if case.phase == Phase::Recovery {
            link.hold_at(Phase::Recovery);
            source.command("recover", json!({}))?;
            if !link.reached(PATIENCE) {
                bail!("the link was not taken up again: {}", source.status().unwrap_or_default());
            }
        }
    }
    Ok(())
}

fn request(case: Case, link: &Link) -> Result<MigrateRequest> {
    if case.local() {
        return Ok(MigrateRequest { local: true, peer_timeout_ms: 1000, ..MigrateRequest::to(&link.uri()) });
    }
    let mode = match case.mode {
        "precopy" => "precopy",
        "postcopy" => "postcopy",
        _ => "hybrid",
    };
    let paused = matches!(case.phase, Phase::Paused | Phase::Recovery);
    Ok(MigrateRequest {
        mode,
        codec: if case.encoded { "lz4" } else { "raw" },
        delta: if case.encoded { "on" } else { "off" },
        max_bandwidth: Some(case.bandwidth()),
        // With a downtime limit of 0 ms the passes go on until the timeout, because stopping always
        // takes some time, however little a guest writes on a busy host. Therefore later passes
        // exist, and the mode's own action on timeout follows.
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
        // The clock differs from the start.
        Fault::Clock => {}
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
        other => bail!("{other} has no effect on a move over a link"),
    }
    link.release();
    Ok(())
}

/// Waits until the guest's outcome is known, and checks that the guest never runs on both sides.
fn watch(case: Case, source: &mut Side, target: &mut Side) -> Result<End> {
    let (began, mut seen) = (Instant::now(), None);
    loop {
        let (_, _) = (source.starved()?, target.starved()?);
        let (here, there) = (source.status(), target.status());
        let runs =
            |status: &Option<Value>| status.as_ref().is_some_and(|status| status["vm"]["place"] == "running");
        if runs(&here) && runs(&there) && source.status().is_some_and(|now| runs(&Some(now))) {
            bail!("the guest runs on both sides: source {here:?}, target {there:?}");
        }
        let end = judge(case, (source, target), here.as_ref(), there.as_ref());
        // A momentary state may be a step of the migration. Only an outcome that lasts or is final
        // counts.
        let since = match (end, seen) {
            (Some(end), Some((before, since))) if before == end => since,
            _ => Instant::now(),
        };
        seen = end.map(|end| (end, since));
        match seen {
            Some((end @ (End::Moved | End::Stayed), _)) => return Ok(end),
            // A source that has reported the loss ends by itself.
            Some((End::Lost, _)) if !source.dead() => return Ok(End::Lost),
            Some((end, since)) if since.elapsed() > LASTS => return Ok(end),
            _ => {}
        }
        if began.elapsed() > PATIENCE {
            bail!("the outcome for the guest is still undecided: source {here:?}, target {there:?}");
        }
        let paused = here.as_ref().is_some_and(|status| status["progress"]["awaits_recover"] == true);
        if paused
            || (target.dead() && here.as_ref().is_some_and(|status| status["state"] == "postcopy-paused"))
        {
            // Acts as an operator would: gives the target up if it is known to be dead, and retries
            // otherwise.
            let arguments = if target.dead() { json!({ "take": false }) } else { json!({}) };
            let _ = source.command("recover", arguments);
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Returns the outcome that the status of both sides shows at this moment.
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
        // The arbiter says that the target owns the guest. The source reports nothing more while
        // that lasts.
        None if case.with_arbiter
            && target.dead()
            && here.is_some_and(|status| status["state"] == "unknown") =>
        {
            Some(End::Unknown)
        }
        // The source process ends after its report was read.
        _ if here.is_none() && case.fault != Fault::KillSource && all_there => Some(End::Moved),
        _ => None,
    }
}
