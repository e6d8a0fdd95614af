//! Report of a bench with tables and without charts, for a terminal and for a page.

use crate::html::Page;
use crate::json::Document;
use crate::tables::{self, Column, GOALS, cells, grid, head};

/// Table as text.
#[derive(Debug)]
pub(crate) struct TextTable {
    pub(crate) title: &'static str,
    pub(crate) head: Vec<&'static str>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// Group of cases of a bench: name, title, columns.
pub(crate) type Group = (&'static str, &'static str, &'static [Column]);

/// Returns a table for each group that was measured, and the table of goals.
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

/// Returns the tables for a terminal.
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

/// Returns the tables as a page.
pub(crate) fn page(title: &str, document: &Document, conditions: &[String], tables: &[TextTable]) -> String {
    let mut page = Page::new(title);
    section(&mut page, document, conditions, tables);
    page.finish()
}

/// Adds the tables to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document, conditions: &[String], tables: &[TextTable]) {
    conditions.iter().for_each(|line| page.note(line));
    document.failures_text().lines().for_each(|line| page.paragraph(line));
    for table in tables {
        page.heading(table.title);
        page.table(&table.head, &table.rows);
    }
    document.skipped_text().lines().for_each(|line| page.note(line));
}

/// Adds the table of goals and results, for benches that keep both in `targets` of their summary.
pub(crate) fn targets(page: &mut Page, document: &Document) {
    let rows: Vec<Vec<String>> = tables::list(document, "targets").map(tables::goal_row).collect();
    if !rows.is_empty() {
        page.heading("Goals");
        page.table(&GOALS, &rows);
    }
}

/// Adds the cases that failed or did not run.
pub(crate) fn remarks(page: &mut Page, document: &Document) {
    document.failures_text().lines().for_each(|line| page.paragraph(line));
    document.skipped_text().lines().for_each(|line| page.note(line));
}
