//! Conversion of runs into the document.

use serde_json::Value;
use vmferry_report::Spread;
use vmferry_report::json::Document;

use super::Options;
use super::figures::Single;
use super::goals::{Summary, goals};
use super::spec::{One, ReportMode};
use crate::reaper::to_f64;
use crate::rounds::SideRuns;

/// Adds the slowdown of each side, compared round by round with the side without reports.
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
