//! Summary of the bench.

use serde_json::Value;
use vmferry_codec::Comparer;
use vmferry_report::json::Document;

use super::contents::Change;
use super::{Options, moves, returns};
use crate::cases::figure;
use crate::goal::{Figure, at_least};

/// Slowest sparse delta that the project accepts, in 10^9 bytes of pages per second.
const SPARSE_GBYTES_PER_S: f64 = 4.0;

/// Adds the summary to the document.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let best = Comparer::all()
        .into_iter()
        .find(|(_, comparer)| comparer.is_ok())
        .map_or("portable", |(name, _)| name);
    let of = |change: Change, metric: &str| {
        figure(document, &format!("speed/{change}"), format!("delta-{best}"), metric)
    };
    let slowest = |metric: &str| {
        let sparse = Change::ALL.into_iter().filter(|change| change.is_sparse());
        sparse.filter_map(|change| of(change, metric)).min_by(|a, b| a.median.total_cmp(&b.median))
    };
    let figures: [(&str, Option<Figure>, f64); 2] = [
        ("sparse_encode_gbytes_per_s", slowest("encode_cold_gbytes_per_s"), SPARSE_GBYTES_PER_S),
        ("tenth_decode_to_write", of(Change::Tenth, "decode_cold_to_write"), 1.0),
    ];
    let mut goals: Vec<Value> =
        figures.iter().filter_map(|(name, got, least)| at_least(*name, *least, *got)).collect();
    let found: Vec<_> = figures
        .iter()
        .filter_map(|(name, got, _)| Some((*name, Value::from(got.as_ref()?.median))))
        .collect();
    goals.extend(moves::finish(document));
    goals.extend(returns::finish(document));
    let rest = [
        ("comparer", Value::from(best)),
        ("seed", options.seed.into()),
        ("rounds", options.repeats.into()),
        ("move_rounds", options.moves.repeats.into()),
        ("goals", goals.into()),
        ("failures", failures.into()),
    ];
    let all: Vec<(String, Value)> =
        found.into_iter().chain(rest).map(|(name, value)| (name.to_owned(), value)).collect();
    document.summary.extend(all);
}
