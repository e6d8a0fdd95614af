//! Conversion of runs into figures, and of figures into ratios and targets.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::SideRuns;
use super::spec::{CaseSpec, Side};
use crate::goal;
use crate::result::MigrationResult;

/// Function that returns a figure of one run, or `None` if the figure has no meaning for the side
/// or the guest.
pub(super) type Figure = fn(&MigrationResult) -> Option<f64>;

/// Figures of each side. The median is reported under the name, the extremes under `_min` and
/// `_max`.
pub(super) const FIGURES: &[(&str, Figure)] = &[
    ("total_ms", |r| Some(r.total.as_secs_f64() * 1e3)),
    ("downtime_ms", |r| (!r.downtime.is_zero()).then_some(r.downtime.as_secs_f64() * 1e3)),
    ("gbytes_per_s", |r| Some(r.gbytes_per_s())),
    ("data_gbytes", |r| Some(r.gbytes())),
    ("cpu_ms_per_gb", |r| Some(r.cpu_ms_per_gb())),
    // Data that one processor moves in a second, with the work of both ends.
    ("gbytes_per_core_s", |r| Some(1e3 / r.cpu_ms_per_gb()).filter(|speed| speed.is_finite())),
    ("guest_speed_kept", MigrationResult::guest_speed_kept),
    ("guest_writes_per_s", |r| r.writes_before),
    ("guest_stall_max_ms", |r| r.stall_max.map(|stall| stall.as_secs_f64() * 1e3)),
    ("passes", |r| r.passes.map(to_f64)),
    ("wire_gbytes", |r| r.wire_bytes.map(|bytes| to_f64(bytes) / 1e9)),
    ("target_resident_mib", |r| r.target_resident.map(|bytes| to_f64(bytes) / 1_048_576.0)),
    // Meaningful for an idle guest, each of whose pages is sent once.
    ("wasted", |r| r.target_resident.map(|bytes| to_f64(bytes) / to_f64(r.data_bytes) - 1.0)),
];

/// Ratios of vmferry to QEMU: the prefix of the name in the summary, and the figure.
const COMPARED: &[(&str, &str)] = &[
    ("", "gbytes_per_s"),
    ("total_", "total_ms"),
    ("downtime_", "downtime_ms"),
    ("cpu_per_gb_", "cpu_ms_per_gb"),
    ("speed_kept_", "guest_speed_kept"),
];

/// Targets of the project: case, side of vmferry, ratio, whether the bound is a minimum, and the
/// bound.
const TARGETS: &[(&str, &str, &str, bool, f64)] = &[
    ("idle", "ours-2", "of_floor", true, 0.8),
    ("idle", "ours-2-tls", "vs_plain", true, 0.6),
    ("idle", "ours-1", "vs_qemu_single", true, 1.6),
    ("idle", "ours-2", "vs_qemu_multifd", true, 1.2),
    ("idle", "ours-1", "cpu_per_gb_vs_qemu_single", false, 1.0),
    ("idle", "ours-2", "cpu_per_gb_vs_qemu_multifd", false, 1.0),
    ("uniform", "ours-1", "total_vs_qemu_single", false, 1.0),
    ("uniform", "ours-2", "total_vs_qemu_multifd", false, 1.0),
    ("uniform", "ours-1", "downtime_vs_qemu_single", false, 0.5),
    ("uniform", "ours-2", "downtime_vs_qemu_multifd", false, 0.5),
    ("uniform", "ours-1", "speed_kept_vs_qemu_single", true, 1.0),
    ("uniform", "ours-2", "speed_kept_vs_qemu_multifd", true, 1.0),
    ("uniform", "ours-1", "cpu_per_gb_vs_qemu_single", false, 1.0),
    ("uniform", "ours-2", "cpu_per_gb_vs_qemu_multifd", false, 1.0),
];

#[expect(clippy::cast_precision_loss, reason = "counts below 2^53")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

/// Returns a figure of each round.
pub(super) fn by_round<S>(
    runs: &crate::rounds::SideRuns<S, MigrationResult>,
    figure: Figure,
) -> Vec<Option<f64>> {
    runs.rounds.iter().map(|round| round.as_ref().and_then(figure)).collect()
}

pub(super) fn figure(name: &str) -> Figure {
    FIGURES.iter().find(|(known, _)| *known == name).map_or(|_| None, |(_, figure)| *figure)
}

/// Adds the sides of a case to the document, and its ratios to the summary.
pub(super) fn add_case(document: &mut Document, spec: &CaseSpec, sides: &[SideRuns]) {
    let speed = figure("gbytes_per_s");
    let floor_of =
        |side: Side| sides.iter().find(|runs| runs.side == Side::Floor { streams: side.streams() });
    let of_floor = |runs: &SideRuns| {
        let floor = floor_of(runs.side).filter(|_| !matches!(runs.side, Side::Floor { .. }))?;
        Spread::of_ratios(&by_round(runs, speed), &by_round(floor, speed))
    };
    for runs in sides {
        let mut case = case_of(spec, runs);
        case.spread("of_floor", of_floor(runs));
        document.cases.push(case);
    }

    let mut summary = BTreeMap::new();
    for ours in sides.iter().filter(|runs| matches!(runs.side, Side::Ours { .. })) {
        let mut ratios = BTreeMap::new();
        if let Some(ratio) = of_floor(ours) {
            insert(&mut ratios, "of_floor", ratio);
        }
        let plain = Side::Ours { channels: ours.side.streams(), encrypted: false };
        if let Some(plain) = sides.iter().find(|runs| runs.side == plain && ours.side != plain)
            && let Some(ratio) = Spread::of_ratios(&by_round(ours, speed), &by_round(plain, speed))
        {
            insert(&mut ratios, "vs_plain", ratio);
        }
        for theirs in sides {
            let Side::Qemu { multifd } = theirs.side else { continue };
            let name = if multifd.is_some() { "vs_qemu_multifd" } else { "vs_qemu_single" };
            for (prefix, compared) in COMPARED {
                let compared = figure(compared);
                if let Some(ratio) = Spread::of_ratios(&by_round(ours, compared), &by_round(theirs, compared))
                {
                    insert(&mut ratios, &format!("{prefix}{name}"), ratio);
                }
            }
        }
        for kept in ["guest_speed_kept", "cpu_ms_per_gb", "gbytes_per_core_s"] {
            if let Some(spread) = Spread::of(by_round(ours, figure(kept)).into_iter().flatten()) {
                ratios.insert(kept.to_owned(), spread.median);
            }
        }
        summary.insert(ours.side.to_string(), ratios);
    }
    document.summary.insert(spec.name.clone(), json!(summary));
}

/// Adds a ratio to the summary of a side: its median, and its extremes if it has several rounds.
pub(super) fn insert(ratios: &mut BTreeMap<String, f64>, name: &str, ratio: Spread) {
    if ratio.repeats > 1 {
        ratios.insert(format!("{name}_min"), ratio.min);
        ratios.insert(format!("{name}_max"), ratio.max);
    }
    ratios.insert(name.to_owned(), ratio.median);
}

fn case_of(spec: &CaseSpec, runs: &SideRuns) -> Case {
    let name = format!("{}/{}", spec.name, runs.side);
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
        _ => Case::new(name),
    }
    .param("case", spec.name.as_str())
    .param("side", runs.side.to_string())
    .param("streams", runs.side.streams())
    .param("rounds", runs.rounds.iter().flatten().count());
    case = match runs.side {
        Side::Floor { .. } => case.param("bytes", spec.data),
        _ => case
            .param("memory_bytes", spec.memory)
            .param("vcpus", spec.vcpus)
            .param("workload", spec.workload.as_str()),
    };
    for (name, figure) in FIGURES {
        case.spread(name, Spread::of(by_round(runs, *figure).into_iter().flatten()));
    }
    case
}

/// Adds the summary of the whole run: rounds, failures, and which targets were met.
pub(super) fn finish(document: &mut Document, repeats: usize, failures: &[String]) {
    let targets: Vec<Value> = TARGETS
        .iter()
        .filter_map(|(case, side, ratio, least, bound)| {
            let ratios = document.summary.get(*case)?.get(*side)?;
            let of = |suffix: &str| ratios.get(format!("{ratio}{suffix}"))?.as_f64();
            let spread = of("_max").zip(of("_min")).map(|(max, min)| max - min);
            let got = goal::Figure { median: of("")?, spread };
            goal::bounded(format!("{case}/{side} {ratio}"), *least, *bound, Some(got))
        })
        .collect();
    document.summary.insert("rounds".into(), repeats.into());
    document.summary.insert("targets".into(), targets.into());
    document.summary.insert("failures".into(), failures.into());
}
