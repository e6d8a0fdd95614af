//! Report of `vmferry-bench density`: number of guests that fit if they return freed memory.

use crate::html::Page;
use crate::json::Document;
use crate::plain::{self, Group};
use crate::tables;

/// Groups of cases: name, title, columns.
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
            ("alloc ns", "alloc_mean_ns", 0, true),
            ("alloc slower by %", "alloc_mean_slowdown_pct", 1, true),
            ("free ns", "free_mean_ns", 0, true),
            ("free slower by %", "free_mean_slowdown_pct", 1, true),
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
        "Fleets: guests start one after another in their own memory cgroup without swap, until one is killed or 32 have \
         finished. Residue: resident memory of a guest that has freed everything (fragmented: all but one page in 64), minus the \
         resident memory of a guest that allocates nothing and minus the memory in use, divided by the freed memory. Work: \
         allocating, touching, checking and freeing, all vCPUs together. Slower by: compared with the case of the same VMM without \
         reports and hints in the same round. Alloc and free: mean time of one call, without touching. Hints: the guest can walk its \
         free lists on demand, or keeps a map of its free pages (incremental); the host does not ask. Qemu: the same guest in a \
         QEMU microvm, and with reports free-page-reporting=on. Once: the guest uses the memory for the first time. Again: the guest must get returned memory again. \
         Back after: from the last free to the end of the last report. A report ends when the host has dropped the pages."
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
    let title = "vmferry-bench density: memory that running guests return";
    plain::page(title, document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &plain::of_groups(document, GROUPS));
}
