//! State machine of the target of a migration, without I/O.
//!
//! A [`Session`] takes events and returns actions. Its host performs the actions and reports the
//! events: see [`run`]. A session never blocks and reads no clock.
//!
//! # Phases
//!
//! Each phase is a type with its own fields in its own module. A phase takes itself and an event by
//! value, and returns the phase that follows.
//!
//! | type | the target | the guest |
//! |---|---|---|
//! | `Setup` | compares the machines, and opens channels | runs on the source |
//! | `Receiving` | receives pages and the device state | runs on the source, then is paused |
//! | `Ready` | loads the device state, and awaits the commit | is paused |
//! | `Claiming` | has read the commit, and claims the guest from the arbiter | is paused |
//! | `Starting` | starts the guest | is paused |
//! | `Renounced` | will never run the guest, and tells the source so | is paused on the source until the source knows |
//! | `Postcopy` | receives the missing pages | runs on the target |
//! | `Ended` | does nothing more | |
//!
//! # Which host may run the guest
//!
//! The guest runs on the target only after [`ToTarget::Commit`], and with an arbiter only after the
//! arbiter has granted the target's claim. If anything fails before that, the guest has not run on
//! the target. If the link is lost when the source may already have sent the commit of a guest with
//! missing pages, the target renounces the guest for good, and continues to report this to the
//! source (`Renounced`). Once the guest runs with missing pages, the loss of the link does not end
//! the session, because the target can receive the missing pages over new channels.

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
    LocalRegion, MissingPages, Mode, PagingFigures, Refusal, RefusalCode, RegionPage, RegionRun, ToSource,
    ToTarget, Token,
};

/// Event that the host of the target's session reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A message from the source has arrived.
    Message(ToTarget),
    /// The source has opened one of the channels of [`Action::AwaitChannels`].
    ChannelUp,
    /// All frames of a pass have arrived on a bulk channel.
    Barrier {
        /// Number of the bulk channel.
        channel: u16,
        /// Number of the pass.
        pass: u32,
    },
    /// The pages that have a digest mismatch after a pass were counted.
    DigestMismatches {
        /// Number of the pass.
        pass: u32,
        /// Number of pages.
        pages: u64,
        /// Runs of these pages. If there are many, only the first of them.
        runs: Vec<RegionRun>,
    },
    /// The pages of a frame with hashes were looked up among the known pages.
    LookedUp {
        /// Number of the bulk channel.
        channel: u16,
        /// Number of the frame on its channel.
        frame: u64,
        /// Bitmap of the pages that the target does not know ([`ToSource::UnknownPages`]).
        unknown: Vec<u8>,
    },
    /// The digests of source and target were compared.
    Compared {
        /// Number of pages that were compared.
        pages: u64,
        /// Number of pages that differ.
        mismatched: u64,
        /// The first of the pages that differ.
        samples: Vec<RegionPage>,
    },
    /// The device state was loaded.
    Loaded {
        /// Time that loading took, in microseconds.
        micros: u64,
    },
    /// The guest runs, or is left paused as its operator wants.
    Started {
        /// Time that starting took, in microseconds.
        micros: u64,
        /// CPU time that the target has used so far, in microseconds.
        cpu_us: u64,
    },
    /// A step of the target failed: the device state could not be loaded, a channel failed, or
    /// memory could not be written.
    LocalFailure(Refusal),
    /// The vCPUs could not be started. None has run.
    StartFailed(Refusal),
    /// The link failed, or the source is gone.
    PeerLost(String),
    /// This host can receive pages while the guest runs.
    Prepared,
    /// The VM has mapped the memory of the source's guest.
    MemoryTaken,
    /// The VM has prepared itself with the state of a trial pause.
    VmPrepared {
        /// Time that loading the device state and starting the guest are expected to take after the
        /// preparation, in microseconds.
        load_us: Option<u64>,
    },
    /// The last missing page has arrived. The figures are those of postcopy so far.
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

/// Channels of a migration in addition to the control channel.
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

/// Action that the host of the target's session performs.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ToSource),
    /// Check whether this host can receive pages while the guest runs, and report
    /// [`Event::Prepared`] or [`Event::LocalFailure`].
    PrepareDemandPaging,
    /// Open the next stream of device state. Report [`Event::LocalFailure`] if that fails.
    OpenStream(StreamName),
    /// Write these bytes to a stream. Report [`Event::LocalFailure`] if that fails.
    WriteStream {
        /// Number of the stream.
        stream: u32,
        /// Bytes to write.
        bytes: Vec<u8>,
    },
    /// Complete a stream. Report [`Event::LocalFailure`] if that fails.
    FinishStream {
        /// Number of the stream.
        stream: u32,
    },
    /// Let the VM map the descriptors that came with [`ToTarget::LocalMemory`], and report
    /// [`Event::MemoryTaken`] or [`Event::LocalFailure`].
    TakeMemory(Vec<LocalRegion>),
    /// Let the VM prepare itself with this device state of a trial pause, and report
    /// [`Event::VmPrepared`] or [`Event::LocalFailure`].
    PrepareVm(Vec<Section>),
    /// Accept these channels if they show the tokens of the last [`ToSource::Accept`] or
    /// [`ToSource::Resume`], and report [`Event::ChannelUp`] for each channel.
    AwaitChannels(Channels),
    /// Count the pages that have a digest mismatch, and report [`Event::DigestMismatches`].
    CountDigestMismatches {
        /// Number of the pass.
        pass: u32,
    },
    /// Complete the comparison of digests, and report [`Event::Compared`].
    CountMismatches,
    /// Add these pages to the missing pages.
    TakeMissing(MissingPages),
    /// Begin demand paging: discard the content of the missing pages, all of which were named, and
    /// place these pages as they arrive.
    BeginDemandPaging {
        /// Number of missing pages.
        pages: u64,
    },
    /// Load the device state, and report [`Event::Loaded`].
    Load(Vec<Section>),
    /// Make this request to the arbiter after a delay, and report [`Event::ArbiterAnswered`].
    /// Exception: repeat [`ArbiterRequest::Runs`] until the arbiter answers, and report nothing.
    AskArbiter {
        /// Request to make.
        request: ArbiterRequest,
        /// Delay before the request.
        after: Duration,
    },
    /// Start the guest, or leave it paused if its operator wants that. Report [`Event::Started`] or
    /// [`Event::StartFailed`].
    Start {
        /// State that the operator wants.
        wanted: RunState,
    },
    /// Close every channel, because the link is lost.
    Disconnect,
    /// Tell the source over its new control channel which pages are missing, create new tokens, and
    /// report [`Event::MissingNamed`].
    NameMissing,
    /// Request the pages that vCPUs wait for again, on the new channels.
    RequestAgain,
    /// End demand paging, because no page is missing.
    EndDemandPaging,
    /// End the session with this outcome. After [`Outcome::Running`], the session continues without
    /// the VM.
    Finish(Outcome),
}

/// Outcome of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs on the target, with all of its memory.
    Completed,
    /// The guest runs on the target, and pages are missing. The same session continues without the
    /// VM, to receive the missing pages.
    Running,
    /// The guest has not run on the target and will not run there.
    Failed(Refusal),
}

/// Random tokens of this migration, which only its source receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens {
    /// Token for the bulk channels.
    pub bulk: Token,
    /// Token for the urgent channels.
    pub urgent: Token,
    /// Token for a new control channel.
    pub resume: Token,
}

/// Memory that the target has when it starts the guest.
#[derive(Debug, Clone)]
enum Memory {
    Complete,
    /// Pages are missing and arrive in postcopy. If all of them arrive before the guest is started,
    /// `all_arrived` contains the figures, which are reported once the guest runs.
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

/// State of a request that the target repeats until the arbiter answers.
#[derive(Debug, Clone, Default)]
struct ArbiterRetry {
    again: Backoff,
    /// Reason why the owner of the guest is unknown.
    undecided: Option<String>,
}

/// State that more than one phase reads or changes.
#[derive(Debug, Clone)]
struct TargetContext {
    machine: MachineConfig,
    tokens: Tokens,
    /// True if there is an arbiter.
    with_arbiter: bool,
    /// Time that loading the device state and starting the guest are expected to take, in
    /// microseconds. `None` if it is unknown, or if the source does not support the message that
    /// announces it.
    load_us: Option<u64>,
    /// True if the VM prepares itself with the state of a trial pause.
    wants_trial: bool,
    /// True if the source and the target have agreed that the VM maps the guest's memory.
    takes_memory: bool,
    /// State in which the operator of the source wants the guest to be.
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

/// State that follows an event, and the actions to perform in their order.
type Next = (State, Vec<Action>);

/// Session of a target.
#[derive(Debug, Clone)]
pub struct Session {
    context: TargetContext,
    state: State,
}

/// Returns the reason for renouncing a guest that was about to be started when the link was lost
/// because of `why`.
fn lost_before(why: &str) -> Refusal {
    let detail = format!("the link was lost before the guest was started on the target ({why})");
    Refusal::new(RefusalCode::Other, detail)
}

/// Ends a session whose guest has not run on the target and will not run there.
fn end(why: Refusal, tell: Option<Action>) -> Next {
    let actions = tell.into_iter().chain([Action::Finish(Outcome::Failed(why))]).collect();
    (State::Ended { complete: false }, actions)
}

/// Ends a session before the source can have sent the commit, and tells the source the reason.
fn fail(why: Refusal) -> Next {
    let told = Action::Send(ToSource::Failed(why.clone()));
    end(why, Some(told))
}

/// Returns the error for an event that is not allowed while the target is `doing` something else.
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
    /// Begins a session after a source has opened a control channel. `machine` is the machine of
    /// the target's VM.
    pub fn begin(machine: MachineConfig, tokens: Tokens) -> Self {
        let context = TargetContext {
            machine,
            tokens,
            with_arbiter: false,
            load_us: None,
            wants_trial: false,
            takes_memory: false,
            wanted: RunState::Running,
            mode: Mode::Precopy,
            channels: Channels { bulk: 0, urgent: 0, probe: false },
            accepted: false,
        };
        Self { context, state: State::Setup(Setup::begin()) }
    }

    /// Sets the time that loading the device state and starting the guest are expected to take. The
    /// target announces this time to the source. Pass `None` if the time is unknown, or if the
    /// source does not support the message.
    pub fn expecting(mut self, load: Option<Duration>) -> Self {
        self.context.load_us = load.map(|load| u64::try_from(load.as_micros()).unwrap_or(u64::MAX));
        self
    }

    /// Sets whether the target requests the state of a trial pause. Pass true only if the source
    /// supports this.
    pub fn wanting_trial(mut self, wants: bool) -> Self {
        self.context.wants_trial = wants;
        self
    }

    /// Sets whether the VM maps the memory of a guest from the same host. Pass true only if the
    /// reply to the source's hello has the feature for this. The default is false.
    pub fn taking_memory(mut self, takes: bool) -> Self {
        self.context.takes_memory = takes;
        self
    }

    /// Sets whether there is an arbiter. The default is false.
    pub fn with_arbiter(mut self, with_arbiter: bool) -> Self {
        self.context.with_arbiter = with_arbiter;
        self
    }

    /// Takes an event. Returns the actions that follow from the event, in their order.
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

    /// Returns true if a stop by the operator has an effect now.
    ///
    /// While this is true, [`Event::Stopped`] ends the session or renounces the guest. The host
    /// must report a stop only while this is true. Because the stop flag stays set, the host would
    /// otherwise report the same event again and again, and no other event.
    pub fn heeds_stop(&self) -> bool {
        match &self.state {
            State::Setup(_) | State::Receiving(_) | State::Ready(_) | State::Claiming(_) => true,
            // With an arbiter, the guest is already being given back, and the session ends with the
            // arbiter's answer.
            State::Renounced(_) => !self.context.with_arbiter,
            State::Starting(_) | State::Postcopy(_) | State::Ended { .. } => false,
        }
    }

    /// Returns true if all memory arrived before the guest was started, so that the bulk channels
    /// are not needed any more.
    pub fn memory_complete(&self) -> bool {
        match &self.state {
            State::Ready(ready) => !ready.memory.is_missing(),
            State::Claiming(claiming) => !claiming.memory.is_missing(),
            State::Starting(starting) => !starting.memory.is_missing(),
            _ => false,
        }
    }

    /// Returns true if the session has ended.
    pub fn ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Returns true if the source may open a new link to ask about a guest that has not run on the
    /// target. This is the case once the target was ready, because the source may then have sent
    /// the commit, even if the commit never arrived.
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

    /// Returns true while the guest runs on the target and either pages are missing, or the source
    /// has not confirmed yet that all pages have arrived.
    pub fn runs_in_postcopy(&self) -> bool {
        matches!(self.state, State::Postcopy(_))
    }

    /// Returns true if the guest runs on the target with missing pages and the link is lost.
    pub fn suspended(&self) -> bool {
        matches!(&self.state, State::Postcopy(postcopy) if postcopy.is_suspended())
    }

    /// Returns true if the guest ran on the target before all pages had arrived, and the last
    /// missing page has arrived.
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
