//! Conversion of runs into the document.

use serde_json::Value;
use vmferry_report::json::{Case, Document};

use super::figures::{Measured, histogram, measure};
use super::goals::{goals as verdicts, published};
use super::watch::WAIT_MIN_US;
use super::{CaseRuns, CaseSpec, Options, SideRuns};
use crate::cases::add_spreads;
use crate::reaper::to_f64;
use crate::rtt::Floor;

/// Adds the sides of a case to the document.
pub(super) fn add_case(document: &mut Document, options: &Options, spec: &CaseSpec, runs: &CaseRuns) {
    for side in &runs.sides {
        document.cases.push(case_of(options, spec, side, &runs.floors));
    }
}

fn case_of(options: &Options, spec: &CaseSpec, runs: &SideRuns, floors: &[Option<Floor>]) -> Case {
    let name = format!("{}/{}", spec.name, runs.side);
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    };
    let measured: Vec<Measured> = runs
        .rounds
        .iter()
        .enumerate()
        .filter_map(|(round, run)| measure(spec, run.as_ref()?, floors.get(round).copied().flatten()))
        .collect();
    case = case
        .param("case", spec.name.as_str())
        .param("side", runs.side.to_string())
        .param("purpose", spec.purpose.name())
        .param("link", spec.link)
        .param("link_gbps", spec.shape.map(|shape| to_f64(shape.bits_per_s) / 1e9))
        .param("congestion", spec.shape.and_then(|shape| shape.congestion))
        .param("pattern", spec.pattern)
        .param("workload", spec.workload())
        .param("memory_bytes", spec.memory)
        .param("data_bytes", spec.data)
        .param("vcpus", spec.vcpus)
        .param("backing", spec.backing.name())
        .param("before_ms", u64::try_from(options.before.as_millis()).unwrap_or(u64::MAX))
        .param("rounds", measured.len());
    add_spreads(&mut case, measured.iter().map(|measured| &measured.figures));
    case.hist_us = histogram(measured.iter().map(|measured| &measured.waits));
    case
}

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let summary = [
        ("rounds", options.repeats.into()),
        ("wait_min_us", WAIT_MIN_US.into()),
        ("published", published(document).into()),
        ("goals", verdicts(document).into()),
        ("failures", failures.into()),
    ];
    document.summary.extend(summary.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
}
