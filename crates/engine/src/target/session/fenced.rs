//! A fence that decides who owns the guest: `crate::fence` has the rules.
//!
//! This side looks for the register before it accepts a guest, claims the guest between the commit and the start, says when it runs,
//! and gives it back if it will never run. Whatever the link does meanwhile, nothing but a granted claim starts the guest.

use super::{Action, Event, Session, State, lost_before};
use crate::fence::{Again, ArbiterError, Ruling, Side, Word};
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// How often the fence is asked in vain, over a link that holds, until the guest is given back to its source: it stands still meanwhile.
const MOST_CLAIMS: u32 = 3;

/// What this side has to do with the fence.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, Default)]
pub(super) struct Fenced {
    pub(super) again: Again,
    /// Claims that were not answered.
    pub(super) vain: u32,
    /// The guest is being given back.
    pub(super) giving_back: bool,
    /// Why it is not decided who owns the guest, while it is not.
    pub(super) why: Option<String>,
}

impl Session {
    /// The same session, with a fence.
    pub(crate) fn fenced(self, fenced: bool) -> Self {
        Self { fenced: fenced.then(Fenced::default), ..self }
    }

    /// Why it is not known who owns the guest, while it is not.
    pub(crate) fn undecided(&self) -> Option<&str> {
        self.fenced.as_ref()?.why.as_deref()
    }

    /// The guest fits: whether its source has opened a register where this side looks for it.
    pub(super) fn look(&mut self) -> Vec<Action> {
        self.state = State::Looking;
        vec![Action::Fence { word: Word::Look, after: Duration::ZERO }]
    }

    /// The commit is here. It is a permission to claim, not to run: the source may have given up and claimed the guest long ago.
    pub(super) fn claim(&mut self) -> Vec<Action> {
        self.state = State::Claiming;
        vec![Action::Fence { word: Word::Claim(Side::Target), after: Duration::ZERO }]
    }

    /// The guest runs here.
    pub(super) fn runs(&self) -> Option<Action> {
        self.fenced.as_ref().map(|_| Action::Fence { word: Word::Runs, after: Duration::ZERO })
    }

    /// An answer of the fence, or none.
    pub(super) fn ruled(&mut self, word: Word, answer: Result<Ruling, ArbiterError>) -> Vec<Action> {
        match (self.state, word) {
            (State::Looking, Word::Look) => match answer {
                Ok(Ruling::Open) => self.prepare(),
                Ok(ruling) => {
                    let detail = format!("the fence {ruling}, and the guest has not been moved yet");
                    self.fail(Refusal::new(RefusalCode::Fence, detail), true)
                }
                Err(error) => {
                    let detail = format!("as seen from the target: {error}");
                    self.fail(Refusal::new(RefusalCode::Fence, detail), true)
                }
            },
            (State::Claiming, Word::Claim(_)) => self.claimed(answer),
            (State::Renounced, Word::GiveBack) => self.gave_back(answer),
            // Late: of a claim that was made before the guest was renounced.
            _ => Vec::new(),
        }
    }

    fn claimed(&mut self, answer: Result<Ruling, ArbiterError>) -> Vec<Action> {
        let Some(fenced) = self.fenced.as_mut() else { return Vec::new() };
        let why = match answer {
            Ok(Ruling::Target { .. }) => {
                fenced.why = None;
                self.state = State::Starting;
                return vec![Action::Start];
            }
            Ok(Ruling::Source) => {
                fenced.why = None;
                let detail = "the fence has given the guest to its source, which had lost the link";
                let why = Refusal::new(RefusalCode::Fence, detail);
                let told = (!self.lost).then(|| Action::Send(ToSource::Failed(why.clone())));
                return self.end(why, told);
            }
            // Asked for a claim it does not answer that: as good as no answer.
            Ok(Ruling::Open) => "the fence has not taken the claim".to_owned(),
            Err(error) => error.to_string(),
        };
        fenced.vain += 1;
        fenced.why = Some(format!("the source has handed the guest over, and {why}"));
        if fenced.vain < MOST_CLAIMS || self.lost {
            return vec![Action::Fence { word: Word::Claim(Side::Target), after: fenced.again.next() }];
        }
        // The guest stands still. Its source can have it at once, by this side's word: a claim that was heard all the same is taken back.
        let why = Refusal::new(RefusalCode::Fence, format!("the guest was not started on the target: {why}"));
        let mut actions = vec![Action::Send(ToSource::Returned(why.clone()))];
        actions.extend(self.renounce(why));
        actions
    }

    /// Events while the claim is under way, other than its answer.
    pub(super) fn claiming(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let why = match event {
            // Without the link it would run here without its memory, and at its source it has all.
            Event::PeerLost(why) if self.lazy => lost_before(&why),
            Event::LocalFailure(why) if self.lazy => why,
            Event::ControlBack => {
                let why = lost_before("the source opened a new one");
                actions.push(Action::Send(ToSource::Returned(why.clone())));
                actions.extend(self.renounce(why));
                return actions;
            }
            Event::Stopped => Refusal::new(RefusalCode::Cancelled, "the target was told to stop"),
            Event::PeerLost(_) | Event::LocalFailure(_) => {
                self.lost = true;
                return actions;
            }
            // The source has handed the guest over: nothing that it says changes that.
            _ => return actions,
        };
        let stopped = why.code == RefusalCode::Cancelled;
        actions.push(match stopped && !self.lost {
            true => Action::Send(ToSource::Returned(why.clone())),
            false => Action::Disconnect,
        });
        actions.extend(self.renounce(why));
        actions
    }

    /// The guest is renounced: its source may learn that from the fence.
    pub(super) fn give_back(&mut self) -> Option<Action> {
        let fenced = self.fenced.as_mut().filter(|fenced| !fenced.giving_back)?;
        fenced.giving_back = true;
        Some(Action::Fence { word: Word::GiveBack, after: Duration::ZERO })
    }

    fn gave_back(&mut self, answer: Result<Ruling, ArbiterError>) -> Vec<Action> {
        let (Some(fenced), Some(why)) = (self.fenced.as_mut(), self.renounced.clone()) else {
            return Vec::new();
        };
        match answer {
            // Also after a stop: while the register holds the target, the guest can run nowhere.
            Err(ArbiterError::Unreachable(error)) => {
                fenced.why =
                    Some(format!("the guest will not run here, and its source may not know that: {error}"));
                vec![Action::Fence { word: Word::GiveBack, after: fenced.again.next() }]
            }
            // Without a register its source has heard it, or nothing can be said there.
            _ => {
                fenced.why = None;
                self.end(why, None)
            }
        }
    }
}
