//! Tests of the bench with a scripted side, without a VMM or QEMU.

use super::*;
use serde_json::Value;
use std::time::Duration;
use vmferry_report::host::Host;

/// Runner that returns scripted results in order.
struct Scripted {
    script: Vec<Result<MigrationResult, OurError>>,
    asked: Vec<u32>,
}

impl OurRunner for Scripted {
    fn run(&mut self, _: &CaseSpec, channels: u32, _: bool) -> Result<MigrationResult, OurError> {
        self.asked.push(channels);
        self.script.remove(0)
    }
}

fn result(total_ms: u64) -> MigrationResult {
    MigrationResult {
        total: Duration::from_millis(total_ms),
        downtime: Duration::from_millis(5),
        data_bytes: 1_000_000_000,
        cpu_source: Duration::from_millis(100),
        cpu_destination: Duration::from_millis(200),
        writes_before: Some(100.0),
        writes_during: Some(80.0),
        ..MigrationResult::default()
    }
}

fn plain(channels: u32) -> Side {
    Side::Ours { channels, encrypted: false }
}

fn spec() -> CaseSpec {
    CaseSpec { name: "idle".into(), memory: 1 << 20, data: 1 << 20, ..Options::quick().cases[0].clone() }
}

fn no_receiver() -> ReceiverCommand {
    ReceiverCommand { program: "/nonexistent".into(), args: vec![] }
}

#[test]
fn medians_failures_and_skips_are_reported_separately() {
    let failed = || OurError::Failed("the link broke".into());
    let mut ours = Scripted {
        script: vec![
            Ok(result(500)),
            Err(OurError::Unavailable("no KVM".into())),
            Err(failed()),
            Ok(result(700)),
        ],
        asked: vec![],
    };
    let sides = vec![plain(1), plain(2), Side::Floor { streams: 1 }];
    let options = Options { cases: vec![spec()], sides, repeats: 3, only: Vec::new() };
    let mut told = Vec::new();
    let outcome = run(&options, &mut ours, &no_receiver(), &mut |what| told.push(what.to_owned()));

    assert_eq!(ours.asked, [1, 2, 1, 1]);
    // One round of vmferry failed, and all three of the floor, whose receiver does not exist.
    assert_eq!(outcome.failures.len(), 4, "{:?}", outcome.failures);
    assert!(outcome.failures.iter().any(|f| f == "idle/ours-1, round 2: the link broke"));
    let [one, two, floor] = &outcome.document.cases[..] else { panic!("{:?}", outcome.document.cases) };
    assert_eq!((one.metrics["total_ms"], one.metrics["total_ms_max"]), (600.0, 700.0));
    assert_eq!(one.params["rounds"], 2);
    assert_eq!(one.metrics["cpu_ms_per_gb"], 300.0);
    assert_eq!(one.metrics["guest_speed_kept"], 0.8);
    assert_eq!(two.skipped.as_deref(), Some("no KVM"));
    assert!(floor.metrics.is_empty() && floor.skipped.is_none());
    assert!(told.contains(&"idle/ours-1, round 3 of 3".to_owned()), "{told:?}");

    let text = table(&outcome.document);
    for part in ["600 ±17%", "skipped idle/ours-2: no KVM", "FAILED idle/ours-1, round 2: the link broke"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn ratios_and_targets_follow_from_the_rounds() {
    let runs = |side, totals: &[u64]| SideRuns {
        side,
        rounds: totals.iter().map(|&total| Some(result(total))).collect(),
        skipped: None,
    };
    let sides = [
        runs(plain(2), &[500, 1000]),
        runs(Side::Ours { channels: 2, encrypted: true }, &[1000, 1250]),
        runs(Side::Qemu { multifd: None }, &[1000, 2000]),
        runs(Side::Qemu { multifd: Some(2) }, &[550, 1100]),
        runs(Side::Floor { streams: 2 }, &[450, 900]),
        runs(Side::Floor { streams: 1 }, &[500, 1000]),
    ];
    let mut document = Document::new("migrate", Host { load_1m: 1.5, ..Host::default() });
    report::add_case(&mut document, &spec(), &sides);
    report::finish(&mut document, 2, &[]);

    let ours = &document.summary["idle"]["ours-2"];
    let close = |name: &str, want: f64| {
        let got = ours[name].as_f64().unwrap();
        assert!((got - want).abs() < 1e-9, "{name}: {got}, want {want}");
    };
    close("of_floor", 0.9);
    close("vs_qemu_single", 2.0);
    close("vs_qemu_multifd", 1.1);
    close("total_vs_qemu_single", 0.5);
    close("downtime_vs_qemu_single", 1.0);
    assert!((document.cases[2].metrics["of_floor"] - 0.5).abs() < 1e-9);
    assert!(!document.cases[4].metrics.contains_key("of_floor"));

    // The means of 0.5 and 0.8, and of 3.3 twice. A side is not compared with itself.
    let tls = |name: &str| document.summary["idle"]["ours-2-tls"][name].as_f64().unwrap();
    assert!((tls("vs_plain") - 0.65).abs() < 1e-9 && (tls("gbytes_per_core_s") - 10.0 / 3.0).abs() < 1e-9);
    assert!(ours.get("vs_plain").is_none());

    let verdicts: Vec<_> = document.summary["targets"].as_array().unwrap().clone();
    let met = |name: &str| verdicts.iter().find(|t| t["name"] == name).unwrap()["met"].clone();
    assert_eq!(met("idle/ours-2 of_floor"), true);
    assert_eq!(met("idle/ours-2 vs_qemu_multifd"), false);
    // The ratios of the rounds, 0.5 and 0.8, are on both sides of the bound, 0.6.
    assert_eq!(met("idle/ours-2-tls vs_plain"), "inconclusive");
    close("of_floor_min", 0.9);
    close("of_floor_max", 0.9);
    let text = table(&document);
    assert!(text.contains("inconclusive, spread 0.300"), "{text}");
    assert!(text.contains("missed") && text.contains("The load was 1.5"), "{text}");
}

#[test]
fn quick_bench_is_the_full_bench_with_fewer_rounds() {
    let (quick, full) = (Options::quick(), Options::full());
    assert!(quick.repeats < full.repeats);
    assert_eq!(quick.cases, full.cases);
    for spec in &full.cases {
        let workload: vmferry_guest_abi::Workload = spec.workload.parse().unwrap();
        assert_eq!(workload.data, Some(spec.data));
        assert!(spec.data < spec.memory);
    }
}

#[test]
fn cold_target_is_compared_with_the_other_targets_of_its_round() {
    let mut ours = Cold { prealloc: vec![] };
    let mut cold = ColdOptions::quick();
    (cold.repeats, cold.only) = (2, vec!["fresh/ours-2".into()]);
    cold.cases[0].memory = 1 << 20;
    let outcome = run_cold(&cold, &mut ours, &mut |_| {});
    assert!(outcome.failures.is_empty(), "{:?}", outcome.failures);
    // Each round begins with another side.
    assert_eq!(ours.prealloc, ["on", "off", "auto", "off", "auto", "on"]);
    let document = outcome.document;
    let auto = &document.summary["fresh"]["ours-2-auto"];
    assert_eq!((auto["cold_to_warm"].as_f64(), auto["cold_to_warm_max"].as_f64()), (Some(1.2), Some(1.2)));
    assert_eq!(auto["auto_to_cold"], 0.6);
    assert_eq!(document.summary["fresh"]["ours-2-cold"]["cold_to_warm"], 2.0);
    assert!(document.summary["fresh"]["ours-2-cold"].get("auto_to_cold").is_none());
    assert!(document.summary["fresh"]["ours-2-warm"].get("cold_to_warm").is_none());
    assert_eq!(document.summary["fresh_to_warm"], 1.2);
    let wasted = |name: &str| document.cases.iter().find(|case| case.name == name).unwrap().metrics["wasted"];
    assert_eq!((wasted("fresh/ours-2-warm"), wasted("fresh/ours-2-auto")), (1.0, 0.0));
    let met = |target: &Value| (target["name"].as_str().unwrap().to_owned(), target["met"].clone());
    let targets: Vec<_> = document.summary["targets"].as_array().unwrap().iter().map(met).collect();
    let goal = |what: &str| (format!("fresh/ours-2-auto {what}"), true.into());
    assert_eq!(targets, [goal("cold_to_warm"), goal("auto_to_cold"), goal("wasted")]);
    assert!(table(&document).contains("fresh/ours-2-auto cold_to_warm"));
}

#[test]
fn each_case_of_cold_targets_has_the_qemu_side_of_its_channels() {
    let mut ours = Cold { prealloc: vec![] };
    let cold = ColdOptions { repeats: 0, ..ColdOptions::full() };
    let document = run_cold(&cold, &mut ours, &mut |_| {}).document;
    let names: Vec<_> = document.cases.iter().map(|case| case.name.as_str()).collect();
    for case in ["fresh", "fresh-4k", "cold"] {
        for side in
            ["ours-1-auto", "qemu-single-warm", "qemu-single-cold", "ours-2-warm", "qemu-multifd-2-cold"]
        {
            let name = format!("{case}/{side}");
            assert!(names.contains(&name.as_str()), "{name} is not among {names:?}");
        }
    }
}

/// Runner whose time depends on the memory of the target.
struct Cold {
    prealloc: Vec<&'static str>,
}

impl OurRunner for Cold {
    fn run(&mut self, spec: &CaseSpec, _: u32, _: bool) -> Result<MigrationResult, OurError> {
        let prealloc = spec.target.prealloc().expect("an explicit option");
        self.prealloc.push(prealloc);
        let (total, resident) = match prealloc {
            "on" => (100, 2_000_000_000),
            "off" => (200, 1_000_000_000),
            _ => (120, 1_000_000_000),
        };
        Ok(MigrationResult { target_resident: Some(resident), ..result(total) })
    }
}

#[test]
fn cold_cases_have_workloads_that_fit() {
    for spec in &ColdOptions::full().cases {
        let workload: vmferry_guest_abi::Workload = spec.workload.parse().unwrap();
        assert_eq!(workload.data, Some(spec.data));
        assert!(spec.data < spec.memory);
    }
}
