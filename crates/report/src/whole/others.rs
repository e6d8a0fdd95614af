//! Benches without their own page: a table of their key figures.

use super::benches::figure;
use crate::html::Page;
use crate::json::{Case, Document};
use crate::{plain, tables};
use serde_json::Value;
use std::collections::BTreeMap;

/// Title, and name of the metric or parameter.
type Column = (&'static str, &'static str);

/// Columns of each bench.
const COLUMNS: &[(&str, &[Column])] = &[
    (
        "plan",
        &[
            ("mode", "mode"),
            ("dirty / link", "dirty_ratio"),
            ("total ms", "total_ms"),
            ("predicted", "predicted_total_ms"),
            ("error %", "error_total_pct"),
            ("downtime ms", "downtime_ms"),
            ("predicted", "predicted_downtime_ms"),
            ("error ms", "error_downtime_ms"),
            ("converged", "converged"),
            ("foretold", "convergence_right"),
        ],
    ),
    (
        "limits",
        &[
            ("connections", "connections"),
            ("turned away", "turned_away"),
            ("total ms", "total_ms"),
            ("downtime ms", "downtime_ms"),
            ("speed kept", "speed_kept"),
            ("source KiB more", "source_more_kib"),
            ("target KiB more", "target_more_kib"),
            ("source descriptors", "source_descriptors"),
            ("target descriptors", "target_descriptors"),
        ],
    ),
    (
        "soak",
        &[
            ("migrations", "migrations"),
            ("total s", "total_s"),
            ("longest downtime ms", "downtime_max_ms"),
            ("KiB early", "rss_kib_early"),
            ("late", "rss_kib_late"),
            ("descriptors early", "descriptors_early"),
            ("late", "descriptors_late"),
            ("threads early", "threads_early"),
            ("late", "threads_late"),
        ],
    ),
    ("faults", &[("may end as", "allowed"), ("ended as", "outcome"), ("decided after ms", "decided_ms")]),
    (
        "exits",
        &[
            ("exits", "exits"),
            ("system calls", "syscalls"),
            ("wakeups", "wakeups"),
            ("waits", "waits"),
            ("ms", "ms"),
            ("memory KiB", "pss_kib"),
        ],
    ),
];

/// Maximum number of columns for an unknown bench, so that the table fits on a page.
const MOST_COLUMNS: usize = 8;

/// Adds the tables of one run.
pub(super) fn section(page: &mut Page, document: &Document) {
    tables::host(document).iter().for_each(|line| page.note(line));
    let columns: Vec<(String, String)> = match COLUMNS.iter().find(|(bench, _)| *bench == document.bench) {
        Some((_, columns)) => columns.iter().map(|(title, name)| ((*title).into(), (*name).into())).collect(),
        None => common(document).into_iter().map(|name| (name.clone(), name)).collect(),
    };
    // Columns without any value are omitted.
    let columns: Vec<_> = columns
        .into_iter()
        .filter(|(_, name)| document.cases.iter().any(|case| cell(case, name).is_some()))
        .collect();
    let row = |case: &Case| {
        let cells = columns.iter().map(|(_, name)| cell(case, name));
        cells.clone().any(|cell| cell.is_some()).then(|| {
            [case.name.clone()]
                .into_iter()
                .chain(cells.map(|cell| cell.unwrap_or_else(|| "-".into())))
                .collect()
        })
    };
    let rows: Vec<Vec<String>> =
        document.cases.iter().filter(|case| case.skipped.is_none()).filter_map(row).collect();
    if !rows.is_empty() {
        let head: Vec<&str> =
            ["case"].into_iter().chain(columns.iter().map(|(title, _)| title.as_str())).collect();
        page.heading("Figures");
        page.table(&head, &rows);
    }
    summary(page, document);
    plain::targets(page, document);
    plain::remarks(page, document);
}

/// Adds the summary of all cases.
fn summary(page: &mut Page, document: &Document) {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        value => value.as_f64().map(short),
    };
    let of = |(name, value): (&String, &Value)| Some(vec![name.replace('_', " "), text(value)?]);
    let rows: Vec<Vec<String>> = document.summary.iter().filter_map(of).collect();
    if !rows.is_empty() {
        page.heading("All together");
        page.table(&["figure", "value"], &rows);
    }
}

/// Returns the metrics that most cases have, without extremes and numbers of rounds.
fn common(document: &Document) -> Vec<String> {
    let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
    for name in document.cases.iter().flat_map(|case| case.metrics.keys()) {
        if !["_min", "_max", "_rounds"].iter().any(|suffix| name.ends_with(suffix)) {
            *counts.entry(name).or_default() += 1;
        }
    }
    let mut names: Vec<(&String, usize)> = counts.into_iter().collect();
    names.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    names.into_iter().take(MOST_COLUMNS).map(|(name, _)| name.clone()).collect()
}

/// Returns the text of a metric or of a parameter.
fn cell(case: &Case, name: &str) -> Option<String> {
    if let Some(value) = case.metrics.get(name) {
        return Some(match name {
            "converged" | "convergence_right" => if *value > 0.0 { "yes" } else { "no" }.to_owned(),
            _ => short(*value),
        });
    }
    match case.params.get(name)? {
        Value::String(text) => Some(text.clone()),
        value => value.as_f64().map(short),
    }
}

/// Returns a number, without decimals if it is whole.
fn short(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 { format!("{value:.0}") } else { figure(&value) }
}
