//! From runs to the document, and from the document to tables for a terminal.

use serde_json::Value;

use super::figures::{Measured, histogram, measure};
use super::goals::{goals as verdicts, published};
use super::watch::WAIT_MIN_US;
use super::{CaseRuns, CaseSpec, Options, Purpose, SideRuns};
use crate::json::{Case, Document};
use crate::reaper::to_f64;
use crate::report::tables::{
    Column, GOALS, add_spreads, cells, goals, grid, head, host, list, number, of_purpose, text,
};
use crate::rtt::Floor;

/// Columns of the table: title, metric, digits, whether the spread is shown.
pub(super) const COLUMNS: &[Column] = &[
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

/// Columns of the table of what the target says itself, and of the conditions.
pub(super) const BESIDE: &[Column] = &[
    ("floor us", "floor_us", 0, true),
    ("own faults", "own_faults", 0, false),
    ("own mean us", "own_mean_us", 0, false),
    ("own p50", "own_p50_us", 0, false),
    ("own p99", "own_p99_us", 0, false),
    ("own max", "own_max_us", 0, false),
    ("short stalls", "short_stalls", 0, false),
    ("waits/s before", "before_waits_per_s", 1, false),
    ("their mean us", "before_mean_us", 0, false),
    ("writes/s before", "writes_before_per_s", 0, false),
    ("speed kept", "guest_speed_kept", 4, false),
    ("speed after", "after_of_before", 2, false),
];

/// Adds a case's sides to the document.
pub(super) fn add_case(document: &mut Document, options: &Options, spec: &CaseSpec, runs: &CaseRuns) {
    for side in &runs.sides {
        document.cases.push(case_of(options, spec, side, &runs.floors));
    }
}

fn case_of(options: &Options, spec: &CaseSpec, runs: &SideRuns, floors: &[Option<Floor>]) -> Case {
    let name = format!("{}/{}", spec.name, runs.side);
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    };
    let measured: Vec<Measured> = runs
        .rounds
        .iter()
        .enumerate()
        .filter_map(|(round, run)| measure(spec, run.as_ref()?, floors.get(round).copied().flatten()))
        .collect();
    case = case
        .param("case", spec.name.as_str())
        .param("side", runs.side.to_string())
        .param("purpose", format!("{:?}", spec.purpose).to_lowercase())
        .param("link", spec.link)
        .param("link_gbps", spec.shape.map(|shape| to_f64(shape.bits_per_s) / 1e9))
        .param("congestion", spec.shape.and_then(|shape| shape.congestion))
        .param("pattern", spec.pattern)
        .param("workload", spec.workload())
        .param("memory_bytes", spec.memory)
        .param("data_bytes", spec.data)
        .param("vcpus", spec.vcpus)
        .param("before_ms", u64::try_from(options.before.as_millis()).unwrap_or(u64::MAX))
        .param("rounds", measured.len());
    add_spreads(&mut case, measured.iter().map(|measured| &measured.figures));
    case.hist_us = histogram(measured.iter());
    case
}

/// Adds what concerns the whole run.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let summary = [
        ("rounds", options.repeats.into()),
        ("wait_min_us", WAIT_MIN_US.into()),
        ("published", published(document).into()),
        ("goals", verdicts(document).into()),
        ("failures", failures.into()),
    ];
    document.summary.extend(summary.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
}

/// What was run where, and under which conditions.
pub(super) fn conditions(document: &Document) -> Vec<String> {
    let mut lines = host(document);
    let wait_min = document.summary.get("wait_min_us").and_then(Value::as_f64).unwrap_or(0.0);
    lines.push(format!(
        "Times are the guest's own: stalls of {} us and more of its vCPUs, from the command until the end, each vCPU's downtime \
         left out. Shorter ones are faults that the host answers itself. Mean and count are exact; percentiles lie in the \
         right power of two, and where in it follows from the mean of those in it. Waits before: as many such stalls has the \
         guest when nothing moves.",
        wait_min
    ));
    lines.push(
        "Floor: round trip of a page on the idle link and a local fault, measured in the same round. / link: the whole time by \
         what the link needs for the data as TCP payload. Back at 90 %: from the command until the guest has 90 % of its speed \
         before; - if it was not seen to."
            .into(),
    );
    lines
}

/// A table as text.
pub(super) struct TextTable {
    pub(super) title: &'static str,
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

/// The tables that have rows.
pub(super) fn tables(document: &Document) -> Vec<TextTable> {
    let mut tables = Vec::new();
    for (purpose, columns, title) in [
        (Purpose::Compare, COLUMNS, "Waits for a page"),
        (Purpose::Compare, BESIDE, "Beside them"),
        (Purpose::Vcpus, COLUMNS, "More vCPUs"),
    ] {
        let ran = of_purpose(document, purpose).filter(|case| !case.metrics.is_empty());
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

/// The document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let mut text = conditions(document).join("\n");
    text.push('\n');
    for TextTable { head, rows, .. } in tables(document) {
        text.push_str(&format!("{}\n", grid(&head, &rows)));
    }
    text.push_str(&document.skipped_text());
    text.push_str(&document.failures_text());
    text
}
