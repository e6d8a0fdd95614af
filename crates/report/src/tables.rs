//! Common parts of the tables of several benches, for a terminal and for a page.

use crate::json::{Case, Document};
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde_json::Value;

/// Column of a table of cases: title, metric, digits, whether the spread is shown.
pub(crate) type Column = (&'static str, &'static str, usize, bool);

/// Returns the title of the case column and the titles of `columns`.
pub(crate) fn head(columns: &[Column]) -> Vec<&'static str> {
    ["case"].into_iter().chain(columns.iter().map(|column| column.0)).collect()
}

/// Returns the text of each column of a case.
pub(crate) fn cells(case: &Case, columns: &[Column]) -> Vec<String> {
    let mut row = vec![case.name.clone()];
    if case.skipped.is_some() {
        row.push("skipped".into());
    } else {
        row.extend(columns.iter().map(|(_, name, digits, spread)| {
            if *spread { case.spread_text(name, *digits) } else { case.text(name, *digits) }
        }));
    }
    row
}

/// Returns the host of the run and an explanation of the figures.
pub(crate) fn host(document: &Document) -> Vec<String> {
    let host = &document.host;
    let rounds = document.summary.get("rounds").and_then(Value::as_f64).unwrap_or(0.0);
    // Some benches have no fixed number of rounds.
    let medians = match rounds {
        rounds if rounds > 0.0 => {
            format!(" Medians of {rounds} rounds; ± is the distance of the farthest round.")
        }
        _ => String::new(),
    };
    let mut lines = vec![format!(
        "{} cores, {} GiB, Linux {}, {}, QEMU {}.{medians}",
        host.cores,
        host.memory_bytes >> 30,
        host.kernel,
        host.kvm,
        host.qemu.as_deref().unwrap_or("not installed"),
    )];
    lines.extend(host.busy_text().map(|line| line.trim_end().to_owned()));
    lines
}

/// Returns the entries of a list in the summary.
pub(crate) fn list<'a>(document: &'a Document, name: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    document.summary.get(name).and_then(Value::as_array).into_iter().flatten()
}

/// Returns a text of the summary, or a dash.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or("-").to_owned()
}

/// Returns a number of the summary, or a dash.
pub(crate) fn number(value: &Value, digits: usize) -> String {
    value.as_f64().map_or("-".into(), |value| format!("{value:.digits$}"))
}

/// Titles of the columns of [`goals`].
pub(crate) const GOALS: [&str; 4] = ["goal", "want", "got", ""];

/// Returns a row for each goal in the summary.
pub(crate) fn goals(document: &Document) -> Vec<Vec<String>> {
    list(document, "goals").map(goal_row).collect()
}

/// Returns the cells of one goal.
pub(crate) fn goal_row(goal: &Value) -> Vec<String> {
    vec![text(&goal["name"]), text(&goal["want"]), number(&goal["got"], 3), verdict(goal)]
}

/// Returns the verdict on a goal: `met`, `missed`, or `inconclusive` with the spread of the rounds.
pub(crate) fn verdict(goal: &Value) -> String {
    if goal["met"] == true {
        "met".into()
    } else if goal["met"] == "inconclusive" {
        let spread = goal["spread"].as_f64();
        spread.map_or("inconclusive, no spread".into(), |spread| format!("inconclusive, spread {spread:.3}"))
    } else {
        "missed".into()
    }
}

/// Returns a table for a terminal.
pub(crate) fn grid(head: &[&str], rows: &[Vec<String>]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(head);
    for row in rows {
        table.add_row(row.iter().enumerate().map(|(column, text)| {
            let side = if column == 0 { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(side)
        }));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn goal_shows_its_figures_and_its_verdict() {
        let row = |met: Value, spread: Value| {
            goal_row(&json!({ "name": "a", "want": "<= 1", "got": 0.95, "spread": spread, "met": met }))
        };
        assert_eq!(row(json!(true), json!(0.01)), ["a", "<= 1", "0.950", "met"]);
        assert_eq!(row(json!(false), json!(0.01))[3], "missed");
        assert_eq!(
            row(json!("inconclusive"), json!(0.1)),
            ["a", "<= 1", "0.950", "inconclusive, spread 0.100"]
        );
        assert_eq!(row(json!("inconclusive"), Value::Null)[3], "inconclusive, no spread");
        // Documents of earlier versions have no spread.
        assert_eq!(goal_row(&json!({ "name": "a", "want": "<= 1", "got": 2.0, "met": false }))[3], "missed");
    }
}
