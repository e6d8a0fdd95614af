//! Report of `vmferry-bench stalls`: stalls of a guest during precopy, outside the blackout.

use crate::html::Page;
use crate::json::Document;
use crate::plain::{self, TextTable};
use crate::tables::{self, Column, GOALS, cells, goals, head};
use serde_json::Value;

/// Tables: title, columns. A row with the longest name of a case fits into 80 columns.
const TABLES: [(&str, &[Column]); 3] = [
    (
        "Stalls during the migration, outside the blackout",
        &[
            ("longest ms", "stall_max_ms", 2, true),
            ("long", "long_stalls", 0, true),
            ("sum ms", "long_stall_sum_ms", 1, false),
            ("stalls", "stalls", 0, false),
            ("total ms", "total_ms", 0, true),
        ],
    ),
    (
        "The migration",
        &[
            ("down ms", "downtime_ms", 1, false),
            ("guest's", "guest_downtime_ms", 1, false),
            ("kept", "guest_speed_kept", 2, false),
            ("source CPU", "source_cpu_ms", 0, false),
            ("target CPU", "target_cpu_ms", 0, false),
        ],
    ),
    (
        "Stalls before and after",
        &[
            ("longest before", "before_stall_max_ms", 2, false),
            ("long/s", "before_long_stalls_per_s", 1, false),
            ("longest after", "after_stall_max_ms", 2, false),
            ("long", "after_long_stalls", 0, false),
        ],
    ),
];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let least = |name: &str| document.summary.get(name).and_then(Value::as_u64).unwrap_or(0);
    let mut lines = tables::host(document);
    lines.push(format!(
        "Stalls are measured by the guest, on all vCPUs, from the command until it reports from the target, without the blackout \
         of each vCPU. Stalls: of {} us and more. Long: of {} us and more; sum: of the long ones.",
        least("stall_min_us"),
        least("long_stall_min_us")
    ));
    lines.push(
        "Guest's: the blackout by the guest's clock. Kept: share of its earlier speed, with the blackout. CPU: ms of the process \
         without its vCPUs. Before: the guest without a migration. After: in 500 ms on the target, in which the source ends."
            .into(),
    );
    lines
}

/// Returns the tables that have rows.
fn tables(document: &Document) -> Vec<TextTable> {
    let of_cases = |(title, columns): (&'static str, &[Column])| {
        let ran = document.cases.iter().filter(|case| !case.metrics.is_empty());
        TextTable { title, head: head(columns), rows: ran.map(|case| cells(case, columns)).collect() }
    };
    let mut tables: Vec<TextTable> = TABLES.into_iter().map(of_cases).collect();
    tables.push(TextTable { title: "Goals", head: GOALS.into(), rows: goals(document) });
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &tables(document))
}

/// Returns the document as a page.
pub fn page(document: &Document) -> String {
    let title = "vmferry-bench stalls: stalls of a guest during precopy";
    plain::page(title, document, &conditions(document), &tables(document))
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &tables(document));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Spread;
    use crate::host::Host;
    use crate::json::Case;
    use serde_json::json;

    #[test]
    fn tables_fit_into_80_columns() {
        let mut document = Document::new("stalls", Host::default());
        let mut case = Case::new("2cpu/qemu-multifd-2").param("rounds", 2);
        for (_, columns) in TABLES {
            for (_, metric, digits, _) in columns {
                let value = if *digits == 0 { 8765.0 } else { 28.765 };
                case.spread(metric, Spread::of([value, value * 2.2]));
            }
        }
        document.cases.push(case);
        document.cases.push(Case::new("2cpu/ours-1"));
        let goal = json!({"name": "2cpu/ours-2 stall_max_to_qemu", "want": "<= 1", "got": 0.875,
            "spread": 0.5, "met": "inconclusive"});
        document.summary.insert("goals".into(), json!([goal]));
        let text = table(&document);
        let tables: Vec<&str> = text.lines().filter(|line| line.starts_with(['│', '┌', '╞', '└'])).collect();
        assert!(tables.len() > 12, "{text}");
        for line in tables {
            assert!(line.chars().count() <= 80, "{} columns:\n{text}", line.chars().count());
        }
        // A case without figures has no row.
        assert!(!text.contains("2cpu/ours-1"), "{text}");
    }
}
