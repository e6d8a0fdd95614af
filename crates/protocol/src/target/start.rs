//! Claiming and starting phases, after the commit: the target claims the guest from the arbiter, if
//! there is one, and starts the guest.

use super::postcopy::Postcopy;
use super::renounced::Renounced;
use super::{Action, ArbiterRetry, Event, Memory, Next, Outcome, State, TargetContext, end, lost_before};
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership, Side};
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// Number of claims that the arbiter may leave unanswered while the link works. After that, the
/// target gives the guest back to the source, because the guest is paused in the meantime.
const MOST_CLAIMS: u32 = 3;

/// Phase in which the target has read the commit, and claims the guest from the arbiter. The commit
/// permits the target to claim the guest, but not to run it, because the source may have given up
/// and claimed the guest long ago.
#[derive(Debug, Clone)]
pub(super) struct Claiming {
    pub(super) memory: Memory,
    /// True if the link was lost.
    lost: bool,
    retry: ArbiterRetry,
    /// Number of claims that the arbiter has not answered.
    unanswered: u32,
}

impl Claiming {
    pub(super) fn begin(memory: Memory) -> Next {
        let claiming = Self { memory, lost: false, retry: ArbiterRetry::default(), unanswered: 0 };
        let claim =
            Action::AskArbiter { request: ArbiterRequest::Claim(Side::Target), after: Duration::ZERO };
        (State::Claiming(claiming), vec![claim])
    }

    pub(super) fn undecided(&self) -> Option<&str> {
        self.retry.undecided.as_deref()
    }

    pub(super) fn handle(mut self, context: &TargetContext, event: Event) -> Next {
        match event {
            Event::ArbiterAnswered(ArbiterRequest::Claim(_), answer) => self.answered(context, answer),
            Event::MissingArrived(figures) => {
                self.memory.arrived(figures);
                (State::Claiming(self), Vec::new())
            }
            Event::ControlReopened => Renounced::and_tell(
                context,
                &self.memory,
                lost_before("the source opened a new one"),
                self.retry,
            ),
            // Without the link, the guest would run on the target without all of its memory,
            // whereas the source has all of the memory.
            Event::PeerLost(why) if self.memory.is_missing() => {
                Renounced::and_disconnect(context, &self.memory, lost_before(&why), self.retry)
            }
            Event::LocalFailure(why) if self.memory.is_missing() => {
                Renounced::and_disconnect(context, &self.memory, why, self.retry)
            }
            Event::PeerLost(_) | Event::LocalFailure(_) => {
                self.lost = true;
                (State::Claiming(self), Vec::new())
            }
            Event::Stopped => {
                let why = Refusal::new(RefusalCode::Cancelled, "the target was told to stop");
                if self.lost {
                    Renounced::and_disconnect(context, &self.memory, why, self.retry)
                } else {
                    Renounced::and_tell(context, &self.memory, why, self.retry)
                }
            }
            // The source has sent the commit, and no later message of the source changes this.
            _ => (State::Claiming(self), Vec::new()),
        }
    }

    fn answered(mut self, context: &TargetContext, answer: Result<Ownership, ArbiterError>) -> Next {
        let why = match answer {
            Ok(Ownership::Target { .. }) => return Starting::claimed(context, self.memory, self.lost),
            Ok(Ownership::Source) => {
                let detail = "the arbiter has given the guest to its source, which had lost the link";
                let why = Refusal::new(RefusalCode::Fence, detail);
                let told = (!self.lost).then(|| Action::Send(ToSource::Failed(why.clone())));
                return end(why, told);
            }
            // An open register is no valid answer to a claim, so this counts as no answer.
            Ok(Ownership::Open) => "the arbiter has not accepted the claim".to_owned(),
            Err(error) => error.to_string(),
        };
        self.unanswered += 1;
        self.retry.undecided = Some(format!("the source has handed the guest over, and {why}"));
        if self.unanswered < MOST_CLAIMS || self.lost {
            let after = self.retry.again.next();
            let claim = Action::AskArbiter { request: ArbiterRequest::Claim(Side::Target), after };
            return (State::Claiming(self), vec![claim]);
        }
        // With the target's message, the source can resume the guest at once. If the arbiter has
        // performed a claim nevertheless, giving the guest back revokes the claim.
        let detail = format!("the guest was not started on the target: {why}");
        Renounced::and_tell(context, &self.memory, Refusal::new(RefusalCode::Fence, detail), self.retry)
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        // The time until the next request and the last answer of the arbiter affect no decision.
        let Self { memory, lost, retry: _, unanswered } = self;
        memory.project(hasher);
        std::hash::Hash::hash(&(lost, unanswered), hasher);
    }
}

/// Phase in which the target starts the guest, which it owns. Failures of the source or of channels
/// do not prevent the start.
#[derive(Debug, Clone)]
pub(super) struct Starting {
    pub(super) memory: Memory,
    /// True if the link was lost.
    lost: bool,
}

impl Starting {
    /// Starts a guest without an arbiter.
    pub(super) fn begin(context: &TargetContext, memory: Memory) -> Next {
        Self::claimed(context, memory, false)
    }

    /// Starts a guest that the arbiter has granted.
    fn claimed(context: &TargetContext, memory: Memory, lost: bool) -> Next {
        (State::Starting(Self { memory, lost }), vec![Action::Start { wanted: context.wanted }])
    }

    pub(super) fn handle(mut self, context: &TargetContext, event: Event) -> Next {
        match event {
            Event::Started { micros: start_us, cpu_us } => {
                self.started(context, ToSource::Running { start_us, cpu_us })
            }
            Event::StartFailed(why) => self.start_failed(context, why),
            Event::MissingArrived(figures) => {
                self.memory.arrived(figures);
                (State::Starting(self), Vec::new())
            }
            Event::PeerLost(_) | Event::LocalFailure(_) => {
                self.lost = true;
                (State::Starting(self), Vec::new())
            }
            _ => (State::Starting(self), Vec::new()),
        }
    }

    fn started(self, context: &TargetContext, running: ToSource) -> Next {
        let runs = context
            .with_arbiter
            .then_some(Action::AskArbiter { request: ArbiterRequest::Runs, after: Duration::ZERO });
        match self.memory {
            Memory::Missing { all_arrived } => Postcopy::begin(running, self.lost, runs, all_arrived),
            Memory::Complete => {
                let actions = [Action::Send(running)]
                    .into_iter()
                    .chain(runs)
                    .chain([Action::Finish(Outcome::Completed)])
                    .collect();
                (State::Ended { complete: false }, actions)
            }
        }
    }

    fn start_failed(self, context: &TargetContext, why: Refusal) -> Next {
        let told = Action::Send(ToSource::Returned(why.clone()));
        if !self.memory.is_missing() && !context.with_arbiter {
            return end(why, Some(told));
        }
        // If the link is known to be lost, nothing can be sent.
        let first = if self.lost { Action::Disconnect } else { told };
        Renounced::begin(context, &self.memory, why, ArbiterRetry::default(), first)
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { memory, lost } = self;
        memory.project(hasher);
        std::hash::Hash::hash(lost, hasher);
    }
}
