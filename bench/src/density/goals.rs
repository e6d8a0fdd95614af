//! Goals of the bench, and published results to compare with.

use serde_json::Value;
use vmferry_report::json::Document;

use super::spec::{Fleet, MOST_GUESTS, One, Pattern, ReportMode};
use crate::cases::{at_least, at_most, goal, metric};
use crate::reaper::to_f64;

/// Published number of guests that fit without reports, and the best number with reports.
const PUBLISHED: (f64, f64) = (3.0, 7.0);
/// Largest allowed residue, in percent of the freed memory.
const RESIDUE_PCT: f64 = 1.0;
/// Largest allowed slowdown of allocating, touching and freeing, in percent.
const SLOWDOWN_PCT: f64 = 5.0;
/// Longest allowed time from a full buffer, or from the last free, until the memory is returned, in
/// milliseconds.
const RETURNED_MS: f64 = 100.0;
/// Largest allowed ratio of a report's cost to the cost of the host's madvise.
const OF_MADVISE: f64 = 1.2;

/// Main figures of the bench, by name. `None` if a figure is unknown.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Summary(Vec<(&'static str, Option<f64>)>);

fn one(document: &Document, report: ReportMode, pattern: Pattern, name: &str) -> Option<f64> {
    metric(document, "one", One { report: report.into(), pattern }, name)
}

impl Summary {
    /// Returns the figures of a document under the names of the summary.
    pub(super) fn of(document: &Document) -> Self {
        use ReportMode::{Async, Off, Sync};
        let fleet = |report| metric(document, "fleet", Fleet(report), "guests");
        let residue = |pattern| one(document, Sync, pattern, "residue_pct");
        // The worse one of the two patterns counts.
        let residue_pct = match (residue(Pattern::Once), residue(Pattern::Fragmented)) {
            (Some(once), Some(fragmented)) => Some(once.max(fragmented)),
            (only, None) | (None, only) => only,
        };
        let of = |report, name| one(document, report, Pattern::Once, name);
        Self(vec![
            ("guests_off", fleet(Off)),
            ("guests_on", fleet(Sync)),
            ("residue_pct", residue_pct),
            ("residue_off_pct", of(Off, "residue_pct")),
            ("alloc_slowdown_pct", of(Sync, "slowdown_pct")),
            ("alloc_again_slowdown_pct", one(document, Sync, Pattern::Again, "slowdown_pct")),
            ("free_p99_us", of(Sync, "free_p99_us")),
            ("free_max_us", of(Sync, "free_max_us")),
            ("free_p99_async_us", of(Async, "free_p99_us")),
            ("free_max_async_us", of(Async, "free_max_us")),
            ("returned_ms", of(Sync, "returned_ms")),
            ("report_to_madvise", of(Sync, "report_to_madvise")),
        ])
    }

    /// Returns the figures that are known.
    pub(super) fn known(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().filter_map(|(name, value)| Some((*name, (*value)?)))
    }

    fn get(&self, wanted: &str) -> Option<f64> {
        self.known().find(|(name, _)| *name == wanted).map(|(_, value)| value)
    }
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    use ReportMode::Sync;
    let all = Summary::of(document);
    let exactly = |name: &str, want: f64, got: Option<f64>| {
        got.map(|got| goal(name, format!("{want}, as published"), got, (got - want).abs() < 0.5))
    };
    let full_buffer = one(document, Sync, Pattern::Once, "report_max_ms");
    let fragmented = one(document, Sync, Pattern::Fragmented, "residue_pct");
    [
        exactly("guests that fit, off", PUBLISHED.0, all.get("guests_off")),
        at_least("guests that fit, sync", to_f64(MOST_GUESTS as u64), all.get("guests_on")),
        at_least("guests that fit, sync, against the published best", PUBLISHED.1, all.get("guests_on")),
        at_most("residue, %", RESIDUE_PCT, one(document, Sync, Pattern::Once, "residue_pct")),
        at_most("residue of a fragmented pattern, %", RESIDUE_PCT, fragmented),
        at_most("slower by, %", SLOWDOWN_PCT, all.get("alloc_slowdown_pct")),
        at_most("memory back after the last free, ms", RETURNED_MS, all.get("returned_ms")),
        at_most("memory back after a full buffer, ms", RETURNED_MS, full_buffer),
        at_most("cost of a report / of its madvise", OF_MADVISE, all.get("report_to_madvise")),
    ]
    .into_iter()
    .flatten()
    .collect()
}
