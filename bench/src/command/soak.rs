//! `vmferry-bench soak`: very many migrations in a row through one process, whose resources must
//! not grow.
//!
//! The process is source and target. A guest moves from one machine to the next.

use super::args::BenchArgs;
use super::hop::{self, Kind, Machine, wait};
use super::sample::Sample;
use super::{Finished, no_kvm};
use crate::host;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::{Duration, Instant};
use vmferry_engine::{MigrationMode, Settings};
use vmferry_report::json::{Case, Document};

/// Name, memory as text, and description of each guest.
const GUESTS: [(&str, &str, Kind); 2] = [
    ("process", "8M", Kind { kvm: false, memory: 8 << 20 }),
    ("kvm", "32M", Kind { kvm: true, memory: 32 << 20 }),
];
const LOAD: &str = "uniform,ws=2M,data=4M,rate=20k,fill=random";
/// KiB that the resident memory may grow after the first tenth. The allocator may keep this much.
const MORE_KIB: u64 = 4 << 10;
/// Migrations between two checks of all pages of the guest.
const CHECK_EVERY: u32 = 25;
/// Migrations between two samples.
const SAMPLE_EVERY: u32 = 5;

/// Name of a figure, its value in a sample, and its allowed growth.
type Figure = (&'static str, fn(&Sample) -> u64, u64);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let count: u32 = if args.quick { 200 } else { 1000 };
    let mut document = Document::new("soak", host::describe());
    let (mut failures, mut table) = (Vec::new(), String::new());
    for (name, memory, kind) in GUESTS {
        if !args.only.is_empty() && !args.only.iter().any(|only| name.contains(only.as_str())) {
            continue;
        }
        if let Some(why) = no_kvm().filter(|_| kind.kvm) {
            document.cases.push(Case::skipped(name, why));
            continue;
        }
        let began = Instant::now();
        let (samples, resumed) = row(name, kind, count).with_context(|| name.to_owned())?;
        let mut case = Case::new(name).param("migrations", count).param("memory", memory);
        let seconds = began.elapsed().as_secs_f64();
        case.metric("total_s", seconds);
        case.metric("downtime_max_ms", resumed.as_secs_f64() * 1e3);
        table.push_str(&format!("{name}: {count} migrations in {seconds:.1} s\n"));
        judge(&samples, &mut case, &mut table, &mut failures, count);
        document.cases.push(case);
    }
    table.push_str(&document.skipped_text());
    document.summary.insert("failures".into(), json!(failures));
    Ok(Finished { document, table, page: None, failures })
}

/// Runs `count` migrations. Returns samples of this process and the longest downtime.
fn row(name: &str, kind: Kind, count: u32) -> Result<(Vec<Sample>, Duration)> {
    let (mut samples, mut longest) = (Vec::new(), Duration::ZERO);
    let mut machine = kind.running(LOAD)?;
    for number in 0..count {
        let mode = [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid]
            [usize::try_from(number % 3).unwrap_or(0)];
        let settings = Settings { mode, stay_awake: false, ..Settings::default() };
        let report;
        (machine, report) =
            hop::once(machine, kind, &settings).with_context(|| format!("migration {number}"))?;
        longest = longest.max(Duration::from_secs_f64(report.downtime_ms.max(0.0) / 1e3));
        if number % CHECK_EVERY == 0 || number + 1 == count {
            whole(&machine, u64::from(number) + 1).with_context(|| format!("after migration {number}"))?;
            eprintln!("soak: {name}: {} of {count}", number + 1);
        }
        if number % SAMPLE_EVERY == 0 {
            samples.push(Sample::of(std::process::id())?);
        }
    }
    Ok((samples, longest))
}

/// Compares the late samples with the early ones, and records figures and failures.
fn judge(samples: &[Sample], case: &mut Case, table: &mut String, failures: &mut Vec<String>, count: u32) {
    // The first tenth warms up allocators and pools, so it is dropped.
    let steady = &samples[samples.len() / 10..];
    let (early, late) = steady.split_at(steady.len() / 4);
    let late = &late[late.len() * 2 / 3..];
    let most: [Figure; 3] = [
        ("rss_kib", |sample| sample.rss_kib, MORE_KIB),
        ("descriptors", |sample| sample.descriptors, 0),
        ("threads", |sample| sample.threads, 0),
    ];
    for (name, of, more) in most {
        // The median is used for memory and the minimum for counts: a thread that is just ending is
        // not a leak.
        let value = |samples: &[Sample], least: bool| {
            let mut values: Vec<u64> = samples.iter().map(of).collect();
            values.sort_unstable();
            let at = if least { 0 } else { values.len() / 2 };
            values.get(at).copied().unwrap_or(0)
        };
        let counts = more == 0;
        // A minimum gets smaller with more samples, so both sets have the same size.
        let early = if counts { &early[..early.len().min(late.len())] } else { early };
        let (before, after) = (value(early, counts), value(late, counts));
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        for (when, value) in [("early", before), ("late", after)] {
            case.metric(format!("{name}_{when}"), value as f64);
        }
        table.push_str(&format!("{name:12} {before} early, {after} late\n"));
        if after > before + more {
            failures.push(format!("{}: {name} grew from {before} to {after} over {count}", case.name));
        }
    }
}

fn whole(machine: &Machine, request: u64) -> Result<()> {
    wait("the guest's request page", || machine.request_verify(request))?;
    wait("the guest checking its pages", || machine.stats().is_ok_and(|stats| stats.verified(request)))?;
    let stats = machine.stats()?;
    ensure!(stats.corrupt() == 0, "CORRUPT: {:?}", stats.first_corrupt());
    Ok(())
}
