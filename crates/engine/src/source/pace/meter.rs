//! What round trips and acknowledged bytes say about the link.

use std::collections::VecDeque;
use std::time::Duration;

/// Round trips this recent say what the queue is now. Three probes of [`TICK`](super::drive::TICK): one that the
/// scheduler delayed is outvoted, and a link overloaded by 5 % has gathered no more than 0.3 ms of queue by then.
pub(super) const WINDOW: Duration = Duration::from_millis(6);
/// As many round trips at least are looked at, however old: the smallest of fewer may be one accident.
const LEAST_SAMPLES: usize = 3;
/// More are not kept: a bound on memory, far above what a window holds.
const MOST_SAMPLES: usize = 4096;
/// The smallest round trip is forgotten after 10 of these: a route may change. Until then it was seen with the queue
/// empty, which without a stranger on the link is the case most of the time.
const BUCKET: Duration = Duration::from_secs(1);
const BUCKETS: usize = 10;
/// A queue shorter than this is none: what the scheduler does to the smallest of three round trips on a busy host.
/// 60 us are 15 KB at 2 Gb/s.
const MARGIN: Duration = Duration::from_micros(60);
/// On a long way, a queue of this share of the round trip hurts nobody.
const MARGIN_OF_BASE: f64 = 0.25;
/// A queue delays all round trips of a window alike, noise only some. So many times their usual spread is no queue.
const MARGIN_OF_SPREAD: f64 = 2.0;
/// However noisy: a queue of so much is one.
const MOST_MARGIN: Duration = Duration::from_millis(1);
/// The spread is averaged over so long.
const SPREAD_TIME: Duration = Duration::from_secs(1);
/// A queue of so many margins is deep: it does not come from our slow climb but from somebody's arrival or from a link
/// that got slower, and gets longer by the millisecond.
const DEEP: f64 = 5.0;

/// What the round trips say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// No round trip was completed so far.
    Unknown,
    Clear,
    Short,
    Deep,
}

/// The round trips of the recent past.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    recent: VecDeque<(Duration, Duration)>,
    /// The smallest round trip of each of the last [`BUCKETS`] buckets: the bucket's number, and the time.
    smallest: VecDeque<(u128, Duration)>,
    /// How far the median of a window is above its smallest, usually.
    spread: Duration,
    seen: Duration,
    /// How long the round trips of now wait in a queue.
    pub(super) standing: Duration,
}

impl RoundTrips {
    /// Takes what was completed, and says what the queue is.
    pub(super) fn observe(&mut self, now: Duration, new: &[Duration], waiting: Duration) -> Queue {
        for round_trip in new {
            self.recent.push_back((now, *round_trip));
            self.remember(now, *round_trip);
        }
        self.forget(now);
        let Some(base) = self.base() else { return Queue::Unknown };
        let smallest = self.recent.iter().map(|(_, time)| *time).min().unwrap_or(base);
        // If all are overdue, what is completed is history.
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

    /// The smallest round trip of the last ten seconds.
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
        // The last is never forgotten: however long ago, there is nothing newer.
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

/// So much of the past of the acknowledged bytes is kept.
const HISTORY: Duration = Duration::from_secs(1);

/// How fast bulk arrives.
#[derive(Debug, Default)]
pub(super) struct Deliveries {
    history: VecDeque<(Duration, u64)>,
}

impl Deliveries {
    pub(super) fn observe(&mut self, now: Duration, acknowledged: u64) {
        // A count that falls (a channel was replaced) starts anew.
        if self.history.back().is_some_and(|(_, before)| *before > acknowledged) {
            self.history.clear();
        }
        self.history.push_back((now, acknowledged));
        while self.history.len() > 2 && now.saturating_sub(self.history[1].0) >= HISTORY {
            self.history.pop_front();
        }
    }

    /// Bytes a second over the last `time`. None: nothing is known of so long ago.
    pub(super) fn rate(&self, time: Duration) -> Option<f64> {
        let (now, acknowledged) = *self.history.back()?;
        let then = self.history.iter().rev().find(|(at, _)| now.saturating_sub(*at) >= time)?;
        #[expect(clippy::cast_precision_loss, reason = "the bytes of a second")]
        let bytes = (acknowledged - then.1) as f64;
        Some(bytes / (now - then.0).as_secs_f64()).filter(|rate| rate.is_finite())
    }

    /// The fewest and the most bytes a second over any `window` of the last `time`, as far as that is known.
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

    /// Nothing from before says anything about now.
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
    fn one_late_round_trip_is_no_queue_and_all_late_are() {
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
    fn probes_that_do_not_come_back_are_a_queue() {
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
    fn extremes_tell_when_nothing_arrived_and_how_much_when_something_did() {
        let (mut deliveries, mut bytes) = (Deliveries::default(), 0);
        // 20 ms of each 50.
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
    fn rates_are_of_the_time_asked_for() {
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
