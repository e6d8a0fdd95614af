//! Record of one scenario.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// File of records in a run's results, with one JSON object per line. Finished records exist even
/// if the machine ends early.
pub const RECORDS: &str = "records.jsonl";
/// File with the name of the running scenario.
pub const CURRENT: &str = "current";
/// File with the pace of the machine that runs the scenarios (see [`crate::pace`]), as a decimal
/// number.
pub const PACE: &str = "pace";

/// Outcome of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All checks succeeded.
    Passed,
    /// A check failed.
    Failed,
    /// The scenario cannot run, because of the host and not of vmferry.
    Skipped,
    /// Each attempt ended in an emulator failure. Nothing is known about the scenario, so the run
    /// is not successful.
    Emulator,
    /// The scenario was not started. The run is incomplete, so it is not successful.
    NotRun,
}

impl Outcome {
    /// Returns the outcome as text for output.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
            Self::Emulator => "EMULATOR",
            Self::NotRun => "NOT RUN",
        }
    }

    /// Returns whether a run with this outcome can be successful.
    #[must_use]
    pub fn is_good(self) -> bool {
        matches!(self, Self::Passed | Self::Skipped)
    }
}

/// Record of one scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the scenario.
    pub scenario: String,
    /// Outcome of the scenario.
    pub outcome: Outcome,
    /// Reason, if the scenario did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Duration in seconds, by the clock of the machine on which the scenario ran.
    pub seconds: f64,
    /// Measured figures, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: BTreeMap<String, serde_json::Value>,
}

impl Record {
    /// Creates a record without figures.
    #[must_use]
    pub fn new(scenario: &str, outcome: Outcome, why: Option<String>, seconds: f64) -> Self {
        Self { scenario: scenario.to_owned(), outcome, why, seconds, figures: BTreeMap::new() }
    }

    /// Appends the record to those in `results`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn append(&self, results: &Path) -> Result<()> {
        let path = results.join(RECORDS);
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::options().create(true).append(true).open(&path)?;
            file.write_all(&line)?;
            file.sync_data()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Reads the records in `results`. An incomplete last line is left out.
///
/// # Errors
///
/// Fails if a complete line is not a record.
pub fn read(results: &Path) -> Result<Vec<Record>> {
    let text = match std::fs::read_to_string(results.join(RECORDS)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {RECORDS}")),
    };
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("not a record: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_records_are_read_and_an_incomplete_line_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), []);
        let first = Record::new("a", Outcome::Passed, None, 1.5);
        let second = Record::new("b", Outcome::Failed, Some("no".into()), 2.0);
        first.append(folder.path()).unwrap();
        second.append(folder.path()).unwrap();
        let path = folder.path().join(RECORDS);
        let mut file = std::fs::File::options().append(true).open(path).unwrap();
        file.write_all(b"{\"scenario\":\"c\"").unwrap();
        assert_eq!(read(folder.path()).unwrap(), [first, second]);
        file.write_all(b"}\n").unwrap();
        assert!(read(folder.path()).is_err());
    }
}
