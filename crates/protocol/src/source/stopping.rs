//! Stopping phase: the guest is paused and its device state is saved. Because the target is told
//! nothing until the state is saved, the guest can still be resumed, and the switchover tried again
//! later.

use super::context::SourceContext;
use super::precopy::Precopy;
use super::setup::Setup;
use super::switchover::{Kind, Switchover};
use super::{Next, State, ending, misplaced};
use crate::source::events::{Action, Event, Outcome};
use std::time::Duration;
use vmferry_core::{RunState, Section};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// Phase to which the source returns if the guest's I/O does not quiesce.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// Setup of a migration in postcopy or local mode. No page was sent.
    Setup(Setup),
    Precopy(Box<Precopy>),
}

/// Stopping of the guest for the switchover.
#[derive(Debug, Clone)]
pub(super) struct Stopping {
    step: Step,
    origin: Origin,
    kind: Kind,
    /// Time within which the guest's I/O must be quiesced, unless the switchover is urgent.
    within: Duration,
    /// Downtime that was expected when the guest was stopped.
    pub(super) predicted: Option<Duration>,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq)]
pub(super) enum Step {
    Pausing,
    Saving {
        /// Time at which the guest was paused.
        paused: Duration,
        /// State that the operator wants.
        wanted: RunState,
    },
    /// The guest's I/O did not quiesce, and the guest is being resumed.
    RunningOn,
}

impl Stopping {
    pub(super) fn begin(origin: Origin, kind: Kind, within: Duration, predicted: Option<Duration>) -> Next {
        let stopping = Self { step: Step::Pausing, origin, kind, within, predicted };
        (State::Stopping(Box::new(stopping)), vec![Action::Pause])
    }

    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn hands_over(&self) -> bool {
        self.kind == Kind::HandOver && self.step != Step::RunningOn
    }

    pub(super) fn handle(
        mut self: Box<Self>,
        context: &mut SourceContext,
        now: Duration,
        event: Event,
    ) -> Next {
        match (self.step, event) {
            (Step::Pausing, Event::Paused { wanted }) => {
                self.step = Step::Saving { paused: now, wanted };
                let within = if context.urgency.insists() { Duration::MAX } else { self.within };
                (State::Stopping(self), vec![Action::Save { within }])
            }
            (Step::Saving { .. }, Event::Busy { paused, why }) => self.run_on(context, now, paused, why),
            (Step::Saving { paused, wanted }, Event::Saved { sections }) => {
                let mismatched = match self.origin {
                    Origin::Setup(_) => Vec::new(),
                    Origin::Precopy(precopy) => precopy.mismatched(),
                };
                let state = saved(wanted, sections);
                Switchover::begin(context, (self.kind, self.predicted), paused, state, mismatched)
            }
            (Step::RunningOn, Event::Resumed) => match self.origin {
                Origin::Setup(setup) => setup.wait_for_io(),
                Origin::Precopy(precopy) => precopy.send_pass(context, now, false),
            },
            (step, event) => {
                let why = misplaced(&event, super::Step::Stopping(step));
                ending::give_up(Outcome::Failed(why), true)
            }
        }
    }

    fn run_on(
        mut self: Box<Self>,
        context: &mut SourceContext,
        now: Duration,
        paused: Duration,
        why: String,
    ) -> Next {
        if context.urgency.insists() {
            let detail = format!("quiescing the guest's I/O failed: {why}");
            return ending::give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, detail)), true);
        }
        context.deferral.found_busy(now, paused, why);
        if let Origin::Precopy(precopy) = &mut self.origin {
            precopy.begin_anew();
        }
        self.step = Step::RunningOn;
        (State::Stopping(self), vec![Action::RunOn])
    }
}

/// Returns the messages that carry the device state to the target.
fn saved(wanted: RunState, sections: Vec<Section>) -> Vec<ToTarget> {
    let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
    let stays = (wanted == RunState::Paused).then_some(ToTarget::StaysPaused);
    let sections = sections.into_iter().map(ToTarget::Section);
    stays.into_iter().chain(sections).chain([ToTarget::StateEnd { sections: count }]).collect()
}

#[cfg(feature = "model")]
impl Stopping {
    pub(super) fn project(&mut self, hasher: &mut impl std::hash::Hasher) {
        let Self { step, origin, kind, within: _, predicted: _ } = self;
        if let Step::Saving { paused, .. } = step {
            *paused = Duration::ZERO;
        }
        if let Origin::Precopy(precopy) = origin {
            precopy.project(hasher);
        }
        std::hash::Hash::hash(kind, hasher);
    }
}
