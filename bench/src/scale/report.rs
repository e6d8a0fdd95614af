//! Conversion of runs into the document.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::SideRuns;
use super::figures::Run;
use super::goals::{goals, summary};
use super::slope::Slope;
use super::spec::{Curve, Kind, Point};
use crate::cases::add_spreads;
use crate::reaper::to_f64;

/// Position of the point that the total time of the other points of its curve is compared with.
const FIRST: u64 = 1 << 30;

/// Adds the points of a curve to the document.
pub(super) fn add_curve(document: &mut Document, curve: Curve, sides: &[SideRuns]) {
    for runs in sides {
        let figures: Vec<BTreeMap<String, f64>> = runs.rounds.iter().flatten().map(Run::figures).collect();
        let mut case = case_of(curve, runs, figures.len());
        add_spreads(&mut case, figures.iter());
        if curve == Curve::MemorySparse {
            case.spread("total_to_1g", total_to_first(runs, sides));
        }
        document.cases.push(case);
    }
}

fn case_of(curve: Curve, runs: &SideRuns, rounds: usize) -> Case {
    let name = format!("{}/{}", curve.name(), runs.side);
    let case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    };
    let guest = runs.side.guest();
    case.param("case", curve.name())
        .param("side", runs.side.to_string())
        .param("rounds", rounds)
        .param("guest", runs.side.kind.name())
        .param("at", runs.side.at)
        .param("memory_bytes", guest.memory)
        .param("data_bytes", guest.data)
        .param("working_set_bytes", guest.working_set)
        .param("vcpus", guest.vcpus)
        .param("guests", guest.neighbours)
        .param("workload", guest.workload())
}

/// Returns the ratio of the total time to that of the first point of the same kind, taken in each
/// round. `None` for the first point itself.
fn total_to_first(runs: &SideRuns, sides: &[SideRuns]) -> Option<Spread> {
    let first = Point { at: FIRST, ..runs.side };
    let first = sides.iter().find(|other| other.side == first && runs.side != first)?;
    let total = |runs: &SideRuns| -> Vec<Option<f64>> {
        runs.rounds.iter().map(|run| run.as_ref().map(|run| run.total_ms)).collect()
    };
    Spread::of_ratios(&total(runs), &total(first))
}

/// Returns the slopes of each figure of each curve and kind of guest, in the order of the curves.
fn slopes(document: &Document) -> Vec<Value> {
    let mut all = Vec::new();
    for curve in Curve::ALL {
        for kind in [Kind::Process, Kind::Kvm] {
            for (metric, points) in points(document, curve, kind) {
                let Some(slope) = Slope::of(&points) else { continue };
                all.push(json!({
                    "curve": curve.name(),
                    "guest": kind.name(),
                    "metric": metric,
                    "unit": curve.unit().0,
                    "points": points.len(),
                    "per_unit": slope.per_unit,
                    "per_doubling": slope.per_doubling,
                    "exponent": slope.exponent,
                }));
            }
        }
    }
    all
}

/// Returns the points of each figure of a curve: positions in units of the axis, and medians.
fn points(document: &Document, curve: Curve, kind: Kind) -> BTreeMap<&str, Vec<(f64, f64)>> {
    let mut all: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for case in &document.cases {
        let is = |name: &str, want: &str| case.params.get(name).is_some_and(|own| own == want);
        let at = case.params.get("at").and_then(Value::as_u64);
        let Some(at) = at.filter(|_| is("case", curve.name()) && is("guest", kind.name())) else { continue };
        let at = to_f64(at) / to_f64(curve.unit().1);
        // A figure that was measured in rounds has its extremes beside it.
        for (name, median) in &case.metrics {
            if case.metrics.contains_key(&format!("{name}_max")) {
                all.entry(name).or_default().push((at, *median));
            }
        }
    }
    all
}

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, repeats: usize, failures: &[String]) {
    let rest = [
        ("rounds", Value::from(repeats)),
        ("slopes", slopes(document).into()),
        ("goals", goals(document).into()),
        ("failures", failures.into()),
    ];
    let known = summary(document).into_iter().map(|(name, value)| (name, Value::from(value)));
    let all: Vec<(String, Value)> = known.chain(rest).map(|(name, value)| (name.to_owned(), value)).collect();
    document.summary.extend(all);
}
