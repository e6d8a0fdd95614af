//! What goes into the source's session and what comes out of it.

use std::time::Duration;
use vmferry_wire::{PageName, Refusal, RunName, Section, ToSource, ToTarget, Token};

/// What happened, reported by the driver.
#[derive(Debug)]
pub(crate) enum Event {
    Message(ToSource),
    ChannelsOpened,
    TrackerStarted,
    Rehearsed {
        fixed: Duration,
    },
    PassSent {
        bytes: u64,
    },
    /// So many pages are dirty; `writers` are the pages that each vCPU wrote since the harvest before, empty if they
    /// cannot be told apart.
    Harvested {
        pages: u64,
        writers: Vec<u64>,
    },
    Paused,
    Saved {
        sections: Vec<Section>,
    },
    Resumed,
    /// Something on this side failed.
    LocalFailure(Refusal),
    /// The link failed or the peer is gone.
    PeerLost(String),
    /// The link failed before the first byte of the newest message left: the target cannot have it.
    NotSent(String),
    /// A person wants the guest to stay.
    Cancel,
    /// Time has passed.
    Tick,
}

/// What pass to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pass {
    /// What is to be sent, as collected so far.
    Dirty { first: bool },
    /// Pages that arrived damaged.
    Again(Vec<RunName>),
    /// Digests of every page.
    Digests,
}

/// What the driver has to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    Send(ToTarget),
    OpenChannels {
        token: Token,
    },
    StartTracker,
    Rehearse,
    Harvest,
    SendPass {
        number: u32,
        pass: Pass,
    },
    /// Have each vCPU stand still for its share of the time; the last stands for all further ones.
    Throttle(Vec<f64>),
    Pause,
    Save,
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
