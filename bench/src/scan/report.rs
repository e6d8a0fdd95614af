//! Conversion of cases into the summary.

use std::collections::BTreeMap;

use serde_json::Value;
use vmferry_bitmap::Scanner;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::Options;
use crate::goal::{Figure, bounded};

/// Selection of the cases that a figure of the summary covers.
type Which = fn(&Case) -> bool;

fn text<'a>(case: &'a Case, param: &str) -> &'a str {
    case.params.get(param).and_then(Value::as_str).unwrap_or_default()
}

fn is_walk(case: &Case) -> bool {
    matches!(text(case, "kind"), "bits" | "runs")
}

/// Returns whether a case counts for the sparse figures: 6G or 64G, at a density of at most 1e-4
/// uniform or 1e-3 clustered.
fn is_sparse(case: &Case) -> bool {
    is_walk(case) && matches!(text(case, "memory"), "6G" | "64G") && is_sparse_anywhere(case)
}

fn is_sparse_anywhere(case: &Case) -> bool {
    let density = case.params.get("density").and_then(Value::as_f64).unwrap_or(1.0);
    density <= 1e-4 || (density <= 1e-3 && text(case, "pattern") == "clustered")
}

/// Figures that are the smallest of a metric's medians over cases: name in the summary, metric,
/// cases.
const WORST: &[(&str, &str, Which)] = &[
    ("min_ratio_to_words", "ratio_to_words", is_walk),
    ("ratio_to_bytes_sparse", "ratio_to_bytes", is_sparse),
    ("ratio_to_words_sparse", "ratio_to_words", is_sparse),
    ("min_ratio_to_bytes", "ratio_to_bytes", is_walk),
    ("min_ratio_to_word_bytes", "ratio_to_word_bytes", is_walk),
    ("min_ratio_to_fixedbitset", "ratio_to_fixedbitset", is_walk),
    ("min_ratio_to_bitvec", "ratio_to_bitvec", is_walk),
    ("min_ratio_to_roaring_from_words", "ratio_to_roaring_from_words", is_walk),
    ("min_ratio_to_roaring_compressed", "ratio_to_roaring", is_walk),
    ("empty_scan_of_read_bandwidth", "bits_of_read", |case| text(case, "kind") == "empty"),
    ("empty_runs_of_read_bandwidth", "runs_of_read", |case| text(case, "kind") == "empty"),
];

/// Targets of the project: figure of the summary, whether the bound is a minimum, and the bound.
const TARGETS: &[(&str, bool, f64)] = &[
    ("ratio_to_bytes_sparse", true, 20.0),
    ("min_ratio_to_words", true, 0.95),
    ("ratio_to_words_sparse", true, 2.0),
    ("empty_scan_of_read_bandwidth", true, 0.8),
    ("empty_runs_of_read_bandwidth", true, 0.8),
    ("runs_512g_ms", false, 2.0),
    ("engine_to_scanner", false, 1.1),
    ("min_ratio_to_fixedbitset", true, 1.0),
    ("min_ratio_to_bitvec", true, 1.0),
    ("min_ratio_to_roaring_from_words", true, 1.0),
];

/// Returns the smallest (`sign` 1) or largest (`sign` -1) value of `metric`, and the name of its
/// case.
fn extreme<'a>(document: &'a Document, metric: &str, which: Which, sign: f64) -> Option<(Figure, &'a str)> {
    let values = document.cases.iter().filter(|case| which(case));
    let values = values.filter_map(|case| Some((Figure::of(case, metric)?, case.name.as_str())));
    values.min_by(|a, b| (a.0.median * sign).total_cmp(&(b.0.median * sign)))
}

/// Adds the summary to the document.
pub(super) fn finish(document: &mut Document, options: &Options) {
    let mut found: Vec<(String, Value)> = Vec::new();
    let mut judged: BTreeMap<&str, Figure> = BTreeMap::new();
    for (name, metric, which) in WORST {
        if let Some((value, case)) = extreme(document, metric, *which, 1.0) {
            judged.insert(*name, value);
            found.push(((*name).into(), value.median.into()));
            found.push((format!("{name}_case"), case.into()));
        }
        let medians = document.cases.iter().filter(|case| which(case));
        if let Some(spread) = Spread::of(medians.filter_map(|case| case.metrics.get(*metric).copied())) {
            found.push((format!("{name}_median_case"), spread.median.into()));
        }
    }
    let at_512g: Which =
        |case| text(case, "kind") == "summary" && text(case, "memory") == "512G" && is_sparse_anywhere(case);
    for (name, metric) in [("runs_512g_ms", "summary_us"), ("runs_512g_flat_ms", "flat_us")] {
        if let Some((us, _)) = extreme(document, metric, at_512g, -1.0) {
            let ms = us.times(1e-3);
            judged.insert(name, ms);
            found.push((name.into(), ms.median.into()));
        }
    }
    let at_engine: Which = |case| text(case, "kind") == "engine";
    if let Some((ratio, case)) = extreme(document, "engine_to_scanner", at_engine, -1.0) {
        judged.insert("engine_to_scanner", ratio);
        found.push(("engine_to_scanner".into(), ratio.median.into()));
        found.push(("engine_to_scanner_case".into(), case.into()));
    }
    for (name, case, metric) in [
        ("summary_set_random_ns", "upkeep/set/random", "summary_ns"),
        ("flat_set_random_ns", "upkeep/set/random", "flat_ns"),
        ("summary_set_sequential_ns", "upkeep/set/sequential", "summary_ns"),
        ("flat_set_sequential_ns", "upkeep/set/sequential", "flat_ns"),
        ("summary_mark_random_ratio", "upkeep/mark/random", "ratio"),
        ("summary_mark_sequential_ratio", "upkeep/mark/sequential", "ratio"),
        ("summary_harvest_ratio", "upkeep/harvest/64-pages", "ratio"),
    ] {
        let value = document.cases.iter().find(|known| known.name == case);
        if let Some(value) = value.and_then(|case| case.metrics.get(metric)) {
            found.push((name.into(), (*value).into()));
        }
    }
    document.summary.extend(found);
    let targets: Vec<Value> = TARGETS
        .iter()
        .filter_map(|(name, least, bound)| bounded(*name, *least, *bound, judged.get(*name).copied()))
        .collect();
    document.summary.insert("targets".into(), targets.into());
    document.summary.insert("scanner".into(), Scanner::best().name().into());
    document.summary.insert("rounds".into(), options.rounds.into());
}
