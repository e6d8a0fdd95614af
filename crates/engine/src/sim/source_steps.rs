//! Host of the source in the simulation: actions that take time.

use super::world::{Defect, World};
use crate::arbiter::Ownership;
use std::time::Duration;
use vmferry_core::Section;
use vmferry_protocol::source::{Action, Event};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

impl World {
    /// Completes an action that took time: its effect happens now.
    pub(super) fn source_step_done(&mut self, action: Action) {
        if self.source.ended() {
            return;
        }
        let failed = self.rng.per_mille(self.faults.step_fails);
        let event = match action {
            Action::Reconnect { .. } => {
                self.connect_again();
                return;
            }
            Action::HandOver { also } => self.hand_over(&also),
            Action::OpenChannels { .. } => self.open_channels(),
            Action::StartTracker => {
                self.memory.start_tracking();
                Event::TrackerStarted
            }
            Action::TrialPause { within } if self.rng.per_mille(self.faults.busy) => {
                self.memory.write_in_use(&mut self.rng);
                self.resume();
                still_busy(within)
            }
            Action::TrialPause { .. } => {
                self.resume();
                let fixed = Duration::from_micros(self.rng.below(500));
                let save = Duration::ZERO;
                Event::TrialPaused {
                    stop: fixed,
                    save,
                    quiesce: fixed / 2,
                    paused: fixed,
                    state_bytes: 0,
                    trial: self.rng.per_mille(900).then(|| self.sections()),
                }
            }
            Action::Harvest => self.harvest(),
            Action::Pause => {
                self.stop_free_page_requests();
                (self.source.running, self.source.paused) = (false, true);
                Event::Paused { wanted: self.source.wanted }
            }
            Action::Save { within } if self.rng.per_mille(self.faults.busy) => {
                self.memory.write_in_use(&mut self.rng);
                still_busy(within)
            }
            Action::RunOn => {
                let ours = !self.source.committed;
                self.promise(ours, |_| "went on after the commit".into());
                if !failed {
                    self.resume();
                }
                Event::Resumed
            }
            Action::Save { .. } => self.save(),
            Action::Release => {
                self.source.holds &= failed || self.defect == Defect::KeepsDisks;
                Event::Released
            }
            Action::Resume => {
                self.take_back(failed);
                Event::Resumed
            }
            other => failure(&format!("{other:?} is no step")),
        };
        self.source.done = Some(if failed { failure("a step") } else { event });
    }

    /// Sends the streams of device state as far as they have data.
    pub(super) fn stream_state(&mut self, paused: bool) {
        if self.source.ended() {
            return;
        }
        let mut bytes = 0;
        let mut failed = None;
        for stream in 0..self.source.streams.len() {
            let number = u32::try_from(stream).expect("few");
            for _ in 0..self.rng.below(3) {
                let (sent, ended) = &mut self.source.streams[stream];
                if *ended {
                    break;
                }
                // Each byte depends on its offset, so that a lost or repeated byte is found.
                let piece: Vec<u8> = (*sent..*sent + 3).map(|at| at.to_le_bytes()[0]).collect();
                (*sent, bytes) = (*sent + 3, bytes + 3);
                failed = failed.or(self.source_sends(ToTarget::StreamBytes { stream: number, bytes: piece }));
            }
            if paused && !std::mem::replace(&mut self.source.streams[stream].1, true) {
                failed = failed.or(self.source_sends(ToTarget::StreamEnd { stream: number }));
            }
        }
        self.source.streamed = Some(failed.unwrap_or(Event::StateStreamed { bytes, left: 0 }));
    }

    fn save(&mut self) -> Event {
        // Saving may write guest memory while the guest is stopped.
        self.memory.write_in_use(&mut self.rng);
        self.frozen = self.is_local().then(|| self.memory.pages.clone());
        if self.is_local() && self.defect == Defect::WritesAfterSaving {
            self.memory.write_in_use(&mut self.rng);
        }
        Event::Saved { sections: self.sections() }
    }

    /// Returns some device state.
    fn sections(&mut self) -> Vec<Section> {
        let section = |instance| Section { name: "cpu".into(), instance, version: 1, payload: vec![7] };
        (0..u32::try_from(self.rng.below(4)).expect("small")).map(section).collect()
    }

    fn open_channels(&mut self) -> Event {
        if self.link_up() {
            self.serve();
            return Event::ChannelsOpened;
        }
        let why = "opening channels";
        if self.source.claims.is_some() { Event::PeerLost(why.into()) } else { failure(why) }
    }

    fn take_back(&mut self, failed: bool) {
        let won = self.arbiter.register == Some(Ownership::Source);
        let ours = !self.source.committed || self.source.given_back || (self.has_arbiter() && won);
        self.promise(ours, |_| "resumed after the commit, without the target's word".into());
        self.source.resume_failed = failed;
        if !failed {
            self.resume();
        }
        self.stop_senders();
    }

    fn resume(&mut self) {
        self.thaw();
        (self.source.running, self.source.paused) = (true, false);
        let free = !self.target.holds;
        self.promise(free, |_| "resumed without its disks".into());
        self.source.holds = true;
        self.check_owner();
    }
}

fn still_busy(within: Duration) -> Event {
    Event::Busy { paused: within.min(Duration::from_secs(10)), why: "requests are under way".into() }
}

fn failure(what: &str) -> Event {
    Event::LocalFailure(Refusal::new(RefusalCode::Other, format!("{what} failed")))
}
