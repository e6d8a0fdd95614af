//! The JSON document of a bench run.
//!
//! `{"bench": "scan", "host": {...}, "version": "...", "cases": [{"name": "...", "params": {...},
//! "metrics": {"..._us": 1.0}}], "summary": {...}}`. A case that could not run has `"skipped": "why"` and no
//! metrics. Numbers are decimal; the unit is the end of a metric's name, and a ratio has none.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Spread;
use crate::host::Host;

/// One run of one bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Which bench: `migrate`, `scan`, ...
    pub bench: String,
    /// Where it ran.
    pub host: Host,
    /// vmferry's version.
    pub version: String,
    /// What was measured, a case for each side.
    pub cases: Vec<Case>,
    /// What follows from it: the ratios that the bench exists for.
    pub summary: BTreeMap<String, Value>,
}

impl Document {
    /// An empty document of the bench `name` on this host.
    pub fn new(name: &str, host: Host) -> Self {
        Document {
            bench: name.into(),
            host,
            version: env!("CARGO_PKG_VERSION").into(),
            cases: Vec::new(),
            summary: BTreeMap::new(),
        }
    }

    /// Returns the cases whose parameter `purpose` is this text.
    pub fn with_purpose<'a>(&'a self, purpose: &str) -> impl Iterator<Item = &'a Case> + use<'a> {
        let purpose = Value::from(purpose);
        self.cases.iter().filter(move |case| case.params.get("purpose") == Some(&purpose))
    }

    /// Writes the document and a line end.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut to, self)?;
        writeln!(to)
    }

    /// A line for each case that could not run.
    pub fn skipped_text(&self) -> String {
        let skipped = |case: &Case| Some(format!("skipped {}: {}\n", case.name, case.skipped.as_ref()?));
        self.cases.iter().filter_map(skipped).collect()
    }

    /// A line for each run that failed, as the summary has them.
    pub fn failures_text(&self) -> String {
        let failures = self.summary.get("failures").and_then(Value::as_array).into_iter().flatten();
        failures.map(|failure| format!("FAILED {}\n", failure.as_str().unwrap_or_default())).collect()
    }
}

/// One thing that was measured, or was not and why.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Case {
    /// Unique in its document.
    pub name: String,
    /// What distinguishes it: sizes, sides, channels.
    pub params: BTreeMap<String, Value>,
    /// What came out. Always finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// What was measured over time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<Series>,
    /// Times of single events: how many of them, of all rounds, were shorter than so many microseconds and not shorter than
    /// the bound before.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hist_us: BTreeMap<u64, u64>,
    /// Why it did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// A quantity over time: one value for each step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Series {
    /// What the values are, with their unit.
    pub what: String,
    /// When the first step begins, in seconds; 0 is when the thing that is measured begins.
    pub from_s: f64,
    /// Length of a step in seconds.
    pub step_s: f64,
    /// When the thing that is measured ended, in seconds.
    pub end_s: f64,
    /// One for each step, rounded to what can be told apart.
    pub values: Vec<u64>,
}

impl Case {
    /// A case that has no metrics yet.
    pub fn new(name: impl Into<String>) -> Self {
        Case { name: name.into(), ..Case::default() }
    }

    /// A case that could not run, and why.
    pub fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Case { name: name.into(), skipped: Some(why.into()), ..Case::default() }
    }

    /// Adds a parameter.
    #[must_use]
    pub fn param(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.params.insert(name.into(), value.into());
        self
    }

    /// Adds a metric. One that is not finite (a ratio to nothing) is left out: JSON has no word for it.
    pub fn metric(&mut self, name: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.metrics.insert(name.into(), value);
        }
    }

    /// Adds a metric of some rounds: the median under its name, the extremes under `_min` and `_max`.
    pub fn spread(&mut self, name: &str, spread: Option<Spread>) {
        if let Some(Spread { median, min, max, .. }) = spread {
            self.metric(name, median);
            self.metric(format!("{name}_min"), min);
            self.metric(format!("{name}_max"), max);
        }
    }

    /// The median of metric `name` with so many digits, for people; `-` if there is none.
    pub fn text(&self, name: &str, digits: usize) -> String {
        self.metrics.get(name).map_or("-".into(), |median| format!("{median:.digits$}"))
    }

    /// The same, and how far the farthest round lies from it.
    pub fn spread_text(&self, name: &str, digits: usize) -> String {
        let of = |suffix: &str| self.metrics.get(&format!("{name}{suffix}")).copied();
        let median = self.text(name, digits);
        match (of(""), of("_min"), of("_max")) {
            (Some(middle), Some(min), Some(max)) if min < max && middle > 0.0 => {
                format!("{median} ±{:.0}%", (max - middle).max(middle - min) / middle * 100.0)
            }
            _ => median,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_has_the_promised_shape_and_comes_back() {
        let mut document = Document::new("migrate", Host::default());
        let mut case = Case::new("idle/ours").param("channels", 2);
        case.metric("total_ms", 1.5);
        case.metric("of_floor", f64::NAN);
        document.cases.push(case);
        document.cases.push(Case::skipped("idle/qemu", "QEMU is not installed"));
        let mut bytes = Vec::new();
        document.write(&mut bytes).unwrap();

        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["bench"], "migrate");
        assert_eq!(value["cases"][0]["params"]["channels"], 2);
        assert_eq!(value["cases"][0]["metrics"], serde_json::json!({"total_ms": 1.5}));
        assert!(value["cases"][0].get("skipped").is_none());
        assert_eq!(value["cases"][1]["skipped"], "QEMU is not installed");
        assert!(value["cases"][1].get("metrics").is_none());
        assert_eq!(serde_json::from_slice::<Document>(&bytes).unwrap(), document);
    }
}
