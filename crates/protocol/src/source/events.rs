//! Events and actions of the source's session.

use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership};
use std::time::Duration;
use vmferry_core::{RunState, Section};
use vmferry_wire::{MissingPages, Refusal, RegionPage, RegionRun, ToSource, ToTarget, Token};

/// Event that the host reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A message of the target.
    Message(ToSource),
    /// The channels of [`Action::OpenChannels`] are open.
    ChannelsOpened,
    /// The tracker of dirty pages has started.
    TrackerStarted,
    /// The guest was paused for a trial pause, and runs again.
    TrialPaused {
        /// Time that stopping the vCPUs and saving the state took.
        stop: Duration,
        /// Time that saving the state took.
        save: Duration,
        /// Time that quiescing the guest's I/O took.
        quiesce: Duration,
        /// Time for which the guest was paused.
        paused: Duration,
        /// Bytes of the state.
        state_bytes: u64,
        /// The state. `None` if the guest was not paused, and the VMM has declared these values.
        trial: Option<Vec<Section>>,
    },
    /// The guest's I/O was not quiesced in the given time. After a trial pause the guest runs
    /// again.
    Busy {
        /// Time for which the guest was paused.
        paused: Duration,
        /// I/O that was in progress.
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
        /// Number of pages that each vCPU wrote since the last harvest. Empty if the tracker does
        /// not distinguish vCPUs.
        writers: Vec<u64>,
    },
    /// The digests of [`Pass::Digests`] are being sent.
    Comparing {
        /// Number of pages that the verification compares: all pages except missing pages and pages
        /// whose content does not matter.
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
    /// The streams of device state have been sent: completely if the guest is paused, otherwise as
    /// far as they have data.
    StateStreamed {
        /// Number of bytes that were sent.
        bytes: u64,
        /// Number of bytes that would be left if the guest were paused now.
        left: u64,
    },
    /// The source has released everything that only the host that runs the guest may hold.
    Released,
    /// The guest runs again.
    Resumed,
    /// The target was told which pages are missing, and requests for them are answered.
    HandedOver {
        /// Number of missing pages.
        pages: u64,
        /// Number of other pages whose content does not matter.
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
    /// The link failed before the first byte of the newest message was sent: the target cannot have
    /// received that message.
    NotSent(String),
    /// The operator cancelled the migration.
    Cancel,
    /// The operator requested that the guest runs on the target now.
    SwitchNow,
    /// The operator requested that the link is closed, and not opened again before
    /// [`Event::Recover`].
    Pause,
    /// The operator requested that a lost link is opened again.
    Recover,
    /// The operator gave up a lost link.
    Abandon,
    /// The arbiter has answered, or the request failed.
    ArbiterAnswered(Result<Ownership, ArbiterError>),
    /// Time has passed, and nothing else happened.
    Tick,
}

impl Event {
    /// Returns the event for a `message` of which no byte was sent. A commit that was not sent
    /// leaves the guest with the source. A ping that was not sent proves nothing about the messages
    /// before it.
    pub fn unsent(message: &ToTarget, why: String) -> Self {
        if matches!(message, ToTarget::Ping(_)) { Self::PeerLost(why) } else { Self::NotSent(why) }
    }
}

/// Pages of a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pass {
    /// The pages that were harvested.
    Dirty {
        /// True for the first pass, over all of memory.
        first: bool,
    },
    /// Pages that arrived with a digest mismatch.
    Again(Vec<RegionRun>),
    /// Digests of all pages that the target has and whose content matters.
    Digests,
}

/// Action that the host performs.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ToTarget),
    /// Open the channels for pages.
    OpenChannels {
        /// Token for the bulk channels.
        bulk: Token,
        /// Token for the urgent channels.
        urgent: Token,
    },
    /// Keep the token by which the control channel can be opened again.
    Remember {
        /// Token for a new control channel.
        resume: Token,
    },
    /// Name the pages that are still to be sent, and the pages of `also`, to the target. Answer
    /// requests for them from now on.
    HandOver {
        /// Pages that arrived with a digest mismatch.
        also: Vec<RegionRun>,
    },
    /// Send the missing pages that no vCPU waits for, on all bulk channels.
    SendRemaining {
        /// Number of the pass.
        number: u32,
    },
    /// Close every channel: the link is lost.
    Disconnect,
    /// Open a new control channel after a delay.
    Reconnect {
        /// Delay before the attempt.
        after: Duration,
    },
    /// Add these pages to the target's missing pages.
    TakeMissing(MissingPages),
    /// The target has named all of its missing pages: answer requests for them from now on.
    ServeMissing {
        /// Number of missing pages.
        pages: u64,
    },
    /// Start the tracker of dirty pages.
    StartTracker,
    /// Perform a trial pause to measure the cost of stopping the guest.
    TrialPause {
        /// Time within which the guest's I/O must be quiesced.
        within: Duration,
    },
    /// Collect the dirty pages.
    Harvest,
    /// Send a pass on all bulk channels.
    SendPass {
        /// Number of the pass.
        number: u32,
        /// Pages of the pass.
        pass: Pass,
    },
    /// Stop each vCPU for its share of the time. The last share is for all further vCPUs.
    Throttle(Vec<f64>),
    /// Pause the guest.
    Pause,
    /// Save the state.
    Save {
        /// Time within which the guest's I/O must be quiesced.
        within: Duration,
    },
    /// Begin to send the streams of device state, in parallel with everything else, and report
    /// [`Event::StateStreamed`]. Send the data that is available while the guest runs, or all data
    /// if the guest is paused.
    StreamState,
    /// Resume the guest for a later attempt to stop it.
    RunOn,
    /// Release everything that only the host that runs the guest may hold.
    Release,
    /// Make this request to the arbiter after a delay, and report [`Event::ArbiterAnswered`].
    AskArbiter {
        /// Request to make.
        request: ArbiterRequest,
        /// Delay before the request.
        after: Duration,
    },
    /// Resume the guest.
    Resume,
    /// The migration has ended. No other action follows.
    Finish(Outcome),
}

/// Outcome of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs on the target.
    Completed,
    /// The operator or a policy cancelled the migration. The guest runs on the source.
    Cancelled(String),
    /// The guest could not be moved. It runs on the source.
    Failed(Refusal),
    /// The target was told to run the guest, and the source does not know whether the target runs
    /// it. The guest does not run on the source.
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
    /// First pages that differ.
    pub samples: Vec<RegionPage>,
}
