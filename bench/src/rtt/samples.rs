//! Times of single requests or faults.

use std::time::Duration;

/// Times, kept exactly. A measurement has at most some hundred thousand, and their tail is its main
/// result.
#[derive(Debug, Default, Clone)]
pub(super) struct Samples {
    nanos: Vec<u64>,
}

impl Samples {
    pub(super) fn push(&mut self, time: Duration) {
        self.nanos.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn len(&self) -> usize {
        self.nanos.len()
    }

    /// Returns the figures of the times, or `None` without times.
    pub(super) fn figures(mut self) -> Option<Figures> {
        self.nanos.sort_unstable();
        let max = *self.nanos.last()?;
        let sum: u128 = self.nanos.iter().copied().map(u128::from).sum();
        let of = |percent: usize| us(u128::from(self.nanos[rank(self.nanos.len(), percent)]));
        Some(Figures {
            mean_us: us(sum) / count(self.nanos.len()),
            p50_us: of(50),
            p99_us: of(99),
            max_us: us(u128::from(max)),
            count: self.nanos.len(),
        })
    }
}

/// Mean, percentiles, maximum and count of times, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
    pub(super) count: usize,
}

/// Returns the index of the smallest of `len > 0` sorted values that at least `percent` percent of
/// them do not exceed.
fn rank(len: usize, percent: usize) -> usize {
    (len * percent).div_ceil(100).saturating_sub(1)
}

#[expect(clippy::cast_precision_loss, reason = "hours in nanoseconds are below 2^53")]
fn us(nanos: u128) -> f64 {
    nanos as f64 / 1e3
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
pub(super) fn count(len: usize) -> f64 {
    len as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_match_known_times() {
        let mut samples = Samples::default();
        // The times are 1 to 100 us in mixed order.
        for number in 0..100 {
            samples.push(Duration::from_micros((number * 37) % 100 + 1));
        }
        let figures = samples.figures().unwrap();
        assert_eq!(figures, Figures { mean_us: 50.5, p50_us: 50.0, p99_us: 99.0, max_us: 100.0, count: 100 });
        assert_eq!(Samples::default().figures(), None);
    }

    #[test]
    fn rank_handles_few_values() {
        assert_eq!((rank(1, 50), rank(1, 99)), (0, 0));
        assert_eq!((rank(2, 50), rank(2, 99)), (0, 1));
        assert_eq!((rank(200, 50), rank(200, 99)), (99, 197));
    }
}
