//! Test bench for one guest: its source, its target, and limits for what they may use.

use crate::command::request::MigrateRequest;
use crate::command::sample::Sample;
use crate::command::side::{Folder, PATIENCE, Side, Start};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};
use vmferry_report::json::Case;

/// KiB that the peak memory of a process may exceed the memory of a source at rest, whatever its
/// peers do.
pub(super) const MORE_KIB: u64 = 32 << 10;
/// Descriptors that a process may have open: 256 silent peers, 32 peers with two connections each,
/// and its own.
pub(super) const MOST_DESCRIPTORS: u64 = 400;
/// Threads that a process may have: one for each of the 32 speaking peers, and its own.
pub(super) const MOST_THREADS: u64 = 80;
/// Share of its speed that a guest must keep during a case. It is below 1 because the processes
/// share a few cores.
pub(super) const SPEED_KEPT: f64 = 0.3;
/// Workload that leaves enough of the host for the case.
pub(super) const LOAD: &str = "uniform,ws=16M,data=40M,rate=5k,fill=random";
/// Time over which a guest's speed is measured.
const WATCH: Duration = Duration::from_secs(1);

/// A guest with its source and its target.
pub(super) struct TestPair {
    pub(super) source: Side,
    pub(super) target: Side,
    pub(super) uri: String,
    /// Resources of the source before the case.
    pub(super) before: Sample,
    /// Resources of the source at the last call of `report`.
    last: Sample,
    guest: (&'static str, &'static str),
    targets: u32,
    pub(super) folder: Folder,
}

impl TestPair {
    /// Starts a guest of the kind `guest` with `memory`, waits until it works, and starts a waiting
    /// target.
    pub(super) fn new(guest: &'static str, memory: &'static str, load: &str) -> Result<Self> {
        Self::with(guest, memory, load, &[])
    }

    /// Does the same as `new`, and passes the arguments `more` to the source.
    pub(super) fn with(guest: &'static str, memory: &'static str, load: &str, more: &[&str]) -> Result<Self> {
        let folder = Folder::new()?;
        let args = [&["--workload", load][..], more].concat().into_iter().map(String::from).collect();
        let mut source = Side::start(Start { guest, memory, args, ..Start::default() }, &folder.0, "source")?;
        let (target, uri) = Self::waiting((guest, memory), &folder, "target-0")?;
        source.working()?;
        let before = Sample::of(source.pid())?;
        Ok(Self { source, target, uri, before, last: before, guest: (guest, memory), targets: 1, folder })
    }

    fn waiting(
        (guest, memory): (&'static str, &'static str),
        folder: &Folder,
        name: &str,
    ) -> Result<(Side, String)> {
        let args = ["--incoming", "tcp:127.0.0.1:0", "--peer-timeout", "3s"].map(String::from).to_vec();
        let mut target = Side::start(Start { guest, memory, args, ..Start::default() }, &folder.0, name)?;
        let uri = target.incoming()?;
        Ok((target, uri))
    }

    /// Starts a new waiting target in place of one that has ended.
    pub(super) fn another_target(&mut self) -> Result<()> {
        self.targets += 1;
        let name = format!("target-{}", self.targets);
        (self.target, self.uri) = Self::waiting(self.guest, &self.folder, &name)?;
        Ok(())
    }

    /// Returns a request whose timeout forces the switchover, so that the guest's writes cannot
    /// prevent it.
    pub(super) fn request(uri: &str) -> MigrateRequest {
        MigrateRequest {
            timeout_ms: Some(20_000),
            on_timeout: "switch",
            peer_timeout_ms: 3000,
            ..MigrateRequest::to(uri)
        }
    }

    /// Requests a migration.
    pub(super) fn start_migration(&mut self, request: &MigrateRequest) -> Result<()> {
        self.source.command("migrate", serde_json::to_value(request)?).map(drop)
    }

    /// Returns the report of the migration if it has ended.
    pub(super) fn report(&mut self) -> Result<Option<Value>> {
        // Sampled before the status is read, because a source exits after it has reported that its
        // guest moved.
        let now = Sample::of(self.source.pid())?;
        let ended = self.source.status().filter(|status| !status["outcome"].is_null());
        self.last = now;
        Ok(ended)
    }

    /// Waits for the end of the migration, and returns its report.
    pub(super) fn ended(&mut self) -> Result<Value> {
        let mut report = None;
        until("the migration's end", || {
            report = self.report()?;
            Ok(report.is_some())
        })?;
        report.context("no report")
    }

    /// Runs a migration that must succeed, records its figures, and checks the guest afterwards.
    pub(super) fn move_it(&mut self, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
        let began = Instant::now();
        self.start_migration(&Self::request(&self.uri))?;
        let report = self.ended()?;
        case.metric("move_ms", began.elapsed().as_secs_f64() * 1e3);
        ensure!(
            report["outcome"] == "completed",
            "the migration ended as {}: {}; the target: {}",
            report["outcome"],
            report["error"],
            self.target.said()
        );
        self.arrived(&report, case, wrong)
    }

    /// Checks a guest that has moved, and the resources of both processes.
    pub(super) fn arrived(&mut self, report: &Value, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
        for name in ["total_ms", "downtime_ms"] {
            most(case, name, report[name].as_f64().with_context(|| format!("no {name}"))?);
        }
        self.target.wait("all of the guest", |status| status["vm"]["place"] == "running")?;
        self.target.whole()?;
        bounded(case, wrong, "source", &self.last, self.before.rss_kib);
        bounded(case, wrong, "target", &Sample::of(self.target.pid())?, self.before.rss_kib);
        Ok(())
    }
}

/// Measures the guest's writes per second.
pub(super) fn speed(side: &mut Side) -> Result<f64> {
    let count = |side: &mut Side| -> Result<(f64, Instant)> {
        let status = side.status().context("no status")?;
        let writes = status["vm"]["guest"]["writes"].as_f64().context("no count of writes")?;
        Ok((writes, Instant::now()))
    };
    let (before, began) = count(side)?;
    std::thread::sleep(WATCH);
    let (after, ended) = count(side)?;
    Ok((after - before) / (ended - began).as_secs_f64())
}

/// Records the guest's speed before and during the case, and checks that the guest kept enough of
/// it.
pub(super) fn check_kept_speed(case: &mut Case, wrong: &mut Vec<String>, before: f64, during: f64) {
    case.metric("writes_per_s_before", before);
    case.metric("writes_per_s_during", during);
    case.metric("speed_kept", during / before);
    if during < before * SPEED_KEPT {
        wrong.push(format!("the guest kept {:.2} of its speed, less than {SPEED_KEPT}", during / before));
    }
}

/// Records the resources that a process uses beyond `guest_kib`, and checks them against the
/// limits.
pub(super) fn bounded(case: &mut Case, wrong: &mut Vec<String>, who: &str, now: &Sample, guest_kib: u64) {
    let more = now.peak_kib.saturating_sub(guest_kib);
    for (what, value, limit) in [
        ("more_kib", more, MORE_KIB),
        ("descriptors", now.descriptors, MOST_DESCRIPTORS),
        ("threads", now.threads, MOST_THREADS),
    ] {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        most(case, &format!("{who}_{what}"), value as f64);
        if value > limit {
            wrong.push(format!("the {who} reached {what} {value}, more than {limit}"));
        }
    }
}

/// Sets a metric of the case to the larger of its value and `value`.
pub(super) fn most(case: &mut Case, name: &str, value: f64) {
    let had = case.metrics.get(name).copied().unwrap_or(value);
    case.metric(name, had.max(value));
}

/// Calls `done` until it returns `true`.
///
/// # Errors
///
/// Fails if `done` fails or `PATIENCE` has passed.
pub(super) fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < deadline, "timed out while waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
