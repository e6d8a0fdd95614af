//! Walks of many seeds.

use super::*;
use crate::sim::rng::Rng;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_source_bears_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_source(Rng::new(seed), wild);
    }

    #[test]
    fn the_target_bears_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_target(Rng::new(seed), wild);
    }
}

/// A walk that never gets anywhere would keep every promise.
#[test]
fn the_walks_reach_the_end_of_the_road() {
    for seed in 0..20 {
        assert_eq!(walk_source(Rng::new(seed), 0), Some(source::Outcome::Completed));
        assert_eq!(walk_target(Rng::new(seed), 0), Some(target::Outcome::Completed));
    }
    let moved = |seed: &u64| walk_source(Rng::new(*seed), 60) == Some(source::Outcome::Completed);
    let lost = |seed: &u64| matches!(walk_source(Rng::new(*seed), 60), Some(source::Outcome::Unknown(_)));
    let (moved, lost) = ((0..2000).filter(moved).count(), (0..20_000).filter(lost).count());
    assert!(moved > 50 && lost > 20, "{moved} of 2,000 walks moved the guest, {lost} of 20,000 lost it");
}
