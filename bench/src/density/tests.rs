//! Tests of the bench with scripted guests, without a VMM or a cgroup.

use super::*;
use vmferry_report::host::Host;

/// Runner whose guests with reports leave `left` percent of what they freed, and take `slower`
/// percent longer.
#[derive(Clone, Copy)]
struct Scripted {
    left: u64,
    slower: u64,
}

#[derive(Debug)]
struct Ready(Told, u64);

impl Guest for Ready {
    fn killed(&mut self) -> Result<bool, OurError> {
        Ok(false)
    }

    fn told(&mut self) -> Result<Option<Told>, OurError> {
        Ok(Some(self.0))
    }

    fn resident(&mut self) -> Result<u64, OurError> {
        Ok(self.1)
    }
}

impl OurRunner for Scripted {
    fn tsc_khz(&mut self) -> Option<u32> {
        None
    }

    fn start(&mut self, spec: &GuestSpec, _: Option<&Budget>) -> Result<Started, OurError> {
        if spec.report.mode == ReportMode::Hypercall {
            return Err(OurError::Unavailable("no such port".into()));
        }
        let off = spec.report.mode == ReportMode::Off;
        let (left, slower) = if off { (100, 0) } else { (self.left, self.slower) };
        // Keeping a map costs a tenth of each free.
        let free_ns = if spec.report.hints == HintMode::Incremental { 1100 } else { 1000 };
        let told = Told {
            done: true,
            freed_bytes: spec.alloc,
            work_ns: 1_000_000 * (100 + slower),
            allocs: (10, 500),
            frees: (10, free_ns),
            report_bytes: if off { 0 } else { spec.alloc },
            report_ns: 110,
            report_max_ns: 5_000_000,
            dropped_pages: spec.alloc / 4096,
            drop_ns: 100,
            corrupt: u64::from(spec.report.mode == ReportMode::Async && spec.frag != 0),
            ..Told::default()
        };
        Ok(Started::Runs(Box::new(Ready(told, (10 << 20) + spec.alloc / 100 * left))))
    }
}

fn bench(mut runner: Scripted) -> Outcome {
    let mut options =
        Options { repeats: 2, one: (1 << 30, 100 << 20), fleets: Vec::new(), ..Options::quick(None) };
    // QEMU's sides would start QEMU.
    options.ones.retain(|one| one.report.vmm == Vmm::Ours);
    run(&options, &mut runner, &mut |_| {})
}

/// Returns the names of the goals with the verdict `met`.
fn with_verdict(outcome: &Outcome, met: impl Into<serde_json::Value>) -> Vec<&str> {
    let met = met.into();
    let goals = outcome.document.summary["goals"].as_array().unwrap();
    goals.iter().filter(|goal| goal["met"] == met).map(|goal| goal["name"].as_str().unwrap()).collect()
}

fn unmet(outcome: &Outcome) -> Vec<&str> {
    with_verdict(outcome, false)
}

fn inconclusive(outcome: &Outcome) -> Vec<&str> {
    with_verdict(outcome, "inconclusive")
}

#[test]
fn summary_has_the_documented_fields() {
    let outcome = bench(Scripted { left: 0, slower: 3 });
    let summary = &outcome.document.summary;
    let close = |name: &str, want: f64| {
        let got = summary[name].as_f64().unwrap();
        assert!((got - want).abs() < 0.05, "{name}: {got}, want {want}");
    };
    close("residue_pct", 0.0);
    close("residue_off_pct", 100.0);
    close("alloc_slowdown_pct", 3.0);
    close("report_to_madvise", 1.1);
    close("free_max_us", 0.0);
    close("map_alloc_slowdown_pct", 0.0);
    close("map_free_slowdown_pct", 10.0);
    close("demand_free_slowdown_pct", 0.0);
    assert_eq!(unmet(&outcome), [""; 0]);
    // No fleet was run.
    assert!(!summary.contains_key("guests_on"));
}

#[test]
fn goals_report_residue_and_slowdown_as_unmet() {
    let outcome = bench(Scripted { left: 2, slower: 7 });
    assert_eq!(unmet(&outcome), ["residue, %", "residue of a fragmented pattern, %", "slower by, %"]);
}

#[test]
fn fleets_are_compared_with_the_published_results() {
    let filled = |guests, killed| Filled { guests, killed, used: 1 << 30, took: Duration::from_secs(1) };
    let mut document = Document::new("density", Host::default());
    let side = |report, guests| SideRuns {
        side: Fleet::from(report),
        rounds: vec![Some(filled(guests, true)), Some(filled(guests, true))],
        skipped: None,
    };
    let sides = [side(ReportMode::Off, 3), side(ReportMode::Sync, 8)];
    cases::add(&mut document, ("fleet", &[]), &sides, Filled::figures);
    report::finish(&mut document, &Options::quick(None), &[]);
    let outcome = Outcome { document, failures: Vec::new() };
    assert_eq!(unmet(&outcome), ["guests that fit, sync"]);
    assert_eq!(inconclusive(&outcome), [""; 0]);
    let summary = &outcome.document.summary;
    assert_eq!((summary["guests_off"].as_f64(), summary["guests_on"].as_f64()), (Some(3.0), Some(8.0)));
}

#[test]
fn goals_of_a_fleet_that_ran_once_are_inconclusive() {
    let filled = Filled { guests: 3, killed: true, used: 1 << 30, took: Duration::from_secs(1) };
    let sides = [SideRuns { side: Fleet::from(ReportMode::Off), rounds: vec![Some(filled)], skipped: None }];
    let mut document = Document::new("density", Host::default());
    cases::add(&mut document, ("fleet", &[]), &sides, Filled::figures);
    report::finish(&mut document, &Options::quick(None), &[]);
    let outcome = Outcome { document, failures: Vec::new() };
    assert_eq!(inconclusive(&outcome), ["guests that fit, off"]);
    assert!(table(&outcome.document).contains("inconclusive, no spread"));
}

#[test]
fn failures_and_skips_are_reported_separately() {
    let outcome = bench(Scripted { left: 0, slower: 0 });
    let why = "the guest found 1 damaged pages";
    assert_eq!(outcome.failures, [1, 2].map(|round| format!("one/async-fragmented, round {round}: {why}")));
    let text = table(&outcome.document);
    for part in ["skipped one/hypercall: no such port", "FAILED one/async-fragmented", "one/sync-again"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}
