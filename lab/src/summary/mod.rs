//! Summary of a run: a table as text, JSON, and JUnit's XML for CI.

mod junit;

use crate::death::Death;
use crate::record::{Outcome, Record};
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;
use std::path::Path;

/// Results of a run.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Kind of KVM: `emulated` or `direct`.
    kvm: String,
    quick: bool,
    good: bool,
    seconds: f64,
    records: Vec<Record>,
    /// Emulator failures of the run. Each of their scenarios was tried again in a new machine.
    emulator_deaths: Vec<Death>,
}

impl Summary {
    /// Creates the summary of `records`, from a run that took `seconds`.
    #[must_use]
    pub fn new(
        records: Vec<Record>,
        emulator_deaths: Vec<Death>,
        seconds: f64,
        quick: bool,
        kvm: &str,
    ) -> Self {
        let good = records.iter().all(|record| record.outcome.is_good());
        Self { kvm: kvm.to_owned(), quick, good, seconds, records, emulator_deaths }
    }

    /// Returns whether no scenario failed and every one was started.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.good
    }

    /// Returns the summary as text.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["scenario", "outcome", "seconds", ""]);
        for record in &self.records {
            let note = record.why.clone().unwrap_or_else(|| figures(record));
            table.add_row([
                record.scenario.clone(),
                record.outcome.word().to_owned(),
                format!("{:.1}", record.seconds),
                note,
            ]);
        }
        let count = |outcome| self.records.iter().filter(|record| record.outcome == outcome).count();
        let deaths: String = self
            .emulator_deaths
            .iter()
            .map(|death| {
                let Death { scenario, proof, seconds, log } = death;
                format!("\nemulator failure in {scenario} after {seconds:.0} s: {proof} ({log})")
            })
            .collect();
        format!(
            "{table}\n{deaths}\n{} passed, {} failed, {} skipped, {} not run, {} given up; {} emulator failures; {:.0} s ({} KVM)",
            count(Outcome::Passed),
            count(Outcome::Failed),
            count(Outcome::Skipped),
            count(Outcome::NotRun),
            count(Outcome::Emulator),
            self.emulator_deaths.len(),
            self.seconds,
            self.kvm
        )
    }

    /// Writes `summary.txt`, `summary.json` and `junit.xml` into `folder`.
    ///
    /// # Errors
    ///
    /// Fails if one of the files cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let files = [
            ("summary.txt", self.table() + "\n"),
            ("summary.json", serde_json::to_string_pretty(self)? + "\n"),
            ("junit.xml", junit::xml(&self.records, self.seconds)),
        ];
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

fn figures(record: &Record) -> String {
    let figures: Vec<_> = record
        .figures
        .iter()
        .map(|(name, value)| match value.as_f64() {
            Some(number) if value.is_f64() => format!("{name} {number:.1}"),
            _ => format!("{name} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
        })
        .collect();
    figures.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_good_if_no_scenario_failed_and_all_were_started() {
        let with = |outcome| {
            Summary::new(vec![Record::new("x", outcome, None, 1.0)], Vec::new(), 1.0, true, "emulated")
        };
        assert!(with(Outcome::Passed).is_good());
        assert!(with(Outcome::Skipped).is_good());
        assert!(!with(Outcome::Failed).is_good());
        assert!(!with(Outcome::NotRun).is_good());
        assert!(!with(Outcome::Emulator).is_good());
    }

    #[test]
    fn table_has_the_reason_or_the_figures() {
        let mut passed = Record::new("one", Outcome::Passed, None, 1.0);
        passed.figures.insert("downtime_ms".into(), 12.34.into());
        let death =
            Death { scenario: "one".into(), proof: "BUG: x".into(), seconds: 9.4, log: "l.log".into() };
        let failed = Record::new("two", Outcome::Failed, Some("no guest".into()), 2.0);
        let table = Summary::new(vec![passed, failed], vec![death], 3.0, false, "direct").table();
        assert!(table.contains("downtime_ms 12.3") && table.contains("no guest"), "{table}");
        assert!(table.contains("emulator failure in one after 9 s: BUG: x (l.log)"), "{table}");
        let last =
            "1 passed, 1 failed, 0 skipped, 0 not run, 0 given up; 1 emulator failures; 3 s (direct KVM)";
        assert!(table.ends_with(last), "{table}");
    }
}
