//! Postcopy phase: the guest runs on the target, and its missing pages arrive.

use super::{Action, Event, Next, Outcome, State, TargetContext};
use vmferry_wire::{PagingFigures, ToSource, ToTarget};

/// Guest that runs before all of its memory has arrived.
#[derive(Debug, Clone)]
pub(super) struct Postcopy {
    step: Step,
    /// Figures of the missing pages, once all have arrived.
    all_arrived: Option<PagingFigures>,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Pages arrive.
    Receiving,
    /// The link is lost. The vCPUs run until they need a missing page.
    Suspended,
    /// The source has reconnected, and is being told which pages are missing.
    NamingMissing,
    /// The source opens its other channels.
    Reopening { missing: u32 },
    /// All pages have arrived, and the source was told so.
    AwaitThanks,
}

impl Postcopy {
    /// Begins after the guest was started. `running` is the message to the source that the guest
    /// runs. `lost` is true if the link was lost before. `runs` is the action that reports to the
    /// arbiter that the guest runs, if there is an arbiter.
    pub(super) fn begin(
        running: ToSource,
        lost: bool,
        runs: Option<Action>,
        all_arrived: Option<PagingFigures>,
    ) -> Next {
        let postcopy = Self { step: if lost { Step::Suspended } else { Step::Receiving }, all_arrived: None };
        let first = if lost { Action::Disconnect } else { Action::Send(running) };
        let (state, told) = match all_arrived {
            Some(figures) => postcopy.all_arrived(figures),
            None => postcopy.stay(),
        };
        let last = Action::Finish(Outcome::Running);
        (state, [first].into_iter().chain(runs).chain(told).chain([last]).collect())
    }

    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.step, Step::Suspended | Step::NamingMissing | Step::Reopening { .. })
    }

    pub(super) fn is_complete(&self) -> bool {
        self.all_arrived.is_some()
    }

    pub(super) fn handle(self, context: &TargetContext, event: Event) -> Next {
        match (self.step, event) {
            (_, Event::MissingArrived(figures)) => self.all_arrived(figures),
            (Step::AwaitThanks, Event::Message(ToTarget::Thanks)) => {
                (State::Ended { complete: true }, vec![Action::Finish(Outcome::Completed)])
            }
            // Accepted in every step, because the source often notices the loss of the link first.
            // The old channels have ended by now.
            (_, Event::ControlReopened) => self.go_on_to(Step::NamingMissing, vec![Action::NameMissing]),
            (Step::NamingMissing, Event::MissingNamed { pages, tokens: (bulk, urgent) }) => {
                let resume = Action::Send(ToSource::Resume { pages, bulk, urgent });
                let actions = vec![Action::AwaitChannels(context.channels), resume];
                // If no page is missing, no channels need to be opened.
                let step = Step::Reopening { missing: context.channels.count() };
                self.tell_if_complete(step, actions)
            }
            (Step::Reopening { missing: 1 }, Event::ChannelUp) => {
                let actions = vec![Action::Send(ToSource::ChannelsUp), Action::RequestAgain];
                self.go_on_to(Step::Receiving, actions)
            }
            (Step::Reopening { missing }, Event::ChannelUp) => {
                self.go_on_to(Step::Reopening { missing: missing - 1 }, Vec::new())
            }
            // A channel has delivered its part of the remaining pages. Only the arrival of the
            // pages matters.
            (Step::Receiving | Step::AwaitThanks, Event::Barrier { .. }) => self.stay(),
            // Late reports of channels that are closed.
            (Step::Suspended, _) => self.stay(),
            (_, Event::PeerLost(_) | Event::LocalFailure(_)) => self.suspend(),
            (step, Event::Message(message)) => {
                let name = message.name();
                tracing::warn!("the source sent {name}, which is not allowed at this point ({step:?})");
                self.suspend()
            }
            _ => self.stay(),
        }
    }

    fn stay(self) -> Next {
        (State::Postcopy(self), Vec::new())
    }

    fn go_on_to(mut self, step: Step, actions: Vec<Action>) -> Next {
        self.step = step;
        (State::Postcopy(self), actions)
    }

    /// Records that the last missing page has arrived. If there is no link, the source is told once
    /// there is one.
    fn all_arrived(mut self, figures: PagingFigures) -> Next {
        self.all_arrived = Some(figures);
        let actions = vec![Action::EndDemandPaging];
        match self.step {
            Step::Receiving => self.tell_if_complete(Step::Receiving, actions),
            step => self.go_on_to(step, actions),
        }
    }

    /// Tells the source that every page has arrived, if this is the case. Otherwise goes on to
    /// `step`.
    fn tell_if_complete(self, step: Step, mut actions: Vec<Action>) -> Next {
        let Some(figures) = self.all_arrived.clone() else { return self.go_on_to(step, actions) };
        actions.push(Action::Send(ToSource::Complete(figures)));
        self.go_on_to(Step::AwaitThanks, actions)
    }

    /// Handles the loss of the link. The guest continues to run.
    fn suspend(self) -> Next {
        self.go_on_to(Step::Suspended, vec![Action::Disconnect])
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { step, all_arrived } = self;
        std::hash::Hash::hash(&(step, all_arrived.is_some()), hasher);
    }
}
