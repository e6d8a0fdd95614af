//! JSON document of a bench run.
//!
//! `{"bench": "scan", "host": {...}, "version": "...", "cases": [{"name": "...", "params": {...},
//! "metrics": {"..._us": 1.0}}], "summary": {...}}`. A case that could not run has `"skipped":
//! "why"` and no metrics. Numbers are decimal. The name of a metric ends with its unit, unless the
//! metric is a ratio.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::Host;
use crate::{Spread, to_f64};

/// Result of one run of one bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Name of the bench: `migrate`, `scan`, ...
    pub bench: String,
    /// Host of the run.
    pub host: Host,
    /// Version of vmferry.
    pub version: String,
    /// Measured cases, one for each compared program or method.
    pub cases: Vec<Case>,
    /// Conclusions of the bench, such as the ratios that it computes.
    pub summary: BTreeMap<String, Value>,
}

impl Document {
    /// Creates an empty document of the bench `name` on this host.
    pub fn new(name: &str, host: Host) -> Self {
        Document {
            bench: name.into(),
            host,
            version: env!("CARGO_PKG_VERSION").into(),
            cases: Vec::new(),
            summary: BTreeMap::new(),
        }
    }

    /// Returns the cases whose parameter `purpose` has the given value.
    pub fn with_purpose<'a>(&'a self, purpose: &str) -> impl Iterator<Item = &'a Case> + use<'a> {
        let purpose = Value::from(purpose);
        self.cases.iter().filter(move |case| case.params.get("purpose") == Some(&purpose))
    }

    /// Writes the document as JSON, and a line feed.
    ///
    /// # Errors
    /// Returns the error of `to`.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut to, self)?;
        writeln!(to)
    }

    /// Returns a line for each case that could not run.
    pub fn skipped_text(&self) -> String {
        let skipped = |case: &Case| Some(format!("skipped {}: {}\n", case.name, case.skipped.as_ref()?));
        self.cases.iter().filter_map(skipped).collect()
    }

    /// Returns a line for each failed run in the summary.
    pub fn failures_text(&self) -> String {
        let failures = self.summary.get("failures").and_then(Value::as_array).into_iter().flatten();
        failures.map(|failure| format!("FAILED {}\n", failure.as_str().unwrap_or_default())).collect()
    }
}

/// Case of a bench, which was measured or could not run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Case {
    /// Name of the case, unique in its document.
    pub name: String,
    /// Parameters that distinguish the case from others, such as sizes, programs and channels.
    pub params: BTreeMap<String, Value>,
    /// Measured values by name. All of them are finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Measurement over time, if the case has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<Series>,
    /// Histogram of single events over all rounds. The value of a key is the number of events that
    /// were shorter than the key in microseconds and not shorter than the previous key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hist_us: BTreeMap<u64, u64>,
    /// Reason why the case could not run, or `None` if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// Quantity over time, with one value for each step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Series {
    /// Name of the quantity, with its unit.
    pub what: String,
    /// Start of the first step, in seconds since the start of the measured operation.
    pub from_s: f64,
    /// Length of a step in seconds.
    pub step_s: f64,
    /// End of the measured operation, in seconds.
    pub end_s: f64,
    /// Value of each step, rounded to significant digits.
    pub values: Vec<u64>,
}

impl Case {
    /// Creates a case without metrics.
    pub fn new(name: impl Into<String>) -> Self {
        Case { name: name.into(), ..Case::default() }
    }

    /// Creates a case that could not run, with the reason.
    pub fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Case { name: name.into(), skipped: Some(why.into()), ..Case::default() }
    }

    /// Adds a parameter.
    #[must_use]
    pub fn param(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.params.insert(name.into(), value.into());
        self
    }

    /// Adds a metric. A value that is not finite, such as a ratio to zero, is omitted because JSON
    /// cannot express it.
    pub fn metric(&mut self, name: impl Into<String>, value: f64) {
        if value.is_finite() {
            self.metrics.insert(name.into(), value);
        }
    }

    /// Adds a metric that was measured in several rounds: the median under the name `name`, and the
    /// extremes under the names with `_min` and `_max` appended.
    ///
    /// If the number of these rounds is not the parameter `rounds` of the case, it is added under
    /// the name with `_rounds` appended.
    pub fn spread(&mut self, name: &str, spread: Option<Spread>) {
        if let Some(Spread { median, min, max, repeats }) = spread {
            self.metric(name, median);
            self.metric(format!("{name}_min"), min);
            self.metric(format!("{name}_max"), max);
            let repeats = repeats as u64;
            let rounds = self.params.get("rounds").and_then(Value::as_u64);
            if rounds.is_some_and(|rounds| rounds != repeats) {
                self.metric(format!("{name}_rounds"), to_f64(repeats));
            }
        }
    }

    /// Returns the median of metric `name` with `digits` digits, for display, or `-` if there is
    /// none.
    pub fn text(&self, name: &str, digits: usize) -> String {
        self.metrics.get(name).map_or("-".into(), |median| format!("{median:.digits$}"))
    }

    /// Returns the median of metric `name` for display, with its distance to the round that is
    /// farthest from it.
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
    fn document_has_the_documented_format_and_survives_a_round_trip() {
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

    #[test]
    fn number_of_rounds_is_a_metric_only_if_it_differs_from_that_of_the_case() {
        let mut case = Case::new("idle/ours").param("rounds", 2);
        case.spread("total_ms", Spread::of([1.0, 3.0]));
        case.spread("back_90_ms", Spread::of([5.0]));
        let metrics: Vec<(&str, f64)> =
            case.metrics.iter().map(|(name, value)| (&name[..], *value)).collect();
        assert_eq!(
            metrics,
            [
                ("back_90_ms", 5.0),
                ("back_90_ms_max", 5.0),
                ("back_90_ms_min", 5.0),
                ("back_90_ms_rounds", 1.0),
                ("total_ms", 2.0),
                ("total_ms_max", 3.0),
                ("total_ms_min", 1.0),
            ]
        );
    }
}
