//! Setup phase, from the hello to the first pass: the target accepts the guest, the channels are
//! opened, and tracking starts. In local mode, no pass follows: the target maps the memory, and the
//! guest is stopped.

use super::context::SourceContext;
use super::precopy::Precopy;
use super::stopping::{Origin, Stopping};
use super::switchover::Kind;
use super::{Next, State, ending, misplaced};
use crate::source::events::{Action, Event, Outcome};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_wire::{ToSource, ToTarget};

/// Setup of a migration.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) step: Step,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Step {
    AwaitAccept,
    /// Channels are being opened: `opened` is true once the source has opened them, `up` once the
    /// target has reported them.
    Opening {
        opened: bool,
        up: bool,
    },
    StartingTracker,
    /// In local mode, the target maps the memory of the guest, which still runs on the source.
    SharingMemory,
    /// In postcopy and local mode, the guest could not be stopped because of its I/O, and the
    /// source waits for the next attempt. No page was sent, and nothing is tracked.
    WaitingForIo,
}

impl Setup {
    pub(super) fn begin() -> Self {
        Self { step: Step::AwaitAccept }
    }

    /// Waits until the next attempt to quiesce the guest's I/O.
    pub(super) fn wait_for_io(self) -> Next {
        (State::Setup(Self { step: Step::WaitingForIo }), Vec::new())
    }

    pub(super) fn waits_for_io(&self) -> bool {
        self.step == Step::WaitingForIo
    }

    pub(super) fn handle(mut self, context: &mut SourceContext, now: Duration, event: Event) -> Next {
        match (self.step, event) {
            (Step::AwaitAccept, Event::Message(ToSource::Accept { bulk, urgent, resume })) => {
                self.step = Step::Opening { opened: false, up: false };
                let actions = vec![Action::Remember { resume }, Action::OpenChannels { bulk, urgent }];
                (State::Setup(self), actions)
            }
            (Step::Opening { up, .. }, Event::ChannelsOpened) => self.opening(context, true, up),
            (Step::Opening { opened, .. }, Event::Message(ToSource::ChannelsUp)) => {
                self.opening(context, opened, true)
            }
            (Step::StartingTracker, Event::TrackerStarted) => Precopy::begin(context, now),
            (Step::SharingMemory, Event::Message(ToSource::MemoryTaken)) => self.stop(context),
            (step, event) => {
                ending::give_up(Outcome::Failed(misplaced(&event, super::Step::Setup(step))), true)
            }
        }
    }

    fn opening(mut self, context: &SourceContext, opened: bool, up: bool) -> Next {
        if !(opened && up) {
            self.step = Step::Opening { opened, up };
            return (State::Setup(self), Vec::new());
        }
        let streams = (0..)
            .zip(&context.streams)
            .map(|(stream, name)| Action::Send(ToTarget::StreamOpen { stream, name: name.clone() }));
        let mut actions: Vec<_> = streams.collect();
        match context.settings.mode {
            MigrationMode::Postcopy => {
                // No page is sent before the switchover, so nothing needs to be tracked.
                let (state, stop) = self.stop(context);
                actions.extend(stop);
                return (state, actions);
            }
            MigrationMode::Local => {
                // The target maps the memory before the guest is stopped, so that a target that
                // cannot map it costs the guest no time.
                self.step = Step::SharingMemory;
                actions.push(Action::ShareMemory);
            }
            MigrationMode::Precopy | MigrationMode::Hybrid => {
                self.step = Step::StartingTracker;
                actions.push(Action::StartTracker);
            }
        }
        (State::Setup(self), actions)
    }

    /// Handles a tick during the wait for the guest's I/O.
    pub(super) fn tick(self, context: &mut SourceContext, now: Duration) -> Next {
        assert!(self.waits_for_io(), "no other step of the setup waits for time to pass");
        if context.urgency.insists() || context.deferral.is_due(now) {
            return self.stop(context);
        }
        let ping = context.ping(now);
        (State::Setup(self), ping)
    }

    fn stop(self, context: &SourceContext) -> Next {
        let local = context.settings.mode == MigrationMode::Local;
        let kind = if local { Kind::Shared } else { Kind::HandOver };
        Stopping::begin(Origin::Setup(self), kind, context.io_patience(), None)
    }
}
