//! `vmferry-bench free-page`: what it takes to know a guest's free pages.

use crate::html::Page;
use crate::json::Document;
use crate::plain::{self, Group};
use crate::tables;
use serde_json::Value;

/// The groups of cases: name, title, columns.
const GROUPS: &[Group] = &[
    (
        "learn",
        "Until the free pages of an idle guest are known",
        &[
            ("total ms", "total_ms", 3, true),
            ("allocating ms", "alloc_ms", 1, false),
            ("sending ms", "send_ms", 1, false),
            ("translating ms", "translate_ms", 1, false),
            ("madvise ms", "madvise_ms", 1, false),
            ("walk ms", "walk_ms", 2, false),
            ("requests", "requests", 0, false),
            ("pages", "pages", 0, false),
            ("above 4G", "pages_above_4g", 0, false),
            ("of free", "of_free", 3, false),
        ],
    ),
    (
        "drop",
        "Touched memory given back",
        &[("madvise ms/GiB", "madvise_ms_per_gib", 2, true), ("returned", "returned_of_given", 3, false)],
    ),
    (
        "move",
        "A guest that has freed most of its memory moves",
        &[
            ("total ms", "total_ms", 0, true),
            ("downtime ms", "downtime_ms", 1, true),
            ("first page ms", "first_page_ms", 2, true),
            ("wire MB", "wire_mb", 0, true),
            ("data MB", "data_mb", 0, false),
            ("skipped pages", "skipped_pages", 0, false),
            ("freed MB", "freed_mb", 0, false),
            ("passes", "passes", 0, false),
        ],
    ),
];

/// The host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    if let Some(why) = document.summary.get("smaller").and_then(Value::as_str) {
        lines.push(format!("The idle guest is smaller than the published 8 GiB: {why}."));
    }
    lines.push(
        "Inflation is timed by the guest's clock, hints and map by the host's, from asking until all is in a set of pages in its \
         hands. Allocating, sending, translating and madvise add up to an inflation but for the guest's loop; QEMU's host part is \
         in sending. Walk: the guest's part of hints, telling the host included; the rest is the guest's look at what it is asked."
            .into(),
    );
    lines
}

/// The document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// The document as a page.
pub fn page(document: &Document) -> String {
    let title =
        "vmferry-bench free-page: what it takes to know a guest's free pages, and what that is good for";
    plain::page(title, document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// The same as a part of a page.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &plain::of_groups(document, GROUPS));
}
