//! Long-run tests of the product's policy. `vmferry-baselines` compares it with the published
//! policies.

use super::*;
use crate::Predict;

#[test]
fn predict_harvests_steadily_and_late_under_a_steady_load() {
    if vmferry_testkit::skip_long_search_if_emulated() {
        return;
    }
    for trace in Trace::steady() {
        let outcome = run(&Predict, &trace, 4096, &Costs::default(), 1200.0, true);
        let late: Vec<_> = outcome.series.iter().filter(|sample| sample.at > 300.0).collect();
        assert_steady(&late, trace.name);
    }
}

/// Checks that harvests are steady. `predict` sleeps shorter and shorter until it harvests, so its
/// sleeps are not steady.
fn assert_steady(late: &[&Sample], what: &str) {
    let harvests: Vec<_> = late.iter().filter(|sample| sample.harvested).collect();
    if let Some(early) = harvests.iter().find(|sample| sample.occupancy < 0.85) {
        panic!("{what}: harvested at {:.2} of the ring: {early:?}", early.occupancy);
    }
    let minutes: Vec<_> = (5..20)
        .map(|minute| {
            let minute = f64::from(minute) * 60.0;
            harvests.iter().filter(|sample| (minute..minute + 60.0).contains(&sample.at)).count() as f64
        })
        .collect();
    let (least, most) = minutes.iter().fold((f64::MAX, 0.0_f64), |(a, b), m| (a.min(*m), b.max(*m)));
    assert!(most - least <= 3.0 + most * 0.1, "{what}: harvests in each minute: {minutes:?}");
}
