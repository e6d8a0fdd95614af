//! Tests of the bench with a scripted side, without a VMM or QEMU.

use super::*;
use crate::result::MigrationResult;
use std::collections::BTreeSet;
use vmferry_guest_abi::Workload;
use vmferry_report::host::Host;

/// Runner whose guests wait for as long as the function of the way says, in microseconds.
struct Scripted(fn(Way) -> u64);

fn usual(way: Way) -> u64 {
    match way {
        Way::Shared => 12_000,
        Way::Interleaved => 500,
        Way::Dedicated => 230,
        Way::Ours => 40,
    }
}

/// Returns a run with 100 waits, each in a window that was reported, and a downtime before them.
fn scripted(spec: &CaseSpec, us: u64) -> Run {
    let bucket = (us / 8).ilog2() as usize;
    let vcpu = |writes: u64, waits: u64, windows: &[u64]| {
        let mut vcpu = Vcpu { writes, reports: 10 + waits, windows: windows.into(), ..Vcpu::default() };
        vcpu.hist[bucket] = waits.saturating_sub(1);
        vcpu.hist_sum_us[bucket] = waits.saturating_sub(1) * us;
        if waits > 0 {
            vcpu.hist[13] += 1;
            vcpu.hist_sum_us[13] += 70_000;
        }
        vcpu
    };
    let observed = |at: f64, mut one: Vcpu| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds")]
        let t_us = ((at + 10.0) * 1e6) as u64;
        one.t_us = t_us;
        Observation { at, vcpus: vec![one; spec.vcpus as usize] }
    };
    Run {
        source: vec![observed(-1.0, vcpu(0, 0, &[])), observed(0.0, vcpu(100_000, 0, &[]))],
        target: vec![
            observed(0.2, vcpu(100_100, 1, &[70_000])),
            observed(1.0, vcpu(100_900, 101, &[us])),
            observed(3.0, vcpu(300_900, 101, &[])),
        ],
        switched: 0.1,
        end: 1.0,
        result: MigrationResult {
            total: Duration::from_secs(1),
            downtime: Duration::from_millis(70),
            ..MigrationResult::default()
        },
        own: Some(Own { faults: 100.0, mean_us: 30.0, ..Own::default() }),
        huge: [None; 2],
    }
}

impl OurRunner for Scripted {
    fn run(&mut self, spec: &CaseSpec, way: Way, _: Watch<'_>) -> Result<Run, OurError> {
        match way {
            Way::Interleaved if spec.shape.is_none() => Err(OurError::Failed("the link broke".into())),
            _ => Ok(scripted(spec, (self.0)(way))),
        }
    }
}

fn options() -> Options {
    let mut options = Options { repeats: 2, ..Options::quick() };
    for case in &mut options.cases {
        case.memory = 1 << 20;
        case.sides.retain(|side| matches!(side, Side::Ours(_)));
    }
    options
}

/// Runs the bench. Returns the document and the failures, except those of the floor, whose process
/// does not exist.
fn bench(options: &Options, waits: fn(Way) -> u64) -> (Document, Vec<String>) {
    let missing = SourceCommand { program: "/nonexistent".into(), args: Vec::new() };
    let tools = Tools { root: false, ..Tools::here() };
    let outcome = run_with(options, &mut Scripted(waits), &missing, &tools, &mut |_| {});
    let ours = outcome.failures.into_iter().filter(|failure| !failure.contains("/floor")).collect();
    (outcome.document, ours)
}

/// Returns a document as if all links could be created, with a failed round between two equal ones.
fn document(waits: fn(Way) -> u64) -> Document {
    document_of(waits, &[true, false, true])
}

/// Returns a document with a round for each of `works`, which is false for a failed round.
fn document_of(waits: fn(Way) -> u64, works: &[bool]) -> Document {
    let options = options();
    let mut document = Document::new("postcopy", Host::default());
    let floor = Some(Floor { rtt_us: 20.0, local_fault_us: 12.0 });
    for spec in &options.cases {
        let runs = |side: &Side| {
            let Side::Ours(way) = *side else { unreachable!("only ours are left") };
            let round = |works: &bool| works.then(|| scripted(spec, waits(way)));
            let rounds = works.iter().map(round).collect();
            SideRuns { side: *side, rounds, skipped: None }
        };
        let floors = works.iter().map(|works| floor.filter(|_| *works)).collect();
        let runs = CaseRuns { floors, sides: spec.sides.iter().map(runs).collect() };
        report::add_case(&mut document, &options, spec, &runs);
    }
    report::finish(&mut document, &options, &[]);
    document
}

#[test]
fn failures_and_skips_are_reported_separately() {
    let (document, failures) = bench(&options(), usual);
    let case = |name: &str| document.cases.iter().find(|case| case.name == name).unwrap();
    let why = case("2gbit-bbr-random/shared").skipped.as_deref().unwrap();
    assert!(why.contains("need root"), "{why}");
    assert_eq!(failures.len(), 2, "{failures:?}");
    assert_eq!(failures[0], "loopback-random/interleaved, round 1: the link broke");
    let shared = case("loopback-random/shared");
    assert_eq!((shared.metrics["mean_us"], shared.metrics["waits"]), (12_000.0, 100.0));
    let text = table(&document);
    for part in
        ["skipped 10gbit-bbr-random/ours: network namespaces need root", "FAILED loopback-random/interleaved"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn figures_use_the_guests_clock_and_exclude_the_downtime() {
    let document = document(usual);
    let ours = document.cases.iter().find(|case| case.name == "2gbit-bbr-random/ours").unwrap();
    let close = |name: &str, want: f64| {
        let got = ours.metrics[name];
        assert!((got - want).abs() < want.abs() * 1e-6 + 1e-9, "{name}: {got}, want {want}");
    };
    close("mean_us", 40.0);
    close("max_us", 40.0);
    close("ratio_to_floor", 1.25);
    close("guest_downtime_ms", 70.0);
    close("before_waits_per_s", 0.0);
    close("waits_per_s", 100.0 / 0.9);
    close("own_mean_us", 30.0);
    close("writes_before_per_s", 100_000.0);
    close("after_of_before", 1.0);
    // 460 MiB at 2 Gb/s of frames.
    close("ratio_to_link", 1.0 / (460.0 * 1_048_576.0 * 8.0 / 2e9 / (1448.0 / 1514.0)));
    assert!((1000.0..=1200.0).contains(&ours.metrics["back_90_ms"]), "{:?}", ours.metrics);
    assert_eq!(ours.hist_us[&64], 200);
    let html = page(&document);
    assert_eq!(html.matches("<svg").count(), options().cases.len());
    assert!(html.contains("floor 32 us") && !html.contains("<script"));
}

#[test]
fn case_whose_huge_pages_the_host_lacks_is_skipped_with_the_reason() {
    let quick = Options::quick();
    let named = |name: &str| quick.cases.iter().find(|case| case.name == name).unwrap();
    // No host has a pool of 2 PiB.
    let case = CaseSpec { memory: 1 << 50, ..named("huge-hugetlbfs").clone() };
    let tools = Tools { root: false, ..Tools::here() };
    let why = huge_pages(&case, &tools).unwrap_err();
    assert!(why.contains("huge pages"), "{why}");
    assert!(huge_pages(named("huge-off"), &tools).is_ok_and(|pool| pool.is_none()));
    let thp = host::transparent_huge_pages();
    assert_eq!(huge_pages(named("huge-thp"), &tools).is_ok(), thp == "always" || thp == "madvise");
}

#[test]
fn goals_are_met_by_fast_pages_and_missed_by_slow_ones() {
    let met = |document: &Document, name: &str| {
        let goals = document.summary["goals"].as_array().unwrap();
        goals.iter().find(|goal| goal["name"] == name).unwrap_or_else(|| panic!("{name}: {goals:#?}"))["met"]
            == true
    };
    let good = document(usual);
    let bad = document(|way| usual(if way == Way::Ours { Way::Shared } else { Way::Dedicated }));
    for name in [
        "2gbit-bbr-random mean, shared > interleaved > dedicated: the smaller step",
        "2gbit-bbr-random mean, ours to shared",
        "loopback-random mean, ours to the floor",
        "loopback-random p99, ours to the floor",
    ] {
        assert!(met(&good, name) && !met(&bad, name), "{name}");
    }
    assert!(met(&good, "pages a second, 10gbit-bbr-random-2cpu to 10gbit-bbr-random-1cpu"));
    let published = &good.summary["published"][0];
    assert!((published["ours"].as_f64().unwrap() - 40.0 / 12_000.0).abs() < 1e-9, "{published}");
}

#[test]
fn goals_of_one_round_are_inconclusive() {
    let document = document_of(usual, &[true, false]);
    let goals = document.summary["goals"].as_array().unwrap();
    assert!(goals.len() > 3 && goals.iter().all(|goal| goal["met"] == "inconclusive"), "{goals:#?}");
}

#[test]
fn guest_is_back_when_it_stays_fast() {
    let observed = |at: f64, writes: u64| Observation { at, vcpus: vec![Vcpu { writes, ..Vcpu::default() }] };
    let mut back = SpeedBack::new(&[observed(-1.0, 0), observed(-0.1, 900), observed(0.1, 5000)]);
    let mut writes = 1000;
    let mut is_back = |step: u32, by: u64| {
        writes += by;
        back.is_back(&observed(f64::from(step) * 0.1, writes))
    };
    assert!(!(0..10).any(|step| is_back(step, 50)), "half as fast");
    let seen: Vec<bool> = (10..16).map(|step| is_back(step, 100)).collect();
    assert_eq!(seen, [false, false, false, false, true, true]);
}

#[test]
fn cases_have_valid_workloads_and_unique_names() {
    for options in [Options::quick(), Options::full()] {
        let mut names = BTreeSet::new();
        for case in &options.cases {
            let workload: Workload = case.workload().parse().unwrap();
            // The guest itself and its counters need memory too.
            assert!(workload.ws.unwrap() + (16 << 20) <= case.memory, "{}", case.name);
            assert!(names.insert(&case.name), "{} is there twice", case.name);
        }
    }
}
