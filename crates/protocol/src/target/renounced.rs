//! Renounced phase: the guest will never run on the target. Its source, which may have told the
//! target to run it, does not know that yet.
//!
//! The source must still be told. Until then, only the source may reconnect, as often as it wants.
//! The guest is paused on the source, and only this message permits it to continue there. With an
//! arbiter, the source may also learn it from the register.

use super::{Action, Asking, Event, Memory, Next, Shared, State, end};
use crate::arbiter::{ArbiterError, Ruling, Word};
use std::time::Duration;
use vmferry_wire::{Refusal, ToSource, ToTarget};

/// Guest that was given up for good. No commit starts it, however late the commit arrives.
#[derive(Debug, Clone)]
pub(super) struct Renounced {
    pub(super) why: Refusal,
    /// True if the source can ask over a new link: it has not sent all of the memory, so it
    /// reconnects.
    pub(super) source_asks: bool,
    /// Request to the arbiter to give the guest back, if there is an arbiter.
    pub(super) giving_back: Option<Asking>,
}

impl Renounced {
    /// Renounces the guest after the action `first`. The arbiter is told afterwards: the session
    /// must first be in a phase that never starts the guest.
    pub(super) fn begin(
        shared: &Shared,
        memory: &Memory,
        why: Refusal,
        asking: Asking,
        first: Action,
    ) -> Next {
        let give_back = Action::AskArbiter { word: Word::GiveBack, after: Duration::ZERO };
        let giving_back = shared.fenced.then_some(asking);
        let actions = [first].into_iter().chain(giving_back.is_some().then_some(give_back)).collect();
        let renounced = Self { why, source_asks: memory.is_missing(), giving_back };
        (State::Renounced(renounced), actions)
    }

    /// Renounces the guest, and tells the source over a link that works.
    pub(super) fn and_tell(shared: &Shared, memory: &Memory, why: Refusal, asking: Asking) -> Next {
        let told = Action::Send(ToSource::Returned(why.clone()));
        Self::begin(shared, memory, why, asking, told)
    }

    /// Renounces the guest, and closes the channels of a link that is lost.
    pub(super) fn and_disconnect(shared: &Shared, memory: &Memory, why: Refusal, asking: Asking) -> Next {
        Self::begin(shared, memory, why, asking, Action::Disconnect)
    }

    pub(super) fn may_be_asked(&self) -> bool {
        self.source_asks
    }

    pub(super) fn undecided(&self) -> Option<&str> {
        self.giving_back.as_ref()?.undecided.as_deref()
    }

    pub(super) fn handle(self, shared: &Shared, event: Event) -> Next {
        match event {
            Event::ControlReopened => {
                let told = Action::Send(ToSource::Returned(self.why.clone()));
                (State::Renounced(self), vec![told])
            }
            Event::ArbiterAnswered(Word::GiveBack, answer) => self.gave_back(answer),
            Event::Message(ToTarget::Thanks | ToTarget::Cancel(_)) => end(self.why, None),
            // With an arbiter the session ends with the arbiter's answer, also after a stop: while
            // the register holds the target, no host can run the guest.
            Event::Stopped if !shared.fenced => end(self.why, None),
            Event::PeerLost(_) | Event::LocalFailure(_) => (State::Renounced(self), vec![Action::Disconnect]),
            // A late commit is ignored here, too.
            _ => (State::Renounced(self), Vec::new()),
        }
    }

    fn gave_back(mut self, answer: Result<Ruling, ArbiterError>) -> Next {
        // There are no answers without an arbiter.
        let Some(asking) = &mut self.giving_back else { return (State::Renounced(self), Vec::new()) };
        let Err(ArbiterError::Unreachable(error)) = answer else {
            // The arbiter has received the request, or has no register for this migration. In both
            // cases nothing is left to do.
            return end(self.why, None);
        };
        asking.undecided =
            Some(format!("the guest will not run on the target, and the source may not know that: {error}"));
        let give_back = Action::AskArbiter { word: Word::GiveBack, after: asking.again.next() };
        (State::Renounced(self), vec![give_back])
    }
}
