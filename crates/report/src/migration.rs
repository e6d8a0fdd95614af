//! Data of a migration for a page, taken from its JSON document. Every value is checked, and values
//! that are missing in the document stay missing.

use serde_json::Value;
use std::collections::BTreeMap;

/// Maximum number of samples that are kept of a recording. If there are more, every second sample
/// is dropped.
const MOST_SAMPLES: usize = 2048;
/// Maximum number of figures in the list of all figures.
const MOST_FIGURES: usize = 20_000;
/// Maximum magnitude of a measurement.
const LARGEST: f64 = 1e18;

/// Result of one migration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Migration {
    /// Id with 32 hexadecimal digits, or empty if unknown.
    pub id: String,
    /// Outcome of the migration, or its last recorded state if its end was not recorded.
    pub state: String,
    /// Reason why the migration did not complete.
    pub error: Option<String>,
    /// Mode: `precopy`, `hybrid`, ...
    pub mode: String,
    /// Tracker: `log`, `ring`, `wp`.
    pub tracker: String,
    /// Kind of guest: `kvm` or `process`.
    pub kind: String,
    /// Passes in their order.
    pub passes: Vec<Pass>,
    /// Phases of the migration.
    pub phases: Vec<Phase>,
    /// Parts of the downtime, each with its name and its duration in ms.
    pub downtime: Vec<(&'static str, f64)>,
    /// Histogram of the faults. The value of a key is the number of faults that took less than the
    /// key in microseconds and not less than the previous key.
    pub hist_us: BTreeMap<u64, u64>,
    /// Speed of the guest: points of the time in ms since the start of the migration, and the
    /// writes per second.
    pub speed: Vec<(f64, f64)>,
    /// Samples during the migration.
    pub samples: Vec<Sample>,
    /// All figures of the document by their path, such as `bytes.wire`.
    pub figures: BTreeMap<String, f64>,
    /// All values of the document, each with its path and its text.
    pub everything: Vec<(String, String)>,
}

/// Pass over the dirty pages.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pass {
    /// Start of the pass, in ms since the start of the migration.
    pub start_ms: f64,
    /// Duration of the pass, in ms.
    pub ms: f64,
    /// Number of pages in the pass.
    pub pages: f64,
    /// Number of bytes that the pass sent.
    pub wire_bytes: f64,
    /// Number of pages that the guest had dirtied by the end of the pass.
    pub dirtied: f64,
}

/// Phase of a migration.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Name of the phase.
    pub name: String,
    /// Start of the phase, in ms since the start of the migration.
    pub start_ms: f64,
    /// Duration of the phase, in ms.
    pub ms: f64,
}

/// Sample of a running migration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// Time of the sample, in ms since the start of the migration.
    pub at_ms: f64,
    /// Number of bytes in pages that have not been sent yet.
    pub remaining: Option<f64>,
    /// Number of bytes per second that the guest dirties.
    pub dirty: Option<f64>,
    /// Number of bytes per second over the link since the previous sample.
    pub sent: Option<f64>,
    /// Number of bytes that have been sent so far.
    wire: f64,
    /// Number of writes that the guest has made so far.
    writes: Option<f64>,
}

/// Names of the parts of the downtime in a report, in their order.
pub const DOWNTIME_PARTS: [&str; 9] = [
    "pause_ms",
    "send_state_ms",
    "last_harvest_ms",
    "list_pages_ms",
    "last_pages_ms",
    "target_prepare_ms",
    "device_state_ms",
    "commit_ms",
    "resume_ms",
];

impl Migration {
    /// Returns the figure at the path `path`, such as `bytes.wire`.
    pub fn figure(&self, path: &str) -> Option<f64> {
        self.figures.get(path).copied()
    }

    /// Returns a text that describes the kind of the migration. It is equal for repeated migrations
    /// of the same kind.
    pub fn alike(&self) -> String {
        let parts = [self.kind.as_str(), &self.mode, &self.tracker];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
    }

    fn parse(value: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut migration = Self {
            id: text(&value["id"]),
            state: value["outcome"].as_str().or(value["state"].as_str()).unwrap_or_default().to_owned(),
            error: value["error"].as_str().map(str::to_owned),
            mode: text(&value["mode"]),
            tracker: text(&value["tracker"]),
            kind: text(&value["vm"]["kind"]),
            ..Self::default()
        };
        migration.flatten("", value, 0);
        let parts = DOWNTIME_PARTS.map(|name| Some((name, migration.figure(&format!("downtime.{name}"))?)));
        migration.downtime = parts.into_iter().flatten().collect();
        migration.passes = passes(value, migration.figure("setup_ms").unwrap_or(0.0));
        migration.phases = phases(value, &migration);
        let buckets = value["postcopy"]["hist_us"].as_object().into_iter().flatten();
        migration.hist_us =
            buckets.filter_map(|(bound, count)| Some((bound.parse().ok()?, count.as_u64()?))).collect();
        migration.speed = pairs(&value["guest"]["speed"]["points"]);
        migration
    }

    /// Lists all leaves. Long lists of numbers (points of a line) are shown as charts instead.
    fn flatten(&mut self, path: &str, value: &Value, depth: u32) {
        if self.everything.len() >= MOST_FIGURES || depth > 16 || path == "guest.speed.points" {
            return;
        }
        let inner = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        match value {
            Value::Object(fields) => {
                fields.iter().for_each(|(name, value)| self.flatten(&inner(name), value, depth + 1));
            }
            Value::Array(values) => {
                let values = values.iter().enumerate();
                values.for_each(|(index, value)| self.flatten(&format!("{path}[{index}]"), value, depth + 1));
            }
            Value::Null => {}
            Value::Number(number) => {
                if let Some(figure) = finite(value) {
                    self.figures.insert(path.to_owned(), figure);
                }
                self.everything.push((path.to_owned(), number.to_string()));
            }
            Value::String(text) => self.everything.push((path.to_owned(), text.clone())),
            Value::Bool(yes) => self.everything.push((path.to_owned(), yes.to_string())),
        }
    }

    /// Computes the guest's speed between samples, if the document has no speed.
    fn adopt(&mut self, samples: Vec<Sample>) {
        if self.speed.is_empty() {
            let between = samples.windows(2).filter_map(|pair| {
                let ms = pair[1].at_ms - pair[0].at_ms;
                let writes = pair[1].writes? - pair[0].writes?;
                (ms > 0.0 && writes >= 0.0)
                    .then_some((f64::midpoint(pair[0].at_ms, pair[1].at_ms), writes * 1e3 / ms))
            });
            self.speed = between.collect();
        }
        self.samples = samples;
    }
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|value| value.is_finite() && value.abs() <= LARGEST)
}

fn number(value: &Value) -> f64 {
    finite(value).unwrap_or(0.0)
}

/// Drops every second value.
fn thin<T>(values: &mut Vec<T>) {
    let mut odd = false;
    values.retain(|_| {
        odd = !odd;
        odd
    });
}

/// Returns the points of a line: finite, and ascending in x.
fn pairs(value: &Value) -> Vec<(f64, f64)> {
    let points = value.as_array().into_iter().flatten();
    let mut points: Vec<(f64, f64)> =
        points.filter_map(|point| Some((finite(&point[0])?, finite(&point[1])?))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    while points.len() > MOST_SAMPLES {
        thin(&mut points);
    }
    points
}

/// Returns the passes. Older documents do not have the start of a pass: it is then computed from
/// the end and the harvest of the previous one.
fn passes(value: &Value, setup_ms: f64) -> Vec<Pass> {
    let mut at = setup_ms;
    let pass = |value: &Value| {
        let pass = Pass {
            start_ms: finite(&value["start_ms"]).unwrap_or(at),
            ms: number(&value["ms"]),
            pages: number(&value["pages"]),
            wire_bytes: number(&value["wire_bytes"]),
            dirtied: number(&value["dirtied"]),
        };
        at = pass.start_ms + pass.ms + number(&value["harvest_ms"]);
        pass
    };
    value["passes"].as_array().into_iter().flatten().map(pass).collect()
}

/// Returns the phases. If an older document has no start times, they are computed from the
/// durations.
fn phases(value: &Value, migration: &Migration) -> Vec<Phase> {
    let given = value["phases"].as_array().into_iter().flatten().filter_map(|phase| {
        let name = phase["phase"].as_str()?.to_owned();
        Some(Phase { name, start_ms: finite(&phase["start_ms"])?, ms: finite(&phase["ms"])? })
    });
    let given: Vec<Phase> = given.collect();
    let figure = |name: &str| migration.figure(name).unwrap_or(0.0);
    let (total, setup) = (figure("total_ms"), figure("setup_ms"));
    if !given.is_empty() || total <= 0.0 {
        return given;
    }
    let (postcopy, verify) = (figure("postcopy.ms"), figure("verify_ms"));
    let stopped = figure("downtime_ms") + verify;
    let started = (total - postcopy).max(setup);
    let spans = [
        ("setup", 0.0, setup),
        ("precopy", setup, (started - stopped).max(setup)),
        ("switchover", (started - stopped).max(setup), started),
        ("postcopy", started, total),
    ];
    let spans = spans.into_iter().filter(|(_, from, to)| to > from);
    spans.map(|(name, from, to)| Phase { name: name.into(), start_ms: from, ms: to - from }).collect()
}

/// Combines the lines of a recording.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    samples: Vec<Sample>,
    /// Number of lines to skip after each line that is kept.
    skip: usize,
    skipped: usize,
    /// Newest document of a migration that has not ended.
    open: Option<Value>,
}

impl Recorder {
    /// Adds a document. Returns the migration if the document is its last one, or the reason why
    /// the document is not a migration's.
    pub(super) fn take(&mut self, value: &Value) -> Result<Option<Migration>, String> {
        let Some(state) = value.get("state") else {
            return Err("the JSON is neither a migration's nor a bench's".into());
        };
        if state.is_null() {
            return Err("the file is the status of a vmferry that has run no migration".into());
        }
        if !state.is_string() {
            return Err("the JSON is neither a migration's nor a bench's".into());
        }
        if value["outcome"].is_string() {
            return Ok(Some(self.end(value)));
        }
        if !value["progress"].is_object() && !value["total_ms"].is_number() {
            return Err("a state without an outcome and without progress is not a migration".into());
        }
        self.sample(value);
        self.open = Some(value.clone());
        Ok(None)
    }

    /// Returns the migration whose end was not recorded.
    pub(super) fn finish(mut self) -> Option<Migration> {
        let value = self.open.take()?;
        Some(self.end(&value))
    }

    fn end(&mut self, value: &Value) -> Migration {
        let mut migration = Migration::parse(value);
        migration.adopt(std::mem::take(&mut self.samples));
        *self = Self::default();
        migration
    }

    fn sample(&mut self, value: &Value) {
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        let progress = &value["progress"];
        // Older recordings have seconds and nanoseconds.
        let old = &progress["elapsed"];
        let mut sample = Sample {
            at_ms: finite(&progress["elapsed_ms"])
                .unwrap_or_else(|| number(&old["secs"]) * 1e3 + number(&old["nanos"]) / 1e6),
            remaining: finite(&progress["left_pages"]).or(finite(&progress["remaining_pages"])),
            dirty: finite(&progress["dirty_pages_per_s"]).map(|pages| pages * 4096.0),
            sent: None,
            wire: number(&progress["wire_bytes"]),
            writes: finite(&value["vm"]["guest"]["writes"]),
        };
        sample.remaining = sample.remaining.map(|pages| pages * 4096.0);
        if let Some(before) = self.samples.last() {
            let ms = sample.at_ms - before.at_ms;
            if ms <= 0.0 {
                return;
            }
            sample.sent = Some((sample.wire - before.wire).max(0.0) * 1e3 / ms);
        }
        self.samples.push(sample);
        if self.samples.len() >= MOST_SAMPLES {
            thin(&mut self.samples);
            self.skip = self.skip * 2 + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn document_without_phase_times_has_a_timeline() {
        let value = json!({
            "state": "completed", "outcome": "completed", "total_ms": 100.0, "downtime_ms": 10.0, "setup_ms": 5.0,
            "verify_ms": 2.0, "postcopy": {"ms": 30.0, "hist_us": {"64": 3, "x": 1, "128": -1}},
            "passes": [{"ms": 20.0, "harvest_ms": 1.0, "pages": 8}, {"ms": 4.0}],
        });
        let migration = Recorder::default().take(&value).unwrap().unwrap();
        let spans: Vec<_> = migration.phases.iter().map(|p| (p.name.as_str(), p.start_ms, p.ms)).collect();
        let want = [
            ("setup", 0.0, 5.0),
            ("precopy", 5.0, 53.0),
            ("switchover", 58.0, 12.0),
            ("postcopy", 70.0, 30.0),
        ];
        assert_eq!(spans, want);
        assert_eq!(migration.passes[1].start_ms, 26.0);
        assert_eq!(migration.hist_us, BTreeMap::from([(64, 3)]));
        assert_eq!(migration.figure("passes[0].pages"), Some(8.0));
    }

    #[test]
    fn recording_becomes_one_migration_with_bounded_samples() {
        let mut recorder = Recorder::default();
        let line = |n: u64| {
            json!({"state": "precopy", "outcome": null, "vm": {"guest": {"writes": n * 100}}, "progress": {
                "elapsed": {"secs": n / 10, "nanos": n % 10 * 100_000_000}, "remaining_pages": 10, "wire_bytes": n * 1000}})
        };
        for n in 0..10_000 {
            assert_eq!(recorder.take(&line(n)), Ok(None));
        }
        let migration = recorder.finish().unwrap();
        assert!((500..MOST_SAMPLES).contains(&migration.samples.len()), "{}", migration.samples.len());
        assert_eq!(migration.state, "precopy");
        let sample = &migration.samples[300];
        assert_eq!((sample.remaining, sample.sent.map(f64::round)), (Some(40960.0), Some(10_000.0)));
        assert!(migration.speed.iter().all(|(_, speed)| (speed - 1000.0).abs() < 1e-6));
    }

    #[test]
    fn absurd_numbers_are_not_drawn() {
        let value = json!({"state": "completed", "outcome": "completed", "total_ms": 1e300, "downtime_ms": -1e30,
            "guest": {"speed": {"points": [[0, 1e200], ["x"], [3], 7, [5, 2], [1, 1]]}}});
        let migration = Recorder::default().take(&value).unwrap().unwrap();
        assert!(migration.phases.is_empty() && migration.figures.is_empty());
        assert_eq!(migration.speed, [(1.0, 1.0), (5.0, 2.0)]);
        assert!(
            migration.everything.iter().any(|(path, value)| path == "total_ms" && value.starts_with("1e"))
        );
    }
}
