//! Report of `vmferry-bench reaper`: cost of dirty-page tracking for the guest.

use crate::html::Page;
use crate::json::{Case, Document, Series};
use crate::svg::{Chart, Line, Tone};
use crate::tables::{Column, GOALS, cells, goals, grid, head, host, list, number, text};
use crate::to_f64;
use serde_json::Value;

/// Columns of the table: title, metric, digits, whether the spread is shown.
const COLUMNS: &[Column] = &[
    ("drop s", "drop_s", 1, true),
    ("worst ms/GB", "worst_ms_per_gb", 0, true),
    ("writes/s during", "writes_during_per_s", 0, true),
    ("guest kept", "guest_speed_kept", 3, false),
    ("full exits", "full_exits", 0, false),
    ("stall ms", "full_stall_ms", 1, false),
    ("stall %", "full_stall_pct", 2, false),
    ("reaper CPU %", "reaper_cpu_pct", 2, false),
    ("passes", "passes", 0, false),
    ("GB sent", "wire_gbytes", 2, false),
    ("total ms", "total_ms", 0, true),
    ("downtime ms", "downtime_ms", 0, false),
];

/// Columns of the table of throttled guests.
const THROTTLE: &[Column] = &[
    ("total ms", "total_ms", 0, true),
    ("by timeout", "timed_out", 0, false),
    ("downtime ms", "downtime_ms", 0, false),
    ("passes", "passes", 0, false),
    ("writes/s during", "writes_during_per_s", 0, true),
    ("guest kept", "guest_speed_kept", 3, false),
    ("vCPU 0 kept", "vcpu0_kept", 3, false),
    ("vCPU 1 kept", "vcpu1_kept", 3, false),
    ("throttled %", "throttle_pct", 1, false),
    ("highest share", "throttle_share", 2, false),
    ("stall %", "full_stall_pct", 2, false),
    ("drop s", "drop_s", 1, true),
];

/// Tables of cases: purpose, columns, title.
const TABLES: [(&str, &[Column], &str); 6] = [
    ("compare", COLUMNS, "Figures"),
    ("converge", COLUMNS, "Migrations that converge"),
    ("published", COLUMNS, "Published guests"),
    ("throttle", THROTTLE, "Throttled guests"),
    ("compare", PARTS, "Lost time of the guest, in percent of vCPU time"),
    ("idle", COLUMNS, "An idle guest"),
];

/// Purposes whose cases have charts.
const CHARTS: [&str; 4] = ["compare", "converge", "published", "throttle"];

/// Columns of the table of the guest's lost time.
const PARTS: &[Column] = &[
    ("faults", "faults", 0, false),
    ("lost %", "lost_pct", 1, true),
    ("by faults", "fault_pct", 1, false),
    ("by full rings", "full_stall_pct", 2, false),
    ("by downtime", "downtime_pct", 1, false),
    ("by the rest", "rest_pct", 1, false),
    ("reaper, of a CPU", "reaper_cpu_pct", 2, false),
];

/// Share of the highest speed below which only a logarithmic axis shows both speeds.
const DEEP: f64 = 0.1;

/// Ring sizes that have a chart.
const ENTRIES: [u64; 2] = [4096, 65536];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = host(document);
    let scale = document.summary.get("scale").and_then(Value::as_f64).unwrap_or(0.0);
    lines.push(format!(
        "Working sets are the published ones divided by {}, except in cases published-*. Most links are capped so that a migration takes several passes. At \
         its timeout the guest is moved without regard to the downtime: the timeout determines total and downtime of a guest \
         that dirties pages faster than the link carries them. vmferry obeys the cap while the guest is stopped, QEMU does not.",
        scale
    ));
    lines.push(
        "Drop: seconds below 80 % of the median before, in windows of 100 ms, downtime included. Worst: time for 1 GiB of \
         pages at the speed of the slowest window, downtime excluded. Stall: vCPU time that full rings took."
            .into(),
    );
    if let Some(cost) = document.summary.get("fault_us").and_then(|cost| cost["median"].as_f64()) {
        lines.push(format!(
            "A write fault cost the guest {cost:.1} us on this host (an upper bound that includes the cost of busy processors)."
        ));
    }
    let oversubscribed =
        document.cases.iter().filter(|case| case.params.get("oversubscribed") == Some(&Value::Bool(true)));
    let mut names: Vec<&str> = oversubscribed.filter_map(|case| case.params.get("case")?.as_str()).collect();
    names.dedup();
    if !names.is_empty() {
        lines.push(format!(
            "Oversubscribed, because the vCPUs leave none of the {} processors to the migration: {}.",
            document.host.cores,
            names.join(", ")
        ));
    }
    lines.extend(document.summary.get("answer").and_then(Value::as_str).map(str::to_owned));
    lines
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let mut text = conditions(document).join("\n");
    text.push('\n');
    for (purpose, columns, _) in TABLES {
        let rows: Vec<_> = document.with_purpose(purpose).map(|case| cells(case, columns)).collect();
        if !rows.is_empty() {
            text.push_str(&format!("{}\n", grid(&head(columns), &rows)));
        }
    }
    for (head, rows) in extra_tables(document) {
        if !rows.is_empty() {
            text.push_str(&format!("{}\n", grid(head, &rows)));
        }
    }
    text.push_str(&document.skipped_text());
    text.push_str(&document.failures_text());
    text
}

/// Returns the rows that show whether a guest that stalls less migrates longer.
fn stall_and_total(document: &Document) -> Vec<Vec<String>> {
    let verdict = |row: &Value, field: &str| match &row[field] {
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        _ => "within the spread".to_owned(),
    };
    let row = |row: &Value| {
        vec![
            text(&row["name"]),
            number(&row["stall_pct"], 2),
            number(&row["fixed_stall_pct"], 2),
            verdict(row, "stalls_less"),
            number(&row["total_ms"], 0),
            number(&row["fixed_total_ms"], 0),
            number(&row["total_to_fixed"], 3),
            verdict(row, "takes_longer"),
            if row["timed_out"] == true { "ended by the timeout".into() } else { String::new() },
        ]
    };
    list(document, "stall_and_total").map(row).collect()
}

/// Titles of the table of stalls and total times.
const STALL_AND_TOTAL: [&str; 9] = [
    "stalls and total time",
    "stall %",
    "fixed",
    "stalls less",
    "total ms",
    "fixed",
    "ratio",
    "takes longer",
    "",
];

/// Titles of the table of slowest windows.
const WORST: [&str; 7] = [
    "worst ms/GB",
    "published",
    "predict",
    "published to bitmap",
    "predict to log",
    "published to fixed",
    "predict to fixed",
];

/// Returns the slowest window of a case beside the published one.
fn worst_row(row: &Value) -> Vec<String> {
    let columns = [
        ("published_worst_ms_per_gb", 0),
        ("worst_ms_per_gb", 0),
        ("published_worst_to_bitmap", 2),
        ("worst_to_log", 2),
        ("published_worst_to_fixed", 2),
        ("worst_to_fixed", 2),
    ];
    let cells = columns.map(|(name, digits)| number(&row[name], digits));
    [text(&row["name"])].into_iter().chain(cells).collect()
}

/// Table of the summary: titles of the columns, and rows.
type Extra = (&'static [&'static str], Vec<Vec<String>>);

/// Returns the cost of `predict` for the guest's speed, stalls and total times, drops and slowest
/// windows compared with published ones, and the goals.
fn extra_tables(document: &Document) -> [Extra; 5] {
    let mut paid = Vec::new();
    let cases = document.summary.get("predict_to_fixed").and_then(Value::as_object);
    for (case, sizes) in cases.into_iter().flatten() {
        for (entries, ratios) in sizes.as_object().into_iter().flatten() {
            let ratio = |name: &str| number(&ratios[name]["median"], 2);
            paid.push(vec![
                format!("{case}/{entries}"),
                ratio("writes_during_per_s"),
                ratio("faults"),
                ratio("passes"),
                ratio("wire_gbytes"),
                ratio("total_ms"),
                ratio("downtime_ms"),
            ]);
        }
    }
    let published = |columns: [(&str, usize); 4]| -> Vec<Vec<String>> {
        let row = |row: &Value| {
            let cells = columns.map(|(name, digits)| number(&row[name], digits));
            [text(&row["name"])].into_iter().chain(cells).collect()
        };
        list(document, "published").map(row).collect()
    };
    let drops = [("published_to_bitmap", 2), ("to_log", 2), ("published_to_fixed", 2), ("to_fixed", 2)];
    let worst = list(document, "published").map(worst_row).collect();
    [
        (&STALL_AND_TOTAL, stall_and_total(document)),
        (&["predict to fixed", "writes/s", "faults", "passes", "GB sent", "total", "downtime"], paid),
        (
            &[
                "drop, ratio",
                "published to bitmap",
                "predict to log",
                "published to fixed",
                "predict to fixed",
            ],
            published(drops),
        ),
        (&WORST, worst),
        (&GOALS, goals(document)),
    ]
}

/// Returns a page with the tables and a chart for each case and ring size.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench reaper: cost of dirty-page tracking for the guest");
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
    page.heading("The guest's speed");
    page.note(
        "Each line is the round with the median speed, in windows of 100 ms. Time runs from the command to migrate; a mark \
         at the upper edge is the end of that migration.",
    );
    for (name, entries, cases) in groups(document) {
        let chart = chart(name, entries, &cases);
        page.figure(&chart, &caption(&cases));
    }
    for (purpose, columns, title) in TABLES {
        let rows: Vec<_> = document.with_purpose(purpose).map(|case| cells(case, columns)).collect();
        if !rows.is_empty() {
            page.heading(title);
            let head: Vec<&str> = ["case"].into_iter().chain(columns.iter().map(|column| column.0)).collect();
            page.table(&head, &rows);
        }
    }
    let titles = [
        "Stalls and total time, compared with fixed",
        "Cost of the higher speed in migration time: predict to fixed",
        "Drops compared with published ones",
        "Slowest windows compared with published ones",
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

/// Returns the cases of each chart: for each case name and ring size, the cases with that size and
/// those without rings.
fn groups(document: &Document) -> Vec<(&str, u64, Vec<&Case>)> {
    let mut names: Vec<&str> = Vec::new();
    let charted = || CHARTS.into_iter().flat_map(|purpose| document.with_purpose(purpose));
    for case in charted() {
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
                    && size.is_none_or(|size| size == entries)
            };
            let cases: Vec<&Case> = charted().filter(own).collect();
            if cases.iter().any(|case| case.params.get("ring_entries").is_some_and(|size| !size.is_null())) {
                groups.push((name, entries, cases));
            }
        }
    }
    groups
}

fn chart(name: &str, entries: u64, cases: &[&Case]) -> Chart {
    let lines: Vec<Line> = cases.iter().filter_map(|case| line(case)).collect();
    let highest = lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y).fold(0.0, f64::max);
    let deepest = cases.iter().filter_map(|case| case.metrics.get("writes_during_per_s").copied());
    let deepest = deepest.fold(f64::INFINITY, f64::min);
    Chart {
        title: format!("{name}, rings of {entries} entries"),
        x_label: "seconds since the command to migrate".into(),
        y_label: "guest writes per second".into(),
        log_y: deepest < highest * DEEP,
        start: Some((0.0, "migration starts".into())),
        end_name: "migration ends".into(),
        lines,
        ..Chart::default()
    }
}

fn line(case: &Case) -> Option<Line> {
    let series: &Series = case.series.as_ref()?;
    let name = case.params.get("line").and_then(Value::as_str).unwrap_or(&case.name);
    let tone = match name {
        "fixed" => Tone::Vermilion,
        "gears" => Tone::Amber,
        "aimd" | "log, throttle all" | "log, throttle writers" => Tone::Green,
        "aimd-own" => Tone::Cyan,
        "ring, throttle all" => Tone::Amber,
        "ring, throttle writers" => Tone::Vermilion,
        "predict" => Tone::Blue,
        "QEMU bitmap" | "QEMU bitmap, stepped" => Tone::Purple,
        "QEMU ring" | "QEMU ring, stepped" => Tone::Brown,
        _ => Tone::Grey,
    };
    let mut at = series.from_s + series.step_s / 2.0;
    let mut points = Vec::with_capacity(series.values.len());
    for value in &series.values {
        points.push((at, to_f64(*value)));
        at += series.step_s;
    }
    Some(Line { name: name.into(), tone, points, end: Some(series.end_s) })
}

fn caption(cases: &[&Case]) -> String {
    let Some(case) = cases.first() else { return String::new() };
    let number = |name: &str| case.params.get(name).and_then(Value::as_u64).unwrap_or(0);
    let link = match number("max_bandwidth_bytes_per_s") / 1_000_000 {
        0 => "link without a cap".to_owned(),
        rate => format!("link capped at {rate} MB/s"),
    };
    let oversubscribed = case.params.get("oversubscribed") == Some(&Value::Bool(true));
    format!(
        "{} vCPU(s){}, workload {}, {link}, timeout {} s.",
        number("vcpus"),
        if oversubscribed { " (oversubscribed)" } else { "" },
        case.params.get("workload").and_then(Value::as_str).unwrap_or("-"),
        number("timeout_ms") / 1000
    )
}
