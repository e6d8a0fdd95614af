//! Goals of the policy `predict`, and published results to compare with.

use serde_json::{Value, json};
use vmferry_report::json::{Case, Document};

use super::spec::ENTRIES;
use super::{Policy, Purpose, Side};
use crate::goal::{Figure, at_least, at_most, bounded, goal};

/// Smallest ratio of the guest's speed with `predict` to its speed with the log.
const OF_LOG: f64 = 0.9;
/// Largest share of vCPU time stopped by full rings, in percent.
const STALL_PCT: f64 = 0.5;
/// Largest ratio of full exits with `predict` to those with `fixed`.
const FULL_OF_FIXED: f64 = 0.1;
/// Largest processor share of the reaper of an idle guest, in percent of a processor.
const IDLE_CPU_PCT: f64 = 0.1;

/// Published drop of the guest's speed, in seconds.
struct Published {
    stress_gib: u64,
    vcpus: u32,
    bitmap: f64,
    /// For each of [`ENTRIES`]: the drop with a harvest every second, and with gears.
    rings: [(f64, f64); 2],
}

const fn row(stress_gib: u64, vcpus: u32, bitmap: f64, rings: [(f64, f64); 2]) -> Published {
    Published { stress_gib, vcpus, bitmap, rings }
}

/// Published drops.
const PUBLISHED: [Published; 6] = [
    row(3, 2, 18.0, [(23.0, 5.5), (22.2, 6.0)]),
    row(3, 8, 38.0, [(62.0, 13.0), (71.0, 14.0)]),
    row(6, 8, 61.5, [(68.0, 16.0), (63.0, 15.0)]),
    row(10, 8, 110.0, [(91.0, 12.1), (88.0, 11.5)]),
    row(20, 8, 161.6, [(152.8, 20.0), (157.3, 21.0)]),
    row(30, 8, 221.5, [(187.0, 29.5), (171.0, 29.5)]),
];

/// Sides of one case.
struct Sides<'a> {
    name: &'a str,
    cases: Vec<&'a Case>,
}

impl Sides<'_> {
    fn of(&self, side: Side, metric: &str) -> Option<Figure> {
        let name = format!("{}/{side}", self.name);
        Figure::of(self.cases.iter().find(|case| case.name == name)?, metric)
    }

    /// Returns the figure of `predict`, and the best figure of the other policies.
    fn against(&self, entries: u32, metric: &str, more_is_better: bool) -> Option<(Figure, Figure)> {
        let of = |policy| self.of(Side::Ring { entries, policy }, metric);
        let others = Policy::ALL.into_iter().filter(|policy| *policy != Policy::Predict).filter_map(of);
        let best = others.reduce(|a, b| if (a.median > b.median) == more_is_better { a } else { b })?;
        Some((of(Policy::Predict)?, best))
    }
}

/// Returns the sides of each case that compares them, in order.
fn compared(document: &Document) -> Vec<Sides<'_>> {
    let mut all: Vec<Sides> = Vec::new();
    for case in document.with_purpose(&Purpose::Compare.name()) {
        let Some(name) = case.params.get("case").and_then(Value::as_str) else { continue };
        match all.iter_mut().find(|sides| sides.name == name) {
            Some(sides) => sides.cases.push(case),
            None => all.push(Sides { name, cases: vec![case] }),
        }
    }
    all
}

/// Returns a ratio, or `None` if it is not finite. The ratio of zero to zero is `of_zeros`.
fn ratio(ours: Figure, theirs: Figure, of_zeros: f64) -> Option<Figure> {
    if ours.median == 0.0 && theirs.median == 0.0 {
        // Only rounds without any other value show how far such a ratio spreads.
        let exact = ours.spread == Some(0.0) && theirs.spread == Some(0.0);
        return Some(Figure { median: of_zeros, spread: exact.then_some(0.0) });
    }
    ours.over(theirs)
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    let mut goals = Vec::new();
    for sides in compared(document) {
        for entries in ENTRIES {
            goals.extend(of_rings(&sides, entries).into_iter().flatten());
        }
    }
    for case in document.with_purpose(&Purpose::Idle.name()) {
        if case.params.get("policy").is_some_and(|policy| policy == Policy::Predict.name())
            && let Some(got) = Figure::of(case, "reaper_cpu_pct")
        {
            let (name, want) = (format!("{} reaper CPU %", case.name), format!("< {IDLE_CPU_PCT}"));
            goals.extend(goal(name, want, got, IDLE_CPU_PCT - got.median));
        }
    }
    goals
}

fn of_rings(sides: &Sides<'_>, entries: u32) -> [Option<Value>; 6] {
    let name = |what: &str| format!("{}/{entries} {what}", sides.name);
    let of = |policy, metric| sides.of(Side::Ring { entries, policy }, metric);
    let best = |metric, more_is_better: bool, what: &str| {
        let (ours, best) = sides.against(entries, metric, more_is_better)?;
        bounded(name(what), more_is_better, 1.0, ratio(ours, best, 1.0))
    };
    let to_log = || {
        let log = sides.of(Side::Log, "writes_during_per_s")?;
        let got = of(Policy::Predict, "writes_during_per_s")?.over(log);
        at_least(name("writes/s, predict to log"), OF_LOG, got)
    };
    let stall =
        || at_most(name("ring stall, % of vCPU time"), STALL_PCT, of(Policy::Predict, "full_stall_pct"));
    let exits = || {
        let (ours, fixed) = (of(Policy::Predict, "full_exits")?, of(Policy::Fixed, "full_exits")?);
        at_most(name("full exits, predict to fixed"), FULL_OF_FIXED, ratio(ours, fixed, 0.0))
    };
    [
        best("writes_during_per_s", true, "writes/s, predict to the best other"),
        to_log(),
        stall(),
        exits(),
        best("drop_s", false, "drop, predict to the best other"),
        best("worst_ms_per_gb", false, "worst ms/GB, predict to the best other"),
    ]
}

/// Returns the drops beside all those that were published for the stress of each case, as ratios.
pub(super) fn published(document: &Document) -> Vec<Value> {
    let mut rows = Vec::new();
    for sides in compared(document) {
        let stress = sides.cases.iter().find_map(|case| case.params.get("published_stress_bytes")?.as_u64());
        for row in PUBLISHED.iter().filter(|row| stress == Some(row.stress_gib << 30)) {
            let Published { stress_gib, vcpus, bitmap, rings } = row;
            for (entries, (fixed, adaptive)) in ENTRIES.into_iter().zip(*rings) {
                let drop = |side| sides.of(side, "drop_s").map(|figure| figure.median);
                let Some(ours) = drop(Side::Ring { entries, policy: Policy::Predict }) else { continue };
                let to = |side| drop(side).filter(|other| *other > 0.0).map(|other| ours / other);
                rows.push(json!({
                    "name": format!(
                        "{}/{entries}, published with {stress_gib} GB on {vcpus} vCPUs",
                        sides.name
                    ),
                    "published_to_bitmap": adaptive / bitmap,
                    "published_to_fixed": adaptive / fixed,
                    "to_log": to(Side::Log),
                    "to_fixed": to(Side::Ring { entries, policy: Policy::Fixed }),
                }));
            }
        }
    }
    rows
}
