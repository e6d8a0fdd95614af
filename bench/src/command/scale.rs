//! vmferry's side of `vmferry-bench scale`: a guest that moves, and the guests beside it.

use super::args::BenchArgs;
use super::request::MigrateRequest;
use super::sample::Sample;
use super::{Finished, no_kvm, program};
use crate::cpu::CpuMeter;
use crate::footprint::{Footprint, reset_peak};
use crate::host::{self, available_memory};
use crate::reaper::to_f64;
use crate::scale::{self, End, GuestSpec, Kind, Neighbours, Options, OurError, OurRunner, Outcome, Run};
use crate::warm::Warm;
use anyhow::{Context, Error, Result, bail};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use vmferry_client::{Pair, Setup, SingleProcess};

/// Time for which a guest runs before it is measured.
const WARM_UP: Duration = Duration::from_millis(500);
/// Interval at which the end of the migration is awaited, and at which page tables are sampled.
const POLL: Duration = Duration::from_millis(10);
/// Time after which a migration is cancelled.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time that a guest may take to fill its memory.
const START: Duration = Duration::from_secs(60);
/// Time after the move in which the guest checks pages.
const AFTER: Duration = Duration::from_millis(300);
/// Entries of the dirty ring of each vCPU.
const RING: u32 = 4096;

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("scale: {what}");
    let Outcome { document, failures } = scale::run(&options, &mut Ours, &mut progress);
    let (table, page) = (scale::table(&document), scale::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn run(&mut self, spec: &GuestSpec) -> Result<Run, OurError> {
        if spec.kind == Kind::Kvm
            && let Some(why) = no_kvm()
        {
            return Err(OurError::Unavailable(why));
        }
        let failed = |error: Error| OurError::Failed(error.into());
        let (guests, neighbours) = start_neighbours(spec).map_err(failed)?;
        let program = program::vmferry().map_err(failed)?;
        let pair = Pair::start(&setup(spec, program), &AtomicBool::new(false));
        let pair = pair.map_err(|error| {
            // A host need not permit a KVM guest with more memory than the host has.
            if spec.kind == Kind::Kvm && spec.memory > host::describe().memory_bytes {
                OurError::Unavailable(format!("KVM does not run the guest on this host: {error:#}"))
            } else {
                failed(error)
            }
        })?;
        let run = moved(spec, pair).map_err(failed)?;
        drop(guests);
        Ok(Run { neighbours, ..run })
    }
}

fn setup<'a>(spec: &GuestSpec, program: &'a std::path::Path) -> Setup<'a> {
    Setup {
        guest: spec.kind.name(),
        cpus: spec.vcpus,
        dirty_ring: (spec.kind == Kind::Kvm).then_some(RING),
        balloon: spec.balloon,
        ..Setup::new(program, spec.memory, spec.workload())
    }
}

/// Starts the guests beside the guest that moves, and measures the memory that each of them adds.
fn start_neighbours(spec: &GuestSpec) -> Result<(Vec<SingleProcess>, Option<Neighbours>)> {
    if spec.neighbours == 0 {
        return Ok((Vec::new(), None));
    }
    let (beside, stop) = (spec.neighbour(), AtomicBool::new(false));
    // The ring is for the tracker of the guest that moves.
    let setup = Setup { dirty_ring: None, ..setup(&beside, program::vmferry()?) };
    let available = available_memory().context("the kernel does not report the available memory")?;
    let (mut guests, mut started) = (Vec::new(), Duration::ZERO);
    for _ in 0..spec.neighbours {
        let began = Instant::now();
        let mut guest = SingleProcess::start(&setup)?;
        guest.runner.wait("the guest running its workload", START, &stop, |status| {
            (status["vm"]["guest"]["state"] == "running").then_some(())
        })?;
        started += began.elapsed();
        guests.push(guest);
    }
    std::thread::sleep(WARM_UP);
    let left = available_memory().context("the kernel does not report the available memory")?;
    let (mut sum, mut guest_memory, count) = (Neighbours::default(), 0.0, f64::from(spec.neighbours));
    for guest in &guests {
        let pid = guest.runner.pid();
        let footprint = Footprint::of(pid, beside.memory).map_err(Error::msg)?;
        let proportional = to_f64(footprint.rest.proportional);
        sum.proportional += proportional / count;
        sum.largest = sum.largest.max(proportional);
        sum.private += to_f64(footprint.rest.private) / count;
        sum.page_tables += to_f64(Sample::of(pid)?.page_tables_kib << 10) / count;
        guest_memory += to_f64(footprint.guest.resident);
    }
    let host = (to_f64(available) - to_f64(left) - guest_memory) / count;
    let neighbours = Neighbours { start: started / spec.neighbours, host, ..sum };
    Ok((guests, Some(neighbours)))
}

/// Moves the guest of `pair`, and measures both ends.
fn moved(spec: &GuestSpec, mut pair: Pair) -> Result<Run> {
    let warm = Warm::hold(spec.data);
    std::thread::sleep(WARM_UP);
    let pids = [pair.source.pid(), pair.target.pid()];
    let at_source = Footprint::of(pids[0], spec.memory).map_err(Error::msg)?;
    let is_vcpu = |name: &str| name.starts_with("vcpu");
    let meters = [CpuMeter::start(pids[0], is_vcpu)?, CpuMeter::start(pids[1], is_vcpu)?];
    for pid in pids {
        reset_peak(pid).map_err(Error::msg)?;
    }
    let before = [Sample::of(pids[0])?, Sample::of(pids[1])?];
    drop(warm);
    pair.migrate(&request(spec, &pair.uri)?)?;
    let (report, page_tables) = ended(&mut pair, before.map(|sample| sample.page_tables_kib))?;
    let cpu = [meters[0].used()?, meters[1].used()?];
    let after = [Sample::of(pids[0])?, Sample::of(pids[1])?];
    let at_target = Footprint::of(pids[1], spec.memory).map_err(Error::msg)?;
    std::thread::sleep(AFTER);
    let guest = pair.target.status()?["vm"]["guest"].clone();
    if guest["corrupt"].as_u64() != Some(0) {
        bail!("the guest found damaged pages after the move: {guest}");
    }
    // The guest's memory was resident at the source before, and became resident at the target.
    let arrived = [0, at_target.guest.resident];
    let left_out = [at_source.guest.resident, 0];
    let end = |i: usize| {
        let before_kib = before[i].rss_kib;
        End {
            cpu: cpu[i],
            base: (before_kib << 10).saturating_sub(left_out[i]),
            added: (after[i].peak_kib.saturating_sub(before_kib) << 10).saturating_sub(arrived[i]),
            page_tables: page_tables[i].saturating_sub(before[i].page_tables_kib) << 10,
        }
    };
    Ok(Run { source: end(0), target: end(1), ..figures(&report)? })
}

fn request(spec: &GuestSpec, uri: &str) -> Result<MigrateRequest> {
    Ok(MigrateRequest {
        tracker: Some(match spec.kind {
            Kind::Process => "wp",
            Kind::Kvm => "ring",
        }),
        timeout_ms: Some(u64::try_from(TIMEOUT.as_millis())?),
        ..MigrateRequest::to(uri)
    })
}

/// Waits for the end of the migration. Returns its report, and the largest sizes of the page tables
/// of both processes in KiB.
fn ended(pair: &mut Pair, mut page_tables: [u64; 2]) -> Result<(Value, [u64; 2])> {
    let deadline = Instant::now() + TIMEOUT + Duration::from_secs(10);
    while Instant::now() < deadline {
        let status = pair.source.client.call("status", json!({}))?;
        for (largest, pid) in page_tables.iter_mut().zip([pair.source.pid(), pair.target.pid()]) {
            *largest = (*largest).max(Sample::of(pid)?.page_tables_kib);
        }
        if status["outcome"].is_null() {
            std::thread::sleep(POLL);
            continue;
        }
        if status["outcome"] != "completed" {
            bail!("the migration ended as {}: {}", status["outcome"], status["error"]);
        }
        return Ok((status, page_tables));
    }
    bail!("the migration did not end in time")
}

/// Returns the figures of a report.
fn figures(report: &Value) -> Result<Run> {
    let number = |name: &str| report[name].as_f64().with_context(|| format!("no {name} in the report"));
    let parts = report["downtime"].as_object().context("no parts of the downtime in the report")?;
    let passes = report["passes"].as_array().context("no passes in the report")?;
    // The last pass is not followed by a harvest.
    let harvested = passes.iter().take(passes.len().saturating_sub(1));
    Ok(Run {
        total_ms: number("total_ms")?,
        downtime_ms: number("downtime_ms")?,
        parts: parts.iter().filter_map(|(name, ms)| Some((name.clone(), ms.as_f64()?))).collect(),
        setup_ms: number("setup_ms")?,
        enable_tracking_ms: report["enable_tracking_ms"].as_f64(),
        harvests_ms: harvested.filter_map(|pass| pass["harvest_ms"].as_f64()).collect(),
        passes: passes.len() as u64,
        pages: report["bytes"]["raw_pages"].as_u64().context("no count of pages in the report")?,
        ..Run::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_all_parts_and_harvests() {
        let report = json!({
            "total_ms": 300.0, "downtime_ms": 4.0, "setup_ms": 8.0, "enable_tracking_ms": 2.5,
            "downtime": {"pause_ms": 1.0, "new_part_ms": 2.0, "unknown_ms": null},
            "passes": [{"harvest_ms": 3.0}, {"harvest_ms": 1.0}, {"harvest_ms": 0.0}],
            "bytes": {"raw_pages": 16},
        });
        let run = figures(&report).unwrap();
        assert_eq!((run.total_ms, run.downtime_ms, run.setup_ms), (300.0, 4.0, 8.0));
        assert_eq!(
            run.parts.iter().map(|(name, ms)| (&name[..], *ms)).collect::<Vec<_>>(),
            [("new_part_ms", 2.0), ("pause_ms", 1.0)]
        );
        assert_eq!((&run.harvests_ms[..], run.passes, run.pages), (&[3.0, 1.0][..], 3, 16));
        assert_eq!(run.enable_tracking_ms, Some(2.5));
    }

    #[test]
    fn report_without_a_downtime_is_an_error() {
        let report = json!({"total_ms": 300.0, "downtime_ms": null, "downtime": {}, "passes": []});
        assert!(figures(&report).unwrap_err().to_string().contains("downtime_ms"));
    }
}
