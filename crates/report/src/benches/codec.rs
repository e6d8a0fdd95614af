//! Report of `vmferry-bench codec`: what the codecs of pages cost and save.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::ranges::{Range, Ranges};
use crate::svg::Tone;
use crate::tables::{self, Column, GOALS, cells, head};
use serde_json::Value;

/// Kinds of cases: kind, title, columns.
const KINDS: &[(&str, &str, &[Column])] = &[
    (
        "frames",
        "Frames of 32 pages",
        &[
            ("ratio", "ratio", 2, false),
            ("encode GB/s", "encode_gbytes_per_s", 3, true),
            ("decode GB/s", "decode_gbytes_per_s", 3, true),
            ("copy GB/s", "copy_gbytes_per_s", 1, true),
            ("encode / copy", "encode_to_copy", 3, false),
            ("encoder MiB", "encoder_mib", 2, false),
        ],
    ),
    (
        "classes",
        "Estimates of classes",
        &[
            ("GB/s", "class_gbytes_per_s", 1, true),
            ("/ copy", "class_to_copy", 2, false),
            ("dense", "dense_share", 4, false),
            ("sparse", "sparse_share", 4, false),
        ],
    ),
    (
        "deltas",
        "Deltas of a page",
        &[
            ("bytes", "delta_bytes", 1, false),
            ("encode GB/s", "encode_gbytes_per_s", 1, true),
            ("cold", "encode_cold_gbytes_per_s", 1, true),
            ("cold / copy", "encode_cold_to_copy", 2, false),
            ("decode GB/s", "decode_gbytes_per_s", 1, true),
            ("cold", "decode_cold_gbytes_per_s", 1, true),
            ("cold / write", "decode_cold_to_write", 2, true),
        ],
    ),
    (
        MOVES,
        "Moves: time and bytes",
        &[
            ("total ms", "total_ms", 0, true),
            ("/ raw", "total_to_raw", 2, false),
            ("/ QEMU", "total_to_best_qemu", 2, false),
            ("MB", "wire_mb", 1, false),
            ("/ data", "wire_to_data", 3, false),
        ],
    ),
    (
        MOVES,
        "Moves: processor time, downtime, and the guest",
        &[
            ("CPU ms", "cpu_ms", 0, false),
            ("ms / GB", "saved_cpu_ms_per_gb", 0, false),
            ("down ms", "downtime_ms", 1, false),
            ("kept", "guest_speed_kept", 2, false),
            ("passes", "passes", 0, false),
        ],
    ),
    (
        "return",
        "Moves to a target with a snapshot",
        &[
            ("total ms", "total_ms", 0, true),
            ("/ whole", "total_to_whole", 3, true),
            ("MB", "wire_mb", 1, false),
            ("/ whole", "wire_to_whole", 3, true),
            ("CPU ms", "cpu_ms", 0, false),
            ("known", "known_pages", 0, false),
        ],
    ),
];

/// Kind of the cases that are whole migrations. The names of these cases begin with it.
const MOVES: &str = "moves";

/// Charts of the moves over each link: metric, title, label of the axis.
const CHARTS: [(&str, &str, &str); 3] = [
    ("total_ms", "total time", "total time in ms"),
    ("wire_mb", "bytes sent", "10^6 bytes sent"),
    ("cpu_ms", "processor time", "processor time of both processes in ms, without the vCPUs"),
];

/// Explanation of the figures.
const NOTE: &str = "Ratio: bytes of the pages divided by the bytes that are sent for them. Speeds: bytes of pages by time, one \
                    thread. Copy: a copy of the same pages in the same round. Dense, sparse: shares of the pages. Deltas: hot, \
                    then cold pages of 128 MiB. Write: filling the same cold pages.";

/// Explanation of the figures of moves.
const MOVES_NOTE: &str = "/ raw and / QEMU compare the total time with vmferry's raw side, and with the fastest side of \
                          QEMU, in each round. / data: bytes sent by bytes of the guest's content. CPU: both processes without \
                          their vCPUs. ms / GB: processor time beyond that of the raw side of the same program, by 10^9 bytes \
                          that were sent less. Kept: share of its earlier speed that the guest had. A side whose raw pages do not \
                          converge ends after the limit of its case with a long downtime.";

fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(NOTE.into());
    if moves(document).next().is_some() {
        let rounds = document.summary.get("move_rounds").and_then(Value::as_u64).unwrap_or(0);
        lines.push(format!("Moves ran {rounds} rounds. {MOVES_NOTE}"));
    }
    lines
}

/// Returns the moves that were measured.
fn moves(document: &Document) -> impl Iterator<Item = &Case> {
    let is_move = |case: &&Case| case.params.get("kind").is_some_and(|kind| kind == MOVES);
    document.cases.iter().filter(is_move).filter(|case| !case.metrics.is_empty())
}

/// Returns the cells of a case. The name of a move is shown without the group.
fn row(case: &Case, columns: &[Column]) -> Vec<String> {
    let mut row = cells(case, columns);
    if let Some(name) = case.name.strip_prefix(MOVES).and_then(|name| name.strip_prefix('/')) {
        row[0] = name.into();
    }
    row
}

fn of_kinds(document: &Document) -> Vec<TextTable> {
    let of_kind = |(kind, title, columns): &(&str, &'static str, &[Column])| {
        let is_kind = |case: &&Case| case.params.get("kind").is_some_and(|own| own == kind);
        let ran = document.cases.iter().filter(is_kind).filter(|case| !case.metrics.is_empty());
        TextTable { title, head: head(columns), rows: ran.map(|case| row(case, columns)).collect() }
    };
    let mut all: Vec<TextTable> = KINDS.iter().map(of_kind).collect();
    all.push(TextTable { title: "Goals", head: GOALS.into(), rows: tables::goals(document) });
    all.retain(|table| !table.rows.is_empty());
    all
}

/// Returns the document as tables for a terminal.
pub fn table(document: &Document) -> String {
    plain::text(document, &conditions(document), &of_kinds(document))
}

/// Returns the document as a page with charts of the moves.
pub fn page(document: &Document) -> String {
    let mut page = Page::new("vmferry-bench codec: what the codecs of pages cost and save");
    section(&mut page, document);
    page.finish()
}

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    for chart in charts(document) {
        page.drawing(
            &chart.render(),
            "Diamonds are medians of the rounds, bars reach from the smallest to the largest.",
        );
    }
    plain::section(page, document, &conditions(document), &of_kinds(document));
}

/// Returns the charts of each link, with a row for each content, writer and side.
fn charts(document: &Document) -> Vec<Ranges> {
    let mut links: Vec<&str> = Vec::new();
    for link in moves(document).filter_map(|case| case.params.get("link")?.as_str()) {
        if !links.contains(&link) {
            links.push(link);
        }
    }
    let charts = links.into_iter().flat_map(|link| {
        CHARTS.map(|(metric, title, label)| Ranges {
            title: format!("{}: {title}", named(link)),
            x_label: label.into(),
            log: false,
            rows: moves(document).filter_map(|case| range(case, link, metric)).collect(),
        })
    });
    charts.filter(|chart| chart.rows.len() > 1).collect()
}

/// Returns the name of a link in titles.
fn named(link: &str) -> String {
    match link.split_once(|letter: char| !letter.is_ascii_digit()) {
        Some((rate, "bit")) if link.ends_with("gbit") => format!("Link of {rate} Gb/s"),
        Some((rate, "bit")) if link.ends_with("mbit") => format!("Link of {rate} Mb/s"),
        _ if link == "loopback" => "Loopback".into(),
        _ => format!("Link {link}"),
    }
}

/// Returns the row of a move in the charts of `link`, or `None` if the move has another link.
fn range(case: &Case, link: &str, metric: &str) -> Option<Range> {
    let text = |name: &str| case.params.get(name).and_then(Value::as_str);
    text("link").filter(|own| *own == link)?;
    let of = |suffix: &str| case.metrics.get(&format!("{metric}{suffix}")).copied();
    let middle = of("")?;
    let side = text("side")?;
    let writer = text("writer").filter(|writer| *writer != "none");
    let guest = [text("content")?].into_iter().chain(writer).collect::<Vec<_>>().join(", ");
    Some(Range {
        name: format!("{guest}/{side}"),
        tone: tone(side),
        middle,
        ends: (of("_min").unwrap_or(middle), of("_max").unwrap_or(middle)),
    })
}

fn tone(side: &str) -> Tone {
    match side {
        "ours-auto" => Tone::Blue,
        "ours-raw" => Tone::Grey,
        "qemu-raw" => Tone::Brown,
        side if side.starts_with("ours") => Tone::Green,
        _ => Tone::Purple,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A part of a recorded run, with a side that this host cannot run.
    fn recorded() -> Document {
        serde_json::from_str(include_str!("codec_recorded.json")).unwrap()
    }

    #[test]
    fn page_has_charts_of_time_bytes_and_processor_time_for_each_link() {
        let page = page(&recorded());
        for link in ["Link of 1 Gb/s", "Loopback"] {
            for (_, title, _) in CHARTS {
                assert_eq!(page.matches(&format!(">{link}: {title}</text>")).count(), 1, "{link} {title}");
            }
        }
        for row in ["text/ours-auto", "random, counter/qemu-xbzrle"] {
            assert!(page.contains(row), "{row} is not in {page}");
        }
    }

    #[test]
    fn tables_of_moves_fit_into_80_columns() {
        let text = table(&recorded());
        let rows: Vec<&str> =
            text.lines().filter(|line| line.contains("gbit") && line.starts_with('│')).collect();
        assert!(rows.len() > 6, "{text}");
        for line in rows {
            assert!(line.chars().count() <= 80, "{} columns:\n{text}", line.chars().count());
        }
        assert!(text.contains("skipped moves/"), "{text}");
    }

    #[test]
    fn document_without_moves_has_no_charts() {
        let mut document = recorded();
        document.cases.retain(|case| !case.name.starts_with(MOVES));
        assert!(charts(&document).is_empty() && !page(&document).contains("<svg"));
    }
}
