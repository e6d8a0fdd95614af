//! Target of a migration as a state machine without I/O.
//!
//! A [`Session`] takes events and returns actions. The host performs the actions and reports the
//! events: see [`run`]. A session never blocks and reads no clock.
//!
//! # Phases
//!
//! Each phase is a type that owns its own fields, in a module of its own. A phase takes an event by
//! value and returns the phase that follows.
//!
//! | type | the target | the guest |
//! |---|---|---|
//! | `Setup` | compares the machine, and opens channels | runs on the source |
//! | `Receiving` | takes pages and the device state | runs on the source, then is paused |
//! | `Ready` | loads the state, and awaits the commit | is paused |
//! | `Claiming` | has read the commit, and asks the arbiter for the guest | is paused |
//! | `Starting` | starts the guest | is paused |
//! | `Renounced` | will never run the guest, and tells the source so | belongs to the source |
//! | `Postcopy` | takes the missing pages | runs on the target |
//! | `Ended` | does nothing more | |
//!
//! # Which host may run the guest
//!
//! The guest runs on the target only after [`ToTarget::Commit`], and with an arbiter only after the
//! arbiter has granted the guest. Every failure before that ends without the guest having run. If
//! the source may have sent the commit and its link is lost, the target gives the guest up for good
//! and continues to report that (`Renounced`). If the guest runs before all of its memory has
//! arrived, a lost link does not end the session: the target waits for the missing pages over new
//! channels.

mod postcopy;
#[cfg(feature = "model")]
mod projection;
mod ready;
mod receiving;
mod renounced;
mod setup;
mod start;

use crate::arbiter::{ArbiterError, ArbiterRequest, Backoff, Ownership};
use crate::run;
use postcopy::Postcopy;
use ready::Ready;
use receiving::Receiving;
use renounced::Renounced;
use setup::Setup;
use start::{Claiming, Starting};
use std::time::Duration;
use vmferry_core::{MachineConfig, RunState, Section, StreamName};
use vmferry_wire::{
    MissingPages, Mode, PagingFigures, Refusal, RefusalCode, RegionPage, RegionRun, ToSource, ToTarget, Token,
};

/// Event that the host reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A message of the source.
    Message(ToTarget),
    /// A channel for pages is open.
    ChannelUp,
    /// A channel has received all frames of a pass.
    Barrier {
        /// Number of the bulk channel.
        channel: u16,
        /// Number of the pass.
        pass: u32,
    },
    /// The pages with a digest mismatch after a pass were counted.
    DigestMismatches {
        /// Number of the pass.
        pass: u32,
        /// Number of pages.
        pages: u64,
        /// These pages, or the first of them.
        runs: Vec<RegionRun>,
    },
    /// Result of comparing digests.
    Compared {
        /// Number of pages that were compared.
        pages: u64,
        /// Number of pages that differ.
        mismatched: u64,
        /// First pages that differ.
        samples: Vec<RegionPage>,
    },
    /// The state was loaded.
    Loaded {
        /// Time that loading took, in microseconds.
        micros: u64,
    },
    /// The guest runs.
    Started {
        /// Time that starting took, in microseconds.
        micros: u64,
        /// CPU time that the target has used so far, in microseconds.
        cpu_us: u64,
    },
    /// The state could not be loaded, a channel broke, or memory could not be written.
    LocalFailure(Refusal),
    /// The vCPUs could not be started. None has run.
    StartFailed(Refusal),
    /// The link failed, or the source is gone.
    PeerLost(String),
    /// This host can take pages while the guest runs.
    Prepared,
    /// The VM has prepared itself with the state of a trial pause.
    VmPrepared {
        /// Expected time for loading the state and starting the guest, in microseconds, after the
        /// preparation.
        load_us: Option<u64>,
    },
    /// The last missing page has arrived.
    MissingArrived(PagingFigures),
    /// The source has opened a new control channel.
    ControlReopened,
    /// The arbiter has answered this request, or the request failed.
    ArbiterAnswered(ArbiterRequest, Result<Ownership, ArbiterError>),
    /// The operator has stopped the target.
    Stopped,
    /// The source was told which pages are missing.
    MissingNamed {
        /// Number of missing pages.
        pages: u64,
        /// Tokens of the new bulk channels and of the new urgent channels.
        tokens: (Token, Token),
    },
}

/// Channels for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channels {
    /// Number of bulk channels.
    pub bulk: u16,
    /// Number of urgent channels.
    pub urgent: u16,
    /// True if there is a channel for probes of the round trip.
    pub probe: bool,
}

impl Channels {
    fn count(self) -> u32 {
        u32::from(self.bulk) + u32::from(self.urgent) + u32::from(self.probe)
    }
}

/// Action that the host performs.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ToSource),
    /// Check that this host can take pages while the guest runs, and report [`Event::Prepared`] or
    /// [`Event::LocalFailure`].
    PrepareDemandPaging,
    /// Open the next stream of device state. Report [`Event::LocalFailure`] if that fails.
    OpenStream(StreamName),
    /// Give these bytes to a stream. Report [`Event::LocalFailure`] if that fails.
    WriteStream {
        /// Number of the stream.
        stream: u32,
        /// Content.
        bytes: Vec<u8>,
    },
    /// Complete a stream. Report [`Event::LocalFailure`] if that fails.
    FinishStream {
        /// Number of the stream.
        stream: u32,
    },
    /// Have the VM prepare itself with this state of a trial pause, and report
    /// [`Event::VmPrepared`] or [`Event::LocalFailure`].
    PrepareVm(Vec<Section>),
    /// Accept these channels, with the tokens of `Accept` or `Resume`.
    AwaitChannels(Channels),
    /// Report [`Event::DigestMismatches`].
    CountDigestMismatches {
        /// Number of the pass.
        pass: u32,
    },
    /// Report [`Event::Compared`].
    CountMismatches,
    /// Add these pages to the missing ones.
    TakeMissing(MissingPages),
    /// All missing pages were named: discard their content, and place them one by one from now on.
    BeginDemandPaging {
        /// Number of missing pages.
        pages: u64,
    },
    /// Load the state.
    Load(Vec<Section>),
    /// Make this request to the arbiter after a delay, and report [`Event::ArbiterAnswered`].
    /// [`ArbiterRequest::Runs`] is repeated until the arbiter has received it, and is not reported.
    AskArbiter {
        /// Request to make.
        request: ArbiterRequest,
        /// Delay before the request.
        after: Duration,
    },
    /// Start the guest, or leave it paused if its operator wants that.
    Start {
        /// State that the operator wants.
        wanted: RunState,
    },
    /// Close every channel: the link is lost.
    Disconnect,
    /// Tell the source over its new control channel which pages are missing, and report
    /// [`Event::MissingNamed`].
    NameMissing,
    /// Request the pages that vCPUs wait for, on the new channels.
    RequestAgain,
    /// No page is missing: end demand paging.
    EndDemandPaging,
    /// The session has ended, or continues without the VM ([`Outcome::Running`]).
    Finish(Outcome),
}

/// Outcome of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs on the target, with all of its memory.
    Completed,
    /// The guest runs on the target, and pages are missing: the same session continues without the
    /// VM.
    Running,
    /// The guest has not run on the target and will not run there.
    Failed(Refusal),
}

/// Random bits of this migration, which only its source receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens {
    /// Token for the bulk channels.
    pub bulk: Token,
    /// Token for the urgent channels.
    pub urgent: Token,
    /// Token for a new control channel.
    pub resume: Token,
}

/// Memory of the guest that the target has when it starts the guest.
#[derive(Debug, Clone)]
enum Memory {
    Complete,
    /// Pages are missing and arrive in postcopy. If all of them have arrived before the start,
    /// `all_arrived` has the figures, which are reported once the guest runs.
    Missing {
        all_arrived: Option<PagingFigures>,
    },
}

impl Memory {
    fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Records that the last missing page has arrived.
    fn arrived(&mut self, figures: PagingFigures) {
        if let Self::Missing { all_arrived } = self {
            *all_arrived = Some(figures);
        }
    }
}

/// Request that the target repeats until the arbiter answers.
#[derive(Debug, Clone, Default)]
struct ArbiterRetry {
    again: Backoff,
    /// Reason why the owner of the guest is unknown.
    undecided: Option<String>,
}

/// State that more than one phase reads.
#[derive(Debug, Clone)]
struct TargetContext {
    machine: MachineConfig,
    tokens: Tokens,
    /// True if there is an arbiter.
    with_arbiter: bool,
    /// Expected time for loading the state and starting the guest, in microseconds, for a source
    /// that supports this message.
    load_us: Option<u64>,
    /// True if the VM prepares itself with the state of a trial pause.
    wants_trial: bool,
    /// State that the operator of the source wants.
    wanted: RunState,
    mode: Mode,
    channels: Channels,
    /// True if the source has announced a guest that fits.
    accepted: bool,
}

/// Phase of a session, with the data of that phase.
#[derive(Debug, Clone)]
enum State {
    Setup(Setup),
    Receiving(Box<Receiving>),
    Ready(Ready),
    Claiming(Claiming),
    Starting(Starting),
    Renounced(Renounced),
    Postcopy(Postcopy),
    Ended {
        /// True if all memory had arrived.
        complete: bool,
    },
}

/// State that follows an event, and the actions to perform, in their order.
type Next = (State, Vec<Action>);

/// Session of a target.
#[derive(Debug, Clone)]
pub struct Session {
    context: TargetContext,
    state: State,
}

/// Returns the reason for renouncing a guest that was about to be started.
fn lost_before(why: &str) -> Refusal {
    let detail = format!("the link was lost before the guest was started on the target ({why})");
    Refusal::new(RefusalCode::Other, detail)
}

/// Ends a session whose guest has not run on the target and will not run there.
fn end(why: Refusal, tell: Option<Action>) -> Next {
    let actions = tell.into_iter().chain([Action::Finish(Outcome::Failed(why))]).collect();
    (State::Ended { complete: false }, actions)
}

/// Ends a session before the source can have sent the commit, and reports the reason to the source.
fn fail(why: Refusal) -> Next {
    let told = Action::Send(ToSource::Failed(why.clone()));
    end(why, Some(told))
}

/// Returns the error of a source or host whose event is not allowed while the target is `doing`
/// something else.
fn misplaced(event: &Event, doing: &str) -> Refusal {
    let detail = match event {
        Event::Message(message) => {
            format!("the source sent {}, which is not allowed at this point ({doing})", message.name())
        }
        other => format!("{other:?} came while {doing}"),
    };
    Refusal::new(RefusalCode::Protocol, detail)
}

impl Session {
    /// Begins a session after a control channel was opened.
    pub fn begin(machine: MachineConfig, tokens: Tokens) -> Self {
        let context = TargetContext {
            machine,
            tokens,
            with_arbiter: false,
            load_us: None,
            wants_trial: false,
            wanted: RunState::Running,
            mode: Mode::Precopy,
            channels: Channels { bulk: 0, urgent: 0, probe: false },
            accepted: false,
        };
        Self { context, state: State::Setup(Setup::begin()) }
    }

    /// Tells the source that loading the state and starting the guest are expected to take `load`.
    pub fn expecting(mut self, load: Option<Duration>) -> Self {
        self.context.load_us = load.map(|load| u64::try_from(load.as_micros()).unwrap_or(u64::MAX));
        self
    }

    /// Asks the source for the state of a trial pause, if `wants` is true. The source must support
    /// this.
    pub fn wanting_trial(mut self, wants: bool) -> Self {
        self.context.wants_trial = wants;
        self
    }

    /// Uses an arbiter, if `with_arbiter` is true.
    pub fn with_arbiter(mut self, with_arbiter: bool) -> Self {
        self.context.with_arbiter = with_arbiter;
        self
    }

    /// Takes an event. Returns the actions that follow from it, in their order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        let state = std::mem::replace(&mut self.state, State::Ended { complete: false });
        let (state, actions) = react(state, &mut self.context, event);
        self.state = state;
        actions
    }
}

/// Takes an event in any state.
fn react(state: State, context: &mut TargetContext, event: Event) -> Next {
    match (state, event) {
        (State::Ended { complete }, _) => (State::Ended { complete }, Vec::new()),
        (state, Event::Message(ToTarget::Ping(number))) => {
            (state, vec![Action::Send(ToSource::Pong(number))])
        }
        (State::Claiming(claiming), event) => claiming.handle(context, event),
        (State::Starting(starting), event) => starting.handle(context, event),
        (State::Renounced(renounced), event) => renounced.handle(context, event),
        (State::Postcopy(postcopy), event) => postcopy.handle(context, event),
        (State::Ready(ready), event) => ready.handle(context, event),
        // A source that cancels has not committed.
        (_, Event::Message(ToTarget::Cancel(why))) => end(why, None),
        (_, Event::Stopped) => fail(Refusal::new(RefusalCode::Cancelled, "the target was told to stop")),
        (_, Event::LocalFailure(why)) => fail(why),
        (_, Event::PeerLost(why)) => end(Refusal::new(RefusalCode::Other, why), None),
        (State::Setup(setup), event) => setup.handle(context, event),
        (State::Receiving(receiving), event) => receiving.handle(context, event),
    }
}

/// Methods for the host.
impl Session {
    /// Returns true if the source has announced a guest that fits.
    pub fn accepted(&self) -> bool {
        self.context.accepted
    }

    /// Returns true if the source has not announced its guest yet.
    pub fn awaits_setup(&self) -> bool {
        matches!(&self.state, State::Setup(setup) if setup.awaits_announcement())
    }

    /// Returns true if a stop has an effect now.
    ///
    /// While this is true, an [`Event::Stopped`] ends the session or renounces the guest. The host
    /// reports a stop only while this is true: the stop flag stays set, and an event without an
    /// effect would block all others.
    pub fn heeds_stop(&self) -> bool {
        match &self.state {
            State::Setup(_) | State::Receiving(_) | State::Ready(_) | State::Claiming(_) => true,
            // With an arbiter, the guest is being given back. The session ends with the answer.
            State::Renounced(_) => !self.context.with_arbiter,
            State::Starting(_) | State::Postcopy(_) | State::Ended { .. } => false,
        }
    }

    /// Returns true if all memory has arrived, so that the bulk channels are not needed any more.
    pub fn memory_complete(&self) -> bool {
        match &self.state {
            State::Ready(ready) => !ready.memory.is_missing(),
            State::Claiming(claiming) => !claiming.memory.is_missing(),
            State::Starting(starting) => !starting.memory.is_missing(),
            _ => false,
        }
    }

    /// Returns true if the session has ended. Remaining actions do not matter.
    pub fn ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Returns true if the source may open a new link to ask about a guest that never ran on the
    /// target. Once the target was ready, the source may have sent the commit, even if the commit
    /// never arrived.
    pub fn accepts_new_link(&self) -> bool {
        match &self.state {
            State::Ready(ready) => ready.may_be_committed(),
            State::Claiming(claiming) => claiming.memory.is_missing(),
            State::Renounced(renounced) => renounced.accepts_new_link(),
            _ => false,
        }
    }

    /// Returns true if the target has renounced the guest.
    pub fn renounced(&self) -> bool {
        matches!(self.state, State::Renounced(_))
    }

    /// Returns true while the guest runs on the target and pages are missing, or while the source
    /// does not know yet that all have arrived.
    pub fn runs_in_postcopy(&self) -> bool {
        matches!(self.state, State::Postcopy(_))
    }

    /// Returns true if the guest runs on the target and the link is lost.
    pub fn suspended(&self) -> bool {
        matches!(&self.state, State::Postcopy(postcopy) if postcopy.is_suspended())
    }

    /// Returns true if the last missing page has arrived.
    pub fn complete(&self) -> bool {
        match &self.state {
            State::Postcopy(postcopy) => postcopy.is_complete(),
            State::Ended { complete } => *complete,
            _ => false,
        }
    }

    /// Returns the reason why the owner of the guest is unknown, while it is unknown.
    pub fn undecided(&self) -> Option<&str> {
        match &self.state {
            State::Claiming(claiming) => claiming.undecided(),
            State::Renounced(renounced) => renounced.undecided(),
            _ => None,
        }
    }
}

impl run::Session for Session {
    type Event = Event;
    type Action = Action;
    type Outcome = Outcome;

    fn decided(&self) -> bool {
        self.ended()
    }

    fn outcome(action: Action) -> Result<Outcome, Action> {
        if let Action::Finish(outcome) = action { Ok(outcome) } else { Err(action) }
    }
}
