//! Goals of the bench, and published results to compare with.

use serde_json::Value;
use vmferry_report::json::Document;

use super::spec::{Fleet, HintMode, MOST_GUESTS, One, Pattern, ReportMode, Vmm, Way};
use crate::cases::{figure, metric};
use crate::goal::{Figure, at_most, goal};
use crate::reaper::to_f64;

/// Published number of guests that fit without reports, and the best number with reports.
const PUBLISHED: (f64, f64) = (3.0, 7.0);
/// Distance between the bound of a goal and the nearest numbers of guests. A number of guests is an
/// integer, so the bound lies halfway between two integers.
const HALF_A_GUEST: f64 = 0.5;
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

fn one(document: &Document, report: impl Into<Way>, pattern: Pattern, name: &str) -> Option<Figure> {
    figure(document, "one", One { report: report.into(), pattern }, name)
}

fn median(figure: Figure) -> f64 {
    figure.median
}

impl Summary {
    /// Returns the figures of a document under the names of the summary.
    pub(super) fn of(document: &Document) -> Self {
        use ReportMode::{Async, Off, Sync};
        let fleet = |vmm, mode| metric(document, "fleet", Fleet { vmm, mode }, "guests");
        let hints = |hints, name| {
            let way = Way { hints, ..Off.into() };
            one(document, way, Pattern::Again, name).map(median)
        };
        let qemu = Way { vmm: Vmm::Qemu, ..Sync.into() };
        let residue = |pattern| one(document, Sync, pattern, "residue_pct").map(median);
        // The worse one of the two patterns counts.
        let residue_pct = match (residue(Pattern::Once), residue(Pattern::Fragmented)) {
            (Some(once), Some(fragmented)) => Some(once.max(fragmented)),
            (only, None) | (None, only) => only,
        };
        let of = |report, name| one(document, report, Pattern::Once, name).map(median);
        Self(vec![
            ("guests_off", fleet(Vmm::Ours, Off)),
            ("guests_on", fleet(Vmm::Ours, Sync)),
            ("guests_qemu_off", fleet(Vmm::Qemu, Off)),
            ("guests_qemu_on", fleet(Vmm::Qemu, Sync)),
            ("residue_pct", residue_pct),
            ("residue_off_pct", of(Off, "residue_pct")),
            ("alloc_slowdown_pct", of(Sync, "slowdown_pct")),
            ("alloc_again_slowdown_pct", one(document, Sync, Pattern::Again, "slowdown_pct").map(median)),
            ("free_p99_us", of(Sync, "free_p99_us")),
            ("free_max_us", of(Sync, "free_max_us")),
            ("free_p99_async_us", of(Async, "free_p99_us")),
            ("free_max_async_us", of(Async, "free_max_us")),
            ("returned_ms", of(Sync, "returned_ms")),
            ("report_to_madvise", of(Sync, "report_to_madvise")),
            ("qemu_slowdown_pct", one(document, qemu, Pattern::Once, "slowdown_pct").map(median)),
            ("qemu_residue_pct", one(document, qemu, Pattern::Once, "residue_pct").map(median)),
            ("demand_alloc_slowdown_pct", hints(HintMode::Demand, "alloc_mean_slowdown_pct")),
            ("demand_free_slowdown_pct", hints(HintMode::Demand, "free_mean_slowdown_pct")),
            ("map_alloc_slowdown_pct", hints(HintMode::Incremental, "alloc_mean_slowdown_pct")),
            ("map_free_slowdown_pct", hints(HintMode::Incremental, "free_mean_slowdown_pct")),
        ])
    }

    /// Returns the figures that are known.
    pub(super) fn known(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().filter_map(|(name, value)| Some((*name, (*value)?)))
    }
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    use ReportMode::Sync;
    let fleet = |mode: ReportMode| figure(document, "fleet", Fleet::from(mode), "guests");
    let exactly = |name: &str, want: f64, got: Option<Figure>| {
        let got = got?;
        let margin = HALF_A_GUEST - (got.median - want).abs();
        goal(name, format!("{want}, as published"), got, margin)
    };
    let guests_at_least = |name: &str, want: f64, got: Option<Figure>| {
        let got = got?;
        goal(name, format!(">= {want}"), got, got.median - (want - HALF_A_GUEST))
    };
    let once = |name| one(document, Sync, Pattern::Once, name);
    let fragmented = one(document, Sync, Pattern::Fragmented, "residue_pct");
    let all_guests = to_f64(MOST_GUESTS as u64);
    [
        exactly("guests that fit, off", PUBLISHED.0, fleet(ReportMode::Off)),
        guests_at_least("guests that fit, sync", all_guests, fleet(Sync)),
        guests_at_least("guests that fit, sync, against the published best", PUBLISHED.1, fleet(Sync)),
        at_most("residue, %", RESIDUE_PCT, once("residue_pct")),
        at_most("residue of a fragmented pattern, %", RESIDUE_PCT, fragmented),
        at_most("slower by, %", SLOWDOWN_PCT, once("slowdown_pct")),
        at_most("memory back after the last free, ms", RETURNED_MS, once("returned_ms")),
        at_most("memory back after a full buffer, ms", RETURNED_MS, once("report_max_ms")),
        at_most("cost of a report / of its madvise", OF_MADVISE, once("report_to_madvise")),
    ]
    .into_iter()
    .flatten()
    .collect()
}
