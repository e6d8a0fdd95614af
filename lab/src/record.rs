//! How one scenario ended.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// The file of records in a run's results, one JSON object a line: what was finished is there even if the machine dies.
pub const RECORDS: &str = "records.jsonl";
/// The file that names the scenario under way.
pub const CURRENT: &str = "current";
/// The file that holds the pace of the machine that runs the scenarios (see [`crate::pace`]), as a decimal number.
pub const PACE: &str = "pace";

/// How a scenario ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Everything that it checks held.
    Passed,
    /// Something did not.
    Failed,
    /// It cannot be tried here, for a reason that lies in the host and not in vmferry.
    Skipped,
    /// Each time it was tried, the emulator died: nothing is known of it, and so the run is not good.
    Emulator,
    /// It did not get its turn. The run is not complete, and so not good.
    NotRun,
}

impl Outcome {
    /// For people.
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

    /// Whether a run with this in it is good.
    #[must_use]
    pub fn is_good(self) -> bool {
        matches!(self, Self::Passed | Self::Skipped)
    }
}

/// What is known of one scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub scenario: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, if it did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Seconds that it took, by the clock of where it ran.
    pub seconds: f64,
    /// What was measured on the way, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: BTreeMap<String, serde_json::Value>,
}

impl Record {
    /// One without figures.
    #[must_use]
    pub fn new(scenario: &str, outcome: Outcome, why: Option<String>, seconds: f64) -> Self {
        Self { scenario: scenario.to_owned(), outcome, why, seconds, figures: BTreeMap::new() }
    }

    /// Adds it to the records in `results`.
    ///
    /// # Errors
    /// If they cannot be written.
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

/// The records in `results` so far. A last line that is only half there is left out.
///
/// # Errors
/// If a whole line is no record.
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
    fn what_was_appended_is_read_and_half_a_line_is_not() {
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
