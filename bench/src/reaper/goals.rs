//! Goals of the policy `predict` and of the throttle, and published results to compare with.

use serde_json::{Value, json};
use vmferry_report::json::{Case, Document};

use super::spec::ENTRIES;
use super::{Policy, Purpose, Side, Throttle};
use crate::goal::{Figure, at_least, at_most, bounded, goal};

/// Smallest ratio of the guest's speed with `predict` to its speed with the log.
const OF_LOG: f64 = 0.9;
/// Largest share of vCPU time stopped by full rings, in percent.
const STALL_PCT: f64 = 0.5;
/// Largest ratio of full exits with `predict` to those with `fixed`.
const FULL_OF_FIXED: f64 = 0.1;
/// Largest processor share of the reaper of an idle guest, in percent of a processor.
const IDLE_CPU_PCT: f64 = 0.1;

/// Published figures of a tracker: the drop of the guest's speed in seconds, and the worst time for
/// an update of 1 GB in milliseconds.
#[derive(Clone, Copy)]
struct Tracked {
    drop: f64,
    /// `None` if it was not published.
    worst: Option<f64>,
}

const fn tracked(drop: f64, worst: f64) -> Tracked {
    Tracked { drop, worst: Some(worst) }
}

const fn drop_only(drop: f64) -> Tracked {
    Tracked { drop, worst: None }
}

/// Published figures of a guest.
struct Published {
    stress_gib: u64,
    vcpus: u32,
    bitmap: Tracked,
    /// For each of [`ENTRIES`]: a harvest every second, and gears.
    rings: [(Tracked, Tracked); 2],
}

const fn row(
    stress_gib: u64,
    vcpus: u32,
    bitmap: Tracked,
    small: (Tracked, Tracked),
    large: (Tracked, Tracked),
) -> Published {
    Published { stress_gib, vcpus, bitmap, rings: [small, large] }
}

/// Published figures.
#[rustfmt::skip]
const PUBLISHED: [Published; 6] = [
    row(3, 2, tracked(18.0, 3300.0), (tracked(23.0, 2766.0), tracked(5.5, 2962.0)),
        (tracked(22.2, 3283.0), tracked(6.0, 3160.0))),
    row(3, 8, tracked(38.0, 7571.0), (tracked(62.0, 48_800.0), tracked(13.0, 7921.0)),
        (drop_only(71.0), drop_only(14.0))),
    row(6, 8, tracked(61.5, 10_500.0), (tracked(68.0, 23_870.0), tracked(16.0, 11_600.0)),
        (drop_only(63.0), drop_only(15.0))),
    row(10, 8, tracked(110.0, 13_680.0), (tracked(91.0, 16_870.0), tracked(12.1, 11_200.0)),
        (drop_only(88.0), drop_only(11.5))),
    row(20, 8, tracked(161.6, 24_400.0), (tracked(152.8, 28_650.0), tracked(20.0, 20_200.0)),
        (drop_only(157.3), drop_only(21.0))),
    row(30, 8, tracked(221.5, 28_400.0), (tracked(187.0, 41_190.0), tracked(29.5, 29_000.0)),
        (tracked(171.0, 30_800.0), tracked(29.5, 29_100.0))),
];

/// Sides of one case.
pub(super) struct Sides<'a> {
    pub(super) name: &'a str,
    cases: Vec<&'a Case>,
}

impl Sides<'_> {
    /// Returns a figure of a side, or `None` if the side does not have it.
    pub(super) fn of(&self, side: Side, metric: &str) -> Option<Figure> {
        let name = format!("{}/{side}", self.name);
        Figure::of(self.cases.iter().find(|case| case.name == name)?, metric)
    }

    /// Returns the parameter `name` of the case.
    fn param(&self, name: &str) -> Option<&Value> {
        self.cases.iter().find_map(|case| case.params.get(name))
    }

    /// Returns the figure of `predict`, and the best figure of the other policies.
    fn against(&self, entries: u32, metric: &str, more_is_better: bool) -> Option<(Figure, Figure)> {
        let of = |policy| self.of(Side::Ring { entries, policy }, metric);
        let others = Policy::ALL.into_iter().filter(|policy| *policy != Policy::Predict).filter_map(of);
        let best = others.reduce(|a, b| if (a.median > b.median) == more_is_better { a } else { b })?;
        Some((of(Policy::Predict)?, best))
    }
}

/// Returns the sides of each case with one of `purposes`, in order.
pub(super) fn sides_of<'a>(document: &'a Document, purposes: &[Purpose]) -> Vec<Sides<'a>> {
    let mut all: Vec<Sides> = Vec::new();
    for case in purposes.iter().flat_map(|purpose| document.with_purpose(&purpose.name())) {
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
    for sides in sides_of(document, &[Purpose::Compare]) {
        for entries in ENTRIES {
            goals.extend(of_rings(&sides, entries).into_iter().flatten());
        }
    }
    for sides in sides_of(document, &[Purpose::Published]) {
        for entries in ENTRIES {
            goals.extend(of_published(&sides, entries).into_iter().flatten());
        }
    }
    for sides in sides_of(document, &[Purpose::Throttle]) {
        for ring in [None, Some(4096)] {
            goals.extend(of_throttle(&sides, ring).into_iter().flatten());
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

/// Returns the goals of a case that reproduces a published row.
fn of_published(sides: &Sides<'_>, entries: u32) -> [Option<Value>; 2] {
    let goal = |metric, what: &str| {
        let of = |policy| sides.of(Side::Ring { entries, policy }, metric);
        let got = ratio(of(Policy::Predict)?, of(Policy::Fixed)?, 1.0);
        at_most(format!("{}/{entries} {what}, predict to fixed", sides.name), 1.0, got)
    };
    [goal("drop_s", "drop"), goal("worst_ms_per_gb", "worst ms/GB")]
}

/// Returns the goals of the throttle with the log, or with rings of `ring` entries.
fn of_throttle(sides: &Sides<'_>, ring: Option<u32>) -> [Option<Value>; 4] {
    let tracker = ring.map_or("log".to_owned(), |entries| format!("ring-{entries}"));
    let name = |what: &str| format!("{}/{tracker} {what}", sides.name);
    let of = |how, metric| sides.of(Side::Throttled { ring, how }, metric);
    let stepped = |metric| sides.of(Side::Qemu { ring, stepped: true }, metric);
    let to_stepped = |metric| of(Throttle::All, metric)?.over(stepped(metric)?);
    let light = || of(Throttle::Writers, "vcpu1_kept")?.over(of(Throttle::All, "vcpu1_kept")?);
    let is_unequal = || {
        let workload = sides.param("workload").and_then(Value::as_str).unwrap_or_default();
        workload.contains("skew=") && !workload.contains("skew=1,")
    };
    // Without rings, both ways throttle all vCPUs equally.
    let light = if ring.is_some() && is_unequal() { light() } else { None };
    [
        at_most(name("total, computed to stepped throttle"), 1.0, to_stepped("total_ms")),
        at_least(name("writes/s, computed to stepped throttle"), 1.0, to_stepped("writes_during_per_s")),
        at_least(name("speed of the vCPU that writes little, writers to all"), 1.0, light),
        // The bound is half way between 0, which every round must have, and 1.
        at_most(name("ended by the timeout, throttle all"), 0.5, of(Throttle::All, "timed_out")),
    ]
}

/// Returns the published rows for a stress: the row with the same number of vCPUs, or all rows if
/// there is none.
fn rows_of(stress_bytes: u64, vcpus: Option<u64>) -> Vec<&'static Published> {
    let alike: Vec<_> = PUBLISHED.iter().filter(|row| row.stress_gib << 30 == stress_bytes).collect();
    let exact = alike.iter().copied().filter(|row| vcpus == Some(row.vcpus.into())).collect::<Vec<_>>();
    if exact.is_empty() { alike } else { exact }
}

/// Returns drops and slowest windows beside the published ones of the stress of each case, as
/// ratios.
pub(super) fn published(document: &Document) -> Vec<Value> {
    let mut rows = Vec::new();
    for sides in sides_of(document, &[Purpose::Compare, Purpose::Published]) {
        let of = |name| sides.param(name).and_then(Value::as_u64);
        let Some(stress) = of("published_stress_bytes") else { continue };
        for row in rows_of(stress, of("vcpus")) {
            let rings = ENTRIES.into_iter().zip(row.rings);
            rows.extend(rings.filter_map(|(entries, rings)| published_row(&sides, row, entries, rings)));
        }
    }
    rows
}

fn published_row(
    sides: &Sides<'_>,
    row: &Published,
    entries: u32,
    (fixed, adaptive): (Tracked, Tracked),
) -> Option<Value> {
    let ring = |policy| Side::Ring { entries, policy };
    let of = |side, metric| sides.of(side, metric).map(|figure| figure.median);
    let drop = of(ring(Policy::Predict), "drop_s")?;
    let worst = of(ring(Policy::Predict), "worst_ms_per_gb");
    let to = |ours: Option<f64>, side, metric| Some(ours? / of(side, metric).filter(|other| *other > 0.0)?);
    let worst_to = |other: Tracked| Some(adaptive.worst? / other.worst?);
    let oversubscribed = sides.param("oversubscribed").and_then(Value::as_bool).unwrap_or(false);
    let label = if oversubscribed { ", oversubscribed" } else { "" };
    let Published { stress_gib, vcpus, bitmap, .. } = row;
    Some(json!({
        "name": format!(
            "{}/{entries}{label}, published with {stress_gib} GB on {vcpus} vCPUs", sides.name
        ),
        "published_to_bitmap": adaptive.drop / bitmap.drop,
        "published_to_fixed": adaptive.drop / fixed.drop,
        "to_log": to(Some(drop), Side::Log, "drop_s"),
        "to_fixed": to(Some(drop), ring(Policy::Fixed), "drop_s"),
        "published_worst_ms_per_gb": adaptive.worst,
        "worst_ms_per_gb": worst,
        "published_worst_to_bitmap": worst_to(*bitmap),
        "published_worst_to_fixed": worst_to(fixed),
        "worst_to_log": to(worst, Side::Log, "worst_ms_per_gb"),
        "worst_to_fixed": to(worst, ring(Policy::Fixed), "worst_ms_per_gb"),
    }))
}
