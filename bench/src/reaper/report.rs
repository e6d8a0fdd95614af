//! Conversion of runs into the document.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document, Series};

use super::figures::{Figures, fault_us, figures, speed_before};
use super::goals::{goals as verdicts, published};
use super::question::{answer, stall_and_total};
use super::spec::{ENTRIES, SCALE};
use super::{CaseSpec, Options, Policy, Purpose, Run, Side, SideRuns, Throttle, WINDOW};
use crate::cases::add_spreads;

/// Adds the sides of a case to the document.
pub(super) fn add_case(document: &mut Document, options: &Options, spec: &CaseSpec, sides: &[SideRuns]) {
    let before = options.before.as_secs_f64();
    let by_side: Vec<Vec<Option<Figures>>> = sides
        .iter()
        .map(|runs| {
            runs.rounds.iter().map(|run| run.as_ref().map(|run| figures(spec, run, before))).collect()
        })
        .collect();
    let cores = u32::try_from(document.host.cores).unwrap_or(u32::MAX);
    for (runs, rounds) in sides.iter().zip(&by_side) {
        let case = case_of(options, spec, runs, rounds);
        // The vCPUs leave no processor to the migration.
        document.cases.push(case.param("oversubscribed", spec.vcpus >= cores));
    }
    match spec.purpose {
        Purpose::FaultCost => {
            let costs = by_side.iter().flatten().flatten().filter_map(fault_us);
            if let Some(cost) = Spread::of(costs) {
                let Spread { median, min, max, .. } = cost;
                document
                    .summary
                    .insert("fault_us".into(), json!({ "median": median, "min": min, "max": max }));
            }
        }
        Purpose::Compare => {
            let paid = paid(sides, &by_side);
            if !paid.is_empty() {
                let all = document.summary.entry("predict_to_fixed".into()).or_insert_with(|| json!({}));
                all[&spec.name] = json!(paid);
            }
        }
        Purpose::Idle | Purpose::Converge | Purpose::Published | Purpose::Throttle => {}
    }
}

fn case_of(options: &Options, spec: &CaseSpec, runs: &SideRuns, rounds: &[Option<Figures>]) -> Case {
    let name = format!("{}/{}", spec.name, runs.side);
    let mut case = match &runs.skipped {
        Some(why) if rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    }
    .param("case", spec.name.as_str())
    .param("side", runs.side.to_string())
    .param("line", runs.side.short())
    .param("purpose", spec.purpose.name())
    .param("workload", spec.workload.as_str())
    .param("memory_bytes", spec.memory)
    .param("vcpus", spec.vcpus)
    .param("ring_entries", runs.side.entries())
    .param("published_stress_bytes", spec.published)
    .param("max_bandwidth_bytes_per_s", spec.max_bandwidth)
    .param("downtime_limit_ms", millis(spec.downtime_limit))
    .param("timeout_ms", millis(spec.timeout))
    .param("mode", spec.mode.name())
    .param("throttle", runs.side.throttle().or(spec.throttle).map(Throttle::name))
    .param("rounds", rounds.iter().flatten().count());
    if let Some(policy) = runs.side.policy() {
        case = case.param("policy", policy.name());
    }
    add_spreads(&mut case, rounds.iter().flatten());
    case.series = typical(runs, rounds, options.before.as_secs_f64());
    case
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the series of the round whose speed was the median.
fn typical(runs: &SideRuns, rounds: &[Option<Figures>], before: f64) -> Option<Series> {
    let kept = |figures: &Option<Figures>| figures.as_ref()?.get("writes_during_per_s").copied();
    let mut known: Vec<(f64, &Run)> = rounds
        .iter()
        .zip(&runs.rounds)
        .filter_map(|(figures, run)| Some((kept(figures)?, run.as_ref()?)))
        .collect();
    known.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (_, run) = known.get(known.len() / 2)?;
    let from_s = -(before / WINDOW).floor() * WINDOW;
    let windows = run.timeline.windows(from_s, run.timeline.end()?);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, below 2^53")]
    let values = windows.into_iter().map(|speed| speed.max(0.0).round() as u64).collect();
    (speed_before(run, before) > 0.0).then(|| Series {
        what: "guest writes, 1/s".into(),
        from_s,
        step_s: WINDOW,
        end_s: run.end,
        values,
    })
}

/// Returns the cost of the policy `predict`: its ratios to `fixed` within rounds, by ring size.
fn paid(sides: &[SideRuns], figures: &[Vec<Option<Figures>>]) -> BTreeMap<String, Value> {
    let rounds_of = |entries, policy, name: &str| -> Option<Vec<Option<f64>>> {
        let index = sides.iter().position(|runs| runs.side == Side::Ring { entries, policy })?;
        Some(figures[index].iter().map(|figures| figures.as_ref()?.get(name).copied()).collect())
    };
    let mut paid = BTreeMap::new();
    for entries in ENTRIES {
        let mut ratios = serde_json::Map::new();
        for name in ["writes_during_per_s", "faults", "total_ms", "downtime_ms", "passes", "wire_gbytes"] {
            let both = rounds_of(entries, Policy::Predict, name).zip(rounds_of(entries, Policy::Fixed, name));
            if let Some(ratio) = both.and_then(|(ours, theirs)| Spread::of_ratios(&ours, &theirs)) {
                let spread = json!({ "median": ratio.median, "min": ratio.min, "max": ratio.max });
                ratios.insert(name.into(), spread);
            }
        }
        if !ratios.is_empty() {
            paid.insert(entries.to_string(), ratios.into());
        }
    }
    paid
}

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, options: &Options, failures: &[String]) {
    let fault_us = document.summary.get("fault_us").and_then(|cost| cost["median"].as_f64());
    for case in &mut document.cases {
        explain(case, fault_us);
    }
    let rows = stall_and_total(document);
    if let Some(answer) = answer(&rows) {
        document.summary.insert("answer".into(), answer.into());
    }
    let summary = [
        ("stall_and_total", rows.into()),
        ("rounds", options.repeats.into()),
        ("window_s", WINDOW.into()),
        ("scale", SCALE.into()),
        ("published", published(document).into()),
        ("goals", verdicts(document).into()),
        ("failures", failures.into()),
    ];
    document.summary.extend(summary.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
}

/// Adds the parts of the time that the guest lost.
fn explain(case: &mut Case, fault_us: Option<f64>) {
    let of = |name: &str| case.metrics.get(name).copied();
    let (Some(lost_pct), Some(lost_ms), Some(faults), Some(fault_us)) =
        (of("lost_pct"), of("lost_ms"), of("faults"), fault_us)
    else {
        return;
    };
    // A guest that kept its speed lost nothing that could be divided into parts.
    let vcpu_ms = if lost_pct.abs() > 1e-9 { lost_ms / lost_pct * 100.0 } else { return };
    let fault_pct = faults * fault_us / 1e3 / vcpu_ms * 100.0;
    let others = of("full_stall_pct").unwrap_or(0.0) + of("downtime_pct").unwrap_or(0.0);
    case.metric("fault_ms", faults * fault_us / 1e3);
    case.metric("fault_pct", fault_pct);
    case.metric("rest_pct", lost_pct - fault_pct - others);
}
