//! Report of `vmferry-bench migrate`: whole migrations, and the floor.

use crate::html::Page;
use crate::json::Document;
use crate::plain;
use crate::tables::{Column, cells, grid, head, host, verdict};
use comfy_table::{Table, presets};
use serde_json::Value;

/// Columns of the table of cases.
const COLUMNS: &[Column] = &[
    ("total ms", "total_ms", 0, true),
    ("downtime ms", "downtime_ms", 0, true),
    ("GB/s", "gbytes_per_s", 2, true),
    ("of floor", "of_floor", 2, true),
    ("guest kept", "guest_speed_kept", 2, true),
    ("CPU ms/GB", "cpu_ms_per_gb", 0, true),
    ("GB/core s", "gbytes_per_core_s", 2, true),
    ("stall ms", "guest_stall_max_ms", 0, true),
    ("to warm", "cold_to_warm", 2, true),
    ("to cold", "auto_to_cold", 2, true),
    ("wasted", "wasted", 3, true),
];

/// Explanation of the figures.
const NOTE: &str = "GB/s: guest data by total time. Of floor: compared\nwith a bare copy over as many streams. Stall: the longest \
                    of a vCPU. CPU: both processes without their vCPUs. To warm: \
                    compared with a target that has allocated its memory before. To cold: compared with a target that \
                    allocates each page when it is written. Wasted: guest memory that the target has and \
                    that did not arrive, by what arrived.";

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    let host = &document.host;
    let mut text = format!(
        "{} cores, {} GiB, Linux {}, {}, QEMU {}, TCP {}\n",
        host.cores,
        host.memory_bytes >> 30,
        host.kernel,
        host.kvm,
        host.qemu.as_deref().unwrap_or("not installed"),
        host.congestion_control
    );
    text.extend(host.busy_text());
    text.push_str(&sides_table(document).to_string());
    text.push_str(&format!("\nMedians, with the distance of the farthest round. {NOTE}\n"));
    text.push_str(&document.skipped_text());
    if let Some(targets) = targets_table(document) {
        text.push_str(&targets.to_string());
        text.push('\n');
    }
    text.push_str(&document.failures_text());
    text
}

fn sides_table(document: &Document) -> Table {
    grid(&head(COLUMNS), &rows(document))
}

fn rows(document: &Document) -> Vec<Vec<String>> {
    document.cases.iter().map(|case| cells(case, COLUMNS)).collect()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for line in host(document) {
        page.note(&line);
    }
    page.note(NOTE);
    page.table(&head(COLUMNS), &rows(document));
    plain::targets(page, document);
    plain::remarks(page, document);
}

/// Returns the table of targets, or `None` if no target could be compared.
fn targets_table(document: &Document) -> Option<Table> {
    let targets = document.summary.get("targets")?.as_array().filter(|targets| !targets.is_empty())?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["target", "want", "got", ""]);
    for target in targets {
        let text = |name: &str| target.get(name).and_then(Value::as_str).unwrap_or("-").to_owned();
        let got = target.get("got").and_then(Value::as_f64).unwrap_or(f64::NAN);
        table.add_row([text("name"), text("want"), format!("{got:.2}"), verdict(target)]);
    }
    Some(table)
}
