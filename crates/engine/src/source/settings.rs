//! How to migrate, as the caller says it.

use crate::channel::Tls;
use crate::fence::Arbiter;
use crate::plan::Auto;
use std::sync::Arc;
use std::time::Duration;
use vmferry_protocol::source as session;
use vmferry_protocol::source::{AutoConverge, MigrationMode, OnTimeout, SwitchoverBandwidth};

/// Path of a page that the guest, running on the target, waits for. The target cannot tell which path it is.
///
/// `Dedicated` is the product's path. The other two are baselines: published paths that are kept for comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum UrgentPath {
    /// Baseline: in the bulk channel, behind what is queued there.
    Shared,
    /// Baseline: on an urgent channel, by the thread that sends the bulk, between two of its frames.
    Interleaved,
    /// On the urgent channel that the request came on, at once, by the thread that read the request.
    #[default]
    Dedicated,
}

/// How fast the bulk is sent beside urgent pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pace {
    /// As fast as leaves the queues on the way short: found by watching round trips.
    #[default]
    Auto,
    /// As fast as it goes.
    Off,
    /// At so many bytes a second.
    Rate(u64),
}

/// How to migrate.
#[derive(Debug, Clone)]
pub struct Settings {
    /// When the guest changes sides.
    pub mode: MigrationMode,
    /// How urgent pages are sent in postcopy.
    pub urgent: UrgentPath,
    /// Channels for urgent pages, 1 to [`Settings::MAX_CHANNELS`]; used in postcopy only.
    pub urgent_channels: u16,
    /// How fast bulk pages are sent beside urgent ones.
    pub pace: Pace,
    /// How long a lost link is tried to be taken up again by itself in postcopy, before somebody has to say so.
    pub reconnect_for: Duration,
    /// Whether this host's processors are kept awake while the guest waits for pages on the target, where this process may ask
    /// for that: its faults are answered in about half the time, at the price of power for as long as postcopy takes.
    pub stay_awake: bool,
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
    /// What this migration may do by itself when it departs from what was planned; `None` for nothing but what is said here.
    pub auto: Option<Auto>,
    /// Leave out the pages that the guest says are free, where it can be asked.
    pub free_pages: bool,
    /// Compare every page's digest while the guest is stopped.
    pub verify: bool,
    /// How long the peer may be silent before it is given up. A side whose VM takes longer for something says that it is there meanwhile,
    /// for three times this.
    pub peer_timeout: Duration,
    /// Plain connections to other hosts, which anyone on the way can read and change.
    pub insecure: bool,
    /// Encrypted connections, and to nobody but whom this trusts; `None` for plain ones.
    #[cfg(feature = "tls")]
    pub tls: Option<Tls>,
    /// Who decides who owns a guest of which neither side can know; the target must have the same. `None` to leave that to a person.
    pub fence: Option<Arc<dyn Arbiter>>,
}

impl Settings {
    /// Most parallel channels.
    pub const MAX_CHANNELS: u16 = 64;

    /// Returns what the session has to know.
    pub(crate) fn session(&self) -> session::Settings {
        session::Settings {
            mode: self.mode,
            channels: self.channels,
            urgent_channels: self.urgent_channels,
            probe: self.pace == Pace::Auto,
            downtime_limit: self.downtime_limit,
            max_bandwidth: self.max_bandwidth,
            switchover_bandwidth: self.switchover_bandwidth,
            timeout: self.timeout,
            on_timeout: self.on_timeout,
            auto_converge: self.auto_converge,
            auto: self.auto.clone(),
            verify: self.verify,
            peer_timeout: self.peer_timeout,
            reconnect_for: self.reconnect_for,
            arbiter: self.fence.is_some(),
        }
    }

    /// Returns true if the guest may run on the target before all of its memory is there.
    pub(crate) fn may_be_lazy(&self) -> bool {
        self.session().may_hand_over()
    }

    /// Returns what encrypted channels need; `None` for plain ones.
    #[cfg(feature = "tls")]
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Returns `None`: this build has no encrypted channels.
    #[cfg(not(feature = "tls"))]
    pub(crate) fn tls(&self) -> Option<&Tls> {
        None
    }

    /// Returns true if channels may leave this host.
    pub(crate) fn permits_remote(&self) -> bool {
        self.insecure || self.tls().is_some()
    }

    /// Returns true if round trips are watched.
    pub(crate) fn probe(&self) -> bool {
        self.session().probes()
    }

    /// Returns the number of urgent channels to open.
    pub(crate) fn urgent_count(&self) -> u16 {
        self.session().urgent_count()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: MigrationMode::Precopy,
            urgent: UrgentPath::Dedicated,
            urgent_channels: 2,
            pace: Pace::Auto,
            reconnect_for: Duration::from_secs(60),
            stay_awake: true,
            channels: 2,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            switchover_bandwidth: None,
            timeout: None,
            on_timeout: OnTimeout::Cancel,
            auto_converge: AutoConverge::Off,
            auto: None,
            free_pages: true,
            verify: false,
            peer_timeout: Duration::from_secs(10),
            insecure: false,
            #[cfg(feature = "tls")]
            tls: None,
            fence: None,
        }
    }
}
