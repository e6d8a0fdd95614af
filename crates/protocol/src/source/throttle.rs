//! Throttle of a guest that dirties pages faster than the link sends them: a pure function of the
//! measurements.
//!
//! QEMU's auto-converge raises the throttle by 10 % every few passes until it suffices. This module
//! computes the sufficient throttle directly: a guest that dirties `d` bytes per second at full
//! speed dirties `d * (1 - s)` when it is stopped for the share `s` of its time, and that rate must
//! be less than the bandwidth of the link.

/// Share of the bandwidth at which a throttled guest may dirty memory. With this share, each pass
/// is about half as long as the previous one.
const SHARE_OF_LINK: f64 = 0.5;
/// Maximum share of the time for which a vCPU is stopped. The vCPU still runs for 3 ms of each 100
/// ms, because the guest's watchdogs would expire otherwise.
const MOST: f64 = 0.97;
/// Minimum share of the time for which a vCPU is stopped. Smaller shares are rounded to 0, because
/// they do not justify an interruption every few milliseconds.
const LEAST: f64 = 0.02;

/// Returns the share of the time, 0 to 0.97, for which each vCPU must be stopped.
///
/// `dirty` is the rate at which each vCPU dirtied memory while it was stopped for the share in
/// `now`. Both slices have one entry for each vCPU, or one entry for all vCPUs together.
/// `bandwidth` is the bandwidth of the link, in the same unit as `dirty`: bytes or pages per
/// second.
///
/// A vCPU that dirties less than a fair share of the link is not throttled. The other vCPUs divide
/// the rest of the bandwidth equally, and each is throttled to its part.
pub fn shares(dirty: &[f64], now: &[f64], bandwidth: f64) -> Vec<f64> {
    // A vCPU that is always stopped dirties nothing. The bound prevents an infinite result if the
    // clock is inaccurate.
    let full_speed = |(dirty, now): (&f64, &f64)| dirty / (1.0 - now.min(MOST)).max(1.0 - MOST);
    let full: Vec<f64> = dirty.iter().zip(now).map(full_speed).collect();
    let level = fair_level(&full, bandwidth * SHARE_OF_LINK);
    let share = |dirty: &f64| if *dirty > level { (1.0 - level / dirty).min(MOST) } else { 0.0 };
    full.iter().map(share).map(|share| if share < LEAST { 0.0 } else { share }).collect()
}

/// Returns the level to which the highest rates must be reduced so that the sum is at most `total`.
fn fair_level(rates: &[f64], total: f64) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut left = total;
    let mut waiting = sorted.len();
    for rate in sorted {
        #[expect(clippy::cast_precision_loss, reason = "a number of vCPUs")]
        let fair = left / waiting as f64;
        if rate > fair {
            return fair.max(0.0);
        }
        left -= rate;
        waiting -= 1;
    }
    f64::INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn guest_within_half_of_the_bandwidth_is_not_throttled() {
        assert_eq!(shares(&[400.0], &[0.0], 1000.0), [0.0]);
        assert_eq!(shares(&[250.0, 249.0], &[0.0, 0.0], 1000.0), [0.0, 0.0]);
        // The guest dirties no more than the link allows because it is throttled, so throttling
        // must continue.
        let kept = shares(&[500.0], &[0.75], 1000.0)[0];
        assert!((kept - 0.75).abs() < 1e-9);
    }

    #[test]
    fn share_is_computed_in_one_step() {
        assert_eq!(shares(&[2000.0], &[0.0], 1000.0), [0.75]);
        assert_eq!(shares(&[1e9], &[0.0], 1000.0), [MOST]);
        assert_eq!(shares(&[1000.0], &[0.0], 0.0), [MOST]);
    }

    #[test]
    fn only_vcpus_above_their_share_are_throttled() {
        // 500 for all three: 100 and 50 are used by the first two, so 350 are left for the third.
        let got = shares(&[100.0, 50.0, 1400.0], &[0.0; 3], 1000.0);
        assert_eq!(got, [0.0, 0.0, 0.75]);
    }

    proptest! {
        #[test]
        fn throttled_guest_fits_its_share_of_the_link(
            rates in prop::collection::vec(0.0..1e9f64, 1..9),
            bandwidth in 1.0..1e9f64,
        ) {
            let got = shares(&rates, &vec![0.0; rates.len()], bandwidth);
            prop_assert!(got.iter().all(|share| (0.0..=MOST).contains(share)));
            let slowed: f64 = rates.iter().zip(&got).map(|(rate, share)| rate * (1.0 - share)).sum();
            let bounded = got.contains(&MOST);
            let fits = bandwidth * SHARE_OF_LINK * 1.001 + rates.iter().sum::<f64>() * LEAST;
            prop_assert!(bounded || slowed <= fits, "{slowed} of {bandwidth}: {got:?}");
            let needed = rates.iter().sum::<f64>() > bandwidth * SHARE_OF_LINK;
            prop_assert!(needed || got.iter().all(|share| *share == 0.0), "no vCPU is throttled without need");
        }
    }
}
