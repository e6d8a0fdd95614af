//! Last phases, in which the source resumes the guest if it owns the guest, and reports the
//! outcome.

use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// Phase in which the source resumes the guest, which it owns.
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

/// Ends the migration before the commit, when the source owns the guest and keeps it. If `tell` is
/// true, the target is told so.
pub(super) fn give_up(outcome: Outcome, tell: bool) -> Next {
    // The guest is resumed before the message is sent, because sending to a target that does not
    // read can take long. The source resumes the guest even if it is not paused, which has no
    // effect on a running guest.
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

/// Ends the migration after the commit, because the source is known to own the guest again. If
/// `thanks` is true, the target waits for the confirmation that the source knows this.
pub(super) fn given_back(why: Refusal, thanks: bool) -> Next {
    // The guest is resumed first.
    let reply = thanks.then_some(Action::Send(ToTarget::Thanks));
    let actions = [Action::Resume].into_iter().chain(reply).collect();
    (State::Resuming(Resuming { outcome: Outcome::Failed(why) }), actions)
}

/// Ends the migration without resuming the guest.
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
    /// Returns true if the target was told to run the guest, and the source did not get the guest
    /// back.
    pub(super) fn after_commit(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Unknown(_) | Outcome::Completed | Outcome::Lost(_)))
    }

    /// Returns true if the source owns the guest and could not resume it.
    pub(super) fn resume_failed(&self) -> bool {
        self.resume_failed
    }
}
