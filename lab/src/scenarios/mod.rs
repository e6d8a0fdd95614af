//! What is tried. Each scenario checks what it claims from inside the guest, and can fail.

mod bare;
mod linux;
mod rig;
mod vm;

use crate::plan::Plan;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// One thing to try.
#[derive(Debug)]
pub struct Scenario {
    /// What it is called.
    pub name: &'static str,
    /// What it shows, in one line.
    pub about: &'static str,
    /// Whether the short form has it.
    pub quick: bool,
    /// How many machines it needs.
    pub machines: u8,
    /// Longest time that it may take on the reference machine (see [`crate::pace`]).
    pub limit: Duration,
    /// Does it.
    pub run: fn(&mut Lab) -> Result<Verdict>,
}

/// How it went. That it failed is an error.
#[derive(Debug)]
pub enum Verdict {
    /// All that was checked held.
    Passed,
    /// It cannot be tried here, and why.
    Skipped(String),
}

/// Where a scenario works.
#[derive(Debug)]
pub struct Lab {
    /// What the host asked for.
    pub plan: Plan,
    /// For what the scenario has to show: logs, reports.
    pub folder: PathBuf,
    /// What it measured.
    pub figures: BTreeMap<String, serde_json::Value>,
}

impl Lab {
    pub(crate) fn new(plan: Plan, folder: PathBuf) -> Self {
        Self { plan, folder, figures: BTreeMap::new() }
    }

    /// Notes what was measured.
    pub(crate) fn figure(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.figures.insert(name.to_owned(), value.into());
    }
}

/// All of them, in the order in which they run: what others rest on first.
#[must_use]
pub fn all() -> Vec<&'static Scenario> {
    bare::SCENARIOS.iter().chain(linux::SCENARIOS).collect()
}

/// The one that is called `name`.
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
