//! Checks of time in a guest: no step back, no unexplained gap, and clocks that agree.

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_lab::guest_report::GuestReport;

/// Interval at which the clocks are read.
const TICK: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
struct Seen {
    ticks: u64,
    backwards: u64,
    gap_ms: f64,
    step_ms: f64,
}

/// Thread that reads the clocks all the time.
#[derive(Debug)]
pub(crate) struct Clock {
    seen: Arc<Mutex<Seen>>,
}

fn seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    #[expect(clippy::cast_precision_loss, reason = "microseconds are enough, and f64 has the bits for them")]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9;
    seconds
}

impl Clock {
    pub(crate) fn start() -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = Arc::clone(&seen);
        std::thread::Builder::new().name("clock".into()).spawn(move || watch(&shared))?;
        Ok(Self { seen })
    }

    /// Adds the clocks' state to a report. With `anew`, the longest gap is counted anew from this
    /// moment.
    pub(crate) fn fill(&self, report: &mut GuestReport, anew: bool) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        report.uptime_s = seconds(ClockId::Boottime);
        report.realtime_s = seconds(ClockId::Realtime);
        report.ticks = seen.ticks;
        report.backwards = seen.backwards;
        report.gap_ms = seen.gap_ms;
        report.step_ms = seen.step_ms;
        if anew {
            seen.gap_ms = 0.0;
        }
    }
}

/// Returns the seconds by which real time is ahead of monotonic time.
fn apart() -> f64 {
    /// Longest time in seconds between the two reads. This thread may lose its processor between
    /// them, and then the reads are repeated.
    const AT_ONCE: f64 = 1e-3;
    const TRIES: u32 = 100;
    let mut apart = 0.0;
    for _ in 0..TRIES {
        let before = seconds(ClockId::Monotonic);
        apart = seconds(ClockId::Realtime) - before;
        if seconds(ClockId::Monotonic) - before < AT_ONCE {
            break;
        }
    }
    apart
}

fn watch(shared: &Mutex<Seen>) {
    let mut before = seconds(ClockId::Monotonic);
    let ahead = apart();
    loop {
        std::thread::sleep(TICK);
        let now = seconds(ClockId::Monotonic);
        let step = (apart() - ahead).abs() * 1e3;
        let mut seen = shared.lock().unwrap_or_else(PoisonError::into_inner);
        seen.ticks += 1;
        if now < before {
            seen.backwards += 1;
        }
        seen.gap_ms = seen.gap_ms.max((now - before) * 1e3);
        seen.step_ms = seen.step_ms.max(step);
        before = now;
    }
}
