//! State of one guest on the screen: its last status, and the history of some figures.

use super::source::What;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

/// Most points of a line: one minute at four points per second.
const MOST_POINTS: usize = 240;
/// Age from which an answer counts as stale.
const STALE: Duration = Duration::from_secs(2);
/// Points over which the rate of the link is computed.
const RATE_OVER: usize = 4;
const PAGE: f64 = 4096.0;

/// A guest on the screen.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    /// Name on the screen.
    pub(crate) name: String,
    status: Value,
    /// Time of the last status.
    seen: Option<Instant>,
    /// Reason why no status comes.
    gone: Option<String>,
    points: VecDeque<Point>,
    /// Pages written within each window in seconds, or the reason why the measurement failed.
    pub(crate) rate: Option<Result<Vec<(f64, f64)>, String>>,
    /// A measurement of the dirty rate runs.
    pub(crate) measuring: bool,
}

/// Figures of one status.
#[derive(Debug, Clone, Copy)]
struct Point {
    at: Instant,
    writes: f64,
    dirty: f64,
    wire: f64,
}

impl Guest {
    pub(crate) fn new(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Self { name, ..Self::default() }
    }

    pub(crate) fn measuring(&mut self) {
        self.measuring = true;
    }

    pub(crate) fn take(&mut self, now: Instant, what: What) {
        match what {
            What::Status(status) => {
                self.status = *status;
                (self.seen, self.gone) = (Some(now), None);
                let progress = &self.status["progress"];
                let number = |value: &Value| value.as_f64().filter(|value| value.is_finite()).unwrap_or(0.0);
                self.points.push_back(Point {
                    at: now,
                    writes: number(&self.status["vm"]["guest"]["writes_per_s"]),
                    dirty: number(&progress["dirty_pages_per_s"]) * PAGE,
                    wire: number(&progress["wire_bytes"]).max(number(&self.status["bytes"]["wire"])),
                });
                while self.points.len() > MOST_POINTS {
                    self.points.pop_front();
                }
            }
            What::Gone(why) => self.gone = Some(why),
            What::Rate(measured) => {
                self.measuring = false;
                self.rate = Some(measured.map(|value| windows(&value)));
            }
        }
    }

    /// Returns why the shown status is not current; `None` if it is.
    pub(crate) fn trouble(&self, now: Instant) -> Option<String> {
        let age = self.seen.map(|seen| now.saturating_duration_since(seen));
        match (&self.gone, age) {
            (Some(why), None) => Some(why.clone()),
            (Some(why), Some(age)) => Some(format!("gone for {} s: {why}", age.as_secs())),
            (None, None) => Some("connecting".into()),
            (None, Some(age)) if age > STALE => Some(format!("no answer for {} s", age.as_secs())),
            (None, Some(_)) => None,
        }
    }

    /// Returns the value at a path in the last status.
    pub(crate) fn at(&self, path: &[&str]) -> &Value {
        path.iter().fold(&self.status, |value, name| &value[*name])
    }

    pub(crate) fn number(&self, path: &[&str]) -> Option<f64> {
        self.at(path).as_f64().filter(|value| value.is_finite())
    }

    pub(crate) fn text(&self, path: &[&str]) -> &str {
        self.at(path).as_str().unwrap_or("-")
    }

    /// Returns the state of the migration; `-` if there is none.
    pub(crate) fn state(&self) -> &str {
        self.text(&["state"])
    }

    /// Returns the memory of the guest and its memory without a balloon, in bytes; `None` without a
    /// balloon.
    pub(crate) fn memory(&self) -> Option<(f64, f64)> {
        Some((self.number(&["vm", "balloon", "actual"])?, self.number(&["vm", "balloon", "memory"])?))
    }

    /// Returns the bytes that are still to be sent.
    pub(crate) fn left(&self) -> Option<f64> {
        let own = self
            .number(&["progress", "left_pages"])
            .or_else(|| self.number(&["progress", "remaining_pages"]));
        own.or_else(|| self.number(&["left"])).map(|pages| pages * PAGE)
    }

    pub(crate) fn writes(&self) -> Option<f64> {
        self.number(&["vm", "guest", "writes_per_s"])
    }

    pub(crate) fn dirty(&self) -> Option<f64> {
        self.number(&["progress", "dirty_pages_per_s"]).map(|pages| pages * PAGE)
    }

    /// Returns the recent rate of the link in bytes per second.
    pub(crate) fn sent(&self) -> Option<f64> {
        self.sent_at(self.points.len().checked_sub(1)?)
    }

    fn sent_at(&self, index: usize) -> Option<f64> {
        let (now, before) = (self.points.get(index)?, self.points.get(index.saturating_sub(RATE_OVER))?);
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
        (seconds > 0.0 && now.wire >= before.wire).then(|| (now.wire - before.wire) / seconds)
    }

    /// Returns the number of faults by their upper bound in microseconds, of a target in postcopy
    /// or of a migration that has ended.
    pub(crate) fn faults(&self) -> BTreeMap<u64, u64> {
        let buckets = self.at(&["postcopy", "hist_us"]).as_object().into_iter().flatten();
        buckets.filter_map(|(bound, count)| Some((bound.parse().ok()?, count.as_u64()?))).collect()
    }

    /// Returns for each vCPU's ring the entries in use, the size, and how often the ring was full.
    pub(crate) fn rings(&self) -> Vec<(u64, u64, u64)> {
        let rings = self.at(&["vm", "rings"]);
        let entries = rings["entries"].as_u64().unwrap_or(0);
        let used = rings["used"].as_array().into_iter().flatten().enumerate();
        let ring = |(index, used): (usize, &Value)| {
            let full = rings["vcpus"][index]["full_exits"].as_u64().unwrap_or(0);
            Some((used.as_u64()?, entries.max(1), full))
        };
        used.filter_map(ring).collect()
    }

    /// Returns the error of the reaper, or `None` if the reaper has not failed.
    pub(crate) fn reaper_error(&self) -> Option<&str> {
        self.at(&["vm", "rings", "reaper", "error"]).as_str()
    }

    /// Returns the points of a line, with x in seconds before now.
    pub(crate) fn line(&self, now: Instant, which: Line) -> Vec<(f64, f64)> {
        let x = |at: Instant| -now.saturating_duration_since(at).as_secs_f64();
        let points = self.points.iter().enumerate();
        let value = |index: usize, point: &Point| match which {
            Line::Writes => Some(point.writes),
            Line::Dirty => Some(point.dirty),
            Line::Sent => self.sent_at(index),
        };
        points.filter_map(|(index, point)| Some((x(point.at), value(index, point)?))).collect()
    }
}

/// Figure that a line shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Line {
    /// Writes per second that the guest counts.
    Writes,
    /// Bytes per second that the guest dirties.
    Dirty,
    /// Bytes per second over the link.
    Sent,
}

/// Returns the windows of a measured rate: seconds and pages.
fn windows(value: &Value) -> Vec<(f64, f64)> {
    let windows = value["windows"].as_array().into_iter().flatten();
    windows
        .filter_map(|window| Some((window["window_ms"].as_f64()? / 1e3, window["pages"].as_f64()?)))
        .collect()
}
