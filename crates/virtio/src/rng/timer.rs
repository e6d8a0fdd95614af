//! Thread that rings a doorbell at a later time.

use crate::device::Doorbell;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

#[derive(Debug, Default)]
struct State {
    at: Option<Instant>,
    ended: bool,
}

#[derive(Debug, Default)]
struct TimerState {
    state: Mutex<State>,
    changed: Condvar,
}

impl TimerState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next time to ring. Returns false at the end.
    fn wait(&self) -> bool {
        let mut state = self.lock();
        while !state.ended {
            let left = state.at.map(|at| at.saturating_duration_since(Instant::now()));
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => {
                    state.at = None;
                    return true;
                }
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        false
    }
}

/// Timer thread. It rings without holding a lock of its own.
#[derive(Debug)]
pub(super) struct Timer {
    shared: Arc<TimerState>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    pub(super) fn start(doorbell: Arc<dyn Doorbell>, queue: u16) -> io::Result<Self> {
        let shared = Arc::new(TimerState::default());
        let own = Arc::clone(&shared);
        let live = move || {
            while own.wait() {
                doorbell.ring(queue);
            }
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Device, "rng", live)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Sets the time of the next ring to `at`, which replaces an earlier time.
    pub(super) fn ring_at(&self, at: Instant) {
        self.shared.lock().at = Some(at);
        self.shared.changed.notify_all();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        // A doorbell that keeps the device alive while it rings may be the last owner. It then
        // drops the device and this timer on the timer's own thread.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}
