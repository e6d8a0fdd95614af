//! vmferry's side of `vmferry-bench postcopy`: a guest whose vCPU stalls are observed while its
//! pages arrive.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::{Finished, no_kvm, program};
use crate::link::Link;
use crate::postcopy::{
    self, Backing, CaseSpec, Observation, Options, OurError, OurRunner, Outcome, POLL, Run, SpeedBack, Vcpu,
    Watch, Way,
};
use crate::result::MigrationResult;
use crate::rtt::SourceCommand;
use crate::stalls::Channels;
use crate::warm::Warm;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Environment, Pair, Role, Runner, Setup};

/// Time after which a migration counts as stuck.
const LIMIT: Duration = Duration::from_secs(120);
/// Longest time that the guest may take to report from the target.
const REPORT: Duration = Duration::from_secs(10);
/// Interval of status requests during the switchover. The start of the guest on the target is known
/// no more exactly than this.
const SWITCH_POLL: Duration = Duration::from_millis(2);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("postcopy: {what}");
    let source = SourceCommand::this_executable()?;
    let Outcome { document, failures } = postcopy::run(&options, &mut Ours, &source, &mut progress);
    let (table, page) = (postcopy::table(&document), postcopy::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &CaseSpec, way: Way, watch: Watch<'_>) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        move_once(spec, way, watch).map_err(|error| OurError::Failed(error.into()))
    }
}

/// Ends of a link whose processes have guest memory of one kind.
#[derive(Debug)]
struct Backed<'a> {
    link: &'a Link,
    backing: Backing,
}

impl Environment for Backed<'_> {
    fn address(&self, role: Role) -> Ipv4Addr {
        Environment::address(self.link, role)
    }

    fn options(&self, _: Role) -> Vec<OsString> {
        self.backing.options().iter().map(OsString::from).collect()
    }

    fn enter(&self, role: Role, command: &mut Command) -> io::Result<()> {
        Environment::enter(self.link, role, command)
    }
}

/// Stall reports of the guest at one side, on the clock of the command.
pub(super) struct Stalls {
    zero: Instant,
    pub(super) observed: Vec<Observation>,
}

impl Stalls {
    /// Creates an empty list of reports, whose times count from `zero`.
    pub(super) fn since(zero: Instant) -> Self {
        Self { zero, observed: Vec::new() }
    }

    /// Observes a guest with `memory` bytes of memory for the time `span` before its migration, and
    /// requests a report once per `interval`.
    pub(super) fn before(
        source: &mut Runner,
        memory: u64,
        (span, interval): (Duration, Duration),
    ) -> Result<Self> {
        let warm = Warm::hold(memory);
        let mut stalls = Self::since(Instant::now());
        while stalls.zero.elapsed() < span {
            stalls.listen(source)?;
            std::thread::sleep(interval);
        }
        drop(warm);
        stalls.listen(source)?;
        Ok(stalls)
    }

    /// Makes all times count from `start`.
    pub(super) fn count_from(&mut self, start: Instant) {
        let later = (start - self.zero).as_secs_f64();
        self.observed.iter_mut().for_each(|observed| observed.at -= later);
        self.zero = start;
    }

    /// Requests one stall report. Returns `None` if the guest cannot answer because it is being
    /// stopped or moved.
    pub(super) fn listen(&mut self, at: &mut Runner) -> Result<Option<&Observation>> {
        let Ok(mut answer) = at.client.call("stalls", json!({})) else { return Ok(None) };
        if answer["corrupt"] != 0 {
            bail!("the guest found {} damaged pages", answer["corrupt"]);
        }
        let vcpus: Vec<Vcpu> =
            serde_json::from_value(answer["vcpus"].take()).context("cannot parse the guest's stalls")?;
        let observed = Observation { at: since(self.zero), vcpus };
        self.observed.push(observed);
        Ok(self.observed.last())
    }
}

fn since(zero: Instant) -> f64 {
    zero.elapsed().as_secs_f64()
}

fn move_once(spec: &CaseSpec, way: Way, watch: Watch<'_>) -> Result<Run> {
    let stop = AtomicBool::new(false);
    let setup = Setup {
        cpus: spec.vcpus,
        // QEMU has no balloon in this bench.
        balloon: false,
        environment: &Backed { link: watch.link, backing: spec.backing },
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload())
    };
    let mut pair = Pair::start(&setup, &stop)?;
    let mut here = Stalls::before(&mut pair.source, spec.memory, (watch.before, POLL))?;
    let source_huge = huge(pair.source.pid());
    let start = Instant::now();
    here.count_from(start);
    pair.migrate(&request(way, &pair.uri))?;
    let mut there = Stalls::since(start);
    let (report, switched, end) = follow(&mut pair.source, &mut pair.target, (&mut here, &mut there), start)?;
    watch_on(&mut pair.target, &mut there, SpeedBack::new(&here.observed), end, watch.after)?;
    let arrived = pair.target.status()?;
    Ok(Run {
        own: own(&report).or_else(|| own(&arrived["vm"]["received"])).or_else(|| own(&arrived)),
        result: result(&report)?,
        source: here.observed,
        target: there.observed,
        switched,
        end,
        huge: [source_huge, huge(pair.target.pid())],
    })
}

/// Returns the bytes of huge pages that a process has mapped. `None` if the kernel does not show
/// them.
fn huge(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let kib = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let counts = ["AnonHugePages", "Shared_Hugetlb", "Private_Hugetlb"].contains(&name);
        value.trim().strip_suffix(" kB").filter(|_| counts)?.parse::<u64>().ok()
    };
    Some(rollup.lines().filter_map(kib).sum::<u64>() << 10)
}

/// Observes the guest until the source reports the end of the migration.
///
/// Returns the report, the time at which the guest ran on the target, and the time of the end, in
/// seconds since `start`.
fn follow(
    source: &mut Runner,
    target: &mut Runner,
    (here, there): (&mut Stalls, &mut Stalls),
    start: Instant,
) -> Result<(Value, f64, f64)> {
    let mut switched = None;
    loop {
        let status = source.status()?;
        let outcome = &status["outcome"];
        if outcome == "completed" {
            return Ok((status, switched.unwrap_or_else(|| since(start)), since(start)));
        }
        if !outcome.is_null() {
            bail!("the migration ended as {outcome}: {}", status["error"]);
        }
        if start.elapsed() > LIMIT {
            bail!("the migration did not end within {LIMIT:?}");
        }
        if status["state"] == "postcopy" {
            switched.get_or_insert_with(|| since(start));
            there.listen(target)?;
            std::thread::sleep(POLL);
        } else {
            here.listen(source)?;
            std::thread::sleep(SWITCH_POLL);
        }
    }
}

/// Observes the guest on the target until it is as fast as before, or until `after` has passed
/// since `end`.
fn watch_on(
    target: &mut Runner,
    there: &mut Stalls,
    mut back: SpeedBack,
    end: f64,
    after: Duration,
) -> Result<()> {
    // At least one report of each vCPU after the end is needed.
    let (least, most) = (end + 2.0 * POLL.as_secs_f64(), end + after.as_secs_f64());
    loop {
        let zero = there.zero;
        if let Some(observed) = there.listen(target)? {
            let done = back.is_back(observed);
            if observed.at > least && (done || observed.at > most) {
                return Ok(());
            }
        }
        if since(zero) > most + REPORT.as_secs_f64() {
            bail!("the guest did not report from the target within {REPORT:?}");
        }
        std::thread::sleep(POLL);
    }
}

/// Returns the request for a way. The baselines have one channel of each kind. `Way::Ours` has the
/// defaults of `migrate`.
fn request(way: Way, uri: &str) -> MigrateRequest {
    let usual = MigrateRequest { mode: "postcopy", insecure: true, ..MigrateRequest::to(uri) };
    let urgent = match way {
        Way::Shared => "shared",
        Way::Interleaved => "interleaved",
        Way::Dedicated => "dedicated",
        Way::Ours => return usual,
    };
    MigrateRequest { urgent, pace: "off", channels: Channels::Count(1), urgent_channels: 1, ..usual }
}

/// Returns the target's figures of its page faults, wherever the status has them.
fn own(status: &Value) -> Option<postcopy::Own> {
    let postcopy = status.get("postcopy").filter(|postcopy| postcopy["faults"].is_number())?;
    serde_json::from_value(postcopy.clone()).ok()
}

pub(super) fn result(report: &Value) -> Result<MigrationResult> {
    let time = |value: &Value| value.as_f64().map(|ms| Duration::from_secs_f64(ms / 1e3));
    Ok(MigrationResult {
        total: time(&report["total_ms"]).context("no total time")?,
        downtime: time(&report["downtime_ms"]).context("no downtime")?,
        data_bytes: report["bytes"]["raw_pages"].as_u64().unwrap_or(0) * 4096,
        wire_bytes: report["bytes"]["wire"].as_u64(),
        ..MigrationResult::default()
    })
}
