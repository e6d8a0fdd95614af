//! How a migration ends other than well: silence, timeouts, failures, a cancel.

use super::{Phase, Session, State};
use crate::source::events::{Action, Outcome};
use crate::source::settings::OnTimeout;
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// How often the target is asked whether it is there, unless its silence is borne for less than four times this.
const PING_EVERY: Duration = Duration::from_secs(1);
/// How many times the peer's timeout a target may take for a step while it still answers pings: it may be slow, and a
/// pass that was sent may still be in the sockets of a slow link, but a stopped guest must not wait for ever.
const PATIENCE: u32 = 3;

impl Session {
    pub(super) fn tick(&mut self, now: Duration) -> Vec<Action> {
        let timeout = self.settings.timeout.is_some_and(|t| now.saturating_sub(self.started) > t);
        if timeout && self.phase() != Phase::Switchover {
            match self.settings.on_timeout {
                OnTimeout::Cancel => {
                    let limit = self.settings.timeout.unwrap_or_default();
                    return self.give_up(Outcome::Cancelled(format!("not done within {limit:?}")), true);
                }
                OnTimeout::Switch => self.switch_wanted = true,
                OnTimeout::Postcopy => self.postcopy_wanted = true,
            }
        }
        if self.state == State::Resting {
            return self.rested(now);
        }
        if let Some(what) = self.awaited()
            && now.saturating_sub(self.last_step) > self.patience()
        {
            let waited = self.patience();
            let detail = format!("the target is there, but has not {what} for {waited:?}");
            return self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Timeout, detail)), true);
        }
        if self.sending_last() && now.saturating_sub(self.stopped) > self.longest_stop() {
            let detail = format!(
                "the target took the last pages so slowly that the guest has stood still for {:?}",
                self.longest_stop()
            );
            return self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Timeout, detail)), true);
        }
        self.ping(now)
    }

    /// How long the target may take for a step while it answers pings.
    pub(crate) fn patience(&self) -> Duration {
        self.settings.peer_timeout.saturating_mul(PATIENCE)
    }

    pub(super) fn ping(&mut self, now: Duration) -> Vec<Action> {
        let every = PING_EVERY.min(self.settings.peer_timeout / 4);
        if now.saturating_sub(self.last_ping.1) < every {
            return Vec::new();
        }
        self.last_ping = (self.last_ping.0 + 1, now);
        vec![Action::Send(ToTarget::Ping(self.last_ping.0))]
    }

    /// Takes in the answer to a ping, which arrived at `at`. A driver that was busy then takes it in later, and that time is none of the
    /// link's.
    pub(crate) fn pong(&mut self, at: Duration, number: u64) {
        if number == self.last_ping.0 {
            self.round_trip = at.saturating_sub(self.last_ping.1);
        }
    }

    /// What only the target can do next; `None` while this side still works, or sends.
    fn awaited(&self) -> Option<&'static str> {
        match self.state {
            State::AwaitAccept => Some("accepted the guest"),
            State::Opening { opened: true, .. } => Some("taken its channels"),
            State::Passing { sent: true, .. } | State::LastPass { sent: true, .. } => {
                Some("received the pages that were sent")
            }
            State::Verifying { sent: true, .. } => Some("compared the pages"),
            State::Loading => Some("loaded the device state"),
            State::Committed => Some("said whether it runs the guest that it was told to run"),
            _ => None,
        }
    }

    fn sending_last(&self) -> bool {
        matches!(self.state, State::LastPass { sent: false, .. } | State::Verifying { sent: false, .. })
    }

    /// How long the guest may stand still while this side sends. Somebody who asked for the switch whatever it takes waits
    /// for the last pages, and somebody who wants every page compared for that.
    fn longest_stop(&self) -> Duration {
        let comparing = matches!(self.state, State::Verifying { .. });
        if self.switch_wanted || comparing {
            return Duration::MAX;
        }
        self.settings.downtime_limit.saturating_add(self.patience())
    }

    pub(super) fn peer_lost(&mut self, why: String) -> Vec<Action> {
        if self.state == State::Committed {
            // The target may or may not have read the commit. Nobody can know from here, so nobody guesses: running
            // the guest now could make two of it.
            if let Some(asked) = self.ask_fence(&why) {
                return asked;
            }
            self.ended = Some(Outcome::Unknown(why));
            return self.finish();
        }
        self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, why)), false)
    }

    /// Ends before the commit: the guest is and stays ours.
    pub(super) fn give_up(&mut self, outcome: Outcome, tell: bool) -> Vec<Action> {
        if self.state == State::Committed {
            return match outcome {
                // Too late to cancel, and a failure here changes nothing: the target's answer decides.
                Outcome::Cancelled(_) => Vec::new(),
                Outcome::Failed(why) => self.peer_lost(why.to_string()),
                other => {
                    self.ended = Some(other);
                    self.finish()
                }
            };
        }
        // The guest first: telling a target that does not read can take long. It is asked for even where the pause was only
        // begun; it does nothing to a guest that runs.
        let mut actions = vec![Action::Resume];
        if tell {
            let why = match &outcome {
                Outcome::Failed(why) => why.clone(),
                Outcome::Cancelled(why) => Refusal::new(RefusalCode::Cancelled, why.clone()),
                _ => Refusal::new(RefusalCode::Other, "ended"),
            };
            actions.push(Action::Send(ToTarget::Cancel(why)));
        }
        self.state = State::Resuming;
        self.ended = Some(outcome);
        actions
    }

    pub(super) fn not_resumed(&mut self, why: &Refusal) -> Vec<Action> {
        let before = match self.ended.take() {
            Some(Outcome::Failed(before)) => before.to_string(),
            Some(Outcome::Cancelled(before)) => before,
            _ => String::new(),
        };
        let detail = if before.is_empty() { why.to_string() } else { format!("{before}; and {why}") };
        self.stands_still = true;
        self.ended = Some(Outcome::Failed(Refusal::new(RefusalCode::Other, detail)));
        self.finish()
    }

    /// Whether the guest is ours and was left paused, because it could not be resumed.
    pub(crate) fn stands_still(&self) -> bool {
        self.stands_still
    }

    pub(super) fn finish(&mut self) -> Vec<Action> {
        self.state = State::Done;
        self.ended.clone().map(Action::Finish).into_iter().collect()
    }
}
