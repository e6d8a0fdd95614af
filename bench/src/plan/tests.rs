//! Tests of the bench with a scripted side, without a VMM.

use super::*;

struct Scripted(Vec<Result<Run, OurError>>);

impl OurRunner for Scripted {
    fn run(&mut self, _: &CaseSpec) -> Result<Run, OurError> {
        self.0.remove(0)
    }
}

fn small() -> CaseSpec {
    CaseSpec { memory: 1 << 20, ..Options::quick().cases[0].clone() }
}

fn run_of(expected: f64, real: f64, probability: f64) -> Run {
    Run {
        probability,
        total: Some([expected * 0.9, expected, expected * 1.1]),
        downtime: Some([1.0, 2.0, 3.0]),
        converged: true,
        real_total: real,
        real_downtime: 4.0,
        ..Run::default()
    }
}

#[test]
fn errors_cover_converged_runs_and_wrong_predictions_count() {
    let stuck = Run { probability: 0.9, converged: false, ..run_of(1.0, 1.0, 1.0) };
    let script = vec![Ok(run_of(1100.0, 1000.0, 1.0)), Ok(run_of(700.0, 1000.0, 0.2)), Ok(stuck)];
    let options = Options { cases: vec![small()], repeats: 3, only: Vec::new() };
    let Outcome { document, failures } = run(&options, &mut Scripted(script), &mut |_| {});
    assert!(failures.is_empty(), "{failures:?}");
    let number = |name: &str| document.summary[name].as_f64().unwrap();
    assert!((number("median_error_total_pct") - 20.0).abs() < 1e-6);
    assert!((number("median_error_downtime_pct") - 50.0).abs() < 1e-6);
    assert!((number("median_error_downtime_ms") - 2.0).abs() < 1e-6);
    assert!((number("convergence_right_pct") - 100.0 / 3.0).abs() < 1e-6);
    assert!((number("total_in_interval_pct") - 50.0).abs() < 1e-6);
    assert!((number("downtime_within_goal_pct") - 100.0).abs() < 1e-6);
    assert!(table(&document).contains("median_error_total_pct"));
}

#[test]
fn unavailable_case_is_skipped_with_its_reason() {
    let script = vec![Err(OurError::Unavailable("no KVM".into()))];
    let options = Options { cases: vec![small()], repeats: 2, only: Vec::new() };
    let Outcome { document, .. } = run(&options, &mut Scripted(script), &mut |_| {});
    assert_eq!(document.cases[0].skipped.as_deref(), Some("no KVM"));
    assert!(document.summary["median_error_total_pct"].is_null());
}

#[test]
fn a_third_of_cases_is_borderline_and_names_are_unique() {
    for options in [Options::quick(), Options::full()] {
        let near = options.cases.iter().filter(|case| case.borderline()).count();
        assert!(near * 3 >= options.cases.len(), "{near} of {}", options.cases.len());
        let mut names: Vec<_> = options.cases.iter().map(|case| &case.name).collect();
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
        for case in &options.cases {
            case.workload().parse::<vmferry_guest_abi::Workload>().unwrap();
        }
    }
}
