//! Many guests of one host that move at the same time, and one very large guest.

use super::pair::{TestPair, check_kept_speed, most, until};
use crate::command::request::MigrateRequest;
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use vmferry_report::json::Case;

/// Number of guests that move at the same time.
const AT_ONCE: usize = 8;
/// Workload of each guest of the fleet: a low write rate.
const LOAD: &str = "uniform,ws=4M,data=16M,rate=1k,fill=random";
/// Workload of the large guest: unlimited write rate in a small part of its memory.
const LARGE_LOAD: &str = "uniform,ws=128M,data=256M,rate=0,fill=random";

/// Moves 64 guests of 256 MB, or 16 with `quick`.
pub(super) fn fleet(kind: &'static str, case: &mut Case, quick: bool, wrong: &mut Vec<String>) -> Result<()> {
    let count = if quick { 16 } else { 64 };
    case.params.insert("guests".into(), count.into());
    case.params.insert("at_once".into(), AT_ONCE.into());
    let mut waiting = Vec::new();
    for _ in 0..count {
        waiting.push(TestPair::new(kind, "256M", LOAD)?);
    }
    let (before, watched) = (all_writes(&mut waiting)?, Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let speed = (all_writes(&mut waiting)? - before) / watched.elapsed().as_secs_f64();
    let (began, writes) = (Instant::now(), all_writes(&mut waiting)?);
    let (mut moving, mut arrived) = (Vec::<TestPair>::new(), Vec::new());
    while !(waiting.is_empty() && moving.is_empty()) {
        while moving.len() < AT_ONCE
            && let Some(mut next) = waiting.pop()
        {
            let request = MigrateRequest { downtime_limit_ms: 1000, ..TestPair::request(&next.uri) };
            next.start_migration(&request)?;
            moving.push(next);
        }
        let mut still = Vec::new();
        for mut pair in moving {
            match pair.report()? {
                Some(report) => {
                    ensure!(report["outcome"] == "completed", "a guest did not move: {}", report["error"]);
                    arrived.push((pair, report));
                }
                None => still.push(pair),
            }
        }
        moving = still;
        ensure!(began.elapsed() < Duration::from_secs(600), "the fleet did not arrive");
        std::thread::sleep(Duration::from_millis(20));
    }
    let took = began.elapsed();
    case.metric("all_moved_s", took.as_secs_f64());
    let after: f64 = arrived.iter_mut().map(|(pair, _)| writes_at_target(pair)).sum::<Result<f64>>()?;
    check_kept_speed(case, wrong, speed, (after - writes) / took.as_secs_f64());
    for (pair, report) in &mut arrived {
        pair.arrived(report, case, wrong)?;
    }
    Ok(())
}

/// Returns the writes of all guests at their sources so far.
fn all_writes(pairs: &mut [TestPair]) -> Result<f64> {
    pairs.iter_mut().map(|pair| Ok(writes(pair.source.status()).unwrap_or(0.0))).sum()
}

/// Returns the writes of a guest that has moved, as the target reports them.
fn writes_at_target(pair: &mut TestPair) -> Result<f64> {
    let mut count = None;
    until("the guest's statistics at the target", || {
        count = writes(pair.target.status());
        Ok(count.is_some())
    })?;
    Ok(count.unwrap_or(0.0))
}

fn writes(status: Option<serde_json::Value>) -> Option<f64> {
    status?["vm"]["guest"]["writes"].as_f64()
}

/// Moves a guest of 16 GB, or 4 GB with `quick`, that touches little of its memory and writes as
/// fast as it can.
pub(super) fn large(mode: &str, case: &mut Case, quick: bool, wrong: &mut Vec<String>) -> Result<()> {
    let memory = if quick { "4G" } else { "16G" };
    case.params.insert("memory".into(), memory.into());
    let mut pair = TestPair::new("process", memory, LARGE_LOAD)?;
    let mode = if mode == "precopy" { "precopy" } else { "hybrid" };
    let request = MigrateRequest { mode, timeout_ms: Some(15_000), ..TestPair::request(&pair.uri) };
    pair.start_migration(&request)?;
    let report = pair.ended()?;
    ensure!(
        report["outcome"] == "completed",
        "the migration ended as {}: {}",
        report["outcome"],
        report["error"]
    );
    for name in ["before_writes_per_s", "during_writes_per_s"] {
        if let Some(speed) = report["guest"][name].as_f64() {
            most(case, name, speed);
        }
    }
    pair.arrived(&report, case, wrong)
}
