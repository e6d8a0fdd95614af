//! `vmferry bench`: our side of the comparisons.

use crate::api::MigrateRequest;
use crate::args::{AutoConvergeArg, BenchArgs, BenchName, GuestKind};
use crate::demo::{Folder, Runner, Setup};
use crate::{Status, guest, output};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_bench::cpu::CpuMeter;
use vmferry_bench::floor::ReceiverCommand;
use vmferry_bench::json::Document;
use vmferry_bench::migrate::{CaseSpec, Options, OurError, OurRunner, Outcome};
use vmferry_bench::result::MigrationResult;
use vmferry_bench::warm::Warm;
use vmferry_bench::{rtt, scan};

/// How long the guest is watched on the target.
const AFTER: Duration = Duration::from_millis(1000);

pub(crate) fn bench(args: &BenchArgs) -> Result<Status> {
    let mut out = args.json.as_deref().map(output::open).transpose()?;
    let (mut documents, mut failures) = (Vec::new(), Vec::new());
    if matches!(args.name, BenchName::Scan | BenchName::All) {
        documents.push(scan(args.quick));
    }
    if matches!(args.name, BenchName::Rtt | BenchName::All) {
        let outcome = rtt(args)?;
        documents.push(outcome.document);
        failures.extend(outcome.failures);
    }
    if matches!(args.name, BenchName::Migrate | BenchName::All) {
        let outcome = migrate(args)?;
        documents.push(outcome.document);
        failures.extend(outcome.failures);
    }
    for document in &documents {
        if let Some(out) = &mut out {
            document.write(out)?;
        }
        if args.json.as_deref() != Some(std::path::Path::new("-")) {
            let table = match document.bench.as_str() {
                "scan" => vmferry_bench::scan::table(document),
                "rtt" => vmferry_bench::rtt::table(document),
                _ => vmferry_bench::migrate::table(document),
            };
            println!("{table}");
        }
    }
    for failure in &failures {
        eprintln!("vmferry: {failure}");
    }
    Ok(if failures.is_empty() { Status::Done } else { Status::Failed })
}

fn scan(quick: bool) -> Document {
    let options = if quick { scan::Options::quick() } else { scan::Options::full() };
    scan::run(&options, &mut |what| eprintln!("bench scan: {what}"))
}

fn rtt(args: &BenchArgs) -> Result<Outcome> {
    let mut options = if args.quick { rtt::Options::quick() } else { rtt::Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let source = rtt::SourceCommand::this_executable()?;
    Ok(rtt::run(&options, &source, &mut |what| eprintln!("bench rtt: {what}")))
}

fn migrate(args: &BenchArgs) -> Result<Outcome> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let receiver = ReceiverCommand::this_executable()?;
    let mut progress = |what: &str| eprintln!("bench migrate: {what}");
    Ok(vmferry_bench::migrate::run(&options, &mut Ours, &receiver, &mut progress))
}

/// The floor's receiving process.
pub(crate) fn floor_receiver(arguments: &[String]) -> Result<Status> {
    vmferry_bench::floor::receiver_main(arguments)?;
    Ok(Status::Done)
}

/// The process that sends pages in `bench rtt`.
pub(crate) fn rtt_source(arguments: &[String]) -> Result<Status> {
    rtt::source_main(arguments)?;
    Ok(Status::Done)
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &CaseSpec, channels: u32) -> Result<MigrationResult, OurError> {
        if let Some(why) = guest::no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        move_once(spec, channels).map_err(|error| OurError::Failed(error.into()))
    }
}

fn move_once(spec: &CaseSpec, channels: u32) -> Result<MigrationResult> {
    let stop = AtomicBool::new(false);
    let setup = Setup {
        guest: GuestKind::Kvm,
        memory: spec.memory,
        cpus: spec.vcpus,
        workload: spec.workload.clone(),
        dirty_ring: None,
    };
    let folder = Folder::new()?;
    let mut target = Runner::start(&setup, folder.path(), "target", true)?;
    let uri = target.incoming(&stop)?;
    let mut source = Runner::start(&setup, folder.path(), "source", false)?;
    source.running(&stop)?;
    let warm = Warm::hold(spec.memory);
    std::thread::sleep(spec.settle);
    let request = MigrateRequest {
        uri,
        tracker: None,
        reaper: None,
        channels: u16::try_from(channels)?,
        downtime_limit_ms: u64::try_from(spec.downtime_limit.as_millis())?,
        max_bandwidth: None,
        timeout_ms: Some(120_000),
        switch_on_timeout: false,
        auto_converge: AutoConvergeArg::Off,
        verify: false,
        insecure: false,
        peer_timeout_ms: 10_000,
    };
    let is_vcpu = |name: &str| name.starts_with("vcpu");
    let meters = (CpuMeter::start(source.pid(), is_vcpu)?, CpuMeter::start(target.pid(), is_vcpu)?);
    drop(warm);
    source.client.call("migrate", serde_json::to_value(request)?)?;
    let report = quietly(&mut source)?;
    let (cpu_source, cpu_destination) = (meters.0.used()?, meters.1.used()?);
    let arrived = target.status()?["vm"]["guest"].clone();
    std::thread::sleep(AFTER);
    let later = target.status()?["vm"]["guest"].clone();
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
        cpu_source,
        cpu_destination,
        writes_before: busy(&report["guest"]["before_writes_per_s"]),
        writes_during: busy(&report["guest"]["during_writes_per_s"]),
        writes_after: after(&arrived, &later),
        stall_max: later["stall_max_us"].as_u64().map(Duration::from_micros),
    })
}

fn after(arrived: &Value, later: &Value) -> Option<f64> {
    let difference = |name: &str| Some(later[name].as_f64()? - arrived[name].as_f64()?);
    let (writes, us) = (difference("writes")?, difference("t_us")?);
    (writes > 0.0 && us > 0.0).then(|| writes * 1e6 / us)
}

/// Waits for the end of a migration without showing it.
fn quietly(source: &mut Runner) -> Result<Value> {
    let deadline = Instant::now() + Duration::from_secs(130);
    while Instant::now() < deadline {
        let status = source.client.call("status", json!({}))?;
        if status["outcome"].is_null() {
            // Rarely enough that asking costs the migration nothing.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        if status["outcome"] != "completed" {
            bail!("the migration ended as {}: {}", status["outcome"], status["error"]);
        }
        return Ok(status);
    }
    bail!("the migration did not end in time")
}
