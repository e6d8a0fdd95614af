//! Tests of the bench with a scripted side, without a VMM or QEMU.

use super::*;
use vmferry_guest_abi::Workload;
use vmferry_report::Spread;
use vmferry_report::host::Host;
use vmferry_report::json::Case;

/// Runner whose guests keep a share of their speed that depends on the side.
struct Scripted;

fn kept(side: Side) -> f64 {
    match side {
        Side::Log => 0.5,
        Side::Ring { policy: Policy::Predict, .. } => 0.6,
        Side::Ring { policy: Policy::Fixed, .. } => 0.2,
        _ => 0.4,
    }
}

fn scripted(side: Side) -> Run {
    let (kept, exits) = (kept(side), if side.short() == "predict" { 1 } else { 100 });
    let mut timeline = Timeline::default();
    for (at, writes) in
        [(-1.0, 0.0), (0.0, 1000.0), (2.0, 1000.0 + 2000.0 * kept), (3.0, 2000.0 + 2000.0 * kept)]
    {
        timeline.add(0, Point { at, writes });
    }
    Run {
        timeline,
        end: 2.0,
        resumed: 2.0,
        total: Duration::from_secs(2),
        dirtied: Some(1000),
        ring: side.entries().map(|_| RingRun {
            full_exits: exits,
            full_stall: Duration::from_micros(exits * 100),
            ..RingRun::default()
        }),
        ..Run::default()
    }
}

impl OurRunner for Scripted {
    fn run(&mut self, _: &CaseSpec, side: Side, _: Duration, _: Duration) -> Result<Run, OurError> {
        match side {
            Side::Ring { policy: Policy::Gears, .. } => Err(OurError::Failed("the link broke".into())),
            Side::Ring { policy: Policy::Aimd, .. } => Err(OurError::Unavailable("no ring".into())),
            _ => Ok(scripted(side)),
        }
    }
}

fn options() -> Options {
    let mut options = Options { repeats: 2, before: Duration::from_secs(1), ..Options::quick() };
    for case in &mut options.cases {
        case.memory = 1 << 20;
        case.sides.retain(|side| !matches!(side, Side::Qemu { .. }) && side.entries() != Some(65536));
    }
    options.cases.retain(|case| case.purpose == Purpose::Compare);
    options
}

#[test]
fn figures_goals_failures_and_skips_are_reported_separately() {
    let outcome = run(&options(), &mut Scripted, &mut |_| {});
    let document = &outcome.document;
    let case = |name: &str| document.cases.iter().find(|case| case.name == name).unwrap();
    let predict = case("stress-192M-1cpu/ring-4096-predict");
    assert!((predict.metrics["guest_speed_kept"] - 0.6).abs() < 1e-9);
    assert!((predict.metrics["drop_s"] - 2.0).abs() < 1e-9);
    assert_eq!(predict.params["published_stress_bytes"], 3u64 << 30);
    let series = predict.series.as_ref().unwrap();
    assert_eq!((series.values[0], series.values.len()), (1000, 40));
    assert_eq!(case("stress-192M-1cpu/ring-4096-aimd").skipped.as_deref(), Some("no ring"));
    assert!(outcome.failures.iter().any(|f| f == "paced-192M-1cpu/ring-4096-gears, round 2: the link broke"));

    let goals = document.summary["goals"].as_array().unwrap();
    let met = |name: &str| goals.iter().find(|goal| goal["name"] == name).unwrap()["met"].as_bool().unwrap();
    assert!(met("stress-192M-1cpu/4096 writes/s, predict to the best other"));
    assert!(met("stress-192M-1cpu/4096 writes/s, predict to log"));
    assert!(met("stress-192M-1cpu/4096 full exits, predict to fixed"));
    let paid = &document.summary["predict_to_fixed"]["paced-192M-1cpu"]["4096"];
    assert!((paid["writes_during_per_s"]["median"].as_f64().unwrap() - 3.0).abs() < 1e-9);
    let drop = &document.summary["published"][0];
    assert!((drop["to_fixed"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{drop}");

    let text = table(document);
    for part in [
        "skipped stress-192M-1cpu/ring-4096-aimd: no ring",
        "FAILED paced",
        "predict to log",
        "divided by 16",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let html = page(document);
    assert_eq!(html.matches("<svg").count(), 4);
    assert!(html.contains("stress-192M-1cpu, rings of 4096 entries") && !html.contains("<script"));
}

#[test]
fn worse_policy_misses_its_goals() {
    struct Worse;
    impl OurRunner for Worse {
        fn run(&mut self, _: &CaseSpec, side: Side, _: Duration, _: Duration) -> Result<Run, OurError> {
            let Side::Ring { entries, policy } = side else { return Ok(scripted(side)) };
            let swapped = if policy == Policy::Predict { Policy::Fixed } else { Policy::Predict };
            Ok(scripted(Side::Ring { entries, policy: swapped }))
        }
    }
    let document = run(&options(), &mut Worse, &mut |_| {}).document;
    let goals = document.summary["goals"].as_array().unwrap();
    let missed = goals.iter().filter(|goal| goal["met"] == false).count();
    // Missed in each of the four cases: the best policy, the log, full exits and the worst window.
    assert_eq!(missed, 16, "{goals:#?}");
    // All policies are equal in the length of the drop, which is no success of `predict`.
    let drops: Vec<_> = goals.iter().filter(|goal| goal["name"].as_str().unwrap().contains("drop")).collect();
    assert!(drops.len() == 4 && drops.iter().all(|goal| goal["met"] == "inconclusive"), "{drops:#?}");
}

#[test]
fn difference_within_the_spread_is_inconclusive() {
    /// Runner whose guests under `predict` are the fastest in one round, and the slowest in the
    /// other.
    struct Noisy(u32);
    impl OurRunner for Noisy {
        fn run(&mut self, _: &CaseSpec, side: Side, _: Duration, _: Duration) -> Result<Run, OurError> {
            let Side::Ring { policy: Policy::Predict, entries } = side else { return Ok(scripted(side)) };
            self.0 += 1;
            let policy = if self.0.is_multiple_of(2) { Policy::Fixed } else { Policy::Predict };
            Ok(scripted(Side::Ring { entries, policy }))
        }
    }
    let document = run(&options(), &mut Noisy(0), &mut |_| {}).document;
    let goals = document.summary["goals"].as_array().unwrap();
    let name = "stress-192M-1cpu/4096 writes/s, predict to the best other";
    let goal = goals.iter().find(|goal| goal["name"] == name).unwrap();
    assert_eq!(goal["met"], "inconclusive");
    assert_eq!(goal["want"], ">= 1");
    // Both medians are 0.4 of the speed. The rounds of `predict` are 0.2 and 0.6.
    let number = |field: &str| goal[field].as_f64().unwrap();
    assert!((number("got") - 1.0).abs() < 1e-9 && (number("spread") - 1.0).abs() < 1e-9, "{goal}");
    assert!(table(&document).contains("inconclusive, spread 1.000"), "{}", table(&document));
}

/// Returns the rows that compare a measured case with published figures: a stress in GiB, the
/// number of vCPUs if it is known, and the size of the rings.
fn published_rows(stress_gib: u64, vcpus: Option<u32>, entries: u32) -> Vec<serde_json::Value> {
    let mut document = Document::new("reaper", Host::default());
    let ring = |policy| Side::Ring { entries, policy };
    let measured =
        [(Side::Log, 8.0, 400.0), (ring(Policy::Fixed), 2.0, 500.0), (ring(Policy::Predict), 1.0, 100.0)];
    for (side, drop, worst) in measured {
        let mut case = Case::new(format!("stress/{side}"))
            .param("case", "stress")
            .param("purpose", Purpose::Published.name())
            .param("vcpus", vcpus)
            .param("oversubscribed", vcpus == Some(8))
            .param("rounds", 2)
            .param("published_stress_bytes", stress_gib << 30);
        case.spread("drop_s", Spread::of([drop, drop]));
        case.spread("worst_ms_per_gb", Spread::of([worst, worst]));
        document.cases.push(case);
    }
    let names: Vec<_> = goals::goals(&document).iter().map(|goal| goal["met"].clone()).collect();
    assert_eq!(names, [true, true], "drop and worst window, predict to fixed");
    goals::published(&document)
}

#[test]
fn drop_is_compared_with_the_published_rows_of_its_stress() {
    let rows = published_rows(3, Some(1), 4096);
    let [two, eight] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(two["name"], "stress/4096, published with 3 GB on 2 vCPUs");
    let ratios = |row: &serde_json::Value| {
        ["published_to_bitmap", "published_to_fixed", "to_log", "to_fixed"]
            .map(|name| row[name].as_f64().unwrap())
    };
    assert_eq!(ratios(two), [5.5 / 18.0, 5.5 / 23.0, 0.125, 0.5]);
    assert_eq!(eight["name"], "stress/4096, published with 3 GB on 8 vCPUs");
    assert_eq!(ratios(eight)[..2], [13.0 / 38.0, 13.0 / 62.0]);
    assert_eq!(ratios(&published_rows(3, None, 65536)[1])[1], 14.0 / 71.0);

    let rows = published_rows(30, Some(8), 65536);
    let [largest] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(largest["name"], "stress/65536, oversubscribed, published with 30 GB on 8 vCPUs");
    assert_eq!(ratios(largest)[..2], [29.5 / 221.5, 29.5 / 171.0]);
}

#[test]
fn case_with_the_published_number_of_vcpus_has_one_row() {
    let rows = published_rows(3, Some(2), 4096);
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["name"], "stress/4096, published with 3 GB on 2 vCPUs");
}

#[test]
fn slowest_window_is_compared_with_the_published_one() {
    let row = &published_rows(3, Some(2), 4096)[0];
    let number = |name: &str| row[name].as_f64().unwrap();
    assert_eq!((number("published_worst_ms_per_gb"), number("worst_ms_per_gb")), (2962.0, 100.0));
    assert_eq!(number("published_worst_to_bitmap"), 2962.0 / 3300.0);
    assert_eq!(number("published_worst_to_fixed"), 2962.0 / 2766.0);
    assert_eq!((number("worst_to_log"), number("worst_to_fixed")), (0.25, 0.2));
    // The slowest windows with large rings were published for two rows only.
    assert!(published_rows(6, Some(8), 65536)[0]["published_worst_to_fixed"].is_null());
}

#[test]
fn throttle_is_compared_with_the_stepped_one() {
    /// Runner whose guests need longer, and keep less of the second vCPU, if all are throttled.
    struct Throttling;
    impl OurRunner for Throttling {
        fn run(&mut self, _: &CaseSpec, side: Side, _: Duration, _: Duration) -> Result<Run, OurError> {
            let kept = if side.throttle() == Some(Throttle::Writers) { 0.9 } else { 0.3 };
            let mut run = scripted(side);
            for (at, writes) in [(-1.0, 0.0), (0.0, 100.0), (2.0, 100.0 + 200.0 * kept), (3.0, 400.0)] {
                run.timeline.add(1, Point { at, writes });
            }
            let held = vec![Duration::from_secs(1); 2];
            run.throttle = side.throttle().map(|_| ThrottleRun { held, highest_share: 0.5 });
            Ok(run)
        }
    }
    let mut options = Options { repeats: 2, ..Options::quick() };
    options.cases.retain(|case| case.purpose == Purpose::Throttle);
    options.cases[0].memory = 1 << 20;
    let document = run(&options, &mut Throttling, &mut |_| {}).document;
    let [case] = &options.cases[..] else { panic!("{:?}", options.cases) };
    let side = |how: &str| {
        let name = format!("{}/ring-4096-throttle-{how}", case.name);
        document.cases.iter().find(|case| case.name == name).unwrap()
    };
    assert_eq!((side("all").metrics["throttle_pct"], side("all").metrics["throttle_share"]), (50.0, 0.5));
    assert_eq!(
        (&side("all").params["throttle"], &side("writers").params["throttle"]),
        (&"all".into(), &"writers".into())
    );
    let goals = document.summary["goals"].as_array().unwrap();
    let met = |what: &str| {
        let name = format!("{}/ring-4096 {what}", case.name);
        goals.iter().find(|goal| goal["name"] == name).unwrap()["met"].clone()
    };
    assert_eq!(met("speed of the vCPU that writes little, writers to all"), true);
    assert_eq!(met("ended by the timeout, throttle all"), true);
    assert!(table(&document).contains("throttled %"), "{}", table(&document));
}

#[test]
fn published_rows_that_do_not_fit_are_skipped_with_the_reason() {
    let mut options = Options { repeats: 1, only: vec!["published-3G-2cpu/log".into()], ..Options::full() };
    for case in &mut options.cases {
        // More than any host has.
        case.memory = 1 << 50;
    }
    let document = run(&options, &mut Scripted, &mut |_| {}).document;
    let [case] = &document.cases[..] else { panic!("{:?}", document.cases) };
    assert!(case.skipped.as_ref().unwrap().starts_with("needs "), "{case:?}");
    assert!(table(&document).contains("skipped published-3G-2cpu/log: needs "));
}

#[test]
fn published_rows_are_all_cases() {
    let full = Options::full();
    let rows: Vec<_> = full.cases.iter().filter(|case| case.purpose == Purpose::Published).collect();
    for (gib, vcpus) in [(3, 2), (3, 8), (6, 8), (10, 8), (20, 8), (30, 8)] {
        let name = format!("published-{gib}G-{vcpus}cpu");
        assert!(rows.iter().any(|case| case.name == name), "{name}");
    }
    for (scaled, vcpus) in [(384, 2), (640, 4), (1280, 8), (1920, 8)] {
        let name = format!("scaled-{scaled}M-{vcpus}cpu");
        assert!(rows.iter().any(|case| case.name == name), "{name}");
    }
    assert!(full.repeats >= 3);
}

#[test]
fn policies_are_those_of_the_command() {
    use vmferry_dirty::ReaperPolicy;
    let names: Vec<String> = vmferry_baselines::Policy::ALL.iter().map(|own| own.name().into()).collect();
    assert_eq!(Policy::ALL.map(Policy::name).to_vec(), names);
}

#[test]
fn cases_have_valid_workloads_and_unique_names() {
    for options in [Options::quick(), Options::full()] {
        assert!(options.repeats >= 3);
        for case in &options.cases {
            let workload: Workload = case.workload.parse().unwrap();
            let data = workload.data.or(workload.ws).unwrap();
            // The guest itself and its counters need memory too.
            assert!(data + (256 << 20) <= case.memory, "{}", case.name);
            assert!(!case.sides.is_empty());
        }
        let mut names: Vec<_> = options.cases.iter().map(|case| &case.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), options.cases.len());
    }
    let full = Options::full();
    assert!(full.cases.iter().any(|case| case.vcpus > 1 && case.workload.contains("skew=")));
}
