//! The link is lost after the handover. The target runs the guest, or may run it, and misses pages
//! that only the source has. The source opens the link again and again.

use super::commit::{Answer, Decided, undecided, won};
use super::ending::{finish, given_back};
use super::postcopy::{History, Postcopy, completed};
use super::shared::Shared;
use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{ToSource, Token};

/// Time between the loss of a link and the first attempt to open it again. It doubles with each
/// attempt, up to the longest.
const FIRST_TRY: Duration = Duration::from_millis(50);
const LONGEST_BETWEEN_TRIES: Duration = Duration::from_secs(2);

/// The source's knowledge of the guest's owner.
#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The target may or may not have read the commit.
    Unknown,
    /// The target runs the guest.
    Target,
}

/// Condition for opening a lost link again, with the reason for the loss.
pub(super) enum Reopen {
    /// By the source itself, for [`Settings::reconnect_for`](crate::source::Settings::reconnect_for).
    Itself(String),
    /// Once the operator asks for it.
    OnRequest(String),
}

/// A lost link.
#[derive(Debug, Clone)]
pub(super) struct Recovery {
    step: Step,
    owner: Owner,
    /// The source opens the link only when the operator asks for it.
    waiting: bool,
    /// Reason for which the link is lost.
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
    /// The other channels are being opened: `opened` by the source, `up` at the target.
    Reopening { opened: bool, up: bool },
}

impl Recovery {
    /// Begins: the link is lost.
    pub(super) fn begin(
        shared: &mut Shared,
        now: Duration,
        mut history: History,
        owner: Owner,
        reopen: Reopen,
    ) -> Next {
        // A link that can be opened again and again, and brings nothing, counts as one attempt:
        // something fails that time does not repair.
        let held = now.saturating_sub(history.resumed);
        if !history.stalled || held > shared.settings.reconnect_for {
            history.lost = now;
            history.pause = FIRST_TRY;
        }
        shared.summary.interruptions += 1;
        let (waiting, why) = match reopen {
            Reopen::Itself(why) => (false, why),
            Reopen::OnRequest(why) => (true, why),
        };
        let recovery = Self { step: Step::Suspended, owner, waiting, why: String::new(), history };
        recovery.suspend(shared, why)
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn runs_there(&self) -> bool {
        self.owner == Owner::Target
    }

    pub(super) fn interrupted(&self) -> (bool, &str) {
        (self.waiting, &self.why)
    }

    pub(super) fn handle(mut self, shared: &mut Shared, now: Duration, event: Event) -> Next {
        match (self.step, event) {
            (_, Event::ArbiterAnswered(answer)) => self.ruled(shared, answer),
            (Step::Hearing | Step::Reopening { .. }, Event::Message(ToSource::Complete(figures))) => {
                completed(shared, figures)
            }
            (Step::Suspended | Step::Hearing | Step::Reopening { .. }, Event::Abandon) => {
                self.abandon(shared)
            }
            (Step::Suspended, Event::Tick) if !self.waiting => self.try_again(shared, now),
            (Step::Suspended, Event::Recover) => {
                self.waiting = false;
                (self.history.lost, self.history.pause) = (now, Duration::ZERO);
                self.try_again(shared, now)
            }
            // Late reports of channels that are closed.
            (Step::Suspended, _) => self.stay(),
            (Step::Reconnecting, Event::Reconnected) => self.go_on_to(Step::Hearing, Vec::new()),
            (Step::Reconnecting, Event::NotReconnected(why)) => {
                self.why = why;
                self.go_on_to(Step::Suspended, Vec::new())
            }
            // Not of a guest that has run there: two histories of it cannot be joined.
            (Step::Hearing, Event::Message(ToSource::Returned(why))) if self.owner == Owner::Unknown => {
                given_back(why, true)
            }
            (Step::Hearing, Event::Message(ToSource::Lacking(piece))) => {
                (State::Recovery(self), vec![Action::TakeMissing(piece)])
            }
            (Step::Hearing, Event::Message(ToSource::Resume { pages, bulk, urgent })) => {
                self.named(pages, bulk, urgent)
            }
            (Step::Reopening { up, .. }, Event::ChannelsOpened) => self.reopening(shared, now, true, up),
            (Step::Reopening { opened, .. }, Event::Message(ToSource::ChannelsUp)) => {
                self.reopening(shared, now, opened, true)
            }
            (_, Event::PeerLost(why) | Event::NotSent(why)) => self.suspend(shared, why),
            (_, Event::LocalFailure(why)) => self.suspend(shared, why.to_string()),
            (_, Event::Message(message)) => {
                let why = format!("the target sent {}, which does not fit this moment", message.name());
                self.suspend(shared, why)
            }
            (_, Event::Tick) => self.tick(shared, now),
            // Too late to keep the guest.
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

    /// The link is lost, also one that was just opened.
    fn suspend(mut self, shared: &mut Shared, why: String) -> Next {
        self.why = why;
        // The guest may go on at the source as well, if it is known that the target does not run it.
        let claim = match (self.owner, &mut shared.claim) {
            // The source has all of the memory, so its claim need not wait for the target's.
            (Owner::Unknown, Some(claim)) => claim.make(Duration::ZERO),
            _ => None,
        };
        self.go_on_to(Step::Suspended, [Action::Disconnect].into_iter().chain(claim).collect())
    }

    fn ruled(mut self, shared: &mut Shared, answer: Answer) -> Next {
        let Some(claim) = &mut shared.claim else { return self.stay() };
        if self.owner == Owner::Target || matches!(self.step, Step::Reopening { .. }) {
            claim.note(answer);
            return self.stay();
        }
        match claim.answered(answer) {
            Decided::Source => given_back(won(&self.why), true),
            Decided::TargetRuns => {
                // Its missing pages are here, and need the link.
                self.owner = Owner::Target;
                self.stay()
            }
            Decided::Open(again) => (State::Recovery(self), vec![again]),
        }
    }

    /// The target runs the guest, and has named `pages` missing pages.
    fn named(mut self, pages: u64, bulk: Token, urgent: Token) -> Next {
        self.owner = Owner::Target;
        self.history.stalled = self.history.left.replace(pages).is_some_and(|before| pages >= before);
        if pages == 0 {
            // `Complete` follows.
            return self.stay();
        }
        let actions = vec![Action::ServeMissing { pages }, Action::OpenChannels { bulk, urgent }];
        self.go_on_to(Step::Reopening { opened: false, up: false }, actions)
    }

    fn reopening(mut self, shared: &mut Shared, now: Duration, opened: bool, up: bool) -> Next {
        if !(opened && up) {
            return self.go_on_to(Step::Reopening { opened, up }, Vec::new());
        }
        self.history.resumed = now;
        Postcopy::begin(shared, self.history)
    }

    fn try_again(mut self, shared: &Shared, now: Duration) -> Next {
        if now.saturating_sub(self.history.lost) > shared.settings.reconnect_for {
            self.waiting = true;
            return self.stay();
        }
        let after = self.history.pause;
        self.history.pause = (after * 2).clamp(FIRST_TRY, LONGEST_BETWEEN_TRIES);
        self.go_on_to(Step::Reconnecting, vec![Action::Reconnect { after }])
    }

    fn tick(self, shared: &mut Shared, now: Duration) -> Next {
        let patience = shared.patience();
        let awaits = matches!(self.step, Step::Hearing | Step::Reopening { opened: true, .. });
        if awaits && now.saturating_sub(shared.last_step) > patience {
            let why = format!("the target is there, but has not answered for {patience:?}");
            return self.suspend(shared, why);
        }
        let ping = shared.ping(now);
        (State::Recovery(self), ping)
    }

    /// The operator gives the link up.
    fn abandon(self, shared: &Shared) -> Next {
        let why = undecided(&self.why, shared.claim.as_ref());
        finish(match self.owner {
            Owner::Target => Outcome::Lost(format!(
                "it ran on the target and was given up before the target said that all of its memory is there \
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
