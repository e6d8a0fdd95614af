//! Time slices of a throttle, which stops threads for a share of their time.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Period in which a thread is held once, for its share of the period. The period is so short that
/// no guest treats a hold as a fault.
const SLICE: Duration = Duration::from_millis(10);

/// Shares of a throttle: the share of its time for which the thread of each vCPU is held, and the
/// time at which the next hold is due.
///
/// Each thread calls [`pass`](Self::pass), which holds the thread by a function of the caller. A
/// hold takes at most 10 ms. A thread that calls `pass` often first asks [`is_due`](Self::is_due).
/// For threads that must be interrupted to call `pass`, another thread calls
/// [`nudge`](Self::nudge).
#[derive(Debug)]
pub struct ThrottleShares {
    made: Instant,
    vcpus: Box<[VcpuShare]>,
}

#[derive(Debug, Default)]
struct VcpuShare {
    /// Share of the time for which the vCPU must be held, in millionths.
    share: AtomicU32,
    /// Time at which the next hold is due, in microseconds since `made`. The value is `u64::MAX`
    /// while the vCPU is held: a nudge at that time would be lost, and the vCPU would then run for
    /// a whole slice.
    due_us: AtomicU64,
    /// Total time for which the vCPU was held.
    total_us: AtomicU64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl ThrottleShares {
    /// Creates the shares of `vcpus` vCPUs, which are all 0.
    #[must_use]
    pub fn new(vcpus: usize) -> Self {
        Self { made: Instant::now(), vcpus: (0..vcpus).map(|_| VcpuShare::default()).collect() }
    }

    /// Sets the share of the time for which each vCPU is held, from 0 to 1. The last share also
    /// applies to all further vCPUs. An empty list sets all shares to 0. Returns true if any vCPU
    /// must be held.
    pub fn set(&self, shares: &[f64]) -> bool {
        let mut any = false;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            let share = shares.get(index).or(shares.last()).copied().unwrap_or(0.0).clamp(0.0, 1.0);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to a million")]
            let millionths = (share * 1e6) as u32;
            any |= millionths > 0;
            vcpu.share.store(millionths, Ordering::Relaxed);
        }
        any
    }

    /// Returns the total time for which each vCPU was held.
    #[must_use]
    pub fn totals(&self) -> Vec<Duration> {
        let total = |vcpu: &VcpuShare| Duration::from_micros(vcpu.total_us.load(Ordering::Relaxed));
        self.vcpus.iter().map(total).collect()
    }

    /// Returns true if the next hold of `vcpu` is due. While the share of the vCPU is 0, the call
    /// is a single load.
    ///
    /// # Panics
    /// Panics if there is no such vCPU.
    #[must_use]
    pub fn is_due(&self, vcpu: usize) -> bool {
        let vcpu = &self.vcpus[vcpu];
        vcpu.share.load(Ordering::Relaxed) > 0
            && vcpu.due_us.load(Ordering::Relaxed) <= micros(self.made.elapsed())
    }

    /// Holds the calling thread, the thread of `vcpu`, for its share of the time since its previous
    /// hold. Does nothing if the share is 0, or if the previous hold began less than 5 ms ago.
    /// Returns true if the thread was held.
    ///
    /// `hold` must wait for the given time, and may return early. `last` is the time of the
    /// previous hold, which this method updates. Keep the variable between the calls, and reset it
    /// to `None` after a pause.
    ///
    /// # Panics
    /// Panics if there is no such vCPU.
    pub fn pass(&self, vcpu: usize, last: &mut Option<Instant>, hold: impl FnOnce(Duration)) -> bool {
        let vcpu = &self.vcpus[vcpu];
        let share = vcpu.share.load(Ordering::Relaxed);
        if share == 0 {
            *last = None;
            return false;
        }
        let now = Instant::now();
        // The hold depends on the time since the previous hold, so a missed turn is made up for.
        let since = last.map_or(SLICE, |last| now - last);
        // A nudge comes once in each slice. At other exits the vCPU is not due.
        if since < SLICE / 2 {
            return false;
        }
        *last = Some(now);
        let share = f64::from(share) / 1e6;
        vcpu.due_us.store(u64::MAX, Ordering::Relaxed);
        hold(since.mul_f64(share).min(SLICE));
        vcpu.total_us.fetch_add(micros(now.elapsed()), Ordering::Relaxed);
        // Measured from the real end of the hold, which is later than planned on a busy host.
        let due = self.made.elapsed() + SLICE.mul_f64(1.0 - share);
        vcpu.due_us.store(micros(due), Ordering::Relaxed);
        true
    }

    /// Calls `nudge` for each vCPU whose hold is due, so that its thread calls
    /// [`pass`](Self::pass). Returns the time until the next hold is due, at most 10 ms.
    pub fn nudge(&self, mut nudge: impl FnMut(usize)) -> Duration {
        let now = micros(self.made.elapsed());
        let mut next = now + micros(SLICE);
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            if vcpu.share.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let due = vcpu.due_us.load(Ordering::Relaxed);
            if due <= now {
                // If the thread misses this nudge, the next nudge comes a slice later.
                vcpu.due_us.store(now + micros(SLICE), Ordering::Relaxed);
                nudge(index);
            } else {
                next = next.min(due);
            }
        }
        Duration::from_micros(next - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `pass` as often as it can until the vCPU was held `times` times. Returns the holds and
    /// the elapsed time.
    fn held(shares: &ThrottleShares, vcpu: usize, times: usize) -> (Vec<Duration>, Duration) {
        let (mut holds, mut last, begin) = (Vec::new(), None, Instant::now());
        while holds.len() < times {
            if shares.is_due(vcpu) {
                shares.pass(vcpu, &mut last, |time| {
                    std::thread::sleep(time);
                    holds.push(time);
                });
            }
        }
        (holds, begin.elapsed())
    }

    #[test]
    fn thread_that_polls_is_held_for_its_share_and_at_most_a_slice_at_once() {
        for share in [0.2, 0.9, 1.0] {
            let shares = ThrottleShares::new(1);
            assert!(shares.set(&[share]));
            let (holds, took) = held(&shares, 0, 20);
            assert!(holds.iter().all(|hold| *hold <= SLICE), "{holds:?}");
            let total = shares.totals()[0];
            let planned: Duration = holds.iter().sum();
            // A sleep is never shorter than requested. The total counts whole microseconds.
            assert!(total + Duration::from_micros(20) >= planned && total <= took, "{total:?}, {holds:?}");
            // Each hold is for the time since the previous one, but never longer than a slice. On a
            // busy host the sum may be too short, and never too long.
            assert!(planned <= took.mul_f64(share) + SLICE, "{planned:?} of {took:?}, share {share}");
            assert!(planned >= SLICE.mul_f64(share) * 9, "{planned:?}: {holds:?}");
        }
    }

    #[test]
    fn only_vcpus_with_a_share_are_due_and_the_last_share_applies_to_the_rest() {
        let shares = ThrottleShares::new(3);
        let due = |shares: &ThrottleShares| [0, 1, 2].map(|vcpu| shares.is_due(vcpu));
        assert_eq!(due(&shares), [false; 3]);
        assert!(shares.set(&[0.0, 0.5]));
        assert_eq!(due(&shares), [false, true, true]);
        let mut last = Some(Instant::now());
        assert!(!shares.pass(0, &mut last, |_| panic!("a vCPU without a share is held")));
        assert_eq!(last, None);
        assert!(!shares.set(&[]) && !shares.set(&[f64::NAN, -1.0]));
        assert_eq!(due(&shares), [false; 3]);
        assert_eq!(shares.totals(), [Duration::ZERO; 3]);
    }

    #[test]
    fn held_vcpu_is_not_due_and_not_nudged() {
        let shares = ThrottleShares::new(2);
        shares.set(&[0.5]);
        let nudged = |shares: &ThrottleShares| {
            let mut nudged = Vec::new();
            let wait = shares.nudge(|vcpu| nudged.push(vcpu));
            assert!(wait <= SLICE, "{wait:?}");
            nudged
        };
        assert!(shares.pass(0, &mut None, |_| {
            assert!(!shares.is_due(0));
            assert_eq!(nudged(&shares), [1]);
        }));
    }

    #[test]
    fn hold_that_ends_early_is_counted_as_it_was() {
        let shares = ThrottleShares::new(1);
        shares.set(&[1.0]);
        let begin = Instant::now();
        assert!(shares.pass(0, &mut None, |time| assert_eq!(time, SLICE)));
        assert!(shares.totals()[0] <= begin.elapsed());
    }
}
