//! Prediction of whether a precopy ends by itself. It is made after each pass, from the number of
//! pages that the pass left.

use serde::Serialize;
use std::fmt;
use std::time::Duration;
use vmferry_core::PAGE_SIZE;

/// Ratio of the pages that a pass leaves to the pages that the previous pass left. A pass with this
/// ratio or a higher one makes no progress.
const HEADWAY: f64 = 0.95;
/// Maximum number of passes that a prediction can state.
const MOST_PASSES: f64 = 1000.0;

/// Prediction for a precopy, after its last pass.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// True if the precopy is expected to end by itself. `None` if the passes so far do not suffice
    /// for a prediction, which can be the case after the first pass.
    pub converging: Option<bool>,
    /// Time in seconds until the guest runs on the target, if nothing changes. `None` unless
    /// `converging` is `Some(true)`.
    pub eta_s: Option<f64>,
    /// Number of passes until then, including the last one, during which the guest is paused.
    /// `None` unless `converging` is `Some(true)`.
    pub passes_left: Option<u32>,
    /// Number of pages that the last pass left, divided by the number that the previous pass left.
    /// Passes shrink if this is below 1. `None` after the first pass.
    pub ratio: Option<f64>,
    /// Changes that would let the precopy end. Empty if none is needed.
    pub help: Vec<Remedy>,
}

/// Change that would let a precopy end by itself. Its text, in which it is also serialized, does
/// not mention command-line options.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Remedy {
    /// A downtime limit of `enough` instead of `now`.
    LongerDowntime {
        /// Downtime limit that suffices.
        enough: Duration,
        /// Current downtime limit.
        now: Duration,
    },
    /// A downtime limit above `stop`, the downtime with nothing to send, instead of `now`.
    DowntimeAboveStop {
        /// Downtime with nothing to send.
        stop: Duration,
        /// Current downtime limit.
        now: Duration,
    },
    /// Less I/O in the guest, or a longer downtime limit, because I/O prevents stopping the guest.
    LessIo,
    /// A new migration with settings that allow postcopy.
    Postcopy,
    /// Going over to postcopy now, which the settings of this migration allow.
    SwitchNow,
    /// Throttling the guest.
    Throttle {
        /// Share of the time for which each vCPU would be stopped, 0 to 1.
        share: f64,
    },
    /// Encoded pages, which need less of the link if they compress or change little.
    Encode,
    /// A faster link.
    Bandwidth {
        /// Bandwidth in bytes per second that suffices.
        enough: f64,
        /// Current bandwidth of the link in bytes per second.
        now: f64,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: Duration| readable_time(time.as_secs_f64());
        match *self {
            Self::LongerDowntime { enough, now } => {
                write!(f, "a downtime limit of {} ({} now)", time(enough), time(now))
            }
            Self::DowntimeAboveStop { stop, now } => write!(
                f,
                "a downtime limit above {}, which stopping the guest takes with nothing to send ({} now)",
                time(stop),
                time(now)
            ),
            Self::LessIo => f.write_str("less I/O in the guest, or a longer downtime limit"),
            Self::Postcopy => {
                f.write_str("postcopy or hybrid mode: the guest moves, and the rest of its memory follows")
            }
            Self::SwitchNow => f.write_str("going over to postcopy at once"),
            Self::Throttle { share } => {
                write!(f, "throttling the guest for about {:.0} % of its time", share * 100.0)
            }
            Self::Encode => f.write_str("encoded pages, if their content compresses or changes little"),
            Self::Bandwidth { enough, now } => {
                write!(f, "a link with more than {} ({} now)", rate(enough), rate(now))
            }
        }
    }
}

impl Serialize for Remedy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Input of the prediction: a pass, the pages that it left, and the limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassState {
    /// Number of pages that the previous pass left. `None` if the last pass was the first.
    pub before: Option<u64>,
    /// Number of pages that the last pass left.
    pub left: u64,
    /// Time that the last pass took.
    pub pass: Duration,
    /// Bandwidth while the guest runs, in bytes per second.
    pub bandwidth: f64,
    /// Bandwidth while the guest is paused, in bytes per second.
    pub bandwidth_stopped: f64,
    /// Downtime with nothing to send.
    pub fixed: Duration,
    /// Downtime limit.
    pub limit: Duration,
    /// True if the guest is throttled already.
    pub throttled: bool,
    /// True if the guest may go over to postcopy.
    pub may_hand_over: bool,
    /// True if pages are encoded already.
    pub encodes: bool,
}

impl PassState {
    /// Returns the largest number of remaining pages with which the downtime is within the limit.
    fn fitting(&self) -> f64 {
        let room = self.limit.saturating_sub(self.fixed).as_secs_f64();
        room * self.bandwidth_stopped / PAGE_SIZE as f64
    }

    pub(super) fn stop_s(&self, pages: f64) -> f64 {
        self.fixed.as_secs_f64() + pages * PAGE_SIZE as f64 / self.bandwidth_stopped.max(1.0)
    }

    /// Returns the bytes per second that the guest dirtied during the pass.
    fn dirty(&self) -> f64 {
        self.left as f64 * PAGE_SIZE as f64 / self.pass.as_secs_f64().max(1e-6)
    }

    /// Returns the share of the time for which the guest would have to be stopped to dirty memory
    /// at half of the bandwidth, 0.02 to 0.97.
    pub(super) fn needed_throttle(&self) -> f64 {
        (1.0 - 0.5 * self.bandwidth / self.dirty().max(1.0)).clamp(0.02, 0.97)
    }

    /// Makes the prediction.
    #[must_use]
    pub fn judge(&self) -> Verdict {
        let (left, fitting) = (self.left as f64, self.fitting());
        if self.fixed > self.limit {
            return Verdict { converging: Some(false), help: self.help(), ..Verdict::default() };
        }
        let ratio = self.before.filter(|before| *before > 0).map(|before| left / before as f64);
        if left <= fitting {
            return Verdict {
                converging: Some(true),
                eta_s: Some(self.stop_s(left)),
                passes_left: Some(1),
                ratio,
                help: Vec::new(),
            };
        }
        let Some(shrink) = ratio else {
            // There was only one pass, over all of memory. The next pass will leave about as many
            // pages as the guest dirties during that pass.
            return self.after_one();
        };
        self.going_on(shrink, Some(shrink))
    }

    fn after_one(&self) -> Verdict {
        let shrink = self.dirty() / self.bandwidth.max(1.0);
        // A long pass finds each page of a working set once, however often the guest wrote the
        // page, so the measured dirty rate may be too low. Therefore a rate below the bandwidth
        // does not show that the passes shrink, and only the opposite case is reported.
        if shrink >= HEADWAY { self.going_on(shrink, None) } else { Verdict::default() }
    }

    fn going_on(&self, shrink: f64, ratio: Option<f64>) -> Verdict {
        let (left, fitting) = (self.left as f64, self.fitting());
        if shrink >= HEADWAY || fitting < 1.0 {
            return Verdict { converging: Some(false), ratio, help: self.help(), ..Verdict::default() };
        }
        let passes = ((fitting / left).ln() / shrink.max(1e-6).ln()).ceil().clamp(1.0, MOST_PASSES);
        // The next passes send left * (1 + shrink + ...) pages in total, and then the guest is
        // stopped.
        let pages = left * (1.0 - shrink.powf(passes)) / (1.0 - shrink);
        let eta =
            pages * PAGE_SIZE as f64 / self.bandwidth.max(1.0) + self.stop_s(left * shrink.powf(passes));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped just above")]
        let passes_left = Some(passes as u32 + 1);
        Verdict { converging: Some(true), eta_s: Some(eta), passes_left, ratio, help: Vec::new() }
    }

    /// Returns the changes that would let the precopy end by itself.
    #[must_use]
    pub fn help(&self) -> Vec<Remedy> {
        let now = self.limit;
        if self.fixed > self.limit {
            return vec![Remedy::DowntimeAboveStop { stop: self.fixed, now }];
        }
        let (stop, dirty) = (self.stop_s(self.left as f64), self.dirty());
        let enough = Duration::try_from_secs_f64(stop * 1.1).unwrap_or(Duration::MAX);
        let mut help = vec![Remedy::LongerDowntime { enough, now }];
        help.push(if self.may_hand_over { Remedy::SwitchNow } else { Remedy::Postcopy });
        if !self.throttled {
            help.push(Remedy::Throttle { share: self.needed_throttle() });
        }
        if dirty >= self.bandwidth * HEADWAY {
            if !self.encodes {
                help.push(Remedy::Encode);
            }
            help.push(Remedy::Bandwidth { enough: dirty * 1.1, now: self.bandwidth });
        }
        help
    }
}

/// Returns the remedies as one text, separated by semicolons.
pub(crate) fn listed(help: &[Remedy]) -> String {
    let help: Vec<_> = help.iter().map(Remedy::to_string).collect();
    help.join("; ")
}

/// Returns a text for a time in seconds: `300 ms`, `1.5 s` or `12 s`.
#[must_use]
pub fn readable_time(seconds: f64) -> String {
    if seconds >= 10.0 {
        format!("{seconds:.0} s")
    } else if seconds >= 1.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{:.0} ms", (seconds * 1e3).max(1.0))
    }
}

/// Returns a text in MB/s for a bandwidth in bytes per second.
pub(crate) fn rate(bytes: f64) -> String {
    format!("{:.0} MB/s", bytes / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDING: PassState = PassState {
        before: Some(100_000),
        left: 50_000,
        pass: Duration::from_secs(4),
        bandwidth: 100e6,
        bandwidth_stopped: 100e6,
        fixed: Duration::from_millis(5),
        limit: Duration::from_millis(300),
        throttled: false,
        may_hand_over: false,
        encodes: false,
    };

    #[test]
    fn halving_passes_converge_with_an_estimate() {
        let verdict = STANDING.judge();
        assert_eq!((verdict.converging, verdict.ratio), (Some(true), Some(0.5)));
        // 7200 pages fit: 50000, 25000, 12500, 6250.
        assert_eq!(verdict.passes_left, Some(4));
        let eta = 87_500.0 * 4096.0 / 100e6 + 0.005 + 6250.0 * 4096.0 / 100e6;
        assert!((verdict.eta_s.unwrap() - eta).abs() < 1e-6, "{verdict:?}");
        assert!(verdict.help.is_empty());
    }

    #[test]
    fn pages_that_fit_the_limit_converge_at_once() {
        let verdict = PassState { left: 100, before: None, ..STANDING }.judge();
        assert_eq!((verdict.converging, verdict.passes_left), (Some(true), Some(1)));
    }

    #[test]
    fn passes_that_do_not_shrink_list_remedies() {
        let verdict = PassState { left: 98_000, ..STANDING }.judge();
        assert_eq!((verdict.converging, verdict.eta_s), (Some(false), None));
        let text = listed(&verdict.help);
        for word in [
            "downtime limit of 4.4 s",
            "postcopy",
            "throttling the guest",
            "encoded pages",
            "more than 110 MB/s",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let throttled = PassState { left: 98_000, throttled: true, ..STANDING }.judge();
        assert!(!throttled.help.iter().any(|remedy| matches!(remedy, Remedy::Throttle { .. })));
        let encoded = PassState { left: 98_000, encodes: true, ..STANDING }.judge();
        assert!(!encoded.help.contains(&Remedy::Encode), "{encoded:?}");
        let help = PassState { left: 98_000, may_hand_over: true, ..STANDING }.judge().help;
        assert!(help.contains(&Remedy::SwitchNow) && !help.contains(&Remedy::Postcopy), "{help:?}");
    }

    #[test]
    fn single_pass_predicts_only_clear_cases() {
        let first = PassState { before: None, ..STANDING };
        assert_eq!(first.judge().converging, None);
        assert_eq!(PassState { left: 120_000, ..first }.judge().converging, Some(false));
    }

    #[test]
    fn a_pause_beyond_the_limit_never_fits() {
        let verdict = PassState { left: 0, fixed: Duration::from_secs(1), ..STANDING }.judge();
        assert_eq!(verdict.converging, Some(false));
        let (stop, now) = (Duration::from_secs(1), STANDING.limit);
        assert_eq!(verdict.help, [Remedy::DowntimeAboveStop { stop, now }]);
    }
}
