//! Decision on when to stop the guest: a pure function of the measurements.

use super::settings::{Settings, SwitchoverBandwidth};
use std::time::Duration;
use vmferry_core::PAGE_SIZE;

/// Largest ratio of the pages that a pass leaves to the pages that the previous pass left, for
/// which a further pass is worthwhile. If passes shrink less, a further pass saves less downtime
/// than tracking during that pass costs the guest.
const WORTHWHILE_SHRINK: f64 = 0.75;

/// Share of the fixed costs. If the time for sending the remaining pages is below this share, no
/// further pass is worthwhile, because the downtime could hardly become shorter.
const NEGLIGIBLE_OF_FIXED: f64 = 0.5;

/// Share of the downtime limit. If the time for sending the remaining pages is below this share, no
/// further pass is worthwhile. With a limit of 300 ms, 5 ms of downtime do not matter, whereas a
/// further pass causes a fault for every page that the guest writes, and makes the migration
/// longer.
const NEGLIGIBLE_OF_LIMIT: f64 = 1.0 / 64.0;

/// Minimum size of a pass, in bytes, for a measurement of the link. In a smaller pass, latency and
/// start-up dominate.
const TELLING_BYTES: u64 = 8 << 20;

/// Share of the bandwidth limit. If passes reach this share, the bandwidth limit may hold them
/// back. Otherwise the link itself is the limit.
const CAP_FELT: f64 = 0.8;

/// Ratio of the pages that a pass leaves to the pages that the previous pass left. In hybrid mode,
/// a pass with a higher ratio is the last one, because the guest dirties pages about as fast as the
/// link sends them.
pub const CONVERGING: f64 = 0.75;

/// Result of one pass, from its first byte until the target's message that all of its pages have
/// arrived.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassOutcome {
    /// Bytes that the pass sent.
    pub bytes: u64,
    /// Duration of the pass.
    pub elapsed: Duration,
    /// Number of dirty pages after the pass.
    pub remaining: u64,
}

/// Decision of the policy after a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Send another pass while the guest runs.
    Continue,
    /// Stop the guest, and send the remaining pages.
    Switch,
}

/// Bandwidth of the link, as measured in passes, with its limits.
#[derive(Debug, Clone)]
pub struct LinkRate {
    /// Bandwidth of the newest pass that was large enough to measure, in bytes per second.
    bandwidth: Option<f64>,
    /// Bandwidth limit of passes, in bytes per second.
    cap: Option<u64>,
    /// Bandwidth limit that applies instead while the guest is paused.
    paused: Option<SwitchoverBandwidth>,
}

impl LinkRate {
    /// Returns the state before the first measurement, with the limits of `settings`.
    pub fn of(settings: &Settings) -> Self {
        Self { bandwidth: None, cap: settings.max_bandwidth, paused: settings.switchover_bandwidth }
    }

    /// Returns the measured bandwidth of the link, in bytes per second.
    pub fn bandwidth(&self) -> Option<f64> {
        self.bandwidth
    }

    /// Returns the bandwidth to expect while the guest is paused, in bytes per second. It is at
    /// most the measured bandwidth, unless the bandwidth limit held the passes back and another
    /// limit applies during the pause.
    pub fn bandwidth_stopped(&self) -> Option<f64> {
        let seen = self.bandwidth?;
        let cap_felt = self.cap.is_some_and(|cap| seen >= cap as f64 * CAP_FELT);
        Some(match self.paused {
            Some(SwitchoverBandwidth::AtMost(rate)) if cap_felt || (rate as f64) < seen => rate as f64,
            _ => seen,
        })
    }

    /// Returns the downtime to expect for sending `remaining` pages, in addition to the `fixed`
    /// costs. `None` before the first measurement.
    pub fn predict(&self, remaining: u64, fixed: Duration) -> Option<Duration> {
        Some(fixed.saturating_add(self.send_time(remaining * PAGE_SIZE)?))
    }

    /// Returns the time for sending `bytes` bytes while the guest is paused. `None` before the
    /// first measurement.
    pub fn send_time(&self, bytes: u64) -> Option<Duration> {
        let seconds = bytes as f64 / self.bandwidth_stopped()?;
        // A value that is not finite, or too large for a `Duration`, stands for an endless time.
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Updates the measurement with a pass, if the pass is large enough or is the first one.
    pub fn learn(&mut self, pass: PassOutcome) {
        let seconds = pass.elapsed.as_secs_f64();
        if seconds > 0.0 && (pass.bytes >= TELLING_BYTES || self.bandwidth.is_none()) {
            self.bandwidth = Some((pass.bytes as f64 / seconds).max(1.0));
        }
    }
}

/// Policy that decides when to stop the guest, and the numbers of pages that the last passes left.
#[derive(Debug, Clone)]
pub struct Convergence {
    limit: Duration,
    /// Number of pages that the last pass left.
    previous: Option<u64>,
    /// Number of pages that the pass before the last one left.
    earlier: Option<u64>,
}

impl Convergence {
    /// Returns the state before the first pass.
    pub fn of(settings: &Settings) -> Self {
        Self { limit: settings.downtime_limit, previous: None, earlier: None }
    }

    /// Forgets the earlier passes, so that the next passes are not compared with them.
    pub fn begin_anew(&mut self) {
        (self.previous, self.earlier) = (None, None);
    }

    /// Decides whether to stop the guest after `pass`. `link` must already contain the measurement
    /// of `pass`. `fixed` is the downtime of a switchover without any page.
    pub fn decide(&mut self, pass: PassOutcome, fixed: Duration, link: &LinkRate) -> Decision {
        let previous = self.previous.replace(pass.remaining);
        let earlier = std::mem::replace(&mut self.earlier, previous);
        let Some(predicted) = link.predict(pass.remaining, fixed) else { return Decision::Continue };
        if predicted > self.limit {
            return Decision::Continue;
        }
        let transfer = predicted.saturating_sub(fixed);
        let shrinks = shrinks(pass.remaining, previous, earlier);
        let negligible = fixed.mul_f64(NEGLIGIBLE_OF_FIXED).max(self.limit.mul_f64(NEGLIGIBLE_OF_LIMIT));
        if transfer <= negligible || !shrinks { Decision::Switch } else { Decision::Continue }
    }
}

/// Returns true if passes that left `earlier`, then `previous`, then `left` pages justify another
/// pass.
///
/// If possible, the comparison spans two passes. The host may disturb a single pass, and a guest
/// near the threshold would then be stopped by chance.
fn shrinks(left: u64, previous: Option<u64>, earlier: Option<u64>) -> bool {
    let (before, share) = match (previous, earlier) {
        (_, Some(earlier)) => (earlier, WORTHWHILE_SHRINK * WORTHWHILE_SHRINK),
        (Some(previous), None) => (previous, WORTHWHILE_SHRINK),
        (None, None) => return true,
    };
    left as f64 <= before as f64 * share
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXED: Duration = Duration::from_millis(4);

    /// Link and the passes over it.
    struct Passes(LinkRate, Convergence);

    impl Passes {
        fn decide(&mut self, pass: PassOutcome, fixed: Duration) -> Decision {
            self.0.learn(pass);
            self.1.decide(pass, fixed, &self.0)
        }
    }

    fn converging(downtime_limit: Duration) -> Passes {
        let settings = Settings { downtime_limit, ..Settings::default() };
        Passes(LinkRate::of(&settings), Convergence::of(&settings))
    }

    #[test]
    fn prediction_uses_the_bandwidth_limit_of_the_switchover() {
        // Measured: 10 MB/s. 1000 pages are left: 410 ms.
        let predicted = |cap, stopped| {
            let settings =
                Settings { max_bandwidth: cap, switchover_bandwidth: stopped, ..Settings::default() };
            let mut link = LinkRate::of(&settings);
            link.learn(PassOutcome { bytes: 10_000_000, elapsed: Duration::from_secs(1), remaining: 1000 });
            (link.predict(1000, FIXED).unwrap() - FIXED).as_millis()
        };
        let at_most = |rate| Some(SwitchoverBandwidth::AtMost(rate));
        assert_eq!(predicted(None, None), 409);
        assert_eq!(predicted(None, at_most(5_000_000)), 819);
        assert_eq!(predicted(None, at_most(20_000_000)), 409, "the link is slower");
        assert_eq!(predicted(Some(10_000_000), at_most(20_000_000)), 204, "the cap was, not the link");
        assert_eq!(predicted(Some(40_000_000), at_most(20_000_000)), 409, "the cap was not felt");
        assert_eq!(predicted(Some(10_000_000), Some(SwitchoverBandwidth::Unlimited)), 409);
    }

    fn pass(bytes: u64, millis: u64, remaining: u64) -> PassOutcome {
        PassOutcome { bytes, elapsed: Duration::from_millis(millis), remaining }
    }

    #[test]
    fn guest_without_dirty_pages_switches_after_one_pass() {
        let mut policy = converging(Duration::from_millis(300));
        assert_eq!(policy.decide(pass(1 << 30, 400, 0), FIXED), Decision::Switch);
    }

    #[test]
    fn passes_continue_while_they_shorten_the_downtime() {
        let mut policy = converging(Duration::from_millis(300));
        // 1 GiB in 400 ms: 100 MB of dirty pages are 37 ms, within the limit, but another pass
        // makes it 4 ms.
        assert_eq!(policy.decide(pass(1 << 30, 400, 25_600), FIXED), Decision::Continue);
        assert_eq!(policy.decide(pass(100 << 20, 40, 4_000), FIXED), Decision::Continue);
        // 1 ms of pages in addition to 4 ms of fixed costs does not justify another pass.
        assert_eq!(policy.decide(pass(16 << 20, 6, 700), FIXED), Decision::Switch);
        // 4 ms of pages do not justify another pass with a limit of 300 ms, whatever the fixed
        // costs are. With a limit of 30 ms they do.
        let fixed = Duration::from_micros(500);
        for (limit, decision) in [(300, Decision::Switch), (30, Decision::Continue)] {
            let mut policy = converging(Duration::from_millis(limit));
            assert_eq!(policy.decide(pass(1 << 30, 400, 2_600), fixed), decision);
        }
    }

    #[test]
    fn guest_whose_passes_no_longer_shrink_switches_once_it_fits() {
        let mut policy = converging(Duration::from_millis(300));
        assert_eq!(policy.decide(pass(1 << 30, 400, 60_000), FIXED), Decision::Continue);
        assert_eq!(policy.decide(pass(240 << 20, 92, 55_000), FIXED), Decision::Switch);
    }

    #[test]
    fn single_disturbed_pass_does_not_stop_a_guest_whose_passes_shrink() {
        let mut policy = converging(Duration::from_millis(300));
        for (bytes, remaining) in [(400 << 20, 30_000), (120 << 20, 18_000), (72 << 20, 14_500)] {
            // 0.6, then 0.81: on average the pages still shrink by more than a quarter in each
            // pass.
            assert_eq!(policy.decide(pass(bytes, bytes >> 18, remaining), FIXED), Decision::Continue);
        }
        assert_eq!(policy.decide(pass(58 << 20, 232, 11_500), FIXED), Decision::Switch, "0.81 and 0.79");
    }

    #[test]
    fn a_guest_that_dirties_faster_than_the_link_is_not_switched() {
        let mut policy = converging(Duration::from_millis(300));
        for _ in 0..100 {
            assert_eq!(policy.decide(pass(1 << 30, 4000, 260_000), FIXED), Decision::Continue);
        }
    }

    #[test]
    fn fixed_costs_count_against_the_limit() {
        let mut policy = converging(Duration::from_millis(10));
        assert_eq!(policy.decide(pass(1 << 30, 400, 0), Duration::from_millis(11)), Decision::Continue);
        assert_eq!(policy.0.predict(0, FIXED), Some(FIXED));
    }

    #[test]
    fn there_is_no_prediction_before_the_first_measurement() {
        assert_eq!(converging(Duration::from_millis(10)).0.predict(1, FIXED), None);
    }
}
