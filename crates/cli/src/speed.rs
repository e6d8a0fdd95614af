//! How fast the guest runs, from its own reports.

use crate::guest::SharedProbe;
use crate::output;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_guest_abi::StatsSnapshot;

/// How often the guest's reports are looked at.
pub(crate) const EVERY: Duration = Duration::from_millis(50);
/// How long before its beginning a recording reaches.
const LEAD: Duration = Duration::from_secs(2);
/// Most looks of a recording.
const MOST_LOOKS: usize = 1024;
/// Two looks may be so much farther apart by the host's clock than by the guest's, which reports every 10 ms.
const CLOCKS_APART: Duration = Duration::from_millis(30);
/// How far back the speed before a migration reaches, in guest microseconds.
const BEFORE_US: u64 = 1_000_000;

/// A guest's clock and its writes until then, of its first vCPU's time and all vCPUs' writes.
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

    /// Writes a second from `earlier` to this; `None` if no time has passed.
    pub(crate) fn since(self, earlier: Self) -> Option<f64> {
        let us = self.t_us.checked_sub(earlier.t_us).filter(|us| *us > 0)?;
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        Some(self.writes.saturating_sub(earlier.writes) as f64 * 1e6 / us as f64)
    }
}

/// A guest that was at the source for a shorter part of a migration has no speed during it.
const SHORTEST: Duration = Duration::from_millis(50);

/// State of the guest when its migration began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub(crate) began: Instant,
    speed: Option<f64>,
    sample: Option<Sample>,
}

impl Start {
    /// Returns the state of the guest at this moment.
    pub(crate) fn now(speed: &Speed, probe: &SharedProbe) -> Self {
        let sample = probe.stats().ok().map(|stats| Sample::of(&stats));
        Self { began: Instant::now(), speed: speed.recent(), sample }
    }

    /// Returns the member `guest` of a migration's document, whose other members are in `report`.
    /// The migration may still run.
    pub(crate) fn document(&self, report: &Value, stats: Option<&StatsSnapshot>) -> Value {
        // From the handover on the guest's count goes on at the target.
        let left = output::left_ms(report).map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1e3));
        let here = left.unwrap_or_else(|| self.began.elapsed());
        // The guest is stopped for a verification only on request. That time is not downtime, and
        // is left out here as well.
        let verify = report["verify_ms"].as_f64().unwrap_or(0.0) / 1e3;
        let during = self.sample.zip(stats).filter(|_| here >= SHORTEST).map(|(before, stats)| {
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let writes = stats.writes().saturating_sub(before.writes) as f64;
            writes / (here.as_secs_f64() - verify).max(1e-3)
        });
        json!({
            "before_writes_per_s": self.speed,
            "during_writes_per_s": during,
            "stall_max_us": stats.and_then(|stats| stats.cpus().iter().map(|cpu| cpu.stall_max_us).max()),
        })
    }
}

/// A sample and when it was taken.
type Look = (Instant, Sample);

/// The samples of the last few seconds, and those since a recording began.
#[derive(Debug, Default, Clone)]
pub(crate) struct Speed(Arc<Mutex<Looks>>);

#[derive(Debug, Default)]
struct Looks {
    recent: VecDeque<Look>,
    recording: Option<Recording>,
}

/// Grows to [`MOST_LOOKS`]; then every second one goes, and as many fewer are taken from there on.
#[derive(Debug, Default)]
struct Recording {
    looks: Vec<Look>,
    /// Looks to leave out after one that is kept.
    skip: u32,
    skipped: u32,
}

impl Recording {
    fn take(&mut self, look: Look) {
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        self.looks.push(look);
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
    /// Looks at the guest once; called every [`EVERY`] by whoever watches it.
    pub(crate) fn look(&self, probe: &SharedProbe) {
        let Ok(stats) = probe.stats() else { return };
        self.take((Instant::now(), Sample::of(&stats)));
    }

    fn take(&self, look: Look) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if looks.recent.back().map(|(_, sample)| sample) != Some(&look.1) {
            looks.recent.push_back(look);
        }
        while looks.recent.len() > 64 {
            looks.recent.pop_front();
        }
        if let Some(recording) = &mut looks.recording {
            recording.take(look);
        }
    }

    /// Writes a second over the last second.
    pub(crate) fn recent(&self) -> Option<f64> {
        let looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, newest) = *looks.recent.back()?;
        let close = |(_, sample): &&Look| newest.t_us.saturating_sub(sample.t_us) <= BEFORE_US;
        newest.since(looks.recent.iter().find(close)?.1)
    }

    /// Keeps what is seen from now on, and what has been seen of late.
    pub(crate) fn record(&self) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let late = looks.recent.iter().filter(|(at, _)| now.saturating_duration_since(*at) <= LEAD).copied();
        let recording = Recording { looks: late.collect(), ..Recording::default() };
        looks.recording = Some(recording);
    }

    /// Ends the recording: milliseconds since `start` and writes a second, for each stretch between two looks its middle.
    pub(crate) fn recorded(&self, start: Instant) -> Vec<[f64; 2]> {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        points(start, &looks.recording.take().unwrap_or_default().looks)
    }
}

/// See [`Speed::recorded`].
pub(crate) fn points(start: Instant, looks: &[Look]) -> Vec<[f64; 2]> {
    let ms = |at: Instant| {
        at.saturating_duration_since(start).as_secs_f64() * 1e3
            - start.saturating_duration_since(at).as_secs_f64() * 1e3
    };
    let tenths = |value: f64| (value * 10.0).round() / 10.0;
    let point = |pair: &[Look]| {
        let [(from, before), (to, after)] = [pair[0], pair[1]];
        let guest = Duration::from_micros(after.t_us.saturating_sub(before.t_us));
        // By the guest's clock, which its count belongs to; but a guest whose clock stood still did not run meanwhile.
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
    fn a_recording_shows_when_the_guest_stood_still_and_stays_small() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let look = |ms, t_us, writes| (at(ms), Sample { t_us, writes });
        let looks = [look(0, 0, 0), look(50, 50_000, 500), look(100, 50_000, 500), look(150, 100_000, 1000)];
        assert_eq!(points(at(100), &looks), [[-75.0, 10_000.0], [-25.0, 0.0], [25.0, 10_000.0]]);

        let speed = Speed::default();
        speed.take(look(0, 1, 1));
        speed.record();
        for n in 1..10_000 {
            speed.take(look(n * 50, n * 50_000, n * 500));
        }
        let points = speed.recorded(start);
        assert!((256..MOST_LOOKS).contains(&points.len()), "{}", points.len());
        assert!(points[1..].iter().all(|[_, speed]| (speed - 10_000.0).abs() < 1.0), "{points:?}");
        assert_eq!(speed.recorded(start), Vec::<[f64; 2]>::new(), "it has ended");
    }
}
