//! The target's side of a migration as a state machine without I/O.
//!
//! A [`Session`] takes events and returns actions. The host performs the actions and reports the
//! events: see [`run`](crate::run). A session never blocks and reads no clock.
//!
//! # Phases
//!
//! Each phase is a type that owns its own fields, in a module of its own. A phase takes an event by
//! value and returns the phase that follows.
//!
//! | type | the target | the guest |
//! |---|---|---|
//! | [`Setup`] | compares the machine, and opens channels | runs on the source |
//! | [`Receiving`] | takes pages and the device state | runs on the source, then is paused |
//! | [`Ready`] | loads the state, and awaits the commit | is paused |
//! | [`Claiming`] | has read the commit, and asks the arbiter for the guest | is paused |
//! | [`Starting`] | starts the guest | is paused |
//! | [`Renounced`] | will never run the guest, and tells the source so | is the source's |
//! | [`Postcopy`] | takes the missing pages | runs here |
//! | [`Ended`](State::Ended) | does nothing more | |
//!
//! # Which side may run the guest
//!
//! The guest runs on the target only after [`ToTarget::Commit`], and with an arbiter only after the
//! arbiter has granted the guest. Every failure before that ends without the guest having run. If
//! the source may have sent the commit and its link is lost, the target gives the guest up for good
//! and stays to say so ([`Renounced`]). Once the guest runs before all of its memory is here, a lost
//! link ends nothing: the target waits for the missing pages over new channels.

mod postcopy;
#[cfg(test)]
mod projection;
mod ready;
mod receiving;
mod renounced;
mod setup;
mod start;

use crate::fence::{Again, ArbiterError, Ruling, Word};
use crate::run;
use postcopy::Postcopy;
use ready::Ready;
use receiving::Receiving;
use renounced::Renounced;
use setup::Setup;
use start::{Claiming, Starting};
use std::time::Duration;
use vmferry_core::{MachineConfig, Section};
use vmferry_wire::{
    LackingPages, LazyFigures, Mode, PageName, Refusal, RefusalCode, RunName, ToSource, ToTarget, Token,
};

/// What happened, reported by the driver.
#[derive(Debug)]
pub(crate) enum Event {
    Message(ToTarget),
    /// A bulk channel of this migration is up.
    ChannelUp,
    /// Channel `channel` has received everything of pass `pass`.
    Barrier {
        channel: u16,
        pass: u32,
    },
    /// Pages that do not match their digest, after pass `pass`.
    Suspects {
        pass: u32,
        pages: u64,
        runs: Vec<RunName>,
    },
    /// What comparing digests found.
    Compared {
        pages: u64,
        mismatched: u64,
        samples: Vec<PageName>,
    },
    Loaded {
        micros: u64,
    },
    Started {
        micros: u64,
        cpu_us: u64,
    },
    /// The state could not be loaded, a channel broke, memory could not be written.
    LocalFailure(Refusal),
    /// The vCPUs could not be started; none has run.
    StartFailed(Refusal),
    PeerLost(String),
    /// This host can take pages while the guest runs.
    Prepared,
    /// No page is lacking any more.
    AllHere(LazyFigures),
    /// The source has opened a new control channel.
    ControlBack,
    /// The fence has answered this word, or has not.
    Ruled(Word, Result<Ruling, ArbiterError>),
    /// The operator wants no guest any more.
    Stopped,
    /// What is lacking, `pages` pages, was told to the source; these are the tokens for its new channels.
    Retold {
        pages: u64,
        tokens: (Token, Token),
    },
}

/// What channels there are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Channels {
    pub(crate) bulk: u16,
    pub(crate) urgent: u16,
    pub(crate) probe: bool,
}

impl Channels {
    fn count(self) -> u32 {
        u32::from(self.bulk) + u32::from(self.urgent) + u32::from(self.probe)
    }
}

/// What the driver has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Send(ToSource),
    /// Make sure that this host can take pages while the guest runs: report [`Event::Prepared`], or [`Event::LocalFailure`].
    PrepareLazily,
    /// Take these channels, with the tokens that `Accept` or `Resume` names.
    AwaitChannels(Channels),
    /// Report [`Event::Suspects`].
    CountSuspects {
        pass: u32,
    },
    /// Report [`Event::Compared`].
    CountDifferences,
    /// Add these pages to those that are lacking.
    TakeLacking(LackingPages),
    /// `pages` pages were named: drop them, and take them as they come from now on.
    BeginLazily {
        pages: u64,
    },
    Load(Vec<Section>),
    /// Say this to the fence after a while, and report [`Event::Ruled`]; that the guest runs is said until it is heard, and not reported.
    Fence {
        word: Word,
        after: Duration,
    },
    Start,
    /// Close every channel: the link is lost.
    Disconnect,
    /// Tell the source over its new control channel what is lacking; report [`Event::Retold`].
    Retell,
    /// Ask for the pages that somebody waits for, on the new channels.
    AskAgain,
    /// Nothing is lacking: end the faults.
    EndLazily,
    Finish(Outcome),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The guest runs here, and all of it is here.
    Completed,
    /// The guest runs here, and pages are still to come: the same session goes on, without the VM.
    RunsLazily,
    /// The guest has not run here and will not.
    Failed(Refusal),
}

/// Random bits of this migration, which only its source is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) bulk: Token,
    pub(crate) urgent: Token,
    pub(crate) resume: Token,
}

/// What the target has of the guest's memory when it starts the guest.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
enum Memory {
    Complete,
    /// Pages are missing. They come in postcopy, and all may be here already: then the account of
    /// them is told once the guest runs.
    Missing {
        all_here: Option<LazyFigures>,
    },
}

impl Memory {
    fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// Notes that the last missing page came.
    fn arrived(&mut self, figures: LazyFigures) {
        if let Self::Missing { all_here } = self {
            *all_here = Some(figures);
        }
    }
}

/// What the target asks the arbiter again and again.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, Default)]
struct Asking {
    again: Again,
    /// Why it is not decided which side owns the guest.
    undecided: Option<String>,
}

/// What more than one phase reads.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
struct Shared {
    machine: MachineConfig,
    tokens: Tokens,
    /// There is an arbiter.
    fenced: bool,
    /// Microseconds that loading the state and starting the guest are expected to take, for a source
    /// that wants to know.
    load_us: Option<u64>,
    mode: Mode,
    channels: Channels,
    /// The source has announced a guest that fits.
    accepted: bool,
}

/// The phase of a session, with the data of that phase.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
enum State {
    Setup(Setup),
    Receiving(Box<Receiving>),
    Ready(Ready),
    Claiming(Claiming),
    Starting(Starting),
    Renounced(Renounced),
    Postcopy(Postcopy),
    Ended {
        /// All memory was here.
        complete: bool,
    },
}

/// The state that follows an event, and the actions to perform, in their order.
type Next = (State, Vec<Action>);

/// A target's session.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
pub(crate) struct Session {
    shared: Shared,
    state: State,
}

/// The reason for which a guest is renounced that was all but started.
fn lost_before(why: &str) -> Refusal {
    let detail = format!("the link was lost before the guest was started on the target ({why})");
    Refusal::new(RefusalCode::Other, detail)
}

/// Ends a session whose guest has not run here and will not.
fn end(why: Refusal, tell: Option<Action>) -> Next {
    let actions = tell.into_iter().chain([Action::Finish(Outcome::Failed(why))]).collect();
    (State::Ended { complete: false }, actions)
}

/// Ends a session before the source can have sent the commit, and tells the source why.
fn fail(why: Refusal) -> Next {
    let told = Action::Send(ToSource::Failed(why.clone()));
    end(why, Some(told))
}

/// Returns the event as an error of the source or the host: it does not belong to `doing`.
fn misplaced(event: &Event, doing: &str) -> Refusal {
    let detail = match event {
        Event::Message(message) => {
            format!("the source sent {}, which does not fit this moment ({doing})", message.name())
        }
        other => format!("{other:?} came while {doing}"),
    };
    Refusal::new(RefusalCode::Protocol, detail)
}

impl Session {
    /// Begins: a control channel is open.
    pub(crate) fn begin(machine: MachineConfig, tokens: Tokens) -> Self {
        let shared = Shared {
            machine,
            tokens,
            fenced: false,
            load_us: None,
            mode: Mode::Precopy,
            channels: Channels { bulk: 0, urgent: 0, probe: false },
            accepted: false,
        };
        Self { shared, state: State::Setup(Setup::begin()) }
    }

    /// Tells the source that loading the state and starting the guest are expected to take `load`.
    pub(crate) fn expecting(mut self, load: Option<Duration>) -> Self {
        self.shared.load_us = load.map(|load| u64::try_from(load.as_micros()).unwrap_or(u64::MAX));
        self
    }

    /// Asks an arbiter, if `fenced` says that there is one.
    pub(crate) fn fenced(mut self, fenced: bool) -> Self {
        self.shared.fenced = fenced;
        self
    }

    /// Takes an event. Returns the actions that follow from it, in their order.
    pub(crate) fn handle(&mut self, event: Event) -> Vec<Action> {
        let state = std::mem::replace(&mut self.state, State::Ended { complete: false });
        let (state, actions) = react(state, &mut self.shared, event);
        self.state = state;
        actions
    }
}

/// Takes an event in any state.
fn react(state: State, shared: &mut Shared, event: Event) -> Next {
    match (state, event) {
        (State::Ended { complete }, _) => (State::Ended { complete }, Vec::new()),
        (state, Event::Message(ToTarget::Ping(number))) => {
            (state, vec![Action::Send(ToSource::Pong(number))])
        }
        (State::Claiming(claiming), event) => claiming.handle(shared, event),
        (State::Starting(starting), event) => starting.handle(shared, event),
        (State::Renounced(renounced), event) => renounced.handle(shared, event),
        (State::Postcopy(postcopy), event) => postcopy.handle(shared, event),
        (State::Ready(ready), event) => ready.handle(shared, event),
        // A source that cancels has not committed.
        (_, Event::Message(ToTarget::Cancel(why))) => end(why, None),
        (_, Event::Stopped) => fail(Refusal::new(RefusalCode::Cancelled, "the target was told to stop")),
        (_, Event::LocalFailure(why)) => fail(why),
        (_, Event::PeerLost(why)) => end(Refusal::new(RefusalCode::Other, why), None),
        (State::Setup(setup), event) => setup.handle(shared, event),
        (State::Receiving(receiving), event) => receiving.handle(shared, event),
    }
}

/// What the host reads.
impl Session {
    /// Returns true if the source has announced a guest that fits.
    pub(crate) fn accepted(&self) -> bool {
        self.shared.accepted
    }

    /// Returns true if the source has not announced its guest yet.
    pub(crate) fn awaits_setup(&self) -> bool {
        matches!(&self.state, State::Setup(setup) if setup.awaits_announcement())
    }

    /// Returns true if a stop changes anything now.
    ///
    /// While this is true, an [`Event::Stopped`] ends the session or renounces the guest. The host
    /// reports a stop only while this is true: the stop flag stays set, and an event that changes
    /// nothing would keep the host from all others.
    pub(crate) fn heeds_stop(&self) -> bool {
        match &self.state {
            State::Setup(_) | State::Receiving(_) | State::Ready(_) | State::Claiming(_) => true,
            // With an arbiter the guest is being given back. The session ends with the answer.
            State::Renounced(_) => !self.shared.fenced,
            State::Starting(_) | State::Postcopy(_) | State::Ended { .. } => false,
        }
    }

    /// Returns true if all memory is here, so that the bulk channels have done their work.
    pub(crate) fn memory_complete(&self) -> bool {
        match &self.state {
            State::Ready(ready) => !ready.memory.is_missing(),
            State::Claiming(claiming) => !claiming.memory.is_missing(),
            State::Starting(starting) => !starting.memory.is_missing(),
            _ => false,
        }
    }

    /// Returns true if the session has ended: what was still to be done is moot.
    pub(crate) fn ended(&self) -> bool {
        matches!(self.state, State::Ended { .. })
    }

    /// Returns true if the source may open a new link to ask what has become of a guest that never
    /// ran here. Once the target was ready the source may have sent the commit, even if it never came.
    pub(crate) fn may_be_asked(&self) -> bool {
        match &self.state {
            State::Ready(ready) => ready.may_be_committed(),
            State::Claiming(claiming) => claiming.memory.is_missing(),
            State::Renounced(renounced) => renounced.may_be_asked(),
            _ => false,
        }
    }

    /// Returns true if the target has renounced the guest.
    pub(crate) fn renounced(&self) -> bool {
        matches!(self.state, State::Renounced(_))
    }

    /// Returns true while the guest runs here and pages are missing, or the source does not know yet
    /// that none are.
    pub(crate) fn running_lazily(&self) -> bool {
        matches!(self.state, State::Postcopy(_))
    }

    /// Returns true if the guest runs here and the link is lost.
    pub(crate) fn suspended(&self) -> bool {
        matches!(&self.state, State::Postcopy(postcopy) if postcopy.is_suspended())
    }

    /// Returns true if the last missing page is here.
    pub(crate) fn complete(&self) -> bool {
        match &self.state {
            State::Postcopy(postcopy) => postcopy.is_complete(),
            State::Ended { complete } => *complete,
            _ => false,
        }
    }

    /// Returns why it is not known which side owns the guest, while it is not.
    pub(crate) fn undecided(&self) -> Option<&str> {
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
