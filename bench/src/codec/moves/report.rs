//! Conversion of the moves into the document.

use serde_json::Value;
use vmferry_report::json::Document;

use super::spec::{AUTO, COUNTER, RAW, TEXT, XBZRLE};
use super::{CACHE, CaseSpec, Side, SideRuns, Writer, figures};
use crate::cases::{self, figure};
use crate::goal::{Figure, at_least, at_most};

/// Ratios of each side of vmferry to its raw side, taken in each round: name, compared metric.
const TO_RAW: [(&str, &str); 4] = [
    ("total_to_raw", "total_ms"),
    ("downtime_to_raw", "downtime_ms"),
    ("speed_to_raw", "guest_speed_kept"),
    ("wire_to_raw", "wire_mb"),
];

/// Adds the sides of a case to the document.
pub(super) fn add_case(document: &mut Document, spec: &CaseSpec, sides: &[SideRuns]) {
    let millis = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let gbps = spec.shape.map(|shape| Value::from(crate::reaper::to_f64(shape.bits_per_s) / 1e9));
    let params = [
        ("kind", Value::from("moves")),
        ("group", "moves".into()),
        ("link", spec.link.into()),
        ("link_gbps", gbps.unwrap_or(Value::Null)),
        ("content", spec.content.into()),
        ("writer", spec.writer.name().into()),
        ("workload", spec.workload().into()),
        ("memory_bytes", spec.memory().into()),
        ("data_bytes", spec.data.into()),
        ("cache_bytes", CACHE.into()),
        ("downtime_limit_ms", millis(spec.downtime_limit).into()),
        ("limit_ms", millis(spec.limit).into()),
    ];
    let group = format!("moves/{}", spec.name);
    let first = document.cases.len();
    cases::add(document, (&group, &params), sides, |run| figures::of(spec, run));
    let of = |side: Side| sides.iter().find(|runs| runs.side == side);
    let best = figures::best_qemu(spec, sides);
    for (case, runs) in document.cases[first..].iter_mut().zip(sides) {
        // A guest that writes makes each side send other pages.
        let raw = of(runs.side.raw()).filter(|raw| raw.side != runs.side);
        if let Some(raw) = raw.filter(|_| spec.writer == Writer::None) {
            case.spread("saved_cpu_ms_per_gb", figures::cpu_of_saved(spec, runs, raw));
        }
        if matches!(runs.side, Side::Qemu(_)) {
            continue;
        }
        if let Some(raw) = of(RAW).filter(|raw| raw.side != runs.side) {
            for (name, compared) in TO_RAW {
                case.spread(name, figures::ratio(spec, (runs, raw), compared));
            }
        }
        if let Some(best) = best {
            case.spread("total_to_best_qemu", figures::ratio(spec, (runs, best), "total_ms"));
            case.params.insert("best_qemu".into(), best.side.to_string().into());
        }
        if let Some(xbzrle) = of(XBZRLE) {
            case.spread("total_to_xbzrle", figures::ratio(spec, (runs, xbzrle), "total_ms"));
        }
    }
}

/// Returns the metric of `auto` in each case that has it, with the name of the case.
fn of_auto<'a>(document: &'a Document, metric: &'a str) -> impl Iterator<Item = (&'a str, Figure)> {
    let auto = AUTO.to_string();
    document
        .cases
        .iter()
        .filter(move |case| case.params.get("side").is_some_and(|side| *side == *auto))
        .filter_map(move |case| Some((case.params.get("case")?.as_str()?, Figure::of(case, metric)?)))
}

/// Returns the largest value of the metric of `auto`, with the name of the case.
fn largest<'a>(document: &'a Document, metric: &'a str) -> Option<(&'a str, Figure)> {
    of_auto(document, metric).max_by(|a, b| a.1.median.total_cmp(&b.1.median))
}

/// Returns the smallest value of the metric of `auto`, with the name of the case.
fn smallest<'a>(document: &'a Document, metric: &'a str) -> Option<(&'a str, Figure)> {
    of_auto(document, metric).min_by(|a, b| a.1.median.total_cmp(&b.1.median))
}

/// Returns the ratio of the processor time for each saved byte to that of the best QEMU.
fn cpu_to_best_qemu(document: &Document) -> Option<Figure> {
    let group = format!("moves/{TEXT}");
    let name = format!("{group}/{AUTO}");
    let auto = document.cases.iter().find(|case| case.name == name)?;
    let best = auto.params.get("best_qemu")?.as_str()?;
    let theirs = figure(document, &group, best, "saved_cpu_ms_per_gb")?;
    Figure::of(auto, "saved_cpu_ms_per_gb")?.over(theirs)
}

/// Adds the figures of the moves to the summary, and returns their goals.
pub(in crate::codec) fn finish(document: &mut Document) -> Vec<Value> {
    let of = |case: &str, metric: &str| figure(document, &format!("moves/{case}"), AUTO, metric);
    let worst = largest(document, "total_to_raw");
    let converged = of(COUNTER, "converged");
    let named = |found: Option<(&str, Figure)>, what: &str| {
        let case = found.map(|(case, _)| case.trim_start_matches("moves/"));
        case.map_or_else(|| what.to_owned(), |case| format!("{what}: {case}"))
    };
    let value = |found: Option<(&str, Figure)>| found.map(|(_, figure)| figure);
    let text = of(TEXT, "total_to_best_qemu");
    let counter = of(COUNTER, "total_to_xbzrle");
    let cpu = cpu_to_best_qemu(document);
    let (downtime, speed) = (largest(document, "downtime_to_raw"), smallest(document, "speed_to_raw"));
    let goals = [
        at_most("text_1gbit_to_best_qemu", 0.6, text),
        at_most("text_1gbit_cpu_to_best_qemu", 1.0, cpu),
        at_most("counter_1gbit_to_xbzrle", 0.7, counter),
        at_least("counter_1gbit_converged", 0.5, converged),
        at_most(named(worst, "worst_auto_to_raw"), 1.03, value(worst)),
        at_most(named(downtime, "worst_auto_downtime_to_raw"), 1.0, value(downtime)),
        at_least(named(speed, "worst_auto_speed_to_raw"), 1.0, value(speed)),
    ];
    let goals = goals.into_iter().flatten().collect();
    let figures = [
        ("text_1gbit_to_best_qemu", text),
        ("text_1gbit_cpu_to_best_qemu", cpu),
        ("counter_1gbit_to_xbzrle", counter),
        ("worst_auto_to_raw", value(worst)),
        ("worst_auto_downtime_to_raw", value(downtime)),
        ("worst_auto_speed_to_raw", value(speed)),
    ];
    let found: Vec<(String, Value)> = figures
        .into_iter()
        .filter_map(|(name, figure)| Some((name.to_owned(), Value::from(figure?.median))))
        .chain(worst.map(|(case, _)| ("worst_auto_case".to_owned(), case.into())))
        .collect();
    document.summary.extend(found);
    goals
}
