//! Thread that asks the guest for statistics at intervals.

use super::VmBalloon;
use crate::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

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
