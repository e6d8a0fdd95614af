//! Default harvest policy `predict`, which looks at the rings and harvests each of them as late as
//! is safe.
//!
//! After a harvest, the guest pays a fault for each page that it writes again: about 10 us, fifty
//! times the cost of harvesting the page. A ring holds only pages that were written *for the first
//! time* since its last harvest, so a working set that fits into the ring never needs a harvest. If
//! the working set does not fit, the ring must be harvested at some point, and as late as possible.
//! The closer the sizes of working set and ring are, the more faults a fuller ring saves.
//!
//! A full ring costs the guest a stop, during which the vCPU harvests its own ring. A harvest
//! slightly earlier, in another thread, avoids the stop. Therefore the policy asks two questions
//! for each ring. *Would the ring be full before the next look?* If not, the policy leaves the ring
//! alone. *If so, does the guest lose more time by the stop, or by faulting again a little
//! earlier?* For working sets much larger than the ring, the stop costs more, and the ring is
//! harvested at once. For working sets that almost fit, the faults can cost more.

use super::policy::{HarvestSchedule, ReaperPolicy, RingView, Rings};
use crate::TrackerError;
use std::time::Duration;

/// Minimum sleep. A wake-up and a look take about 50 us of a processor on the measured host, so
/// right before a ring is full the reaper uses at most a tenth of a processor.
const SHORTEST: Duration = Duration::from_micros(500);

/// Maximum sleep: ten looks per second take half a thousandth of a processor.
const LONGEST: Duration = Duration::from_millis(100);

/// Lower bound for the maximum sleep while a guest could write much faster than it does: a hundred
/// looks per second take half a hundredth of a processor. Also the first sleep, because a guest
/// begins by writing its whole working set again.
const GUARD: Duration = Duration::from_millis(10);

/// Factor by which a vCPU may suddenly write faster, and the reaper still looks at the ring before
/// it is full, as far as [`GUARD`] permits.
const LEAP: f64 = 10.0;

/// Minimum time in which a vCPU fills an entry, until a shorter time was observed: the first write
/// to a protected page takes 5 to 13 us.
const FASTEST_FILL_SECONDS: f64 = 5e-6;

/// Cost of a page that is written again after a harvest: one fault, 10 us on the measured host.
const FAULT_SECONDS: f64 = 10e-6;

/// Initial estimate of the time to harvest a page, in addition to [`HARVEST_SECONDS`]. Replaced by
/// measurements.
const HARVEST_PAGE_SECONDS: f64 = 0.25e-6;
/// Fixed time of a harvest: locks, a system call, and the interrupts that flush the TLBs of other
/// processors.
const HARVEST_SECONDS: f64 = 50e-6;

/// Factor by which a vCPU may write faster than before without filling its ring before the next
/// look. A larger factor means fewer full rings after a change, and earlier harvests all the time.
const SURGE: f64 = 1.25;

/// Time in seconds after which a rate that is no longer observed counts half. It spans a few of the
/// shortest sleeps, because one of them is too short to measure a rate. It is shorter than the
/// other sleeps, because each of them is long enough.
const HALF_LIFE_SECONDS: f64 = 2e-3;

/// Weight of the previous value when the duration of a harvest is averaged in.
const KEEP: f64 = 0.5;

/// Factor by which the remembered lateness of wake-ups decays with each wake-up that is less late.
/// On a host whose processors are all busy, the reaper is some milliseconds late now and then, and
/// has to begin earlier.
const KEEP_LATE: f64 = 0.9;

/// Maximum share of the time of a fault that counts as lost. A vCPU that faults all the time still
/// completes its writes.
const LOST: f64 = 0.9;

/// Factor for the decision to let a ring get full: the loss must be less than this part of the loss
/// by a harvest now. Both are estimates, and the harvest is the safe choice.
const CLEARLY_LESS: f64 = 0.95;

/// Minimum fill of a ring, as a ratio, below which the ring is not harvested, however busy its vCPU
/// is. More than an eighth of additional faults is worse than a full ring, which its vCPU can empty
/// itself. With dozens of busy vCPUs one reaper is too slow anyway.
const EARLIEST: f64 = 0.875;

/// Number of harvests of a ring between two trials, initially and at most. In a trial the ring is
/// not harvested, to learn whether it gets full at all.
///
/// A ring whose working set just fits fills as steadily as any other ring until the working set is
/// complete, and then never needs a harvest. A successful trial saves the guest nearly all of its
/// faults. A failed trial costs one stop, and the next trial comes after twice as many harvests.
const TRY_EVERY: (u32, u32) = (4, 256);

/// Minimum duration of a measurement from which a rate is computed, in seconds: a handful of
/// entries at the fastest rate.
const LEAST_INTERVAL: f64 = 50e-6;

/// Observations of one ring.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Number of pages that were added to the ring, harvested or not.
    passed: u64,
    /// New entries per second. Increases at once, and decays by [`HALF_LIFE_SECONDS`].
    rate: f64,
    /// Highest rate that was ever observed.
    fastest: f64,
    used: u32,
    full_exits: u64,
    emptied_at: Duration,
    /// True during a trial: the ring is left alone until another thread empties it.
    trying: bool,
    /// Number of harvests since the last trial.
    harvests: u32,
    /// Number of harvests until the next trial.
    try_every: u32,
}

impl Known {
    fn update(&mut self, view: &RingView, seconds: f64) {
        let got_full = view.full_exits != std::mem::replace(&mut self.full_exits, view.full_exits);
        let emptied = view.emptied_at != std::mem::replace(&mut self.emptied_at, view.emptied_at);
        if self.trying && got_full {
            (self.trying, self.harvests) = (false, 0);
            self.try_every = (self.try_every * 2).min(TRY_EVERY.1);
        } else if self.trying && emptied {
            // A pass of the migration harvests every ring, so the trial has no result.
            self.trying = false;
        }
        // Less than before if another thread has taken the entries and not counted them yet.
        let passed = (view.harvested + u64::from(view.used)).max(self.passed);
        if seconds >= LEAST_INTERVAL {
            let latest = passed.saturating_sub(self.passed) as f64 / seconds;
            let keep = 0.5_f64.powf(seconds / HALF_LIFE_SECONDS);
            self.rate = latest.max(self.rate * keep + latest * (1.0 - keep));
            self.fastest = self.fastest.max(latest);
            self.passed = passed;
        }
        self.used = view.used;
    }

    /// Returns true if this harvest is skipped for a trial.
    fn tries(&mut self) -> bool {
        self.trying = self.trying || self.harvests >= self.try_every;
        self.harvests += u32::from(!self.trying);
        self.trying
    }
}

/// Default harvest policy, with the name `predict`.
///
/// The policy reads the fill of each ring without removing anything, estimates the rate at which
/// the vCPU fills its ring, and harvests the ring as late as is safe. Now and then it omits a
/// harvest as a trial, to learn whether the ring gets full at all. If a ring gets full, its vCPU
/// harvests only that ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Predict;

impl Predict {
    /// Shortest time for which the reaper thread sleeps.
    pub const SHORTEST_SLEEP: Duration = SHORTEST;

    /// Longest time for which the reaper thread sleeps.
    pub const LONGEST_SLEEP: Duration = LONGEST;
}

impl ReaperPolicy for Predict {
    fn name(&self) -> &'static str {
        "predict"
    }

    fn begin(&self, rings: &dyn Rings) -> Box<dyn HarvestSchedule> {
        let forecast = Forecast::new(rings.entries(), rings.now());
        Box::new(Schedule { forecast, views: Vec::new(), due: Vec::new() })
    }
}

/// State of the policy for one period of tracking, with buffers that each wake-up reuses.
#[derive(Debug)]
struct Schedule {
    forecast: Forecast,
    views: Vec<RingView>,
    due: Vec<usize>,
}

impl HarvestSchedule for Schedule {
    fn first_sleep(&self) -> Duration {
        GUARD
    }

    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
        rings.observe(&mut self.views);
        let begin = rings.now();
        let sleep = self.forecast.decide(begin, rings.usable(), &self.views, &mut self.due);
        if !self.due.is_empty() {
            let pages = rings.harvest(&self.due)?;
            self.forecast.took(pages, rings.now().saturating_sub(begin));
        }
        Ok(sleep)
    }

    fn watermark(&self, ring: usize) -> Option<u32> {
        Some(self.forecast.watermark(ring))
    }
}

/// Observations of all rings, and the resulting decisions.
#[derive(Debug)]
struct Forecast {
    looked_at: Duration,
    rings: Vec<Known>,
    /// Time to harvest one page in seconds, in addition to [`HARVEST_SECONDS`].
    page_seconds: f64,
    usable: u32,
    /// Number of pages in all rings that are nearly full and will be harvested together.
    together: f64,
    /// Time of the next planned wake-up.
    wake: Duration,
    /// Recent lateness of wake-ups, in seconds.
    late: f64,
}

impl Forecast {
    fn new(entries: u32, now: Duration) -> Self {
        Self {
            looked_at: now,
            rings: Vec::new(),
            page_seconds: HARVEST_PAGE_SECONDS,
            usable: entries,
            together: 0.0,
            wake: now + GUARD,
            late: 0.0,
        }
    }

    /// Decides at time `now` which rings are `due` to be harvested at once, in ascending order.
    /// Returns the time to sleep afterwards.
    fn decide(&mut self, now: Duration, usable: u32, views: &[RingView], due: &mut Vec<usize>) -> Duration {
        let seconds = now.saturating_sub(self.looked_at).as_secs_f64();
        if seconds >= LEAST_INTERVAL {
            self.looked_at = now;
        }
        self.usable = usable;
        self.late = now.saturating_sub(self.wake).as_secs_f64().max(self.late * KEEP_LATE);
        self.rings.resize(views.len(), Known { try_every: TRY_EVERY.0, ..Known::default() });
        self.rings.iter_mut().zip(views).for_each(|(known, view)| known.update(view, seconds));
        let full = |used: &f64| *used > f64::from(usable) * EARLIEST;
        self.together = self.rings.iter().map(|known| f64::from(known.used)).filter(full).sum();
        due.clear();
        let mut sleep = LONGEST.as_secs_f64();
        for (ring, view) in views.iter().enumerate() {
            let mut known = self.rings[ring];
            let wait = self.wait(&known);
            if wait.is_none() && self.worth_it(&known, view, now) && !known.tries() {
                due.push(ring);
                known.used = 0;
            }
            self.rings[ring] = known;
            // A ring that is left to get full will be empty soon, like a ring that is harvested
            // now.
            let room = self.room(&known, wait.is_none());
            let wait = wait.unwrap_or(room / (known.rate * SURGE) / 2.0);
            sleep = sleep.min(wait).min(Self::guarded(&known, room));
        }
        // The result is neither negative nor NaN: `min` and `max` prefer the number.
        let sleep = Duration::from_secs_f64(sleep.max(0.0)).clamp(SHORTEST, LONGEST);
        self.wake = now + sleep;
        sleep
    }

    /// Returns the number of entries that the vCPU can fill, now or after the ring was emptied
    /// (`emptied`).
    fn room(&self, known: &Known, emptied: bool) -> f64 {
        f64::from(if emptied { self.usable } else { self.usable.saturating_sub(known.used) })
    }

    /// Returns the time in seconds in which a sudden burst would not fill `room`.
    fn guarded(known: &Known, room: f64) -> f64 {
        let fastest = known.fastest.max(1.0 / FASTEST_FILL_SECONDS);
        (room / (known.rate * LEAP).min(fastest)).max(GUARD.as_secs_f64())
    }

    /// Returns the seconds until the next necessary look at the ring, or `None` if the ring would
    /// be full before.
    fn wait(&self, known: &Known) -> Option<f64> {
        let room = self.room(known, false);
        let rate = known.rate * SURGE;
        // The ring fills until the next look, which comes after the shortest sleep at the earliest,
        // and until the harvest is done.
        let needed = 1.0 + rate * (SHORTEST.as_secs_f64() + self.late + self.harvest_seconds());
        let needed = needed.min(f64::from(self.usable) * (1.0 - EARLIEST));
        (room > needed).then(|| (room - needed) / rate)
    }

    /// Returns the seconds that the next harvest takes, for at least one full ring.
    fn harvest_seconds(&self) -> f64 {
        HARVEST_SECONDS + self.page_seconds * self.together.max(f64::from(self.usable))
    }

    /// Returns true if a harvest now loses less of the guest's time than letting the ring get full,
    /// which its vCPU then empties.
    ///
    /// The function compares the share of time that is lost between two harvests. A harvest now
    /// loses the faults since the last one. A full ring loses a whole ring of faults and the stop,
    /// over the longer time until the ring is full at the present rate. A ring with a constant fill
    /// rate always gains from the harvest. A ring that fills more and more slowly, because its
    /// working set is nearly complete, does not.
    fn worth_it(&self, known: &Known, view: &RingView, now: Duration) -> bool {
        let since = now.saturating_sub(view.emptied_at).as_secs_f64();
        if known.rate <= 0.0 || since <= 0.0 {
            return false;
        }
        // No fault takes longer than the shortest observed fill time: processors that log writes
        // themselves have no faults.
        let fault = FAULT_SECONDS.min(LOST / known.fastest.max(1.0));
        let stall = match view.full_exits {
            0 => HARVEST_SECONDS + self.page_seconds * f64::from(self.usable),
            exits => view.stalled.as_secs_f64() / exits as f64,
        };
        let (used, usable) = (f64::from(known.used), f64::from(self.usable));
        let until_full = (usable - used).max(0.0) / known.rate;
        let now_lost = fault * used / since;
        let full_lost = (fault * usable + stall) / (since + until_full + stall);
        full_lost >= now_lost * CLEARLY_LESS
    }

    /// Records that a harvest of `pages` took `time`.
    fn took(&mut self, pages: u64, time: Duration) {
        self.wake += time;
        // With few pages, the time is that of the call, not of the pages.
        if pages >= u64::from(self.usable / 4).max(1) {
            let each = (time.as_secs_f64() - HARVEST_SECONDS).max(0.0) / pages as f64;
            self.page_seconds = self.page_seconds * KEEP + each * (1.0 - KEEP);
        }
    }

    /// Returns the number of entries of `ring` that should not be exceeded before the next turn.
    fn watermark(&self, ring: usize) -> u32 {
        let used = self.rings.get(ring).map_or(0, |known| known.used);
        // Half of the remaining entries leave enough time to wake up and harvest.
        used + self.usable.saturating_sub(used) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USABLE: u32 = 4032;

    fn view(used: u32, harvested: u64, emptied_ms: u64) -> RingView {
        let emptied_at = Duration::from_millis(emptied_ms);
        RingView { used, harvested, full_exits: 0, stalled: Duration::ZERO, emptied_at }
    }

    /// Makes a look that is on time, whatever sleep was planned.
    fn look(predict: &mut Forecast, ms: u64, views: &[RingView]) -> (f64, Vec<usize>) {
        let mut due = Vec::new();
        predict.wake = Duration::from_millis(ms);
        let sleep = predict.decide(Duration::from_millis(ms), USABLE, views, &mut due);
        (sleep.as_secs_f64() * 1e3, due)
    }

    fn predict() -> Forecast {
        Forecast::new(4096, Duration::ZERO)
    }

    #[test]
    fn rings_of_an_idle_guest_are_looked_at_ten_times_a_second() {
        let mut predict = predict();
        for ms in [10, 20, 1000] {
            let views = [view(0, 0, 0), view(700, 0, 0)];
            assert_eq!(look(&mut predict, ms, &views).1, []);
        }
        assert_eq!(look(&mut predict, 1010, &[view(0, 0, 0), view(700, 0, 0)]).0, 100.0);
        // 70 pages in 100 ms, 700/s, could become 7000/s: 3962 entries would last half a second.
        assert_eq!(look(&mut predict, 1110, &[view(70, 0, 0), view(700, 0, 0)]).0, 100.0);
        // 7000/s could become 70000/s: 3262 entries would last 47 ms.
        let (sleep, due) = look(&mut predict, 1210, &[view(770, 0, 0), view(700, 0, 0)]);
        assert!((45.0..48.0).contains(&sleep) && due.is_empty(), "{sleep}");
    }

    #[test]
    fn working_set_that_fits_is_never_harvested() {
        let mut predict = predict();
        // Fills fast and then hardly at all, with room for 32 more entries.
        for (ms, used) in [(10, 1000), (20, 2000), (30, 3000), (40, 3800), (50, 3980), (60, 3999)] {
            assert_eq!(look(&mut predict, ms, &[view(used, 0, 0)]).1, [], "at {ms} ms");
        }
        for ms in (70..2000).step_by(10) {
            assert_eq!(look(&mut predict, ms, &[view(4000, 0, 0)]).1, [], "at {ms} ms");
        }
        assert_eq!(
            look(&mut predict, 3000, &[view(4000, 0, 0)]).0,
            100.0,
            "the ring is not looked at more often"
        );
    }

    #[test]
    fn ring_that_fills_steadily_is_harvested_separately_right_before_it_is_full() {
        let mut predict = predict();
        untried(&mut predict, 2);
        let (mut now, mut looks, mut due) = (GUARD, 0, Vec::new());
        while due.is_empty() {
            // One entry in 10 us: full after 40.32 ms.
            let used = u32::try_from(now.as_micros() / 10).unwrap().min(USABLE);
            now += predict.decide(now, USABLE, &[view(used, 0, 0), view(30, 0, 0)], &mut due);
            looks += 1;
            if !due.is_empty() {
                assert_eq!(due, [0]);
                assert!((3700..4000).contains(&used), "{used}");
            }
        }
        assert!(looks < 12, "{looks}");
    }

    /// Prevents trials for now.
    fn untried(predict: &mut Forecast, rings: usize) {
        predict.rings.resize(rings, Known { try_every: 256, ..Known::default() });
    }

    #[test]
    fn ring_is_left_to_get_full_when_faults_would_cost_more() {
        let mut predict = predict();
        // 40 ms for the first 3900 entries, all of it spent in faults; then slower and slower, but
        // still too fast to wait.
        look(&mut predict, 40, &[view(3900, 0, 0)]);
        predict.rings[0].rate = 20_000.0;
        let known = Known { used: 4020, ..predict.rings[0] };
        assert_eq!(predict.wait(&known), None, "full before the next look");
        assert!(predict.worth_it(&known, &view(4020, 0, 0), Duration::from_millis(200)));
        // The same at a tenth of the rate: full in 60 ms, which is worth the wait after 40 ms of
        // faults, a stop included.
        let slow = Known { rate: 200.0, used: 4020, ..known };
        assert!(!predict.worth_it(&slow, &view(4020, 0, 0), Duration::from_millis(42)));
        // A stop that was measured to be long changes the decision.
        let long = RingView { full_exits: 1, stalled: Duration::from_secs(1), ..view(4020, 0, 0) };
        assert!(predict.worth_it(&slow, &long, Duration::from_millis(42)));
    }

    #[test]
    fn trials_happen_now_and_then_and_less_often_after_a_full_ring() {
        let mut predict = predict();
        let mut harvests = Vec::new();
        let (mut full_exits, mut harvested) = (0, 0);
        // Always nearly full, at 100 pages per millisecond. In a trial, the ring gets full.
        for cycle in 1..150_u64 {
            let ms = cycle * 40;
            let view = RingView { full_exits, ..view(4000, harvested, ms - 40) };
            let due = look(&mut predict, ms, &[view]).1;
            harvested += 4000;
            if due.is_empty() {
                full_exits += 1;
            } else {
                harvests.push(cycle);
            }
        }
        let left: Vec<u64> = (1..150).filter(|cycle| !harvests.contains(cycle)).collect();
        assert_eq!(left, [5, 14, 31, 64, 129]);
    }

    #[test]
    fn ring_that_does_not_get_full_in_a_trial_is_not_harvested_again() {
        let mut predict = predict();
        for cycle in 1..=4 {
            assert_eq!(
                look(&mut predict, cycle * 40, &[view(4000, cycle * 4000 - 4000, cycle * 40 - 40)]).1,
                [0]
            );
        }
        assert_eq!(look(&mut predict, 200, &[view(4000, 16_000, 160)]).1, [], "tried");
        for ms in 201..400 {
            assert_eq!(look(&mut predict, ms, &[view(4030, 16_000, 160)]).1, []);
        }
        // A pass of the migration harvests the ring, and the next time it fills there is another
        // trial.
        assert_eq!(look(&mut predict, 440, &[view(4000, 20_030, 400)]).1, []);
        assert!(predict.rings[0].trying);
    }

    #[test]
    fn reaper_that_wakes_up_late_begins_earlier() {
        let (mut punctual, mut late) = (predict(), predict());
        let mut due = Vec::new();
        for (predict, lateness) in [(&mut punctual, 0), (&mut late, 4)] {
            for _ in 0..4 {
                let now = predict.wake + Duration::from_millis(lateness);
                predict.decide(now, USABLE, &[view(0, 0, 0)], &mut due);
            }
        }
        let known = Known { rate: 50_000.0, fastest: 100_000.0, used: 3700, ..Known::default() };
        assert!(punctual.wait(&known).is_some());
        assert_eq!(late.wait(&known), None);
    }

    #[test]
    fn slow_harvests_begin_earlier() {
        let (mut quick, mut slow) = (predict(), predict());
        slow.usable = USABLE;
        quick.usable = USABLE;
        for _ in 0..20 {
            slow.took(4000, Duration::from_millis(10));
            slow.took(3, Duration::from_secs(1));
        }
        let known = Known { rate: 100_000.0, fastest: 100_000.0, used: 3800, ..Known::default() };
        assert!(quick.wait(&known).is_some());
        assert_eq!(slow.wait(&known), None);
    }
}
