//! Idle processors of the host.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Minimum interval between two readings. The kernel counts idle time in ticks of 10 ms.
const INTERVAL: Duration = Duration::from_millis(100);

/// Length of a tick of `/proc/stat` in seconds. `USER_HZ` is 100 on all architectures with KVM.
const TICK_S: f64 = 0.01;

/// Meter of idle processors, shared by all channels of a migration.
#[derive(Debug, Default)]
pub(crate) struct IdleCores {
    /// Time of the last reading in ns. 0 before the first one.
    read_at: AtomicU64,
    /// Idle time of all processors at the last reading, in ticks.
    ticks: AtomicU64,
    /// Number of idle processors in the last interval, in thousandths.
    idle: AtomicU64,
}

impl IdleCores {
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
            let stat = std::fs::read_to_string("/proc/stat");
            let ticks = stat.ok().and_then(|text| idle_ticks(&text)).unwrap_or(0);
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
        let own = std::fs::read_to_string("/proc/stat").unwrap();
        assert!(idle_ticks(&own).is_some());
    }

    #[test]
    fn idle_processors_are_at_most_those_of_the_host() {
        let (cores, began) = (IdleCores::default(), std::time::Instant::now());
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
