//! From the handover on, when the guest runs on the target before all of its memory is there.
//!
//! What is here of the guest is frozen from the pause on: this side never runs it again once the target has been told to. Its
//! pages can be sent, and sent again over other channels, for as long as this process lives.

use super::{Session, State};
use crate::source::events::{Action, Event, Outcome, Pass};
use crate::source::settings::MigrationMode;
use std::time::Duration;
use vmferry_core::Section;
use vmferry_wire::{LazyFigures, Refusal, ToSource, ToTarget};

/// A pass that leaves more than this share of what the pass before left is the last, in hybrid mode: the guest dirties about as
/// fast as the link carries.
pub(crate) const CONVERGING: f64 = 0.75;
/// How long after a loss the link is tried to be taken up again; then twice as long, up to the longest.
const FIRST_TRY: Duration = Duration::from_millis(50);
const LONGEST_BETWEEN_TRIES: Duration = Duration::from_secs(2);

/// The state of a lost link.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// The target has said that it runs the guest.
    pub(super) running: bool,
    /// When the link was lost.
    pub(super) since: Duration,
    /// How long until the next attempt.
    pub(super) pause: Duration,
    /// Nothing is tried any more until somebody says so.
    pub(super) waiting: bool,
    /// Why the link is lost.
    pub(super) why: String,
    pub(super) interruptions: u64,
    /// Pages that the target lacked when the link was last taken up again.
    pub(super) left: Option<u64>,
    /// As many as the time before: the link in between was of no use.
    pub(super) stalled: bool,
    /// When pages were last sent again.
    pub(super) resumed: Duration,
}

impl Session {
    /// In hybrid mode: whether another pass is not worth while.
    pub(super) fn wants_postcopy(&mut self) -> bool {
        let before = self.left_before.replace(self.remaining);
        let slow = before.is_some_and(|before| self.remaining as f64 > before as f64 * CONVERGING);
        self.postcopy_wanted || self.postcopy_advised || (self.settings.mode == MigrationMode::Hybrid && slow)
    }

    /// The state travels while the last harvest is under way.
    pub(super) fn saved_for_postcopy(&mut self, now: Duration, sections: Vec<Section>) -> Vec<Action> {
        self.harvest_began = now;
        let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
        let mut actions: Vec<_> =
            sections.into_iter().map(|section| Action::Send(ToTarget::Section(section))).collect();
        actions.push(Action::Send(ToTarget::StateEnd { sections: count }));
        if self.settings.mode == MigrationMode::Postcopy {
            // Every page is to be sent, whatever was written.
            self.remaining = self.pages;
            actions.extend(self.hand_over());
        } else {
            self.state = State::LastHarvest;
            actions.push(Action::Harvest);
        }
        actions
    }

    pub(super) fn hand_over(&mut self) -> Vec<Action> {
        self.state = State::HandingOver;
        vec![Action::HandOver { also: std::mem::take(&mut self.again) }]
    }

    /// The target knows what it lacks. What it has is compared first, if that was asked for; what it lacks is compared as it
    /// comes.
    pub(super) fn named(&mut self, pages: u64, skipped: u64) -> Vec<Action> {
        self.lacking = pages;
        if !self.settings.verify || pages.saturating_add(skipped) == self.pages {
            return self.load();
        }
        self.state = State::Verifying { sent: false, received: false, verified: false };
        vec![
            Action::Send(ToTarget::Verify { pass: self.pass }),
            Action::SendPass { number: self.pass, pass: Pass::Digests },
        ]
    }

    pub(super) fn running_lazily(&mut self, now: Duration) -> Vec<Action> {
        self.state = State::Postcopy;
        self.recovery.running = true;
        self.recovery.since = now;
        self.pass += 1;
        vec![Action::SendRest { number: self.pass }]
    }

    /// Whether the target was told to run the guest without all of its memory: nothing brings it back here but the target's word
    /// that it never ran.
    pub(crate) fn handed_over(&self) -> bool {
        self.lazy
            && matches!(
                self.state,
                State::Committed
                    | State::Postcopy
                    | State::Suspended
                    | State::Reconnecting
                    | State::Hearing
                    | State::Reopening { .. }
            )
    }

    pub(super) fn after_handover(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Committed, Event::NotSent(why)) => {
                // The commit never left: the guest is still ours beyond doubt.
                self.state = State::Loading;
                self.peer_lost(why)
            }
            (_, Event::Message(ToSource::Pong(number))) => {
                self.pong(now, number);
                Vec::new()
            }
            (State::Committed, Event::Message(message)) => self.after_commit(now, message),
            (
                State::Postcopy | State::Hearing | State::Reopening { .. },
                Event::Message(ToSource::Complete(figures)),
            ) => self.completed(figures),
            (State::Postcopy, Event::Pause) => {
                let actions = self.suspend(now, "somebody asked for a pause".into());
                self.recovery.waiting = true;
                actions
            }
            (State::Suspended | State::Hearing | State::Reopening { .. }, Event::Abandon) => self.abandon(),
            (State::Suspended, event) => self.suspended(now, event),
            (State::Reconnecting, Event::Reconnected) => {
                self.state = State::Hearing;
                Vec::new()
            }
            (State::Reconnecting, Event::NotReconnected(why)) => {
                self.recovery.why = why;
                self.state = State::Suspended;
                Vec::new()
            }
            // Not of a guest that has run there: two histories of it cannot be joined.
            (State::Hearing, Event::Message(ToSource::Returned(why))) if !self.recovery.running => {
                self.given_back(why)
            }
            (State::Hearing, Event::Message(ToSource::Lacking(piece))) => vec![Action::TakeLacking(piece)],
            (State::Hearing, Event::Message(ToSource::Resume { pages, bulk, urgent })) => {
                self.recovery.running = true;
                self.recovery.stalled =
                    self.recovery.left.replace(pages).is_some_and(|before| pages >= before);
                if pages == 0 {
                    // `Complete` follows.
                    return Vec::new();
                }
                self.state = State::Reopening { opened: false, up: false };
                vec![Action::ServeAgain { pages }, Action::OpenChannels { bulk, urgent }]
            }
            (State::Reopening { up, .. }, Event::ChannelsOpened) => self.reopening(now, true, up),
            (State::Reopening { opened, .. }, Event::Message(ToSource::ChannelsUp)) => {
                self.reopening(now, opened, true)
            }
            (_, Event::PeerLost(why) | Event::NotSent(why)) => self.suspend(now, why),
            (_, Event::LocalFailure(why)) => self.suspend(now, why.to_string()),
            (State::Postcopy, Event::PassSent { bytes, .. }) => {
                self.pass_bytes = bytes;
                Vec::new()
            }
            (_, Event::Tick) => self.tick_after_handover(now),
            (_, Event::Message(message)) => {
                let name = message.name();
                self.suspend(now, format!("the target sent {name}, which does not fit this moment"))
            }
            // Too late to keep the guest, and nothing to recover.
            _ => Vec::new(),
        }
    }

    fn suspended(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick if !self.recovery.waiting => self.try_again(now),
            Event::Recover => {
                self.recovery.waiting = false;
                self.recovery.since = now;
                self.recovery.pause = Duration::ZERO;
                self.try_again(now)
            }
            // Late news of channels that were closed.
            _ => Vec::new(),
        }
    }

    /// The target's promise that the guest never ran there and never will: it is ours again. A target that renounced it stays
    /// until it knows that this was heard.
    pub(super) fn given_back(&mut self, why: Refusal) -> Vec<Action> {
        let waits = self.lazy || (self.fenced.is_some() && self.state == State::Committed);
        let heard = waits.then_some(Action::Send(ToTarget::Thanks));
        self.state = State::Resuming;
        self.ended = Some(Outcome::Failed(why));
        // The guest first.
        [Action::Resume].into_iter().chain(heard).collect()
    }

    /// The target has every page.
    fn completed(&mut self, figures: LazyFigures) -> Vec<Action> {
        self.target_cpu = Duration::from_micros(figures.cpu_us);
        self.figures = Some(figures);
        self.ended = Some(Outcome::Completed);
        let mut actions = vec![Action::Send(ToTarget::Thanks)];
        actions.extend(self.finish());
        actions
    }

    fn tick_after_handover(&mut self, now: Duration) -> Vec<Action> {
        let patience = self.patience();
        let awaits =
            matches!(self.state, State::Committed | State::Hearing | State::Reopening { opened: true, .. });
        if awaits && now.saturating_sub(self.last_step) > patience {
            return self.suspend(now, format!("the target is there, but has not answered for {patience:?}"));
        }
        self.ping(now)
    }

    fn reopening(&mut self, now: Duration, opened: bool, up: bool) -> Vec<Action> {
        self.state = State::Reopening { opened, up };
        if !(opened && up) {
            return Vec::new();
        }
        self.state = State::Postcopy;
        self.recovery.resumed = now;
        self.pass += 1;
        vec![Action::SendRest { number: self.pass }]
    }

    /// The guest is the target's, or may be. Its pages stay here until the target has them.
    pub(super) fn suspend(&mut self, now: Duration, why: String) -> Vec<Action> {
        // From the first loss on, not from each failed attempt to make it good.
        if matches!(self.state, State::Postcopy | State::Committed) {
            // A link that can be taken up again and again, and brings nothing, is one attempt: something fails that time does not mend.
            let held = now.saturating_sub(self.recovery.resumed);
            if !self.recovery.stalled || held > self.settings.reconnect_for {
                self.recovery.since = now;
                self.recovery.pause = FIRST_TRY;
            }
            self.recovery.waiting = false;
            self.recovery.interruptions += 1;
        }
        self.state = State::Suspended;
        self.recovery.why = why;
        // The guest may go on here as well, if it is known that it does not run there.
        [Action::Disconnect].into_iter().chain(self.claim()).collect()
    }

    fn try_again(&mut self, now: Duration) -> Vec<Action> {
        if now.saturating_sub(self.recovery.since) > self.settings.reconnect_for {
            self.recovery.waiting = true;
            return Vec::new();
        }
        let after = self.recovery.pause;
        self.recovery.pause = (after * 2).clamp(FIRST_TRY, LONGEST_BETWEEN_TRIES);
        self.state = State::Reconnecting;
        vec![Action::Reconnect { after }]
    }

    /// Whether the target has said that it runs the guest before all of its memory is there.
    pub(crate) fn runs_there(&self) -> bool {
        self.recovery.running
    }

    /// Whether somebody has to say `recover`, and why the link is lost.
    pub(crate) fn interrupted(&self) -> Option<(bool, &str)> {
        let lost = matches!(
            self.state,
            State::Claiming
                | State::Suspended
                | State::Reconnecting
                | State::Hearing
                | State::Reopening { .. }
        );
        lost.then_some((self.recovery.waiting, self.recovery.why.as_str()))
    }

    /// How often the link was lost in postcopy.
    pub(crate) fn interruptions(&self) -> u64 {
        self.recovery.interruptions
    }

    fn abandon(&mut self) -> Vec<Action> {
        let why = self.undecided();
        self.ended = Some(if self.recovery.running {
            Outcome::Lost(format!(
                "it ran on the target and was given up before the target said that all of its memory is there ({why})"
            ))
        } else {
            Outcome::Unknown(why)
        });
        self.finish()
    }
}
