//! Report of `vmferry-bench snapshot`: snapshots of a running guest.

use crate::by_memory;
use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::tables::{self, Column, cells, head};

/// Columns of the table of snapshots.
const COLUMNS: &[Column] = &[
    ("pause ms", "pause_ms", 2, true),
    ("total ms", "total_ms", 0, true),
    ("speed kept", "guest_speed_kept", 2, true),
    ("longest stall ms", "stall_max_ms", 1, true),
    ("written MiB", "written_mib", 0, false),
    ("waits", "waits", 0, false),
];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(
        "Each program writes the same KVM guest to a file while the guest runs. The guest has touched three quarters of its \
         memory. Pause: reported by vmferry; for QEMU, the time between its events STOP and RESUME. Total: from the command \
         until the file is complete; with vmferry, this includes the sync of the file. Speed kept: writes per second during the \
         snapshot, divided by those before. Longest stall: of the guest during the snapshot, by its own clock. Waits: writes that \
         waited because the buffer for copied pages was full."
            .into(),
    );
    lines
}

/// Returns the tables that have rows.
fn tables(document: &Document) -> Vec<TextTable> {
    let ran = document.cases.iter().filter(|case: &&Case| !case.metrics.is_empty());
    let mut all = vec![
        TextTable {
            title: "Snapshots",
            head: head(COLUMNS),
            rows: ran.map(|case| cells(case, COLUMNS)).collect(),
        },
        by_memory::growth(document, &[("vmferry", ""), ("QEMU", "qemu_")]),
        TextTable { title: "Goals", head: tables::GOALS.into(), rows: tables::goals(document) },
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
    let mut page = Page::new("vmferry-bench snapshot: snapshots of a running guest");
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
    use crate::Spread;
    use crate::host::Host;

    fn document() -> Document {
        let mut document = Document::new("snapshot", Host::default());
        for (mib, program, pause) in
            [(256, "vmferry", 0.5), (256, "qemu", 1.5), (4096, "vmferry", 0.25), (4096, "qemu", 7.5)]
        {
            let mut case = Case::new(format!("{mib}M/{program}"))
                .param("memory_mib", mib)
                .param("program", program)
                .param("rounds", 2);
            case.spread("pause_ms", Spread::of([pause, pause * 1.5]));
            case.metric("stall_max_ms", 16.75);
            document.cases.push(case);
        }
        document.summary.insert("qemu_pause_slope_ms_per_gib".into(), 1.625.into());
        document.cases.push(Case::skipped("16384M/qemu", "needs more memory"));
        document
    }

    #[test]
    fn page_has_the_pause_against_the_memory() {
        let page = page(&document());
        assert_eq!(page.matches("<polyline").count(), 2, "{page}");
        for part in
            ["Pause, against the memory", ">4 GiB</text>", "<td>256M/qemu</td>", "16384M/qemu: needs more"]
        {
            assert!(page.contains(part), "{part} is not in {page}");
        }
    }

    #[test]
    fn table_has_all_sides_and_the_growth_of_the_pause() {
        let text = table(&document());
        for part in ["4096M/vmferry", "16.8", "±20%", "QEMU", "1.625", "skipped 16384M/qemu"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        // vmferry has no slope in this run.
        assert_eq!(text.matches("│ vmferry ").count(), 0, "{text}");
    }
}
