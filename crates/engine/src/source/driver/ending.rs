//! What is undone at a migration's end, and the throttle, which never outlives it.

use super::{Driver, Input, local};
use crate::monitor::MigrationState;
use crate::source::events::{Event, Outcome};
use crate::vm::{caught, shielded};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

impl Driver<'_, '_> {
    /// However this migration ends, the guest is not slowed afterwards, wherever it then runs.
    pub(super) fn unthrottle(&mut self) {
        if std::mem::take(&mut self.throttled) {
            shielded("the guest may stay slowed", || {
                // It can only fail for want of a thread, which this needs none of.
                let _ = self.vm.throttle(&[0.0]);
            });
        }
    }

    pub(super) fn throttle(&mut self, shares: Vec<f64>) {
        self.throttled = true;
        if let Err(error) = self.vm.throttle(&shares) {
            tracing::warn!("the guest dirties faster than the link carries: {error}");
        } else {
            self.timings.throttled(shares);
        }
    }

    pub(super) fn resume(&mut self) -> Event {
        // The guest first: stopping senders and the tracker can take their time.
        self.unthrottle();
        self.stop_asking();
        self.paused = false;
        let resumed = self.busy(|vm, _, _| vm.resume());
        self.timings.resumed();
        self.shutdown();
        resumed.map_or_else(|error| local("resuming the guest", &error), |()| Event::Resumed)
    }

    /// Nobody needs the register any more, unless the target may have to read it.
    pub(super) fn close_fence(&self) {
        if let Some(fence) = self.fence.as_ref().filter(|_| self.session.fence_done()) {
            shielded("the register of the fence stays", || fence.close());
        }
    }

    /// Leaves nothing behind: no thread blocked, no page tracked, and the target heard our last word.
    pub(super) fn close(&mut self, outcome: &Outcome) {
        self.unthrottle();
        self.stop_asking();
        self.shutdown();
        self.control.finish();
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.inbox.control_lost()
            && let Some(left) = deadline.checked_duration_since(Instant::now())
        {
            match self.inputs.1.recv_timeout(left) {
                Ok((_, Input::ControlLost(_))) | Err(_) => break,
                Ok(_) => {}
            }
        }
        self.control.shutdown();
        self.end_senders();
        if self.tracking
            && let Err(error) = caught(|| self.tracker.stop())
        {
            tracing::warn!("the guest may run slower, because tracking could not be stopped: {error}");
        }
        self.ground.monitor.update(|progress| {
            progress.busy = None;
            progress.state = match outcome {
                Outcome::Completed => MigrationState::Completed,
                Outcome::Cancelled(_) => MigrationState::Cancelled,
                Outcome::Failed(_) => MigrationState::Failed,
                Outcome::Unknown(_) => MigrationState::Unknown,
                Outcome::Lost(_) => MigrationState::Lost,
            };
        });
    }

    /// A tracker that is being stopped must not be asked to protect a page: nobody would unprotect it.
    fn end_senders(&mut self) {
        self.jobs.clear();
        // Nobody listens any more, so nobody waits for room.
        self.inputs = sync_channel(1);
        for sender in self.senders.drain(..) {
            if sender.join().is_err() {
                tracing::error!("a channel's thread panicked");
            }
        }
    }
}
