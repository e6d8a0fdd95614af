//! Speed of the guest over time, from the reports on its serial line.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::reaper;

/// Report of one vCPU about the time since its report before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Report {
    arrived: Instant,
    writes: u64,
    stall_max: Duration,
}

/// Reports of all vCPUs in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    by_cpu: BTreeMap<u64, Vec<Report>>,
}

impl Timeline {
    /// Adds a report that arrived at `arrived`.
    pub(crate) fn add(&mut self, cpu: u64, arrived: Instant, writes: u64, stall_max: Duration) {
        self.by_cpu.entry(cpu).or_default().push(Report { arrived, writes, stall_max });
    }

    /// Returns whether each vCPU that ever reported has done so at or after `moment`.
    pub(crate) fn reaches(&self, moment: Instant) -> bool {
        !self.by_cpu.is_empty()
            && self.by_cpu.values().all(|reports| reports.last().is_some_and(|last| last.arrived >= moment))
    }

    /// Returns the writes per second of all vCPUs from `from` to `to`, or `None` without writes.
    ///
    /// A report covers the time since the vCPU's report before. It counts by the part of that time
    /// that lies between `from` and `to`.
    #[expect(clippy::cast_precision_loss, reason = "a count of writes below 2^53")]
    pub(crate) fn writes_per_s(&self, from: Instant, to: Instant) -> Option<f64> {
        let mut writes = 0.0;
        for reports in self.by_cpu.values() {
            for pair in reports.windows(2) {
                let (start, end) = (pair[0].arrived, pair[1].arrived);
                let inside = end.min(to).saturating_duration_since(start.max(from));
                let span = end.saturating_duration_since(start);
                if !span.is_zero() {
                    writes += pair[1].writes as f64 * inside.as_secs_f64() / span.as_secs_f64();
                }
            }
        }
        (writes > 0.0).then(|| writes / to.saturating_duration_since(from).as_secs_f64())
    }

    /// Returns the writes of each vCPU over time, in seconds since `start`.
    #[expect(clippy::cast_precision_loss, reason = "a count of writes below 2^53")]
    pub(crate) fn since(&self, start: Instant) -> reaper::Timeline {
        let mut timeline = reaper::Timeline::default();
        for (vcpu, reports) in self.by_cpu.values().enumerate() {
            let mut writes = 0;
            for report in reports {
                writes += report.writes;
                let after = report.arrived.saturating_duration_since(start).as_secs_f64();
                let at = after - start.saturating_duration_since(report.arrived).as_secs_f64();
                timeline.add(vcpu, reaper::Point { at, writes: writes as f64 });
            }
        }
        timeline
    }

    /// Returns the longest stall in the reports that arrived between `from` and `to`.
    pub(crate) fn stall_max(&self, from: Instant, to: Instant) -> Option<Duration> {
        let reports = self.by_cpu.values().flatten();
        reports.filter(|r| (from..=to).contains(&r.arrived)).map(|r| r.stall_max).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn reports_count_by_their_share_of_the_window() {
        let zero = Instant::now();
        let mut timeline = Timeline::default();
        for (at, writes) in [(0, 1), (100, 1000), (200, 1000), (300, 500), (400, 1000)] {
            timeline.add(0, zero + ms(at), writes, ms(at / 100));
        }
        let speed = |from, to| timeline.writes_per_s(zero + ms(from), zero + ms(to));
        assert_eq!(speed(0, 200), Some(10_000.0));
        assert_eq!(speed(200, 300), Some(5_000.0));
        assert!((speed(150, 250).unwrap() - 7_500.0).abs() < 1e-6);
        assert_eq!(speed(500, 600), None);
        let seen = timeline.since(zero + ms(100)).speed(-0.1, 0.1);
        assert!((seen - 10_000.0).abs() < 1e-6, "{seen}");
        assert_eq!(timeline.stall_max(zero + ms(100), zero + ms(300)), Some(ms(3)));
        assert_eq!(timeline.stall_max(zero + ms(401), zero + ms(500)), None);
    }

    #[test]
    fn speeds_of_vcpus_add_up_and_all_must_have_reported() {
        let zero = Instant::now();
        let mut timeline = Timeline::default();
        assert!(!timeline.reaches(zero));
        for cpu in 0..2 {
            timeline.add(cpu, zero, 1, ms(0));
            timeline.add(cpu, zero + ms(100 + cpu * 100), 1000 * (cpu + 1), ms(0));
        }
        assert!((timeline.writes_per_s(zero, zero + ms(100)).unwrap() - 20_000.0).abs() < 1e-6);
        assert!(timeline.reaches(zero + ms(100)));
        assert!(!timeline.reaches(zero + ms(150)));
    }
}
