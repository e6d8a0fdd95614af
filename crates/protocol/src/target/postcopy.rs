//! The guest runs here, and its missing pages come.

use super::{Action, Event, Next, Outcome, Shared, State};
use vmferry_wire::{LazyFigures, ToSource, ToTarget};

/// A guest that runs before all of its memory is here.
#[derive(Debug, Clone)]
pub(super) struct Postcopy {
    step: Step,
    /// The account of the missing pages, once all are here.
    all_here: Option<LazyFigures>,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Pages come.
    Receiving,
    /// The link is lost. The vCPUs run until they need a missing page.
    Suspended,
    /// The source is back, and is being told which pages are missing.
    NamingMissing,
    /// The source opens its other channels.
    Reopening { missing: u32 },
    /// Every page is here, and the source was told so.
    AwaitThanks,
}

impl Postcopy {
    /// Begins: the guest was started. `lost` says that the link was lost meanwhile, and `runs` tells
    /// the arbiter that the guest runs.
    pub(super) fn begin(
        running: ToSource,
        lost: bool,
        runs: Option<Action>,
        all_here: Option<LazyFigures>,
    ) -> Next {
        let postcopy = Self { step: if lost { Step::Suspended } else { Step::Receiving }, all_here: None };
        let first = if lost { Action::Disconnect } else { Action::Send(running) };
        let (state, told) = match all_here {
            Some(figures) => postcopy.all_here(figures),
            None => postcopy.stay(),
        };
        let last = Action::Finish(Outcome::Running);
        (state, [first].into_iter().chain(runs).chain(told).chain([last]).collect())
    }

    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.step, Step::Suspended | Step::NamingMissing | Step::Reopening { .. })
    }

    pub(super) fn is_complete(&self) -> bool {
        self.all_here.is_some()
    }

    pub(super) fn handle(self, shared: &Shared, event: Event) -> Next {
        match (self.step, event) {
            (_, Event::MissingArrived(figures)) => self.all_here(figures),
            (Step::AwaitThanks, Event::Message(ToTarget::Thanks)) => {
                (State::Ended { complete: true }, vec![Action::Finish(Outcome::Completed)])
            }
            // Often the source notices first that the link is lost. The old channels have ended by now.
            (_, Event::ControlReopened) => self.go_on_to(Step::NamingMissing, vec![Action::NameMissing]),
            (Step::NamingMissing, Event::MissingNamed { pages, tokens: (bulk, urgent) }) => {
                let resume = Action::Send(ToSource::Resume { pages, bulk, urgent });
                let actions = vec![Action::AwaitChannels(shared.channels), resume];
                // If no page is missing, there is nothing to open channels for.
                let step = Step::Reopening { missing: shared.channels.count() };
                self.tell_if_complete(step, actions)
            }
            (Step::Reopening { missing: 1 }, Event::ChannelUp) => {
                let actions = vec![Action::Send(ToSource::ChannelsUp), Action::RequestAgain];
                self.go_on_to(Step::Receiving, actions)
            }
            (Step::Reopening { missing }, Event::ChannelUp) => {
                self.go_on_to(Step::Reopening { missing: missing - 1 }, Vec::new())
            }
            // A channel has sent its part of the rest. Only the pages that are here count.
            (Step::Receiving | Step::AwaitThanks, Event::Barrier { .. }) => self.stay(),
            // Late reports of channels that are closed.
            (Step::Suspended, _) => self.stay(),
            (_, Event::PeerLost(_) | Event::LocalFailure(_)) => self.suspend(),
            (step, Event::Message(message)) => {
                let name = message.name();
                tracing::warn!("the source sent {name}, which does not fit this moment ({step:?})");
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

    /// The last missing page is here. Without a link, the source is told once there is one.
    fn all_here(mut self, figures: LazyFigures) -> Next {
        self.all_here = Some(figures);
        let actions = vec![Action::EndDemandPaging];
        match self.step {
            Step::Receiving => self.tell_if_complete(Step::Receiving, actions),
            step => self.go_on_to(step, actions),
        }
    }

    /// Goes on to `step`, or, if every page is here, tells the source so.
    fn tell_if_complete(self, step: Step, mut actions: Vec<Action>) -> Next {
        let Some(figures) = self.all_here.clone() else { return self.go_on_to(step, actions) };
        actions.push(Action::Send(ToSource::Complete(figures)));
        self.go_on_to(Step::AwaitThanks, actions)
    }

    /// The link is lost, and the guest runs on.
    fn suspend(self) -> Next {
        self.go_on_to(Step::Suspended, vec![Action::Disconnect])
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { step, all_here } = self;
        std::hash::Hash::hash(&(step, all_here.is_some()), hasher);
    }
}
