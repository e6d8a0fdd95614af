//! Report of `vmferry-bench upgrade`: guests that continue in a new process of the same host.

use crate::by_memory;
use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::tables::{self, Column, GOALS, cells, head};
use serde_json::Value;

/// Columns of the table of single upgrades.
const ONE: &[Column] = &[
    ("downtime ms", "downtime_ms", 2, true),
    ("total ms", "total_ms", 1, true),
    ("ready ms", "ready_ms", 0, true),
];

/// Columns of the table of upgrades in a row, after the number of upgrades.
const ROW: &[Column] = &[
    ("longest downtime ms", "downtime_max_ms", 2, false),
    ("longest total ms", "total_max_ms", 1, false),
    ("KiB early", "rss_kib_early", 0, false),
    ("late", "rss_kib_late", 0, false),
    ("descriptors early", "descriptors_early", 0, false),
    ("late", "descriptors_late", 0, false),
    ("threads early", "threads_early", 0, false),
    ("late", "threads_late", 0, false),
];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(
        "A guest continues in a new process of the same program, which maps the same memory. QEMU: mode cpr-transfer. Ready: time \
         until the new process waits for the guest. In a row: one guest is upgraded many times. Early and late: resources of the \
         first and of the last new process."
            .into(),
    );
    lines
}

/// Returns the number of upgrades in a row, or `None` for a case with single upgrades.
fn in_a_row(case: &Case) -> Option<f64> {
    case.params.get("upgrades").and_then(Value::as_f64)
}

/// Returns the tables that have rows.
fn tables(document: &Document) -> Vec<TextTable> {
    let ran = || document.cases.iter().filter(|case| !case.metrics.is_empty());
    let row = |case: &Case| {
        let mut row = cells(case, ROW);
        row.insert(1, format!("{:.0}", in_a_row(case)?));
        Some(row)
    };
    let mut row_head = head(ROW);
    row_head.insert(1, "upgrades");
    let single = ran().filter(|case| in_a_row(case).is_none());
    let mut all = vec![
        TextTable {
            title: "Single upgrades",
            head: head(ONE),
            rows: single.map(|case| cells(case, ONE)).collect(),
        },
        TextTable { title: "Upgrades in a row", head: row_head, rows: ran().filter_map(row).collect() },
        TextTable { title: "Goals", head: GOALS.into(), rows: tables::goals(document) },
    ];
    all.retain(|table| !table.rows.is_empty());
    all
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &tables(document))
}

/// Returns a page with the tables, and charts of the times against the memory.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench upgrade: guests that continue in a new process");
    by_memory::charts(&mut page, document);
    section(&mut page, document);
    page.finish()
}

/// Adds the tables to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &tables(document));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    fn document() -> Document {
        let mut document = Document::new("upgrade", Host::default());
        for (group, side, downtime) in [
            ("256M", "ours", 2.25),
            ("256M", "qemu-cpr", 1.5),
            ("8192M", "ours", 2.5),
            ("8192M", "qemu-cpr", 12.0),
        ] {
            let mut case = Case::new(format!("{group}/{side}")).param("case", group).param("side", side);
            case.metric("downtime_ms", downtime);
            case.metric("total_ms", downtime * 4.0);
            document.cases.push(case);
        }
        let mut row = Case::new("row/kvm").param("memory", "64M").param("upgrades", 200);
        row.metric("downtime_max_ms", 6.375);
        row.metric("threads_late", 10.0);
        document.cases.push(row);
        document
    }

    #[test]
    fn page_has_downtime_and_total_against_the_memory_beside_qemu() {
        let page = page(&document());
        assert_eq!(page.matches("<polyline").count(), 4, "{page}");
        for part in
            ["goal: 2 ms", "goal: 10 ms", ">8 GiB</text>", "QEMU, cpr-transfer", "<td>8192M/qemu-cpr</td>"]
        {
            assert!(page.contains(part), "{part} is not in {page}");
        }
    }

    #[test]
    fn upgrades_in_a_row_have_their_own_table() {
        let tables = tables(&document());
        assert_eq!(tables[0].rows.len(), 4);
        assert_eq!(
            tables[1].rows,
            [["row/kvm", "200", "6.38", "-", "-", "-", "-", "-", "-", "10"].map(String::from)]
        );
        assert_eq!(tables[1].head.len(), tables[1].rows[0].len());
    }
}
