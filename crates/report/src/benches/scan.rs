//! Report of `vmferry-bench scan`: walks through a dirty bitmap.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::{plain, tables};
use serde_json::Value;

fn text<'a>(case: &'a Case, param: &str) -> &'a str {
    case.params.get(param).and_then(Value::as_str).unwrap_or_default()
}

/// Table of some kinds of cases: title, kinds, columns.
type Kinds = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

const TABLES: [Kinds; 5] = [
    (
        "Walks: times of other implementations, divided by ours",
        &["bits", "runs"],
        &[
            ("ours us", "ours_us"),
            ("/bytes", "ratio_to_bytes"),
            ("/words", "ratio_to_words"),
            ("/word bytes", "ratio_to_word_bytes"),
            ("/iterator", "ratio_to_iterator"),
            ("/avx2", "ratio_to_avx2"),
            ("/portable", "ratio_to_portable"),
            ("/fixedbitset", "ratio_to_fixedbitset"),
            ("/bitvec", "ratio_to_bitvec"),
            ("/roaring", "ratio_to_roaring_from_words"),
            ("/compressed", "ratio_to_roaring"),
        ],
    ),
    (
        "Empty bitmaps, compared with reading them",
        &["empty"],
        &[
            ("read us", "read_us"),
            ("GB/s", "read_gbytes_per_s"),
            ("bits: of it", "bits_of_read"),
            ("runs: of it", "runs_of_read"),
        ],
    ),
    (
        "With a summary level",
        &["summary"],
        &[
            ("summary us", "summary_us"),
            ("/flat", "ratio_to_flat"),
            ("/compressed", "ratio_to_roaring"),
            ("/iterator", "ratio_to_summary_iterator"),
        ],
    ),
    (
        "Cost of maintaining a summary",
        &["upkeep"],
        &[
            ("summary ns", "summary_ns"),
            ("flat ns", "flat_ns"),
            ("one pass us", "one_pass_us"),
            ("two us", "two_passes_us"),
            ("summary us", "summary_us"),
            ("flat us", "flat_us"),
            ("first / second", "ratio"),
        ],
    ),
    (
        "Bitmaps of real migrations: all calls together",
        &["recorded"],
        &[
            ("ours ms", "ours_ms"),
            ("bytes ms", "bytes_ms"),
            ("words ms", "words_ms"),
            ("word bytes ms", "word_bytes_ms"),
            ("clock ms", "clock_ms"),
            ("bytes / ours", "ratio_to_bytes"),
            ("bytes / word bytes", "bytes_to_word_bytes"),
            ("published", "published_bytes_to_word_bytes"),
            ("published bytes ms", "published_bytes_ms"),
            ("word bytes ms", "published_word_bytes_ms"),
        ],
    ),
];

fn head_and_rows(document: &Document, (_, kinds, columns): Kinds) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let head = ["case"].into_iter().chain(columns.iter().map(|(title, _)| *title)).collect();
    let row = |case: &Case| {
        let value = |metric: &&'static str| {
            // Published figures are parameters of a case, because this run did not measure them.
            let param = || case.params.get(*metric).and_then(Value::as_f64);
            case.metrics.get(*metric).copied().or_else(param).map_or("-".into(), |value| {
                let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                format!("{value:.digits$}")
            })
        };
        [case.name.clone()].into_iter().chain(columns.iter().map(|(_, metric)| value(metric))).collect()
    };
    (head, document.cases.iter().filter(|case| kinds.contains(&text(case, "kind"))).map(row).collect())
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    tables::host(document).iter().for_each(|line| page.note(line));
    page.note(NOTE);
    for table in TABLES {
        let (head, rows) = head_and_rows(document, table);
        if !rows.is_empty() {
            page.heading(table.0);
            page.table(&head, &rows);
        }
    }
    plain::targets(page, document);
    plain::remarks(page, document);
}

/// Explanation of the tables.
const NOTE: &str = "Times of other implementations divided by ours, medians of rounds. roaring: from a log of words; compressed: from its own format.";

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let host = &document.host;
    let scanner = document.summary.get("scanner").and_then(Value::as_str).unwrap_or("unknown");
    let mut out = format!("{}, {} cores, Linux {}, scanner {scanner}\n", host.cpu, host.cores, host.kernel);
    for (index, table) in TABLES.into_iter().enumerate() {
        let (head, rows) = head_and_rows(document, table);
        if rows.is_empty() {
            continue;
        }
        out.push_str(&format!("{}\n", tables::grid(&head, &rows)));
        if index == 0 {
            out.push_str(&format!("{NOTE}\n"));
        }
    }
    out.push_str(&document.skipped_text());
    for target in document.summary.get("targets").and_then(Value::as_array).into_iter().flatten() {
        let text = |name: &str| target.get(name).and_then(Value::as_str).unwrap_or("-");
        let got = target.get("got").and_then(Value::as_f64).unwrap_or(f64::NAN);
        let case = document.summary.get(&format!("{}_case", text("name"))).and_then(Value::as_str);
        let verdict = tables::verdict(target);
        out.push_str(&format!(
            "{verdict:12} {} {}: {got:.2} {}\n",
            text("name"),
            text("want"),
            case.map_or(String::new(), |case| format!("({case})"))
        ));
    }
    out
}
