//! Tests of the bench with scripted guests, without a VMM.

use super::*;
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::Duration;
use vmferry_guest_abi::Workload;

const GIB: u64 = 1 << 30;

/// Runner whose total time grows by `growth` from 1 GiB to 4 TiB, and whose parts explain
/// `explained` of the downtime.
struct Scripted {
    growth: f64,
    explained: f64,
    /// Number of runs so far, which makes each run slightly slower.
    runs: f64,
}

impl OurRunner for Scripted {
    fn run(&mut self, spec: &GuestSpec) -> Result<Run, OurError> {
        if spec.kind == Kind::Kvm {
            return Err(OurError::Unavailable("no KVM".into()));
        }
        if spec.vcpus == 2 {
            return Err(OurError::Failed("the link broke".into()));
        }
        self.runs += 1.0;
        let large = spec.memory > GIB;
        let end = |added: u64| End { cpu: Duration::from_millis(20), added, ..End::default() };
        Ok(Run {
            total_ms: if large { 300.0 * self.growth } else { 300.0 } + self.runs / 100.0,
            downtime_ms: 2.0,
            parts: [("pause_ms", 0.5), ("commit_ms", 2.0 * self.explained - 0.5)]
                .map(|(name, ms)| (name.to_owned(), ms))
                .into(),
            setup_ms: 8.0,
            enable_tracking_ms: Some(3.0),
            harvests_ms: vec![1.0, 4.0, 1.0],
            passes: 4,
            pages: 16384,
            source: end(4 << 20),
            target: end(16 << 20),
            neighbours: (spec.neighbours > 0)
                .then(|| Neighbours { proportional: 1.5 * 1024.0 * 1024.0, ..Neighbours::default() }),
        })
    }
}

fn point(curve: Curve, kind: Kind, at: u64) -> Point {
    Point { curve, kind, at }
}

fn bench(growth: f64, explained: f64) -> Outcome {
    let sparse = [GIB, 4 << 40].map(|at| point(Curve::MemorySparse, Kind::Process, at));
    let more = [
        point(Curve::MemorySparse, Kind::Kvm, GIB),
        point(Curve::Vcpus, Kind::Process, 2),
        point(Curve::Guests, Kind::Process, 64),
    ];
    let options = Options { points: sparse.into_iter().chain(more).collect(), repeats: 2, only: Vec::new() };
    let mut ours = Scripted { growth, explained, runs: 0.0 };
    run(&options, &mut ours, &mut |_| {})
}

/// Returns the names of the goals with the verdict `met`.
fn with_verdict(outcome: &Outcome, met: bool) -> Vec<&str> {
    let goals = outcome.document.summary["goals"].as_array().unwrap();
    goals.iter().filter(|goal| goal["met"] == met).map(|goal| goal["name"].as_str().unwrap()).collect()
}

#[test]
fn goals_are_met_if_the_cost_follows_the_working_set() {
    let outcome = bench(1.2, 0.99);
    assert_eq!(with_verdict(&outcome, false), [""; 0]);
    let met = with_verdict(&outcome, true);
    for goal in [
        "process, 4 TiB sparse: total to that of 1 GiB",
        "process, 4 TiB sparse: downtime, ms",
        "process, 4 TiB sparse: setup, ms",
        "process, 4 TiB sparse: longest harvest, ms",
        "process, 4 TiB sparse: bookkeeping, MiB",
        "process, overhead of each of 64 guests, MiB",
        "process, memory-sparse: downtime that its parts explain, at each point",
    ] {
        assert!(met.contains(&goal), "{goal}: {met:?}");
    }
    let summary = &outcome.document.summary;
    let close = |name: &str, want: f64| {
        let got = summary[name].as_f64().unwrap();
        assert!((got - want).abs() < 0.01, "{name}: {got}, want {want}");
    };
    close("sparse_4t_total_to_1g", 1.2);
    close("sparse_4t_downtime_ms", 2.0);
    close("sparse_4t_setup_ms", 8.0);
    close("sparse_4t_harvest_ms", 4.0);
    close("sparse_4t_bookkeeping_mib", 16.0);
    close("overhead_mib_64_guests", 1.5);
    assert!(!summary.contains_key("overhead_mib_64_kvm_guests"));
}

#[test]
fn goals_are_missed_if_the_cost_follows_the_size_of_the_guest() {
    let outcome = bench(45.0, 0.5);
    let missed = with_verdict(&outcome, false);
    assert!(missed.contains(&"process, 4 TiB sparse: total to that of 1 GiB"), "{missed:?}");
    for curve in ["memory-sparse", "guests"] {
        let goal = format!("process, {curve}: downtime that its parts explain, at each point");
        assert!(missed.contains(&goal.as_str()), "{goal}: {missed:?}");
    }
}

#[test]
fn each_point_has_its_figures_or_its_reason() {
    let outcome = bench(1.2, 0.99);
    let case = |name: &str| outcome.document.cases.iter().find(|case| case.name == name).unwrap();
    let large = case("memory-sparse/process-4T");
    assert_eq!((&large.params["at"], &large.params["rounds"]), (&(4_u64 << 40).into(), &2.into()));
    assert_eq!(large.metrics["part_pause_ms"], 0.5);
    assert_eq!((large.metrics["harvest_mean_ms"], large.metrics["harvest_last_ms"]), (2.0, 1.0));
    assert_eq!((large.metrics["source_cpu_ms"], large.metrics["data_mib"]), (20.0, 64.0));
    // A point is not compared with itself.
    assert!(!case("memory-sparse/process-1G").metrics.contains_key("total_to_1g"));
    assert_eq!(case("memory-sparse/kvm-1G").skipped.as_deref(), Some("no KVM"));
    let broken = case("vcpus/process-2");
    assert!(broken.metrics.is_empty() && broken.skipped.is_none());
    assert_eq!(outcome.failures.len(), 2, "{:?}", outcome.failures);

    let text = table(&outcome.document);
    for part in ["skipped memory-sparse/kvm-1G: no KVM", "FAILED vcpus/process-2, round 1: the link broke"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(page(&outcome.document).contains("Slopes"));
}

#[test]
fn slope_of_the_total_time_is_in_the_summary() {
    let outcome = bench(1.2, 0.99);
    let slopes = outcome.document.summary["slopes"].as_array().unwrap();
    let of = |metric: &str| {
        let is = |slope: &&Value| slope["curve"] == "memory-sparse" && slope["metric"] == metric;
        slopes.iter().find(is).unwrap()
    };
    let total = of("total_ms");
    assert_eq!(
        (&total["unit"], &total["points"], &total["guest"]),
        (&"GiB".into(), &2.into(), &"process".into())
    );
    // From 300 to 360 ms over 12 doublings, or over 4095 GiB.
    let close = |name: &str, want: f64, within: f64| {
        let got = total[name].as_f64().unwrap();
        assert!((got - want).abs() < within, "{name}: {got}, want {want}");
    };
    close("per_doubling", 5.0, 0.01);
    close("per_unit", 60.0 / 4095.0, 1e-4);
    close("exponent", 0.0219, 1e-3);
    assert_eq!(of("downtime_ms")["per_unit"], 0.0);
    // Extremes have no slope. A curve with one point has none either.
    assert!(slopes.iter().all(|slope| slope["metric"] != "total_ms_max" && slope["curve"] != "guests"));
}

#[test]
fn points_have_unique_names_and_valid_guests() {
    for options in [Options::quick(), Options::full()] {
        let mut names = BTreeSet::new();
        for point in &options.points {
            assert!(names.insert(format!("{}/{point}", point.curve.name())), "{point}");
            let guest = point.guest();
            for spec in [guest, guest.neighbour()] {
                spec.workload().parse::<Workload>().unwrap();
                assert!(spec.working_set <= spec.data && spec.data < spec.memory, "{point}: {spec:?}");
                assert!(spec.memory.is_multiple_of(4096) && spec.needed() > spec.data, "{point}");
            }
            // More vCPUs or guests must not mean more writes.
            assert!(u64::from(guest.vcpus) * guest.rate <= 50_000, "{point}");
        }
        // The goals are about these points.
        for name in ["memory-sparse/process-1G", "memory-sparse/process-4T", "guests/process-64"] {
            assert!(names.contains(name), "{name}");
        }
    }
}

#[test]
fn points_are_named_by_their_largest_unit() {
    let names = [
        point(Curve::MemorySparse, Kind::Process, 256 * GIB),
        point(Curve::MemorySparse, Kind::Kvm, 1 << 40),
        point(Curve::WorkingSet, Kind::Process, 4 << 20),
        point(Curve::Vcpus, Kind::Process, 64),
    ];
    assert_eq!(names.map(|point| point.to_string()), ["process-256G", "kvm-1T", "process-4M", "process-64"]);
}

#[test]
fn only_selects_points_by_curve_kind_and_size() {
    let selected = |only: &str| {
        let options = Options { only: vec![only.into()], ..Options::full() };
        Curve::ALL.into_iter().flat_map(|curve| options.selected(curve).collect::<Vec<_>>()).count()
    };
    assert_eq!(selected("memory-sparse/process"), 5);
    assert_eq!(selected("vcpus/"), 7);
    assert_eq!(selected("process-4T"), 1);
    assert_eq!(selected("nothing"), 0);
}

#[test]
fn large_kvm_guest_needs_more_memory_than_a_process_guest() {
    let guest = |kind| point(Curve::MemorySparse, kind, 4 << 40).guest();
    let needed = |kind| guest(kind).needed();
    assert!(needed(Kind::Kvm) > 12 * GIB && needed(Kind::Process) < 2 * GIB);
    // The allocator of a guest with a balloon is in addition.
    assert!(GuestSpec { balloon: true, ..guest(Kind::Kvm) }.needed() > 20 * GIB);
    // The neighbours are in addition.
    let guest = point(Curve::Guests, Kind::Process, 64).guest();
    assert_eq!((guest.neighbours, guest.neighbour().neighbours), (64, 0));
}
