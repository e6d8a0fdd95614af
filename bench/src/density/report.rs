//! Conversion of runs into the document.

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::Document;

use super::Options;
use super::figures::{Single, Told};
use super::goals::{Summary, goals};
use super::spec::One;
use crate::reaper::to_f64;
use crate::rounds::SideRuns;

/// Time of a guest, if it has one.
type Time = fn(&Told) -> Option<f64>;

/// Times that are compared, each with the name of its slowdown.
const TIMES: [(&str, Time); 3] = [
    ("slowdown_pct", |told| Some(to_f64(told.work_ns))),
    ("alloc_mean_slowdown_pct", |told| mean(told.allocs)),
    ("free_mean_slowdown_pct", |told| mean(told.frees)),
];

fn mean((calls, ns): (u64, u64)) -> Option<f64> {
    (calls > 0).then(|| to_f64(ns) / to_f64(calls))
}

/// Adds the slowdown of each side, compared round by round with the side of the same VMM without
/// reports and hints.
pub(super) fn add_slowdown(document: &mut Document, sides: &[SideRuns<One, Single>]) {
    for runs in sides.iter().filter(|runs| runs.side.report != runs.side.report.base()) {
        let base = One { report: runs.side.report.base(), ..runs.side };
        let Some(base) = sides.iter().find(|runs| runs.side == base) else { continue };
        let case = format!("one/{}", runs.side);
        let Some(case) = document.cases.iter_mut().find(|own| own.name == case) else { continue };
        for (name, time) in TIMES {
            let times = |runs: &SideRuns<One, Single>| -> Vec<Option<f64>> {
                runs.rounds.iter().map(|run| time(&run.as_ref()?.told)).collect()
            };
            let percent = |ratio: f64| (ratio - 1.0) * 100.0;
            let slower = Spread::of_ratios(&times(runs), &times(base)).map(|ratio| Spread {
                median: percent(ratio.median),
                min: percent(ratio.min),
                max: percent(ratio.max),
                repeats: ratio.repeats,
            });
            case.spread(name, slower);
        }
    }
}

/// Adds the summary of the whole run.
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
