//! vmferry's side of `vmferry-bench reaper`: a migration during which the guest's writes are
//! recorded.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::{Finished, no_kvm, program};
use crate::reaper::{self, CaseSpec, Options, OurError, OurRunner, Recorder, RingRun, Run, Side};
use crate::warm::Warm;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Pair, Runner, Setup};

/// Interval at which the guest's write counts are read: twice in each window.
const POLL: Duration = Duration::from_millis(50);
/// Time beyond the timeout after which a migration counts as stuck.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("reaper: {what}");
    let outcome = reaper::run(&options, &mut Ours, &mut progress);
    let (table, page) = (reaper::table(&outcome.document), reaper::page(&outcome.document));
    Ok(Finished { table, page: Some(page), document: outcome.document, failures: outcome.failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(
        &mut self,
        spec: &CaseSpec,
        side: Side,
        before: Duration,
        after: Duration,
    ) -> Result<Run, OurError> {
        if let Some(why) = no_kvm() {
            return Err(OurError::Unavailable(why));
        }
        watch(spec, side, before, after).map_err(|error| OurError::Failed(error.into()))
    }
}

/// Recorder of the guest's writes, with the start of its clock.
struct Watch {
    zero: Instant,
    recorder: Recorder,
}

impl Watch {
    fn now(&self) -> f64 {
        self.zero.elapsed().as_secs_f64()
    }

    /// Reads the write counts once. A guest that is being stopped or moved has no answer.
    fn look(&mut self, at: &mut Runner) {
        let Ok(answer) = at.client.call("writes", json!({})) else { return };
        let pair = |vcpu: &Value| Some((vcpu[0].as_u64()?, vcpu[1].as_u64()?));
        let vcpus = answer["vcpus"].as_array().and_then(|vcpus| vcpus.iter().map(pair).collect());
        if let Some(vcpus) = vcpus {
            self.recorder.add(self.now(), vcpus);
        }
    }

    fn look_for(&mut self, at: &mut Runner, span: Duration) {
        let end = Instant::now() + span;
        while Instant::now() < end {
            self.look(at);
            std::thread::sleep(POLL);
        }
        self.look(at);
    }

    /// Records until the migration has ended, and returns its report.
    fn look_until_moved(&mut self, source: &mut Runner, limit: Duration) -> Result<Value> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            self.look(source);
            let status = source.status()?;
            if status["outcome"] == "completed" {
                return Ok(status);
            }
            if !status["outcome"].is_null() {
                bail!("the migration ended as {}: {}", status["outcome"], status["error"]);
            }
            std::thread::sleep(POLL);
        }
        bail!("the migration did not end within {limit:?}")
    }
}

fn watch(spec: &CaseSpec, side: Side, before: Duration, after: Duration) -> Result<Run> {
    let stop = AtomicBool::new(false);
    let setup = Setup {
        cpus: spec.vcpus,
        dirty_ring: side.entries(),
        // QEMU has no balloon in this bench.
        balloon: false,
        ..Setup::new(program::vmferry()?, spec.memory, spec.workload.clone())
    };
    let mut pair = Pair::start(&setup, &stop)?;
    // The migration touches the working set and little more on the target.
    let warm = Warm::hold(spec.memory / 4);
    let mut watch = Watch { zero: Instant::now(), recorder: Recorder::default() };
    watch.look_for(&mut pair.source, before);
    drop(warm);
    let start = watch.now();
    pair.migrate(&request(spec, side, &pair.uri)?)?;
    let report = watch.look_until_moved(&mut pair.source, spec.timeout + PATIENCE)?;
    let end = report["total_ms"].as_f64().context("no total time")? / 1e3;
    watch.recorder.moved();
    watch.look_for(&mut pair.target, after);
    let guest = &pair.target.status()?["vm"]["guest"];
    if guest["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the move: {guest}");
    }
    run(&report, watch.recorder, start, end)
}

fn request(spec: &CaseSpec, side: Side, uri: &str) -> Result<MigrateRequest> {
    let ms = |time: Duration| u64::try_from(time.as_millis());
    let (tracker, reaper) = match side {
        Side::Ring { policy, .. } => ("ring", Some(policy.name().to_owned())),
        Side::Log | Side::Qemu { .. } => ("log", None),
    };
    Ok(MigrateRequest {
        tracker: Some(tracker),
        reaper,
        channels: 1,
        downtime_limit_ms: ms(spec.downtime_limit)?,
        max_bandwidth: Some(spec.max_bandwidth),
        timeout_ms: Some(ms(spec.timeout)?),
        on_timeout: "switch",
        ..MigrateRequest::to(uri)
    })
}

/// Returns the figures of a run from the report of a migration.
fn run(report: &Value, recorder: Recorder, start: f64, end: f64) -> Result<Run> {
    let time = |value: &Value| value.as_f64().map(|ms| Duration::from_secs_f64(ms / 1e3));
    let passes = report["passes"].as_array().context("no passes")?;
    let ring = &report["ring"];
    let sum = |list: &Value, name: &str| -> Option<u64> {
        Some(list.as_array()?.iter().filter_map(|item| item[name].as_u64()).sum())
    };
    Ok(Run {
        timeline: recorder.finish(start, end),
        end,
        total: time(&report["total_ms"]).context("no total time")?,
        downtime: time(&report["downtime_ms"]).context("no downtime")?,
        passes: passes.len() as u64,
        wire_bytes: report["bytes"]["wire"].as_u64().unwrap_or(0),
        // A ring counts each page once per harvest, and the log counts each page once per pass.
        dirtied: sum(&ring["vcpus"], "pages").or_else(|| sum(&report["passes"], "dirtied")),
        ring: ring["full_exits"].as_u64().map(|full_exits| RingRun {
            full_exits,
            full_stall: Duration::from_micros(ring["full_stall_us"].as_u64().unwrap_or(0)),
            harvests: ring["harvests"].as_u64().unwrap_or(0),
            reaper_cpu: time(&ring["reaper_cpu_ms"]).unwrap_or_default(),
        }),
    })
}
