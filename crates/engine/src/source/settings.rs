//! How to migrate, as the caller says it.

use std::time::Duration;

/// What to do when a migration takes longer than its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnTimeout {
    /// Give up; the guest stays.
    #[default]
    Cancel,
    /// Stop the guest and send the rest, however long that takes.
    Switch,
}

/// Whether a guest that dirties faster than the link carries is slowed until it does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AutoConverge {
    /// It is not.
    #[default]
    Off,
    /// All vCPUs alike.
    All,
    /// Only those vCPUs that write more than their share, where the tracker can tell them apart (`ring`); else all.
    Writers,
}

/// A limit of its own for the time in which the guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SwitchoverBandwidth {
    /// As fast as it goes.
    Unlimited,
    /// Bytes a second, above or below [`Settings::max_bandwidth`]. Where that one is felt, it is also what the prediction of
    /// the downtime counts on: whoever says it knows the link.
    AtMost(u64),
}

/// How to migrate.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Parallel channels for pages, 1 to [`Settings::MAX_CHANNELS`].
    pub channels: u16,
    /// The guest is stopped once its predicted downtime fits this.
    pub downtime_limit: Duration,
    /// Bytes a second on all channels together; `None` for as fast as it goes.
    ///
    /// It is a promise to whoever shares the link, and so it holds while the guest is stopped too, at the cost of downtime
    /// (QEMU lifts its limit then), unless [`Settings::switchover_bandwidth`] says otherwise.
    pub max_bandwidth: Option<u64>,
    /// What holds instead from the moment the guest is being stopped; `None` for no change.
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// How long a migration may take before [`Settings::on_timeout`].
    pub timeout: Option<Duration>,
    /// What then.
    pub on_timeout: OnTimeout,
    /// Whether the guest may be slowed.
    pub auto_converge: AutoConverge,
    /// Compare every page's digest while the guest is stopped.
    pub verify: bool,
    /// How long the peer may be silent before it is given up.
    pub peer_timeout: Duration,
    /// Plain connections to other hosts, which anyone on the way can read and change.
    pub insecure: bool,
}

impl Settings {
    /// Most parallel channels.
    pub const MAX_CHANNELS: u16 = 64;
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            channels: 2,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            switchover_bandwidth: None,
            timeout: None,
            on_timeout: OnTimeout::Cancel,
            auto_converge: AutoConverge::Off,
            verify: false,
            peer_timeout: Duration::from_secs(10),
            insecure: false,
        }
    }
}
