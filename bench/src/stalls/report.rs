//! Conversion of runs into the document.

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::Document;

use super::figures::{self, LONG_STALL_MIN_US, STALL_MIN_US, stalled};
use super::spec::QEMU;
use super::{CaseSpec, Side, SideRuns};
use crate::cases::{self, figure};
use crate::goal::at_most;
use crate::postcopy::histogram;

/// Ratios of vmferry to QEMU's single stream, taken in each round: name, compared metric.
const COMPARED: [(&str, &str); 3] = [
    ("stall_max_to_qemu", "stall_max_ms"),
    ("stall_p999_to_qemu", "stall_p999_ms"),
    ("total_to_qemu", "total_ms"),
];

/// Ratios of vmferry to the guest that is not moved, taken in each round: name, compared metric.
const TO_FLOOR: [(&str, &str); 2] =
    [("stall_max_to_floor", "stall_max_ms"), ("stall_p999_to_floor", "stall_p999_ms")];

/// Main figures: name in the summary, metric of the case `2cpu/ours-auto`.
const SUMMARY: [(&str, &str); 3] = [
    ("max_to_qemu", "stall_max_to_qemu"),
    ("p999_to_qemu", "stall_p999_to_qemu"),
    ("total_to_qemu", "total_to_qemu"),
];

/// Goals of the project: case, side, metric, largest value.
const GOALS: [(&str, &str, &str, f64); 6] = [
    ("2cpu", "ours-auto", "stall_max_to_qemu", 1.0),
    ("2cpu", "ours-auto", "total_to_qemu", 0.65),
    ("2cpu", "ours-auto", "stall_max_ms", 1.0),
    ("1cpu", "ours-auto", "stall_max_ms", 1.0),
    ("2cpu", "ours-1", "stall_max_ms", 0.3),
    ("1cpu", "ours-1", "stall_max_ms", 0.3),
];

/// Adds the sides of a case to the document.
pub(super) fn add_case(document: &mut Document, spec: &CaseSpec, sides: &[SideRuns]) {
    let params = [
        ("memory_bytes", Value::from(spec.memory)),
        ("data_bytes", spec.data.into()),
        ("vcpus", spec.vcpus.into()),
        ("workload", spec.workload.as_str().into()),
        ("before_ms", u64::try_from(spec.warm_up.as_millis()).unwrap_or(u64::MAX).into()),
    ];
    let first = document.cases.len();
    cases::add(document, (&spec.name, &params), sides, figures::of);
    let of = |side| sides.iter().find(|runs| runs.side == side);
    let others = [(of(QEMU), &COMPARED[..]), (of(Side::Floor), &TO_FLOOR[..])];
    for (case, runs) in document.cases[first..].iter_mut().zip(sides) {
        let during: Vec<_> =
            runs.rounds.iter().flatten().filter_map(|run| Some(stalled(run)?.during)).collect();
        case.hist_us = histogram(during.iter());
        if !matches!(runs.side, Side::Ours(_)) {
            continue;
        }
        for (theirs, names) in &others {
            let Some(theirs) = theirs else { continue };
            for (name, compared) in *names {
                case.spread(name, Spread::of_ratios(&by_round(runs, compared), &by_round(theirs, compared)));
            }
        }
    }
}

/// Returns a figure of each round.
fn by_round(runs: &SideRuns, name: &str) -> Vec<Option<f64>> {
    runs.rounds.iter().map(|run| figures::of(run.as_ref()?).get(name).copied()).collect()
}

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, repeats: usize, failures: &[String]) {
    let known = SUMMARY.into_iter().filter_map(|(name, metric)| {
        Some((name, Value::from(cases::metric(document, "2cpu", "ours-auto", metric)?)))
    });
    let goals = GOALS.into_iter().filter_map(|(case, side, metric, most)| {
        at_most(format!("{case}/{side} {metric}"), most, figure(document, case, side, metric))
    });
    let rest = [
        ("rounds", Value::from(repeats)),
        ("stall_min_us", STALL_MIN_US.into()),
        ("long_stall_min_us", LONG_STALL_MIN_US.into()),
        ("goals", goals.collect()),
        ("failures", failures.into()),
    ];
    let all: Vec<(String, Value)> = known.chain(rest).map(|(name, value)| (name.to_owned(), value)).collect();
    document.summary.extend(all);
}
