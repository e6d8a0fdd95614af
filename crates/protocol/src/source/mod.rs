//! State machine of the source of a migration, without I/O.
//!
//! A [`Session`] takes events and returns actions. Its host performs the actions and reports the
//! events: see [`run`]. A session never blocks, reads no clock, uses no socket, and allocates
//! nothing per page.
//!
//! # Phases
//!
//! Each phase is a type with its own fields in its own module. A phase takes itself and an event by
//! value, and returns the phase that follows.
//!
//! | type | the source | the guest |
//! |---|---|---|
//! | `Setup` | agrees with the target on the machine and opens channels | runs on the source |
//! | `Precopy` | sends passes over memory | runs on the source |
//! | `Stopping` | pauses the guest and saves its device state; may still resume the guest and try again later | is paused |
//! | `Switchover` | sends the last pages, or names the missing pages, or does neither if the target has mapped the memory | is paused |
//! | `Committed` | has told the target to run the guest, and awaits its answer | is paused |
//! | `Claiming` | has lost the link after the commit, and asks the arbiter | is paused |
//! | `Postcopy` | sends the missing pages | runs on the target |
//! | `Recovery` | has lost the link after the handover, and reconnects | may run on the target |
//! | `Resuming` | has failed or was cancelled, and resumes the guest | is resumed on the source |
//! | `Ended` | does nothing more | |
//!
//! # Which host may run the guest
//!
//! Until the session returns [`ToTarget::Commit`], every failure ends in [`Action::Resume`], and
//! the source keeps the guest. After the commit, the source does not resume the guest on its own,
//! because the target may run the guest. The source owns the guest again only if the target
//! renounces the guest for good ([`ToSource::Returned`] or [`ToSource::Failed`]), if the arbiter
//! answers that the source owns the guest, or if no byte of the commit was sent
//! ([`Event::NotSent`]).

mod commit;
mod context;
mod costs;
mod course;
mod deferral;
mod ending;
mod events;
mod judge;
pub mod policy;
mod postcopy;
mod precopy;
#[cfg(feature = "model")]
mod projection;
mod recovery;
mod settings;
mod setup;
mod stopping;
mod switchover;
pub mod throttle;
mod throttling;
mod verdict;

pub use context::Summary;
pub use course::{Auto, Course, CourseChange, Expected, Observations};
pub use events::{Action, Event, Outcome, Pass, Verification};
pub use settings::{AutoConverge, MigrationMode, OnTimeout, Settings, SwitchoverBandwidth};
pub use verdict::{PassState, Remedy, Verdict, readable_time};

use crate::run;
use commit::{Claiming, Committed};
use context::{SourceContext, Urgency};
use ending::{Ended, Resuming, give_up};
use postcopy::Postcopy;
use precopy::Precopy;
use recovery::Recovery;
use setup::Setup;
use std::time::Duration;
use stopping::Stopping;
use switchover::Switchover;
use vmferry_core::{MachineConfig, StreamName};
use vmferry_wire::{PagingFigures, Refusal, RefusalCode, ToSource, ToTarget};

/// Phase of a session, as the migration handle and the report show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Source and target agree on the migration, and open channels.
    Setup,
    /// Passes over memory are sent while the guest runs.
    Precopy,
    /// The guest is paused.
    Switchover,
    /// The source cannot know who owns the guest, and asks the arbiter.
    Unknown,
    /// The guest runs on the target, and its missing pages are being sent.
    Postcopy,
    /// The link was lost after the handover, and the source reconnects.
    PostcopyPaused,
    /// The outcome is decided.
    Ended,
}

/// Phase of a session, with the data of that phase.
#[derive(Debug, Clone)]
enum State {
    Setup(Setup),
    Precopy(Box<Precopy>),
    Stopping(Box<Stopping>),
    Switchover(Box<Switchover>),
    Committed(Committed),
    Claiming(Claiming),
    Postcopy(Postcopy),
    Recovery(Recovery),
    Resuming(Resuming),
    Ended(Ended),
}

/// Step within a phase, which determines the event that the session waits for. Each change of step
/// counts as progress.
#[derive(Debug, Hash, Clone, Copy, PartialEq)]
enum Step {
    Setup(setup::Step),
    Precopy(precopy::Step),
    Stopping(stopping::Step),
    Switchover(switchover::Step),
    Committed,
    Claiming,
    Postcopy,
    Recovery(recovery::Step),
    Resuming,
    Ended,
}

/// State that follows an event, and the actions to perform in their order.
type Next = (State, Vec<Action>);

/// Session of a source.
#[derive(Debug, Clone)]
pub struct Session {
    context: SourceContext,
    state: State,
}

impl State {
    fn step(&self) -> Step {
        match self {
            Self::Setup(setup) => Step::Setup(setup.step),
            Self::Precopy(precopy) => Step::Precopy(precopy.step()),
            Self::Stopping(stopping) => Step::Stopping(stopping.step()),
            Self::Switchover(switchover) => Step::Switchover(switchover.step()),
            Self::Committed(_) => Step::Committed,
            Self::Claiming(_) => Step::Claiming,
            Self::Postcopy(_) => Step::Postcopy,
            Self::Recovery(recovery) => Step::Recovery(recovery.step()),
            Self::Resuming(_) => Step::Resuming,
            Self::Ended(_) => Step::Ended,
        }
    }

    /// Returns what the session waits for the target to have done. `None` while the session does
    /// not wait for the target.
    fn awaited(&self) -> Option<&'static str> {
        match self.step() {
            Step::Setup(setup::Step::AwaitAccept) => Some("accepted the guest"),
            Step::Setup(setup::Step::Opening { opened: true, .. }) => Some("taken its channels"),
            Step::Setup(setup::Step::SharingMemory) => Some("mapped the memory of the guest"),
            Step::Precopy(precopy::Step::Preparing { .. }) => Some("prepared its VM"),
            Step::Precopy(precopy::Step::Passing { sent: Some(_), streamed: Some(_), .. })
            | Step::Switchover(switchover::Step::LastPass { sent: true, .. }) => {
                Some("received the pages that were sent")
            }
            Step::Switchover(switchover::Step::Verifying { sent: true, .. }) => Some("compared the pages"),
            Step::Switchover(switchover::Step::Loading) => Some("loaded the device state"),
            _ => None,
        }
    }
}

/// Returns the error for an event that is not allowed in this step.
fn misplaced(event: &Event, step: Step) -> Refusal {
    let detail = match event {
        Event::Message(message) => {
            format!("the target sent {}, which is not allowed at this point ({step:?})", message.name())
        }
        other => format!("{other:?} came while {step:?}"),
    };
    Refusal::new(RefusalCode::Protocol, detail)
}

impl Session {
    /// Begins the migration of a guest of `pages` pages at the time `now`, and returns the session
    /// with its first actions. The control channel must be open.
    pub fn begin(
        settings: Settings,
        machine: MachineConfig,
        pages: u64,
        now: Duration,
    ) -> (Self, Vec<Action>) {
        let first = ToTarget::Setup {
            machine,
            mode: settings.wire_mode(),
            bulk_channels: settings.channels,
            urgent_channels: settings.urgent_count(),
            probe: settings.probes(),
        };
        let context = SourceContext::new(settings, pages, now);
        let session = Self { context, state: State::Setup(Setup::begin()) };
        (session, vec![Action::Send(first)])
    }

    /// Adds streams of device state with these names. Call this only if the target supports
    /// streams.
    #[must_use]
    pub fn streaming(mut self, streams: Vec<StreamName>) -> Self {
        self.context.streams = streams;
        self
    }

    /// Takes an event that the host reports at the time `now`. Returns the actions that follow from
    /// the event, in their order.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let before = self.state.step();
        let placeholder = State::Ended(Ended::default());
        let state = std::mem::replace(&mut self.state, placeholder);
        let (state, actions) = react(state, &mut self.context, now, event);
        self.state = state;
        if self.state.step() != before {
            self.context.last_step = now;
        }
        actions
    }

    /// Takes the answer to ping `number`, which arrived at the time `at`. Because of `at`, the time
    /// until the host reports the answer does not count as part of the round trip.
    pub fn pong(&mut self, at: Duration, number: u64) {
        self.context.link.pong(at, number);
    }
}

/// Takes an event in any state.
fn react(state: State, context: &mut SourceContext, now: Duration, event: Event) -> Next {
    // These messages may arrive at any time, because they answer no step.
    match event {
        Event::Message(ToSource::Pong(number)) => {
            context.link.pong(now, number);
            return (state, Vec::new());
        }
        Event::Message(ToSource::Costs { load_us }) => {
            context.target_load = Some(Duration::from_micros(load_us));
            return (state, Vec::new());
        }
        Event::Message(ToSource::WantsTrial) => {
            context.wants_trial = true;
            return (state, Vec::new());
        }
        Event::Message(ToSource::UnknownPages { channel, frame, unknown }) => {
            // Hashes are sent in the first pass only. An answer that arrives after the precopy is
            // not needed, because the source has sent the content of these pages by then.
            let wanted = matches!(state, State::Precopy(_));
            let action = wanted.then_some(Action::TakeAnswer { channel, frame, unknown });
            return (state, action.into_iter().collect());
        }
        _ => {}
    }
    match state {
        State::Ended(_) => (state, Vec::new()),
        State::Resuming(resuming) => resuming.handle(event),
        State::Committed(committed) => committed.handle(context, now, event),
        State::Claiming(claiming) => claiming.handle(context, now, event),
        State::Postcopy(postcopy) => postcopy.handle(context, now, event),
        State::Recovery(recovery) => recovery.handle(context, now, event),
        State::Setup(_) | State::Precopy(_) | State::Stopping(_) | State::Switchover(_) => {
            before_commit(state, context, now, event)
        }
    }
}

/// Takes an event before the commit, when every failure leaves the guest with the source.
fn before_commit(state: State, context: &mut SourceContext, now: Duration, event: Event) -> Next {
    match event {
        Event::Message(ToSource::Failed(why)) => {
            // A target that was about to start the guest waits for a message that it must not do
            // so.
            let tell = matches!(&state, State::Stopping(s) if s.hands_over())
                || matches!(&state, State::Switchover(s) if s.hands_over());
            give_up(Outcome::Failed(why), tell)
        }
        Event::LocalFailure(why) => give_up(Outcome::Failed(why), true),
        Event::PeerLost(why) | Event::NotSent(why) => {
            give_up(Outcome::Failed(Refusal::new(RefusalCode::Other, why)), false)
        }
        Event::Cancel => give_up(Outcome::Cancelled("cancelled on request".into()), true),
        Event::Tick => tick(state, context, now),
        Event::SwitchNow => {
            if context.settings.may_hand_over() {
                context.urgency.raise(Urgency::Postcopy);
            }
            (state, Vec::new())
        }
        // The loss of the link before the commit ends the migration, so there is no link to
        // restore. The arbiter was not asked yet.
        Event::Pause | Event::Recover | Event::Abandon | Event::ArbiterAnswered(_) => (state, Vec::new()),
        event => match state {
            State::Setup(setup) => setup.handle(context, now, event),
            State::Precopy(precopy) => precopy.handle(context, now, event),
            State::Stopping(stopping) => stopping.handle(context, now, event),
            State::Switchover(switchover) => switchover.handle(context, event),
            other => (other, Vec::new()),
        },
    }
}

/// Handles a tick of the clock before the commit.
fn tick(state: State, context: &mut SourceContext, now: Duration) -> Next {
    let paused = matches!(state, State::Stopping(_) | State::Switchover(_));
    if let Some(limit) = context.settings.timeout
        && now.saturating_sub(context.started) > limit
        && !paused
    {
        match context.settings.on_timeout {
            OnTimeout::Cancel => {
                return give_up(Outcome::Cancelled(format!("not done within {limit:?}")), true);
            }
            OnTimeout::Switch => context.urgency.raise(Urgency::Switch),
            OnTimeout::Postcopy => context.urgency.raise(Urgency::Postcopy),
        }
    }
    let state = match state {
        State::Setup(setup) if setup.waits_for_io() => return setup.tick(context, now),
        State::Precopy(precopy) if precopy.is_waiting() => return precopy.tick(context, now),
        state => state,
    };
    let patience = context.patience();
    if let Some(what) = state.awaited()
        && now.saturating_sub(context.last_step) > patience
    {
        let detail = format!("the target answers pings, but has not {what} for {patience:?}");
        return give_up(Outcome::Failed(Refusal::new(RefusalCode::Timeout, detail)), true);
    }
    if let State::Switchover(switchover) = &state
        && let Some(why) = switchover.too_slow(context, now)
    {
        return give_up(Outcome::Failed(why), true);
    }
    let ping = context.ping(now);
    (state, ping)
}

/// Methods for the host, the migration handle and the report.
impl Session {
    /// Returns the phase.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Setup(_) => Phase::Setup,
            State::Precopy(_) => Phase::Precopy,
            State::Stopping(_) | State::Switchover(_) | State::Committed(_) => Phase::Switchover,
            State::Claiming(_) => Phase::Unknown,
            State::Postcopy(_) => Phase::Postcopy,
            State::Recovery(_) => Phase::PostcopyPaused,
            State::Resuming(_) | State::Ended(_) => Phase::Ended,
        }
    }

    /// Returns true if the target was told that it owns the guest.
    pub fn committed(&self) -> bool {
        match &self.state {
            State::Committed(_) | State::Claiming(_) | State::Postcopy(_) | State::Recovery(_) => true,
            State::Ended(ended) => ended.after_commit(),
            _ => false,
        }
    }

    /// Returns true if the target was told to run the guest before all of its memory had arrived.
    pub fn handed_over(&self) -> bool {
        match &self.state {
            State::Committed(committed) => committed.hands_over(),
            State::Postcopy(_) | State::Recovery(_) => true,
            _ => false,
        }
    }

    /// Returns true if the target has reported that it runs the guest before all of its memory has
    /// arrived.
    pub fn runs_on_target(&self) -> bool {
        match &self.state {
            State::Postcopy(_) => true,
            State::Recovery(recovery) => recovery.runs_on_target(),
            _ => false,
        }
    }

    /// Returns the measured bandwidth of the link in bytes per second. `None` before the end of the
    /// first pass.
    pub fn bandwidth(&self) -> Option<f64> {
        self.context.link.rate.bandwidth()
    }

    /// Returns the downtime to expect if the guest were stopped now, or the downtime that was
    /// expected when the guest was stopped. `None` for a handover, whose downtime does not depend
    /// on the number of pages, and which no trial pause measures.
    pub fn predicted_downtime(&self) -> Option<Duration> {
        match &self.state {
            State::Precopy(precopy) => precopy.predicted(&self.context),
            State::Stopping(stopping) => stopping.predicted,
            State::Switchover(switchover) => switchover.predicted,
            _ => None,
        }
    }

    /// Returns the I/O that prevented stopping the guest at the last attempt. `None` if the I/O was
    /// quiesced, or once the guest is being stopped.
    pub fn busy(&self) -> Option<&str> {
        match self.state {
            State::Setup(_) | State::Precopy(_) => self.context.deferral.busy(),
            _ => None,
        }
    }

    /// Returns true if the session waits for a harvest of pages that were not written during a
    /// pass.
    pub fn harvests_after_wait(&self) -> bool {
        matches!(&self.state, State::Precopy(precopy) if precopy.harvests_after_wait())
    }

    /// Returns the number of deferrals because of I/O: attempts to stop the guest at which its I/O
    /// did not quiesce in time.
    pub fn deferrals(&self) -> u64 {
        self.context.deferral.count
    }

    /// Returns the total time for which the guest was paused at these attempts.
    pub fn deferred_time(&self) -> Duration {
        self.context.deferral.paused
    }

    /// Returns the prediction of whether the precopy ends by itself. `None` outside precopy, and
    /// before the end of the first pass.
    pub fn verdict(&self) -> Option<&Verdict> {
        if let State::Precopy(precopy) = &self.state { precopy.verdict() } else { None }
    }

    /// Returns the changes that the migration made to its own course.
    pub fn course(&self) -> &[CourseChange] {
        &self.context.summary.course
    }

    /// Returns the reason for the loss of a link that was lost after the commit. `None` if the link
    /// is not lost. The flag is true if the source waits for the operator: it no longer reconnects
    /// by itself, or the arbiter has not answered for a long time.
    pub fn interrupted(&self) -> Option<(bool, &str)> {
        match &self.state {
            State::Claiming(claiming) => Some(claiming.interrupted()),
            State::Recovery(recovery) => Some(recovery.interrupted()),
            _ => None,
        }
    }

    /// Returns the number of times that the link was lost after the handover, including cuts that
    /// the operator requested.
    pub fn interruptions(&self) -> u64 {
        self.context.summary.interruptions
    }

    /// Returns the last answer of the arbiter as text for the operator, if the source has claimed
    /// the guest.
    pub fn arbiter_answer(&self) -> Option<String> {
        self.context.claim.as_ref()?.says()
    }

    /// Returns true if there is an arbiter and its register is not needed any more. If the source
    /// has claimed the guest, the register must stay, because the target may have to read it.
    pub fn register_unneeded(&self) -> bool {
        self.context.claim.as_ref().is_some_and(|claim| !claim.begun())
    }

    /// Returns true if the source owns the guest and could not resume it.
    pub fn resume_failed(&self) -> bool {
        matches!(&self.state, State::Ended(ended) if ended.resume_failed())
    }

    /// Returns the longest time that the target may take for a step while it answers pings.
    pub fn patience(&self) -> Duration {
        self.context.patience()
    }

    /// Returns the target's figures of postcopy, once the target has reported them.
    pub fn figures(&self) -> Option<&PagingFigures> {
        self.context.summary.figures.as_ref()
    }

    /// Returns the result of the verification, once the target has reported it.
    pub fn verification(&self) -> Option<&Verification> {
        self.context.summary.verification.as_ref()
    }

    /// Returns the figures of this migration that the report needs.
    pub fn summary(&self) -> &Summary {
        &self.context.summary
    }
}

/// Methods for the model and the tests.
#[cfg(any(test, feature = "model"))]
impl Session {
    /// Returns true if the guest's I/O did not quiesce at the last attempt to stop the guest.
    pub fn was_busy(&self) -> bool {
        self.context.deferral.busy().is_some()
    }

    /// Returns true if the session does nothing until the next attempt to stop the guest.
    pub fn is_waiting(&self) -> bool {
        match &self.state {
            State::Setup(setup) => setup.waits_for_io(),
            State::Precopy(precopy) => precopy.is_waiting(),
            _ => false,
        }
    }
}

impl run::Session for Session {
    type Event = Event;
    type Action = Action;
    type Outcome = Outcome;

    fn decided(&self) -> bool {
        self.phase() == Phase::Ended
    }

    fn outcome(action: Action) -> Result<Outcome, Action> {
        if let Action::Finish(outcome) = action { Ok(outcome) } else { Err(action) }
    }
}

#[cfg(test)]
mod tests;
