//! Conversion of runs into prediction errors, and their summary.

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde_json::json;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::spec::CaseSpec;
use super::{CaseRuns, Run};

/// Function that returns a figure of one run, or `None` if the figure has no meaning for the run.
type Figure = fn(&Run) -> Option<f64>;

const FIGURES: &[(&str, Figure)] = &[
    ("predicted_total_ms", |r| r.total.map(|[_, expected, _]| expected)),
    ("total_ms", |r| r.converged.then_some(r.real_total)),
    ("error_total_pct", Run::error_total_pct),
    ("predicted_downtime_ms", |r| r.downtime.map(|[_, expected, _]| expected)),
    ("downtime_ms", |r| r.converged.then_some(r.real_downtime)),
    ("error_downtime_pct", Run::error_downtime_pct),
    ("error_downtime_ms", Run::error_downtime_ms),
    ("predicted_bytes", |r| r.bytes.filter(|_| r.total.is_some())),
    ("bytes", |r| r.converged.then_some(r.real_bytes)),
    ("probability_pct", |r| Some(r.probability * 100.0)),
    ("converged", |r| Some(f64::from(u8::from(r.converged)))),
    ("convergence_right", |r| Some(f64::from(u8::from(r.right())))),
    ("link_mbytes_per_s", |r| Some(r.link / 1e6)),
    ("passes", |r| Some(r.passes)),
    ("tracked_ms", |r| Some(r.tracked)),
    ("paused_ms", |r| Some(r.paused)),
];

impl Run {
    /// Returns whether the prediction of convergence was right. A probability of at least 0.5
    /// predicts convergence.
    pub(super) fn right(&self) -> bool {
        (self.probability >= 0.5) == self.converged
    }

    fn off(&self, said: Option<[f64; 3]>, real: f64) -> Option<f64> {
        let [_, expected, _] = said.filter(|_| self.converged && real > 0.0)?;
        Some((expected / real - 1.0).abs() * 100.0)
    }

    pub(super) fn error_total_pct(&self) -> Option<f64> {
        self.off(self.total, self.real_total)
    }

    pub(super) fn error_downtime_pct(&self) -> Option<f64> {
        self.off(self.downtime, self.real_downtime)
    }

    pub(super) fn error_downtime_ms(&self) -> Option<f64> {
        let [_, expected, _] = self.downtime.filter(|_| self.converged)?;
        Some((expected - self.real_downtime).abs())
    }

    fn within(&self, said: Option<[f64; 3]>, real: f64) -> Option<f64> {
        let [low, _, high] = said.filter(|_| self.converged)?;
        Some(f64::from(u8::from((low..=high).contains(&real))))
    }
}

/// Returns the case of a document with the figures of its runs.
pub(super) fn case(spec: &CaseSpec, runs: &CaseRuns) -> Case {
    let mut case = match &runs.skipped {
        Some(why) if runs.rounds.is_empty() => Case::skipped(&spec.name, why),
        _ => Case::new(&spec.name),
    }
    .param("guest", spec.guest)
    .param("memory_bytes", spec.memory)
    .param("workload", spec.workload())
    .param("mode", spec.mode)
    .param("link_bytes_per_s", spec.way.bytes_per_s())
    .param("dirty_ratio", spec.load.ratio)
    .param("borderline", spec.borderline())
    .param("downtime_limit_ms", spec.downtime_limit.as_secs_f64() * 1e3)
    .param("timeout_ms", spec.timeout.as_secs_f64() * 1e3)
    .param("rounds", runs.rounds.iter().flatten().count());
    for (name, figure) in FIGURES {
        case.spread(name, Spread::of(runs.rounds.iter().flatten().filter_map(figure)));
    }
    case
}

/// Adds the summary of the whole run.
pub(super) fn finish(document: &mut Document, all: &[(bool, CaseRuns)], failures: &[String]) {
    let runs: Vec<(bool, &Run)> =
        all.iter().flat_map(|(near, case)| case.rounds.iter().flatten().map(|run| (*near, run))).collect();
    let median =
        |figure: Figure| Spread::of(runs.iter().filter_map(|(_, run)| figure(run))).map(|s| s.median);
    let share = |values: &[f64]| {
        #[expect(clippy::cast_precision_loss, reason = "some dozens")]
        let count = values.len() as f64;
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / count * 100.0)
    };
    let flags = |figure: &dyn Fn(&Run) -> Option<f64>| -> Vec<f64> {
        runs.iter().filter_map(|(_, run)| figure(run)).collect()
    };
    let right = flags(&|run| Some(f64::from(u8::from(run.right()))));
    let near: Vec<f64> = runs.iter().map(|(near, _)| f64::from(u8::from(*near))).collect();
    // Either a small relative or a small absolute error meets the goal for the downtime.
    let met = flags(&|run| {
        let (percent, ms) = (run.error_downtime_pct()?, run.error_downtime_ms()?);
        Some(f64::from(u8::from(percent <= 15.0 || ms <= 5.0)))
    });
    let summary = [
        ("median_error_total_pct", median(Run::error_total_pct)),
        ("median_error_downtime_pct", median(Run::error_downtime_pct)),
        ("median_error_downtime_ms", median(Run::error_downtime_ms)),
        ("downtime_within_goal_pct", share(&met)),
        ("convergence_right_pct", share(&right)),
        ("borderline_share", share(&near).map(|percent| percent / 100.0)),
        ("total_in_interval_pct", share(&flags(&|run| run.within(run.total, run.real_total)))),
        ("downtime_in_interval_pct", share(&flags(&|run| run.within(run.downtime, run.real_downtime)))),
    ];
    for (name, value) in summary {
        document.summary.insert(name.into(), json!(value));
    }
    document.summary.insert("predictions".into(), runs.len().into());
    document.summary.insert("failures".into(), failures.into());
}

/// Returns the document as text for a terminal.
pub fn table(document: &Document) -> String {
    let columns = [
        ("predicted ms", "predicted_total_ms", 0),
        ("real ms", "total_ms", 0),
        ("error %", "error_total_pct", 1),
        ("predicted downtime ms", "predicted_downtime_ms", 1),
        ("real downtime ms", "downtime_ms", 1),
        ("error %", "error_downtime_pct", 0),
        ("probability %", "probability_pct", 0),
        ("converged", "converged", 0),
        ("link MB/s", "link_mbytes_per_s", 0),
        ("passes", "passes", 0),
    ];
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["case"].into_iter().chain(columns.iter().map(|(title, ..)| *title)));
    for case in &document.cases {
        if case.skipped.is_some() {
            table.add_row([case.name.as_str(), "skipped"]);
            continue;
        }
        let mut row = vec![Cell::new(&case.name)];
        for (_, name, digits) in columns {
            row.push(Cell::new(case.text(name, digits)).set_alignment(CellAlignment::Right));
        }
        table.add_row(row);
    }
    let mut text = String::new();
    text.extend(document.host.busy_text());
    text.push_str(&table.to_string());
    text.push('\n');
    for (name, value) in document.summary.iter().filter(|(_, value)| value.is_number()) {
        let value = value.as_f64().unwrap_or(f64::NAN);
        text.push_str(&format!("{name:28} {value:.2}\n"));
    }
    text.push_str(&document.skipped_text());
    text.push_str(&document.failures_text());
    text
}
