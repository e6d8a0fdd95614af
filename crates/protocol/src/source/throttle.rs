//! How much to slow a guest that dirties faster than the link carries: a pure function of what was measured.
//!
//! QEMU's auto-converge steps the throttle up by 10 % every few passes until it happens to suffice. Here it is computed:
//! a guest that dirties `d` bytes a second at full speed dirties `d * (1 - s)` when it is stopped for the share `s` of
//! its time, and that has to be less than the link carries.

/// Of the bandwidth, how much a slowed guest may dirty: each pass is then about half as long as the one before.
const SHARE_OF_LINK: f64 = 0.5;
/// The most that a vCPU is stopped: it still gets 3 ms of each 100, or its watchdogs bark.
const MOST: f64 = 0.97;
/// Less is not worth a kick every few milliseconds.
const LEAST: f64 = 0.02;

/// The shares of time, one for each vCPU, that they are to stand still.
///
/// `dirty` is what each dirtied while it stood still for the share in `now` (both of the same length; one entry stands for
/// all vCPUs where they cannot be told apart), and `bandwidth` what the link carries; in the same unit of bytes or pages
/// a second. vCPUs that dirty less than a fair share of the link are left alone; the others are slowed to it, and what
/// the modest do not use is theirs.
pub fn shares(dirty: &[f64], now: &[f64], bandwidth: f64) -> Vec<f64> {
    // Standing still for all of the time, nobody would dirty anything: bounded, so that a slip of the clock is no infinity.
    let full_speed = |(dirty, now): (&f64, &f64)| dirty / (1.0 - now.min(MOST)).max(1.0 - MOST);
    let full: Vec<f64> = dirty.iter().zip(now).map(full_speed).collect();
    let level = fair_level(&full, bandwidth * SHARE_OF_LINK);
    let share = |dirty: &f64| if *dirty > level { (1.0 - level / dirty).min(MOST) } else { 0.0 };
    full.iter().map(share).map(|share| if share < LEAST { 0.0 } else { share }).collect()
}

/// The level to which the highest have to be cut so that all together are at most `total`.
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
    fn a_guest_within_half_the_link_is_left_alone() {
        assert_eq!(shares(&[400.0], &[0.0], 1000.0), [0.0]);
        assert_eq!(shares(&[250.0, 249.0], &[0.0, 0.0], 1000.0), [0.0, 0.0]);
        // It dirties no more than the link allows because it is slowed: that has to go on.
        let kept = shares(&[500.0], &[0.75], 1000.0)[0];
        assert!((kept - 0.75).abs() < 1e-9);
    }

    #[test]
    fn the_share_is_computed_not_stepped() {
        assert_eq!(shares(&[2000.0], &[0.0], 1000.0), [0.75]);
        assert_eq!(shares(&[1e9], &[0.0], 1000.0), [MOST]);
        assert_eq!(shares(&[1000.0], &[0.0], 0.0), [MOST]);
    }

    #[test]
    fn only_those_above_their_share_are_slowed() {
        // 500 for all: 100 and 50 are theirs, 350 are left for the third.
        let got = shares(&[100.0, 50.0, 1400.0], &[0.0; 3], 1000.0);
        assert_eq!(got, [0.0, 0.0, 0.75]);
    }

    proptest! {
        #[test]
        fn what_is_left_fits(
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
            prop_assert!(needed || got.iter().all(|share| *share == 0.0), "nobody is slowed for nothing");
        }
    }
}
