//! Report of `vmferry-bench postcopy`: time for which a guest waits for its pages.

use crate::bars::{Bars, Group};
use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::svg::{Tone, short};
use crate::tables::{Column, GOALS, cells, goals, head, host, list, number, text};
use crate::to_f64;
use serde_json::Value;

/// Columns of the table: title, metric, digits, whether the spread is shown.
const COLUMNS: &[Column] = &[
    ("mean us", "mean_us", 0, true),
    ("p50", "p50_us", 0, false),
    ("p99", "p99_us", 0, true),
    ("max", "max_us", 0, false),
    ("/ floor", "ratio_to_floor", 2, false),
    ("p99 / floor", "p99_to_floor", 2, false),
    ("waits", "waits", 0, false),
    ("waits/s", "waits_per_s", 0, false),
    ("total ms", "total_ms", 0, true),
    ("/ link", "ratio_to_link", 3, false),
    ("downtime ms", "downtime_ms", 1, false),
    ("back at 90 % ms", "back_90_ms", 0, false),
];

/// Columns of the cases with small and huge pages.
const HUGE: &[Column] = &[
    ("mean us", "mean_us", 0, true),
    ("p50", "p50_us", 0, false),
    ("p99", "p99_us", 0, true),
    ("max", "max_us", 0, false),
    ("waits", "waits", 0, false),
    ("total ms", "total_ms", 0, true),
    ("/ link", "ratio_to_link", 3, false),
    ("downtime ms", "downtime_ms", 1, false),
    ("huge MB, source", "source_huge_mb", 0, false),
    ("huge MB, target", "target_huge_mb", 0, false),
];

/// Columns of the table of the target's own figures and of the conditions.
const BESIDE: &[Column] = &[
    ("floor us", "floor_us", 0, true),
    ("own faults", "own_faults", 0, false),
    ("own mean us", "own_mean_us", 0, false),
    ("own p50", "own_p50_us", 0, false),
    ("own p99", "own_p99_us", 0, false),
    ("own max", "own_max_us", 0, false),
    ("short stalls", "short_stalls", 0, false),
    ("waits/s before", "before_waits_per_s", 1, false),
    ("mean us before", "before_mean_us", 0, false),
    ("writes/s before", "writes_before_per_s", 0, false),
    ("speed kept", "guest_speed_kept", 4, false),
    ("speed after", "after_of_before", 2, false),
];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = host(document);
    let wait_min = document.summary.get("wait_min_us").and_then(Value::as_f64).unwrap_or(0.0);
    lines.push(format!(
        "Times are measured by the guest: stalls of its vCPUs of {} us and more, from the command until the end, without the \
         downtime of each vCPU. Shorter stalls are faults that the host serves itself. Mean and count are exact. Percentiles are \
         in the correct power of two, interpolated from the mean in that interval. Waits before: such stalls of the guest \
         without a migration.",
        wait_min
    ));
    lines.push(
        "Floor: round trip of a page on the idle link and a local fault, measured in the same round. / link: total time \
         divided by the time that the link needs for the data as TCP payload. Back at 90 %: from the command until the guest has \
         90 % of its earlier speed; - if this was not observed."
            .into(),
    );
    lines
}

/// Returns the tables that have rows.
fn tables(document: &Document) -> Vec<TextTable> {
    let mut tables = Vec::new();
    for (purpose, columns, title) in [
        ("compare", COLUMNS, "Waits for a page"),
        ("compare", BESIDE, "Figures of the target, and conditions"),
        ("vcpus", COLUMNS, "More vCPUs"),
        ("huge", HUGE, "Waits for a page inside a huge page"),
    ] {
        let ran = document.with_purpose(purpose).filter(|case| !case.metrics.is_empty());
        let rows: Vec<_> = ran.map(|case| cells(case, columns)).collect();
        tables.push(TextTable { title, head: head(columns), rows });
    }
    let published = list(document, "published").map(|row| {
        let columns = ["published_interleaved", "interleaved", "published_dedicated", "dedicated", "ours"];
        [text(&row["name"])].into_iter().chain(columns.map(|name| number(&row[name], 3))).collect()
    });
    let head = vec![
        "mean / shared",
        "published interleaved",
        "interleaved",
        "published dedicated",
        "dedicated",
        "ours",
    ];
    tables.push(TextTable { title: "The published progression", head, rows: published.collect() });
    tables.push(TextTable { title: "Goals", head: GOALS.to_vec(), rows: goals(document) });
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &tables(document))
}

/// Returns a page with a histogram for each case, and the tables.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench postcopy: time for which the guest waits for a page");
    section(&mut page, document);
    page.finish()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for line in conditions(document) {
        page.note(&line);
    }
    for failure in document.summary.get("failures").and_then(Value::as_array).into_iter().flatten() {
        page.paragraph(&format!("Failed: {}", failure.as_str().unwrap_or_default()));
    }
    let charts = charts(document);
    if !charts.is_empty() {
        page.heading("Duration of waits");
        page.note("Share of all waits of a program by duration. Each bar is a power of two of microseconds.");
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

/// Returns a chart for each case that has waits, and its caption.
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
    let wait_min = document.summary.get("wait_min_us").and_then(Value::as_u64).unwrap_or(0);
    let cases = names.into_iter().map(|name| (name, of(name))).filter(|(_, cases)| !cases.is_empty());
    cases.map(|(name, cases)| (chart(name, &cases, wait_min), caption(&cases))).collect()
}

fn chart(name: &str, cases: &[&Case], wait_min: u64) -> Bars {
    let bounds = cases.iter().flat_map(|case| case.hist_us.keys().copied()).filter(|high| *high > wait_min);
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
        x_label: "duration of a wait, in microseconds".into(),
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
