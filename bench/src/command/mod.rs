//! Command `vmferry-bench`: the selection of benches, and vmferry's side of each bench.

mod arbiter;
mod args;
mod branch;
mod codec;
mod density;
mod environments;
mod faults;
mod free_page;
mod hop;
mod limits;
mod order;
mod plan;
mod postcopy;
mod program;
mod reaper;
mod record;
mod request;
mod sample;
mod scale;
mod side;
mod snapshot;
mod soak;
mod stalls;
mod upgrade;

use crate::cpu::CpuMeter;
use crate::floor::{RECEIVER_SUBCOMMAND, ReceiverCommand, receiver_main};
use crate::footprint::Footprint;
use crate::migrate::{CaseSpec, ColdOptions, Options, OurError, OurRunner, Outcome};
use crate::result::MigrationResult;
use crate::rtt::SOURCE_SUBCOMMAND;
use crate::stalls::Channels;
use crate::warm::Warm;
use crate::{rounds, rtt, scan};
use anyhow::{Context, Result, bail};
use args::{BenchArgs, BenchName};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use environments::Certificates;
use request::MigrateRequest;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Environment, Pair, Role, Runner, Setup};
use vmferry_report::json::Document;

/// Time for which the guest is observed on the target.
const AFTER: Duration = Duration::from_millis(1000);

/// Result of a bench.
struct Finished {
    document: Document,
    table: String,
    /// Page with charts, if the bench draws one.
    page: Option<String>,
    failures: Vec<String>,
}

/// Runs the command. Two subcommands are for processes that benches start from this executable.
pub fn main() -> ExitCode {
    let first = std::env::args_os().nth(1);
    let rest = || std::env::args().skip(2).collect::<Vec<String>>();
    let result = match first.as_deref().and_then(OsStr::to_str) {
        Some(RECEIVER_SUBCOMMAND) => receiver_main(&rest()).map_err(Into::into),
        Some(SOURCE_SUBCOMMAND) => rtt::source_main(&rest()).map_err(Into::into),
        _ => bench(&BenchArgs::parse()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmferry-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the benches that `args` name, and writes their results. Wrong usage ends the process with
/// status 2.
///
/// # Errors
///
/// Fails if a bench cannot run, or if a run of a bench failed.
fn bench(args: &BenchArgs) -> Result<()> {
    // The heap is set up as in the command `vmferry`, because the guests of `soak` and `free-page`
    // run in this process.
    vmferry_sys::share_one_heap();
    refuse_conflicts(args);
    if let Some(path) = &args.vmferry {
        program::name(path);
    }
    // The files are opened before the first bench, so that a wrong path does not cost the results.
    let mut out = args.json.as_deref().map(open).transpose()?;
    let mut html = args.html.as_deref().map(open).transpose()?;
    // These benches have no rounds of runs, so a signal ends them as it ends any process.
    let at_once = |name| {
        matches!(
            name,
            BenchName::Scan | BenchName::Faults | BenchName::Soak | BenchName::Limits | BenchName::Fence
        )
    };
    if !at_once(args.name) {
        watch_signals()?;
    }
    let mut failures = 0;
    for bench in wanted(args.name) {
        if rounds::ends() {
            break;
        }
        let finished = bench(args)?;
        if let Some(out) = &mut out {
            finished.document.write(out)?;
        }
        if let (Some(html), Some(page)) = (&mut html, &finished.page) {
            html.write_all(page.as_bytes())?;
        }
        if args.json.as_deref() != Some(Path::new("-")) {
            writeln!(std::io::stdout(), "{}", finished.table).context("cannot write the table")?;
        }
        for failure in &finished.failures {
            eprintln!("vmferry-bench: {failure}");
        }
        failures += finished.failures.len();
    }
    match failures {
        0 if rounds::ends() => bail!("ended by a signal: the results lack runs"),
        0 => Ok(()),
        1 => bail!("1 failure, see above"),
        count => bail!("{count} failures, see above"),
    }
}

/// Ends the process with status 2 if an option does not belong to the bench.
fn refuse_conflicts(args: &BenchArgs) {
    let draws = |name| {
        matches!(
            name,
            BenchName::Reaper
                | BenchName::FreePage
                | BenchName::Density
                | BenchName::Postcopy
                | BenchName::Stalls
                | BenchName::Scale
                | BenchName::Codec
                | BenchName::Snapshot
                | BenchName::Branch
                | BenchName::Upgrade
        )
    };
    if args.html.is_some() && !draws(args.name) && args.name != BenchName::All {
        let why = "scan, migrate, rtt, plan, faults, soak, limits and fence draw no page; omit --html";
        BenchArgs::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    if args.traces && args.name != BenchName::Reaper {
        let why = "--traces is an option of the bench reaper; omit it, or run reaper";
        BenchArgs::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    if args.cold && args.name != BenchName::Migrate {
        let why = "--cold is an option of the bench migrate; omit it, or run migrate";
        BenchArgs::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    if args.record.is_some() && args.name != BenchName::Scan {
        let why = "only scan replays recorded bitmaps; omit --record";
        BenchArgs::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
}

/// Lets the first SIGINT or SIGTERM end the bench after the current run, with its results, and the
/// second end it at once.
fn watch_signals() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot catch signals")?;
    let watch = move || {
        for signal in &mut signals {
            if rounds::ends() {
                std::process::exit(128 + signal);
            }
            rounds::end();
            eprintln!(
                "vmferry-bench: ends after this run and keeps its results; a second signal ends it at once"
            );
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).context("cannot start a thread")?;
    Ok(())
}

/// Function that runs one bench.
type Bench = fn(&BenchArgs) -> Result<Finished>;

fn wanted(name: BenchName) -> &'static [Bench] {
    match name {
        BenchName::Scan => &[scan],
        BenchName::Migrate => &[migrate],
        BenchName::Reaper => &[reaper::bench],
        BenchName::FreePage => &[free_page::bench],
        BenchName::Density => &[density::bench],
        BenchName::Postcopy => &[postcopy::bench],
        BenchName::Stalls => &[stalls::bench],
        BenchName::Scale => &[scale::bench],
        BenchName::Codec => &[codec::bench],
        BenchName::Snapshot => &[snapshot::bench],
        BenchName::Branch => &[branch::bench],
        BenchName::Rtt => &[rtt],
        BenchName::Plan => &[plan::bench],
        BenchName::Faults => &[faults::bench],
        BenchName::Soak => &[soak::bench],
        BenchName::Upgrade => &[upgrade::bench],
        BenchName::Limits => &[limits::bench],
        BenchName::Fence => &[arbiter::bench],
        BenchName::All => &[
            scan,
            rtt,
            codec::bench,
            migrate,
            stalls::bench,
            plan::bench,
            free_page::bench,
            density::bench,
            branch::bench,
            reaper::bench,
            postcopy::bench,
            scale::bench,
            snapshot::bench,
        ],
    }
}

/// Opens a file for results, or standard output for `-`.
fn open(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdout()));
    }
    Ok(Box::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?))
}

/// Returns the reason why this host cannot run a KVM guest, or `None` if it can.
fn no_kvm() -> Option<String> {
    vmferry_vmm::open_kvm().err().map(|error| error.to_string())
}

fn scan(args: &BenchArgs) -> Result<Finished> {
    let options = if args.quick { scan::Options::quick() } else { scan::Options::full() };
    let mut progress = |what: &str| eprintln!("scan: {what}");
    let document = match &args.record {
        Some(path) => scan::replay(&options, &record::to_file(path, &mut progress)?, &mut progress),
        None => scan::run(&options, &mut progress),
    };
    Ok(Finished { table: scan::table(&document), document, page: None, failures: Vec::new() })
}

fn rtt(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { rtt::Options::quick() } else { rtt::Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let source = rtt::SourceCommand::this_executable()?;
    let Outcome { document, failures } = rtt::run(&options, &source, &mut |what| eprintln!("rtt: {what}"));
    Ok(Finished { table: rtt::table(&document), document, page: None, failures })
}

fn migrate(args: &BenchArgs) -> Result<Finished> {
    if args.cold {
        return migrate_cold(args);
    }
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let receiver = ReceiverCommand::this_executable()?;
    let mut progress = |what: &str| eprintln!("migrate: {what}");
    let Outcome { document, failures } = crate::migrate::run(&options, &mut Ours, &receiver, &mut progress);
    Ok(Finished { table: crate::migrate::table(&document), document, page: None, failures })
}

fn migrate_cold(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { ColdOptions::quick() } else { ColdOptions::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("migrate: {what}");
    let Outcome { document, failures } = crate::migrate::run_cold(&options, &mut Ours, &mut progress);
    Ok(Finished { table: crate::migrate::table(&document), document, page: None, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &CaseSpec, channels: u32, encrypted: bool) -> Result<MigrationResult, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        move_once(spec, channels, encrypted).map_err(|error| OurError::Failed(error.into()))
    }
}

fn move_once(spec: &CaseSpec, channels: u32, encrypted: bool) -> Result<MigrationResult> {
    let stop = AtomicBool::new(false);
    let certificates = encrypted.then(Certificates::new).transpose()?;
    let target = TargetOptions::of(spec);
    let setup = Setup {
        cpus: spec.vcpus,
        // QEMU has no balloon in this bench.
        balloon: false,
        environment: certificates.as_ref().map_or(&target as &dyn Environment, |own| own),
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload.clone())
    };
    let mut pair = Pair::start(&setup, &stop)?;
    let warm = (!spec.given_back).then(|| Warm::hold(spec.memory));
    std::thread::sleep(spec.warm_up);
    let request = request(spec, Channels::Count(u16::try_from(channels)?), &pair.uri)?;
    let meters = meters(&pair)?;
    drop(warm);
    pair.migrate(&request)?;
    let report = quietly(&mut pair.source)?;
    let (cpu_source, cpu_destination) = (meters[0].used()?, meters[1].used()?);
    let arrived = pair.target.status()?["vm"]["guest"].clone();
    let resident = Footprint::of(pair.target.pid(), spec.memory).map(|footprint| footprint.guest.resident);
    std::thread::sleep(AFTER);
    let later = pair.target.status()?["vm"]["guest"].clone();
    if later["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the move: {later}");
    }
    let number = |value: &Value| value.as_f64();
    let time = |value: &Value| number(value).map(|ms| Duration::from_secs_f64(ms / 1e3));
    let busy = |value: &Value| number(value).filter(|speed| *speed > 0.0);
    Ok(MigrationResult {
        total: time(&report["total_ms"]).context("no total time")?,
        downtime: time(&report["downtime_ms"]).context("no downtime")?,
        data_bytes: report["bytes"]["raw_pages"].as_u64().context("no count of pages")? * 4096,
        wire_bytes: report["bytes"]["wire"].as_u64(),
        passes: report["passes"].as_array().map(|passes| passes.len() as u64),
        delta_pages: None,
        compressed_pages: None,
        cpu_source,
        cpu_destination,
        writes_before: busy(&report["guest"]["before_writes_per_s"]),
        writes_during: busy(&report["guest"]["during_writes_per_s"]),
        writes_after: after(&arrived, &later),
        stall_max: later["stall_max_us"].as_u64().map(Duration::from_micros),
        target_resident: resident.ok(),
    })
}

/// Options of the target process, which concern its memory.
#[derive(Debug)]
struct TargetOptions(Vec<&'static str>);

impl TargetOptions {
    fn of(spec: &CaseSpec) -> Self {
        let prealloc = spec.target.prealloc().map(|value| ["--prealloc", value]);
        let small = spec.small_pages.then_some(["--huge-pages", "false"]);
        Self(prealloc.into_iter().chain(small).flatten().collect())
    }
}

impl Environment for TargetOptions {
    fn options(&self, role: Role) -> Vec<OsString> {
        let own = if role == Role::Target { &*self.0 } else { &[] };
        own.iter().map(OsString::from).collect()
    }
}

fn after(arrived: &Value, later: &Value) -> Option<f64> {
    let difference = |name: &str| Some(later[name].as_f64()? - arrived[name].as_f64()?);
    let (writes, us) = (difference("writes")?, difference("t_us")?);
    (writes > 0.0 && us > 0.0).then(|| writes * 1e6 / us)
}

/// Returns the request to migrate the guest of `spec` by precopy.
fn request(spec: &CaseSpec, channels: Channels, uri: &str) -> Result<MigrateRequest> {
    Ok(MigrateRequest {
        channels,
        downtime_limit_ms: u64::try_from(spec.downtime_limit.as_millis())?,
        timeout_ms: Some(120_000),
        ..MigrateRequest::to(uri)
    })
}

/// Starts to measure the processor time of source and target.
fn meters(pair: &Pair) -> Result<[CpuMeter; 2]> {
    let meter = |runner: &Runner| CpuMeter::start(runner.pid(), |name| name.starts_with("vcpu"));
    Ok([meter(&pair.source)?, meter(&pair.target)?])
}

/// Waits for the end of a migration without progress output, and returns its report.
fn quietly(source: &mut Runner) -> Result<Value> {
    // Polled so rarely that the requests cost the migration nothing.
    ended(source, Duration::from_millis(20), |_| Ok(()))
}

/// Waits for the end of a migration, and returns its report.
///
/// Requests the status once per `interval`, and calls `also` each time that the migration is still
/// running.
fn ended(
    source: &mut Runner,
    interval: Duration,
    mut also: impl FnMut(&mut Runner) -> Result<()>,
) -> Result<Value> {
    let deadline = Instant::now() + Duration::from_secs(130);
    while Instant::now() < deadline {
        let status = source.client.call("status", json!({}))?;
        if status["outcome"].is_null() {
            also(source)?;
            std::thread::sleep(interval);
            continue;
        }
        if status["outcome"] != "completed" {
            bail!("the migration ended as {}: {}", status["outcome"], status["error"]);
        }
        return Ok(status);
    }
    bail!("the migration did not end in time")
}
