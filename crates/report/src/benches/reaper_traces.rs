//! Report of `vmferry-bench reaper --traces`: settings of the policy `aimd` in simulated time,
//! compared with `predict`.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::tables::{grid, list, number, text};
use serde_json::Value;

/// Titles of the table of sides.
const SIDES: [&str; 6] =
    ["side", "traces within", "lowest writes", "highest stall", "highest CPU", "settings"];
/// Titles of the table of traces.
const TRACES: [&str; 8] =
    ["case", "writes/s", "full exits", "stall %", "reaper CPU %", "writes", "stall", "reaper CPU"];

/// Returns the answer, and what the figures mean.
fn conditions(document: &Document) -> Vec<String> {
    let of = |name: &str| document.summary.get(name).cloned().unwrap_or(Value::Null);
    vec![
        text(&of("answer")),
        format!(
            "Simulated guests, {} s each, under {} settings. Ratios are those of aimd to predict. A trace is within if writes, \
             stall and reaper CPU are no more than {} % worse. Shares below {} % of vCPU time or of a processor count as equal.",
            number(&of("seconds"), 0),
            number(&of("settings"), 0),
            number(&Value::from((of("bound").as_f64().unwrap_or(1.0) - 1.0) * 100.0), 0),
            number(&of("negligible_pct"), 1),
        ),
        "aimd and aimd-own: proposed settings, all rings or each ring on its own. aimd-common: best settings for all traces. \
         aimd-fastest: settings with the highest writes on the worst trace. aimd-each: best settings for each trace alone."
            .into(),
    ]
}

fn sides(document: &Document) -> Vec<Vec<String>> {
    let worst = |side: &Value, name: &str| {
        let ratio = number(&side[format!("worst_{name}_to_predict")], 2);
        format!("{ratio} ({})", text(&side[format!("worst_{name}_trace")]))
    };
    let row = |side: &Value| {
        vec![
            text(&side["name"]),
            format!("{} of {}", number(&side["within"], 0), number(&side["traces"], 0)),
            worst(side, "writes"),
            worst(side, "stall"),
            worst(side, "reaper_cpu"),
            side["settings"].as_str().unwrap_or("best for each trace").to_owned(),
        ]
    };
    list(document, "sides").map(row).collect()
}

fn traces(document: &Document) -> Vec<Vec<String>> {
    let group = |case: &Case| {
        let of = |name: &str| case.params.get(name).cloned().unwrap_or(Value::Null);
        (of("trace"), of("ring_entries"))
    };
    let mut cases: Vec<&Case> = Vec::new();
    for first in &document.cases {
        if !cases.iter().any(|case| case.name == first.name) {
            cases.extend(document.cases.iter().filter(|case| group(case) == group(first)));
        }
    }
    let row = |case: &&Case| {
        let metrics = [
            ("writes_per_s", 0),
            ("full_exits", 0),
            ("stall_pct", 3),
            ("reaper_cpu_pct", 2),
            ("writes_to_predict", 3),
            ("stall_to_predict", 2),
            ("reaper_cpu_to_predict", 2),
        ];
        let figures = metrics.map(|(name, digits)| case.text(name, digits));
        [case.name.clone()].into_iter().chain(figures).collect()
    };
    cases.iter().map(row).collect()
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let lines = conditions(document).join("\n");
    format!("{lines}\n{}\n{}\n", grid(&TRACES, &traces(document)), grid(&SIDES, &sides(document)))
}

/// Returns a page with the tables.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench reaper: settings of aimd in simulated time");
    section(&mut page, document);
    page.finish()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for line in conditions(document) {
        page.note(&line);
    }
    page.heading("Settings of aimd, compared with predict");
    page.table(&SIDES, &sides(document));
    page.heading("Each trace");
    page.table(&TRACES, &traces(document));
}
