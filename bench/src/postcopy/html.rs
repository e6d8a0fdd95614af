//! The document as a page with charts.

use serde_json::Value;

use super::report::{conditions, tables};
use super::watch::WAIT_MIN_US;
use crate::json::{Case, Document};
use crate::reaper::to_f64;
use crate::report::bars::{Bars, Group};
use crate::report::html::Page;
use crate::report::svg::{Tone, short};

/// A page with a histogram for each case, and the tables.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry bench postcopy: how long the guest waits for a page");
    section(&mut page, document);
    page.finish()
}

/// The same as a part of a page.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for line in conditions(document) {
        page.note(&line);
    }
    for failure in document.summary.get("failures").and_then(Value::as_array).into_iter().flatten() {
        page.paragraph(&format!("Failed: {}", failure.as_str().unwrap_or_default()));
    }
    let charts = charts(document);
    if !charts.is_empty() {
        page.heading("How long waits were");
        page.note("Of all waits of a side, the share that took so long. Each bar is a power of two of microseconds.");
    }
    for (chart, caption) in charts {
        page.drawing(&chart.render(), &caption);
    }
    for table in tables(document) {
        page.heading(table.title);
        page.table(&table.head, &table.rows);
    }
    let skipped = document.skipped_text();
    if !skipped.is_empty() {
        page.heading("Skipped");
        skipped.lines().for_each(|line| page.note(line.trim_start_matches("skipped ")));
    }
}

/// A chart for each case that has waits, and what it shows.
fn charts(document: &Document) -> Vec<(Bars, String)> {
    let mut names: Vec<&str> = Vec::new();
    for name in document.cases.iter().filter_map(|case| case.params.get("case")?.as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let of = |name: &str| -> Vec<&Case> {
        let own =
            |case: &&Case| case.params.get("case").is_some_and(|own| own == name) && !case.hist_us.is_empty();
        document.cases.iter().filter(own).collect()
    };
    let cases = names.into_iter().map(|name| (name, of(name))).filter(|(_, cases)| !cases.is_empty());
    cases.map(|(name, cases)| (chart(name, &cases), caption(&cases))).collect()
}

fn chart(name: &str, cases: &[&Case]) -> Bars {
    let bounds =
        cases.iter().flat_map(|case| case.hist_us.keys().copied()).filter(|high| *high > WAIT_MIN_US);
    let (low, high) = bounds.fold((u64::MAX, 0), |(low, high), bound| (low.min(bound), high.max(bound)));
    let bounds: Vec<u64> = std::iter::successors(Some(low), |bound| bound.checked_mul(2))
        .take_while(|bound| *bound <= high)
        .collect();
    let groups = cases.iter().map(|case| {
        let count = |bound: &u64| to_f64(case.hist_us.get(bound).copied().unwrap_or(0));
        let total: f64 = bounds.iter().map(count).sum();
        let side = case.params.get("side").and_then(Value::as_str).unwrap_or(&case.name);
        Group {
            name: side.into(),
            tone: tone(side),
            values: bounds.iter().map(|bound| count(bound) / total * 100.0).collect(),
        }
    });
    let floor = cases.iter().find_map(|case| case.metrics.get("floor_us").copied());
    Bars {
        title: name.into(),
        x_label: "a wait, in microseconds".into(),
        y_label: "% of waits".into(),
        bounds: bounds.iter().map(|bound| to_f64(bound / 2)).chain([to_f64(high)]).collect(),
        mark: floor.map(|floor| (floor, format!("floor {} us", short(floor.round())))),
        groups: groups.collect(),
    }
}

fn tone(side: &str) -> Tone {
    match side {
        "shared" => Tone::Vermilion,
        "interleaved" => Tone::Amber,
        "dedicated" => Tone::Green,
        "ours" => Tone::Blue,
        "qemu" => Tone::Purple,
        "qemu-preempt" => Tone::Brown,
        _ => Tone::Grey,
    }
}

fn caption(cases: &[&Case]) -> String {
    let Some(case) = cases.first() else { return String::new() };
    let number = |name: &str| case.params.get(name).and_then(Value::as_u64).unwrap_or(0);
    let text = |name: &str| case.params.get(name).and_then(Value::as_str);
    let link = match case.params.get("link_gbps").and_then(Value::as_f64) {
        Some(gbps) => format!("{gbps} Gb/s, {}", text("congestion").unwrap_or("default")),
        None => "loopback".into(),
    };
    let waits = cases.iter().filter_map(|case| {
        let side = case.params.get("side")?.as_str()?;
        Some(format!("{side} {}", case.text("waits", 0)))
    });
    format!(
        "{link}; {} vCPU(s), {} MiB of memory, workload {}. Waits a round: {}.",
        number("vcpus"),
        number("memory_bytes") >> 20,
        text("workload").unwrap_or("-"),
        waits.collect::<Vec<_>>().join(", ")
    )
}
