//! Goals of the bench, and published results to compare with.

use serde_json::{Value, json};
use vmferry_report::json::{Case, Document};

use super::{Purpose, Side, Way};
use crate::goal::{Figure, Verdict, at_least, at_most, judged};

/// Largest ratio of vmferry's mean to that of `shared`.
const OF_SHARED: f64 = 1.0 / 20.0;
/// Largest ratio of vmferry's mean to that of QEMU's preempt.
const OF_PREEMPT: f64 = 1.0 / 10.0;
/// Largest ratios of vmferry to the floor: of the mean, and of the 99th percentile.
const OF_FLOOR: (f64, f64) = (1.5, 4.0);
/// Largest ratio of the migration time to the time that the link needs for the bytes.
const OF_LINK: f64 = 1.1;

/// Published means in microseconds at 10 Gb/s with 18 of 20 GB written: shared, interleaved,
/// dedicated.
const PUBLISHED: [(&str, [f64; 3]); 2] =
    [("random", [12093.0, 496.0, 229.0]), ("sequential", [1487.0, 1582.0, 439.0])];

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

    fn param(&self, name: &str) -> Option<&Value> {
        self.cases.first()?.params.get(name)
    }
}

const OURS: Side = Side::Ours(Way::Ours);
const PREEMPT: Side = Side::Qemu { preempt: true };

/// Returns the sides of each case with the given purpose, in order.
fn compared(document: &Document, purpose: Purpose) -> Vec<Sides<'_>> {
    let mut all: Vec<Sides> = Vec::new();
    for case in document.with_purpose(&purpose.name()) {
        let Some(name) = case.params.get("case").and_then(Value::as_str) else { continue };
        match all.iter_mut().find(|sides| sides.name == name) {
            Some(sides) => sides.cases.push(case),
            None => all.push(Sides { name, cases: vec![case] }),
        }
    }
    all
}

/// Returns the goals whose figures are known, each with its figure.
pub(super) fn goals(document: &Document) -> Vec<Value> {
    let mut goals = Vec::new();
    for sides in compared(document, Purpose::Compare) {
        goals.extend(of_case(&sides));
    }
    goals.extend(of_vcpus(&compared(document, Purpose::Vcpus)));
    goals
}

fn of_case(sides: &Sides<'_>) -> Vec<Value> {
    let shaped = sides.param("link_gbps").is_some_and(Value::is_number);
    let random = sides.param("pattern").is_some_and(|pattern| pattern == "random");
    let name = |what: &str| format!("{} {what}", sides.name);
    let mean = |side| sides.of(side, "mean_us");
    let ratio = |a: Option<Figure>, b: Option<Figure>| a?.over(b?);
    let mut goals = Vec::new();
    if shaped {
        let [shared, interleaved, dedicated] =
            [Way::Shared, Way::Interleaved, Way::Dedicated].map(|way| mean(Side::Ours(way)));
        let steps = ratio(shared, interleaved).zip(ratio(interleaved, dedicated));
        if let Some((first, second)) = steps.filter(|_| random) {
            // Both steps must be steps down. The smaller one is shown.
            let what = name("mean, shared > interleaved > dedicated: the smaller step");
            let smaller = if first.median < second.median { first } else { second };
            let verdict = |step: Figure| Verdict::of(step.median - 1.0, step.spread);
            goals.extend(judged(what, "> 1", smaller, verdict(first).and(verdict(second))));
        }
        goals.extend(at_most(name("mean, ours to shared"), OF_SHARED, ratio(mean(OURS), shared)));
        goals.extend(at_most(
            name("mean, ours to QEMU preempt"),
            OF_PREEMPT,
            ratio(mean(OURS), mean(PREEMPT)),
        ));
        goals.extend(at_most(
            name("time, ours to the link's limit"),
            OF_LINK,
            sides.of(OURS, "ratio_to_link"),
        ));
    }
    goals.extend(at_most(name("mean, ours to the floor"), OF_FLOOR.0, sides.of(OURS, "ratio_to_floor")));
    goals.extend(at_most(name("p99, ours to the floor"), OF_FLOOR.1, sides.of(OURS, "p99_to_floor")));
    goals.extend(back(sides, name("back at 90 %, ours to the sooner QEMU")));
    goals
}

/// Returns the goal that the guest recovers sooner than under QEMU.
///
/// A guest that was not seen to recover counts as if it had recovered at the end of the
/// observation. The goal is not met if this happened in any round of vmferry.
fn back(sides: &Sides<'_>, name: String) -> Option<Value> {
    let qemu = [false, true].into_iter().filter_map(|preempt| {
        let side = Side::Qemu { preempt };
        sides.of(side, "back_90_ms").or(sides.of(side, "watched_ms"))
    });
    let qemu = qemu.reduce(|a, b| if a.median <= b.median { a } else { b })?;
    // The guest under vmferry must have been observed.
    let watched = sides.of(OURS, "watched_ms")?;
    let ours = sides.of(OURS, "back_90_ms");
    // The number of rounds is a metric only if some rounds do not have the figure.
    let always = ours.is_some() && sides.of(OURS, "back_90_ms_rounds").is_none();
    let got = ours.unwrap_or(watched).over(qemu)?;
    let verdict = match Verdict::of(1.0 - got.median, got.spread) {
        Verdict::Met if !always => Verdict::Inconclusive,
        verdict => verdict,
    };
    judged(name, "< 1", got, verdict)
}

/// Returns the goals that waits per second do not fall with more vCPUs.
fn of_vcpus(cases: &[Sides<'_>]) -> Vec<Value> {
    let of = |sides: &Sides<'_>| sides.of(OURS, "waits_per_s");
    let mut goals = Vec::new();
    for pair in cases.windows(2) {
        if let (Some(fewer), Some(more)) = (of(&pair[0]), of(&pair[1])) {
            let name = format!("pages a second, {} to {}", pair[1].name, pair[0].name);
            goals.extend(at_least(name, 1.0, more.over(fewer)));
        }
    }
    goals
}

/// Returns the published progression beside the measured one, as ratios to `shared`.
pub(super) fn published(document: &Document) -> Vec<Value> {
    let mut rows = Vec::new();
    for sides in compared(document, Purpose::Compare) {
        let row = PUBLISHED.iter().find(|row| sides.param("pattern").is_some_and(|p| p == row.0));
        let (Some((_, [shared, interleaved, dedicated])), true) =
            (row, sides.param("link_gbps").is_some_and(Value::is_number))
        else {
            continue;
        };
        let mean = |way| Some(sides.of(Side::Ours(way), "mean_us")?.median);
        let Some(ours) = mean(Way::Shared) else { continue };
        let to = |way| mean(way).map(|mean| mean / ours);
        rows.push(json!({
            "name": sides.name,
            "published_interleaved": interleaved / shared,
            "interleaved": to(Way::Interleaved),
            "published_dedicated": dedicated / shared,
            "dedicated": to(Way::Dedicated),
            "ours": to(Way::Ours),
        }));
    }
    rows
}
