//! Walks with many seeds.

use super::*;
use crate::sim::rng::Rng;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn source_session_survives_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_source(Rng::new(seed), wild);
    }

    #[test]
    fn target_session_survives_any_event_at_any_moment(seed: u64, wild in 0u64..600) {
        walk_target(Rng::new(seed), wild);
    }
}

/// Walks must make progress, because a walk without progress would break no promise.
#[test]
fn walks_reach_the_end_of_a_migration() {
    for seed in 0..20 {
        assert_eq!(walk_source(Rng::new(seed), 0), Some(source::Outcome::Completed));
        assert_eq!(walk_target(Rng::new(seed), 0), Some(target::Outcome::Completed));
    }
    let moved = |seed: &u64| walk_source(Rng::new(*seed), 60) == Some(source::Outcome::Completed);
    let lost = |seed: &u64| matches!(walk_source(Rng::new(*seed), 60), Some(source::Outcome::Unknown(_)));
    let (moved, lost) = ((0..2000).filter(moved).count(), (0..20_000).filter(lost).count());
    assert!(moved > 50 && lost > 20, "{moved} of 2,000 walks moved the guest, {lost} of 20,000 lost it");
}
