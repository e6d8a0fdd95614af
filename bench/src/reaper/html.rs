//! The document as a page with charts.

use serde_json::Value;

use super::Purpose;
use super::report::{COLUMNS, PARTS, conditions, extra_tables};
use super::spec::ENTRIES;
use crate::json::{Case, Document, Series};
use crate::report::html::Page;
use crate::report::svg::{Chart, Line, Tone};
use crate::report::tables::{cells, of_purpose};

/// When the guest falls below this share of its highest speed, only a logarithmic axis shows both.
const DEEP: f64 = 0.1;

/// A page with the tables and a chart for each case and size of rings.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry bench reaper: what finding dirty pages costs the guest");
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
    page.heading("The guest's speed");
    page.note(
        "Each line is the round with the median speed, in windows of 100 ms. Time runs from the command to migrate; a mark \
         at the upper edge is the end of that migration.",
    );
    for (name, entries, cases) in groups(document) {
        let chart = chart(name, entries, &cases);
        page.figure(&chart, &caption(&cases));
    }
    let titles = [
        (Purpose::Compare, COLUMNS, "Figures"),
        (Purpose::Compare, PARTS, "Where the guest's time went, in percent of vCPU time"),
        (Purpose::Idle, COLUMNS, "An idle guest"),
    ];
    for (purpose, columns, title) in titles {
        let rows: Vec<_> = of_purpose(document, purpose).map(|case| cells(case, columns)).collect();
        if !rows.is_empty() {
            page.heading(title);
            let head: Vec<&str> = ["case"].into_iter().chain(columns.iter().map(|column| column.0)).collect();
            page.table(&head, &rows);
        }
    }
    let titles = [
        "What the better speed costs in migration time: predict to fixed",
        "Drops beside the published ones",
        "Goals",
    ];
    for (title, (head, rows)) in titles.into_iter().zip(extra_tables(document)) {
        if !rows.is_empty() {
            page.heading(title);
            page.table(head, &rows);
        }
    }
    let skipped: Vec<&Case> = document.cases.iter().filter(|case| case.skipped.is_some()).collect();
    if !skipped.is_empty() {
        page.heading("Skipped");
        for case in skipped {
            page.note(&format!("{}: {}", case.name, case.skipped.as_deref().unwrap_or_default()));
        }
    }
}

/// The cases of a chart: of each case name and size of rings, those with that size and those without rings.
fn groups(document: &Document) -> Vec<(&str, u32, Vec<&Case>)> {
    let mut names: Vec<&str> = Vec::new();
    for case in of_purpose(document, Purpose::Compare) {
        if let Some(name) = case.params.get("case").and_then(Value::as_str)
            && !names.contains(&name)
        {
            names.push(name);
        }
    }
    let mut groups = Vec::new();
    for name in names {
        for entries in ENTRIES {
            let own = |case: &&Case| {
                let size = case.params.get("ring_entries").and_then(Value::as_u64);
                case.params.get("case").is_some_and(|own| own == name)
                    && case.series.is_some()
                    && size.is_none_or(|size| size == u64::from(entries))
            };
            let cases: Vec<&Case> = of_purpose(document, Purpose::Compare).filter(own).collect();
            if cases.iter().any(|case| case.params.get("ring_entries").is_some_and(|size| !size.is_null())) {
                groups.push((name, entries, cases));
            }
        }
    }
    groups
}

fn chart(name: &str, entries: u32, cases: &[&Case]) -> Chart {
    let lines: Vec<Line> = cases.iter().filter_map(|case| line(case)).collect();
    let highest = lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y).fold(0.0, f64::max);
    let deepest = cases.iter().filter_map(|case| case.metrics.get("writes_during_per_s").copied());
    let deepest = deepest.fold(f64::INFINITY, f64::min);
    Chart {
        title: format!("{name}, rings of {entries} entries"),
        x_label: "seconds since the command to migrate".into(),
        y_label: "guest writes per second".into(),
        log_y: deepest < highest * DEEP,
        ranges: [None; 2],
        start: Some((0.0, "migration starts".into())),
        end_name: "migration ends".into(),
        bands: Vec::new(),
        lines,
    }
}

fn line(case: &Case) -> Option<Line> {
    let series: &Series = case.series.as_ref()?;
    let name = case.params.get("line").and_then(Value::as_str).unwrap_or(&case.name);
    let tone = match name {
        "fixed" => Tone::Vermilion,
        "gears" => Tone::Amber,
        "aimd" => Tone::Green,
        "predict" => Tone::Blue,
        "QEMU bitmap" => Tone::Purple,
        "QEMU ring" => Tone::Brown,
        _ => Tone::Grey,
    };
    let mut at = series.from_s + series.step_s / 2.0;
    let mut points = Vec::with_capacity(series.values.len());
    for value in &series.values {
        points.push((at, super::series::to_f64(*value)));
        at += series.step_s;
    }
    Some(Line { name: name.into(), tone, points, end: Some(series.end_s) })
}

fn caption(cases: &[&Case]) -> String {
    let Some(case) = cases.first() else { return String::new() };
    let number = |name: &str| case.params.get(name).and_then(Value::as_u64).unwrap_or(0);
    format!(
        "{} vCPU(s), workload {}, link capped at {} MB/s, timeout {} s.",
        number("vcpus"),
        case.params.get("workload").and_then(Value::as_str).unwrap_or("-"),
        number("max_bandwidth_bytes_per_s") / 1_000_000,
        number("timeout_ms") / 1000
    )
}
