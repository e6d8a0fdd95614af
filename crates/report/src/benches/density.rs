//! `vmferry-bench density`: how many guests fit that give back what they free.

use crate::html::Page;
use crate::json::Document;
use crate::plain::{self, Group};
use crate::tables;

/// The groups of cases: name, title, columns.
const GROUPS: &[Group] = &[
    (
        "fleet",
        "Guests that fit",
        &[
            ("guests", "guests", 0, false),
            ("killed", "killed", 0, false),
            ("MB used", "used_mb", 0, false),
            ("MB a guest", "mb_per_guest", 1, false),
            ("took s", "took_s", 1, false),
        ],
    ),
    (
        "one",
        "A guest that allocates, touches and frees",
        &[
            ("work ms", "work_ms", 1, true),
            ("slower by %", "slowdown_pct", 1, true),
            ("residue %", "residue_pct", 2, true),
            ("free p99 us", "free_p99_us", 2, true),
            ("free max us", "free_max_us", 0, true),
            ("back after ms", "returned_ms", 1, true),
            ("longest report ms", "report_max_ms", 2, true),
            ("report us/4M", "report_us_per_4m", 1, true),
            ("madvise us/4M", "madvise_us_per_4m", 1, true),
            ("report / madvise", "report_to_madvise", 2, false),
            ("freed MB", "freed_mb", 0, false),
        ],
    ),
];

fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(
        "Fleets run once: guests in a memory cgroup of their own, without swap, one after another, until one is killed or 32 have \
         finished. Residue: what is resident of a guest that has freed everything (fragmented: all but one page in 64), less what \
         a guest that allocates nothing has, and what is in use, by what it freed. Work: allocating, touching, checking and \
         freeing, all vCPUs together; slower by: against the side without reports in the same round. Once, the memory is \
         the guest's first; again, what was given back must be had again. Back: from the last free to the end of the last report; \
         a report ends when the host has dropped the pages."
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
    let title = "vmferry-bench density: memory that guests give back while they run";
    plain::page(title, document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// The same as a part of a page.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &plain::of_groups(document, GROUPS));
}
