//! `predict`, the product's harvest policy: looks at the rings, and harvests each as late as is safe.
//!
//! A harvest costs the guest a fault for each page that it protects and that is written again: about 10 us a page, which
//! is fifty times what it costs to harvest the page. A ring holds only pages written *for the first time*
//! since its last harvest, so a working set that fits never needs one. One that does not fit has to be harvested at some
//! point, and then as late as possible: a ring of twice the fill saves the more faults, the closer working set and ring
//! are to each other.
//!
//! A full ring costs the guest a stop: its vCPU stands still while it harvests its own ring. A harvest that comes a little
//! earlier, in another thread, avoids the stop. So there are two questions for each ring. *Would it be full before I look
//! again?* If not, leave it. *If so, does it lose more time by being full, or by faulting again a little earlier?* For
//! working sets much larger than the ring it is the first, and the ring is harvested right now; for those that barely
//! do not fit, it can be the second.

use super::policy::{HarvestSchedule, ReaperPolicy, RingView, Rings};
use crate::TrackerError;
use std::time::Duration;

/// The shortest sleep. Waking up a thread and looking takes about 50 us of a processor where it was measured, so on the
/// last stretch before a ring is full a tenth of one is used at worst.
const SHORTEST: Duration = Duration::from_micros(500);

/// The longest sleep: ten looks a second are half a thousandth of a processor.
const LONGEST: Duration = Duration::from_millis(100);

/// The longest sleep is no less than this while a guest could write much more than it does: a hundred looks a second are
/// half a hundredth of a processor. Also the first sleep, as a guest begins by writing its whole working set anew.
const GUARD: Duration = Duration::from_millis(10);

/// How many times faster than now a vCPU may write from one moment to the next (a ratio) and still be noticed before its
/// ring is full, as far as [`GUARD`] allows.
const LEAP: f64 = 10.0;

/// The least time in which a vCPU fills an entry, as long as none was seen to be quicker: the first write to a protected
/// page takes 5 to 13 us.
const FASTEST_FILL_SECONDS: f64 = 5e-6;

/// Cost of a page that is written again after a harvest: the fault, 10 us where it was measured.
const FAULT_SECONDS: f64 = 10e-6;

/// Until it was measured: what harvesting a page takes, and what a harvest takes besides.
const HARVEST_PAGE_SECONDS: f64 = 0.25e-6;
/// The same for a harvest as such: locks, a system call, the interrupts that flush the other processors' TLBs.
const HARVEST_SECONDS: f64 = 50e-6;

/// By how much (a ratio) a vCPU may write faster than it did until now without filling its ring before the next look. More
/// means fewer full rings after a change, and earlier harvests all the time.
const SURGE: f64 = 1.25;

/// Time after which a rate that is no longer seen counts half, in seconds: a few of the shortest sleeps, which are too
/// short to measure a rate by one of them, and less than the others, which are not.
const HALF_LIFE_SECONDS: f64 = 2e-3;

/// How much of what was known is left (a ratio) when a harvest's duration is averaged in.
const KEEP: f64 = 0.5;

/// How much of the latest wake-ups' lateness is left (a ratio) with each that is less late. On a host whose processors are
/// all busy the reaper is some milliseconds late now and then, and has to begin earlier.
const KEEP_LATE: f64 = 0.9;

/// How much of the time that a fault takes is lost (a ratio) at most. A vCPU that does nothing but fault still gets its
/// writes done.
const LOST: f64 = 0.9;

/// A ring is left to get full only if that loses less than this part (a ratio) of what a harvest now does: both are
/// estimates, and the harvest is the safe side.
const CLEARLY_LESS: f64 = 0.95;

/// A ring that is less full than this (a ratio) is not harvested, however busy its vCPU: more than an eighth of faults in
/// excess is worse than a full ring, which its vCPU can empty itself. With dozens of busy vCPUs one reaper is too slow
/// anyway.
const EARLIEST: f64 = 0.875;

/// Every so many harvests of a ring, at first and at most, it is left alone to see whether it gets full at all. One whose
/// working set just fits fills as steadily as any other until it is complete, and never needs a harvest from then on. That
/// saves the guest nearly all of its faults; to try in vain costs one stop, and is tried half as often the next time.
const TRY_EVERY: (u32, u32) = (4, 256);

/// Measurements over less time than this say nothing of a rate, in seconds: a handful of entries at the fastest.
const LEAST_INTERVAL: f64 = 50e-6;

/// Knowledge of one ring.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Pages that went through it, harvested or not.
    passed: u64,
    /// New entries a second: goes up at once, and down by [`HALF_LIFE_SECONDS`].
    rate: f64,
    /// The most that was ever seen.
    fastest: f64,
    used: u32,
    full_exits: u64,
    emptied_at: Duration,
    /// Left alone until another thread empties it.
    trying: bool,
    /// Harvests since that was tried last, and how many there are to be until the next time.
    harvests: u32,
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
            // A pass of the migration harvests every ring: nothing was learned.
            self.trying = false;
        }
        let passed = view.harvested + u64::from(view.used);
        if seconds >= LEAST_INTERVAL {
            let latest = passed.saturating_sub(self.passed) as f64 / seconds;
            let keep = 0.5_f64.powf(seconds / HALF_LIFE_SECONDS);
            self.rate = latest.max(self.rate * keep + latest * (1.0 - keep));
            self.fastest = self.fastest.max(latest);
            self.passed = passed;
        }
        self.used = view.used;
    }

    /// Returns true if this harvest is left out, to learn whether the ring gets full.
    fn tries(&mut self) -> bool {
        self.trying = self.trying || self.harvests >= self.try_every;
        self.harvests += u32::from(!self.trying);
        self.trying
    }
}

/// The product's harvest policy.
///
/// It looks at the rings without taking anything, knows the fill rate of each vCPU, and harvests
/// each ring as late as is safe. A full ring is harvested alone, by its vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Predict;

impl Predict {
    /// The shortest time that the reaper thread sleeps.
    pub const SHORTEST_SLEEP: Duration = SHORTEST;

    /// The longest time that the reaper thread sleeps.
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

/// The policy at work, with the buffers that its turns use again.
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

    fn turn(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
        rings.look(&mut self.views);
        let begin = rings.now();
        let sleep = self.forecast.look(begin, rings.usable(), &self.views, &mut self.due);
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

/// Knowledge of all rings, and the decisions that follow from it.
#[derive(Debug)]
struct Forecast {
    looked_at: Duration,
    rings: Vec<Known>,
    /// Seconds that harvesting a page takes, besides [`HARVEST_SECONDS`].
    page_seconds: f64,
    usable: u32,
    /// Pages in all rings that are nearly full: they will be harvested together.
    together: f64,
    /// When it will be woken up, and by how many seconds that was missed lately.
    wake: Duration,
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

    /// Decides at `now` what is `due` to be harvested at once, in ascending order, and how long to sleep after that.
    fn look(&mut self, now: Duration, usable: u32, views: &[RingView], due: &mut Vec<usize>) -> Duration {
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
            // A ring that is left to get full will be empty soon, just like one that is harvested now.
            let room = self.room(&known, wait.is_none());
            let wait = wait.unwrap_or(room / (known.rate * SURGE) / 2.0);
            sleep = sleep.min(wait).min(Self::guarded(&known, room));
        }
        // Not negative, and not NaN: `min` and `max` prefer the number.
        let sleep = Duration::from_secs_f64(sleep.max(0.0)).clamp(SHORTEST, LONGEST);
        self.wake = now + sleep;
        sleep
    }

    /// Entries that its vCPU can fill, now or when it is `emptied`.
    fn room(&self, known: &Known, emptied: bool) -> f64 {
        f64::from(if emptied { self.usable } else { self.usable.saturating_sub(known.used) })
    }

    /// Seconds in which a sudden burst would not fill `room`.
    fn guarded(known: &Known, room: f64) -> f64 {
        let fastest = known.fastest.max(1.0 / FASTEST_FILL_SECONDS);
        (room / (known.rate * LEAP).min(fastest)).max(GUARD.as_secs_f64())
    }

    /// Seconds until the ring has to be looked at again; `None` if it would be full before that.
    fn wait(&self, known: &Known) -> Option<f64> {
        let room = self.room(known, false);
        let rate = known.rate * SURGE;
        // It fills until the next look, which comes no sooner than this, and until the harvest is done.
        let needed = 1.0 + rate * (SHORTEST.as_secs_f64() + self.late + self.harvest_seconds());
        let needed = needed.min(f64::from(self.usable) * (1.0 - EARLIEST));
        (room > needed).then(|| (room - needed) / rate)
    }

    /// Returns the seconds that the next harvest takes, of one full ring at least.
    fn harvest_seconds(&self) -> f64 {
        HARVEST_SECONDS + self.page_seconds * self.together.max(f64::from(self.usable))
    }

    /// Returns true if a harvest now loses less of the guest's time than letting the ring get full, which its vCPU empties then.
    ///
    /// Compared is the share of time that is lost between two harvests: now, that is the faults since the last one; later,
    /// a whole ring of faults and the stop, over the longer time that this takes at the present rate. A ring that fills as
    /// fast as ever always gains from the harvest; one that fills slower and slower, as its working set is nearly
    /// complete, does not.
    fn worth_it(&self, known: &Known, view: &RingView, now: Duration) -> bool {
        let since = now.saturating_sub(view.emptied_at).as_secs_f64();
        if known.rate <= 0.0 || since <= 0.0 {
            return false;
        }
        // No fault can take longer than the quickest one took: processors that log writes themselves have none.
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

    /// A harvest of `pages` took this long.
    fn took(&mut self, pages: u64, time: Duration) {
        self.wake += time;
        // Few pages measure the call, not the page.
        if pages >= u64::from(self.usable / 4).max(1) {
            let each = (time.as_secs_f64() - HARVEST_SECONDS).max(0.0) / pages as f64;
            self.page_seconds = self.page_seconds * KEEP + each * (1.0 - KEEP);
        }
    }

    /// More entries of `ring` than this at the next turn would be a surprise.
    fn watermark(&self, ring: usize) -> u32 {
        let used = self.rings.get(ring).map_or(0, |known| known.used);
        // Half of what is left: time enough to wake up and harvest.
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

    /// A look, on time, however long it wanted to sleep.
    fn look(predict: &mut Forecast, ms: u64, views: &[RingView]) -> (f64, Vec<usize>) {
        let mut due = Vec::new();
        predict.wake = Duration::from_millis(ms);
        let sleep = predict.look(Duration::from_millis(ms), USABLE, views, &mut due);
        (sleep.as_secs_f64() * 1e3, due)
    }

    fn predict() -> Forecast {
        Forecast::new(4096, Duration::ZERO)
    }

    #[test]
    fn an_idle_guest_is_looked_at_ten_times_a_second() {
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
    fn a_working_set_that_fits_is_never_harvested() {
        let mut predict = predict();
        // Fills fast, then hardly at all, with room for 32 more.
        for (ms, used) in [(10, 1000), (20, 2000), (30, 3000), (40, 3800), (50, 3980), (60, 3999)] {
            assert_eq!(look(&mut predict, ms, &[view(used, 0, 0)]).1, [], "at {ms} ms");
        }
        for ms in (70..2000).step_by(10) {
            assert_eq!(look(&mut predict, ms, &[view(4000, 0, 0)]).1, [], "at {ms} ms");
        }
        assert_eq!(look(&mut predict, 3000, &[view(4000, 0, 0)]).0, 100.0, "and not watched closely, either");
    }

    #[test]
    fn a_ring_that_fills_steadily_is_harvested_right_before_it_is_full_and_alone() {
        let mut predict = predict();
        untried(&mut predict, 2);
        let (mut now, mut looks, mut due) = (GUARD, 0, Vec::new());
        while due.is_empty() {
            // An entry in 10 us: full after 40.32 ms.
            let used = u32::try_from(now.as_micros() / 10).unwrap().min(USABLE);
            now += predict.look(now, USABLE, &[view(used, 0, 0), view(30, 0, 0)], &mut due);
            looks += 1;
            if !due.is_empty() {
                assert_eq!(due, [0]);
                assert!((3700..4000).contains(&used), "{used}");
            }
        }
        assert!(looks < 12, "{looks}");
    }

    /// Keeps the policy from leaving a ring alone for now.
    fn untried(predict: &mut Forecast, rings: usize) {
        predict.rings.resize(rings, Known { try_every: 256, ..Known::default() });
    }

    #[test]
    fn a_ring_is_left_to_get_full_when_faults_would_cost_more() {
        let mut predict = predict();
        // 40 ms for the first 3900, all of it spent in faults; then slower and slower, but still too fast to wait.
        look(&mut predict, 40, &[view(3900, 0, 0)]);
        predict.rings[0].rate = 20_000.0;
        let known = Known { used: 4020, ..predict.rings[0] };
        assert_eq!(predict.wait(&known), None, "full before the next look");
        assert!(predict.worth_it(&known, &view(4020, 0, 0), Duration::from_millis(200)));
        // The same at a tenth of the rate: full in 60 ms, which is worth the wait after 40 ms of faults, a stop included.
        let slow = Known { rate: 200.0, used: 4020, ..known };
        assert!(!predict.worth_it(&slow, &view(4020, 0, 0), Duration::from_millis(42)));
        // A stop that was measured to be long changes that.
        let long = RingView { full_exits: 1, stalled: Duration::from_secs(1), ..view(4020, 0, 0) };
        assert!(predict.worth_it(&slow, &long, Duration::from_millis(42)));
    }

    #[test]
    fn now_and_then_a_ring_is_left_alone_and_less_often_if_it_got_full() {
        let mut predict = predict();
        let mut harvests = Vec::new();
        let (mut full_exits, mut harvested) = (0, 0);
        // Always nearly full, at 100 pages a millisecond; when it is left alone it gets full.
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
    fn a_ring_that_turns_out_not_to_get_full_is_left_alone_for_good() {
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
        // A pass of the migration harvests it, and the next time it fills it is tried again.
        assert_eq!(look(&mut predict, 440, &[view(4000, 20_030, 400)]).1, []);
        assert!(predict.rings[0].trying);
    }

    #[test]
    fn a_reaper_that_wakes_up_late_begins_earlier() {
        let (mut punctual, mut late) = (predict(), predict());
        let mut due = Vec::new();
        for (predict, lateness) in [(&mut punctual, 0), (&mut late, 4)] {
            for _ in 0..4 {
                let now = predict.wake + Duration::from_millis(lateness);
                predict.look(now, USABLE, &[view(0, 0, 0)], &mut due);
            }
        }
        let known = Known { rate: 50_000.0, fastest: 100_000.0, used: 3700, ..Known::default() };
        assert!(punctual.wait(&known).is_some());
        assert_eq!(late.wait(&known), None);
    }

    #[test]
    fn harvests_that_take_longer_begin_earlier() {
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
