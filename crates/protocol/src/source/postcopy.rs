//! Postcopy phase: the guest runs on the target, and the source sends its missing pages.
//!
//! The source never runs the guest again, so its copy of the guest's memory does not change after
//! the pause. Therefore the source can send each page, also repeatedly and over other channels, for
//! as long as this process lives.

use super::context::SourceContext;
use super::ending::finish;
use super::recovery::{Owner, Recovery, Reopen};
use super::{Next, State};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_wire::{PagingFigures, ToSource, ToTarget};

/// History of the links, which determines for how long the source tries to reconnect.
#[derive(Debug, Clone)]
pub(super) struct History {
    /// Time of the loss of the link. Several losses in a row may count as one, in which case this
    /// is the time of the first.
    pub(super) lost: Duration,
    /// Time until the next attempt to reconnect.
    pub(super) pause: Duration,
    /// Time at which the source last began to send pages over a new link.
    pub(super) resumed: Duration,
    /// Number of pages that were missing when the source last reconnected.
    pub(super) left: Option<u64>,
    /// True if the last link transferred nothing, because the number of missing pages did not
    /// decrease.
    pub(super) stalled: bool,
}

impl History {
    pub(super) fn begin(now: Duration) -> Self {
        Self { lost: now, pause: Duration::ZERO, resumed: Duration::ZERO, left: None, stalled: false }
    }

    #[cfg(feature = "model")]
    pub(super) fn project(&mut self) {
        // The time stamps are cleared. The other fields only affect for how long the source tries
        // to reconnect.
        let Self { lost, pause, resumed, left: _, stalled: _ } = self;
        (*lost, *pause, *resumed) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    }
}

/// Postcopy over a working link.
#[derive(Debug, Clone)]
pub(super) struct Postcopy {
    pub(super) history: History,
}

impl Postcopy {
    /// Begins to send the missing pages, or continues over a new link.
    pub(super) fn begin(context: &mut SourceContext, history: History) -> Next {
        context.pass += 1;
        (State::Postcopy(Self { history }), vec![Action::SendRemaining { number: context.pass }])
    }

    pub(super) fn handle(self, context: &mut SourceContext, now: Duration, event: Event) -> Next {
        match event {
            Event::Message(ToSource::Complete(figures)) => completed(context, figures),
            Event::Pause => {
                let why = "the operator asked for a pause".into();
                Recovery::begin(context, now, self.history, Owner::Target, Reopen::OnRequest(why))
            }
            Event::PeerLost(why) | Event::NotSent(why) => self.lost(context, now, why),
            Event::LocalFailure(why) => self.lost(context, now, why.to_string()),
            Event::Message(message) => {
                let why = format!("the target sent {}, which is not allowed at this point", message.name());
                self.lost(context, now, why)
            }
            Event::Tick => {
                let ping = context.ping(now);
                (State::Postcopy(self), ping)
            }
            Event::ArbiterAnswered(answer) => {
                context.claim.iter_mut().for_each(|claim| claim.note(answer.clone()));
                (State::Postcopy(self), Vec::new())
            }
            // The request comes too late to keep the guest, and there is no link to open.
            _ => (State::Postcopy(self), Vec::new()),
        }
    }

    fn lost(self, context: &mut SourceContext, now: Duration, why: String) -> Next {
        Recovery::begin(context, now, self.history, Owner::Target, Reopen::Itself(why))
    }
}

/// Ends the migration after the target has received every page.
pub(super) fn completed(context: &mut SourceContext, figures: PagingFigures) -> Next {
    context.summary.target_cpu = Duration::from_micros(figures.cpu_us);
    context.summary.figures = Some(figures);
    let (state, end) = finish(Outcome::Completed);
    (state, [Action::Send(ToTarget::Thanks)].into_iter().chain(end).collect())
}
