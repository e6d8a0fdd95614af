//! Reports of a guest while it moved, and the waits that follow from them.

use std::ops::Range;

use serde::Deserialize;
use vmferry_guest_abi::{CpuSnapshot, HIST_BUCKETS};

use crate::reaper::{self, Recorder};
use crate::result::MigrationResult;

/// First bucket whose stalls count as waits for a page: stalls of at least 32 us.
///
/// A fault that another process answers takes longer than that on every host. The floor is measured
/// in the same run. Shorter stalls are faults that the host answers itself: the first touch of a
/// page that is present already costs a guest 5 to 13 us, and after a postcopy that is every page.
/// They would hide the other ones in the mean.
pub(super) const WAIT_BUCKET: usize = 2;

/// Shortest wait in microseconds.
pub(super) const WAIT_MIN_US: u64 = 8 << WAIT_BUCKET;

/// Share of the downtime from which a stall counts as the downtime. The guest sees all of the
/// downtime, but QEMU's figure can be slightly larger.
const OF_DOWNTIME: f64 = 0.7;

/// Statistics of one vCPU since its start.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct Vcpu {
    /// Guest clock in microseconds.
    pub t_us: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of reports. Each report closes a window of 10 ms.
    pub reports: u64,
    /// Longest stall of each of the last windows in microseconds, oldest first.
    pub windows: Vec<u64>,
    /// Number of stalls by length. Bucket `i` counts those from `8 << i` microseconds to below
    /// twice that.
    pub hist: [u64; HIST_BUCKETS],
    /// Sum of the stalls in each bucket, in microseconds.
    pub hist_sum_us: [u64; HIST_BUCKETS],
}

impl From<&CpuSnapshot> for Vcpu {
    fn from(cpu: &CpuSnapshot) -> Self {
        Vcpu {
            t_us: cpu.t_us,
            writes: cpu.writes,
            reports: cpu.reports,
            windows: cpu.windows().collect(),
            hist: cpu.hist,
            hist_sum_us: cpu.hist_sum_us,
        }
    }
}

impl Vcpu {
    /// Returns the longest stall of each window that report number `from` or a later one closed,
    /// with the report's number.
    fn windows_since(&self, from: u64) -> impl Iterator<Item = (u64, u64)> {
        let oldest = self.reports.saturating_sub(self.windows.len() as u64);
        (oldest..self.reports).zip(self.windows.iter().copied()).filter(move |(report, _)| *report >= from)
    }
}

/// Statistics of all vCPUs at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// Seconds since the command to migrate. Negative before it.
    pub at: f64,
    /// Statistics of each vCPU.
    pub vcpus: Vec<Vcpu>,
}

/// Statistics of vmferry's target about its faults, from the read of the fault to the placement of
/// the page, by its own clock.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Own {
    /// Number of faults.
    pub faults: f64,
    /// Mean in microseconds.
    pub mean_us: f64,
    /// Median in microseconds.
    pub p50_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// Longest fault in microseconds.
    pub max_us: f64,
    /// Number of pages that arrived twice.
    pub duplicates: f64,
    /// Number of pages that were requested ahead of a run of faults.
    pub prefetched: f64,
}

/// One observed migration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    /// Reports of the guest on the source, before the command and after it until the guest stopped.
    pub source: Vec<Observation>,
    /// Reports of the guest on the target.
    pub target: Vec<Observation>,
    /// Time at which the guest ran on the target, in seconds since the command.
    pub switched: f64,
    /// Time at which the source knew the end of the migration, in seconds since the command.
    pub end: f64,
    /// Figures of the migrating program.
    pub result: MigrationResult,
    /// Fault statistics of vmferry's target.
    pub own: Option<Own>,
    /// Bytes of huge pages that the source had mapped before the command, and the target at the
    /// end. `None` if unknown.
    pub huge: [Option<u64>; 2],
}

/// Window of a vCPU, which is the time between two of its reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// Number of the report that closed the window.
    pub(crate) report: u64,
    /// Longest stall in microseconds.
    pub(crate) stall_us: u64,
    /// True if the target was the first to report the window.
    pub(crate) moved: bool,
}

/// Number and sum of stalls by length.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Waits {
    pub(crate) hist: [u64; HIST_BUCKETS],
    pub(crate) sum_us: [u64; HIST_BUCKETS],
    /// Longest stall of the known windows in microseconds. 0 if no window is known.
    pub(crate) max_us: u64,
}

impl Waits {
    /// Returns the stalls between the reports `before` and `after`.
    pub(crate) fn between(before: &Vcpu, after: &Vcpu) -> Self {
        let minus = |after: &[u64; HIST_BUCKETS], before: &[u64; HIST_BUCKETS]| {
            std::array::from_fn(|bucket| after[bucket].saturating_sub(before[bucket]))
        };
        Waits {
            hist: minus(&after.hist, &before.hist),
            sum_us: minus(&after.hist_sum_us, &before.hist_sum_us),
            max_us: 0,
        }
    }

    /// Removes one stall of `us` microseconds.
    pub(crate) fn remove(&mut self, us: u64) {
        let bucket = bucket(us);
        self.hist[bucket] = self.hist[bucket].saturating_sub(1);
        self.sum_us[bucket] = self.sum_us[bucket].saturating_sub(us);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for bucket in 0..HIST_BUCKETS {
            self.hist[bucket] += other.hist[bucket];
            self.sum_us[bucket] += other.sum_us[bucket];
        }
        self.max_us = self.max_us.max(other.max_us);
    }

    pub(super) fn count(&self) -> u64 {
        self.count_from(WAIT_BUCKET)
    }

    /// Returns the number of stalls of `8 << bucket` microseconds and more.
    pub(crate) fn count_from(&self, bucket: usize) -> u64 {
        self.hist[bucket..].iter().sum()
    }

    /// Returns the sum of the stalls of `8 << bucket` microseconds and more, in microseconds.
    pub(crate) fn sum_us_from(&self, bucket: usize) -> u64 {
        self.sum_us[bucket..].iter().sum()
    }

    /// Returns the longest stall in microseconds, or `None` without stalls.
    ///
    /// A window shows only its longest stall. A stall of a higher bucket than that of the known
    /// windows counts as the mean of its bucket. This mean is exact for a single stall, and too
    /// short for several ones.
    pub(crate) fn longest_us(&self) -> Option<f64> {
        let highest = self.hist.iter().rposition(|count| *count > 0)?;
        let mean = reaper::to_f64(self.sum_us[highest]) / reaper::to_f64(self.hist[highest]);
        Some(mean.max(reaper::to_f64(self.max_us)))
    }

    /// Returns the number of stalls that are too short to be waits.
    pub(super) fn short(&self) -> u64 {
        self.hist[..WAIT_BUCKET].iter().sum()
    }

    /// Returns the mean wait in microseconds, or `None` without waits.
    pub(super) fn mean_us(&self) -> Option<f64> {
        let (sum, count) = (self.sum_us_from(WAIT_BUCKET), self.count());
        (count > 0).then(|| reaper::to_f64(sum) / reaper::to_f64(count))
    }

    /// Returns the time in microseconds that `share` of the waits do not exceed, or `None` without
    /// waits.
    ///
    /// The result lies in the right bucket, which is a factor of two wide. Its place in the bucket
    /// follows from the mean of the bucket: the waits are assumed to lie as that power of their
    /// rank which has this mean.
    pub(crate) fn quantile_us(&self, share: f64) -> Option<f64> {
        let total = self.count();
        let mut left = reaper::to_f64(total) * share;
        for bucket in WAIT_BUCKET..HIST_BUCKETS {
            let count = reaper::to_f64(self.hist[bucket]);
            if count == 0.0 || left > count {
                left -= count;
                continue;
            }
            let low = reaper::to_f64(8 << bucket);
            let mean = reaper::to_f64(self.sum_us[bucket]) / count;
            // The last bucket has no upper bound except the longest wait.
            let last = bucket == HIST_BUCKETS - 1;
            let high = if last { reaper::to_f64(self.max_us).max(low * 2.0) } else { low * 2.0 };
            let place = ((mean - low) / (high - low)).clamp(0.05, 0.95);
            let power = (1.0 - place) / place;
            let found = low + (high - low) * (left / count).powf(power);
            return Some(if self.max_us > 0 { found.min(reaper::to_f64(self.max_us)) } else { found });
        }
        None
    }
}

/// Returns the bucket of a stall.
fn bucket(us: u64) -> usize {
    ((us / 8).max(1).ilog2() as usize).min(HIST_BUCKETS - 1)
}

/// Waits of a guest during and before a migration.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Waited {
    /// Waits from the command until the end, without the downtime.
    pub(super) during: Waits,
    /// Waits before the command, and the observed time in seconds.
    pub(super) before: (Waits, f64),
    /// Stall of each vCPU that was the downtime, in microseconds. `None` if it was not found.
    pub(super) downtime_us: Vec<Option<u64>>,
}

impl Run {
    /// Returns the waits of all vCPUs, or `None` with too few reports.
    pub(super) fn waited(&self) -> Option<Waited> {
        let command = self.source.iter().rfind(|observed| observed.at <= 0.0)?;
        let first = self.source.first()?;
        let end = self.target.iter().find(|observed| observed.at >= self.end).or(self.target.last())?;
        let mut waited = Waited { before: (Waits::default(), command.at - first.at), ..Waited::default() };
        for (vcpu, after) in end.vcpus.iter().enumerate() {
            let (before, first) = (command.vcpus.get(vcpu)?, first.vcpus.get(vcpu)?);
            waited.before.0.add(&Waits::between(first, before));
            let mut during = Waits::between(before, after);
            let (downtime, longest) = self.longest(vcpu, before.reports, after.reports);
            if let Some(us) = downtime {
                during.remove(us);
            }
            during.max_us = longest;
            waited.during.add(&during);
            waited.downtime_us.push(downtime);
        }
        Some(waited)
    }

    /// Returns the downtime as vCPU `vcpu` saw it, and its longest other stall, in the windows that
    /// the reports `from..to` closed.
    fn longest(&self, vcpu: usize, from: u64, to: u64) -> (Option<u64>, u64) {
        let least = self.result.downtime.as_secs_f64() * 1e6 * OF_DOWNTIME;
        let (mut downtime, mut longest) = (None, 0);
        for Window { moved, stall_us, .. } in self.windows(vcpu, from..to) {
            if moved && downtime.is_none() && reaper::to_f64(stall_us) >= least {
                downtime = Some(stall_us);
            } else {
                longest = longest.max(stall_us);
            }
        }
        (downtime, longest)
    }

    /// Returns the windows of vCPU `vcpu` that the `reports` closed, in order.
    ///
    /// Only reported windows are known: at each report, those of the last 160 ms.
    pub(crate) fn windows(&self, vcpu: usize, reports: Range<u64>) -> Vec<Window> {
        let (mut next, mut windows) = (reports.start, Vec::new());
        let sides =
            self.source.iter().map(|observed| (false, observed)).chain(self.target.iter().map(|h| (true, h)));
        for (moved, observed) in sides {
            let Some(vcpu) = observed.vcpus.get(vcpu) else { continue };
            for (report, stall_us) in vcpu.windows_since(next).filter(|(report, _)| *report < reports.end) {
                next = report + 1;
                windows.push(Window { report, stall_us, moved });
            }
        }
        windows
    }

    /// Returns the guest's writes over time.
    pub(crate) fn timeline(&self) -> reaper::Timeline {
        let mut recorder = Recorder::default();
        let written =
            |observed: &Observation| observed.vcpus.iter().map(|vcpu| (vcpu.t_us, vcpu.writes)).collect();
        self.source.iter().for_each(|observed| recorder.add(observed.at, written(observed)));
        recorder.moved();
        self.target.iter().for_each(|observed| recorder.add(observed.at, written(observed)));
        recorder.finish(0.0, self.switched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns a vCPU with these stalls, each in a separate window.
    fn vcpu(stalls: &[u64]) -> Vcpu {
        let mut vcpu = Vcpu { reports: stalls.len() as u64, ..Vcpu::default() };
        for us in stalls {
            vcpu.hist[bucket(*us)] += 1;
            vcpu.hist_sum_us[bucket(*us)] += us;
        }
        vcpu.windows = stalls[stalls.len().saturating_sub(16)..].to_vec();
        vcpu
    }

    fn observed(at: f64, stalls: &[u64]) -> Observation {
        Observation { at, vcpus: vec![vcpu(stalls)] }
    }

    fn run() -> Run {
        let stalls = [10, 40, 9, 5000, 100, 12, 300, 9000, 50];
        Run {
            source: vec![
                observed(-1.0, &stalls[..1]),
                observed(-0.1, &stalls[..2]),
                observed(0.1, &stalls[..3]),
            ],
            target: vec![
                observed(0.2, &stalls[..3]),
                observed(0.3, &stalls[..6]),
                observed(2.5, &stalls[..8]),
                observed(3.0, &stalls),
            ],
            switched: 0.15,
            end: 2.0,
            result: MigrationResult { downtime: Duration::from_millis(6), ..MigrationResult::default() },
            own: None,
            huge: [None; 2],
        }
    }

    #[test]
    fn downtime_is_the_first_stall_of_its_length_on_the_target() {
        let waited = run().waited().unwrap();
        assert_eq!(waited.downtime_us, [Some(5000)]);
        // 100, 300 and 9000 count. Stalls before the command, after the end, and short ones do not.
        assert_eq!((waited.during.count(), waited.during.short()), (3, 2));
        assert_eq!(waited.during.max_us, 9000);
        assert!((waited.during.mean_us().unwrap() - 9400.0 / 3.0).abs() < 1e-9);
        assert_eq!((waited.before.0.count(), waited.before.0.short()), (1, 0));
        assert!((waited.before.1 - 0.9).abs() < 1e-9);
    }

    #[test]
    fn unreported_downtime_is_not_guessed() {
        let mut run = run();
        run.result.downtime = Duration::from_secs(1);
        let waited = run.waited().unwrap();
        assert_eq!((waited.downtime_us, waited.during.count()), (vec![None], 4));
        assert_eq!(Run::default().waited(), None);
    }

    #[test]
    fn quantiles_lie_in_their_bucket_and_follow_its_mean() {
        let of = |stalls: &[u64]| Waits::between(&Vcpu::default(), &vcpu(stalls));
        let even = of(&[64, 80, 96, 112, 127]);
        let middle = even.quantile_us(0.5).unwrap();
        assert!((middle - 96.0).abs() < 3.0, "{middle}");
        let low = of(&[64, 65, 66, 67, 300]);
        assert!(low.quantile_us(0.5).unwrap() < 72.0);
        let high = low.quantile_us(0.99).unwrap();
        assert!((256.0..=512.0).contains(&high), "{high}");
        // No quantile exceeds the longest wait.
        let known = Waits { max_us: 300, ..low };
        assert_eq!(known.quantile_us(0.99), Some(high.min(300.0)));
        // Short stalls are not waits.
        assert_eq!(of(&[8, 31]).quantile_us(0.5), None);
        assert_eq!(of(&[8, 31]).mean_us(), None);
    }

    #[test]
    fn longest_stall_is_that_of_the_windows_or_the_mean_of_a_higher_bucket() {
        let mut waits = Waits { max_us: 300, ..Waits::between(&Vcpu::default(), &vcpu(&[20, 270, 300])) };
        assert_eq!(waits.longest_us(), Some(300.0));
        waits.add(&Waits::between(&Vcpu::default(), &vcpu(&[1100, 1900])));
        assert_eq!(waits.longest_us(), Some(1500.0));
        assert_eq!((waits.count_from(5), waits.sum_us_from(5)), (4, 3570));
        assert_eq!(Waits::default().longest_us(), None);
    }
}
