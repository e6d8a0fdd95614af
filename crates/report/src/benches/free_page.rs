//! Report of `vmferry-bench free-page`: time and cost to learn a guest's free pages.

use crate::html::Page;
use crate::json::Document;
use crate::plain::{self, Group};
use crate::tables::{self, Column};
use serde_json::Value;

/// Columns of the migrations whose source waits for the guest's answer.
const WAIT: &[Column] = &[
    ("total ms", "total_ms", 0, true),
    ("downtime ms", "downtime_ms", 1, true),
    ("waited ms", "waited_ms", 1, true),
    ("first answer ms", "first_answer_ms", 1, false),
    ("first page ms", "first_page_ms", 1, false),
    ("wire MB", "wire_mb", 0, true),
    ("skipped pages", "skipped_pages", 0, false),
    ("passes", "passes", 0, false),
];

/// Groups of cases: name, title, columns.
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
        "Touched memory that the guest returned",
        &[("madvise ms/GiB", "madvise_ms_per_gib", 2, true), ("returned", "returned_of_given", 3, false)],
    ),
    (
        "move",
        "Migration of a guest that has freed most of its memory",
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
    (
        "low",
        "Rounds of a guest that is short of memory",
        &[
            ("work ms", "work_ms", 1, true),
            ("waits: reported", "waits_reported", 0, false),
            ("held", "waits_held", 0, false),
            ("balloon", "waits_balloon", 0, false),
            ("wait ms", "wait_ms", 2, true),
            ("longest ms", "wait_max_ms", 2, true),
            ("failed", "alloc_failed", 0, false),
            ("while held", "failed_held", 0, false),
            ("short rounds", "short_rounds", 0, false),
            ("short inflations", "inflate_short", 0, false),
            ("taken back MB", "taken_back_mb", 0, false),
            ("frees missed", "frees_missed", 0, false),
        ],
    ),
    ("wait-1gbit", "Waits for the guest's answer before the first page, at 1 Gb/s", WAIT),
    ("wait-10gbit", "Waits for the guest's answer before the first page, at 10 Gb/s", WAIT),
    ("wait-loopback", "Waits for the guest's answer before the first page, on loopback", WAIT),
];

/// Returns true if the report has a table for the group `name`.
pub fn has_group(name: &str) -> bool {
    GROUPS.iter().any(|(group, ..)| *group == name)
}

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    if let Some(why) = document.summary.get("smaller").and_then(Value::as_str) {
        lines.push(format!("The idle guest is smaller than the published 8 GiB: {why}."));
    }
    lines.push(
        "Inflation is measured with the guest's clock. Hints and map are measured with the host's clock, from the request until the \
         host has all pages in a set. Allocating, sending, translating and madvise are the parts of an inflation, except the \
         guest's loop. QEMU's part on the host is included in sending. Walk: the guest's part of hints, including the messages \
         to the host. The rest is the time until the guest has read the request."
            .into(),
    );
    lines
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// Returns the document as a page.
pub fn page(document: &Document) -> String {
    let title = "vmferry-bench free-page: cost and benefit of learning a guest's free pages";
    plain::page(title, document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &plain::of_groups(document, GROUPS));
}
