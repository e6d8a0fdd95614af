//! Measures of the link: the queue, from round trips, and the rate, from acknowledged bytes.

use std::collections::VecDeque;
use std::time::Duration;

/// Age up to which round trips describe the current queue. The window contains three probes, sent
/// at intervals of [`TICK`](super::drive::TICK), so that one probe that the scheduler has delayed
/// does not decide. In that time, a link that is overloaded by 5 % gathers a queue of no more than
/// 0.3 ms.
pub(super) const WINDOW: Duration = Duration::from_millis(6);
/// Minimum number of round trips that are considered, however old they are. The smallest of fewer
/// round trips may be an outlier.
const LEAST_SAMPLES: usize = 3;
/// Largest number of round trips that are kept. It bounds the memory and is far above what a window
/// holds.
const MOST_SAMPLES: usize = 4096;
/// Length of a bucket. The smallest round trip is forgotten after 10 buckets, because a route may
/// change. In that time it was seen with the queue empty, which is the usual case unless another
/// stream shares the link.
const BUCKET: Duration = Duration::from_secs(1);
const BUCKETS: usize = 10;
/// Delay up to which a queue counts as empty: what the scheduler adds to the smallest of three
/// round trips on a busy host. 60 us are 15 KB at 2 Gb/s.
const MARGIN: Duration = Duration::from_micros(60);
/// Share of the base round trip up to which a queue counts as empty, because on a long path such a
/// queue does not matter.
const MARGIN_OF_BASE: f64 = 0.25;
/// Multiple of the usual spread up to which a delay counts as noise. A queue delays all round trips
/// of a window alike, noise only some.
const MARGIN_OF_SPREAD: f64 = 2.0;
/// Largest margin, however noisy the round trips are. A longer delay is a queue.
const MOST_MARGIN: Duration = Duration::from_millis(1);
/// Averaging time of the spread.
const SPREAD_TIME: Duration = Duration::from_secs(1);
/// Multiple of the margin from which on a queue is deep. Such a queue is not caused by the slow
/// climb of this stream, but by another stream or by a link that became slower, and grows quickly.
const DEEP: f64 = 5.0;

/// State of the queue, as the round trips show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// No round trip has been completed so far.
    Unknown,
    Clear,
    Short,
    Deep,
}

/// Recent round trips.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    recent: VecDeque<(Duration, Duration)>,
    /// Smallest round trip of each of the last [`BUCKETS`] buckets, with the number of the bucket.
    smallest: VecDeque<(u128, Duration)>,
    /// Average distance of the median of a window from its smallest round trip.
    spread: Duration,
    seen: Duration,
    /// Time that the present round trips wait in a queue.
    pub(super) standing: Duration,
}

impl RoundTrips {
    /// Adds the completed round trips `new`, and returns the state of the queue.
    pub(super) fn observe(&mut self, now: Duration, new: &[Duration], waiting: Duration) -> Queue {
        for round_trip in new {
            self.recent.push_back((now, *round_trip));
            self.remember(now, *round_trip);
        }
        self.forget(now);
        let Some(base) = self.base() else { return Queue::Unknown };
        let smallest = self.recent.iter().map(|(_, time)| *time).min().unwrap_or(base);
        // If all probes are overdue, the completed round trips are out of date.
        let overdue = self.recent.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= WINDOW);
        let current = if overdue { smallest.max(waiting) } else { smallest };
        self.standing = current.saturating_sub(base);
        let margin = self.margin(base);
        let elapsed = now.saturating_sub(std::mem::replace(&mut self.seen, now));
        if self.standing <= margin {
            self.average_spread(smallest, elapsed);
            return Queue::Clear;
        }
        if self.standing > margin.mul_f64(DEEP) { Queue::Deep } else { Queue::Short }
    }

    /// Returns the smallest round trip of the last ten seconds.
    pub(super) fn base(&self) -> Option<Duration> {
        self.smallest.iter().map(|(_, time)| *time).min()
    }

    fn margin(&self, base: Duration) -> Duration {
        let noise = self.spread.mul_f64(MARGIN_OF_SPREAD).min(MOST_MARGIN);
        MARGIN.max(base.mul_f64(MARGIN_OF_BASE)).max(noise)
    }

    fn remember(&mut self, now: Duration, round_trip: Duration) {
        let bucket = now.as_nanos() / BUCKET.as_nanos();
        match self.smallest.back_mut() {
            Some((last, smallest)) if *last == bucket => *smallest = round_trip.min(*smallest),
            _ => self.smallest.push_back((bucket, round_trip)),
        }
        // The last bucket is never forgotten, however old it is, because there is nothing newer.
        while self.smallest.len() > 1 && self.smallest[0].0 + (BUCKETS as u128) <= bucket {
            self.smallest.pop_front();
        }
    }

    fn forget(&mut self, now: Duration) {
        let old = |at: &Duration| now.saturating_sub(*at) > WINDOW;
        while self.recent.len() > LEAST_SAMPLES && self.recent.front().is_some_and(|(at, _)| old(at))
            || self.recent.len() > MOST_SAMPLES
        {
            self.recent.pop_front();
        }
    }

    fn average_spread(&mut self, smallest: Duration, elapsed: Duration) {
        let mut times: Vec<Duration> = self.recent.iter().map(|(_, time)| *time).collect();
        times.sort_unstable();
        let Some(median) = times.get(times.len() / 2) else { return };
        let weight = (elapsed.as_secs_f64() / SPREAD_TIME.as_secs_f64()).min(1.0);
        let spread = median.saturating_sub(smallest).min(MOST_MARGIN);
        self.spread = self.spread.mul_f64(1.0 - weight) + spread.mul_f64(weight);
    }
}

/// Time for which acknowledged bytes are kept.
const HISTORY: Duration = Duration::from_secs(1);

/// Rate at which bulk arrives.
#[derive(Debug, Default)]
pub(super) struct Deliveries {
    history: VecDeque<(Duration, u64)>,
}

impl Deliveries {
    pub(super) fn observe(&mut self, now: Duration, acknowledged: u64) {
        // A count that falls shows that a channel was replaced, so the history starts anew.
        if self.history.back().is_some_and(|(_, before)| *before > acknowledged) {
            self.history.clear();
        }
        self.history.push_back((now, acknowledged));
        while self.history.len() > 2 && now.saturating_sub(self.history[1].0) >= HISTORY {
            self.history.pop_front();
        }
    }

    /// Returns the bytes per second over the last `time`. `None` if the history is shorter.
    pub(super) fn rate(&self, time: Duration) -> Option<f64> {
        let (now, acknowledged) = *self.history.back()?;
        let then = self.history.iter().rev().find(|(at, _)| now.saturating_sub(*at) >= time)?;
        #[expect(clippy::cast_precision_loss, reason = "the bytes of a second")]
        let bytes = (acknowledged - then.1) as f64;
        Some(bytes / (now - then.0).as_secs_f64()).filter(|rate| rate.is_finite())
    }

    /// Returns the lowest and the highest bytes per second over any `window` of the last `time`, as
    /// far as they are known.
    pub(super) fn extremes(&self, window: Duration, time: Duration) -> (f64, f64) {
        let now = self.history.back().map_or(Duration::ZERO, |(at, _)| *at);
        let recent = self.history.iter().take_while(|(at, _)| now.saturating_sub(*at) > time).count();
        let (mut first, mut least, mut most) = (recent, f64::MAX, 0.0_f64);
        for (at, acknowledged) in self.history.range(recent..) {
            while self.history.get(first + 1).is_some_and(|(next, _)| at.saturating_sub(*next) >= window) {
                first += 1;
            }
            let (since, before) = self.history[first];
            let elapsed = at.saturating_sub(since);
            if elapsed >= window && !elapsed.is_zero() {
                #[expect(clippy::cast_precision_loss, reason = "the bytes of a second")]
                let rate = (acknowledged - before) as f64 / elapsed.as_secs_f64();
                (least, most) = (least.min(rate), most.max(rate));
            }
        }
        (least, most)
    }

    /// Drops the history, which says nothing about the present rate.
    pub(super) fn restart(&mut self) {
        self.history.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn one_late_round_trip_is_no_queue_but_several_are() {
        let mut trips = RoundTrips::default();
        assert_eq!(trips.observe(ms(0), &[], ms(5)), Queue::Unknown);
        for tick in 0..10 {
            assert_eq!(trips.observe(ms(2 * tick), &[us(40)], us(0)), Queue::Clear);
        }
        assert_eq!(trips.observe(ms(20), &[us(900)], us(0)), Queue::Clear);
        assert_eq!(trips.observe(ms(22), &[us(150)], us(0)), Queue::Clear);
        assert_eq!(trips.observe(ms(24), &[us(150)], us(0)), Queue::Clear);
        assert_eq!(trips.observe(ms(26), &[us(150)], us(0)), Queue::Short);
        assert_eq!(trips.standing, us(110));
        for tick in 14..18 {
            trips.observe(ms(2 * tick), &[us(2000)], us(0));
        }
        assert_eq!(trips.observe(ms(36), &[us(2000)], us(0)), Queue::Deep);
    }

    #[test]
    fn missing_echoes_are_a_queue() {
        let mut trips = RoundTrips::default();
        for tick in 0..10 {
            trips.observe(ms(2 * tick), &[us(40)], us(0));
        }
        assert_eq!(trips.observe(ms(22), &[], ms(4)), Queue::Clear, "the last is too young");
        assert_eq!(trips.observe(ms(24), &[], ms(6)), Queue::Deep);
    }

    #[test]
    fn a_longer_route_is_accepted_after_ten_seconds() {
        let mut trips = RoundTrips::default();
        trips.observe(ms(0), &[us(40)], us(0));
        let mut queued = 0;
        for tick in 1..6000 {
            queued += u32::from(trips.observe(ms(2 * tick), &[ms(1)], us(0)) != Queue::Clear);
        }
        assert!((4990..5010).contains(&queued), "{queued}");
        assert_eq!(trips.base(), Some(ms(1)));
    }

    #[test]
    fn noise_widens_the_margin_and_a_queue_does_not() {
        let mut trips = RoundTrips::default();
        for tick in 0..2000_u64 {
            trips.observe(ms(2 * tick), &[us(if tick % 2 == 0 { 40 } else { 240 })], us(0));
        }
        assert!(trips.margin(us(40)) > us(250), "{:?}", trips.margin(us(40)));
        let mut trips = RoundTrips::default();
        for tick in 0..2000_u64 {
            trips.observe(ms(2 * tick), &[us(if tick % 100 < 50 { 40 } else { 440 })], us(0));
        }
        assert!(trips.margin(us(40)) < us(100), "{:?}", trips.margin(us(40)));
    }

    #[test]
    fn extremes_show_pauses_and_the_rate_between_them() {
        let (mut deliveries, mut bytes) = (Deliveries::default(), 0);
        // Bytes arrive during 20 ms of each 50 ms.
        for tick in 0..200_u64 {
            bytes += if tick % 25 < 10 { 2000 } else { 0 };
            deliveries.observe(ms(2 * tick), bytes);
        }
        assert_eq!(deliveries.extremes(ms(10), ms(100)), (0.0, 1e6));
        let mean = deliveries.rate(ms(100)).unwrap();
        assert!((3.5e5..4.5e5).contains(&mean), "{mean}");
        for tick in 200..260_u64 {
            deliveries.observe(ms(2 * tick), bytes);
        }
        assert_eq!(deliveries.extremes(ms(10), ms(100)), (0.0, 0.0));
    }

    #[test]
    fn rate_covers_the_requested_time() {
        let mut deliveries = Deliveries::default();
        assert_eq!(deliveries.rate(ms(1)), None);
        for tick in 0..1000_u64 {
            deliveries.observe(ms(2 * tick), if tick < 990 { 2000 * tick } else { 4000 * tick - 1_980_000 });
        }
        assert_eq!(deliveries.rate(ms(10)), Some(2e6));
        assert_eq!(deliveries.rate(ms(36)), Some(1.5e6));
        assert_eq!(deliveries.rate(ms(1001)), None);
        assert_eq!(deliveries.extremes(ms(10), ms(10)), (2e6, 2e6));
        deliveries.observe(ms(2000), 0);
        assert_eq!(deliveries.rate(ms(1)), None);
    }
}
