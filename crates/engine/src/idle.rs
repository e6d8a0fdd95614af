//! Idle processors of the host, and the waiting of a thread for its link.

use crate::handle::thread_cpu;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use vmferry_thread::RunDelay;

/// Minimum interval between two readings. The kernel counts idle time in ticks of 10 ms.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// Length of a tick of `/proc/stat` in seconds. `USER_HZ` is 100 on all architectures with KVM.
const TICK_S: f64 = 0.01;

/// Bytes that are read. The first line of `/proc/stat` has ten numbers, and is shorter.
const READ_BYTES: usize = 512;

/// Meter of idle processors, shared by all channels of a migration.
#[derive(Debug, Default)]
pub(crate) struct IdleCores {
    /// Opened `/proc/stat`. `None` if it cannot be opened.
    stat: Option<File>,
    /// Time of the last reading in ns. 0 before the first one.
    read_at: AtomicU64,
    /// Idle time of all processors at the last reading, in ticks.
    ticks: AtomicU64,
    /// Number of idle processors in the last interval, in thousandths.
    idle: AtomicU64,
}

impl IdleCores {
    /// Returns a meter. The calling thread must be allowed to open files. Threads that send and
    /// receive pages are not.
    pub(crate) fn open() -> Self {
        Self { stat: File::open("/proc/stat").ok(), ..Self::default() }
    }

    /// Returns the number of processors that were idle in the last interval. A processor on which a
    /// thread waits for the link is idle. `now` is the time since any fixed moment.
    ///
    /// The result is 0 before the second reading, and if the kernel does not tell.
    pub(crate) fn now(&self, now: Duration) -> f64 {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let before = self.read_at.load(Ordering::Relaxed);
        let elapsed = Duration::from_nanos(now.saturating_sub(before));
        // One of the channels reads.
        let reads = (before == 0 || elapsed >= INTERVAL)
            && self
                .read_at
                .compare_exchange(before, now.max(1), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if reads {
            let ticks = self.ticks_now().unwrap_or(0);
            let earlier = self.ticks.swap(ticks, Ordering::Relaxed);
            let idle = match before {
                0 => 0.0,
                _ => ticks.saturating_sub(earlier) as f64 * TICK_S / elapsed.as_secs_f64(),
            };
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "not negative, and small"
            )]
            self.idle.store((idle * 1e3) as u64, Ordering::Relaxed);
        }
        self.idle.load(Ordering::Relaxed) as f64 / 1e3
    }

    /// Reads the idle time of all processors, in ticks.
    fn ticks_now(&self) -> Option<u64> {
        let mut bytes = [0; READ_BYTES];
        let count = self.stat.as_ref()?.read_at(&mut bytes, 0).ok()?;
        idle_ticks(std::str::from_utf8(bytes.get(..count)?).ok()?)
    }
}

/// Shortest time without running for which [`LinkWait`] asks the kernel for its cause.
const WORTH_ASKING: Duration = Duration::from_micros(20);

/// Counter of the time for which a thread that sends pages waits for a processor.
///
/// Such a thread may open no files, so another thread opens the counter.
pub(crate) type OpenedLater = OnceLock<RunDelay>;

/// Stopwatch for the time in which a thread waits for the link.
///
/// A thread that sends does not run while it waits for the link, and while it waits for a
/// processor. Without its [`RunDelay`], all time in which it does not run is waiting for the link.
#[derive(Debug)]
pub(crate) struct LinkWait {
    counter: Arc<OpenedLater>,
    /// Value of the counter at its last reading. `None` before the first one.
    delayed: Option<Duration>,
}

/// Moment at which a [`LinkWait`] was started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    at: Instant,
    cpu: Duration,
}

impl LinkWait {
    /// Returns the stopwatch of the thread whose counter is `counter`.
    pub(crate) fn new(counter: Arc<OpenedLater>) -> Self {
        Self { counter, delayed: None }
    }

    /// Reads the counter, so that what it has counted until now is part of no time.
    pub(crate) fn reset(&mut self) {
        self.delayed = self.delay();
    }

    /// Starts the stopwatch.
    pub(crate) fn start() -> Started {
        Started { at: Instant::now(), cpu: thread_cpu() }
    }

    /// Returns the time for which the thread has waited for the link since `started`.
    pub(crate) fn since(&mut self, started: Started) -> Duration {
        let (elapsed, cpu) = (started.at.elapsed(), thread_cpu().saturating_sub(started.cpu));
        let stood = elapsed.saturating_sub(cpu);
        if stood < WORTH_ASKING {
            return Duration::ZERO;
        }
        let counted = self.delay();
        let earlier = std::mem::replace(&mut self.delayed, counted);
        let delayed = self.delayed.zip(earlier).map(|(now, earlier)| now.saturating_sub(earlier));
        stood.saturating_sub(delayed.unwrap_or_default())
    }

    /// Returns the value of the counter, if it is open.
    fn delay(&self) -> Option<Duration> {
        self.counter.get()?.read()
    }
}

/// Returns the idle time of all processors in `text`, the content of `/proc/stat`: the fields
/// `idle` and `iowait` of its first line.
fn idle_ticks(text: &str) -> Option<u64> {
    let mut fields = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().skip(3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_all_processors() {
        let text = "cpu  10 20 30 400 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(idle_ticks(text), Some(450));
        assert_eq!(idle_ticks("cpu0 1 2 3 4 5"), None);
        assert_eq!(idle_ticks("cpu  1 2 3"), None);
        let cores = IdleCores::open();
        assert!(cores.ticks_now().is_some_and(|ticks| Some(ticks) <= cores.ticks_now()));
        assert_eq!(IdleCores::default().ticks_now(), None, "the file is not open");
    }

    fn of_this_thread() -> LinkWait {
        let mut stopwatch = LinkWait::new(Arc::default());
        assert_eq!(stopwatch.delay(), None, "the counter is not open");
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        stopwatch.counter.set(RunDelay::open(thread).unwrap()).unwrap();
        stopwatch.reset();
        stopwatch
    }

    #[test]
    fn sleep_is_waiting_for_the_link() {
        let (mut stopwatch, started) = (of_this_thread(), LinkWait::start());
        std::thread::sleep(Duration::from_millis(50));
        let (waited, elapsed) = (stopwatch.since(started), started.at.elapsed());
        assert!((Duration::from_millis(50)..=elapsed).contains(&waited), "{waited:?} of {elapsed:?}");
    }

    #[test]
    fn waiting_for_a_processor_is_not_waiting_for_the_link() {
        let mut stopwatch = of_this_thread();
        if stopwatch.delay().is_none() {
            let reason = "the kernel does not count the time for which a thread waits for a processor";
            return vmferry_testkit::skip(vmferry_testkit::Need::Kernel, reason);
        }
        // More threads than processors, which never sleep: each one waits for a processor.
        let threads = 2 * std::thread::available_parallelism().unwrap().get() + 2;
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (waited, stood) = std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::black_box(());
                    }
                });
            }
            let started = LinkWait::start();
            while started.at.elapsed() < Duration::from_millis(400) {}
            let cpu = thread_cpu().saturating_sub(started.cpu);
            let (waited, elapsed) = (stopwatch.since(started), started.at.elapsed());
            stop.store(true, Ordering::Relaxed);
            (waited, elapsed.saturating_sub(cpu))
        });
        assert!(stood > Duration::from_millis(40), "the thread had a processor for itself: {stood:?}");
        assert!(waited * 5 < stood, "{waited:?} of {stood:?}");
    }

    #[test]
    fn idle_processors_are_at_most_those_of_the_host() {
        let (cores, began) = (IdleCores::open(), std::time::Instant::now());
        let now = || Duration::from_secs(1) + began.elapsed();
        assert!(cores.now(now()).abs() < f64::EPSILON, "nothing is known before the second reading");
        std::thread::sleep(INTERVAL);
        let idle = cores.now(now());
        let all = std::thread::available_parallelism().unwrap().get() as f64;
        // One tick of each processor may be counted in the wrong interval.
        let most = std::fs::read_to_string("/proc/stat").unwrap().matches("\ncpu").count() as f64;
        assert!((0.0..=most.max(all) * 1.2).contains(&idle), "{idle} of {most}");
    }
}
