//! Checks that a guest lost nothing during a move.

use crate::guest_report::GuestReport;
use crate::pace;
use crate::scenarios::vm::Seen;
use anyhow::{Result, ensure};
use std::time::Duration;

/// Reports of a guest before and after its move, both with all checks.
#[derive(Debug)]
pub(crate) struct Move<'a> {
    pub(crate) before: &'a Seen,
    pub(crate) after: &'a Seen,
    /// Downtime in milliseconds, as vmferry reports it.
    pub(crate) downtime_ms: f64,
    /// Largest allowed difference between the guest's clocks and the lab's.
    pub(crate) slack: Duration,
    /// Set if the guest's processors are those of an emulated machine.
    pub(crate) emulated: bool,
    /// Longest time without a processor on the reference machine, in addition to the downtime.
    pub(crate) stall: Duration,
}

impl Move<'_> {
    /// Checks all parts of the reports.
    pub(crate) fn judge(&self) -> Result<()> {
        let (before, after) = (&self.before.guest_report, &self.after.guest_report);
        content(after)?;
        ensure!(after.cpus == before.cpus, "it had {} processors and has {}", before.cpus, after.cpus);
        ensure!(after.ticks > before.ticks, "its clock thread has stopped");
        if before.stress_pages > 0 {
            ensure!(after.stress_writes > before.stress_writes, "it no longer writes to its memory");
        }
        self.time()?;
        let new: Vec<_> = after
            .complaints
            .iter()
            .filter(|line| !before.complaints.contains(line))
            .filter(|line| !(self.emulated && starved(line)))
            .collect();
        ensure!(new.is_empty(), "its kernel reports errors: {new:?}");
        Ok(())
    }

    /// Checks that the guest's clocks advanced by the time that passed outside, and that no gap or
    /// step is larger than allowed.
    fn time(&self) -> Result<()> {
        let (before, after) = (&self.before.guest_report, &self.after.guest_report);
        ensure!(after.backwards == 0, "its monotonic clock went back {} times", after.backwards);
        // For each report only the times of the request and of its arrival are known, because a
        // console may be slow.
        let least = self.after.requested.saturating_duration_since(self.before.read).as_secs_f64();
        let most = self.after.read.saturating_duration_since(self.before.requested).as_secs_f64();
        let slack = self.slack.as_secs_f64();
        for (clock, was, is) in
            [("uptime", before.uptime_s, after.uptime_s), ("real time", before.realtime_s, after.realtime_s)]
        {
            let own = is - was;
            ensure!(
                (least - slack..=most + slack).contains(&own),
                "its {clock} advanced by {own:.3} s while {least:.3} to {most:.3} s passed"
            );
        }
        let stalled = Duration::from_secs_f64((after.gap_ms - self.downtime_ms).max(0.0) / 1e3);
        ensure!(
            !pace::exceeds(stalled, self.stall),
            "it saw a gap of {:.0} ms with a downtime of {:.0} ms",
            after.gap_ms,
            self.downtime_ms
        );
        ensure!(after.step_ms < 50.0, "its clocks diverged by {:.1} ms", after.step_ms);
        Ok(())
    }
}

/// Returns whether a kernel message about clocks only means that the kernel lost its processor
/// between two reads of them.
///
/// Such a message shows how busy an emulated machine is, and no error of a clock. A clock that
/// really drifts has a skew, which is reported in other messages and visible from outside.
fn starved(complaint: &str) -> bool {
    complaint.contains("read-back delay")
        || complaint.contains("Marking TSC unstable due to clocksource watchdog")
}

/// Checks that all data that a guest keeps is unchanged.
pub(crate) fn content(guest_report: &GuestReport) -> Result<()> {
    ensure!(guest_report.whole, "the guest has not checked everything");
    ensure!(
        guest_report.stress_wrong == 0,
        "{} pages were not as they had been written",
        guest_report.stress_wrong
    );
    ensure!(guest_report.kept_good == Some(true), "the file in its tmpfs has changed");
    ensure!(guest_report.record_errors == 0, "{} writes to its disk failed", guest_report.record_errors);
    ensure!(
        guest_report.records_lost.unwrap_or(0) == 0,
        "{:?} of its flushed records are lost",
        guest_report.records_lost
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn guest_report(at: u32) -> GuestReport {
        GuestReport {
            uptime_s: f64::from(at),
            realtime_s: 1e9 + f64::from(at),
            ticks: at.into(),
            cpus: 2,
            whole: true,
            gap_ms: 20.0,
            stress_pages: 8,
            stress_writes: at.into(),
            kept_good: Some(true),
            ..GuestReport::default()
        }
    }

    fn judged(spoil: impl Fn(&mut GuestReport)) -> Result<()> {
        let start = Instant::now();
        let seen = |guest_report: GuestReport, from: f64| Seen {
            guest_report,
            requested: start + Duration::from_secs_f64(from),
            read: start + Duration::from_secs_f64(from + 0.25),
        };
        let (before, mut after) = (seen(guest_report(10), 0.0), seen(guest_report(15), 5.0));
        spoil(&mut after.guest_report);
        Move {
            before: &before,
            after: &after,
            downtime_ms: 100.0,
            slack: Duration::from_millis(500),
            stall: Duration::from_millis(500),
            emulated: true,
        }
        .judge()
    }

    type Spoil = fn(&mut GuestReport);

    #[test]
    fn successful_move_passes_and_each_loss_is_detected() {
        judged(|_| {}).unwrap();
        judged(|guest_report| {
            guest_report.complaints.push("kvm-clock read-back delay of 4268755ns, attempt 2".into())
        })
        .unwrap();
        let spoils: [(&str, Spoil); 12] = [
            ("processors", |guest_report| guest_report.cpus = 1),
            ("has stopped", |guest_report| guest_report.ticks = 10),
            ("no longer", |guest_report| guest_report.stress_writes = 10),
            ("written", |guest_report| guest_report.stress_wrong = 1),
            ("tmpfs", |guest_report| guest_report.kept_good = Some(false)),
            ("disk failed", |guest_report| guest_report.record_errors = 1),
            ("lost", |guest_report| guest_report.records_lost = Some(2)),
            ("went back", |guest_report| guest_report.backwards = 1),
            ("uptime", |guest_report| guest_report.uptime_s = 14.0),
            ("real time", |guest_report| guest_report.realtime_s += 0.8),
            ("gap", |guest_report| guest_report.gap_ms = 700_000.0),
            ("reports errors", |guest_report| guest_report.complaints.push("soft lockup".into())),
        ];
        for (what, spoil) in spoils {
            let error = judged(spoil).unwrap_err().to_string();
            assert!(error.contains(what), "{what}: {error}");
        }
    }
}
