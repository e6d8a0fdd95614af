//! What goes into the source's session and what comes out of it.

use crate::arbiter::{ArbiterError, Ruling, Word};
use std::time::Duration;
use vmferry_core::{RunState, Section};
use vmferry_wire::{LackingPages, PageName, Refusal, RunName, ToSource, ToTarget, Token};

/// Event that the host reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A message of the target.
    Message(ToSource),
    /// The channels of [`Action::OpenChannels`] are open.
    ChannelsOpened,
    /// The tracker of dirty pages has started.
    TrackerStarted,
    /// The guest was paused for an instant, and runs again.
    TrialPaused {
        /// Time that stopping the vCPUs and saving the state took.
        stop: Duration,
        /// Time that saving the state took.
        save: Duration,
        /// Time that the guest's I/O took to come to rest.
        quiesce: Duration,
        /// Time for which the guest was paused.
        paused: Duration,
        /// Bytes of the state.
        state_bytes: u64,
        /// The state. `None` if the guest was not paused, and the VMM has declared these values.
        trial: Option<Vec<Section>>,
    },
    /// The guest's I/O did not come to rest in the time that it was given. After a trial pause the guest
    /// runs again.
    Busy {
        /// Time for which the guest was paused.
        paused: Duration,
        /// The I/O that was under way.
        why: String,
    },
    /// Every channel has sent its part of the pass.
    PassSent {
        /// Bytes on the wire.
        bytes: u64,
        /// Time that listing the pages of the pass took.
        listing: Duration,
    },
    /// The dirty pages were harvested.
    Harvested {
        /// Number of pages to send.
        pages: u64,
        /// Pages that each vCPU wrote since the last harvest. Empty if the tracker cannot tell.
        writers: Vec<u64>,
    },
    /// The digests of [`Pass::Digests`] are being sent.
    Comparing {
        /// Number of pages that the verification compares: all but the missing pages, and those whose
        /// content does not count.
        pages: u64,
    },
    /// The guest is paused.
    Paused {
        /// State that the operator wants.
        wanted: RunState,
    },
    /// The state was saved.
    Saved {
        /// The state.
        sections: Vec<Section>,
    },
    /// The streams of device state are sent as far as they go: to their end if the guest is paused.
    StateStreamed {
        /// Bytes that were sent.
        bytes: u64,
        /// Bytes that would be left if the guest were paused now.
        left: u64,
    },
    /// The source has released everything that only the side that runs the guest may hold.
    Released,
    /// The guest runs again.
    Resumed,
    /// The target was told which pages are missing, and requests for them are answered.
    HandedOver {
        /// Number of missing pages.
        pages: u64,
        /// Number of other pages whose content does not count.
        skipped: u64,
    },
    /// A new control channel is open.
    Reconnected,
    /// No new control channel could be opened.
    NotReconnected(String),
    /// A step of the source failed.
    LocalFailure(Refusal),
    /// The link failed, or the peer is gone.
    PeerLost(String),
    /// The link failed before the first byte of the newest message left: the target cannot have it.
    NotSent(String),
    /// The operator wants the guest to stay.
    Cancel,
    /// The operator wants the guest to run on the target now.
    SwitchNow,
    /// The operator wants the link to be cut, and not to be opened again before [`Event::Recover`].
    Pause,
    /// The operator wants a lost link to be opened again.
    Recover,
    /// The operator gives a lost link up.
    Abandon,
    /// The arbiter has answered, or has not.
    ArbiterAnswered(Result<Ruling, ArbiterError>),
    /// Time has passed.
    Tick,
}

impl Event {
    /// Returns the event of a `message` of which no byte was sent. Something follows from a commit that
    /// never left, and nothing from a ping after it.
    pub fn unsent(message: &ToTarget, why: String) -> Self {
        if matches!(message, ToTarget::Ping(_)) { Self::PeerLost(why) } else { Self::NotSent(why) }
    }
}

/// The pages of a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pass {
    /// The pages that were harvested.
    Dirty {
        /// It is the first pass, over all of memory.
        first: bool,
    },
    /// Pages that arrived damaged.
    Again(Vec<RunName>),
    /// Digests of all pages that the target has and that count.
    Digests,
}

/// Action that the host performs.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ToTarget),
    /// Open the channels for pages.
    OpenChannels {
        /// Names the bulk channels.
        bulk: Token,
        /// Names the urgent channels.
        urgent: Token,
    },
    /// Keep the name by which the control channel can be opened again.
    Remember {
        /// The name.
        resume: Token,
    },
    /// Name the pages that are still to be sent, and these, to the target. Answer requests for them from
    /// now on.
    HandOver {
        /// Pages that arrived damaged.
        also: Vec<RunName>,
    },
    /// Send the missing pages that no vCPU waits for, on all bulk channels.
    SendRest {
        /// Number of the pass.
        number: u32,
    },
    /// Close every channel: the link is lost.
    Disconnect,
    /// Open a new control channel after a while.
    Reconnect {
        /// The while.
        after: Duration,
    },
    /// Add these pages to those that the target misses.
    TakeMissing(LackingPages),
    /// The target has named all of its missing pages: answer requests for them from now on.
    ServeMissing {
        /// Number of missing pages.
        pages: u64,
    },
    /// Start the tracker of dirty pages.
    StartTracker,
    /// Pause the guest for an instant, to learn what that costs.
    TrialPause {
        /// Time in which the guest's I/O has to come to rest.
        within: Duration,
    },
    /// Collect the dirty pages.
    Harvest,
    /// Send a pass on all bulk channels.
    SendPass {
        /// Number of the pass.
        number: u32,
        /// The pages.
        pass: Pass,
    },
    /// Stop each vCPU for its share of the time. The last share holds for all further vCPUs.
    Throttle(Vec<f64>),
    /// Pause the guest.
    Pause,
    /// Save the state.
    Save {
        /// Time in which the guest's I/O has to come to rest.
        within: Duration,
    },
    /// Begin to send the streams of device state, beside everything else, and report
    /// [`Event::StateStreamed`]: what they have while the guest runs, or all if it is paused.
    StreamState,
    /// Let the guest run on: it is stopped again later.
    RunOn,
    /// Release what only the side that runs the guest may hold.
    Release,
    /// Say this to the arbiter after a while, and report [`Event::ArbiterAnswered`].
    AskArbiter {
        /// The request.
        word: Word,
        /// The while.
        after: Duration,
    },
    /// Let the guest run again.
    Resume,
    /// The migration has ended. No other action follows.
    Finish(Outcome),
}

/// Outcome of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs on the target.
    Completed,
    /// The operator or a policy wanted the guest to stay. It runs on the source.
    Cancelled(String),
    /// The guest could not be moved. It runs on the source.
    Failed(Refusal),
    /// The target was told to run the guest, and the source does not know whether it does. The guest
    /// does not run on the source.
    Unknown(String),
    /// The guest ran on the target and was given up before it had all of its memory.
    Lost(String),
}

/// Result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verification {
    /// Number of pages that were compared.
    pub pages: u64,
    /// Number of pages that differ.
    pub mismatched: u64,
    /// The first pages that differ.
    pub samples: Vec<PageName>,
}
