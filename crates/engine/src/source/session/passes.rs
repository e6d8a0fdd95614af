//! Passes over memory that the guest goes on writing: from the first to the one after which it is stopped.

use super::{Session, State};
use crate::source::events::{Action, Pass};
use crate::source::policy::{Decision, PassOutcome};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_wire::ToTarget;

impl Session {
    pub(super) fn opening(&mut self, opened: bool, up: bool) -> Vec<Action> {
        self.state = State::Opening { opened, up };
        if !(opened && up) {
            return Vec::new();
        }
        if self.settings.mode == MigrationMode::Postcopy {
            // Nothing is sent before, so nothing need be tracked.
            return self.pause_for_postcopy();
        }
        self.state = State::StartingTracker;
        vec![Action::StartTracker]
    }

    pub(super) fn send_live(&mut self, now: Duration, first: bool) -> Vec<Action> {
        self.state = State::Passing { sent: false, received: false };
        self.pass_began = now;
        let pass = Pass::Dirty { first };
        vec![
            Action::Send(ToTarget::Pass { pass: self.pass, pages: self.remaining }),
            Action::SendPass { number: self.pass, pass },
        ]
    }

    pub(super) fn passing(&mut self, now: Duration, sent: bool, received: bool) -> Vec<Action> {
        self.state = State::Passing { sent, received };
        if !(sent && received) {
            return Vec::new();
        }
        self.state = State::Harvesting;
        self.harvest_began = now;
        vec![Action::Harvest]
    }

    pub(super) fn harvested(&mut self, now: Duration, pages: u64) -> Vec<Action> {
        self.last_harvest = now.saturating_sub(self.harvest_began);
        self.remaining = pages;
        if self.after_rest {
            return self.woken(now);
        }
        // A pass waits for the target once, whatever else it does: a bound for what a slow answer to a ping seemed to say.
        self.round_trip = self.round_trip.min(self.harvest_began.saturating_sub(self.pass_began));
        // What stopping costs is measured, by stopping for an instant, not guessed. Once; but a host that was busy at that
        // instant must not keep the guest from ever fitting its limit.
        let never = self.fixed.is_none() && self.busy.is_none();
        let again = self.cannot_stop() && self.rehearsal_is_due(now) && !self.insisted();
        if never || again {
            return self.rehearse();
        }
        self.decide(now)
    }

    pub(super) fn decide(&mut self, now: Duration) -> Vec<Action> {
        if self.after_rest {
            return self.woken(now);
        }
        let outcome = PassOutcome {
            bytes: self.pass_bytes,
            elapsed: self.harvest_began.saturating_sub(self.pass_began),
            remaining: self.remaining,
        };
        // First: the time that the state takes on the link is one of the costs.
        self.policy.learn(outcome);
        let decision = self.policy.decide(outcome, self.fixed_costs());
        self.pass += 1;
        self.judge(now, outcome, decision);
        let ready = self.busy.is_none() || self.insisted();
        if (decision == Decision::Switch && ready) || self.switch_wanted {
            return self.pause();
        }
        if self.wants_postcopy() && ready {
            return self.pause_for_postcopy();
        }
        if self.goes_lazily_instead(now) {
            return self.pause_for_postcopy();
        }
        if self.rests() {
            return self.rest(now);
        }
        let mut actions: Vec<_> = self.slow_down(outcome).map(Action::Throttle).into_iter().collect();
        actions.extend(self.send_live(now, false));
        actions
    }
}
