//! Ready phase: the target loads the device state, and then waits for the commit. The guest has not
//! run on the target.

use super::renounced::Renounced;
use super::start::{Claiming, Starting};
use super::{
    Action, ArbiterRetry, Event, Memory, Next, State, TargetContext, end, fail, lost_before, misplaced,
};
use vmferry_wire::{Refusal, RefusalCode, ToSource, ToTarget};

/// State of the ready phase.
#[derive(Debug, Clone)]
pub(super) struct Ready {
    pub(super) memory: Memory,
    step: Step,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
enum Step {
    Loading,
    /// The source was told that the target is ready, so it may have sent the commit.
    AwaitCommit,
}

impl Ready {
    pub(super) fn begin(memory: Memory) -> Self {
        Self { memory, step: Step::Loading }
    }

    /// Returns true if the source may have sent the commit, and would reconnect to ask about the
    /// guest if the link were lost. A source that has sent all of the memory does not reconnect.
    pub(super) fn may_be_committed(&self) -> bool {
        self.step == Step::AwaitCommit && self.memory.is_missing()
    }

    pub(super) fn handle(mut self, context: &TargetContext, event: Event) -> Next {
        match (self.step, event) {
            // A source that cancels has not committed.
            (_, Event::Message(ToTarget::Cancel(why))) => end(why, None),
            (Step::AwaitCommit, Event::Message(ToTarget::Commit)) => {
                if context.with_arbiter {
                    Claiming::begin(self.memory)
                } else {
                    Starting::begin(context, self.memory)
                }
            }
            (Step::Loading, Event::Loaded { micros }) => {
                self.step = Step::AwaitCommit;
                (State::Ready(self), vec![Action::Send(ToSource::Ready { load_us: micros })])
            }
            (_, Event::MissingArrived(figures)) => {
                self.memory.arrived(figures);
                (State::Ready(self), Vec::new())
            }
            // A late answer, or the answer to another request.
            (_, Event::ArbiterAnswered(..)) => (State::Ready(self), Vec::new()),
            // The source opens a new link only if it has lost the old one.
            (_, Event::ControlReopened) if self.may_be_committed() => Renounced::and_tell(
                context,
                &self.memory,
                lost_before("the source opened a new one"),
                ArbiterRetry::default(),
            ),
            (_, Event::PeerLost(why)) if self.may_be_committed() => {
                Renounced::and_disconnect(context, &self.memory, lost_before(&why), ArbiterRetry::default())
            }
            (_, Event::PeerLost(why)) => end(Refusal::new(RefusalCode::Other, why), None),
            (_, Event::Stopped) => {
                self.fail(context, Refusal::new(RefusalCode::Cancelled, "the target was told to stop"))
            }
            (_, Event::LocalFailure(why)) => self.fail(context, why),
            (step, event) => {
                let doing =
                    if step == Step::Loading { "loading the device state" } else { "awaiting the commit" };
                self.fail(context, misplaced(&event, doing))
            }
        }
    }

    fn fail(self, context: &TargetContext, why: Refusal) -> Next {
        if !self.may_be_committed() {
            return fail(why);
        }
        // The source may have sent the commit.
        let told = Action::Send(ToSource::Failed(why.clone()));
        Renounced::begin(context, &self.memory, why, ArbiterRetry::default(), told)
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { memory, step } = self;
        memory.project(hasher);
        std::hash::Hash::hash(step, hasher);
    }
}
