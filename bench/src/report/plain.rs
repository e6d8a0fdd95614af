//! The report of a bench that has tables and no charts, on a terminal and on a page.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde_json::Value;

use super::html::Page;
use super::tables::{self, Column, GOALS, cells, grid, head};
use crate::json::{Case, Document};
use crate::rounds::SideRuns;

/// Figures of one run by name, with the unit at its end.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// A table as text.
#[derive(Debug)]
pub(crate) struct TextTable {
    title: &'static str,
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// Some cases of a bench: which, what they are about, what is shown of them.
pub(crate) type Group = (&'static str, &'static str, &'static [Column]);

/// Adds the sides of a group to the document, as `group/side`.
pub(crate) fn add<S: Copy + Display, R>(
    document: &mut Document,
    (group, params): (&str, &[(&str, Value)]),
    sides: &[SideRuns<S, R>],
    figures: impl Fn(&R) -> Figures,
) {
    for runs in sides {
        let name = format!("{group}/{}", runs.side);
        let mut case = match &runs.skipped {
            Some(why) if runs.rounds.is_empty() => Case::skipped(name, why),
            _ => Case::new(name),
        };
        let measured: Vec<Figures> = runs.rounds.iter().flatten().map(&figures).collect();
        case = case.param("case", group).param("side", runs.side.to_string()).param("rounds", measured.len());
        for (name, value) in params {
            case = case.param(name, value.clone());
        }
        tables::add_spreads(&mut case, measured.iter());
        document.cases.push(case);
    }
}

/// A metric of `group/side`, its median.
pub(crate) fn metric(document: &Document, group: &str, side: impl Display, name: &str) -> Option<f64> {
    let case = format!("{group}/{side}");
    let case = document.cases.iter().find(|own| own.name == case)?;
    case.metrics.get(name).copied().filter(|value| value.is_finite())
}

/// A table for each group that was measured, and that of the goals.
pub(crate) fn of_groups(document: &Document, groups: &[Group]) -> Vec<TextTable> {
    let of_group = |(group, title, columns): &Group| {
        let ran =
            document.cases.iter().filter(|case| case.params.get("case").is_some_and(|own| own == group));
        let rows = ran.filter(|case| !case.metrics.is_empty()).map(|case| cells(case, columns)).collect();
        TextTable { title, head: head(columns), rows }
    };
    let mut all: Vec<TextTable> = groups.iter().map(of_group).collect();
    all.push(TextTable { title: "Goals", head: GOALS.into(), rows: tables::goals(document) });
    all.retain(|table| !table.rows.is_empty());
    all
}

/// For a terminal.
pub(crate) fn text(document: &Document, conditions: &[String], tables: &[TextTable]) -> String {
    let mut text = conditions.join("\n");
    text.push('\n');
    for TextTable { head, rows, .. } in tables {
        text.push_str(&format!("{}\n", grid(head, rows)));
    }
    text.push_str(&document.skipped_text());
    text.push_str(&document.failures_text());
    text
}

/// As a page.
pub(crate) fn page(title: &str, document: &Document, conditions: &[String], tables: &[TextTable]) -> String {
    let mut page = Page::new(title);
    section(&mut page, document, conditions, tables);
    page.finish()
}

/// The same as a part of a page.
pub(crate) fn section(page: &mut Page, document: &Document, conditions: &[String], tables: &[TextTable]) {
    conditions.iter().for_each(|line| page.note(line));
    document.failures_text().lines().for_each(|line| page.paragraph(line));
    for table in tables {
        page.heading(table.title);
        page.table(&table.head, &table.rows);
    }
    document.skipped_text().lines().for_each(|line| page.note(line));
}

/// What was aimed at and what came out, of benches that keep both in their summary's `targets`.
pub(crate) fn targets(page: &mut Page, document: &Document) {
    let rows: Vec<Vec<String>> = tables::list(document, "targets").map(tables::goal_row).collect();
    if !rows.is_empty() {
        page.heading("Goals");
        page.table(&GOALS, &rows);
    }
}

/// What failed and what did not run.
pub(crate) fn remarks(page: &mut Page, document: &Document) {
    document.failures_text().lines().for_each(|line| page.paragraph(line));
    document.skipped_text().lines().for_each(|line| page.note(line));
}

/// A goal for the summary.
pub(crate) fn goal(name: &str, want: String, got: f64, met: bool) -> Value {
    serde_json::json!({ "name": name, "want": want, "got": got, "met": met })
}

/// One that must not be exceeded, if it is known.
pub(crate) fn at_most(name: &str, most: f64, got: Option<f64>) -> Option<Value> {
    let got = got.filter(|got| got.is_finite())?;
    Some(goal(name, format!("<= {most:.3}"), got, got <= most))
}

/// One that must be reached, if it is known.
pub(crate) fn at_least(name: &str, least: f64, got: Option<f64>) -> Option<Value> {
    let got = got.filter(|got| got.is_finite())?;
    Some(goal(name, format!(">= {least}"), got, got >= least))
}
