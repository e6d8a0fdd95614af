//! Recovery phase, after the loss of the link following a handover. The target runs the guest, or
//! may run it, and does not have some pages that only the source has. Therefore the source tries
//! repeatedly to reconnect.

use super::commit::{Answer, Decided, undecided, won};
use super::context::SourceContext;
use super::ending::{finish, given_back};
use super::postcopy::{History, Postcopy, completed};
use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{ToSource, Token};

/// Time between the loss of a link and the first attempt to reconnect. The time doubles with each
/// attempt, up to the limit below.
const FIRST_TRY: Duration = Duration::from_millis(50);
const LONGEST_BETWEEN_TRIES: Duration = Duration::from_secs(2);

/// Owner of the guest, as far as the source knows.
#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The target may or may not have read the commit.
    Unknown,
    /// The target runs the guest.
    Target,
}

/// Condition for reconnecting, with the reason for the loss of the link.
pub(super) enum Reopen {
    /// The source reconnects by itself, for
    /// [`Settings::reconnect_for`](crate::source::Settings::reconnect_for).
    Itself(String),
    /// The source reconnects when the operator requests it.
    OnRequest(String),
}

/// Lost link.
#[derive(Debug, Clone)]
pub(super) struct Recovery {
    step: Step,
    owner: Owner,
    /// True if the source reconnects only when the operator requests it.
    waiting: bool,
    /// Reason for the loss of the link.
    why: String,
    history: History,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// There is no link.
    Suspended,
    /// A control channel is being opened.
    Reconnecting,
    /// The target names its missing pages.
    Hearing,
    /// The other channels are being opened: `opened` is true once the source has opened them, `up`
    /// once the target has reported them.
    Reopening { opened: bool, up: bool },
}

impl Recovery {
    /// Begins after the loss of the link.
    pub(super) fn begin(
        context: &mut SourceContext,
        now: Duration,
        mut history: History,
        owner: Owner,
        reopen: Reopen,
    ) -> Next {
        // The time limit for reconnecting starts anew only if the last link has transferred pages,
        // or has lasted for long. Links that can be opened again and again but transfer nothing
        // count as one loss.
        let held = now.saturating_sub(history.resumed);
        if !history.stalled || held > context.settings.reconnect_for {
            history.lost = now;
            history.pause = FIRST_TRY;
        }
        context.summary.interruptions += 1;
        let (waiting, why) = match reopen {
            Reopen::Itself(why) => (false, why),
            Reopen::OnRequest(why) => (true, why),
        };
        let recovery = Self { step: Step::Suspended, owner, waiting, why: String::new(), history };
        recovery.suspend(context, why)
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn runs_on_target(&self) -> bool {
        self.owner == Owner::Target
    }

    pub(super) fn interrupted(&self) -> (bool, &str) {
        (self.waiting, &self.why)
    }

    pub(super) fn handle(mut self, context: &mut SourceContext, now: Duration, event: Event) -> Next {
        match (self.step, event) {
            (_, Event::ArbiterAnswered(answer)) => self.ruled(context, answer),
            (Step::Hearing | Step::Reopening { .. }, Event::Message(ToSource::Complete(figures))) => {
                completed(context, figures)
            }
            (Step::Suspended | Step::Hearing | Step::Reopening { .. }, Event::Abandon) => {
                self.abandon(context)
            }
            (Step::Suspended, Event::Tick) if !self.waiting => self.try_again(context, now),
            (Step::Suspended, Event::Recover) => {
                self.waiting = false;
                (self.history.lost, self.history.pause) = (now, Duration::ZERO);
                self.try_again(context, now)
            }
            // Late reports of channels that are closed.
            (Step::Suspended, _) => self.stay(),
            (Step::Reconnecting, Event::Reconnected) => self.go_on_to(Step::Hearing, Vec::new()),
            (Step::Reconnecting, Event::NotReconnected(why)) => {
                self.why = why;
                self.go_on_to(Step::Suspended, Vec::new())
            }
            // Not accepted for a guest that has run on the target, because the guest cannot
            // continue from the older state on the source.
            (Step::Hearing, Event::Message(ToSource::Returned(why))) if self.owner == Owner::Unknown => {
                given_back(why, true)
            }
            (Step::Hearing, Event::Message(ToSource::Lacking(piece))) => {
                (State::Recovery(self), vec![Action::TakeMissing(piece)])
            }
            (Step::Hearing, Event::Message(ToSource::Resume { pages, bulk, urgent })) => {
                self.named(pages, bulk, urgent)
            }
            (Step::Reopening { up, .. }, Event::ChannelsOpened) => self.reopening(context, now, true, up),
            (Step::Reopening { opened, .. }, Event::Message(ToSource::ChannelsUp)) => {
                self.reopening(context, now, opened, true)
            }
            (_, Event::PeerLost(why) | Event::NotSent(why)) => self.suspend(context, why),
            (_, Event::LocalFailure(why)) => self.suspend(context, why.to_string()),
            (_, Event::Message(message)) => {
                let why = format!("the target sent {}, which is not allowed at this point", message.name());
                self.suspend(context, why)
            }
            (_, Event::Tick) => self.tick(context, now),
            // Other requests of the operator come too late to keep the guest.
            _ => self.stay(),
        }
    }

    fn stay(self) -> Next {
        (State::Recovery(self), Vec::new())
    }

    fn go_on_to(mut self, step: Step, actions: Vec<Action>) -> Next {
        self.step = step;
        (State::Recovery(self), actions)
    }

    /// Handles the loss of the link, including a link that was just opened.
    fn suspend(mut self, context: &mut SourceContext, why: String) -> Next {
        self.why = why;
        // If the owner is unknown, the source also claims the guest, so that the guest can continue
        // on the source if the target does not own it.
        let claim = match (self.owner, &mut context.claim) {
            // The source has all of the memory, so its claim need not wait for a claim of the
            // target.
            (Owner::Unknown, Some(claim)) => claim.begin(Duration::ZERO),
            _ => None,
        };
        self.go_on_to(Step::Suspended, [Action::Disconnect].into_iter().chain(claim).collect())
    }

    fn ruled(mut self, context: &mut SourceContext, answer: Answer) -> Next {
        let Some(claim) = &mut context.claim else { return self.stay() };
        if self.owner == Owner::Target || matches!(self.step, Step::Reopening { .. }) {
            claim.note(answer);
            return self.stay();
        }
        match claim.answered(answer) {
            Decided::Source => given_back(won(&self.why), true),
            Decided::TargetRuns => {
                // The source still has the guest's missing pages, and needs the link to send them.
                self.owner = Owner::Target;
                self.stay()
            }
            Decided::Open(again) => (State::Recovery(self), vec![again]),
        }
    }

    /// Records that the target runs the guest and has named `pages` missing pages.
    fn named(mut self, pages: u64, bulk: Token, urgent: Token) -> Next {
        self.owner = Owner::Target;
        self.history.stalled = self.history.left.replace(pages).is_some_and(|before| pages >= before);
        if pages == 0 {
            // The target sends `Complete` next.
            return self.stay();
        }
        let actions = vec![Action::ServeMissing { pages }, Action::OpenChannels { bulk, urgent }];
        self.go_on_to(Step::Reopening { opened: false, up: false }, actions)
    }

    fn reopening(mut self, context: &mut SourceContext, now: Duration, opened: bool, up: bool) -> Next {
        if !(opened && up) {
            return self.go_on_to(Step::Reopening { opened, up }, Vec::new());
        }
        self.history.resumed = now;
        Postcopy::begin(context, self.history)
    }

    fn try_again(mut self, context: &SourceContext, now: Duration) -> Next {
        if now.saturating_sub(self.history.lost) > context.settings.reconnect_for {
            self.waiting = true;
            return self.stay();
        }
        let after = self.history.pause;
        self.history.pause = (after * 2).clamp(FIRST_TRY, LONGEST_BETWEEN_TRIES);
        self.go_on_to(Step::Reconnecting, vec![Action::Reconnect { after }])
    }

    fn tick(self, context: &mut SourceContext, now: Duration) -> Next {
        let patience = context.patience();
        let awaits = matches!(self.step, Step::Hearing | Step::Reopening { opened: true, .. });
        if awaits && now.saturating_sub(context.last_step) > patience {
            let why =
                format!("the target answers pings, but has not answered anything else for {patience:?}");
            return self.suspend(context, why);
        }
        let ping = context.ping(now);
        (State::Recovery(self), ping)
    }

    /// Ends the migration after the operator has given up the link.
    fn abandon(self, context: &SourceContext) -> Next {
        let why = undecided(&self.why, context.claim.as_ref());
        finish(match self.owner {
            Owner::Target => Outcome::Lost(format!(
                "the guest ran on the target and was given up before the target reported all of its memory \
                 ({why})"
            )),
            Owner::Unknown => Outcome::Unknown(why),
        })
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        let Self { step: _, owner, waiting, why: _, history } = self;
        history.project();
        std::hash::Hash::hash(&(owner, waiting), hasher);
    }
}
