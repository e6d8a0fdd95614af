//! Number of bulk channels that leaves vCPUs their processors.

use super::Settings;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// Largest number that is chosen.
const MOST: u16 = 4;

/// Number of readings, and the time between two of them. vCPUs run and wait in turn, so a single
/// reading would say little.
const READINGS: u32 = 8;
const INTERVAL: Duration = Duration::from_micros(250);

/// Share of a processor that must be idle in addition to whole ones, so that it counts as a whole
/// one, too.
const NEARLY: f64 = 0.75;

/// Returns the number of processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns one channel for each processor, from 1 to [`MOST`].
pub(super) fn usual_channels() -> u16 {
    of_load(processors(), 0.0)
}

/// Returns the number of channels that send at first in a migration with `settings`.
///
/// If the number adapts, it is one for each processor that is idle now. A reading of the host's
/// load counts only an instant, so several of them are needed, which take 2 ms. The calling thread
/// must be allowed to open `/proc/loadavg`. Otherwise, all processors count as idle.
pub(super) fn sending_channels(settings: &Settings) -> u16 {
    match settings.adapt_channels {
        true => of_load(processors(), running().unwrap_or(0.0)).min(settings.channels),
        false => settings.channels,
    }
}

/// Returns the number of channels for a host with so many processors and running threads.
fn of_load(processors: usize, running: f64) -> u16 {
    let idle = (processors as f64 - running + 1.0 - NEARLY).max(0.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and saturates"
    )]
    let idle = idle as u16;
    idle.clamp(1, MOST)
}

/// Returns the mean number of threads of the host that run or wait for a processor, without the
/// calling thread. Returns `None` if the kernel does not tell.
fn running() -> Option<f64> {
    let load = File::open("/proc/loadavg").ok()?;
    let mut sum = 0;
    for reading in 0..READINGS {
        if reading > 0 {
            std::thread::sleep(INTERVAL);
        }
        let mut text = [0; 64];
        let bytes = load.read_at(&mut text, 0).ok()?;
        sum += runnable(std::str::from_utf8(&text[..bytes]).ok()?)?.saturating_sub(1);
    }
    Some(f64::from(sum) / f64::from(READINGS))
}

/// Returns the number of runnable threads in `text`, the content of `/proc/loadavg`: the part of
/// the fourth field before the slash.
fn runnable(text: &str) -> Option<u32> {
    text.split_ascii_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn running_threads_are_in_the_fourth_field() {
        assert_eq!(runnable("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        assert_eq!(runnable("0.20 0.18 0.12"), None);
        assert_eq!(runnable("0.20 0.18 0.12 380 11206"), None);
    }

    #[test]
    fn each_idle_processor_has_a_channel() {
        assert_eq!(
            [0.0, 0.2, 0.3, 1.0, 1.2, 2.0, 9.0].map(|running| of_load(2, running)),
            [2, 2, 1, 1, 1, 1, 1]
        );
        assert_eq!((of_load(64, 3.0), of_load(64, 62.0), of_load(1, 0.0)), (4, 2, 1));
    }

    #[test]
    fn threads_that_never_sleep_leave_one_channel() {
        let processors = std::thread::available_parallelism().unwrap().get();
        let stop = AtomicBool::new(false);
        let (running, channels) = std::thread::scope(|scope| {
            for _ in 0..processors {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::black_box(());
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            let adapting = Settings { channels: MOST, adapt_channels: true, ..Settings::default() };
            let found = (running(), sending_channels(&adapting));
            stop.store(true, Ordering::Relaxed);
            found
        });
        assert!(running.is_some_and(|running| running >= processors as f64 * 0.9), "{running:?}");
        assert_eq!(channels, 1);
    }
}
