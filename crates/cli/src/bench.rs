//! `vmferry bench`: our side of the comparisons.

mod reaper;

use crate::api::MigrateRequest;
use crate::args::{BenchArgs, BenchName, GuestKind};
use crate::demo::{Folder, Runner, Setup};
use crate::{Status, guest, output};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_bench::cpu::CpuMeter;
use vmferry_bench::floor::ReceiverCommand;
use vmferry_bench::migrate::{CaseSpec, Options, OurError, OurRunner};
use vmferry_bench::result::MigrationResult;
use vmferry_bench::warm::Warm;

/// How long the guest is watched on the target.
const AFTER: Duration = Duration::from_millis(1000);

pub(crate) fn bench(args: &BenchArgs) -> Result<Status> {
    if args.name == BenchName::Reaper {
        return reaper::bench(args);
    }
    if args.html.is_some() {
        bail!("only bench reaper draws a page; leave --html out");
    }
    let mut out = args.json.as_deref().map(output::open).transpose()?;
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only = args.only.clone();
    let receiver = ReceiverCommand::this_executable()?;
    let mut progress = |what: &str| eprintln!("bench migrate: {what}");
    let outcome = vmferry_bench::migrate::run(&options, &mut Ours, &receiver, &mut progress);
    if let Some(out) = &mut out {
        outcome.document.write(out)?;
    }
    if args.json.as_deref() != Some(std::path::Path::new("-")) {
        println!("{}", vmferry_bench::migrate::table(&outcome.document));
    }
    Ok(ending(&outcome.failures))
}

/// Tells what failed; how the command ends.
fn ending(failures: &[String]) -> Status {
    for failure in failures {
        eprintln!("vmferry: {failure}");
    }
    if failures.is_empty() { Status::Done } else { Status::Failed }
}

/// The floor's receiving process.
pub(crate) fn floor_receiver(arguments: &[String]) -> Result<Status> {
    vmferry_bench::floor::receiver_main(arguments)?;
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
