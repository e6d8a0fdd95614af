//! Latency of faults, for each vCPU and for all other threads together.

use hdrhistogram::Histogram;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vmferry_wire::FaultLatency;

/// Number of published buckets. Their upper bounds are powers of two in microseconds, from 1 us to
/// more than an hour.
const BUCKETS: usize = 33;
/// Smallest latency that is distinguished, in nanoseconds. The next constant is the largest.
const FINEST: u64 = 256;
const LONGEST: u64 = 3600 * 1_000_000_000;
/// Number of significant decimal digits. The error is at most one per cent, and each histogram
/// takes about 32 KiB.
const DIGITS: u8 = 2;
/// Maximum number of vCPUs with figures of their own. Further vCPUs count as other threads.
const MOST_VCPUS: u32 = 512;

#[derive(Debug)]
struct Class {
    histogram: Histogram<u64>,
    faults: u64,
    sum_ns: u64,
    max_ns: u64,
    buckets: [u64; BUCKETS],
}

/// Histograms, one for each vCPU and one for all other threads. Recording a fault takes one lock,
/// which usually only one thread uses.
#[derive(Debug)]
pub(super) struct Latencies(Vec<Mutex<Class>>);

impl Latencies {
    pub(super) fn new(vcpus: u32) -> Self {
        let class =
            || Class { histogram: histogram(), faults: 0, sum_ns: 0, max_ns: 0, buckets: [0; BUCKETS] };
        Self((0..=vcpus.min(MOST_VCPUS)).map(|_| Mutex::new(class())).collect())
    }

    pub(super) fn record(&self, vcpu: Option<u32>, ns: u64) {
        let other = self.0.len() - 1;
        let at =
            vcpu.and_then(|vcpu| usize::try_from(vcpu).ok()).filter(|vcpu| *vcpu < other).unwrap_or(other);
        let mut class = lock(&self.0[at]);
        class.histogram.saturating_record(ns);
        class.faults += 1;
        class.sum_ns = class.sum_ns.saturating_add(ns);
        class.max_ns = class.max_ns.max(ns);
        class.buckets[bucket(ns)] += 1;
    }

    pub(super) fn figures(&self) -> Vec<FaultLatency> {
        let figures = |class: &Mutex<Class>| {
            let class = lock(class);
            let used = class.buckets.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
            FaultLatency {
                faults: class.faults,
                sum_us: class.sum_ns / 1000,
                p50_ns: class.histogram.value_at_quantile(0.5),
                p99_ns: class.histogram.value_at_quantile(0.99),
                max_ns: class.max_ns,
                buckets: class.buckets[..used].to_vec(),
            }
        };
        self.0.iter().map(figures).collect()
    }

    /// Returns the latency over all classes: sum, median, 99th percentile, maximum and buckets.
    pub(super) fn all(&self) -> FaultLatency {
        let mut whole = histogram();
        let mut sum = FaultLatency { buckets: vec![0; BUCKETS], ..FaultLatency::default() };
        for class in &self.0 {
            let class = lock(class);
            // The bounds are the same, so no value can be out of range.
            let _ = whole.add(&class.histogram);
            sum.faults += class.faults;
            sum.sum_us = sum.sum_us.saturating_add(class.sum_ns / 1000);
            sum.max_ns = sum.max_ns.max(class.max_ns);
            sum.buckets.iter_mut().zip(class.buckets).for_each(|(all, own)| *all += own);
        }
        sum.p50_ns = whole.value_at_quantile(0.5);
        sum.p99_ns = whole.value_at_quantile(0.99);
        sum
    }
}

#[cfg_attr(not(test), expect(clippy::expect_used, reason = "the bounds are constants"))]
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(FINEST, LONGEST, DIGITS).expect("constants that fit")
}

fn lock(class: &Mutex<Class>) -> MutexGuard<'_, Class> {
    class.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the first `i` with `ns` below 2^i microseconds.
fn bucket(ns: u64) -> usize {
    let us = ns / 1000;
    ((u64::BITS - us.leading_zeros()) as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two_of_microseconds() {
        let want = [(0, 0), (999, 0), (1000, 1), (1999, 1), (2000, 2), (3999, 2), (4000, 3), (1_024_000, 11)];
        for (ns, at) in want {
            assert_eq!(bucket(ns), at, "{ns} ns");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn latencies_are_kept_for_each_vcpu_and_for_all_other_threads() {
        let latencies = Latencies::new(2);
        (1..=100).for_each(|us| latencies.record(Some(1), us * 1000));
        latencies.record(Some(7), 5000);
        latencies.record(None, 7000);
        let figures = latencies.figures();
        assert_eq!(figures.iter().map(|class| class.faults).collect::<Vec<_>>(), [0, 100, 2]);
        assert_eq!((figures[1].sum_us, figures[1].max_ns), (5050, 100_000));
        // Two digits: within one per cent.
        assert!((49_500..=51_000).contains(&figures[1].p50_ns), "{}", figures[1].p50_ns);
        assert!((98_000..=101_000).contains(&figures[1].p99_ns), "{}", figures[1].p99_ns);
        assert_eq!(figures[2].buckets, [0, 0, 0, 2]);
        let all = latencies.all();
        assert_eq!((all.faults, all.sum_us, all.max_ns), (102, 5062, 100_000));
        assert_eq!(all.buckets.iter().sum::<u64>(), 102);
    }
}
