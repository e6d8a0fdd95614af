//! The reaper that looks before it harvests.
//!
//! What a harvest costs the guest: each page that it protects, and that is written again, faults anew, about 10 us a
//! page, which is fifty times what it costs to harvest the page. A ring holds only pages written *for the first time*
//! since its last harvest, so a working set that fits never needs one. One that does not fit has to be harvested at some
//! point, and then as late as possible: a ring of twice the fill saves the more faults, the closer working set and ring
//! are to each other.
//!
//! What a full ring costs the guest: its vCPU stands still while it harvests its own ring. That is what harvesting a
//! little earlier, in another thread, avoids. So there are two questions for each ring. *Would it be full before I look
//! again?* If not, leave it. *If so, does it lose more time by being full, or by faulting again a little earlier?* For
//! working sets much larger than the ring it is the first, and the ring is harvested right now; for those that barely
//! do not fit, it can be the second.

use super::super::core::RingView;
use std::time::Duration;

/// The shortest sleep. Waking up a thread takes 60 us, most of it the kernel's timer slack, and looking a few more: a
/// tenth of a processor is used at worst, and that only on the last stretch before a ring is full.
pub(crate) const SHORTEST: Duration = Duration::from_micros(500);

/// Bounds for the longest sleep. A look takes up to 10 us, so a hundred a second are a thousandth of a processor; and
/// there is nothing to gain from fewer than one a second, the sleep of the published policies.
const LONGEST: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// The least time in which a vCPU was seen to fill an entry, when nothing else is known: the first write to a protected
/// page takes 5 to 13 us. Two sleeps of [`longest`] then are less than a ring, so an idle guest that bursts is noticed.
const FASTEST_FILL: Duration = Duration::from_micros(5);

/// What a page costs that is written again after a harvest: the fault, 10 us where it was measured.
const FAULT_SECONDS: f64 = 10e-6;

/// Until it was measured: what harvesting a page takes, and what a harvest takes besides.
const HARVEST_PAGE_SECONDS: f64 = 0.25e-6;
/// The same for a harvest as such: locks, a system call, the interrupts that flush the other processors' TLBs.
const HARVEST_SECONDS: f64 = 50e-6;

/// By how much (a ratio) a vCPU may write faster than it did until now without filling its ring before the next look. More
/// means fewer full rings after a change, and earlier harvests all the time.
const SURGE: f64 = 1.25;

/// How much of what was known is left (a ratio) when a measurement is averaged in.
const KEEP: f64 = 0.5;

/// Measurements over less time than this say nothing of a rate, in seconds: a handful of entries at the fastest.
const LEAST_INTERVAL: f64 = 50e-6;

/// The longest sleep, with rings of `entries`.
pub(crate) fn longest(entries: u32) -> Duration {
    (FASTEST_FILL * entries / 2).clamp(LONGEST.0, LONGEST.1)
}

/// What is known of one ring.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Pages that went through it, harvested or not.
    passed: u64,
    /// New entries a second: goes up at once, and down by halves.
    rate: f64,
    /// The most that was ever seen.
    fastest: f64,
    used: u32,
}

impl Known {
    fn update(&mut self, view: &RingView, seconds: f64) {
        let passed = view.harvested + u64::from(view.used);
        if seconds >= LEAST_INTERVAL {
            let latest = passed.saturating_sub(self.passed) as f64 / seconds;
            self.rate = latest.max(self.rate * KEEP + latest * (1.0 - KEEP));
            self.fastest = self.fastest.max(latest);
            self.passed = passed;
        }
        self.used = view.used;
    }
}

/// Knows each vCPU's own fill rate, and harvests each ring as late as is safe.
#[derive(Debug)]
pub(crate) struct Predict {
    longest: Duration,
    looked_at: Duration,
    rings: Vec<Known>,
    /// Seconds that harvesting a page takes, besides [`HARVEST_SECONDS`].
    page_seconds: f64,
    usable: u32,
    sleep: Duration,
}

impl Predict {
    pub(crate) fn new(entries: u32, now: Duration) -> Self {
        Self {
            longest: longest(entries),
            looked_at: now,
            rings: Vec::new(),
            page_seconds: HARVEST_PAGE_SECONDS,
            usable: entries,
            sleep: longest(entries),
        }
    }

    /// Decides at `now` what is `due` to be harvested at once, in ascending order, and how long to sleep after that.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        usable: u32,
        views: &[RingView],
        due: &mut Vec<usize>,
    ) -> Duration {
        let seconds = now.saturating_sub(self.looked_at).as_secs_f64();
        if seconds >= LEAST_INTERVAL {
            self.looked_at = now;
        }
        self.usable = usable;
        self.rings.resize(views.len(), Known::default());
        due.clear();
        let mut sleep = self.longest.as_secs_f64();
        for (ring, view) in views.iter().enumerate() {
            let mut known = self.rings[ring];
            known.update(view, seconds);
            let wait = self.wait(&known);
            let harvest = wait.is_none() && self.worth_it(&known, view, now);
            if harvest {
                due.push(ring);
                known.used = 0;
            }
            self.rings[ring] = known;
            // A ring that was just emptied, or is left to get full, is looked at when half of it may be in use again.
            let room =
                f64::from(if harvest { usable } else { usable.saturating_sub(known.used).max(usable / 2) });
            sleep = sleep.min(wait.unwrap_or(room / (known.rate * SURGE) / 2.0));
        }
        self.sleep = Duration::from_secs_f64(sleep.max(0.0)).clamp(SHORTEST, self.longest);
        self.sleep
    }

    /// Seconds until the ring has to be looked at again; `None` if it would be full before that.
    fn wait(&self, known: &Known) -> Option<f64> {
        let room = f64::from(self.usable.saturating_sub(known.used));
        let rate = known.rate * SURGE;
        // Harvested by the next look, which comes no sooner than this, and until then it fills.
        let needed = rate * (SHORTEST.as_secs_f64() + self.harvest_seconds());
        (room > needed).then(|| (room - needed) / rate)
    }

    /// What harvesting a full ring takes.
    fn harvest_seconds(&self) -> f64 {
        HARVEST_SECONDS + self.page_seconds * f64::from(self.usable)
    }

    /// Whether a harvest now loses less of the guest's time than letting the ring get full, which its vCPU empties then.
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
        let fault = FAULT_SECONDS.min(1.0 / known.fastest.max(1.0));
        let stall = match view.full_exits {
            0 => self.harvest_seconds(),
            exits => view.stalled.as_secs_f64() / exits as f64,
        };
        let (used, usable) = (f64::from(known.used), f64::from(self.usable));
        let until_full = (usable - used).max(0.0) / known.rate;
        let now_lost = fault * used / since;
        let full_lost = (fault * usable + stall) / (since + until_full + stall);
        now_lost <= full_lost
    }

    /// A harvest of `pages` took this long.
    pub(crate) fn took(&mut self, pages: u64, time: Duration) {
        // Few pages measure the call, not the page.
        if pages >= u64::from(self.usable / 4).max(1) {
            let each = (time.as_secs_f64() - HARVEST_SECONDS).max(0.0) / pages as f64;
            self.page_seconds = self.page_seconds * KEEP + each * (1.0 - KEEP);
        }
    }

    /// More entries of `ring` than this at the next turn would be a surprise.
    pub(crate) fn watermark(&self, ring: usize) -> u32 {
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

    fn look(predict: &mut Predict, ms: u64, views: &[RingView]) -> (f64, Vec<usize>) {
        let mut due = Vec::new();
        let sleep = predict.look(Duration::from_millis(ms), USABLE, views, &mut due);
        (sleep.as_secs_f64() * 1e3, due)
    }

    fn predict() -> Predict {
        Predict::new(4096, Duration::ZERO)
    }

    #[test]
    fn an_idle_guest_is_looked_at_a_hundred_times_a_second_at_most() {
        let mut predict = predict();
        for ms in [10, 20, 1000] {
            assert_eq!(look(&mut predict, ms, &[view(0, 0, 0), view(700, 0, 0)]).1, []);
        }
        assert_eq!(look(&mut predict, 1010, &[view(0, 0, 0), view(700, 0, 0)]).0, 10.24);
        assert_eq!(longest(65536), Duration::from_micros(163_840));
        assert_eq!((longest(256), longest(1 << 20)), LONGEST);
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
        assert_eq!(look(&mut predict, 3000, &[view(4000, 0, 0)]).0, 10.24, "and not watched closely, either");
    }

    #[test]
    fn a_ring_that_fills_steadily_is_harvested_right_before_it_is_full_and_alone() {
        let mut predict = predict();
        let (mut ms, mut looks) = (0.0, 0);
        // 100 pages a millisecond: full after 40.32 ms.
        loop {
            let (sleep, due) = look_at(&mut predict, ms, &[view((ms * 100.0) as u32, 0, 0), view(30, 0, 0)]);
            if !due.is_empty() {
                assert_eq!(due, [0]);
                break;
            }
            ms += sleep;
            looks += 1;
        }
        assert!((37.0..40.0).contains(&ms), "{ms}");
        assert!(looks < 12, "{looks}");
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers of a test")]
    fn look_at(predict: &mut Predict, ms: f64, views: &[RingView]) -> (f64, Vec<usize>) {
        let mut due = Vec::new();
        let sleep = predict.look(Duration::from_micros((ms * 1e3) as u64), USABLE, views, &mut due);
        (sleep.as_secs_f64() * 1e3, due)
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
    fn harvests_that_take_longer_begin_earlier() {
        let (mut quick, mut slow) = (predict(), predict());
        slow.usable = USABLE;
        quick.usable = USABLE;
        for _ in 0..20 {
            slow.took(4000, Duration::from_millis(10));
            slow.took(3, Duration::from_secs(1));
        }
        let known = Known { rate: 100_000.0, fastest: 100_000.0, used: 3000, passed: 0 };
        assert!(quick.wait(&known).is_some());
        assert_eq!(slow.wait(&known), None);
    }
}
