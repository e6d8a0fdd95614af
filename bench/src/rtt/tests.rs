use super::*;
use vmferry_report::host::Host;

fn none(_: &str) {}

fn measured(mean_us: f64, bulk_gbps: Option<f64>) -> Measured {
    let times = Figures { mean_us, p50_us: mean_us, p99_us: 2.0 * mean_us, max_us: 3.0 * mean_us, count: 10 };
    Measured { times, bulk_gbps, pace_gbps: None, other_gbps: None }
}

fn unmeasured(sides: Vec<Side>) -> Vec<SideRuns> {
    sides.into_iter().map(|side| SideRuns { side, rounds: Vec::new(), skipped: None }).collect()
}

#[test]
fn pace_is_a_share_of_the_link() {
    assert_eq!(pace(2.0, 90), 225_000_000);
    assert_eq!(pace(2.0, 95), 237_500_000);
    assert_eq!(capacity("shaped-bbr", None), Some(2.0));
    assert_eq!(capacity("loopback", Some(20.0)), Some(20.0));
    let error = plan(&Options::quick(), None, Beside::Paced(90), None).unwrap_err();
    assert!(matches!(error, RttError::Unavailable(_)), "{error}");
    let plan = plan(&Options::quick(), None, Beside::Paced(90), Some(16.0)).unwrap();
    assert_eq!((plan.bulk, plan.gap), (Bulk::Paced(1_800_000_000), GAP));
    // Compared sides differ only by the bulk stream.
    assert_eq!((Beside::Idle.gap(), Beside::IdleBackToBack.gap()), (GAP, Duration::ZERO));
}

#[test]
fn unpaced_side_runs_before_the_side_that_depends_on_it() {
    let sides = sides(&Options { only: vec!["loopback".into()], ..Options::quick() });
    let names: Vec<String> = sides.iter().map(|side| side.name()).collect();
    assert_eq!(
        names,
        [
            "loopback/idle",
            "loopback/idle-back-to-back",
            "loopback/unpaced",
            "loopback/paced-90",
            "loopback/found"
        ]
    );
    let mut sides = unmeasured(sides);
    assert_eq!(latest_bulk(&sides, "loopback"), None);
    sides[2].rounds = vec![Some(measured(50.0, Some(10.0))), Some(measured(50.0, Some(12.0))), None];
    assert_eq!(latest_bulk(&sides, "loopback"), Some(12.0));
    assert_eq!(latest_bulk(&sides, "shaped-bbr"), None);
}

#[test]
fn shaped_links_without_privileges_are_skipped_with_the_reason() {
    let tools = Tools { root: false, ..Tools::here() };
    let options = Options { only: vec!["shaped".into()], ..Options::quick() };
    let missing = SourceCommand { program: "/nonexistent".into(), args: Vec::new() };
    let outcome = run_with(&options, &missing, &tools, &mut none);
    assert_eq!(outcome.failures, Vec::<String>::new());
    assert_eq!(outcome.document.cases.len(), 12);
    for case in &outcome.document.cases {
        let why = case.skipped.as_deref().unwrap_or_default();
        assert!(why.contains("need root"), "{}: {why:?}", case.name);
        assert!(case.metrics.is_empty());
    }
    assert!(table(&outcome.document).contains("skipped shaped-cubic/paced-95: network namespaces need root"));
}

#[test]
fn failing_side_is_a_failure_and_not_a_skip() {
    let options = Options { only: vec!["loopback/idle-back-to-back".into()], repeats: 1, ..Options::quick() };
    let missing = SourceCommand { program: "/nonexistent".into(), args: Vec::new() };
    let outcome = run_with(&options, &missing, &Tools::here(), &mut none);
    assert_eq!(outcome.failures.len(), 1, "{:?}", outcome.failures);
    assert!(outcome.failures[0].contains("loopback/idle-back-to-back, round 1"), "{:?}", outcome.failures);
    assert_eq!(outcome.document.cases[0].skipped, None);
}

#[test]
fn floors_are_sums_and_ratios_are_taken_within_rounds() {
    let options = Options { only: vec!["loopback".into(), "fault".into()], ..Options::quick() };
    let mut sides = unmeasured(sides(&options));
    for (side, (rtt, bulk)) in sides.iter_mut().zip([
        (20.0, None),
        (40.0, None),
        (400.0, Some(10.0)),
        (60.0, Some(9.0)),
        (30.0, Some(9.5)),
        (8.0, None),
        (5.0, None),
    ]) {
        // In the second round the host is half as fast.
        side.rounds = vec![Some(measured(rtt, bulk)), Some(measured(2.0 * rtt, bulk)), None];
    }
    let mut document = Document::new("rtt", Host::default());
    report::add(&mut document, &options, &sides, &[]);
    let metrics = |name: &str| &document.cases.iter().find(|case| case.name == name).unwrap().metrics;
    assert_eq!(metrics("loopback/idle")["rtt_us"], 30.0);
    assert_eq!(metrics("loopback/idle")["requests"], 20.0);
    assert_eq!(metrics("loopback/unpaced")["ratio_to_idle"], 20.0);
    assert_eq!(metrics("loopback/paced-90")["ratio_to_idle"], 3.0);
    assert_eq!(metrics("loopback/paced-90")["ratio_to_idle_max"], 3.0);
    assert_eq!(metrics("loopback/paced-90")["bulk_share"], 0.9);
    assert!(!metrics("loopback/idle").contains_key("ratio_to_idle"));
    assert_eq!(metrics("fault/blocking")["local_fault_us"], 12.0);
    assert_eq!(metrics("fault/blocking")["faults"], 20.0);
    let summary = &document.summary;
    assert_eq!(summary["rtt_us"], 30.0);
    assert_eq!(summary["local_fault_us"], 12.0);
    assert_eq!(summary["floor_us"], 42.0);
    assert_eq!(summary["links"]["loopback"]["floor_us"], 42.0);
    assert_eq!(summary["links"]["loopback"]["rtt_back_to_back_us"], 60.0);
    assert_eq!(summary["links"]["loopback"]["floor_spinning_us"], 37.5);
}

#[test]
fn only_the_full_bench_has_the_fast_link_and_contests() {
    let quick = sides(&Options::quick());
    assert!(quick.iter().all(|side| side.most_rounds() == usize::MAX && !side.name().starts_with("fast-")));
    let full = sides(&Options::full());
    let extra: Vec<String> =
        full.iter().map(|side| side.name()).filter(|name| !quick.iter().any(|q| q.name() == *name)).collect();
    assert_eq!(full.len(), quick.len() + extra.len());
    let fast = ["idle", "unpaced", "paced-90", "found"];
    let contests = ["found-twice", "found-beside-cubic", "found-changing"];
    let of = |link: &str, cases: &[&str]| -> Vec<String> {
        cases.iter().map(|case| format!("{link}/{case}")).collect()
    };
    let expected = [
        of("fast-bbr", &fast),
        of("fast-cubic", &fast),
        of("shaped-bbr", &contests),
        of("shaped-cubic", &contests),
    ];
    assert_eq!(extra, expected.concat());
    assert_eq!(full.iter().filter(|side| side.most_rounds() == CONTEST_ROUNDS).count(), 6);
    assert_eq!((capacity("fast-bbr", None), capacity("shaped-cubic", Some(1.0))), (Some(10.0), Some(2.0)));
}

#[test]
fn contests_report_shares_and_fairness() {
    let options = Options { only: vec!["shaped-bbr/".into()], ..Options::full() };
    let mut sides = unmeasured(sides(&options));
    for runs in &mut sides {
        let (first, other) = match runs.side.name().as_str() {
            "shaped-bbr/found-twice" => (1.2, 0.6),
            "shaped-bbr/found-changing" => (1.8, 0.9),
            _ => continue,
        };
        runs.rounds = vec![Some(Measured { other_gbps: Some(other), ..measured(90.0, Some(first)) }), None];
    }
    sides[0].rounds = vec![Some(measured(60.0, None)); 7];
    let mut document = Document::new("rtt", Host::default());
    report::add(&mut document, &options, &sides, &[]);
    let metrics = |name: &str| &document.cases.iter().find(|case| case.name == name).unwrap().metrics;
    let twice = metrics("shaped-bbr/found-twice");
    assert_eq!((twice["bulk_share"], twice["other_share"]), (0.6, 0.3));
    assert!((twice["jain"] - 0.9).abs() < 1e-9, "{twice:?}");
    assert_eq!((twice["ratio_to_idle"], twice["p99_ratio_to_idle"]), (1.5, 1.5));
    let changing = metrics("shaped-bbr/found-changing");
    assert_eq!((changing["bulk_share"], changing["share_of_half"]), (0.9, 0.9));
    assert!(!changing.contains_key("jain") && !changing.contains_key("other_share"), "{changing:?}");
}
