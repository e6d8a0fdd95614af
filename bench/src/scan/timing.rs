//! Timing of what takes from a microsecond to seconds.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Samples of a round: their median is the round's figure, so that a moment in which something else had the processor
/// does not count.
const SAMPLES: usize = 5;

/// How many turns' time something takes that is measured once.
const LONG_TURNS: u32 = 20;

/// Microseconds that `work` takes, once warm.
pub(super) fn time_us<T>(at_least: Duration, mut work: impl FnMut() -> T) -> f64 {
    let mut once = || {
        let start = Instant::now();
        black_box(work());
        start.elapsed()
    };
    let first = once();
    // What takes far longer than a turn should is measured once: the first time warms no cache that could hold it.
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
