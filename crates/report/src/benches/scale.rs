//! Report of `vmferry-bench scale`: cost of a migration as the guest or the host grows.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain;
use crate::svg::{Chart, Line, Tone};
use crate::tables::{self, Column, GOALS, cells, grid, head, host, list, number, text};
use crate::to_f64;
use serde_json::Value;

/// Curves: name in the results, title, label of the axis.
const CURVES: [(&str, &str, &str); 5] = [
    ("memory-touched", "Memory that has content", "guest memory"),
    ("memory-sparse", "Memory of which 64 MiB were touched", "guest memory"),
    ("vcpus", "vCPUs", "vCPU threads"),
    ("guests", "Guests on the host", "guests beside the guest that moves"),
    ("working-set", "Working set", "working set"),
];

/// Kinds of guests: name in the results, name in titles.
const GUESTS: [(&str, &str); 2] = [("process", "process guest"), ("kvm", "KVM guest")];

/// Columns of the table of times.
const TIMES: &[Column] = &[
    ("total ms", "total_ms", 1, true),
    ("/ 1 GiB", "total_to_1g", 2, true),
    ("downtime ms", "downtime_ms", 2, true),
    ("explained", "explained_share", 3, true),
    ("setup ms", "setup_ms", 2, true),
    ("tracking ms", "enable_tracking_ms", 2, true),
    ("harvest ms", "harvest_mean_ms", 2, false),
    ("longest", "harvest_max_ms", 2, true),
    ("last", "harvest_last_ms", 2, false),
    ("passes", "passes", 0, false),
    ("source CPU ms", "source_cpu_ms", 0, true),
    ("target CPU ms", "target_cpu_ms", 0, true),
];

/// Columns of the table of memory.
const MEMORY: &[Column] = &[
    ("sent MiB", "data_mib", 0, false),
    ("bookkeeping MiB", "bookkeeping_mib", 1, true),
    ("source added", "source_added_mib", 1, false),
    ("target added", "target_added_mib", 1, false),
    ("source before", "source_base_mib", 1, false),
    ("target before", "target_base_mib", 1, false),
    ("source page tables", "source_page_tables_mib", 2, false),
    ("target page tables", "target_page_tables_mib", 2, false),
];

/// Columns of the table of the guests beside the guest that moves.
const BESIDE: &[Column] = &[
    ("start ms", "start_ms", 1, true),
    ("overhead MiB", "overhead_mib", 2, true),
    ("largest", "overhead_max_mib", 2, false),
    ("private MiB", "private_mib", 2, true),
    ("page tables MiB", "page_tables_mib", 2, false),
    ("host MiB", "host_mib", 2, true),
];

/// Lines of a chart: metric, name, colour.
const LINES: [(&str, &str, Tone); 5] = [
    ("total_ms", "total", Tone::Blue),
    ("downtime_ms", "downtime", Tone::Vermilion),
    ("setup_ms", "setup", Tone::Green),
    ("enable_tracking_ms", "enabling tracking", Tone::Purple),
    ("harvest_max_ms", "longest harvest", Tone::Amber),
];

/// Figures whose slopes are shown.
const SLOPES: [&str; 10] = [
    "total_ms",
    "downtime_ms",
    "setup_ms",
    "enable_tracking_ms",
    "harvest_max_ms",
    "source_cpu_ms",
    "target_cpu_ms",
    "bookkeeping_mib",
    "overhead_mib",
    "start_ms",
];

/// Titles of the columns of the slopes.
const SLOPE_HEAD: [&str; 5] = ["curve", "per doubling", "per unit", "unit", "exponent"];

/// Prefix and suffix of the metrics that are parts of the downtime.
const PART: (&str, &str) = ("part_", "_ms");

/// Table as text.
struct Block {
    title: String,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = host(document);
    lines.push(
        "Each guest moves over loopback to another process of this host, and all vCPUs together write 50,000 times a second. \
         Explained: sum of the parts of the downtime, divided by the downtime. Harvest: mean over the passes. CPU: the \
         process without its vCPU threads, from the command to the end."
            .into(),
    );
    lines.push(
        "Bookkeeping: resident memory that the migration added at its peak, without guest memory; the larger one of source and \
         target. Before: resident memory before the migration, without guest memory. Overhead: proportional set size without \
         guest memory, the mean of all guests beside the guest that moves. Private: the part that no other process maps. Host: \
         available memory that the host lost for each guest, without guest memory."
            .into(),
    );
    lines.push(
        "Slopes are least-squares fits to the medians of the points. Per doubling: change of the figure when the axis doubles. \
         Per unit: change for each unit of the axis. Exponent: 0 if the figure does not depend on the axis, 1 if it is \
         proportional to the axis."
            .into(),
    );
    lines
}

/// Returns the measured cases of a curve.
fn of_curve<'a>(document: &'a Document, curve: &str) -> Vec<&'a Case> {
    let own = |case: &&Case| case.params.get("case").is_some_and(|own| own == curve);
    document.cases.iter().filter(own).filter(|case| !case.metrics.is_empty()).collect()
}

/// Returns the tables of a curve that have rows.
fn of_cases(title: &str, cases: &[&Case]) -> Vec<Block> {
    let table = |what: &str, columns: &[Column]| {
        let has = |case: &&&Case| columns.iter().any(|column| case.metrics.contains_key(column.1));
        Block {
            title: format!("{title}: {what}"),
            head: head(columns).into_iter().map(String::from).collect(),
            rows: cases.iter().filter(has).map(|case| cells(case, columns)).collect(),
        }
    };
    let mut tables = vec![
        table("times", TIMES),
        parts(title, cases),
        table("memory", MEMORY),
        table("each guest beside the guest that moves", BESIDE),
    ];
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Returns the table of the parts of the downtime, with a column for each part that a case has.
fn parts(title: &str, cases: &[&Case]) -> Block {
    let mut names: Vec<&str> = Vec::new();
    for name in cases.iter().flat_map(|case| case.metrics.keys()) {
        let part = name.strip_prefix(PART.0).and_then(|part| part.strip_suffix(PART.1));
        if let Some(part) = part.filter(|part| !names.contains(part)) {
            names.push(part);
        }
    }
    let row = |case: &&Case| {
        let of = |part: &&str| case.text(&format!("{}{part}{}", PART.0, PART.1), 3);
        [case.name.clone()].into_iter().chain(names.iter().map(of)).collect()
    };
    let rows = if names.is_empty() { Vec::new() } else { cases.iter().map(row).collect() };
    let head = ["case".to_owned()].into_iter().chain(names.iter().map(|name| name.replace('_', " ")));
    Block { title: format!("{title}: parts of the downtime in ms"), head: head.collect(), rows }
}

/// Returns the tables of slopes and goals that have rows.
fn conclusions(document: &Document) -> Vec<Block> {
    let shown = list(document, "slopes").filter(|slope| SLOPES.iter().any(|name| slope["metric"] == *name));
    let row = |slope: &Value| {
        let of = |name: &str| text(&slope[name]);
        let name = format!("{}/{} {}", of("curve"), of("guest"), of("metric"));
        let [doubling, unit] = ["per_doubling", "per_unit"].map(|name| number(&slope[name], 4));
        vec![name, doubling, unit, of("unit"), number(&slope["exponent"], 2)]
    };
    let owned = |head: &[&str]| head.iter().map(|title| (*title).to_owned()).collect();
    let mut tables = vec![
        Block { title: "Slopes".into(), head: owned(&SLOPE_HEAD), rows: shown.map(row).collect() },
        Block { title: "Goals".into(), head: owned(&GOALS), rows: tables::goals(document) },
    ];
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let mut text = conditions(document).join("\n");
    text.push('\n');
    let curves = CURVES.iter().flat_map(|(name, title, _)| of_cases(title, &of_curve(document, name)));
    for Block { title, head, rows } in curves.chain(conclusions(document)) {
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        text.push_str(&format!("{title}\n{}\n", grid(&head, &rows)));
    }
    text.push_str(&document.skipped_text());
    text.push_str(&document.failures_text());
    text
}

/// Returns a page with the tables, and a chart for each curve and kind of guest.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench scale: cost of a migration as the guest or the host grows");
    section(&mut page, document);
    page.finish()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    conditions(document).iter().for_each(|line| page.note(line));
    for (curve, title, axis) in CURVES {
        let cases = of_curve(document, curve);
        for (guest, name) in GUESTS {
            if let Some(chart) = chart(&format!("{title}, {name}"), axis, guest, &cases) {
                page.figure(&chart, "Medians of the rounds. The axis is logarithmic.");
            }
        }
        add(page, of_cases(title, &cases));
    }
    add(page, conclusions(document));
    plain::remarks(page, document);
}

fn add(page: &mut Page, tables: Vec<Block>) {
    for Block { title, head, rows } in tables {
        page.heading(&title);
        page.table(&head, &rows);
    }
}

/// Returns the chart of the times of one kind of guest, or `None` if fewer than two points were
/// measured. The axis is logarithmic.
fn chart(title: &str, axis: &str, guest: &str, cases: &[&Case]) -> Option<Chart> {
    let own = cases.iter().filter(|case| case.params.get("guest").is_some_and(|own| own == guest));
    let at = |case: &Case| case.params.get("at").and_then(Value::as_u64).filter(|at| *at > 0);
    let mut points: Vec<(f64, &Case)> =
        own.filter_map(|case| Some((to_f64(at(case)?).log2(), *case))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ends = points.first().zip(points.last()).map(|(first, last)| (first.0, last.0));
    let ends = ends.filter(|(first, last)| first < last)?;
    let mark = |(x, case): &(f64, &Case)| {
        let side = case.params.get("side").and_then(Value::as_str).unwrap_or_default();
        (*x, side.rsplit('-').next().unwrap_or_default().to_owned())
    };
    let line = |(metric, name, tone): (&str, &str, Tone)| {
        let value = |(x, case): &(f64, &Case)| Some((*x, *case.metrics.get(metric)?));
        Line { name: name.into(), tone, points: points.iter().filter_map(value).collect(), end: None }
    };
    Some(Chart {
        title: title.into(),
        x_label: axis.into(),
        y_label: "ms".into(),
        log_y: true,
        ranges: [Some(ends), None],
        x_marks: points.iter().map(mark).collect(),
        lines: LINES.into_iter().map(line).filter(|line| !line.points.is_empty()).collect(),
        ..Chart::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;
    use serde_json::json;

    fn document() -> Document {
        let mut document = Document::new("scale", Host::default());
        for (side, at, total) in [("process-1G", 1_u64 << 30, 300.0), ("process-4T", 4 << 40, 450.0)] {
            let mut case = Case::new(format!("memory-sparse/{side}"))
                .param("case", "memory-sparse")
                .param("guest", "process")
                .param("side", side)
                .param("at", at);
            case.metric("total_ms", total);
            case.metric("part_pause_ms", 0.125);
            case.metric("part_pause_ms_max", 0.25);
            document.cases.push(case);
        }
        let slope = json!({"curve": "memory-sparse", "guest": "process", "metric": "total_ms", "unit": "GiB",
            "points": 2, "per_unit": 0.0366, "per_doubling": 12.5, "exponent": null});
        document.summary.insert("slopes".into(), json!([slope]));
        document.cases.push(Case::skipped("memory-sparse/kvm-4T", "too large"));
        document
    }

    #[test]
    fn page_has_a_chart_with_the_points_of_each_curve() {
        let page = page(&document());
        assert_eq!(page.matches("<polyline").count(), 1, "{page}");
        for part in [">1G</text>", ">4T</text>", "Memory of which 64 MiB were touched, process guest"] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
    }

    #[test]
    fn tables_have_parts_slopes_and_skipped_points() {
        let text = table(&document());
        for part in
            ["pause", "0.125", "memory-sparse/process total_ms", "12.5000", "skipped memory-sparse/kvm-4T"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        // Extremes are no parts of the downtime.
        assert!(!text.contains("pause ms max"), "{text}");
    }

    #[test]
    fn curve_with_one_point_has_no_chart() {
        let mut document = document();
        document.cases.remove(1);
        assert!(!page(&document).contains("<polyline"));
    }
}
