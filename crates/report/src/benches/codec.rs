//! Report of `vmferry-bench codec`: what the codecs of pages cost and save.

use crate::html::Page;
use crate::json::{Case, Document};
use crate::plain::{self, TextTable};
use crate::tables::{self, Column, GOALS, cells, head};

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
];

/// Explanation of the figures.
const NOTE: &str = "Ratio: bytes of the pages divided by the bytes that are sent for them. Speeds: bytes of pages by time, one \
                    thread. Copy: a copy of the same pages in the same round. Dense, sparse: shares of the pages. Deltas: hot, \
                    then cold pages of 128 MiB. Write: filling the same cold pages.";

fn conditions(document: &Document) -> Vec<String> {
    let mut lines = tables::host(document);
    lines.push(NOTE.into());
    lines
}

fn of_kinds(document: &Document) -> Vec<TextTable> {
    let of_kind = |(kind, title, columns): &(&str, &'static str, &[Column])| {
        let is_kind = |case: &&Case| case.params.get("kind").is_some_and(|own| own == kind);
        let ran = document.cases.iter().filter(is_kind).filter(|case| !case.metrics.is_empty());
        TextTable { title, head: head(columns), rows: ran.map(|case| cells(case, columns)).collect() }
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

/// Adds the document to a page as a section.
pub(crate) fn section(page: &mut Page, document: &Document) {
    plain::section(page, document, &conditions(document), &of_kinds(document));
}
