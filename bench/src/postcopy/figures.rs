//! Conversion of a run into its figures.

use std::collections::BTreeMap;

use vmferry_report::Spread;

use super::watch::{Waited, Waits};
use super::{CaseSpec, Run};
use crate::reaper::{WINDOW, to_f64};
use crate::rtt::Floor;

/// Figures of a run by their names in the results.
pub(super) type Figures = BTreeMap<String, f64>;

/// Share of its earlier speed at which a guest counts as recovered.
pub(super) const BACK: f64 = 0.9;

/// Share of TCP payload in a frame on the shaped link: 1448 of 1514 bytes (RFC 894, RFC 7323).
const PAYLOAD: f64 = 1448.0 / 1514.0;

/// Figures and waits of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    pub(super) figures: Figures,
    /// Waits of the guest, for the histogram.
    pub(super) waits: Waits,
}

/// Returns the figures of a run, or `None` if the guest did not report.
pub(super) fn measure(spec: &CaseSpec, run: &Run, floor: Option<Floor>) -> Option<Measured> {
    let waited = run.waited()?;
    let mut figures = Figures::new();
    let mut put = |name: &str, value: Option<f64>| {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            figures.insert(name.into(), value);
        }
    };
    let Waited { during, before: (noise, noise_s), downtime_us } = &waited;
    let mean = during.mean_us();
    let p99 = during.quantile_us(0.99);
    put("mean_us", mean);
    put("p50_us", during.quantile_us(0.5));
    put("p99_us", p99);
    put("max_us", (during.count() > 0).then_some(to_f64(during.max_us)));
    put("waits", Some(to_f64(during.count())));
    put("short_stalls", Some(to_f64(during.short())));
    put("waits_per_s", Some(to_f64(during.count()) / (run.end - run.switched)));
    put("before_waits_per_s", Some(to_f64(noise.count()) / noise_s));
    put("before_mean_us", noise.mean_us());
    if let Some(floor) = floor {
        put("floor_us", Some(floor.us()));
        put("rtt_us", Some(floor.rtt_us));
        put("local_fault_us", Some(floor.local_fault_us));
        put("ratio_to_floor", mean.map(|mean| mean / floor.us()));
        put("p99_to_floor", p99.map(|p99| p99 / floor.us()));
    }
    let total = run.result.total.as_secs_f64();
    put("total_ms", Some(total * 1e3));
    put("switch_ms", Some(run.switched * 1e3));
    put("downtime_ms", Some(run.result.downtime.as_secs_f64() * 1e3));
    put("guest_downtime_ms", downtime_us.iter().flatten().max().map(|us| to_f64(*us) / 1e3));
    put("gbytes_per_s", Some(to_f64(spec.data) / 1e9 / total));
    if let Some(shape) = spec.shape {
        let least = to_f64(spec.data) * 8.0 / (to_f64(shape.bits_per_s) * PAYLOAD);
        put("ratio_to_link", Some(total / least));
        put("link_share", Some(to_f64(spec.data) * 8.0 / total / to_f64(shape.bits_per_s)));
    }
    if let Some(own) = &run.own {
        put("own_faults", Some(own.faults));
        put("own_mean_us", Some(own.mean_us));
        put("own_p50_us", Some(own.p50_us));
        put("own_p99_us", Some(own.p99_us));
        put("own_max_us", Some(own.max_us));
        put("own_duplicates", Some(own.duplicates));
        put("own_prefetched", Some(own.prefetched));
    }
    for (name, huge) in ["source_huge_mb", "target_huge_mb"].into_iter().zip(run.huge) {
        put(name, huge.map(|bytes| to_f64(bytes) / 1e6));
    }
    for (name, value) in speeds(run) {
        put(name, Some(value));
    }
    Some(Measured { figures, waits: *during })
}

/// Returns the speed of the guest, and the time at which it recovered its speed.
fn speeds(run: &Run) -> Vec<(&'static str, f64)> {
    let timeline = run.timeline();
    let begin = run.source.first().map_or(0.0, |observed| observed.at);
    let Some(Spread { median: before, .. }) = Spread::of(timeline.windows(begin, 0.0)) else {
        return Vec::new();
    };
    let watched = timeline.end().unwrap_or(run.end);
    let mut speeds = vec![
        ("writes_before_per_s", before),
        ("writes_during_per_s", timeline.speed(0.0, run.end)),
        ("guest_speed_kept", timeline.speed(0.0, run.end) / before),
        ("watched_ms", watched * 1e3),
    ];
    // Windows before the guest ran on the target say nothing about its recovery.
    let windows = timeline.windows(run.switched, watched);
    if let Some(back) = back(&windows, before * BACK) {
        speeds.push(("back_90_ms", (run.switched + back) * 1e3));
    }
    if let Some(last) = windows.last_chunk::<3>() {
        speeds.push(("after_of_before", last.iter().sum::<f64>() / 3.0 / before));
    }
    speeds
}

/// Returns the start of the first two consecutive windows that reach `wanted`, in seconds after the
/// first window begins.
fn back(windows: &[f64], wanted: f64) -> Option<f64> {
    let at = windows.windows(2).position(|pair| pair.iter().all(|speed| *speed >= wanted))?;
    Some(to_f64(at as u64) * WINDOW)
}

/// Returns a histogram of the waits of all runs: the upper bound in microseconds, and the count.
pub(crate) fn histogram<'a>(runs: impl Iterator<Item = &'a Waits>) -> BTreeMap<u64, u64> {
    let mut histogram = BTreeMap::new();
    for waits in runs {
        for (bucket, count) in waits.hist.iter().enumerate() {
            if *count > 0 {
                *histogram.entry(16 << bucket).or_insert(0) += count;
            }
        }
    }
    histogram
}
