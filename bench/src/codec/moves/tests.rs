//! Tests of the moves with scripted sides, without a VMM or QEMU.

use super::spec::{AUTO, RAW, XBZRLE};
use super::*;
use crate::codec::{Return, ReturnSide, ReturnSpec};
use crate::postcopy::{Observation, Vcpu};
use crate::result::MigrationResult;
use crate::rounds::OurError;
use std::collections::BTreeSet;
use std::time::Duration;
use vmferry_guest_abi::{Layout, PAGE_SIZE, Workload};
use vmferry_report::host::Host;

const QEMU_RAW: Side = Side::Qemu(QemuEncoding::Raw);
const QEMU_ZSTD: Side = Side::Qemu(QemuEncoding::Zstd);

/// Returns a run with these figures, of a guest that writes 1000 times per second.
fn scripted(total_ms: u64, wire: u64, cpu_ms: u64) -> Run {
    let observed = |at: f64| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds")]
        let t_us = ((at + 10.0) * 1e6) as u64;
        Observation { at, vcpus: vec![Vcpu { t_us, writes: t_us / 1000, ..Vcpu::default() }] }
    };
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    let end = total_ms as f64 / 1e3;
    Run {
        source: [-0.5, -0.2, 0.0, end].map(observed).into(),
        target: vec![observed(end + 0.1), observed(end + 0.6)],
        switched: end,
        end,
        result: MigrationResult {
            total: Duration::from_millis(total_ms),
            downtime: Duration::from_millis(5),
            wire_bytes: Some(wire),
            passes: Some(3),
            cpu_source: Duration::from_millis(cpu_ms / 2),
            cpu_destination: Duration::from_millis(cpu_ms / 2),
            ..MigrationResult::default()
        },
        ..Run::default()
    }
}

fn runs(side: Side, rounds: &[(u64, u64, u64)]) -> SideRuns {
    let rounds = rounds.iter().map(|(ms, wire, cpu)| Some(scripted(*ms, *wire, *cpu))).collect();
    SideRuns { side, rounds, skipped: None }
}

fn case(name: &str) -> CaseSpec {
    let cases = MoveOptions::full().cases;
    cases.into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
}

fn metric(document: &Document, case: &str, name: &str) -> Option<f64> {
    let case = document.cases.iter().find(|own| own.name == case);
    case.unwrap_or_else(|| panic!("no such case")).metrics.get(name).copied()
}

/// Returns a document with the cases that the summary names.
fn document() -> Document {
    let mut document = Document::new("codec", Host::default());
    let sides = [
        runs(AUTO, &[(500, 60_000_000, 900), (600, 60_000_000, 900), (1000, 60_000_000, 900)]),
        runs(RAW, &[(1000, 260_000_000, 400), (1000, 260_000_000, 400), (1000, 260_000_000, 400)]),
        runs(QEMU_RAW, &[(2000, 260_000_000, 400); 3]),
        runs(QEMU_ZSTD, &[(1000, 60_000_000, 1400), (1000, 60_000_000, 1400), (1250, 60_000_000, 1400)]),
    ];
    report::add_case(&mut document, &case(spec::TEXT), &sides);
    let sides = [
        runs(AUTO, &[(1300, 150_000_000, 300); 3]),
        runs(RAW, &[(8500, 990_000_000, 1100); 3]),
        runs(XBZRLE, &[(2000, 200_000_000, 400); 3]),
    ];
    report::add_case(&mut document, &case(spec::COUNTER), &sides);
    document
}

#[test]
fn ratios_are_taken_within_the_rounds() {
    let document = document();
    let auto = |name: &str| metric(&document, "moves/1gbit-text/ours-auto", name).unwrap();
    assert_eq!((auto("total_ms"), auto("total_to_raw")), (600.0, 0.6));
    // Zstandard is QEMU's fastest mode.
    assert_eq!((auto("total_to_best_qemu"), auto("total_to_best_qemu_max")), (0.6, 0.8));
    assert_eq!((auto("wire_mb"), auto("cpu_ms")), (60.0, 900.0));
    assert!((auto("wire_to_data") - 60e6 / f64::from(256 << 20)).abs() < 1e-9);
    // 60 MB in 600 ms are 0.8 Gb/s.
    assert!((auto("link_share") - 0.8).abs() < 1e-9);
    // 500 ms for 200 MB, and 1000 ms for as many.
    assert!((auto("saved_cpu_ms_per_gb") - 2500.0).abs() < 1e-9);
    let zstd = metric(&document, "moves/1gbit-text/qemu-zstd", "saved_cpu_ms_per_gb").unwrap();
    assert!((zstd - 5000.0).abs() < 1e-9);
    assert_eq!(metric(&document, "moves/1gbit-text/ours-raw", "saved_cpu_ms_per_gb"), None);
}

#[test]
fn guest_without_writes_has_no_speed() {
    let document = document();
    assert_eq!(metric(&document, "moves/1gbit-text/ours-auto", "guest_speed_kept"), None);
    let kept = metric(&document, "moves/1gbit-counter/ours-auto", "guest_speed_kept").unwrap();
    assert!((kept - 1.0).abs() < 0.05, "{kept}");
    // The sides of a guest that writes send different pages.
    assert_eq!(metric(&document, "moves/1gbit-counter/ours-auto", "saved_cpu_ms_per_gb"), None);
}

#[test]
fn migration_that_reaches_the_limit_has_not_converged() {
    let document = document();
    let converged = |side: &str| metric(&document, &format!("moves/1gbit-counter/{side}"), "converged");
    assert_eq!((converged("ours-auto"), converged("ours-raw")), (Some(1.0), Some(0.0)));
}

#[test]
fn summary_has_the_figures_of_the_contract() {
    let mut document = document();
    let goals = finish(&mut document);
    let summary = |name: &str| document.summary[name].as_f64().unwrap();
    assert_eq!((summary("text_1gbit_to_best_qemu"), summary("counter_1gbit_to_xbzrle")), (0.6, 0.65));
    assert_eq!((summary("worst_auto_to_raw"), summary("text_1gbit_cpu_to_best_qemu")), (0.6, 0.5));
    assert_eq!(document.summary["worst_auto_case"], "moves/1gbit-text");
    let goal =
        |name: &str| goals.iter().find(|goal| goal["name"] == name).unwrap_or_else(|| panic!("{goals:?}"));
    assert_eq!(goal("counter_1gbit_to_xbzrle")["met"], true);
    assert_eq!(goal("counter_1gbit_converged")["met"], true);
    // The rounds differ by more than the distance to the bound.
    assert_eq!(goal("text_1gbit_to_best_qemu")["met"], "inconclusive");
    assert_eq!(goal("worst_auto_to_raw: 1gbit-text")["want"], "<= 1.03");
}

#[test]
fn document_without_moves_has_no_goals_of_moves() {
    let mut document = Document::new("codec", Host::default());
    assert!(finish(&mut document).is_empty() && document.summary.is_empty());
}

#[test]
fn cases_have_distinct_names_and_guests_that_fit() {
    for options in [MoveOptions::full(), MoveOptions::quick()] {
        let names: BTreeSet<&str> = options.cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names.len(), options.cases.len());
        for case in &options.cases {
            let workload: Workload = case.workload().parse().unwrap();
            // The guest's program, tables and stacks need less than 16 MiB.
            let layout = Layout::new(&workload, (case.memory() - (16 << 20)) / PAGE_SIZE, 1).unwrap();
            let of_files = if case.has_files() { case.data } else { 0 };
            let data = layout.data_pages * PAGE_SIZE;
            assert_eq!(data.max(of_files), case.data, "{}", case.name);
            assert!(data + of_files <= case.memory() - (16 << 20), "{}", case.name);
            assert!(layout.ws_pages * PAGE_SIZE <= CACHE, "{}", case.name);
            assert_eq!(layout.ws_pages == 0, case.writer == Writer::None, "{}", case.name);
            // Some figures are relative to the raw side.
            assert!(case.sides.iter().all(|side| case.sides.contains(&side.raw())), "{}", case.name);
            assert!(case.sides.contains(&AUTO), "{}", case.name);
        }
        let sides = |name: &str| &options.cases.iter().find(|case| case.name == name).unwrap().sides;
        assert!(sides(spec::TEXT).contains(&QEMU_ZSTD) && sides(spec::COUNTER).contains(&XBZRLE));
    }
}

#[test]
fn qemu_has_the_cache_and_the_limits_of_the_case() {
    let spec = case(spec::COUNTER);
    let qemu = qemu_spec(&spec, QemuEncoding::Xbzrle);
    assert_eq!(qemu.stream, qemu::Stream::Xbzrle { cache: CACHE });
    assert!(CACHE.is_power_of_two(), "QEMU refuses other sizes");
    assert_eq!((qemu.switch_after, qemu.downtime_limit), (Some(spec.limit), spec.downtime_limit));
}

/// Runner that returns the same run for each side.
struct Same;

impl OurRunner for Same {
    fn run(&mut self, _: &CaseSpec, _: Encoding, _: &Link, _: Option<&Path>) -> Result<Run, OurError> {
        Ok(scripted(100, 1000, 50))
    }

    fn go_back(&mut self, spec: &ReturnSpec, _: ReturnSide, _: &Link) -> Result<Return, OurError> {
        unreachable!("the group moves has no {}", spec.name)
    }
}

#[test]
fn only_selected_sides_run_and_a_missing_link_skips_them() {
    let options = Options { only: vec!["/ours-auto".into()], ..Options::full() };
    let mut progress = |_: &str| ();
    let mut rounds = Rounds::new(1, &mut progress);
    let mut document = Document::new("codec", Host::default());
    let tools = Tools { root: false, ..Tools::here() };
    run(&options, &mut Same, &tools, &mut rounds, &mut document);
    assert!(rounds.failures.is_empty(), "{:?}", rounds.failures);
    assert_eq!(document.cases.len(), options.moves.cases.len());
    for (case, spec) in document.cases.iter().zip(&options.moves.cases) {
        assert_eq!(case.name, format!("moves/{}/ours-auto", spec.name));
        match &case.skipped {
            Some(why) => assert!(why.contains("root") && spec.shape.is_some(), "{why}"),
            None => assert!(case.metrics["total_ms"] > 0.0 && spec.shape.is_none()),
        }
    }
}
