//! From runs to the document, and from the document to tables for a terminal.

use serde_json::Value;

use super::Options;
use super::figures::Single;
use super::goals::{Summary, goals};
use super::spec::{One, ReportMode};
use crate::json::Document;
use crate::reaper::to_f64;
use crate::report::html::Page;
use crate::report::plain::{self, Group};
use crate::report::tables;
use crate::rounds::SideRuns;
use crate::stats::Spread;

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

/// Adds how much slower each side was than the one without reports, round by round.
pub(super) fn add_slowdown(document: &mut Document, sides: &[SideRuns<One, Single>]) {
    let work = |runs: &SideRuns<One, Single>| -> Vec<Option<f64>> {
        runs.rounds.iter().map(|run| run.as_ref().map(|run| to_f64(run.told.work_ns))).collect()
    };
    for runs in sides.iter().filter(|runs| runs.side.report.mode != ReportMode::Off) {
        let off = One { report: ReportMode::Off.into(), ..runs.side };
        let Some(off) = sides.iter().find(|runs| runs.side == off) else { continue };
        let slower = Spread::of_ratios(&work(runs), &work(off));
        let percent = |ratio: f64| (ratio - 1.0) * 100.0;
        let slower = slower.map(|ratio| Spread {
            median: percent(ratio.median),
            min: percent(ratio.min),
            max: percent(ratio.max),
            repeats: ratio.repeats,
        });
        let name = format!("one/{}", runs.side);
        if let Some(case) = document.cases.iter_mut().find(|case| case.name == name) {
            case.spread("slowdown_pct", slower);
        }
    }
}

/// Adds what concerns the whole run.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let known: Vec<(&str, Value)> =
        Summary::of(document).known().map(|(name, value)| (name, value.into())).collect();
    let rest = [
        ("rounds", Value::from(options.repeats)),
        ("goals", goals(document).into()),
        ("failures", failures.into()),
    ];
    document.summary.extend(known.into_iter().chain(rest).map(|(name, value)| (name.to_owned(), value)));
}

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
    let title = "vmferry bench density: memory that guests give back while they run";
    plain::page(title, document, &conditions(document), &plain::of_groups(document, GROUPS))
}

/// The same as a part of a page.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &plain::of_groups(document, GROUPS));
}
