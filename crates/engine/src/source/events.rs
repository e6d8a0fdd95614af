//! What goes into the source's session and what comes out of it.

use crate::fence::{ArbiterError, Ruling, Word};
use std::time::Duration;
use vmferry_core::Section;
use vmferry_wire::{LackingPages, PageName, Refusal, RunName, ToSource, ToTarget, Token};

/// What happened, reported by the driver.
#[derive(Debug)]
pub(crate) enum Event {
    Message(ToSource),
    ChannelsOpened,
    TrackerStarted,
    /// The guest stood still for `stood`, and runs. Of that bringing I/O to rest took `settle`, saving the state of `state_bytes` took
    /// `save`, and stopping the vCPUs and saving took `fixed`.
    Rehearsed {
        fixed: Duration,
        save: Duration,
        settle: Duration,
        stood: Duration,
        state_bytes: u64,
    },
    /// The guest's I/O did not come to rest within the time that it was given: it stood still for so long. After a rehearsal it runs.
    Busy {
        stood: Duration,
        why: String,
    },
    /// Every channel has sent its part of the pass. Listing the pages of the pass took `listing`.
    PassSent {
        bytes: u64,
        listing: Duration,
    },
    /// So many pages are dirty; `writers` are the pages that each vCPU wrote since the harvest before, empty if they
    /// cannot be told apart.
    Harvested {
        pages: u64,
        writers: Vec<u64>,
    },
    /// So many pages are being compared: all but those that the target lacks, and those whose content does not count.
    Comparing {
        pages: u64,
    },
    Paused,
    Saved {
        sections: Vec<Section>,
    },
    /// What only the side that runs the guest may hold was let go of.
    Released,
    Resumed,
    /// The target was told which pages, so many, it lacks, and they are ready to be asked for. `skipped` others do not count.
    HandedOver {
        pages: u64,
        skipped: u64,
    },
    /// A new control channel is up.
    Reconnected,
    /// There is none yet.
    NotReconnected(String),
    /// Something on this side failed.
    LocalFailure(Refusal),
    /// The link failed or the peer is gone.
    PeerLost(String),
    /// The link failed before the first byte of the newest message left: the target cannot have it.
    NotSent(String),
    /// A person wants the guest to stay.
    Cancel,
    /// A person wants the guest to go on on the target now.
    SwitchNow,
    /// A person wants the link to be cut, and not to be taken up again before somebody says so.
    Pause,
    /// A person wants a lost link to be taken up again.
    Recover,
    /// A person has given up a lost link.
    Abandon,
    /// The fence has answered, or has not.
    Ruled(Result<Ruling, ArbiterError>),
    /// Time has passed.
    Tick,
}

impl Event {
    /// Nothing of `message` left. Of a commit that never left something can be concluded; of a ping after it nothing.
    pub(crate) fn unsent(message: &ToTarget, why: String) -> Self {
        if matches!(message, ToTarget::Ping(_)) { Self::PeerLost(why) } else { Self::NotSent(why) }
    }
}

/// What pass to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pass {
    /// What is to be sent, as collected so far.
    Dirty { first: bool },
    /// Pages that arrived damaged.
    Again(Vec<RunName>),
    /// Digests of every page that the target has and that counts.
    Digests,
}

/// What the driver has to do.
#[cfg_attr(test, derive(Clone))]
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    Send(ToTarget),
    OpenChannels {
        bulk: Token,
        urgent: Token,
    },
    /// Keep what the control channel can be taken up again with.
    Remember {
        resume: Token,
    },
    /// Name the pages that are still to be sent, and these, to the target, and serve requests for them from now on.
    HandOver {
        also: Vec<RunName>,
    },
    /// Send what nobody has asked for, on all bulk channels.
    SendRest {
        number: u32,
    },
    /// Close every channel: the link is lost.
    Disconnect,
    /// Open a new control channel, after a while.
    Reconnect {
        after: Duration,
    },
    /// The target lacks these pages.
    TakeLacking(LackingPages),
    /// The target has named all the pages, so many, that it lacks: serve requests for them from now on.
    ServeAgain {
        pages: u64,
    },
    StartTracker,
    /// Stop the guest for an instant, in which its I/O has so long to come to rest.
    Rehearse {
        within: Duration,
    },
    Harvest,
    SendPass {
        number: u32,
        pass: Pass,
    },
    /// Have each vCPU stand still for its share of the time; the last stands for all further ones.
    Throttle(Vec<f64>),
    Pause,
    /// Save the state, for which the guest's I/O has so long to come to rest.
    Save {
        within: Duration,
    },
    /// Let the guest run on: it is stopped again later.
    GoOn,
    /// Let go of what only the side that runs the guest may hold.
    Release,
    /// Say this to the fence after a while, and report [`Event::Ruled`].
    Fence {
        word: Word,
        after: Duration,
    },
    /// Let the guest run here again.
    Resume,
    /// The end; nothing else will come.
    Finish(Outcome),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs on the target.
    Completed,
    /// Somebody or a policy wanted it to stay; it runs here.
    Cancelled(String),
    /// It could not be moved; it runs here.
    Failed(Refusal),
    /// The target was told to run the guest and nobody knows whether it does. It does not run here.
    Unknown(String),
    /// It ran on the target and was given up before it had all of its memory.
    Lost(String),
}

/// What a verification found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verification {
    /// Pages compared.
    pub pages: u64,
    /// Pages that differ.
    pub mismatched: u64,
    /// The first of them.
    pub samples: Vec<PageName>,
}
