//! Stopping the guest: for an instant, to learn what that takes; for its state; and letting it go on if its I/O is busy.

use super::{Driver, local};
use crate::source::events::Event;
use crate::vm::{self, Rehearsal};
use std::time::{Duration, Instant};
use vmferry_core::{Section, VmError};
use vmferry_wire::{MAX_CONTROL_BYTES, MAX_SECTIONS, MAX_STATE_BYTES};

impl Driver<'_, '_> {
    /// Stops the guest for an instant to learn what that costs.
    pub(super) fn rehearse(&mut self, within: Duration) -> Event {
        let rehearsed = self.busy(|vm, _, _| vm::rehearse(vm, within));
        if let Ok(Rehearsal { sections: Ok(_), pause, stood, .. }) = &rehearsed {
            self.timings.tried(stood.saturating_sub(*pause));
        }
        match rehearsed {
            Ok(Rehearsal { sections: Err(busy), stood, .. }) => Event::Busy { stood, why: busy.to_string() },
            Ok(Rehearsal { sections: Ok(sections), pause, settle, save, stood }) => match fits(&sections) {
                Ok(state_bytes) => Event::Rehearsed { fixed: pause + save, save, settle, stood, state_bytes },
                Err(error) => local("rehearsing the pause", &error),
            },
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

/// Returns how many bytes the state has, if the wire carries that much: better known before the guest is stopped for it.
fn fits(sections: &[Section]) -> Result<u64, VmError> {
    /// What is said of a section besides its bytes.
    const AROUND: usize = 64;
    let bytes = |section: &Section| section.name.len() + section.payload.len();
    if let Some(large) = sections.iter().find(|section| bytes(section) > MAX_CONTROL_BYTES - AROUND) {
        let (name, size, most) = (&large.name, bytes(large), (MAX_CONTROL_BYTES - AROUND) >> 10);
        return Err(VmError::new(format!(
            "the device state '{name}' has {size} bytes, and {most} KiB go into one section"
        )));
    }
    let all: usize = sections.iter().map(bytes).sum();
    if all > MAX_STATE_BYTES || sections.len() > MAX_SECTIONS {
        let (most, count) = (MAX_STATE_BYTES >> 20, sections.len());
        return Err(VmError::new(format!(
            "the device state has {all} bytes in {count} sections, and {most} MiB in {MAX_SECTIONS} can be sent"
        )));
    }
    Ok(all as u64)
}
