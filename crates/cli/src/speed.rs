//! Speed of the guest, from its own statistics.

use crate::guest::SharedProbe;
use crate::output;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_guest_abi::StatsSnapshot;

/// Interval at which the guest's statistics are read.
pub(crate) const EVERY: Duration = Duration::from_millis(50);
/// Time before the beginning of a recording that the recording includes.
const LEAD: Duration = Duration::from_secs(2);
/// Most samples of a recording.
const MOST_LOOKS: usize = 1024;
/// Time by which two samples may be farther apart by the host's clock than by the guest's, which is
/// updated every 10 ms.
const CLOCKS_APART: Duration = Duration::from_millis(30);
/// Time over which the speed before a migration is measured, in guest microseconds.
const BEFORE_US: u64 = 1_000_000;

/// Latest guest clock of all vCPUs in microseconds, and number of writes of all vCPUs until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) t_us: u64,
    pub(crate) writes: u64,
}

impl Sample {
    pub(crate) fn of(stats: &StatsSnapshot) -> Self {
        let t_us = stats.cpus().iter().map(|cpu| cpu.t_us).max().unwrap_or(0);
        Self { t_us, writes: stats.writes() }
    }

    /// Returns writes per second from `earlier` to this sample; `None` if no time has passed.
    pub(crate) fn since(self, earlier: Self) -> Option<f64> {
        let us = self.t_us.checked_sub(earlier.t_us).filter(|us| *us > 0)?;
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        Some(self.writes.saturating_sub(earlier.writes) as f64 * 1e6 / us as f64)
    }
}

/// Shortest time at the source for which the speed during a migration is computed.
const SHORTEST: Duration = Duration::from_millis(50);

/// State of the guest when its migration began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub(crate) began: Instant,
    speed: Option<f64>,
    sample: Option<Sample>,
    stall_sum_us: Option<f64>,
}

impl Start {
    /// Returns the state of the guest at this moment.
    pub(crate) fn now(speed: &Speed, probe: &SharedProbe) -> Self {
        let unknown = Self { began: Instant::now(), speed: speed.recent(), sample: None, stall_sum_us: None };
        unknown.again(probe)
    }

    /// Returns the state of the guest at this moment, with the speed before of `self`.
    pub(crate) fn again(self, probe: &SharedProbe) -> Self {
        let stats = probe.stats().ok();
        let (sample, stall_sum_us) = (stats.as_ref().map(Sample::of), stats.as_ref().map(stall_sum_us));
        Self { began: Instant::now(), speed: self.speed, sample, stall_sum_us }
    }

    /// Returns the member `guest` of a migration's document, whose other members are in `report`.
    /// The migration may still run.
    pub(crate) fn document(&self, report: &Value, stats: Option<&StatsSnapshot>) -> Value {
        // After the handover, the guest's count continues at the target.
        let left = output::left_ms(report).map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1e3));
        let here = left.unwrap_or_else(|| self.began.elapsed());
        // The guest is stopped for a verification only on request. That time is not part of the
        // downtime, and is left out of the speed, too.
        let verify = report["verify_ms"].as_f64().unwrap_or(0.0) / 1e3;
        let during = self.sample.zip(stats).filter(|_| here >= SHORTEST).map(|(before, stats)| {
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let writes = stats.writes().saturating_sub(before.writes) as f64;
            writes / (here.as_secs_f64() - verify).max(1e-3)
        });
        let stalls = self.stall_sum_us.zip(stats).map(|(before, stats)| {
            let seen = stall_sum_us(stats) - before;
            (seen, seen - accounted_us(report, stats.cpus().len(), left.is_none()))
        });
        json!({
            "before_writes_per_s": self.speed,
            "during_writes_per_s": during,
            "stall_max_us": stats.and_then(|stats| stats.cpus().iter().map(|cpu| cpu.stall_max_us).max()),
            "stall_sum_us": stalls.map(|(seen, _)| seen),
            "stall_residue_us": stalls.map(|(_, residue)| residue),
        })
    }
}

/// Returns the sum of all stalls of all vCPUs, by the guest's clock, in microseconds.
fn stall_sum_us(stats: &StatsSnapshot) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "microseconds for people")]
    stats.cpus().iter().map(|cpu| cpu.stall_sum_us as f64).sum()
}

/// Returns the time for which vCPUs were stopped at the source, summed over all vCPUs and all
/// causes in `report`, in microseconds. The switchover counts only for a guest that `stayed`:
/// otherwise it ends at the target.
fn accounted_us(report: &Value, cpus: usize, stayed: bool) -> f64 {
    let of = |value: &Value| value.as_f64().unwrap_or(0.0);
    let held: f64 = report["throttle"]["held_ms"].as_array().into_iter().flatten().map(of).sum();
    let switchover = if stayed { of(&report["downtime_ms"]) + of(&report["verify_ms"]) } else { 0.0 };
    let stopped = of(&report["put_off_ms"]) + of(&report["trial_pause_ms"]) + switchover;
    #[expect(clippy::cast_precision_loss, reason = "a number of vCPUs")]
    let stopped = stopped * cpus as f64;
    of(&report["ring"]["full_stall_us"]) + (held + stopped) * 1e3
}

/// Time of a sample, and the sample.
type SpeedSample = (Instant, Sample);

/// Samples of the last few seconds, and those of a recording.
#[derive(Debug, Default, Clone)]
pub(crate) struct Speed(Arc<Mutex<Looks>>);

#[derive(Debug, Default)]
struct Looks {
    recent: VecDeque<SpeedSample>,
    recording: Option<Recording>,
}

/// Recording of samples. When it reaches [`MOST_LOOKS`], every second sample is removed, and the
/// sampling interval doubles.
#[derive(Debug, Default)]
struct Recording {
    looks: Vec<SpeedSample>,
    /// Number of samples to skip after a kept one.
    skip: u32,
    skipped: u32,
}

impl Recording {
    fn add(&mut self, sample: SpeedSample) {
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        self.looks.push(sample);
        if self.looks.len() >= MOST_LOOKS {
            let mut odd = false;
            self.looks.retain(|_| {
                odd = !odd;
                odd
            });
            self.skip = self.skip * 2 + 1;
        }
    }
}

impl Speed {
    /// Takes a sample. Called every [`EVERY`] by the thread that watches the guest.
    pub(crate) fn take_sample(&self, probe: &SharedProbe) {
        let Ok(stats) = probe.stats() else { return };
        self.add((Instant::now(), Sample::of(&stats)));
    }

    fn add(&self, sample: SpeedSample) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if looks.recent.back().map(|(_, last)| last) != Some(&sample.1) {
            looks.recent.push_back(sample);
        }
        while looks.recent.len() > 64 {
            looks.recent.pop_front();
        }
        if let Some(recording) = &mut looks.recording {
            recording.add(sample);
        }
    }

    /// Returns writes per second over the last second.
    pub(crate) fn recent(&self) -> Option<f64> {
        let looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, newest) = *looks.recent.back()?;
        let close = |(_, sample): &&SpeedSample| newest.t_us.saturating_sub(sample.t_us) <= BEFORE_US;
        newest.since(looks.recent.iter().find(close)?.1)
    }

    /// Starts a recording, which includes recent samples.
    pub(crate) fn record(&self) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let late = looks.recent.iter().filter(|(at, _)| now.saturating_duration_since(*at) <= LEAD).copied();
        let recording = Recording { looks: late.collect(), ..Recording::default() };
        looks.recording = Some(recording);
    }

    /// Ends the recording. Returns milliseconds since `start` and writes per second, for the middle
    /// of each interval between two samples.
    pub(crate) fn recorded(&self, start: Instant) -> Vec<[f64; 2]> {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        points(start, &looks.recording.take().unwrap_or_default().looks)
    }
}

/// Computes the points of [`Speed::recorded`] from samples.
pub(crate) fn points(start: Instant, looks: &[SpeedSample]) -> Vec<[f64; 2]> {
    let ms = |at: Instant| {
        at.saturating_duration_since(start).as_secs_f64() * 1e3
            - start.saturating_duration_since(at).as_secs_f64() * 1e3
    };
    let tenths = |value: f64| (value * 10.0).round() / 10.0;
    let point = |pair: &[SpeedSample]| {
        let [(from, before), (to, after)] = [pair[0], pair[1]];
        let guest = Duration::from_micros(after.t_us.saturating_sub(before.t_us));
        // The guest's clock belongs to its count. A guest whose clock did not advance did not run.
        let time = guest.max(to.saturating_duration_since(from).saturating_sub(CLOCKS_APART)).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let writes = after.writes.saturating_sub(before.writes) as f64;
        let speed = if time > 0.0 { writes / time } else { 0.0 };
        [tenths(f64::midpoint(ms(from), ms(to))), tenths(speed)]
    };
    looks.windows(2).map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_writes_by_guest_time() {
        let (a, b) = (Sample { t_us: 1000, writes: 5 }, Sample { t_us: 501_000, writes: 50_005 });
        assert_eq!(b.since(a), Some(100_000.0));
        assert_eq!(a.since(a), None);
        assert_eq!(a.since(b), None);
    }

    #[test]
    fn recording_shows_stalls_and_stays_small() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let look = |ms, t_us, writes| (at(ms), Sample { t_us, writes });
        let looks = [look(0, 0, 0), look(50, 50_000, 500), look(100, 50_000, 500), look(150, 100_000, 1000)];
        assert_eq!(points(at(100), &looks), [[-75.0, 10_000.0], [-25.0, 0.0], [25.0, 10_000.0]]);

        let speed = Speed::default();
        speed.add(look(0, 1, 1));
        speed.record();
        for n in 1..10_000 {
            speed.add(look(n * 50, n * 50_000, n * 500));
        }
        let points = speed.recorded(start);
        assert!((256..MOST_LOOKS).contains(&points.len()), "{}", points.len());
        assert!(points[1..].iter().all(|[_, speed]| (speed - 10_000.0).abs() < 1.0), "{points:?}");
        assert_eq!(speed.recorded(start), Vec::<[f64; 2]>::new(), "the recording has ended");
    }

    #[test]
    fn stalls_at_the_source_are_counted_once_for_each_cause() {
        let report = json!({
            "downtime_ms": 40.0, "verify_ms": 2.0, "put_off_ms": 8.0, "trial_pause_ms": 1.5,
            "ring": { "full_stall_us": 700 }, "throttle": { "held_ms": [20.0, 0.25] },
        });
        assert_eq!(accounted_us(&report, 2, false), 700.0 + 20_250.0 + 2.0 * 9_500.0);
        assert_eq!(accounted_us(&report, 2, true), 700.0 + 20_250.0 + 2.0 * 51_500.0);
        assert_eq!(accounted_us(&json!({ "ring": null, "throttle": null }), 1, true), 0.0);
    }
}
