//! A guest and the processes that it is moved between, and what is looked at.

use crate::command::request::MigrateRequest;
use crate::command::sample::Sample;
use crate::command::side::{Folder, PATIENCE, Side, Start};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};
use vmferry_report::json::Case;

/// How much more memory a process may come to have than its guest has, whatever peers do.
pub(super) const MORE_KIB: u64 = 32 << 10;
/// Descriptors that a process may have open: 256 strangers who are silent, 32 who speak with two each, and what it needs itself.
pub(super) const MOST_DESCRIPTORS: u64 = 400;
/// Threads that it may have: those 32, and its own.
pub(super) const MOST_THREADS: u64 = 80;
/// A guest that is not in the way of what is tried keeps this share of its speed: the processes share a few cores.
pub(super) const SPEED_KEPT: f64 = 0.3;
/// What a guest does that is not in the way of what is tried.
pub(super) const LOAD: &str = "uniform,ws=16M,data=40M,rate=5k,fill=random";
/// How long a guest's speed is watched.
const WATCH: Duration = Duration::from_secs(1);

pub(super) struct Stand {
    pub(super) source: Side,
    pub(super) target: Side,
    pub(super) uri: String,
    /// What the source had before anything was tried.
    pub(super) before: Sample,
    /// What it had when it was last asked about a migration.
    last: Sample,
    guest: (&'static str, &'static str),
    targets: u32,
    pub(super) folder: Folder,
}

impl Stand {
    /// A guest of a kind with so much memory, at work, and a target that waits for it.
    pub(super) fn new(guest: &'static str, memory: &'static str, load: &str) -> Result<Self> {
        Self::with(guest, memory, load, &[])
    }

    /// The same; the source is told `more`.
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
        let uri = format!("tcp:{}", target.address()?);
        Ok((target, uri))
    }

    /// A target that waits, in the place of one that has ended.
    pub(super) fn another_target(&mut self) -> Result<()> {
        self.targets += 1;
        let name = format!("target-{}", self.targets);
        (self.target, self.uri) = Self::waiting(self.guest, &self.folder, &name)?;
        Ok(())
    }

    /// What is asked for, in general: an end that the guest cannot outrun.
    pub(super) fn request(uri: &str) -> MigrateRequest {
        MigrateRequest {
            timeout_ms: Some(20_000),
            on_timeout: "switch",
            peer_timeout_ms: 3000,
            ..MigrateRequest::to(uri)
        }
    }

    /// Asks for a migration.
    pub(super) fn ask(&mut self, request: &MigrateRequest) -> Result<()> {
        self.source.say("migrate", serde_json::to_value(request)?).map(drop)
    }

    /// How the migration has ended, if it has.
    pub(super) fn look(&mut self) -> Result<Option<Value>> {
        // Before it is asked: a source that has told of a guest that moved ends.
        let now = Sample::of(self.source.pid())?;
        let ended = self.source.status().filter(|status| !status["outcome"].is_null());
        self.last = now;
        Ok(ended)
    }

    /// Waits until it has ended; how.
    pub(super) fn ended(&mut self) -> Result<Value> {
        let mut report = None;
        until("the migration's end", || {
            report = self.look()?;
            Ok(report.is_some())
        })?;
        report.context("no report")
    }

    /// A whole migration that succeeds, with figures; the guest is looked at afterwards.
    pub(super) fn move_it(&mut self, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
        let began = Instant::now();
        self.ask(&Self::request(&self.uri))?;
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

    /// Looks at a guest that has moved, and at what both processes have.
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

/// The guest's writes a second now.
pub(super) fn speed(side: &mut Side) -> Result<f64> {
    let look = |side: &mut Side| -> Result<(f64, Instant)> {
        let status = side.status().context("no status")?;
        let writes = status["vm"]["guest"]["writes"].as_f64().context("no count of writes")?;
        Ok((writes, Instant::now()))
    };
    let (before, began) = look(side)?;
    std::thread::sleep(WATCH);
    let (after, ended) = look(side)?;
    Ok((after - before) / (ended - began).as_secs_f64())
}

/// The guest's speed while something was tried, beside that before.
pub(super) fn kept(case: &mut Case, wrong: &mut Vec<String>, before: f64, during: f64) {
    case.metric("writes_per_s_before", before);
    case.metric("writes_per_s_during", during);
    case.metric("speed_kept", during / before);
    if during < before * SPEED_KEPT {
        wrong.push(format!("the guest kept {:.2} of its speed, less than {SPEED_KEPT}", during / before));
    }
}

/// Notes what a process has at most beside its guest, and that it is not too much.
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
            wrong.push(format!("the {who} came to {what} {value}, more than {limit}"));
        }
    }
}

/// Keeps the largest under its name.
pub(super) fn most(case: &mut Case, name: &str, value: f64) {
    let had = case.metrics.get(name).copied().unwrap_or(value);
    case.metric(name, had.max(value));
}

/// Has `done` asked until it is so.
pub(super) fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
