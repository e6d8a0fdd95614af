//! Events and actions of the source's session.

use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership};
use std::time::Duration;
use vmferry_core::{RunState, Section};
use vmferry_wire::{MissingPages, Refusal, RegionPage, RegionRun, ToSource, ToTarget, Token};

/// Event that the host of the source's session reports.
#[derive(Debug, Clone)]
pub enum Event {
    /// A message from the target has arrived.
    Message(ToSource),
    /// The channels of [`Action::OpenChannels`] are open.
    ChannelsOpened,
    /// The tracker of dirty pages has started.
    TrackerStarted,
    /// The trial pause has ended, and the guest runs again.
    TrialPaused {
        /// Time that stopping the vCPUs and saving the device state took.
        stop: Duration,
        /// Time that saving the device state took.
        save: Duration,
        /// Time that quiescing the guest's I/O took.
        quiesce: Duration,
        /// Time for which the guest was paused.
        paused: Duration,
        /// Size of the device state in bytes.
        state_bytes: u64,
        /// The device state. `None` if the guest was not paused, because the VMM has declared these
        /// values.
        trial: Option<Vec<Section>>,
    },
    /// The guest's I/O did not quiesce in the given time. After a trial pause, the guest runs
    /// again. After [`Action::Save`], the guest is still paused.
    Busy {
        /// Time for which the guest was paused.
        paused: Duration,
        /// I/O that was in progress.
        why: String,
    },
    /// Every channel has sent its part of the pass.
    PassSent {
        /// Number of bytes that were sent.
        bytes: u64,
        /// Time that listing the pages of the pass took on the source.
        listing: Duration,
        /// Time for which the source held the pages of the pass back, because it waited for the
        /// guest's answer about free pages. In that time the link carried no page.
        held: Duration,
    },
    /// The dirty pages were harvested.
    Harvested {
        /// Number of pages that are to be sent.
        pages: u64,
        /// Number of pages that each vCPU wrote since the last harvest. Empty if the tracker does
        /// not distinguish vCPUs.
        writers: Vec<u64>,
    },
    /// The host has begun to send the digests of [`Pass::Digests`].
    Comparing {
        /// Number of pages that the verification compares: all pages, except missing pages and
        /// pages whose content does not matter.
        pages: u64,
    },
    /// The guest is paused.
    Paused {
        /// State in which the operator wants the guest to be after the migration.
        wanted: RunState,
    },
    /// The device state was saved.
    Saved {
        /// The device state.
        sections: Vec<Section>,
    },
    /// The streams of device state have been sent: all of their data if the guest is paused,
    /// otherwise the data that is available so far.
    StateStreamed {
        /// Number of bytes that were sent.
        bytes: u64,
        /// Number of bytes that would be left if the guest were paused now.
        left: u64,
    },
    /// The source has released the resources that only the host that runs the guest may hold.
    Released,
    /// The guest runs again after [`Action::Resume`] or [`Action::RunOn`].
    Resumed,
    /// The target was told which pages are missing, and the host answers requests for them.
    HandedOver {
        /// Number of missing pages.
        pages: u64,
        /// Number of other pages, whose content does not matter.
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
    /// The link failed before the first byte of the newest message was sent, so the target cannot
    /// have received that message.
    NotSent(String),
    /// The operator cancelled the migration.
    Cancel,
    /// The operator requested that the guest moves to the target now, before all of its memory has
    /// arrived.
    SwitchNow,
    /// The operator requested that the link is closed, and is not opened again before
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
    /// Returns the event for a `message` of which no byte was sent.
    ///
    /// For a ping, this is [`Event::PeerLost`], because a ping that was not sent proves nothing
    /// about the messages before it, such as a commit. For other messages, it is
    /// [`Event::NotSent`], so that a commit that was not sent leaves the guest with the source.
    pub fn unsent(message: &ToTarget, why: String) -> Self {
        if matches!(message, ToTarget::Ping(_)) { Self::PeerLost(why) } else { Self::NotSent(why) }
    }
}

/// Content of a pass.
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

/// Action that the host of the source's session performs.
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
    /// Store the token with which the control channel can be opened again.
    Remember {
        /// Token for a new control channel.
        resume: Token,
    },
    /// Tell the target which pages are missing: the pages that are still to be sent, and the pages
    /// of `also`. Answer requests for these pages from now on, and report [`Event::HandedOver`].
    HandOver {
        /// Pages that arrived with a digest mismatch.
        also: Vec<RegionRun>,
    },
    /// Send the missing pages on all bulk channels, except those that are sent on request.
    SendRemaining {
        /// Number of the pass.
        number: u32,
    },
    /// Close every channel, because the link is lost.
    Disconnect,
    /// Open a new control channel after a delay, and report [`Event::Reconnected`] or
    /// [`Event::NotReconnected`].
    Reconnect {
        /// Delay before the attempt.
        after: Duration,
    },
    /// Add these pages to the target's missing pages.
    TakeMissing(MissingPages),
    /// Answer requests for missing pages from now on. The target has named all of its missing
    /// pages.
    ServeMissing {
        /// Number of missing pages.
        pages: u64,
    },
    /// Pass the target's answer to the sender of the bulk channel. Report
    /// [`Event::LocalFailure`] if the sender has not sent such a frame.
    TakeAnswer {
        /// Index of the bulk channel.
        channel: u16,
        /// Number of the frame with hashes.
        frame: u64,
        /// Bitmap of the pages that the target does not know
        /// ([`ToSource::UnknownPages`]).
        unknown: Vec<u8>,
    },
    /// Send [`ToTarget::LocalMemory`] with the descriptors of the guest's memory. Report
    /// [`Event::LocalFailure`] if the VM does not share its memory.
    ShareMemory,
    /// Start the tracker of dirty pages.
    StartTracker,
    /// Perform a trial pause to measure the cost of stopping the guest.
    TrialPause {
        /// Time within which the guest's I/O must be quiesced.
        within: Duration,
    },
    /// Harvest the dirty pages, and report [`Event::Harvested`].
    Harvest,
    /// Send a pass on all bulk channels, and report [`Event::PassSent`].
    SendPass {
        /// Number of the pass.
        number: u32,
        /// Pages of the pass.
        pass: Pass,
    },
    /// Stop each vCPU for its share of the time, 0 to 1. The last share applies to all further
    /// vCPUs.
    Throttle(Vec<f64>),
    /// Pause the guest.
    Pause,
    /// Quiesce the guest's I/O and save the device state. Report [`Event::Saved`] or
    /// [`Event::Busy`].
    Save {
        /// Time within which the guest's I/O must be quiesced.
        within: Duration,
    },
    /// Begin to send the streams of device state, in parallel with other actions, and report
    /// [`Event::StateStreamed`]. If the guest runs, send the data that is available now. If the
    /// guest is paused, send all data.
    StreamState,
    /// Resume the guest, because the source will try to stop it again later.
    RunOn,
    /// Release the resources that only the host that runs the guest may hold, and report
    /// [`Event::Released`].
    Release,
    /// Make this request to the arbiter after a delay, and report [`Event::ArbiterAnswered`].
    AskArbiter {
        /// Request to make.
        request: ArbiterRequest,
        /// Delay before the request.
        after: Duration,
    },
    /// Resume the guest, because it stays on the source. Report [`Event::Resumed`].
    Resume,
    /// End the session with this outcome. No other action follows.
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
    /// The first of the pages that differ.
    pub samples: Vec<RegionPage>,
}
