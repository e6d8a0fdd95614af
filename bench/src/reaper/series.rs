//! Speed of the guest over time in windows of 100 ms, and figures that follow from it.

/// Length of a window in seconds.
pub const WINDOW: f64 = 0.1;

/// Writes of one page each that make 1 GiB, which guestperf calls an update.
const WRITES_OF_A_GB: f64 = 262_144.0;

/// Share of the median before the migration below which a window counts as dropped.
const DROPPED: f64 = 0.8;

/// Writes of one vCPU up to a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Seconds since the command to migrate. Negative before it.
    pub at: f64,
    /// Writes since the guest's start.
    pub writes: f64,
}

/// Writes of each vCPU over time. Times ascend, and writes do not fall.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timeline {
    vcpus: Vec<Vec<Point>>,
}

impl Timeline {
    /// Adds a point of a vCPU. A point that is not later than the last one or has fewer writes is
    /// an old copy and is left out.
    pub fn add(&mut self, vcpu: usize, point: Point) {
        if self.vcpus.len() <= vcpu {
            self.vcpus.resize(vcpu + 1, Vec::new());
        }
        let points = &mut self.vcpus[vcpu];
        if points.last().is_none_or(|last| last.at < point.at && last.writes <= point.writes) {
            points.push(point);
        }
    }

    /// Records that no vCPU wrote anything between its last point and `at`.
    fn hold_until(&mut self, at: f64) {
        for points in &mut self.vcpus {
            if let Some(last) = points.last().copied().filter(|last| last.at < at) {
                points.push(Point { at, ..last });
            }
        }
    }

    /// Returns the number of vCPUs that have points.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Returns the earliest of the vCPUs' last points, or `None` without points.
    pub fn end(&self) -> Option<f64> {
        let last = |points: &Vec<Point>| points.last().map_or(f64::NEG_INFINITY, |last| last.at);
        self.vcpus.iter().map(last).reduce(f64::min).filter(|end| end.is_finite())
    }

    /// Returns the writes per second of all vCPUs from `from` to `to`.
    pub fn speed(&self, from: f64, to: f64) -> f64 {
        (0..self.vcpus.len()).map(|vcpu| self.speed_of(vcpu, from, to)).sum()
    }

    /// Returns the writes per second of one vCPU. Between two points the speed is constant.
    pub fn speed_of(&self, vcpu: usize, from: f64, to: f64) -> f64 {
        let points = &self.vcpus[vcpu];
        (writes_at(points, to) - writes_at(points, from)) / (to - from)
    }

    /// Returns the speed in each whole window from `from` to `to`, in writes per second.
    pub fn windows(&self, from: f64, to: f64) -> Vec<f64> {
        let mut windows = Vec::new();
        let mut begin = from;
        while begin + WINDOW <= to + 1e-9 {
            windows.push(self.speed(begin, begin + WINDOW));
            begin += WINDOW;
        }
        windows
    }
}

fn writes_at(points: &[Point], at: f64) -> f64 {
    let next = points.partition_point(|point| point.at <= at);
    match (next.checked_sub(1).and_then(|index| points.get(index)), points.get(next)) {
        (Some(a), Some(b)) => a.writes + (b.writes - a.writes) * (at - a.at) / (b.at - a.at),
        (Some(only), None) | (None, Some(only)) => only.writes,
        (None, None) => 0.0,
    }
}

/// Recorder of a guest's reports, first from the source and then from the target.
///
/// A report carries the guest's own clock and is up to 10 ms old when it is read. To keep windows
/// of 100 ms exact, points keep the guest's time. The smallest difference to the reader's clock
/// that was ever seen converts between the two clocks.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Reports from the source, and from the target. The guest's clocks on the two sides may
    /// differ.
    phases: [Vec<Observation>; 2],
    moved: bool,
}

#[derive(Debug)]
struct Observation {
    /// Time on the reader's clock in seconds.
    at: f64,
    /// Clock of each vCPU in microseconds, and its writes.
    vcpus: Vec<(u64, u64)>,
}

impl Recorder {
    /// Adds a report that arrived at `at` seconds on the reader's clock.
    pub fn add(&mut self, at: f64, vcpus: Vec<(u64, u64)>) {
        self.phases[usize::from(self.moved)].push(Observation { at, vcpus });
    }

    /// Marks the move of the guest: later reports come from the target.
    pub fn moved(&mut self) {
        self.moved = true;
    }

    /// Returns the points, in seconds since `start` on the reader's clock.
    ///
    /// `resumed` is the time at which the guest ran on the target, in seconds since `start`. Writes
    /// before the target's first report count from `resumed`, not from the downtime.
    pub fn finish(self, start: f64, resumed: f64) -> Timeline {
        let mut timeline = Timeline::default();
        for (index, phase) in self.phases.iter().enumerate() {
            if index == 1 {
                timeline.hold_until(resumed);
            }
            let late = phase
                .iter()
                .flat_map(|observed| observed.vcpus.iter().map(|(t_us, _)| observed.at - seconds(*t_us)));
            let Some(offset) = late.reduce(f64::min) else { continue };
            for observed in phase {
                for (vcpu, (t_us, writes)) in observed.vcpus.iter().enumerate() {
                    let at = seconds(*t_us) + offset - start;
                    timeline.add(vcpu, Point { at, writes: to_f64(*writes) });
                }
            }
        }
        timeline
    }
}

fn seconds(us: u64) -> f64 {
    to_f64(us) / 1e6
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^53")]
pub(crate) fn to_f64(count: u64) -> f64 {
    count as f64
}

/// Returns the seconds in `windows` in which the guest was slower than 80 % of `before`.
pub fn drop_s(before: f64, windows: &[f64]) -> f64 {
    let dropped = windows.iter().filter(|speed| **speed < before * DROPPED).count();
    to_f64(dropped as u64) * WINDOW
}

/// Returns the milliseconds for 1 GiB of pages at the speed of the slowest window, or `None`
/// without windows.
///
/// A window without a write counts as one with a single write, because no slower speed can be
/// distinguished from a stop.
pub fn worst_ms_per_gb(windows: &[f64]) -> Option<f64> {
    let worst = windows.iter().copied().reduce(f64::min)?;
    Some(WRITES_OF_A_GB / worst.max(1.0 / WINDOW) * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(vcpu: usize, timeline: &mut Timeline, from: f64, to: f64, speed: f64) {
        let start = timeline.vcpus.get(vcpu).and_then(|points| points.last()).map_or(0.0, |last| last.writes);
        timeline.add(vcpu, Point { at: from, writes: start });
        timeline.add(vcpu, Point { at: to, writes: start + (to - from) * speed });
    }

    #[test]
    fn windows_add_up_all_vcpus() {
        let mut timeline = Timeline::default();
        steady(0, &mut timeline, -1.0, 0.05, 1000.0);
        steady(0, &mut timeline, 0.05, 1.0, 0.0);
        steady(1, &mut timeline, -1.0, 1.0, 10.0);
        let windows = timeline.windows(-0.1, 0.2);
        let want = [1010.0, 510.0, 10.0];
        assert_eq!(windows.len(), want.len(), "{windows:?}");
        assert!(windows.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{windows:?}");
        assert!((timeline.speed_of(1, 0.0, 0.5) - 10.0).abs() < 1e-9);
        assert_eq!((timeline.vcpus(), timeline.end()), (2, Some(1.0)));
        assert_eq!(Timeline::default().end(), None);
    }

    #[test]
    fn stall_lies_between_the_reports_around_it() {
        let mut timeline = Timeline::default();
        for (at, writes) in [(0.0, 0.0), (0.1, 100.0), (0.4, 100.0), (0.5, 200.0)] {
            timeline.add(0, Point { at, writes });
        }
        let windows = timeline.windows(0.0, 0.5);
        assert_eq!(
            windows.iter().map(|speed| speed.round()).collect::<Vec<_>>(),
            [1000.0, 0.0, 0.0, 0.0, 1000.0]
        );
        assert!((drop_s(1000.0, &windows) - 0.3).abs() < 1e-9);
    }

    #[test]
    fn old_copies_are_left_out() {
        let mut timeline = Timeline::default();
        for (at, writes) in [(0.0, 10.0), (-1.0, 5.0), (1.0, 9.0), (1.0, 20.0), (1.0, 30.0)] {
            timeline.add(0, Point { at, writes });
        }
        assert_eq!(timeline.vcpus[0].len(), 2, "{timeline:?}");
    }

    #[test]
    fn reports_are_placed_by_the_guests_clock_on_both_sides() {
        let mut recorder = Recorder::default();
        // The guest's clock is 95 s behind. One report was 10 ms old and another one 30 ms.
        recorder.add(100.01, vec![(5_000_000, 0)]);
        recorder.add(101.0, vec![(6_000_000, 1000)]);
        recorder.add(102.03, vec![(7_000_000, 2000)]);
        recorder.moved();
        // The target's clock differs.
        recorder.add(103.0, vec![(1_000_000, 2000)]);
        recorder.add(104.0, vec![(2_000_000, 3000)]);
        let timeline = recorder.finish(101.0, 1.9);
        let at: Vec<f64> = timeline.vcpus[0].iter().map(|point| (point.at * 10.0).round() / 10.0).collect();
        assert_eq!(at, [-1.0, 0.0, 1.0, 1.9, 2.0, 3.0]);
        assert!((timeline.speed(-1.0, 1.0) - 1000.0).abs() < 1e-6);
        assert!(timeline.speed(1.1, 1.8).abs() < 1e-9, "the guest was stopped");
    }

    #[test]
    fn drops_are_below_four_fifths() {
        assert!((drop_s(100.0, &[100.0, 80.0, 79.9, 0.0]) - 0.2).abs() < 1e-9);
        assert!(drop_s(0.0, &[0.0, 0.0]).abs() < 1e-9, "a guest that writes nothing cannot drop");
    }

    #[test]
    fn worst_window_gives_the_time_of_a_gigabyte() {
        assert_eq!(worst_ms_per_gb(&[500_000.0, 262_144.0]), Some(1000.0));
        assert_eq!(worst_ms_per_gb(&[0.0]), Some(26_214_400.0));
        assert_eq!(worst_ms_per_gb(&[]), None);
    }
}
