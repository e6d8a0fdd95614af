//! Whether a precopy that is under way will end by itself: judged after each pass, from what it left.

use serde::Serialize;
use std::time::Duration;
use vmferry_core::PAGE_SIZE;

/// A pass that leaves more than this share of what the pass before left makes no headway worth the name.
const HEADWAY: f64 = 0.95;
/// Most passes that are counted on; beyond, nobody knows.
const MOST_PASSES: f64 = 1000.0;

/// What is to be expected of the precopy under way, as of its last pass.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// Whether it will end by itself; `None` while one pass alone tells nothing.
    pub converging: Option<bool>,
    /// Seconds until the guest runs on the target, if it goes on like this.
    pub eta_s: Option<f64>,
    /// Passes until then, the last one with the guest stopped included.
    pub passes_left: Option<u32>,
    /// Pages that this pass left, by those that the pass before left: below 1 it shrinks.
    pub ratio: Option<f64>,
    /// What would help, one a line; empty if nothing is needed.
    pub help: Vec<String>,
}

/// What the judgement is made of: a pass, what it left, and what is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    /// Pages left by the pass before the last, if there was one.
    pub before: Option<u64>,
    /// Pages left by the last.
    pub left: u64,
    /// How long the last took.
    pub pass: Duration,
    /// Bytes a second that the link carries while the guest runs.
    pub bandwidth: f64,
    /// The same once it is stopped.
    pub bandwidth_stopped: f64,
    /// What stopping costs with nothing to send.
    pub fixed: Duration,
    /// How long the guest may be stopped.
    pub limit: Duration,
    /// Whether the guest is slowed already.
    pub throttled: bool,
    /// Whether it may go over to postcopy.
    pub lazy: bool,
}

impl Standing {
    /// Pages that may be left for the downtime to fit.
    fn fitting(&self) -> f64 {
        let room = self.limit.saturating_sub(self.fixed).as_secs_f64();
        room * self.bandwidth_stopped / PAGE_SIZE as f64
    }

    fn stop_s(&self, pages: f64) -> f64 {
        self.fixed.as_secs_f64() + pages * PAGE_SIZE as f64 / self.bandwidth_stopped.max(1.0)
    }

    /// Judges it.
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
            // One pass over all of memory and what it left: the next pass over that leaves about as much as is dirtied in
            // its time.
            return self.after_one();
        };
        self.going_on(shrink, Some(shrink))
    }

    fn after_one(&self) -> Verdict {
        let dirty = self.left as f64 / self.pass.as_secs_f64().max(1e-6);
        let shrink = dirty * PAGE_SIZE as f64 / self.bandwidth.max(1.0);
        // A long pass sees a working set once, however often it was written: a rate below the link's says that it shrinks
        // only where the set does not saturate, so only what is clear is said.
        if shrink >= HEADWAY { self.going_on(shrink, None) } else { Verdict::default() }
    }

    fn going_on(&self, shrink: f64, ratio: Option<f64>) -> Verdict {
        let (left, fitting) = (self.left as f64, self.fitting());
        if shrink >= HEADWAY || fitting < 1.0 {
            return Verdict { converging: Some(false), ratio, help: self.help(), ..Verdict::default() };
        }
        let passes = ((fitting / left).ln() / shrink.max(1e-6).ln()).ceil().clamp(1.0, MOST_PASSES);
        // The passes to come take left * (1 + shrink + ...) pages' time, and then the guest is stopped.
        let pages = left * (1.0 - shrink.powf(passes)) / (1.0 - shrink);
        let eta =
            pages * PAGE_SIZE as f64 / self.bandwidth.max(1.0) + self.stop_s(left * shrink.powf(passes));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped just above")]
        let passes_left = Some(passes as u32 + 1);
        Verdict { converging: Some(true), eta_s: Some(eta), passes_left, ratio, help: Vec::new() }
    }

    /// What would make it end, with figures.
    #[must_use]
    pub fn help(&self) -> Vec<String> {
        let pages = self.left as f64;
        let needed = self.stop_s(pages);
        let mut help = Vec::new();
        if self.fixed > self.limit {
            let (fixed, limit) = (ms(self.fixed.as_secs_f64()), ms(self.limit.as_secs_f64()));
            help.push(format!("stopping the guest takes {fixed} with nothing to send: a --downtime-limit above that ({limit} now)"));
            return help;
        }
        let dirty = pages * PAGE_SIZE as f64 / self.pass.as_secs_f64().max(1e-6);
        help.push(format!(
            "a --downtime-limit of {} ({} now)",
            ms(needed * 1.1),
            ms(self.limit.as_secs_f64())
        ));
        help.push(if self.lazy {
            "`vmferry switch`: it goes over to postcopy at once".to_owned()
        } else {
            "--mode postcopy or hybrid: the guest moves, and the rest follows".to_owned()
        });
        if !self.throttled {
            help.push(format!(
                "--auto-converge: the guest held for about {:.0} % of its time",
                100.0 * (1.0 - 0.5 * self.bandwidth / dirty.max(1.0)).clamp(0.02, 0.97)
            ));
        }
        if dirty >= self.bandwidth * HEADWAY {
            help.push(format!(
                "a link that carries more than {} ({} now)",
                rate(dirty * 1.1),
                rate(self.bandwidth)
            ));
        }
        help
    }
}

/// A time for people.
pub(crate) fn ms(seconds: f64) -> String {
    if seconds >= 10.0 {
        format!("{seconds:.0} s")
    } else if seconds >= 1.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{:.0} ms", (seconds * 1e3).max(1.0))
    }
}

/// Bytes a second for people.
pub(crate) fn rate(bytes: f64) -> String {
    format!("{:.0} MB/s", bytes / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDING: Standing = Standing {
        before: Some(100_000),
        left: 50_000,
        pass: Duration::from_secs(4),
        bandwidth: 100e6,
        bandwidth_stopped: 100e6,
        fixed: Duration::from_millis(5),
        limit: Duration::from_millis(300),
        throttled: false,
        lazy: false,
    };

    #[test]
    fn what_halves_ends_and_says_when() {
        let verdict = STANDING.judge();
        assert_eq!((verdict.converging, verdict.ratio), (Some(true), Some(0.5)));
        // 7200 pages fit: 50000, 25000, 12500, 6250.
        assert_eq!(verdict.passes_left, Some(4));
        let eta = 87_500.0 * 4096.0 / 100e6 + 0.005 + 6250.0 * 4096.0 / 100e6;
        assert!((verdict.eta_s.unwrap() - eta).abs() < 1e-6, "{verdict:?}");
        assert!(verdict.help.is_empty());
    }

    #[test]
    fn what_fits_is_as_good_as_done() {
        let verdict = Standing { left: 100, before: None, ..STANDING }.judge();
        assert_eq!((verdict.converging, verdict.passes_left), (Some(true), Some(1)));
    }

    #[test]
    fn what_does_not_shrink_says_what_would_help() {
        let verdict = Standing { left: 98_000, ..STANDING }.judge();
        assert_eq!((verdict.converging, verdict.eta_s), (Some(false), None));
        let text = verdict.help.join("; ");
        for word in ["downtime-limit of 4.4 s", "postcopy", "auto-converge", "more than 110 MB/s"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let throttled = Standing { left: 98_000, throttled: true, ..STANDING }.judge();
        assert!(!throttled.help.join("; ").contains("auto-converge"));
        let lazy = Standing { left: 98_000, lazy: true, ..STANDING }.judge().help.join("; ");
        assert!(lazy.contains("vmferry switch") && !lazy.contains("--mode"), "{lazy}");
    }

    #[test]
    fn one_pass_tells_only_what_is_clear() {
        let first = Standing { before: None, ..STANDING };
        assert_eq!(first.judge().converging, None);
        assert_eq!(Standing { left: 120_000, ..first }.judge().converging, Some(false));
    }

    #[test]
    fn a_pause_beyond_the_limit_never_fits() {
        let verdict = Standing { left: 0, fixed: Duration::from_secs(1), ..STANDING }.judge();
        assert_eq!(verdict.converging, Some(false));
        assert!(verdict.help[0].contains("1.0 s"), "{:?}", verdict.help);
    }
}
