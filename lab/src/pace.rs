//! The speed of this machine, and time limits that follow from it.
//!
//! An emulated machine is as fast as its host has time for it: four times slower on a busy host is
//! usual. So every time limit of the lab is given for a reference machine and stretched by the
//! pace: the factor by which this machine is slower. The pace is measured when a process of the lab
//! starts, before every scenario, and again whenever a time limit seems to be over. While a guest is
//! moved it is measured all the time ([`Watch`]): a gap that the guest saw is judged when the host may
//! have time again.

use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Processor time that [`work`] takes in the emulated machine on an idle host (2 cores of 2026,
/// QEMU 11.1.3).
const REFERENCE: Duration = Duration::from_millis(48);
/// A host that is slower than that does not get on: the limits end somewhere.
const SLOWEST: f64 = 30.0;
/// Steps of [`work`].
const STEPS: u32 = 20_000_000;
/// Rounds of [`work`] for a pace. A host gives a machine that was idle more than its share at
/// first, so that a short measurement finds it faster than it is.
const ROUNDS: u32 = 3;
/// The same before something fails.
const ROUNDS_TO_BE_SURE: u32 = 12;
/// How often a [`Watch`] measures. A round takes 48 ms of a reference machine, so this costs 2 %.
const WATCH_EVERY: Duration = Duration::from_secs(2);
/// Bits of the pace of this process; zero until it is known.
static PACE: AtomicU64 = AtomicU64::new(0);

/// Measures the pace, and keeps it as the pace of this process.
pub fn calibrate() -> f64 {
    let pace = measure(ROUNDS);
    keep(pace);
    pace
}

/// Takes over the pace that another process of this machine has measured.
pub fn keep(pace: f64) {
    PACE.store(clamped(pace).to_bits(), Ordering::Relaxed);
}

/// Returns the pace of this process: 1 on the reference machine and on any faster one.
#[must_use]
pub fn current() -> f64 {
    match PACE.load(Ordering::Relaxed) {
        0 => calibrate(),
        bits => f64::from_bits(bits),
    }
}

/// Returns a time limit of the reference machine as one of this machine.
#[must_use]
pub fn stretched(limit: Duration) -> Duration {
    limit.mul_f64(current())
}

/// Returns the value of vmferry's `--peer-timeout`: its default of 10 s at the pace of this machine.
#[must_use]
pub fn peer_timeout() -> String {
    format!("{}ms", stretched(Duration::from_secs(10)).as_millis())
}

/// Whether something `took` longer than `limit` at the pace of this machine. Before the answer is
/// yes, the pace is measured again, for longer: the host may have become busy.
#[must_use]
pub fn exceeds(took: Duration, limit: Duration) -> bool {
    let (exceeds, pace) = judge(took, limit, current(), || measure(ROUNDS_TO_BE_SURE));
    keep(pace);
    exceeds
}

/// The answer of [`exceeds`] and the pace that it rests on: `pace`, or a slower one that is
/// measured now.
fn judge(took: Duration, limit: Duration, pace: f64, measure: impl FnOnce() -> f64) -> (bool, f64) {
    if took < limit.mul_f64(pace) {
        return (false, pace);
    }
    let pace = pace.max(measure());
    (took >= limit.mul_f64(pace), pace)
}

/// Measures the pace: by the processor time of this thread, so that other work in this machine does
/// not count. What the host does meanwhile counts: an emulated machine takes the time for which its
/// host let it wait for its own.
fn measure(rounds: u32) -> f64 {
    let before = cpu_time();
    for _ in 0..rounds {
        black_box(work(black_box(STEPS)));
    }
    let took = cpu_time().saturating_sub(before);
    clamped(took.as_secs_f64() / (REFERENCE * rounds).as_secs_f64())
}

/// Limits are never shorter than on the reference machine, and they end somewhere.
fn clamped(pace: f64) -> f64 {
    pace.clamp(1.0, SLOWEST)
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// Arithmetic and a few pages of memory, no system call (SplitMix64).
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

/// Measures the pace from time to time, from when it is started until it is dropped. Each pace that is
/// slower than the one known becomes the pace of this process.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts.
    ///
    /// # Errors
    /// If the system has no thread for it.
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

/// A time limit that is stretched by the pace.
#[derive(Debug)]
pub struct Limit {
    began: Instant,
    limit: Duration,
}

impl Limit {
    /// Begins a time limit that would be `limit` on the reference machine.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { began: Instant::now(), limit }
    }

    /// Whether the limit is over, see [`exceeds`].
    #[must_use]
    pub fn is_over(&self) -> bool {
        exceeds(self.began.elapsed(), self.limit)
    }

    /// The limit with its pace, in words for a message.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{:.0} s (pace {:.1})", stretched(self.limit).as_secs_f64(), current())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_machine_does_not_shorten_limits_and_a_slow_one_does_not_remove_them() {
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
    fn a_limit_is_over_only_at_the_pace_that_is_measured_then() {
        let seconds = Duration::from_secs;
        let at = |took: u64, pace: f64, measured: f64| judge(seconds(took), seconds(10), pace, || measured);
        assert_eq!(at(11, 1.0, 1.0), (true, 1.0));
        assert_eq!(at(25, 1.0, 4.0), (false, 4.0), "the host has become busy");
        assert_eq!(at(41, 1.0, 4.0), (true, 4.0));
        assert_eq!(at(25, 2.0, 1.0), (true, 2.0), "a pace that is known is not taken back");
        let unasked = || -> f64 { panic!("a limit that is not reached costs no measurement") };
        assert_eq!(judge(seconds(25), seconds(10), 3.0, unasked), (false, 3.0));
    }
}
