//! Tests of requests between two processes.

use crate::VMFERRY_BENCH;
use std::time::Duration;
use vmferry_bench::rtt::{self, Options, SOURCE_SUBCOMMAND, SourceCommand};
use vmferry_testkit::{Need, skip};

#[test]
fn every_side_of_loopback_has_its_figures() {
    let source = SourceCommand { program: VMFERRY_BENCH.into(), args: vec![SOURCE_SUBCOMMAND.into()] };
    let options = Options {
        repeats: 2,
        measure: Duration::from_millis(100),
        warm_up: Duration::from_millis(100),
        faults: 64,
        extra: false,
        only: vec!["loopback".into(), "fault".into()],
    };
    let outcome = rtt::run(&options, &source, &mut |_| {});
    println!("{}", rtt::table(&outcome.document));
    assert_eq!(outcome.failures, Vec::<String>::new());
    let case = |name: &str| outcome.document.cases.iter().find(|case| case.name == name);
    let metric = |name: &str, metric: &str| case(name).and_then(|case| case.metrics.get(metric)).copied();
    for name in [
        "loopback/idle",
        "loopback/idle-back-to-back",
        "loopback/unpaced",
        "loopback/paced-90",
        "loopback/found",
    ] {
        let figures = ["requests", "rtt_us", "p50_us", "p99_us", "max_us"].map(|m| metric(name, m));
        assert!(figures.iter().all(|figure| figure.is_some_and(|f| f > 0.0)), "{name}: {figures:?}");
        assert_eq!(metric(name, "bulk_gbps").is_some(), !name.contains("idle"), "{name}");
    }
    let unpaced = metric("loopback/unpaced", "bulk_gbps").unwrap_or(0.0);
    assert!(unpaced > 0.0, "the bulk stream does not flow: {unpaced} Gb/s");
    match case("fault/blocking").and_then(|case| case.skipped.clone()) {
        Some(why) => skip(Need::Uffd, why),
        None => {
            let of = |name: &str| outcome.document.summary[name].as_f64().unwrap_or(f64::NAN);
            assert!((of("rtt_us") + of("local_fault_us") - of("floor_us")).abs() < 1e-9);
            assert!(of("floor_us") > 1.0);
        }
    }
}
