//! Renounced phase: the guest will never run on the target, but the source does not know this yet,
//! and may have told the target to run the guest.
//!
//! The guest is paused on the source, and may continue there only once the source knows that the
//! target has renounced the guest. Therefore the target accepts new links of this source, however
//! many, until it has told the source. With an arbiter, the source can also learn this from the
//! register.

use super::{Action, ArbiterRetry, Event, Memory, Next, State, TargetContext, end};
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership};
use std::time::Duration;
use vmferry_wire::{Refusal, ToSource, ToTarget};

/// Guest that the target has given up for good. No commit starts this guest, however late the
/// commit arrives.
#[derive(Debug, Clone)]
pub(super) struct Renounced {
    pub(super) why: Refusal,
    /// True if the source can ask over a new link. Only a source that has not sent all of the
    /// memory reconnects.
    pub(super) accepts_new_link: bool,
    /// State of the request to the arbiter that gives the guest back, if there is an arbiter.
    pub(super) giving_back: Option<ArbiterRetry>,
}

impl Renounced {
    /// Renounces the guest, performs the action `first`, and then gives the guest back to the
    /// arbiter. The order matters: before the arbiter is told, the session must be in a phase that
    /// never starts the guest.
    pub(super) fn begin(
        context: &TargetContext,
        memory: &Memory,
        why: Refusal,
        retry: ArbiterRetry,
        first: Action,
    ) -> Next {
        let give_back = Action::AskArbiter { request: ArbiterRequest::GiveBack, after: Duration::ZERO };
        let giving_back = context.with_arbiter.then_some(retry);
        let actions = [first].into_iter().chain(giving_back.is_some().then_some(give_back)).collect();
        let renounced = Self { why, accepts_new_link: memory.is_missing(), giving_back };
        (State::Renounced(renounced), actions)
    }

    /// Renounces the guest, and tells the source over a link that works.
    pub(super) fn and_tell(
        context: &TargetContext,
        memory: &Memory,
        why: Refusal,
        retry: ArbiterRetry,
    ) -> Next {
        let told = Action::Send(ToSource::Returned(why.clone()));
        Self::begin(context, memory, why, retry, told)
    }

    /// Renounces the guest, and closes the channels of a link that is lost.
    pub(super) fn and_disconnect(
        context: &TargetContext,
        memory: &Memory,
        why: Refusal,
        retry: ArbiterRetry,
    ) -> Next {
        Self::begin(context, memory, why, retry, Action::Disconnect)
    }

    pub(super) fn accepts_new_link(&self) -> bool {
        self.accepts_new_link
    }

    pub(super) fn undecided(&self) -> Option<&str> {
        self.giving_back.as_ref()?.undecided.as_deref()
    }

    pub(super) fn handle(self, context: &TargetContext, event: Event) -> Next {
        match event {
            Event::ControlReopened => {
                let told = Action::Send(ToSource::Returned(self.why.clone()));
                (State::Renounced(self), vec![told])
            }
            Event::ArbiterAnswered(ArbiterRequest::GiveBack, answer) => self.gave_back(answer),
            Event::Message(ToTarget::Thanks | ToTarget::Cancel(_)) => end(self.why, None),
            // With an arbiter, the session ends only with the arbiter's answer, even after a stop.
            // While the register names the target as the owner, no host can run the guest.
            Event::Stopped if !context.with_arbiter => end(self.why, None),
            Event::PeerLost(_) | Event::LocalFailure(_) => (State::Renounced(self), vec![Action::Disconnect]),
            // A late commit is ignored, too.
            _ => (State::Renounced(self), Vec::new()),
        }
    }

    fn gave_back(mut self, answer: Result<Ownership, ArbiterError>) -> Next {
        // There are no answers without an arbiter.
        let Some(retry) = &mut self.giving_back else { return (State::Renounced(self), Vec::new()) };
        let Err(ArbiterError::Unreachable(error)) = answer else {
            // The arbiter has performed the request, or has no register for this migration. In both
            // cases, nothing is left to do.
            return end(self.why, None);
        };
        retry.undecided =
            Some(format!("the guest will not run on the target, and the source may not know that: {error}"));
        let give_back = Action::AskArbiter { request: ArbiterRequest::GiveBack, after: retry.again.next() };
        (State::Renounced(self), vec![give_back])
    }
}
