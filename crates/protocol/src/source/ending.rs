//! The last phases: the guest is resumed if it has to be, and the outcome is reported.

use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// The guest is the source's, and is being resumed.
#[derive(Debug, Clone)]
pub(super) struct Resuming {
    pub(super) outcome: Outcome,
}

/// The migration has ended.
#[derive(Debug, Clone, Default)]
pub(super) struct Ended {
    pub(super) outcome: Option<Outcome>,
    resume_failed: bool,
}

/// Ends the migration before the commit: the guest is and stays the source's.
pub(super) fn give_up(outcome: Outcome, tell: bool) -> Next {
    // The guest first: telling a target that does not read can take long. The guest is resumed even
    // if its pause was only begun; that does nothing to a running guest.
    let mut actions = vec![Action::Resume];
    if tell {
        let why = match &outcome {
            Outcome::Failed(why) => why.clone(),
            Outcome::Cancelled(why) => Refusal::new(RefusalCode::Cancelled, why.clone()),
            _ => Refusal::new(RefusalCode::Other, "ended"),
        };
        actions.push(Action::Send(ToTarget::Cancel(why)));
    }
    (State::Resuming(Resuming { outcome }), actions)
}

/// Ends the migration because the guest is known to be the source's although the target was told to
/// run it. `thanks` tells a target that waits for this that the source has heard.
pub(super) fn given_back(why: Refusal, thanks: bool) -> Next {
    // The guest first.
    let heard = thanks.then_some(Action::Send(ToTarget::Thanks));
    let actions = [Action::Resume].into_iter().chain(heard).collect();
    (State::Resuming(Resuming { outcome: Outcome::Failed(why) }), actions)
}

/// Ends the migration with the guest where it is.
pub(super) fn finish(outcome: Outcome) -> Next {
    let ended = Ended { outcome: Some(outcome.clone()), resume_failed: false };
    (State::Ended(ended), vec![Action::Finish(outcome)])
}

impl Resuming {
    pub(super) fn handle(self, event: Event) -> Next {
        match event {
            Event::Resumed => finish(self.outcome),
            Event::LocalFailure(why) => self.failed(&why),
            _ => (State::Resuming(self), Vec::new()),
        }
    }

    fn failed(self, why: &Refusal) -> Next {
        let detail = match self.outcome {
            Outcome::Failed(before) => format!("{before}; and {why}"),
            Outcome::Cancelled(before) => format!("{before}; and {why}"),
            _ => why.to_string(),
        };
        let outcome = Outcome::Failed(Refusal::new(RefusalCode::Other, detail));
        let ended = Ended { outcome: Some(outcome.clone()), resume_failed: true };
        (State::Ended(ended), vec![Action::Finish(outcome)])
    }
}

impl Ended {
    /// Returns true if the target was told to run the guest, and nothing gave the guest back.
    pub(super) fn after_commit(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Unknown(_) | Outcome::Completed | Outcome::Lost(_)))
    }

    /// Returns true if the guest is the source's and could not be resumed.
    pub(super) fn resume_failed(&self) -> bool {
        self.resume_failed
    }
}
