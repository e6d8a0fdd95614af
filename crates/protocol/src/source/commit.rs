//! The source has told the target to run the guest, and does not know yet whether it does.
//!
//! [`arbiter`](crate::arbiter) has the rules of the arbiter. Only the source's claim is here. The source
//! claims the guest when the link is lost between the commit and its answer, and never before: until
//! the commit the guest is the source's, whatever the register holds. Without an answer of the
//! arbiter the source concludes nothing.

use super::ending::{finish, give_up, given_back};
use super::postcopy::{History, Postcopy};
use super::recovery::{Owner, Recovery, Reopen};
use super::shared::Shared;
use super::switchover::Kind;
use super::{Next, State};
use crate::arbiter::{ArbiterError, Backoff, Ruling, Side, Word};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// Time between the loss of the link and the source's claim of a guest that has all of its memory on
/// the target. A target that has read the commit claims the guest at once, and then the move is done.
const HEAD_START: Duration = Duration::from_millis(250);

/// An answer of the arbiter.
pub(super) type Answer = Result<Ruling, ArbiterError>;

/// The source's claim to the guest, made to the arbiter.
#[derive(Debug, Clone, Default)]
pub(super) struct Claim {
    /// A claim is under way, or waits to be made.
    asking: bool,
    /// A claim was made: the target may have to read what came of it.
    made: bool,
    again: Backoff,
    answer: Option<Answer>,
}

/// Meaning of the arbiter's answer for a source that does not know which side owns the guest.
pub(super) enum Decided {
    /// The guest is the source's: the target's claim was not granted and never will be.
    Source,
    /// The target runs the guest.
    TargetRuns,
    /// Nothing is decided. The source asks again.
    Open(Action),
}

impl Claim {
    /// Returns the claim, if none is under way.
    pub(super) fn make(&mut self, after: Duration) -> Option<Action> {
        if self.asking {
            return None;
        }
        (self.asking, self.made) = (true, true);
        Some(Action::AskArbiter { word: Word::Claim(Side::Source), after })
    }

    /// Takes an answer.
    pub(super) fn answered(&mut self, answer: Answer) -> Decided {
        self.note(answer.clone());
        match answer {
            Ok(Ruling::Source) => Decided::Source,
            Ok(Ruling::Target { runs: true }) => Decided::TargetRuns,
            // The target may yet fail to start the guest, and give it back.
            Ok(Ruling::Target { runs: false } | Ruling::Open) | Err(_) => {
                self.asking = true;
                let after = self.again.next();
                Decided::Open(Action::AskArbiter { word: Word::Claim(Side::Source), after })
            }
        }
    }

    /// Notes an answer that decides nothing any more.
    pub(super) fn note(&mut self, answer: Answer) {
        self.asking = false;
        self.answer = Some(answer);
    }

    pub(super) fn made(&self) -> bool {
        self.made
    }

    /// Returns what the arbiter said last, if it was asked.
    pub(super) fn says(&self) -> Option<String> {
        self.made.then(|| match &self.answer {
            None => "the fence is being asked".into(),
            Some(Ok(ruling)) => format!("the fence {ruling}"),
            Some(Err(error)) => error.to_string(),
        })
    }

    /// Hashes what decides. The time until the next claim and the last answer decide nothing.
    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { asking, made, again: _, answer: _ } = self;
        std::hash::Hash::hash(&(asking, made), hasher);
    }
}

/// The reason for which the owner is not known, with what the arbiter said last.
pub(super) fn undecided(why: &str, claim: Option<&Claim>) -> String {
    match claim.and_then(Claim::says) {
        Some(says) => format!("{why}; {says}"),
        None => why.to_owned(),
    }
}

/// The reason for which the guest was given back by the arbiter.
pub(super) fn won(why: &str) -> Refusal {
    Refusal::new(RefusalCode::Other, format!("{why}; the fence has given the guest to this side"))
}

/// The commit was sent, and its answer is awaited.
#[derive(Debug, Clone)]
pub(super) struct Committed {
    kind: Kind,
}

impl Committed {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind }
    }

    pub(super) fn hands_over(&self) -> bool {
        self.kind == Kind::HandOver
    }

    pub(super) fn handle(self, shared: &mut Shared, now: Duration, event: Event) -> Next {
        match event {
            Event::Message(ToSource::Running { start_us, cpu_us }) => {
                shared.summary.start_time = Duration::from_micros(start_us);
                if self.hands_over() {
                    return Postcopy::begin(shared, History::begin(now));
                }
                shared.summary.target_cpu = Duration::from_micros(cpu_us);
                finish(Outcome::Completed)
            }
            // The target promises that the guest never ran there and never will. It says `Failed` if
            // it gave up just before it read the commit.
            Event::Message(ToSource::Returned(why) | ToSource::Failed(why)) => {
                given_back(why, self.hands_over() || shared.claim.is_some())
            }
            // The commit was the newest message, and it never left: the guest is the source's.
            Event::NotSent(why) => give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, why)), false),
            Event::Message(message) => {
                let why = format!("the target answered the commit with {}", message.name());
                self.lost(shared, now, why)
            }
            Event::PeerLost(why) => self.lost(shared, now, why),
            Event::LocalFailure(why) => self.lost(shared, now, why.to_string()),
            Event::Tick => self.tick(shared, now),
            Event::ArbiterAnswered(answer) => {
                shared.claim.iter_mut().for_each(|claim| claim.note(answer.clone()));
                (State::Committed(self), Vec::new())
            }
            // A request of the operator comes too late to keep the guest. The source does
            // nothing else in this phase, so no step of its own can end.
            _ => (State::Committed(self), Vec::new()),
        }
    }

    fn tick(self, shared: &mut Shared, now: Duration) -> Next {
        let patience = shared.patience();
        if now.saturating_sub(shared.last_step) > patience {
            let why = format!(
                "the target is there, but has not said whether it runs the guest that it was told to run for \
                 {patience:?}"
            );
            return self.lost(shared, now, why);
        }
        let ping = shared.ping(now);
        (State::Committed(self), ping)
    }

    /// The link is lost. The target may or may not have read the commit, and the source must not
    /// guess: if it ran the guest now there could be two.
    fn lost(self, shared: &mut Shared, now: Duration, why: String) -> Next {
        match (self.kind, &mut shared.claim) {
            // Over a new link the target says whether it runs the guest.
            (Kind::HandOver, _) => {
                Recovery::begin(shared, now, History::begin(now), Owner::Unknown, Reopen::Itself(why))
            }
            (Kind::Complete, Some(claim)) => {
                let claim = claim.make(HEAD_START);
                let actions = [Action::Disconnect].into_iter().chain(claim).collect();
                (State::Claiming(Claiming { why, told: false, since: now }), actions)
            }
            (Kind::Complete, None) => finish(Outcome::Unknown(why)),
        }
    }
}

/// The link was lost after the commit of a guest that has all of its memory on the target. The
/// arbiter is asked: no new link could tell more.
#[derive(Debug, Clone)]
pub(super) struct Claiming {
    /// Reason for which the link is lost.
    why: String,
    /// The operator is told that the arbiter has not answered for long.
    told: bool,
    /// Time at which the link was lost, or the operator last asked for the guest.
    since: Duration,
}

impl Claiming {
    pub(super) fn interrupted(&self) -> (bool, &str) {
        (self.told, &self.why)
    }

    pub(super) fn handle(mut self, shared: &mut Shared, now: Duration, event: Event) -> Next {
        match event {
            Event::ArbiterAnswered(answer) => {
                let Some(claim) = &mut shared.claim else { return (State::Claiming(self), Vec::new()) };
                match claim.answered(answer) {
                    Decided::Source => given_back(won(&self.why), false),
                    Decided::TargetRuns => finish(Outcome::Completed),
                    Decided::Open(again) => (State::Claiming(self), vec![again]),
                }
            }
            Event::Tick => {
                self.told |= now.saturating_sub(self.since) > shared.settings.reconnect_for;
                (State::Claiming(self), Vec::new())
            }
            Event::Recover => {
                (self.told, self.since) = (false, now);
                (State::Claiming(self), Vec::new())
            }
            Event::Abandon => finish(Outcome::Unknown(undecided(&self.why, shared.claim.as_ref()))),
            // Late reports of channels that are closed.
            _ => (State::Claiming(self), Vec::new()),
        }
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        let Self { why: _, told, since } = self;
        *since = Duration::ZERO;
        std::hash::Hash::hash(told, hasher);
    }
}
