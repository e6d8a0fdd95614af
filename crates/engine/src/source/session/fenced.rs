//! A guest of which nobody knows, with a fence to ask: `crate::fence` has the rules.
//!
//! Only this side's claim is here. It is made when the link is lost between the commit and its answer, and never before: until the
//! commit the guest is this side's whatever the fence holds. While the fence does not answer nothing is concluded.

use super::{Session, State};
use crate::fence::{Again, ArbiterError, Ruling, Side, Word};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode};

/// How much later than the loss of the link the claim of a guest is made that comes with all of its memory: if its target has read the
/// commit it claims the guest at once, and then the move is done.
const HEAD_START: Duration = Duration::from_millis(250);

/// What is known of the fence.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, Default)]
pub(super) struct Fenced {
    /// A claim is under way, or waits to be made.
    pub(super) asking: bool,
    pub(super) again: Again,
    /// A claim was made: the other side may have to read what came of it.
    pub(super) claimed: bool,
    pub(super) answer: Option<Result<Ruling, ArbiterError>>,
}

impl Session {
    /// The link is lost after the commit, of a guest that comes with all of its memory: nothing can be asked over another. `None`
    /// without a fence.
    pub(super) fn ask_fence(&mut self, why: &str) -> Option<Vec<Action>> {
        self.fenced.as_ref()?;
        self.state = State::Claiming;
        why.clone_into(&mut self.recovery.why);
        self.recovery.waiting = false;
        Some([Action::Disconnect].into_iter().chain(self.claim()).collect())
    }

    /// Whether the target may or may not run the guest, and this side asks the fence.
    fn nobody_knows(&self) -> bool {
        let lost = matches!(self.state, State::Suspended | State::Reconnecting | State::Hearing);
        self.state == State::Claiming || (self.lazy && lost && !self.runs_there())
    }

    /// The claim, if there is a fence, and none under way.
    pub(super) fn claim(&mut self) -> Option<Action> {
        if !self.nobody_knows() {
            return None;
        }
        let fenced = self.fenced.as_mut().filter(|fenced| !fenced.asking)?;
        (fenced.asking, fenced.claimed) = (true, true);
        // One that comes before its memory is better off here, where it has all of it.
        let after = if self.lazy { Duration::ZERO } else { HEAD_START };
        Some(Action::Fence { word: Word::Claim(Side::Source), after })
    }

    /// Nobody knows; events other than the fence's answer.
    pub(super) fn claiming(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {
                // It is asked on, but whoever watches should be told.
                self.recovery.waiting |= now.saturating_sub(self.last_step) > self.settings.reconnect_for;
                Vec::new()
            }
            Event::Recover => {
                self.recovery.waiting = false;
                self.last_step = now;
                Vec::new()
            }
            Event::Abandon => {
                self.ended = Some(Outcome::Unknown(self.undecided()));
                self.finish()
            }
            // Late news of channels that were closed.
            _ => Vec::new(),
        }
    }

    /// The fence has answered, or has not.
    pub(super) fn ruled(&mut self, answer: Result<Ruling, ArbiterError>) -> Vec<Action> {
        let unknown = self.nobody_knows();
        let Some(fenced) = self.fenced.as_mut() else { return Vec::new() };
        fenced.asking = false;
        fenced.answer = Some(answer.clone());
        if !unknown {
            return Vec::new();
        }
        match answer {
            // Won: the target's claim was not granted, and never will be.
            Ok(Ruling::Source) => {
                let why = format!("{}; the fence has given the guest to this side", self.recovery.why);
                self.given_back(Refusal::new(RefusalCode::Other, why))
            }
            Ok(Ruling::Target { runs: true }) if self.lazy => {
                // What it lacks is here, and needs the link.
                self.recovery.running = true;
                Vec::new()
            }
            Ok(Ruling::Target { runs: true }) => {
                self.ended = Some(Outcome::Completed);
                self.finish()
            }
            // The target may yet find that it cannot start the guest, and give it back. And what was not answered is asked again.
            Ok(Ruling::Target { runs: false } | Ruling::Open) | Err(_) => {
                fenced.asking = true;
                vec![Action::Fence { word: Word::Claim(Side::Source), after: fenced.again.next() }]
            }
        }
    }

    /// Why it is not known who owns the guest, with what the fence said last.
    pub(super) fn undecided(&self) -> String {
        match self.fence_says() {
            Some(says) => format!("{}; {says}", self.recovery.why),
            None => self.recovery.why.clone(),
        }
    }

    /// What the fence said last, if it was asked.
    pub(crate) fn fence_says(&self) -> Option<String> {
        let fenced = self.fenced.as_ref().filter(|fenced| fenced.claimed)?;
        Some(match &fenced.answer {
            None => "the fence is being asked".into(),
            Some(Ok(ruling)) => format!("the fence {ruling}"),
            Some(Err(error)) => error.to_string(),
        })
    }

    /// Whether the register has done its work. Not once this side has claimed: then it is the target's to read.
    pub(crate) fn fence_done(&self) -> bool {
        self.fenced.as_ref().is_some_and(|fenced| !fenced.claimed)
    }
}
