//! Squeeze of a guest before its migration: the balloon takes memory that the guest can spare, so
//! that the guest drops page cache, which then need not be sent.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};
use vmferry_vmm::{BalloonHandle, MIN_MEMORY};

/// Longest duration of a squeeze.
const LONGEST: Duration = Duration::from_secs(10);
/// Longest time without new statistics. The guest is asked for them every second by default.
const SILENCE: Duration = Duration::from_secs(3);
/// Interval at which the balloon's status is read.
const POLL: Duration = Duration::from_millis(50);
/// Divisor of the guest's memory for the memory that must stay available in the guest.
const RESERVE: u64 = 16;
/// Smallest reserve in bytes, for small guests.
const LEAST_RESERVE: u64 = 32 << 20;
/// Divisor of the guest's memory for the smallest step. A smaller step costs a second for little.
const STEP: u64 = 256;
/// Targets are multiples of this number of bytes.
const GRAIN: u64 = 1 << 20;

/// Memory that a squeeze takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SqueezeArg {
    /// All memory that the guest can spare.
    Auto,
    /// This number of bytes.
    AtMost(u64),
}

impl FromStr for SqueezeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => match crate::args::size(text)? {
                0 => Err("a squeeze of 0 bytes has no effect; write a size, or auto".into()),
                bytes => Ok(Self::AtMost(bytes)),
            },
        }
    }
}

/// Reason for the end of a squeeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum EndedBy {
    Reserve,
    Size,
    Time,
    /// The guest was short of memory, and got all of it back.
    Guest,
    NoStatistics,
    NoBalloon,
    Cancel,
}

/// Input of a decision: sizes in bytes.
#[derive(Debug, Clone, Copy)]
struct Sample {
    memory: u64,
    /// Lowest target that the request permits.
    lowest: u64,
    target: u64,
    /// Memory that the guest has at present.
    actual: u64,
    /// Memory that the guest can use without paging.
    available: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    /// Set this target.
    Lower(u64),
    /// The guest still follows the last target.
    Wait,
    End(EndedBy),
}

/// Returns the next step.
fn decide(sample: Sample) -> Decision {
    let Sample { memory, lowest, target, actual, available } = sample;
    let reserve = (memory / RESERVE).max(LEAST_RESERVE);
    if available < reserve / 2 {
        return Decision::End(EndedBy::Guest);
    }
    if target <= lowest {
        return if actual > target { Decision::Wait } else { Decision::End(EndedBy::Size) };
    }
    // The memory that the guest has yet to give is still counted as available. Only half of the
    // rest is taken, because the guest's need may have grown since its report.
    let spare = available.saturating_sub(reserve).saturating_sub(actual.saturating_sub(target)) / 2;
    let next = target.saturating_sub(spare).next_multiple_of(GRAIN).max(lowest);
    if next.saturating_add((memory / STEP).max(GRAIN)) <= target || (next == lowest && next < target) {
        Decision::Lower(next)
    } else if actual > target {
        Decision::Wait
    } else {
        Decision::End(EndedBy::Reserve)
    }
}

/// Squeeze of a guest. Dropping the value ends the squeeze, unless the pause of the guest has ended
/// it already.
#[derive(Debug)]
pub(crate) struct Squeeze {
    balloon: Option<BalloonHandle>,
    taken: u64,
    took: Duration,
    ended_by: EndedBy,
}

impl Squeeze {
    /// Takes memory from the guest until a limit is reached. A guest that cannot be squeezed is
    /// migrated as it is.
    pub(crate) fn perform(
        balloon: Option<BalloonHandle>,
        arg: SqueezeArg,
        cancelled: &dyn Fn() -> bool,
    ) -> Self {
        let began = Instant::now();
        let (taken, ended_by) = match &balloon {
            None => (0, EndedBy::NoBalloon),
            Some(balloon) => {
                let before = balloon.status().actual;
                let ended_by = take(balloon, arg, cancelled);
                if ended_by == EndedBy::Guest {
                    balloon.end_squeeze();
                }
                (before.saturating_sub(balloon.status().actual), ended_by)
            }
        };
        let took = began.elapsed();
        tracing::info!(taken, ?took, ?ended_by, "the guest was squeezed");
        Self { balloon, taken, took, ended_by }
    }

    /// Returns the figures as JSON.
    pub(crate) fn document(&self) -> Value {
        let ms = self.took.as_secs_f64() * 1e3;
        json!({ "taken_bytes": self.taken, "ms": ms, "ended_by": self.ended_by })
    }
}

impl Drop for Squeeze {
    fn drop(&mut self) {
        if let Some(balloon) = &self.balloon {
            balloon.end_squeeze();
        }
    }
}

/// Lowers the target step by step, each time after new statistics of the guest.
fn take(balloon: &BalloonHandle, arg: SqueezeArg, cancelled: &dyn Fn() -> bool) -> EndedBy {
    let (began, first) = (Instant::now(), balloon.status());
    let least = match arg {
        SqueezeArg::Auto => MIN_MEMORY,
        SqueezeArg::AtMost(bytes) => first.target.saturating_sub(bytes).max(MIN_MEMORY),
    };
    let (mut seen, mut heard): (Option<SystemTime>, Instant) = (first.stats_at, began);
    loop {
        if cancelled() {
            return EndedBy::Cancel;
        }
        if began.elapsed() >= LONGEST {
            return EndedBy::Time;
        }
        let status = balloon.status();
        let available = status.stats.get("available").or(status.stats.get("free"));
        let (Some(available), true) = (available, status.stats_at > seen) else {
            if heard.elapsed() >= SILENCE {
                return EndedBy::NoStatistics;
            }
            std::thread::sleep(POLL);
            continue;
        };
        (seen, heard) = (status.stats_at, Instant::now());
        let sample = Sample {
            memory: status.memory,
            lowest: least,
            target: status.target,
            actual: status.actual,
            available,
        };
        match decide(sample) {
            Decision::Lower(target) => balloon.squeeze(target),
            Decision::Wait => {}
            Decision::End(ended_by) => return ended_by,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn sample(target: u64, available: u64) -> Sample {
        Sample { memory: 4 * GIB, lowest: MIN_MEMORY, target, actual: target, available }
    }

    #[test]
    fn each_step_takes_half_of_what_the_guest_can_spare() {
        // The reserve of a guest of 4 GiB is 256 MiB.
        assert_eq!(decide(sample(4 * GIB, 2 * GIB + GIB / 4)), Decision::Lower(3 * GIB));
        assert_eq!(decide(sample(2 * GIB, GIB / 4)), Decision::End(EndedBy::Reserve));
        assert_eq!(decide(sample(2 * GIB, GIB / 4 + (8 << 20))), Decision::End(EndedBy::Reserve));
        assert_eq!(decide(sample(2 * GIB, GIB / 8 - 1)), Decision::End(EndedBy::Guest));
    }

    #[test]
    fn memory_that_the_guest_has_yet_to_give_is_not_counted_twice() {
        let follows = Sample { actual: 4 * GIB, ..sample(3 * GIB, 2 * GIB + GIB / 4) };
        assert_eq!(decide(follows), Decision::Lower(3 * GIB - GIB / 2));
        let behind = Sample { actual: 4 * GIB, ..sample(3 * GIB, GIB + GIB / 4) };
        assert_eq!(decide(behind), Decision::Wait);
    }

    #[test]
    fn squeeze_takes_no_more_than_the_requested_size() {
        let at = |target| decide(Sample { lowest: 4 * GIB - GIB / 8, ..sample(target, 2 * GIB) });
        assert_eq!(at(4 * GIB), Decision::Lower(4 * GIB - GIB / 8));
        assert_eq!(at(4 * GIB - GIB / 8), Decision::End(EndedBy::Size));
    }

    /// A guest that uses `used` bytes and whose other memory is cache or free.
    #[test]
    fn steps_end_and_leave_the_guest_its_reserve() {
        for (memory, used) in [(4 * GIB, GIB), (96 << 20, 20 << 20), (64 * GIB, 60 * GIB)] {
            let mut target = memory;
            let steps = (0..).map_while(|_| {
                let available = target.saturating_sub(used);
                match decide(Sample { memory, lowest: MIN_MEMORY, target, actual: target, available }) {
                    Decision::Lower(next) => {
                        assert!(next < target);
                        target = next;
                        Some(())
                    }
                    ended => {
                        assert_eq!(ended, Decision::End(EndedBy::Reserve));
                        None
                    }
                }
            });
            assert!(steps.count() <= 10, "{memory}");
            let reserve = (memory / RESERVE).max(LEAST_RESERVE);
            assert!(target >= used + reserve, "{memory}: {target}");
        }
    }

    #[test]
    fn squeeze_is_a_size_or_auto_on_the_command_line_and_in_json() {
        for (text, arg) in [("auto", SqueezeArg::Auto), ("2G", SqueezeArg::AtMost(2 * GIB))] {
            assert_eq!(text.parse(), Ok(arg));
            let json = serde_json::to_value(arg).unwrap();
            assert_eq!(serde_json::from_value::<SqueezeArg>(json).unwrap(), arg);
        }
        for text in ["", "0", "all", "-1"] {
            assert!(text.parse::<SqueezeArg>().is_err(), "{text}");
        }
    }
}
