//! Report of `vmferry-bench branch`: guests that continue from one instant of a running guest.

use crate::by_memory;
use crate::html::{Page, Share};
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::svg::Tone;
use crate::tables::{self, Column, GOALS, cells, head};

/// Goal for the memory of 32 children of a guest of 1 GiB that write 5 % of their memory: the
/// memory of the parent, and 6 % of it for each child.
pub const DENSITY_GOAL_GIB: f64 = 1.0 + 32.0 * 0.06;

/// Name of the group of cases with many children.
const DENSITY: &str = "density";

/// Name of the group of cases that start from a snapshot which is not in the page cache.
const COLD: &str = "cold";

/// Name of the group of cases that compare ways to share memory.
const FIRST_TOUCH: &str = "first-touch";

/// Columns of the table of ways to share memory.
const ACCESSES: &[Column] = &[("read us", "read_us", 2, true), ("write us", "write_us", 2, true)];

/// Columns of the table of one child.
const ONE: &[Column] = &[
    ("pause ms", "pause_ms", 2, true),
    ("child runs ms", "child_runs_ms", 1, true),
    ("total ms", "total_ms", 1, true),
    ("speed kept", "guest_speed_kept", 2, true),
];

/// Columns of the table of starts from a cold snapshot.
const FROM_COLD: &[Column] =
    &[("guest runs ms", "child_runs_ms", 1, true), ("working set used ms", "set_used_ms", 0, true)];

/// Columns of the table of many children.
const MANY: &[Column] = &[
    ("used GiB", "used_gib", 2, true),
    ("pause ms", "pause_ms", 2, true),
    ("all children run ms", "child_runs_ms", 1, true),
];

/// Returns the host and the conditions of the run.
fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(
        "Branch: the child shares the memory of the parent. File: the parent is written to a file, and the child is started from \
         it. Times are counted from the command. Pause: time for which the parent does not run. Total: until the command has ended. \
         Speed kept: writes of the parent in the second after the command, divided by those in the second before."
            .into(),
    );
    lines
}

/// Returns the group of a case.
fn group(case: &Case) -> &str {
    case.params.get("case").and_then(serde_json::Value::as_str).unwrap_or_default()
}

/// Returns the tables that have rows.
fn tables(document: &Document) -> Vec<TextTable> {
    let table = |title, columns: &[Column], own: fn(&str) -> bool| {
        let ran = document.cases.iter().filter(|case| own(group(case)) && !case.metrics.is_empty());
        TextTable { title, head: head(columns), rows: ran.map(|case| cells(case, columns)).collect() }
    };
    let mut all = vec![
        table("One child", ONE, |group| ![DENSITY, COLD, FIRST_TOUCH].contains(&group)),
        table("Many children", MANY, |group| group == DENSITY),
        table("First access to a shared page", ACCESSES, |group| group == FIRST_TOUCH),
        table("Start from a cold snapshot", FROM_COLD, |group| group == COLD),
        by_memory::growth(document, &[("KVM guest, branch", "")]),
        TextTable { title: "Goals", head: GOALS.into(), rows: tables::goals(document) },
    ];
    all.retain(|table| !table.rows.is_empty());
    all
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &tables(document))
}

/// Returns a page with the tables, charts of the times against the memory, and the memory of many
/// children.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench branch: branches of a running guest");
    by_memory::charts(&mut page, document);
    section(&mut page, document);
    page.finish()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    density(page, document);
    plain::section(page, document, &conditions(document), &tables(document));
}

/// Adds bars for the memory of a parent and its children, and for the goal.
fn density(page: &mut Page, document: &Document) {
    let used = |case: &Case| Some((case.name.clone(), *case.metrics.get("used_gib")?, Tone::Blue));
    let mut bars: Vec<_> =
        document.cases.iter().filter(|case| group(case) == DENSITY).filter_map(used).collect();
    if bars.is_empty() {
        return;
    }
    bars.push(("goal".into(), DENSITY_GOAL_GIB, Tone::Grey));
    let longest = bars.iter().map(|(_, gib, _)| *gib).fold(0.0, f64::max);
    let share = |(name, gib, tone): (String, f64, Tone)| Share {
        name,
        text: format!("{gib:.2} GiB"),
        from: 0.0,
        size: gib / longest,
        tone,
    };
    page.heading("Memory of a parent of 1 GiB and 32 children that write 5 % of it");
    page.shares(&bars.into_iter().map(share).collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    fn document() -> Document {
        let mut document = Document::new("branch", Host::default());
        for (mib, pause) in [(256_u64, 0.5), (4096, 0.75)] {
            let group = format!("memory-{mib}m");
            let mut case = Case::new(format!("{group}/kvm-branch"))
                .param("case", group)
                .param("side", "kvm-branch")
                .param("touched_bytes", mib << 20);
            case.metric("pause_ms", pause);
            case.metric("child_runs_ms", 20.5);
            document.cases.push(case);
        }
        let mut fleet = Case::new("density/kvm-branch").param("case", DENSITY).param("side", "kvm-branch");
        fleet.metric("used_gib", 1.46);
        document.cases.push(fleet);
        document.cases.push(Case::skipped("memory-16384m/kvm-branch", "needs more memory"));
        document
    }

    #[test]
    fn page_has_charts_and_the_memory_of_the_children_beside_the_goal() {
        let page = page(&document());
        assert_eq!(page.matches("<polyline").count(), 2, "{page}");
        for part in ["goal: 5 ms", "goal: 20 ms", ">4 GiB</text>", "<td>1.46 GiB</td>", "<td>2.92 GiB</td>"] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        // The bar of the children has half the length of that of the goal.
        assert!(page.contains("h50.00v10") && page.contains("h100.00v10"), "{page}");
    }

    #[test]
    fn tables_separate_one_child_from_many() {
        let tables = tables(&document());
        let rows: Vec<_> = tables.iter().map(|table| (table.title, table.rows.len())).collect();
        assert_eq!(rows, [("One child", 2), ("Many children", 1)]);
        assert!(table(&document()).contains("skipped memory-16384m/kvm-branch"));
    }
}
