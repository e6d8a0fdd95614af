//! The guest runs on the target, and its missing pages are on their way.
//!
//! The source's copy of the guest is frozen since the pause. The source never runs the guest again.
//! Its pages can be sent, and sent again over other channels, for as long as this process lives.

use super::ending::finish;
use super::recovery::{Owner, Recovery, Reopen};
use super::shared::Shared;
use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{LazyFigures, ToSource, ToTarget};

/// History of the links. It decides for how long a lost link is opened again.
#[derive(Debug, Clone)]
pub(super) struct History {
    /// Time of the first of the losses that are counted as one.
    pub(super) lost: Duration,
    /// Time until the next attempt to open a link.
    pub(super) pause: Duration,
    /// Time at which pages were last sent again.
    pub(super) resumed: Duration,
    /// Pages that were missing when a link was last opened again.
    pub(super) left: Option<u64>,
    /// As many were missing as the time before: the link in between brought nothing.
    pub(super) stalled: bool,
}

impl History {
    pub(super) fn begin(now: Duration) -> Self {
        Self { lost: now, pause: Duration::ZERO, resumed: Duration::ZERO, left: None, stalled: false }
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&mut self) {
        // The stamps are forgotten. Whether a link was of use only decides for how long it is tried.
        let Self { lost, pause, resumed, left: _, stalled: _ } = self;
        (*lost, *pause, *resumed) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    }
}

/// The postcopy over a link that holds.
#[derive(Debug, Clone)]
pub(super) struct Postcopy {
    pub(super) history: History,
}

impl Postcopy {
    /// Begins, or goes on over a new link: the missing pages are sent.
    pub(super) fn begin(shared: &mut Shared, history: History) -> Next {
        shared.pass += 1;
        (State::Postcopy(Self { history }), vec![Action::SendRest { number: shared.pass }])
    }

    pub(super) fn handle(self, shared: &mut Shared, now: Duration, event: Event) -> Next {
        match event {
            Event::Message(ToSource::Complete(figures)) => completed(shared, figures),
            Event::Pause => {
                let why = "the operator asked for a pause".into();
                Recovery::begin(shared, now, self.history, Owner::Target, Reopen::OnRequest(why))
            }
            Event::PeerLost(why) | Event::NotSent(why) => self.lost(shared, now, why),
            Event::LocalFailure(why) => self.lost(shared, now, why.to_string()),
            Event::Message(message) => {
                let why = format!("the target sent {}, which does not fit this moment", message.name());
                self.lost(shared, now, why)
            }
            Event::Tick => {
                let ping = shared.ping(now);
                (State::Postcopy(self), ping)
            }
            Event::ArbiterAnswered(answer) => {
                shared.claim.iter_mut().for_each(|claim| claim.note(answer.clone()));
                (State::Postcopy(self), Vec::new())
            }
            // Too late to keep the guest, and there is no link to open.
            _ => (State::Postcopy(self), Vec::new()),
        }
    }

    fn lost(self, shared: &mut Shared, now: Duration, why: String) -> Next {
        Recovery::begin(shared, now, self.history, Owner::Target, Reopen::Itself(why))
    }
}

/// The target has every page.
pub(super) fn completed(shared: &mut Shared, figures: LazyFigures) -> Next {
    shared.summary.target_cpu = Duration::from_micros(figures.cpu_us);
    shared.summary.figures = Some(figures);
    let (state, end) = finish(Outcome::Completed);
    (state, [Action::Send(ToTarget::Thanks)].into_iter().chain(end).collect())
}
