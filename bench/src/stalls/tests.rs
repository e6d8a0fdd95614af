//! Tests of the bench with scripted sides, without a VMM or QEMU.

use super::*;
use crate::postcopy::Vcpu;
use crate::result::MigrationResult;
use std::convert::Infallible;
use vmferry_guest_abi::Workload;
use vmferry_report::host::Host;

/// Stalls of a vCPU in microseconds, each in a separate window. The blackout is the eighth one.
const STALLS: [u64; 11] = [10, 20, 2000, 2000, 300, 3000, 50, 6000, 1500, 700, 5000];

/// Returns a vCPU that has had these stalls.
fn vcpu(stalls: &[u64]) -> Vcpu {
    let mut vcpu = Vcpu { reports: stalls.len() as u64, ..Vcpu::default() };
    vcpu.writes = vcpu.reports * 1000;
    for us in stalls {
        count(&mut vcpu, *us);
    }
    vcpu.windows = stalls[stalls.len().saturating_sub(16)..].to_vec();
    vcpu
}

fn count(vcpu: &mut Vcpu, us: u64) {
    let bucket = (us / 8).max(1).ilog2() as usize;
    vcpu.hist[bucket] += 1;
    vcpu.hist_sum_us[bucket] += us;
}

/// Returns a run of a guest whose vCPUs had these stalls. The vCPUs were stopped in the eighth
/// window.
fn scripted(vcpus: &[[u64; 11]], total_ms: u64) -> Run {
    let observed = |at: f64, reports: usize| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds")]
        let t_us = ((at + 10.0) * 1e6) as u64;
        let vcpu = |stalls: &[u64; 11]| Vcpu { t_us, ..vcpu(&stalls[..reports]) };
        Observation { at, vcpus: vcpus.iter().map(vcpu).collect() }
    };
    Run {
        source: [(-0.5, 1), (-0.1, 3), (0.0, 4), (1.0, 6), (2.1, 7)].map(|(at, n)| observed(at, n)).into(),
        target: [(2.2, 9), (2.7, 11)].map(|(at, n)| observed(at, n)).into(),
        switched: 2.0,
        end: 2.0,
        result: MigrationResult {
            total: Duration::from_millis(total_ms),
            downtime: Duration::from_millis(5),
            data_bytes: 2_000_000_000,
            cpu_source: Duration::from_millis(1200),
            cpu_destination: Duration::from_millis(800),
            passes: Some(4),
            ..MigrationResult::default()
        },
        ..Run::default()
    }
}

/// Returns the stalls with their longest one during the migration changed to `us`.
fn with_longest(us: u64) -> [u64; 11] {
    let mut stalls = STALLS;
    stalls[5] = us;
    stalls
}

#[track_caller]
fn assert_close(figures: &crate::cases::Figures, wanted: &[(&str, f64)]) {
    for (name, want) in wanted {
        let got = figures[name];
        assert!((got - want).abs() < 1e-9, "{name}: {got}, want {want}");
    }
}

#[test]
fn stalls_exclude_the_blackout_of_each_vcpu() {
    // The second vCPU has a blackout of another length, and fewer long stalls.
    let other = [10, 10, 10, 10, 10, 1100, 10, 7000, 10, 10, 10];
    let figures = figures::of(&scripted(&[STALLS, other], 2000));
    assert_close(
        &figures,
        &[
            ("stall_max_ms", 3.0),
            ("stalls", 4.0),
            ("long_stalls", 3.0),
            ("long_stall_sum_ms", 5.6),
            ("guest_downtime_ms", 7.0),
            ("before_stall_max_ms", 2.0),
            ("before_long_stalls_per_s", 2.5),
            ("after_stall_max_ms", 5.0),
            ("after_long_stalls", 1.0),
            ("total_ms", 2000.0),
            ("downtime_ms", 5.0),
            ("source_cpu_ms", 1200.0),
            ("target_cpu_ms", 800.0),
            ("gbytes_per_s", 1.0),
            ("passes", 4.0),
        ],
    );
    // Two vCPUs with 2000 writes each in 0.4 s.
    assert_close(&figures, &[("writes_before_per_s", 10_000.0)]);
    assert!((0.1..0.9).contains(&figures["guest_speed_kept"]), "{figures:?}");
}

#[test]
fn stall_beside_the_blackout_is_counted() {
    let mut run = scripted(&[STALLS], 2000);
    for observed in &mut run.target {
        count(&mut observed.vcpus[0], 4500);
    }
    assert_close(
        &figures::of(&run),
        &[("stall_max_ms", 4.5), ("long_stalls", 3.0), ("guest_downtime_ms", 6.0)],
    );
}

/// Returns the run of a guest that was not moved.
fn not_moved(vcpus: &[[u64; 11]]) -> Run {
    let Run { source, .. } = scripted(vcpus, 0);
    Run { end: 2.1, target: Vec::new(), source, ..Run::default() }
}

#[test]
fn guest_that_is_not_moved_has_no_blackout() {
    // Only the windows until the last observation of the source count: the seventh is the last.
    let figures = figures::of(&not_moved(&[STALLS]));
    assert_close(
        &figures,
        &[
            ("stall_max_ms", 3.0),
            ("stalls", 2.0),
            ("long_stalls", 1.0),
            ("before_stall_max_ms", 2.0),
            ("writes_before_per_s", 5000.0),
        ],
    );
    for absent in ["guest_downtime_ms", "total_ms", "after_stall_max_ms", "after_long_stalls", "gbytes_per_s"]
    {
        assert!(!figures.contains_key(absent), "{absent}: {figures:?}");
    }
    assert!(figures["guest_speed_kept"] > 0.0);
}

#[test]
fn stalls_are_absent_if_the_window_of_the_blackout_is_unknown() {
    let absent = |run: &Run| {
        let figures = figures::of(run);
        assert_close(&figures, &[("total_ms", 2000.0)]);
        assert!(
            !figures.keys().any(|name| name.contains("stall") || *name == "guest_downtime_ms"),
            "{figures:?}"
        );
    };
    // The source could not be read after the end.
    let mut run = scripted(&[STALLS], 2000);
    run.source.pop();
    absent(&run);
    // The target was read too late.
    let mut run = scripted(&[STALLS], 2000);
    for observed in &mut run.target {
        observed.vcpus[0].windows = vec![10];
    }
    absent(&run);
    absent(&Run { target: Vec::new(), ..scripted(&[STALLS], 2000) });
}

#[test]
fn clock_that_stands_still_in_the_blackout_has_no_downtime() {
    let mut stalls = STALLS;
    stalls[7] = 0;
    let mut run = scripted(&[stalls], 2000);
    // The guest counts no stall of 0 us.
    for observed in &mut run.target {
        observed.vcpus[0].hist[0] -= 1;
    }
    let figures = figures::of(&run);
    assert_close(&figures, &[("stall_max_ms", 3.0), ("long_stalls", 2.0)]);
    assert!(!figures.contains_key("guest_downtime_ms"), "{figures:?}");
}

#[test]
fn target_is_read_until_each_vcpu_has_closed_two_windows() {
    let stopped = Observation { at: 2.1, vcpus: vec![vcpu(&STALLS[..7]), vcpu(&STALLS[..5])] };
    let mut reports = [(7, 5), (9, 6), (8, 7), (9, 7)].into_iter();
    let mut last = (9, 7);
    let look = || {
        last = reports.next().unwrap_or(last);
        let vcpus = [last.0, last.1].map(|reports| vcpu(&STALLS[..reports]));
        // The guest cannot be read at each attempt.
        Ok::<_, Infallible>((last != (8, 7)).then(|| Observation { at: 2.2, vcpus: vcpus.into() }))
    };
    let begin = Instant::now();
    let Ok(Some(seen)) = on_target(Some(&stopped), look) else { panic!("no reports") };
    assert!(begin.elapsed() >= AFTER && seen.len() > 1, "{seen:?}");
    assert_eq!(seen[0].vcpus.iter().map(|vcpu| vcpu.reports).collect::<Vec<_>>(), [9, 7]);
}

/// Runner that returns scripted results in order.
struct Scripted(Vec<Result<Run, OurError>>);

impl OurRunner for Scripted {
    fn run(&mut self, _: &CaseSpec, _: Channels) -> Result<Run, OurError> {
        self.0.remove(0)
    }
    fn stay(&mut self, _: &CaseSpec) -> Result<Run, OurError> {
        self.0.remove(0)
    }
}

#[test]
fn medians_failures_and_skips_are_reported_separately() {
    let good = |us| Ok(scripted(&[with_longest(us)], 2000));
    let script = vec![
        good(3000),
        Err(OurError::Unavailable("no KVM".into())),
        Err(OurError::Failed("the link broke".into())),
        good(4000),
    ];
    let spec = CaseSpec { memory: 1 << 20, ..Options::quick().cases[0].clone() };
    let sides = [1, 2].map(|count| Side::Ours(Channels::Count(count)));
    let options = Options { cases: vec![spec], sides: sides.into(), repeats: 3, only: Vec::new() };
    let Outcome { document, failures } = run(&options, &mut Scripted(script), &mut |_| {});

    assert_eq!(failures, ["2cpu/ours-1, round 2: the link broke"]);
    let [one, two] = &document.cases[..] else { panic!("{:?}", document.cases) };
    assert_eq!((one.metrics["stall_max_ms"], one.metrics["stall_max_ms_max"]), (3.5, 4.0));
    // Both rounds have a stall of 1.5 ms.
    assert_eq!((&one.params["rounds"], one.hist_us[&2048]), (&2.into(), 2));
    assert_eq!(two.skipped.as_deref(), Some("no KVM"));
    let text = table(&document);
    for part in ["3.50 ±14%", "skipped 2cpu/ours-2: no KVM", "FAILED 2cpu/ours-1, round 2: the link broke"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(page(&document).contains("2cpu/ours-1"));
}

/// Returns the document of a guest with two vCPUs whose longest stalls in microseconds and total
/// times in ms are given for each side.
fn document(sides: &[(Side, &[(u64, u64)])]) -> Document {
    let runs = |(side, rounds): &(Side, &[(u64, u64)])| SideRuns {
        side: *side,
        rounds: rounds.iter().map(|(us, total)| Some(scripted(&[with_longest(*us)], *total))).collect(),
        skipped: None,
    };
    let mut document = Document::new("stalls", Host::default());
    let sides: Vec<SideRuns> = sides.iter().map(runs).collect();
    report::add_case(&mut document, &Options::quick().cases[0], &sides);
    report::finish(&mut document, 2, &[]);
    document
}

#[test]
fn goals_compare_with_one_stream_of_qemu_in_the_same_round() {
    let document = document(&[
        (Side::Ours(Channels::Count(1)), &[(2000, 2600), (2200, 2600)]),
        (Side::Ours(Channels::Auto), &[(2000, 1000), (3000, 1000)]),
        (Side::Qemu { multifd: None }, &[(4000, 2000), (8000, 2000)]),
        (Side::Qemu { multifd: Some(2) }, &[(2000, 500), (2000, 500)]),
    ]);
    let goals = document.summary["goals"].as_array().unwrap();
    let goal = |name: &str| goals.iter().find(|goal| goal["name"] == name).unwrap();
    let most = goal("2cpu/ours-auto stall_max_to_qemu");
    assert_eq!((&most["got"], &most["met"]), (&0.4375.into(), &true.into()));
    assert_eq!(goal("2cpu/ours-auto total_to_qemu")["met"], true);
    assert_eq!(goal("2cpu/ours-1 stall_max_ms")["met"], false);
    // The guest with one vCPU was not measured.
    assert_eq!(goals.len(), 4, "{goals:?}");
    assert_eq!(
        (&document.summary["max_to_qemu"], &document.summary["total_to_qemu"]),
        (&0.4375.into(), &0.5.into())
    );
    // QEMU is not compared with itself.
    assert!(!document.cases[2..].iter().any(|case| case.metrics.contains_key("total_to_qemu")));
}

#[test]
fn goals_within_the_spread_are_inconclusive() {
    let document = document(&[
        (Side::Ours(Channels::Auto), &[(2000, 1000), (6000, 1000)]),
        (Side::Qemu { multifd: None }, &[(4000, 2000), (4000, 2000)]),
    ]);
    assert_eq!(document.summary["goals"][0]["met"], "inconclusive", "{:?}", document.summary);
}

#[test]
fn quick_bench_is_the_full_bench_with_fewer_rounds() {
    let (quick, full) = (Options::quick(), Options::full());
    assert!(quick.repeats < full.repeats);
    assert_eq!((&quick.cases, &quick.sides), (&full.cases, &full.sides));
    for spec in &full.cases {
        let workload: Workload = spec.workload.parse().unwrap();
        assert_eq!(workload.data, Some(spec.data));
        assert!(spec.data < spec.memory);
        let names: Vec<String> = full.selected(spec).map(|side| side.to_string()).collect();
        assert_eq!(names, ["floor", "ours-1", "ours-2", "ours-auto", "qemu-single", "qemu-multifd-2"]);
    }
    let only = Options { only: vec!["2cpu/qemu".into()], ..full };
    assert_eq!(
        only.cases.iter().map(|spec| only.selected(spec).count()).collect::<Vec<_>>(),
        [2, 0, 0, 0, 2]
    );
}
