//! Processors that are left for threads that populate memory.

use crate::clock::Clock;
use crate::idle::{INTERVAL, IdleCores};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Calls that are shorter are not examined for waiting. A thread that is woken on another processor
/// may wait for tens of microseconds on any host.
const SHORT: Duration = Duration::from_millis(1);

/// Source of the number of processors that no other thread uses.
pub(super) trait Processors {
    /// Returns the number of threads that may populate memory at the moment, without taking a
    /// processor from another thread.
    fn spare(&self) -> usize;

    /// Notes that a thread has populated memory for the duration `elapsed`, and has used the
    /// processor time `cpu`.
    fn used(&self, elapsed: Duration, cpu: Duration);
}

/// Meter of the processors of this host.
///
/// Populating memory on a busy host would slow the receivers, which share the processors with all
/// threads. Two figures show that a host is busy: it has no idle processors, or the threads that
/// populate memory wait for a processor. The second figure also covers a process that may use only
/// some of the processors.
#[derive(Debug)]
pub(super) struct Spare {
    idle: IdleCores,
    clock: Clock,
    last: Mutex<Last>,
}

/// Last interval.
#[derive(Debug, Default)]
struct Last {
    /// Begin of the current interval. `None` before the first one.
    began: Option<Duration>,
    /// Processor time that threads have populated memory for in the current interval.
    own: Duration,
    /// Number of threads that may populate memory, according to the last interval.
    threads: usize,
}

impl Spare {
    /// Returns a meter. The calling thread must be allowed to open files.
    pub(super) fn open() -> Self {
        Self { idle: IdleCores::open(), clock: Clock::start(), last: Mutex::default() }
    }
}

impl Processors for Spare {
    /// Returns 0 in the first interval, which begins with the first call of this function.
    fn spare(&self) -> usize {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        let elapsed = last.began.map(|began| now.saturating_sub(began));
        if elapsed.is_none_or(|elapsed| elapsed >= INTERVAL) {
            let idle = self.idle.now(now);
            let threads = elapsed.map_or(0, |elapsed| threads(idle, last.own, elapsed));
            *last = Last { began: Some(now), own: Duration::ZERO, threads };
        }
        last.threads
    }

    fn used(&self, elapsed: Duration, cpu: Duration) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.own += cpu;
        if elapsed > SHORT && cpu < elapsed / 2 {
            last.threads = 0;
        }
    }
}

/// Returns the number of processors that were left in an interval of length `elapsed`: `idle`
/// processors, and those on which threads populated memory for `own`. A processor that was busy for
/// up to a quarter of the interval counts.
fn threads(idle: f64, own: Duration, elapsed: Duration) -> usize {
    const MARGIN: f64 = 0.25;
    let spare = idle + own.as_secs_f64() / elapsed.as_secs_f64();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and small")]
    let whole = (spare + MARGIN) as usize;
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn threads_use_idle_processors_and_those_that_they_already_use() {
        assert_eq!(threads(0.0, Duration::ZERO, 100 * MS), 0);
        assert_eq!(threads(0.7, Duration::ZERO, 100 * MS), 0);
        assert_eq!(threads(0.8, Duration::ZERO, 100 * MS), 1);
        assert_eq!(threads(7.9, Duration::ZERO, 100 * MS), 8);
        // Two threads ran all the time, and one processor was idle.
        assert_eq!(threads(1.0, 200 * MS, 100 * MS), 3);
        // The scheduler gives a nice thread a tenth of a busy processor.
        assert_eq!(threads(0.0, 10 * MS, 100 * MS), 0);
    }

    #[test]
    fn nothing_is_spare_before_the_end_of_the_first_interval() {
        let spare = Spare::open();
        assert_eq!(spare.spare(), 0);
        std::thread::sleep(INTERVAL);
        let processors = std::fs::read_to_string("/proc/stat").unwrap().matches("\ncpu").count();
        assert!(spare.spare() <= processors + processors / 4 + 1);
    }

    #[test]
    fn processors_are_not_spare_while_a_thread_waits_for_one() {
        let spare = Spare::open();
        *spare.last.lock().unwrap() = Last { began: Some(Duration::ZERO), own: Duration::ZERO, threads: 4 };
        spare.used(2 * MS, 2 * MS);
        spare.used(MS / 2, MS / 10);
        assert_eq!(spare.last.lock().unwrap().threads, 4);
        spare.used(4 * MS, MS);
        let last = spare.last.lock().unwrap();
        assert_eq!((last.threads, last.own), (0, 3 * MS + MS / 10));
    }

    #[test]
    fn meter_without_a_file_finds_no_spare_processor() {
        let spare = Spare { idle: IdleCores::default(), clock: Clock::start(), last: Mutex::default() };
        spare.spare();
        std::thread::sleep(INTERVAL);
        assert_eq!(spare.spare(), 0);
    }
}
