//! `vmferry-bench soak`: very many operations in a row, whose processes must not grow.
//!
//! Migrations in a row have one process as source and target, in which a guest moves from one
//! machine to the next. In the rows of snapshots, branches and upgrades ([`rows`]), the command
//! `vmferry` repeats the operation on one guest.

mod rows;

use super::args::BenchArgs;
use super::hop::{self, Kind, Machine, wait};
use super::sample::Sample;
use super::{Finished, no_kvm};
use crate::host;
use anyhow::{Context, Result, ensure};
use rows::Operation;
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
/// Number by which the mappings may grow. The allocator maps and unmaps parts of its heap.
const MORE_MAPPINGS: u64 = 8;
/// Migrations between two checks of all pages of the guest.
const CHECK_EVERY: u32 = 25;
/// Migrations between two samples.
const SAMPLE_EVERY: u32 = 5;

/// Resource that must not grow.
struct Figure {
    name: &'static str,
    /// Values during the run, in their order.
    values: Vec<u64>,
    /// Allowed growth. It is 0 for counts.
    more: u64,
}

/// Returns the resources of a process in `samples`.
fn figures(samples: &[Sample]) -> Vec<Figure> {
    let of = |name, value: fn(&Sample) -> u64, more| {
        let values = samples.iter().map(value).collect();
        Figure { name, values, more }
    };
    vec![
        of("rss_kib", |sample| sample.rss_kib, MORE_KIB),
        of("descriptors", |sample| sample.descriptors, 0),
        of("threads", |sample| sample.threads, 0),
        of("mappings", |sample| sample.mappings, MORE_MAPPINGS),
    ]
}

/// Operation that a row repeats.
#[derive(Debug, Clone, Copy)]
enum Row {
    Migrations(Kind),
    Operations(Operation),
}

/// Result of a row.
struct Ran {
    /// Number of operations.
    done: u32,
    figures: Vec<Figure>,
    /// Longest time for which the guest was stopped, if it was measured.
    downtime: Option<Duration>,
}

/// Returns the names of all rows, the guests and the memory as text, and the number of operations.
fn rows(quick: bool) -> Vec<(String, &'static str, &'static str, Row, u32)> {
    let mut all = Vec::new();
    for (guest, memory, kind) in GUESTS {
        all.push((guest.to_owned(), guest, memory, Row::Migrations(kind), if quick { 200 } else { 1000 }));
    }
    for operation in Operation::ALL {
        for (guest, memory, _) in GUESTS {
            let count = if quick { 20 } else { 1000 };
            all.push((format!("{operation}/{guest}"), guest, memory, Row::Operations(operation), count));
        }
    }
    all
}

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut document = Document::new("soak", host::describe());
    let (mut failures, mut table) = (Vec::new(), String::new());
    for (name, guest, memory, row, count) in rows(args.quick) {
        if !args.only.is_empty() && !args.only.iter().any(|only| name.contains(only.as_str())) {
            continue;
        }
        if let Some(why) = no_kvm().filter(|_| guest == "kvm") {
            document.cases.push(Case::skipped(name, why));
            continue;
        }
        let began = Instant::now();
        let (what, ran) = match row {
            Row::Migrations(kind) => ("migrations".to_owned(), migrations(&name, kind, count)),
            Row::Operations(operation) => {
                (operation.to_string(), rows::run(&name, operation, (guest, memory), count))
            }
        };
        let Ran { done, figures, downtime } = ran.with_context(|| name.clone())?;
        let mut case = Case::new(&*name).param(&what, done).param("memory", memory);
        let seconds = began.elapsed().as_secs_f64();
        if done < count {
            case = case.param("fewer_because", format!("{seconds:.0} s had passed"));
        }
        case.metric("total_s", seconds);
        if let Some(downtime) = downtime {
            case.metric("downtime_max_ms", downtime.as_secs_f64() * 1e3);
        }
        table.push_str(&format!("{name}: {done} {what} in {seconds:.1} s\n"));
        judge(&figures, &mut case, &mut table, &mut failures, done);
        document.cases.push(case);
    }
    table.push_str(&document.skipped_text());
    document.summary.insert("failures".into(), json!(failures));
    Ok(Finished { document, table, page: None, failures })
}

/// Runs `count` migrations, and samples this process.
fn migrations(name: &str, kind: Kind, count: u32) -> Result<Ran> {
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
    Ok(Ran { done: count, figures: figures(&samples), downtime: Some(longest) })
}

/// Compares the late values with the early ones, and records figures and failures.
fn judge(figures: &[Figure], case: &mut Case, table: &mut String, failures: &mut Vec<String>, count: u32) {
    for Figure { name, values, more } in figures {
        let (before, after) = early_and_late(values, *more == 0);
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

/// Returns an early and a late value. For counts this is the minimum, because a thread that is just
/// ending is not a leak. For other figures it is the median.
fn early_and_late(values: &[u64], counts: bool) -> (u64, u64) {
    // The first tenth warms up allocators and pools, so it is dropped.
    let steady = &values[values.len() / 10..];
    let (early, late) = steady.split_at(steady.len() / 4);
    let late = &late[late.len() * 2 / 3..];
    let value = |values: &[u64]| {
        let mut values = values.to_vec();
        values.sort_unstable();
        let at = if counts { 0 } else { values.len() / 2 };
        values.get(at).copied().unwrap_or(0)
    };
    // A minimum gets smaller with more values, so both sets have the same size.
    let early = if counts { &early[..early.len().min(late.len())] } else { early };
    (value(early), value(late))
}

fn whole(machine: &Machine, request: u64) -> Result<()> {
    wait("the guest's request page", || machine.request_verify(request))?;
    wait("the guest checking its pages", || machine.stats().is_ok_and(|stats| stats.verified(request)))?;
    let stats = machine.stats()?;
    ensure!(stats.corrupt() == 0, "CORRUPT: {:?}", stats.first_corrupt());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_a_failure_and_a_passing_peak_is_not() {
        let judged = |values: Vec<u64>, more| {
            let (mut case, mut table, mut failures) = (Case::new("row"), String::new(), Vec::new());
            judge(&[Figure { name: "files", values, more }], &mut case, &mut table, &mut failures, 40);
            failures
        };
        let leak: Vec<u64> = (0..40).map(|number| 10 + number / 10).collect();
        assert_eq!(judged(leak.clone(), 0), ["row: files grew from 10 to 13 over 40"]);
        assert!(judged(leak, 3).is_empty());
        let peaks = (0..40).map(|number| 10 + number % 3).collect();
        assert!(judged(peaks, 0).is_empty());
        // The start does not count.
        let start = (0..40).map(|number| u64::from(number > 2)).collect();
        assert!(judged(start, 0).is_empty());
    }
}
