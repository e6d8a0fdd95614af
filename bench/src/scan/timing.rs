//! Measurement of work that takes from a microsecond to seconds.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of samples of a round. The round's figure is their median, so that a moment in which
/// another process had the processor does not count.
const SAMPLES: usize = 5;

/// Number of turns from which work counts as long and is measured once.
const LONG_TURNS: u32 = 20;

/// Returns the microseconds that `work` takes with warm caches.
pub(super) fn time_us<T>(at_least: Duration, mut work: impl FnMut() -> T) -> f64 {
    let mut once = || {
        let start = Instant::now();
        black_box(work());
        start.elapsed()
    };
    let first = once();
    // Work that takes far longer than a turn is measured once, because its first run warms no cache
    // that could hold its data.
    if first > at_least * LONG_TURNS {
        return first.as_secs_f64() * 1e6;
    }
    if first > at_least {
        return first.min(once()).as_secs_f64() * 1e6;
    }
    let second = once().max(Duration::from_nanos(20));
    let repeats = (at_least.as_nanos() / SAMPLES as u128 / second.as_nanos()).clamp(1, 1 << 20);
    let mut samples = [0.0; SAMPLES];
    for sample in &mut samples {
        let start = Instant::now();
        for _ in 0..repeats {
            black_box(work());
        }
        #[expect(clippy::cast_precision_loss, reason = "at most 2^20")]
        let repeats = repeats as f64;
        *sample = start.elapsed().as_secs_f64() * 1e6 / repeats;
    }
    samples.sort_by(f64::total_cmp);
    samples[SAMPLES / 2]
}
