//! Thread that asks the guest for statistics at intervals.

use super::VmBalloon;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Number of ticks between two questions while no caller reads the statistics.
const UNREAD: u32 = 10;
/// Number of ticks for which each tick has a question after a caller has read the statistics.
const ATTENTION: u32 = 10;
/// Value of an interval that depends on the readers.
const AUTOMATIC: u32 = u32::MAX;

/// Interval at which the guest is asked for statistics, in ticks of the thread: by default, of a
/// second each.
///
/// To answer, the guest handles an interrupt, reads and acknowledges its cause, and notifies the
/// device. An idle guest that is asked in every second has a fifth of its exits for this reason.
/// Therefore the guest is asked in every tick only while callers read the statistics.
#[derive(Debug)]
pub(super) struct Cadence {
    /// Interval that was set, 0 for never, or [`AUTOMATIC`].
    interval: AtomicU32,
    /// Number of ticks since the last question.
    waited: AtomicU32,
    /// Number of ticks since the last read.
    unread: AtomicU32,
}

impl Cadence {
    /// Creates an automatic interval, without a reader.
    pub(super) fn new() -> Self {
        let [waited, unread] = [0, ATTENTION].map(AtomicU32::new);
        Self { interval: AtomicU32::new(AUTOMATIC), waited, unread }
    }

    /// Returns the present interval. 0 means never.
    pub(super) fn interval(&self) -> u32 {
        match self.interval.load(Ordering::Relaxed) {
            AUTOMATIC if self.unread.load(Ordering::Relaxed) < ATTENTION => 1,
            AUTOMATIC => UNREAD,
            set => set,
        }
    }

    /// Sets the interval, independent of the readers. 0 means never.
    pub(super) fn set(&self, interval: u32) {
        self.interval.store(interval.min(AUTOMATIC - 1), Ordering::Relaxed);
    }

    /// Notes that a caller reads the statistics.
    pub(super) fn read(&self) {
        self.unread.store(0, Ordering::Relaxed);
    }

    /// Counts a tick. Returns true if the guest must be asked. Only the thread calls this method,
    /// so no other thread changes `waited`. A read at the same time may not be noted until the
    /// caller reads again.
    pub(super) fn tick(&self) -> bool {
        let waited = self.waited.load(Ordering::Relaxed).saturating_add(1);
        let interval = self.interval();
        let is_due = interval != 0 && waited >= interval;
        self.waited.store(if is_due { 0 } else { waited }, Ordering::Relaxed);
        let unread = self.unread.load(Ordering::Relaxed);
        if unread < ATTENTION {
            self.unread.store(unread + 1, Ordering::Relaxed);
        }
        is_due
    }
}

#[derive(Debug, Default)]
struct State {
    /// True while the guest runs: its memory and its device may change.
    running: bool,
    ending: bool,
}

#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Thread that asks for statistics. It touches guest memory and the device only while the guest
/// runs. [`set_running`](Self::set_running) waits until the thread has let go of both.
#[derive(Debug)]
pub(crate) struct StatsThread {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl StatsThread {
    /// Starts the thread, for a guest that does not run yet.
    pub(crate) fn start(balloon: Arc<VmBalloon>, every: Duration) -> Result<Self> {
        let gate = Arc::new(Gate::default());
        let own = Arc::clone(&gate);
        let live = move || {
            let mut state = own.lock();
            while !state.ending {
                let waited = own.changed.wait_timeout(state, every);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                if state.running && !state.ending {
                    balloon.refresh();
                }
            }
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Device, "balloon", live);
        let thread = thread.map_err(|source| Error::Thread { cpu: 0, source })?;
        Ok(Self { gate, thread: Some(thread) })
    }

    /// Sets whether the guest runs. After this returns for `false`, the thread does not touch the
    /// guest.
    pub(crate) fn set_running(&self, running: bool) {
        self.gate.lock().running = running;
    }
}

impl Drop for StatsThread {
    fn drop(&mut self) {
        self.gate.lock().ending = true;
        self.gate.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of the next `ticks` ticks, from 1, at which the guest is asked.
    fn asked(cadence: &Cadence, ticks: u32) -> Vec<u32> {
        (1..=ticks).filter(|_| cadence.tick()).collect()
    }

    #[test]
    fn guest_is_asked_in_every_tick_only_while_callers_read_the_statistics() {
        let cadence = Cadence::new();
        assert_eq!((cadence.interval(), asked(&cadence, 25)), (UNREAD, vec![10, 20]));
        cadence.read();
        assert_eq!(cadence.interval(), 1);
        // Ten ticks with a question each, and the next question comes ten ticks later.
        assert_eq!(asked(&cadence, 25), (1..=10).chain([20]).collect::<Vec<_>>());
        assert_eq!(cadence.interval(), UNREAD);
    }

    #[test]
    fn interval_that_was_set_does_not_depend_on_readers() {
        let cadence = Cadence::new();
        cadence.set(3);
        cadence.read();
        assert_eq!((cadence.interval(), asked(&cadence, 9)), (3, vec![3, 6, 9]));
        cadence.set(0);
        cadence.read();
        assert_eq!((cadence.interval(), asked(&cadence, 30)), (0, Vec::<u32>::new()));
        cadence.set(u32::MAX);
        assert!(asked(&cadence, 30).is_empty());
    }
}
