//! Goals of the bench.

use serde_json::Value;
use vmferry_report::json::Document;

use super::spec::{Curve, Kind, Point};
use crate::cases::figure;
use crate::goal::{Figure, Verdict, at_most, judged};

/// Bounds for the largest sparse guest: name, metric, largest value.
const SPARSE: [(&str, &str, f64); 5] = [
    ("total to that of 1 GiB", "total_to_1g", 1.5),
    ("downtime, ms", "downtime_ms", 5.0),
    ("setup, ms", "setup_ms", 50.0),
    ("longest harvest, ms", "harvest_max_ms", 5.0),
    ("bookkeeping, MiB", "bookkeeping_mib", 64.0),
];
/// Largest sparse guest in bytes.
const SPARSE_AT: u64 = 4 << 40;
/// Largest allowed overhead of each of many guests, in MiB.
const OVERHEAD_MIB: f64 = 2.0;
/// Number of these guests.
const MANY: u64 = 64;
/// Smallest allowed share of the downtime that its parts explain.
const EXPLAINED: f64 = 0.95;

const KINDS: [Kind; 2] = [Kind::Process, Kind::Kvm];

fn of(document: &Document, curve: Curve, kind: Kind, at: u64, metric: &str) -> Option<Figure> {
    figure(document, curve.name(), Point { curve, kind, at }, metric)
}

/// Returns the main figures of the bench that are known, by name.
pub(super) fn summary(document: &Document) -> Vec<(&'static str, f64)> {
    let sparse = |metric| of(document, Curve::MemorySparse, Kind::Process, SPARSE_AT, metric);
    let many = |kind| of(document, Curve::Guests, kind, MANY, "overhead_mib");
    [
        ("sparse_4t_total_to_1g", sparse("total_to_1g")),
        ("sparse_4t_downtime_ms", sparse("downtime_ms")),
        ("sparse_4t_setup_ms", sparse("setup_ms")),
        ("sparse_4t_harvest_ms", sparse("harvest_max_ms")),
        ("sparse_4t_bookkeeping_mib", sparse("bookkeeping_mib")),
        ("overhead_mib_64_guests", many(Kind::Process)),
        ("overhead_mib_64_kvm_guests", many(Kind::Kvm)),
    ]
    .into_iter()
    .filter_map(|(name, figure)| Some((name, figure?.median)))
    .collect()
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    let mut goals = Vec::new();
    for kind in KINDS {
        for (what, metric, most) in SPARSE {
            let got = of(document, Curve::MemorySparse, kind, SPARSE_AT, metric);
            goals.extend(at_most(format!("{}, 4 TiB sparse: {what}", kind.name()), most, got));
        }
    }
    for kind in KINDS {
        let got = of(document, Curve::Guests, kind, MANY, "overhead_mib");
        let name = format!("{}, overhead of each of {MANY} guests, MiB", kind.name());
        goals.extend(at_most(name, OVERHEAD_MIB, got));
    }
    for curve in Curve::ALL {
        goals.extend(KINDS.into_iter().filter_map(|kind| explained(document, curve, kind)));
    }
    goals
}

/// Returns the goal that the parts of the downtime explain it at each point of a curve. The
/// smallest share is shown.
fn explained(document: &Document, curve: Curve, kind: Kind) -> Option<Value> {
    let own = document.cases.iter().filter(|case| {
        case.params.get("case").is_some_and(|name| name == curve.name())
            && case.params.get("guest").is_some_and(|name| name == kind.name())
    });
    let shares = own.filter_map(|case| Figure::of(case, "explained_share"));
    let judge = |share: Figure| (share, Verdict::of(share.median - EXPLAINED, share.spread));
    let (smallest, verdict) = shares.map(judge).reduce(|(least, all), (share, verdict)| {
        (if share.median < least.median { share } else { least }, all.and(verdict))
    })?;
    let name = format!("{}, {}: downtime that its parts explain, at each point", kind.name(), curve.name());
    judged(name, format!(">= {EXPLAINED}"), smallest, verdict)
}
