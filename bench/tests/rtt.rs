//! Requests between two real processes. A test without the usual harness, because its executable is the source too.

use std::time::Duration;

use vmferry_bench::rtt::{self, Options, SOURCE_SUBCOMMAND, SourceCommand};
use vmferry_testkit::{Need, skip};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((first, rest)) if first == SOURCE_SUBCOMMAND => return Ok(rtt::source_main(rest)?),
        // `cargo test -- --list` asks every test executable what it holds.
        Some((first, _)) if first == "--list" => {
            println!("rtt: test");
            return Ok(());
        }
        _ => {}
    }
    let options = Options {
        repeats: 2,
        measure: Duration::from_millis(100),
        settle: Duration::from_millis(100),
        faults: 64,
        extra: false,
        only: vec!["loopback".into(), "fault".into()],
    };
    let outcome = rtt::run(&options, &SourceCommand::this_executable()?, &mut |_| {});
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
    println!("rtt: ok");
    Ok(())
}
