//! Number of bulk channels that send at the same time.
//!
//! Each page belongs to one channel for the whole migration (see [`sender`](super::sender)), so the
//! number of channels cannot change. Instead, a sender takes a [`Turn`] for its share of a pass,
//! and [`Turns`] limits the number of turns. With a limit below the number of channels, some
//! senders sleep, and the processors that they leave go to the guest's vCPUs. A sender keeps its
//! turn from chunk to chunk unless the limit was lowered, so senders do not wake each other for
//! every chunk.
//!
//! [`Adapter`] decides about the limit. While the guest is paused, there is no limit, because no
//! vCPU wants a processor.
//!
//! # Deadlock
//! A sender with a turn waits only for its socket, for the bandwidth limit, for the target's
//! answers to hashes, and for locks that are held for a bounded time. None of these waits for
//! another sender: the target reads each channel with a thread of its own, and the driver delivers
//! the answers. The limit is at least 1, so a sender that waits for a turn gets one.

use crate::report::SenderFigures;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::sync::PoisonError;
use std::time::Duration;

/// Limit for the senders that work at the same time.
#[derive(Debug)]
pub(crate) struct Turns {
    state: Mutex<State>,
    /// Notified when a turn ends, and when the limit changes.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    limit: u16,
    taken: u16,
}

impl Turns {
    /// Creates a limit of `limit` turns at the same time.
    pub(crate) fn new(limit: u16) -> Self {
        assert!(limit > 0, "with no turn, no page is ever sent");
        Self { state: Mutex::new(State { limit, taken: 0 }), changed: Condvar::new() }
    }

    /// Returns the limit.
    pub(crate) fn limit(&self) -> u16 {
        self.lock().limit
    }

    /// Waits for a turn, and takes it.
    pub(crate) fn take(&self) -> Turn<'_> {
        self.take_with(self.lock());
        Turn(self)
    }

    fn take_with(&self, mut state: MutexGuard<'_, State>) {
        while state.taken >= state.limit {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.taken += 1;
    }

    /// Changes the limit. Turns that were taken already continue.
    pub(crate) fn set_limit(&self, limit: u16) {
        assert!(limit > 0, "with no turn, no page is ever sent");
        self.lock().limit = limit;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Right of a sender to work. Dropping it ends the turn.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Turns);

impl Turn<'_> {
    /// Returns true if more turns are taken than the limit allows, so that [`renew`](Self::renew)
    /// waits unless that changes.
    pub(crate) fn is_surplus(&self) -> bool {
        let state = self.0.lock();
        state.taken > state.limit
    }

    /// Keeps the turn. If more turns are taken than the limit allows, ends it and waits for
    /// another.
    pub(crate) fn renew(&self) {
        let mut state = self.0.lock();
        if state.taken > state.limit {
            // As many turns as the limit allows are still taken, so no sender can begin.
            state.taken -= 1;
            self.0.take_with(state);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        assert!(state.taken > 0, "this turn was taken");
        state.taken -= 1;
        drop(state);
        self.0.changed.notify_one();
    }
}

/// Time between two decisions. In this time, a busy vCPU gets or waits for several slices of the
/// scheduler.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// Number of processors that vCPUs lack on average, from which on one sender less may work.
const CROWDED: f64 = 0.2;
/// Number of processors that vCPUs may lack on average for one sender more.
const CALM: f64 = 0.05;
/// Share of its time for which each vCPU may wait in addition, if a processor is idle. A vCPU that
/// often sleeps waits for a few microseconds each time that it is woken, for example ten thousand
/// times a second, although it lacks no processor. A control group may also limit the processors of
/// this process, so that vCPUs that wait for longer lack a processor even on an idle host.
const WAKE_UPS: f64 = 0.05;
/// Number of senders that work if they have to share processors with vCPUs.
///
/// A sender that shares its processor with a vCPU works for half of the time at most, because it
/// [takes breaks](crate::breaks). So two of them are about as fast as one on an idle processor.
const SHARING: u16 = 2;
/// Number of processors that vCPUs lack at least if senders share processors with them. A sender
/// takes up to half of a processor.
const SHARED: f64 = 0.4;
/// Number of processors that must be idle for one sender more.
const SPARE: f64 = 0.9;
/// Number of decisions for which the limit stays after it was lowered right after it had been
/// raised. It doubles each time, up to the maximum.
const FIRST_HOLD: u32 = 4;
const LONGEST_HOLD: u32 = 64;

/// Decides how many senders work at the same time.
///
/// The vCPUs of the guest come first: if they wait for processors, the limit falls by as many
/// senders as they lack processors. If they do not wait, and a processor is idle, the limit rises
/// by one. If that makes the vCPUs wait, the limit falls again, and the next attempt comes later.
///
/// If no processor is idle, and the vCPUs still lack [`SHARED`] processors with few senders, these
/// senders share processors with vCPUs. Then [`SHARING`] of them work.
#[derive(Debug)]
pub(crate) struct Adapter {
    channels: u16,
    /// Time of the last reading, and the total waiting time then. `None` before the first one.
    last: Option<(Duration, Duration)>,
    /// Decisions until the limit may rise.
    hold: u32,
    next_hold: u32,
    /// True if the last change raised the limit.
    rose: bool,
    figures: SenderFigures,
}

impl Adapter {
    /// Returns the decision maker for `channels` channels. At first, `limit` of them may send.
    pub(crate) fn new(channels: u16, limit: u16) -> Self {
        let limit = limit.clamp(1, channels);
        let figures = SenderFigures { now: limit, least: limit, most: limit, changes: 0, vcpu_wait_us: 0 };
        Self { channels, last: None, hold: 0, next_hold: FIRST_HOLD, rose: false, figures }
    }

    /// Returns true if a decision is due at the time `now`.
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        self.last.is_none_or(|(at, _)| now.saturating_sub(at) >= INTERVAL)
    }

    /// Decides at the time `now`. `waits` are the times for which each vCPU has waited for
    /// processors, and `idle` is the number of processors that were idle since the last decision.
    /// Returns the limit.
    pub(crate) fn decide(&mut self, now: Duration, waits: &[Duration], idle: f64) -> u16 {
        let waited = waits.iter().sum();
        let Some((at, before)) = self.last.replace((now, waited)) else { return self.limit() };
        let waited = waited.saturating_sub(before);
        self.figures.vcpu_wait_us += u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        let lacking = waited.as_secs_f64() / now.saturating_sub(at).as_secs_f64().max(1e-9);
        let usual = if idle >= SPARE { WAKE_UPS * waits.len() as f64 } else { 0.0 };
        let sharing = SHARING.min(self.channels);
        if self.limit() <= sharing && lacking >= SHARED && idle < SPARE {
            self.change(sharing);
            self.rose = false;
        } else if lacking >= CROWDED + usual {
            self.lower(lacking);
        } else if self.hold > 0 {
            self.hold -= 1;
        } else if lacking <= CALM + usual && idle >= SPARE && self.limit() < self.channels {
            self.change(self.limit() + 1);
            self.rose = true;
        } else if lacking <= CALM + usual && self.rose {
            // The last increase did no harm.
            (self.rose, self.next_hold) = (false, FIRST_HOLD);
        }
        self.limit()
    }

    fn lower(&mut self, lacking: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and saturates"
        )]
        let senders = lacking.ceil() as u16;
        if self.rose {
            self.hold = self.next_hold;
            self.next_hold = (self.next_hold * 2).min(LONGEST_HOLD);
        }
        self.rose = false;
        self.change(self.limit().saturating_sub(senders).max(1));
    }

    fn change(&mut self, limit: u16) {
        assert!((1..=self.channels).contains(&limit), "{limit} of {} channels", self.channels);
        self.figures.changes += u64::from(limit != self.figures.now);
        self.figures.now = limit;
        self.figures.least = self.figures.least.min(limit);
        self.figures.most = self.figures.most.max(limit);
    }

    /// Forgets the last reading, because the guest was paused.
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }

    /// Returns the limit.
    pub(crate) fn limit(&self) -> u16 {
        self.figures.now
    }

    pub(crate) fn figures(&self) -> SenderFigures {
        self.figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shuttle::sync::atomic::{AtomicU16, Ordering};
    use std::sync::Arc;

    /// Decides every 100 ms of a host whose vCPUs lack `lacking` processors, and on which `idle`
    /// processors are idle. Returns the limits.
    fn limits(adapter: &mut Adapter, readings: &[(f64, f64)]) -> Vec<u16> {
        let (at, mut waited) = *adapter.last.get_or_insert_default();
        (1..)
            .zip(readings)
            .map(|(count, (lacking, idle))| {
                waited += INTERVAL.mul_f64(*lacking);
                let now = at + INTERVAL * count;
                assert!(adapter.is_due(now) && !adapter.is_due(now - Duration::from_millis(1)));
                adapter.decide(now, &[waited], *idle)
            })
            .collect()
    }

    #[test]
    fn waiting_vcpus_take_senders_away_and_idle_processors_give_them_back() {
        let mut adapter = Adapter::new(4, 4);
        assert_eq!(limits(&mut adapter, &[(0.1, 0.0), (0.3, 0.0), (1.5, 0.0), (9.0, 0.0)]), [4, 3, 1, 2]);
        assert_eq!(limits(&mut adapter, &[(0.0, 0.5), (0.0, 1.0), (0.15, 2.0), (0.0, 3.0)]), [2, 3, 3, 4]);
        assert_eq!(limits(&mut adapter, &[(0.0, 3.0), (0.0, 3.0)]), [4, 4]);
        let figures = adapter.figures();
        assert_eq!((figures.now, figures.least, figures.most, figures.changes), (4, 1, 4, 5));
        assert_eq!(figures.vcpu_wait_us, 1_105_000);
    }

    #[test]
    fn wake_ups_of_many_vcpus_take_no_sender_away_while_a_processor_is_idle() {
        // Each of 64 vCPUs is woken ten thousand times a second, and waits for 2 us each time.
        let waits = |intervals: u32| vec![INTERVAL.mul_f64(0.02) * intervals; 64];
        let decide = |idle| {
            let mut adapter = Adapter::new(4, 3);
            (1..4).map(|count| adapter.decide(INTERVAL * count, &waits(count), idle)).collect::<Vec<_>>()
        };
        assert_eq!(decide(8.0), [3, 4, 4]);
        assert_eq!(decide(0.5), [3, 1, 2], "no processor is idle, so the vCPUs lack processors");
    }

    #[test]
    fn second_sender_works_while_senders_share_processors_with_vcpus() {
        let mut adapter = Adapter::new(4, 1);
        assert_eq!(limits(&mut adapter, &[(0.1, 0.0), (0.6, 0.0), (0.9, 0.0), (0.3, 0.0)]), [1, 2, 2, 1]);
        // A control group limits the processors of the process.
        assert_eq!(limits(&mut adapter, &[(0.6, 1.0), (0.6, 1.0)]), [1, 1]);
        // One processor is idle.
        assert_eq!(limits(&mut adapter, &[(0.0, 1.0), (0.3, 0.0), (0.0, 0.0)]), [2, 1, 1]);
        let mut only = Adapter::new(1, 1);
        assert_eq!(limits(&mut only, &[(0.6, 0.0), (0.6, 1.0)]), [1, 1]);
    }

    #[test]
    fn attempts_that_make_vcpus_wait_become_rare() {
        let mut adapter = Adapter::new(2, 1);
        // A second sender always makes the vCPUs wait.
        let (mut raised, mut limit) = (Vec::new(), 1);
        for step in 0..200 {
            let lacking = if limit == 2 { 0.5 } else { 0.0 };
            let next = limits(&mut adapter, &[(lacking, 1.0)])[0];
            if next > limit {
                raised.push(step);
            }
            limit = next;
        }
        let pauses: Vec<i32> = raised.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(pauses[..5], [6, 10, 18, 34, 66]);
        // The vCPUs become idle, so the second sender does no harm any more.
        let calm = limits(&mut adapter, &[(0.0, 1.0); 80]);
        assert_eq!(calm.last(), Some(&2));
        assert_eq!(adapter.next_hold, FIRST_HOLD);
    }

    #[test]
    fn time_of_a_pause_is_not_counted() {
        let mut adapter = Adapter::new(2, 2);
        limits(&mut adapter, &[(0.0, 0.0)]);
        adapter.forget();
        assert!(adapter.is_due(Duration::ZERO));
        assert_eq!(adapter.decide(Duration::from_secs(9), &[Duration::from_secs(8)], 0.0), 2);
        assert_eq!(adapter.figures().vcpu_wait_us, 0);
    }

    /// Senders that take turns while the limit changes.
    fn senders_take_turns() {
        let turns = Arc::new(Turns::new(1));
        let (working, most) = (Arc::new(AtomicU16::new(0)), Arc::new(AtomicU16::new(0)));
        let work = || {
            let (turns, working, most) = (Arc::clone(&turns), Arc::clone(&working), Arc::clone(&most));
            shuttle::thread::spawn(move || {
                let turn = turns.take();
                for _ in 0..2 {
                    turn.renew();
                    let now = working.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    working.fetch_sub(1, Ordering::SeqCst);
                }
            })
        };
        let threads = [work(), work(), work()];
        turns.set_limit(2);
        turns.set_limit(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(most.load(Ordering::SeqCst) <= 2, "more senders than turns worked");
        assert_eq!(turns.lock().taken, 0);
    }

    #[test]
    fn every_sender_gets_its_turns_and_no_more_than_the_limit_work() {
        shuttle::check_random(senders_take_turns, 2000);
        shuttle::check_dfs(
            || {
                let turns = Arc::new(Turns::new(2));
                let other = Arc::clone(&turns);
                let thread = shuttle::thread::spawn(move || other.take().renew());
                let turn = turns.take();
                turns.set_limit(1);
                turn.renew();
                drop(turn);
                thread.join().unwrap();
                assert_eq!(turns.lock().taken, 0);
            },
            None,
        );
    }
}
