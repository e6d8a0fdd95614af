//! Tests with pages of real and of hostile results.

use super::*;
use crate::input;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn found(value: &Value) -> Found {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    std::fs::write(&path, value.to_string()).unwrap();
    input::read(&path).unwrap().remove(0)
}

fn migration(id: &str, text: &str) -> Value {
    json!({
        "id": id, "state": "completed", "outcome": "completed", "mode": "hybrid", "tracker": "wp", "error": null,
        "total_ms": 602.25, "downtime_ms": 10.5, "setup_ms": 8.5, "throughput_mbps": 2112.75,
        "downtime": {"pause_ms": 0.25, "last_harvest_ms": 0.125, "last_pages_ms": 1.375, "device_state_ms": 0.0625,
            "commit_ms": 8.3125, "resume_ms": 0.03125},
        "bytes": {"wire": 154_328_904, "raw_pages": 37588}, "cpu_ms": {"source": 64.5},
        "passes": [{"pass": 0, "start_ms": 8.5, "ms": 525.5, "pages": 32768, "wire_bytes": 101_072_440, "dirtied": 11887}],
        "phases": [{"phase": "setup", "start_ms": 0.0, "ms": 8.5}, {"phase": "precopy", "start_ms": 8.5, "ms": 580.0},
            {"phase": "switchover", "start_ms": 588.5, "ms": 13.75}],
        "postcopy": {"faults": 77, "p99_us": 812.5, "hist_us": {"64": 12, "256": 65}},
        "guest": {"before_writes_per_s": 73615.5, "during_writes_per_s": 30079.25, "stall_max_us": 32117,
            "speed": {"points": [[-500.0, 73000.0], [-10.0, 73500.0], [300.0, 30000.0], [650.0, 73000.0]]}},
        "plan": {"predicted": {"total_ms": {"low": 500.5, "expected": 700.0, "high": 901.5}, "converges": true}},
        "course": [{"at_ms": 55.5, "what": "postcopy", "why": "it does not converge"}],
        "vm": {"kind": "process", "guest": {"state": text}},
    })
}

/// Checks that every element is closed, in order, and that attributes are quoted. Covers the part
/// of XML that maud and this crate's SVG use.
fn well_formed(page: &str) {
    const VOID: [&str; 2] = ["meta", "!DOCTYPE"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        let text = &rest[..start];
        assert!(!text.contains('>') || open.last() == Some(&"style"), "a bare > in {text}");
        let end = start + rest[start..].find('>').expect("a tag that does not end");
        let tag = &rest[start + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes of <{tag}>");
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes something else");
        } else if !tag.ends_with('/') {
            let name = tag.split([' ', '\n']).next().unwrap();
            if !VOID.contains(&name) {
                open.push(name);
            }
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
}

fn alone(page: &str) {
    for part in ["<script", "javascript:", "@import", "url(", "<link", "<img", "<iframe", "src=", " on"] {
        let harmless = part == " on";
        assert!(harmless || !page.contains(part), "{part} is in the page");
    }
    let addresses = page.match_indices("://").filter(|(at, _)| !page[..*at].ends_with("\"http"));
    assert_eq!(addresses.count(), 0, "an address in the page");
    let named = page.matches("http://").count();
    assert_eq!(
        named,
        page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count(),
        "only the name of SVG is one"
    );
    for (at, _) in page.match_indices("href=\"") {
        assert!(page[at..].starts_with("href=\"#part-"), "a link out of the page");
    }
    for wrong in ["NaN", "inf\"", "inf "] {
        assert!(!page.contains(wrong), "{wrong} is in the page");
    }
}

#[test]
fn page_of_a_migration_has_every_value() {
    let value = migration("ab", "running");
    let page = page(vec![("one.json".into(), found(&value))]);
    well_formed(&page);
    alone(&page);
    let mut leaves = Vec::new();
    fn collect(value: &Value, leaves: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                fields.iter().filter(|(name, _)| *name != "speed").for_each(|(_, v)| collect(v, leaves))
            }
            Value::Array(values) => values.iter().for_each(|v| collect(v, leaves)),
            Value::Null => {}
            Value::String(text) => leaves.push(text.clone()),
            other => leaves.push(other.to_string()),
        }
    }
    collect(&value, &mut leaves);
    assert!(leaves.len() > 35, "{leaves:?}");
    for leaf in leaves {
        assert!(page.contains(&format!("<td>{leaf}</td>")), "{leaf} is not in the page");
    }
    for part in [
        "602 ms",
        "10.5 ms",
        "147.18 MiB",
        "2113 Mbit/s",
        "30079 writes/s (41 %)",
        "812 µs",
        "<polyline",
        "switchover 13.8 ms",
        "+16 %",
        "Changed course: it does not converge",
    ] {
        assert!(page.contains(part), "{part} is not in {page}");
    }
}

#[test]
fn names_from_files_are_escaped() {
    let hostile = "</td><script>alert(1)</script>\"'&\u{0}";
    let value = migration(hostile, hostile);
    let page = page(vec![(hostile.into(), found(&value)), ("b".into(), found(&migration("x", "y")))]);
    well_formed(&page);
    alone(&page);
    assert!(page.contains("&lt;script&gt;alert(1)"));
}

#[test]
fn repeats_are_compared_with_their_spread() {
    let mut other = migration("cd", "running");
    other["downtime_ms"] = json!(20.5);
    let results = vec![("a.json".into(), found(&migration("ab", "x"))), ("b.json".into(), found(&other))];
    let page = page(results);
    well_formed(&page);
    assert!(page.contains("vmferry: 2 migrations") && page.contains("15.5 ms (10.5 ms – 20.5 ms)"), "{page}");
    assert!(page.contains("% of faults"));
}

#[test]
fn json_and_events_of_one_migration_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    let line = |ms: u64| {
        json!({"state": "precopy", "outcome": null, "progress": {"elapsed_ms": ms,
            "remaining_pages": 5000, "dirty_pages_per_s": 100.0, "wire_bytes": ms}})
    };
    let mut last = migration("ab", "x");
    last.as_object_mut().unwrap().remove("passes");
    std::fs::write(&events, format!("{}\n{}\n{last}\n", line(10), line(400))).unwrap();
    let recorded = input::read(&events).unwrap();
    assert_eq!(recorded.len(), 1);
    let mut results = vec![("one.json".into(), found(&migration("ab", "x")))];
    results.extend(recorded.into_iter().map(|found| ("events".into(), found)));
    let page = page(results);
    assert!(page.contains("vmferry: a migration") && page.contains("Migration one.json + events"), "{page}");
    assert!(page.contains("Left to send") && page.contains(">Passes<"), "{page}");
}

#[test]
fn styles_for_narrow_screens_do_not_apply_to_print() {
    // A sheet of paper may be narrower than the width below which charts keep their width and
    // scroll. On paper, the charts would be cut off.
    let page = page(vec![("one.json".into(), found(&migration("ab", "running")))]);
    let queries: Vec<&str> =
        page.match_indices("@media").map(|(at, _)| page[at..].split('{').next().unwrap()).collect();
    assert!(queries.iter().any(|query| query.contains("max-width")), "{queries:?}");
    for query in queries {
        assert!(query.contains("screen") || query == "@media print", "{query}");
    }
    // A chart that is higher than a page would be separated from its heading, or be cut.
    assert!(page.contains("max-height:20cm"));
    assert!(page.contains("<table class=\"few\"><thead><tr><th>pass"), "{page}");
}

fn archived() -> Vec<PathBuf> {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/runs");
    let paths = std::fs::read_dir(runs).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    paths.sort();
    paths
}

#[test]
fn every_archived_run_has_a_section() {
    let mut kinds = std::collections::BTreeSet::new();
    let mut results = Vec::new();
    for path in archived() {
        for found in input::read(&path).unwrap() {
            if let Found::Bench(document) = &found {
                kinds.insert(document.bench.clone());
                let page = page(vec![("x".into(), found.clone())]);
                for case in &document.cases {
                    assert!(page.contains(&crate::escape(&case.name)), "{} of {path:?}", case.name);
                }
                // The printed part: without the list of all figures.
                let printed = page.split("<details>").next().unwrap();
                assert!(printed.contains("<thead>"), "{path:?} has no table");
                assert!(!printed.contains("Medians of 0 rounds"), "{path:?}");
                well_formed(&page);
                alone(&page);
            }
            results.push((path.file_stem().unwrap().to_string_lossy().into_owned(), found));
        }
    }
    assert!(kinds.len() >= 12, "{kinds:?}");
    let page = page(results);
    well_formed(&page);
    alone(&page);
    assert!(page.contains("Runs of bench migrate compared") && page.contains("run 3"));
}

#[test]
fn runs_without_a_common_case_share_a_chart_or_say_so() {
    let run = |bench: &str, mib: u64| {
        let case = json!({"name": format!("{mib}M/vmferry"), "params": {"memory_mib": mib, "program": "vmferry"},
            "metrics": {"pause_ms": 0.5, "total_ms": 9.0}});
        let host = crate::host::Host::default();
        found(&json!({"bench": bench, "host": host, "version": "9", "summary": {}, "cases": [case]}))
    };
    for (bench, charts, says_so) in [("snapshot", 2, false), ("migrate", 0, true), ("novel", 0, true)] {
        let runs = [256, 16384].map(|mib| (format!("{mib}"), run(bench, mib)));
        let page = page(runs.into());
        assert_eq!(page.matches("All runs together").count(), charts, "{page}");
        assert_eq!(page.contains("No key figure was measured in more than one run."), says_so, "{page}");
    }
}

#[test]
fn benches_of_other_versions_and_absurd_figures_are_shown() {
    let host = json!({"cpu": "x", "cores": 1, "memory_bytes": 1, "kernel": "6", "kvm": "none", "qemu": null,
        "congestion_control": "bbr", "thp": "never", "load_1m": 0.0, "date": "2026"});
    for bench in [
        "scan",
        "rtt",
        "migrate",
        "reaper",
        "reaper-traces",
        "postcopy",
        "free-page",
        "density",
        "stalls",
        "scale",
        "codec",
        "snapshot",
        "branch",
        "upgrade",
        "plan",
        "limits",
        "soak",
        "faults",
        "exits",
        "novel",
    ] {
        let value = json!({"bench": bench, "host": host, "version": "9", "summary": {"goals": 7, "links": {"x": 1}, "published": [1]},
        "cases": [
            {"name": "a/<b>", "params": {}, "metrics": {"total_ms": 1e17, "rtt_us": -5.0, "mean_us": 0.0, "x_min": 3.0},
             "series": {"what": "w", "from_s": 1e300, "step_s": 0.0, "end_s": 0.0, "values": [1]},
             "hist_us": {"0": 1, "3": 2, "18446744073709551615": 9}},
            {"name": "a/c", "params": {"case": 5, "purpose": "compare", "ring_entries": 4096, "kind": "bits"},
             "series": {"what": "w", "from_s": 1e8, "step_s": 1e-12, "end_s": -1e9, "values": [0, 18446744073709551615u64]},
             "metrics": {"total_ms": 1e-300}},
            {"name": "skipped", "params": {"purpose": "compare"}, "skipped": "why"}
        ]});
        let page = page(vec![("x".into(), found(&value))]);
        well_formed(&page);
        alone(&page);
        assert!(page.contains("a/&lt;b&gt;"), "{bench}");
    }
}
