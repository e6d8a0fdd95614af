//! The guest will never run here. Its source, which may have told the target to run it, does not know
//! that yet.
//!
//! One thing is left to do: the source has to hear of it. Until it has, only the source may come back,
//! as often as it wants. The guest is paused at the source, and nothing else can say that the guest may
//! go on there. With an arbiter the source may also learn it from the register.

use super::{Action, Asking, Event, Memory, Next, Shared, State, end};
use crate::arbiter::{ArbiterError, Ruling, Word};
use std::time::Duration;
use vmferry_wire::{Refusal, ToSource, ToTarget};

/// A guest that was given up for good. No commit starts it, however late it comes.
#[derive(Debug, Clone)]
pub(super) struct Renounced {
    pub(super) why: Refusal,
    /// The source can ask over a new link: it has not sent all of the memory, so it comes back.
    pub(super) source_asks: bool,
    /// Giving the guest back to the arbiter, if there is one.
    pub(super) giving_back: Option<Asking>,
}

impl Renounced {
    /// Renounces the guest after the action `first`. The arbiter is told only then: first the session
    /// has to be one that never starts the guest.
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

    /// Renounces the guest, and tells the source over a link that holds.
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
            // With an arbiter the session ends with its answer, also after a stop: while the register
            // holds the target, the guest can run nowhere.
            Event::Stopped if !shared.fenced => end(self.why, None),
            Event::PeerLost(_) | Event::LocalFailure(_) => (State::Renounced(self), vec![Action::Disconnect]),
            // A late commit among them.
            _ => (State::Renounced(self), Vec::new()),
        }
    }

    fn gave_back(mut self, answer: Result<Ruling, ArbiterError>) -> Next {
        // No answer comes without an arbiter.
        let Some(asking) = &mut self.giving_back else { return (State::Renounced(self), Vec::new()) };
        let Err(ArbiterError::Unreachable(error)) = answer else {
            // Without a register the source has heard it, or nothing can be said there.
            return end(self.why, None);
        };
        asking.undecided =
            Some(format!("the guest will not run here, and its source may not know that: {error}"));
        let give_back = Action::AskArbiter { word: Word::GiveBack, after: asking.again.next() };
        (State::Renounced(self), vec![give_back])
    }
}
