//! Speed of this machine, and time limits that follow from it.
//!
//! An emulated machine is only as fast as its host allows: it is often four times slower on a busy
//! host. Therefore every time limit of the lab is given for a reference machine and multiplied by
//! the pace, the factor by which this machine is slower. A process of the lab measures the pace
//! when it starts, before every scenario, and again whenever a time limit seems to have passed.
//! While a guest is moved, the pace is measured all the time ([`Watch`]), because a gap that the
//! guest saw is judged later, when the host may be idle again.

use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Processor time of [`work`] in the emulated machine on an idle host (2 cores of 2026, QEMU
/// 11.1.3).
const REFERENCE: Duration = Duration::from_millis(48);
/// Largest pace. A slower host makes no progress, and limits must end.
const SLOWEST: f64 = 30.0;
/// Steps of [`work`].
const STEPS: u32 = 20_000_000;
/// Rounds of [`work`] in a measurement. At first a host gives a machine that was idle more than its
/// share, so a short measurement would find the machine faster than it is.
const ROUNDS: u32 = 3;
/// Rounds of [`work`] in the measurement before a failure.
const ROUNDS_TO_BE_SURE: u32 = 12;
/// Interval of the measurements of a [`Watch`]. A round takes 48 ms of a reference machine, so the
/// watch costs 2 %.
const WATCH_EVERY: Duration = Duration::from_secs(2);
/// Bits of the pace of this process. Zero until the pace is known.
static PACE: AtomicU64 = AtomicU64::new(0);

/// Measures the pace, and stores it as the pace of this process.
pub fn calibrate() -> f64 {
    let pace = measure(ROUNDS);
    keep(pace);
    pace
}

/// Stores a pace that another process of this machine has measured.
pub fn keep(pace: f64) {
    PACE.store(clamped(pace).to_bits(), Ordering::Relaxed);
}

/// Returns the pace of this process. It is 1 on the reference machine and on any faster one.
#[must_use]
pub fn current() -> f64 {
    match PACE.load(Ordering::Relaxed) {
        0 => calibrate(),
        bits => f64::from_bits(bits),
    }
}

/// Converts a time limit of the reference machine to this machine.
#[must_use]
pub fn stretched(limit: Duration) -> Duration {
    limit.mul_f64(current())
}

/// Returns the value of vmferry's `--peer-timeout`: its default of 10 s at the pace of this
/// machine.
#[must_use]
pub fn peer_timeout() -> String {
    format!("{}ms", stretched(Duration::from_secs(10)).as_millis())
}

/// Returns whether `took` is longer than `limit` at the pace of this machine.
///
/// Before the answer is `true`, the pace is measured again with more rounds, because the host may
/// have become busy.
#[must_use]
pub fn exceeds(took: Duration, limit: Duration) -> bool {
    let (exceeds, pace) = judge(took, limit, current(), || measure(ROUNDS_TO_BE_SURE));
    keep(pace);
    exceeds
}

/// Returns the answer of [`exceeds`] and the pace on which it is based: `pace`, or a larger one
/// that is measured now.
fn judge(took: Duration, limit: Duration, pace: f64, measure: impl FnOnce() -> f64) -> (bool, f64) {
    if took < limit.mul_f64(pace) {
        return (false, pace);
    }
    let pace = pace.max(measure());
    (took >= limit.mul_f64(pace), pace)
}

/// Measures the pace by the processor time of this thread, so that other work in this machine does
/// not count.
///
/// Other work of the host counts, because an emulated machine includes the time in which its host
/// did not run it.
fn measure(rounds: u32) -> f64 {
    let before = cpu_time();
    for _ in 0..rounds {
        black_box(work(black_box(STEPS)));
    }
    let took = cpu_time().saturating_sub(before);
    clamped(took.as_secs_f64() / (REFERENCE * rounds).as_secs_f64())
}

/// Limits a pace to at least that of the reference machine and at most the largest one.
fn clamped(pace: f64) -> f64 {
    pace.clamp(1.0, SLOWEST)
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// Runs arithmetic on a few pages of memory, without a system call (SplitMix64).
fn work(steps: u32) -> u64 {
    let mut table = [0_u64; 4096];
    let mut state = 1_u64;
    for _ in 0..steps {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let slot = &mut table[(mixed >> 52) as usize];
        *slot = slot.wrapping_add(mixed);
    }
    table.iter().fold(state, |sum, slot| sum ^ slot)
}

/// Thread that measures the pace at intervals until this value is dropped. A pace that is larger
/// than the known one becomes the pace of this process.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot start a thread.
    pub fn start() -> std::io::Result<Self> {
        let over = Arc::<AtomicBool>::default();
        let ended = Arc::clone(&over);
        let watch = move || {
            while !ended.load(Ordering::Acquire) {
                keep(current().max(measure(1)));
                std::thread::park_timeout(WATCH_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("pace".into()).spawn(watch)?;
        Ok(Self { over, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Time limit that is multiplied by the pace.
#[derive(Debug)]
pub struct Limit {
    began: Instant,
    limit: Duration,
}

impl Limit {
    /// Starts a time limit that is `limit` on the reference machine.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { began: Instant::now(), limit }
    }

    /// Returns whether the limit has passed, see [`exceeds`].
    #[must_use]
    pub fn is_over(&self) -> bool {
        exceeds(self.began.elapsed(), self.limit)
    }

    /// Returns the limit with its pace as text for a message.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{:.0} s (pace {:.1})", stretched(self.limit).as_secs_f64(), current())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_is_limited_to_that_of_the_reference_machine_and_the_largest_one() {
        assert_eq!([0.2, 1.0, 2.5, 1e9].map(clamped), [1.0, 1.0, 2.5, SLOWEST]);
    }

    #[test]
    fn watch_measures_and_ends() {
        let watch = Watch::start().unwrap();
        while PACE.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        drop(watch);
        assert!((1.0..=SLOWEST).contains(&current()));
    }

    #[test]
    fn limit_is_over_only_at_the_pace_that_is_measured_then() {
        let seconds = Duration::from_secs;
        let at = |took: u64, pace: f64, measured: f64| judge(seconds(took), seconds(10), pace, || measured);
        assert_eq!(at(11, 1.0, 1.0), (true, 1.0));
        assert_eq!(at(25, 1.0, 4.0), (false, 4.0), "the host has become busy");
        assert_eq!(at(41, 1.0, 4.0), (true, 4.0));
        assert_eq!(at(25, 2.0, 1.0), (true, 2.0), "a known pace is not reduced");
        let unasked = || -> f64 { panic!("a limit that is not reached needs no measurement") };
        assert_eq!(judge(seconds(25), seconds(10), 3.0, unasked), (false, 3.0));
    }
}
