//! Phases after the commit, in which the source has told the target to run the guest, and does not
//! know yet whether the target runs it.
//!
//! The source claims the guest from the [arbiter](crate::arbiter) only if the link is lost between
//! the commit and its answer. Before the commit, the source needs no claim, because it owns the
//! guest whatever the register holds. As long as the arbiter does not answer, the source concludes
//! nothing.

use super::context::SourceContext;
use super::ending::{finish, give_up, given_back};
use super::postcopy::{History, Postcopy};
use super::recovery::{Owner, Recovery, Reopen};
use super::switchover::Kind;
use super::{Next, State};
use crate::arbiter::{ArbiterError, ArbiterRequest, Backoff, Ownership, Side};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// Time between the loss of the link and the source's claim, for a guest that has all of its memory
/// on the target. The delay favours the target: if it has read the commit, it claims the guest at
/// once, and the migration is complete.
const HEAD_START: Duration = Duration::from_millis(250);

/// Answer of the arbiter to a claim.
pub(super) type Answer = Result<Ownership, ArbiterError>;

/// Source's claim to the guest, made to the arbiter.
#[derive(Debug, Clone, Default)]
pub(super) struct Claim {
    /// True if a claim was sent or waits to be sent.
    awaits_answer: bool,
    /// True if a claim was made. The register must then stay, because the target may have to read
    /// the result.
    begun: bool,
    again: Backoff,
    answer: Option<Answer>,
}

/// Meaning of the arbiter's answer for a source that does not know who owns the guest.
pub(super) enum Decided {
    /// The source owns the guest. The arbiter will never grant a claim of the target.
    Source,
    /// The target runs the guest.
    TargetRuns,
    /// Nothing is decided yet, and the source asks again with this action.
    Open(Action),
}

impl Claim {
    /// Returns the action that makes a claim after the delay `after`, or `None` if a claim is
    /// already under way.
    pub(super) fn begin(&mut self, after: Duration) -> Option<Action> {
        if self.awaits_answer {
            return None;
        }
        (self.awaits_answer, self.begun) = (true, true);
        Some(Action::AskArbiter { request: ArbiterRequest::Claim(Side::Source), after })
    }

    /// Takes the arbiter's answer to the claim.
    pub(super) fn answered(&mut self, answer: Answer) -> Decided {
        self.note(answer.clone());
        match answer {
            Ok(Ownership::Source) => Decided::Source,
            Ok(Ownership::Target { runs: true }) => Decided::TargetRuns,
            // The target may still fail to start the guest, and then gives it back.
            Ok(Ownership::Target { runs: false } | Ownership::Open) | Err(_) => {
                self.awaits_answer = true;
                let after = self.again.next();
                Decided::Open(Action::AskArbiter { request: ArbiterRequest::Claim(Side::Source), after })
            }
        }
    }

    /// Stores an answer for the report, without acting on it.
    pub(super) fn note(&mut self, answer: Answer) {
        self.awaits_answer = false;
        self.answer = Some(answer);
    }

    pub(super) fn begun(&self) -> bool {
        self.begun
    }

    /// Returns the last answer of the arbiter as a text, if the source has made a claim.
    pub(super) fn says(&self) -> Option<String> {
        self.begun.then(|| match &self.answer {
            None => "the arbiter is being asked".into(),
            Some(Ok(owner)) => format!("the arbiter {owner}"),
            Some(Err(error)) => error.to_string(),
        })
    }

    /// Hashes the fields that affect decisions. The time until the next claim and the last answer
    /// affect none.
    #[cfg(feature = "model")]
    pub(super) fn project(&self, hasher: &mut impl std::hash::Hasher) {
        let Self { awaits_answer, begun, again: _, answer: _ } = self;
        std::hash::Hash::hash(&(awaits_answer, begun), hasher);
    }
}

/// Returns the reason why the owner is unknown, with the last answer of the arbiter.
pub(super) fn undecided(why: &str, claim: Option<&Claim>) -> String {
    match claim.and_then(Claim::says) {
        Some(says) => format!("{why}; {says}"),
        None => why.to_owned(),
    }
}

/// Returns the reason why the guest stays on the source: the loss of the link, and the arbiter's
/// decision for the source.
pub(super) fn won(why: &str) -> Refusal {
    Refusal::new(RefusalCode::Other, format!("{why}; the arbiter has given the guest to the source"))
}

/// Phase in which the commit was sent, and the source waits for the answer.
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

    pub(super) fn handle(self, context: &mut SourceContext, now: Duration, event: Event) -> Next {
        match event {
            Event::Message(ToSource::Running { start_us, cpu_us }) => {
                context.summary.start_time = Duration::from_micros(start_us);
                if self.hands_over() {
                    return Postcopy::begin(context, History::begin(now));
                }
                context.summary.target_cpu = Duration::from_micros(cpu_us);
                finish(Outcome::Completed)
            }
            // With these messages, the target guarantees that the guest has not run there and never
            // will. The target sends `Failed` if it gave up just before it read the commit.
            Event::Message(ToSource::Returned(why) | ToSource::Failed(why)) => {
                given_back(why, self.hands_over() || context.claim.is_some())
            }
            // The commit was the newest message, and no byte of it was sent. Therefore the source
            // still owns the guest.
            Event::NotSent(why) => give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, why)), false),
            Event::Message(message) => {
                let why = format!("the target answered the commit with {}", message.name());
                self.lost(context, now, why)
            }
            Event::PeerLost(why) => self.lost(context, now, why),
            Event::LocalFailure(why) => self.lost(context, now, why.to_string()),
            Event::Tick => self.tick(context, now),
            Event::ArbiterAnswered(answer) => {
                context.claim.iter_mut().for_each(|claim| claim.note(answer.clone()));
                (State::Committed(self), Vec::new())
            }
            // A request of the operator comes too late to keep the guest. In this phase no local
            // operation of the source is in progress, so no such operation can complete.
            _ => (State::Committed(self), Vec::new()),
        }
    }

    fn tick(self, context: &mut SourceContext, now: Duration) -> Next {
        let patience = context.patience();
        if now.saturating_sub(context.last_step) > patience {
            let why = format!(
                "the target answers pings, but for {patience:?} it has not said whether it runs the \
                 guest"
            );
            return self.lost(context, now, why);
        }
        let ping = context.ping(now);
        (State::Committed(self), ping)
    }

    /// Handles the loss of the link. The target may or may not have read the commit. If the source
    /// ran the guest now, the guest could run on two hosts.
    fn lost(self, context: &mut SourceContext, now: Duration, why: String) -> Next {
        match (self.kind, &mut context.claim) {
            // The source reconnects, because the target reports over the new link whether it runs
            // the guest.
            (Kind::HandOver, _) => {
                Recovery::begin(context, now, History::begin(now), Owner::Unknown, Reopen::Itself(why))
            }
            (Kind::Complete | Kind::Shared, Some(claim)) => {
                let claim = claim.begin(HEAD_START);
                let actions = [Action::Disconnect].into_iter().chain(claim).collect();
                (State::Claiming(Claiming { why, told: false, since: now }), actions)
            }
            (Kind::Complete | Kind::Shared, None) => finish(Outcome::Unknown(why)),
        }
    }
}

/// Phase after the loss of the link between the commit and its answer, for a guest that has all of
/// its memory on the target. The source asks the arbiter and does not reconnect, because a target
/// that has the whole guest accepts no new link.
#[derive(Debug, Clone)]
pub(super) struct Claiming {
    /// Reason for the loss of the link.
    why: String,
    /// True if the arbiter has not decided for so long that the operator must be told.
    told: bool,
    /// Time of the loss of the link, or of the operator's last request to recover.
    since: Duration,
}

impl Claiming {
    pub(super) fn interrupted(&self) -> (bool, &str) {
        (self.told, &self.why)
    }

    pub(super) fn handle(mut self, context: &mut SourceContext, now: Duration, event: Event) -> Next {
        match event {
            Event::ArbiterAnswered(answer) => {
                let Some(claim) = &mut context.claim else { return (State::Claiming(self), Vec::new()) };
                match claim.answered(answer) {
                    Decided::Source => given_back(won(&self.why), false),
                    Decided::TargetRuns => finish(Outcome::Completed),
                    Decided::Open(again) => (State::Claiming(self), vec![again]),
                }
            }
            Event::Tick => {
                self.told |= now.saturating_sub(self.since) > context.settings.reconnect_for;
                (State::Claiming(self), Vec::new())
            }
            Event::Recover => {
                (self.told, self.since) = (false, now);
                (State::Claiming(self), Vec::new())
            }
            Event::Abandon => finish(Outcome::Unknown(undecided(&self.why, context.claim.as_ref()))),
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
