//! Report of `vmferry-bench rtt`: the floor of a remote fault.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain;
use crate::tables::{Column, cells, grid, host};
use comfy_table::Table;
use serde_json::Value;

/// Columns of the table of cases, after the mean.
const COLUMNS: &[Column] = &[
    ("p50", "p50_us", 1, true),
    ("p99", "p99_us", 1, true),
    ("max", "max_us", 0, true),
    ("/ idle", "ratio_to_idle", 2, true),
    ("p99 / idle", "p99_ratio_to_idle", 2, true),
    ("bulk Gb/s", "bulk_gbps", 2, true),
    ("share", "bulk_share", 2, true),
    ("other Gb/s", "other_gbps", 2, true),
    ("Jain", "jain", 3, true),
];

/// Explanation of the figures.
const NOTE: &str = "1 ms between requests, except back to back. / idle: ratio\nof the means. Share: of the shaped link, or of what \
                    loopback carries unpaced. Other: the second stream; of\nfound-changing, the same stream while its link had \
                    half of its rate.";

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let host = &document.host;
    let mut text = format!(
        "{} cores, Linux {}, TCP {} unless noted otherwise\n",
        host.cores, host.kernel, host.congestion_control
    );
    text.extend(host.busy_text());
    text.push_str(&cases_table(document).to_string());
    text.push_str(&format!("\nMedians of rounds, with the distance of the farthest round. {NOTE}\n"));
    text.push_str(&document.skipped_text());
    floors(document).for_each(|floor| text.push_str(&format!("{floor}\n")));
    text.push_str(&document.failures_text());
    text
}

/// Returns a line for the floor of each link.
fn floors(document: &Document) -> impl Iterator<Item = String> {
    let links = document.summary.get("links").and_then(Value::as_object).into_iter().flatten();
    links.map(|(link, floor)| {
        let of = |name: &str| {
            floor.get(name).and_then(Value::as_f64).map_or("-".to_owned(), |us| format!("{us:.1}"))
        };
        format!(
            "floor {link}: {} us = {} us round trip + {} us local fault (spinning handler: {} us)",
            of("floor_us"),
            of("rtt_us"),
            of("local_fault_us"),
            of("floor_spinning_us")
        )
    })
}

fn cases_table(document: &Document) -> Table {
    let (head, rows) = head_and_rows(document);
    grid(&head, &rows)
}

fn head_and_rows(document: &Document) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let head = ["case", "mean us"].into_iter().chain(COLUMNS.iter().map(|(title, ..)| *title)).collect();
    let row = |case: &Case| {
        let mean = if case.metrics.contains_key("rtt_us") { "rtt_us" } else { "local_fault_us" };
        let mut row = cells(case, COLUMNS);
        row.insert(1, case.spread_text(mean, 1));
        row
    };
    (head, document.cases.iter().filter(|case| case.skipped.is_none()).map(row).collect())
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for line in host(document) {
        page.note(&line);
    }
    page.note(NOTE);
    let (head, rows) = head_and_rows(document);
    page.table(&head, &rows);
    floors(document).for_each(|floor| page.paragraph(&floor));
    plain::remarks(page, document);
}
