//! Stopping the guest: for an instant, to learn what that takes; for its state; and letting it go on if its I/O is busy.

use super::{Driver, local};
use crate::source::events::Event;
use crate::vm::{self, Rehearsal};
use std::time::{Duration, Instant};

impl Driver<'_, '_> {
    /// Stops the guest for an instant to learn what that costs: saving here stands for loading there.
    pub(super) fn rehearse(&mut self, within: Duration) -> Event {
        match self.busy(|vm, _, _| vm::rehearse(vm, within)) {
            Ok(Rehearsal { sections: Err(busy), stood, .. }) => Event::Busy { stood, why: busy.to_string() },
            Ok(once) => Event::Rehearsed { fixed: once.pause + once.save * 2 },
            Err(error) => local("rehearsing the pause", &error),
        }
    }

    pub(super) fn save(&mut self, within: Duration) -> Event {
        let saved = self.busy(|vm, _, _| vm::save(vm, within));
        self.timings.saved();
        self.state_deadline = Instant::now().checked_add(self.ground.settings.peer_timeout);
        match saved {
            Ok(sections) => Event::Saved { sections },
            Err(busy) if busy.is_busy() => Event::Busy { stood: self.timings.stood(), why: busy.to_string() },
            Err(error) => local("saving the device state", &error),
        }
    }

    /// As before the pause.
    pub(super) fn go_on(&mut self) -> Event {
        let resumed = self.busy(|vm, _, _| vm.resume());
        self.timings.went_on(self.ground.settings.mode);
        self.ground.pacer.set(self.ground.settings.max_bandwidth);
        match resumed {
            Ok(()) => {
                self.paused = false;
                Event::Resumed
            }
            Err(error) => local("letting the guest go on", &error),
        }
    }
}
