//! vmferry's side of `vmferry-bench reaper`: a migration during which the guest's writes are
//! recorded.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::{Finished, no_kvm, program};
use crate::reaper::traces;
use crate::reaper::{
    self, CaseSpec, Options, OurError, OurRunner, Recorder, RingRun, Run, Side, Throttle, ThrottleRun,
};
use crate::stalls::Channels;
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
    if args.traces {
        return simulated(args);
    }
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("reaper: {what}");
    let outcome = reaper::run(&options, &mut Ours, &mut progress);
    let (table, page) = (reaper::table(&outcome.document), reaper::page(&outcome.document));
    Ok(Finished { table, page: Some(page), document: outcome.document, failures: outcome.failures })
}

/// Sweeps the settings of `aimd` in simulated time.
fn simulated(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { traces::Options::quick() } else { traces::Options::full() };
    options.only.clone_from(&args.only);
    if !options.selects_any() {
        bail!("--only selects no trace; use a name such as bursts/4096");
    }
    let document = traces::run(&options, &mut |what| eprintln!("reaper: {what}"));
    let (table, page) = (traces::table(&document), traces::page(&document));
    Ok(Finished { table, page: Some(page), document, failures: Vec::new() })
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

    /// Records until the migration has ended, and returns its report. In postcopy the guest runs on
    /// the target, and is recorded there.
    fn look_until_moved(&mut self, pair: &mut Pair, limit: Duration) -> Result<Value> {
        let deadline = Instant::now() + limit;
        let mut handed_over = false;
        while Instant::now() < deadline {
            self.look(if handed_over { &mut pair.target } else { &mut pair.source });
            let status = pair.source.status()?;
            handed_over = status["state"] == "postcopy" || status["outcome"] == "completed";
            if handed_over {
                self.recorder.moved();
            }
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
    let warm = Warm::hold(spec.memory);
    let mut watch = Watch { zero: Instant::now(), recorder: Recorder::default() };
    watch.look_for(&mut pair.source, before);
    drop(warm);
    let start = watch.now();
    pair.migrate(&request(spec, side, &pair.uri)?)?;
    let report = watch.look_until_moved(&mut pair, spec.timeout + PATIENCE)?;
    let end = report["total_ms"].as_f64().context("no total time")? / 1e3;
    watch.look_for(&mut pair.target, after);
    let guest = &pair.target.status()?["vm"]["guest"];
    if guest["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the move: {guest}");
    }
    run(&report, watch.recorder, start, end)
}

fn request(spec: &CaseSpec, side: Side, uri: &str) -> Result<MigrateRequest> {
    let ms = |time: Duration| u64::try_from(time.as_millis());
    let policy = side.policy();
    Ok(MigrateRequest {
        mode: spec.mode.name(),
        tracker: Some(if policy.is_some() { "ring" } else { "log" }),
        reaper: policy.map(|policy| policy.name().to_owned()),
        auto_converge: side.throttle().or(spec.throttle).map_or("off", Throttle::name),
        channels: Channels::Count(1),
        downtime_limit_ms: ms(spec.downtime_limit)?,
        max_bandwidth: spec.max_bandwidth,
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
    let throttle = &report["throttle"];
    let resumed = resumed(report).unwrap_or(end);
    let sum = |list: &Value, name: &str| -> Option<u64> {
        Some(list.as_array()?.iter().filter_map(|item| item[name].as_u64()).sum())
    };
    Ok(Run {
        timeline: recorder.finish(start, resumed),
        end,
        resumed,
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
        throttle: throttle["held_ms"].as_array().map(|held| ThrottleRun {
            held: held.iter().filter_map(time).collect(),
            highest_share: throttle["highest_share"].as_f64().unwrap_or(0.0),
        }),
    })
}

/// Returns the seconds from the beginning of a migration until the guest ran on the target before
/// all of its memory was there. `None` if the migration did not end by postcopy.
fn resumed(report: &Value) -> Option<f64> {
    let phases = report["phases"].as_array()?;
    let phase = |name: &str| phases.iter().find(|phase| phase["phase"] == name);
    phase("postcopy")?;
    let switchover = phase("switchover")?;
    Some((switchover["start_ms"].as_f64()? + switchover["ms"].as_f64()?) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_runs_on_the_target_before_the_end_only_in_postcopy() {
        let switchover = json!({ "phase": "switchover", "start_ms": 900.0, "ms": 100.0 });
        let postcopy = json!({ "phase": "postcopy", "start_ms": 1000.0, "ms": 500.0 });
        assert_eq!(resumed(&json!({ "phases": [switchover, postcopy] })), Some(1.0));
        assert_eq!(resumed(&json!({ "phases": [switchover] })), None);
    }

    #[test]
    fn throttle_of_a_report_is_read() {
        let report = json!({
            "total_ms": 2000.0, "downtime_ms": 10.0, "passes": [], "bytes": { "wire": 5 },
            "throttle": { "shares": [0.5], "highest_share": 0.75, "held_ms": [10.0, 20.0] },
        });
        let got = run(&report, Recorder::default(), 0.0, 2.0).unwrap();
        let held = vec![Duration::from_millis(10), Duration::from_millis(20)];
        assert_eq!(got.throttle, Some(ThrottleRun { held, highest_share: 0.75 }));
        assert_eq!((got.resumed, got.ring), (2.0, None));
    }
}
