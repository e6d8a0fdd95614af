//! Scenarios of the lab. Each one checks its claim from inside the guest, and can fail.

mod bare;
mod linux;
mod rig;
mod vm;

use crate::plan::Plan;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Scenario of the lab.
#[derive(Debug)]
pub struct Scenario {
    /// Name of the scenario.
    pub name: &'static str,
    /// Claim of the scenario in one line.
    pub about: &'static str,
    /// Set if `--quick` includes the scenario.
    pub quick: bool,
    /// Number of machines that the scenario needs.
    pub machines: u8,
    /// Longest duration on the reference machine (see [`crate::pace`]).
    pub limit: Duration,
    /// Function that runs the scenario.
    pub run: fn(&mut Lab) -> Result<Verdict>,
}

/// Result of a scenario that did not fail. A failure is an error.
#[derive(Debug)]
pub enum Verdict {
    /// All checks succeeded.
    Passed,
    /// The scenario cannot run on this host, with the reason.
    Skipped(String),
}

impl Verdict {
    /// Returns the verdict of a scenario that needs a disk where there is none.
    pub(crate) fn no_disk() -> Self {
        Self::Skipped("there is no disk, because mkfs.ext4 is not installed".into())
    }
}

/// Environment of a scenario.
#[derive(Debug)]
pub struct Lab {
    /// Plan of the run.
    pub plan: Plan,
    /// Folder for the scenario's logs and reports.
    pub folder: PathBuf,
    /// Measured figures, by name.
    pub figures: BTreeMap<String, serde_json::Value>,
}

impl Lab {
    pub(crate) fn new(plan: Plan, folder: PathBuf) -> Self {
        Self { plan, folder, figures: BTreeMap::new() }
    }

    /// Records a figure.
    pub(crate) fn figure(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }
}

/// Returns all scenarios in the order in which they run. Scenarios that others depend on come
/// first.
#[must_use]
pub fn all() -> Vec<&'static Scenario> {
    bare::SCENARIOS.iter().chain(linux::SCENARIOS).collect()
}

/// Returns the scenario `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scenario> {
    all().into_iter().find(|scenario| scenario.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_fit_for_folders() {
        let names: BTreeSet<_> = all().iter().map(|scenario| scenario.name).collect();
        assert_eq!(names.len(), all().len());
        for name in names {
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
                "{name}"
            );
        }
    }
}
