//! Conversion of a run into figures, and of the figures of two runs into ratios.

use vmferry_report::Spread;

use super::{CaseSpec, Run, Side, SideRuns, Writer};
use crate::cases::Figures;
use crate::reaper::to_f64;
use crate::stalls;

/// Smallest share of the raw side's bytes that an encoding must save, so that the processor time is
/// divided by the saved bytes. With less, the quotient would be noise.
const LEAST_SAVED: f64 = 0.01;

/// Returns the figures of a run. A figure that was not measured is absent.
pub(super) fn of(spec: &CaseSpec, run: &Run) -> Figures {
    let result = &run.result;
    let cpu = result.cpu_source + result.cpu_destination;
    let mut figures = result.times();
    figures.extend([
        ("cpu_ms", cpu.as_secs_f64() * 1e3),
        ("converged", if result.total < spec.limit { 1.0 } else { 0.0 }),
    ]);
    if let Some(wire) = result.wire_bytes.map(to_f64) {
        figures.insert("wire_mb", wire / 1e6);
        figures.insert("wire_to_data", wire / to_f64(spec.data));
        let link = spec.link_bytes_per_s().map(to_f64);
        figures.extend(link.map(|link| ("link_share", wire / link / result.total.as_secs_f64())));
    }
    let counts = [
        ("passes", result.passes),
        ("delta_pages", result.delta_pages),
        ("compressed_pages", result.compressed_pages),
    ];
    figures.extend(counts.into_iter().filter_map(|(name, count)| Some((name, to_f64(count?)))));
    if spec.writer != Writer::None {
        figures.extend(stalls::speeds(run));
    }
    figures.retain(|_, value| value.is_finite());
    figures
}

/// Returns a figure of each round.
fn by_round(spec: &CaseSpec, runs: &SideRuns, name: &str) -> Vec<Option<f64>> {
    runs.rounds.iter().map(|run| of(spec, run.as_ref()?).get(name).copied()).collect()
}

/// Returns the ratio of a figure of two sides, taken in each round.
pub(super) fn ratio(spec: &CaseSpec, (ours, theirs): (&SideRuns, &SideRuns), name: &str) -> Option<Spread> {
    Spread::of_ratios(&by_round(spec, ours, name), &by_round(spec, theirs, name))
}

/// Returns the processor time in milliseconds that a side needs more than the raw side of the same
/// program, divided by the 10^9 bytes that the side saves, in each round. Negative if the side
/// needs less.
pub(super) fn cpu_of_saved(spec: &CaseSpec, runs: &SideRuns, raw: &SideRuns) -> Option<Spread> {
    let pairs = |name: &str| by_round(spec, runs, name).into_iter().zip(by_round(spec, raw, name));
    let rounds = pairs("cpu_ms").zip(pairs("wire_mb")).filter_map(|((cpu, raw_cpu), (wire, raw_wire))| {
        let (more, raw_wire) = (cpu? - raw_cpu?, raw_wire?);
        let saved = raw_wire - wire?;
        (saved > raw_wire * LEAST_SAVED).then(|| more / saved * 1e3)
    });
    Spread::of(rounds)
}

/// Returns the runs of QEMU's side with the smallest median of the total time.
pub(super) fn best_qemu<'a>(spec: &CaseSpec, sides: &'a [SideRuns]) -> Option<&'a SideRuns> {
    let theirs = sides.iter().filter(|runs| matches!(runs.side, Side::Qemu(_)));
    let total = |runs: &SideRuns| {
        Spread::of(by_round(spec, runs, "total_ms").into_iter().flatten()).map(|total| total.median)
    };
    let known = theirs.filter_map(|runs| Some((total(runs)?, runs)));
    known.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, runs)| runs)
}
