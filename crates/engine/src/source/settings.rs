//! Settings of a migration.

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

/// Rate of the bulk beside urgent pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pace {
    /// The highest rate that keeps the queues on the way short, found by watching round trips.
    #[default]
    Auto,
    /// No limit.
    Off,
    /// This many bytes a second.
    Rate(u64),
}

/// Settings of a migration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Mode: when the guest changes sides. Default: precopy.
    pub mode: MigrationMode,
    /// Path of urgent pages in postcopy. Default: dedicated.
    pub urgent: UrgentPath,
    /// Channels for urgent pages, 1 to [`Settings::MAX_CHANNELS`]; used in postcopy only. Default: 2.
    pub urgent_channels: u16,
    /// Rate of bulk pages beside urgent ones. Default: `Auto`.
    pub pace: Pace,
    /// Time during which a link that is lost in postcopy is taken up again without a command. Default: 60 s.
    pub reconnect_for: Duration,
    /// Whether this host's processors are kept awake while the guest waits for pages on the target, where this process may ask
    /// for that. Faults are answered in about half the time. The price is power for as long as postcopy takes.
    /// Default: yes.
    pub stay_awake: bool,
    /// Parallel channels for pages, 1 to [`Settings::MAX_CHANNELS`]. Default: 2.
    pub channels: u16,
    /// The guest is stopped once its predicted downtime fits this. Default: 300 ms.
    pub downtime_limit: Duration,
    /// Bytes a second on all channels together; `None`, the default, for as fast as it goes.
    ///
    /// The limit is a promise to others that share the link. Therefore it also holds while the guest is stopped, at the cost of
    /// downtime, unless [`Settings::switchover_bandwidth`] says otherwise. (QEMU lifts its limit then.)
    pub max_bandwidth: Option<u64>,
    /// Limit from the moment the guest is being stopped; `None`, the default, for no change.
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// Time that a migration may take before [`Settings::on_timeout`]; `None`, the default, for no limit.
    pub timeout: Option<Duration>,
    /// Action taken when `timeout` expires. Default: cancel.
    pub on_timeout: OnTimeout,
    /// Whether the guest may be slowed. Default: no.
    pub auto_converge: AutoConverge,
    /// What this migration may change when it departs from its plan; `None`, the default, for nothing.
    pub auto: Option<Auto>,
    /// Leave out the pages that the guest says are free, where it can be asked. Default: yes.
    pub free_pages: bool,
    /// Compare every page's digest: while the guest is stopped, and in postcopy each missing page when it arrives. Default: no.
    pub verify: bool,
    /// Time that the peer may be silent before it is given up. A side whose VM needs longer sends keepalives, for three times this
    /// time. Default: 10 s.
    pub peer_timeout: Duration,
    /// Whether plain connections to other hosts are allowed. Every host on the way can read and change what they carry.
    /// Default: no.
    pub insecure: bool,
    /// Encryption, and the peers that are trusted; `None` for plain connections.
    #[cfg(feature = "tls")]
    pub tls: Option<Tls>,
    /// Arbiter that decides which side owns the guest if neither side can know; the target must have the same. `None` to leave that to
    /// the operator.
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
