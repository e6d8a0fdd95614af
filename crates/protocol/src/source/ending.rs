//! Last phases: the guest is resumed if necessary, and the outcome is reported.

use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// Phase in which the source, which owns the guest, resumes it.
#[derive(Debug, Clone)]
pub(super) struct Resuming {
    pub(super) outcome: Outcome,
}

/// Phase after the end of the migration.
#[derive(Debug, Clone, Default)]
pub(super) struct Ended {
    pub(super) outcome: Option<Outcome>,
    resume_failed: bool,
}

/// Ends the migration before the commit: the source owns the guest and keeps it.
pub(super) fn give_up(outcome: Outcome, tell: bool) -> Next {
    // The guest is resumed first, because a message to a target that does not read can take long.
    // The guest is resumed even if its pause was only begun, which has no effect on a running
    // guest.
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

/// Ends the migration because the source is known to own the guest although the target was told to
/// run it. If `thanks` is true, the target waits for the information that the source has received
/// its message.
pub(super) fn given_back(why: Refusal, thanks: bool) -> Next {
    // The guest is resumed first.
    let reply = thanks.then_some(Action::Send(ToTarget::Thanks));
    let actions = [Action::Resume].into_iter().chain(reply).collect();
    (State::Resuming(Resuming { outcome: Outcome::Failed(why) }), actions)
}

/// Ends the migration without a change of the guest.
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

    /// Returns true if the source owns the guest and could not resume it.
    pub(super) fn resume_failed(&self) -> bool {
        self.resume_failed
    }
}
