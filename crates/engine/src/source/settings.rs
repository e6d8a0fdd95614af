//! Settings of a migration.

use crate::arbiter::Arbiter;
use crate::channel::Tls;
use crate::plan::Auto;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use vmferry_codec::Level as ZstdLevel;
use vmferry_protocol::source as session;
use vmferry_protocol::source::{AutoConverge, MigrationMode, OnTimeout, SwitchoverBandwidth};

/// Path on which the source sends a page that the guest on the target waits for.
///
/// `Dedicated` is the default. `Shared` and `Interleaved` are baselines: published methods that are
/// kept for comparison. The choice needs no agreement with the target, because the target does not
/// depend on the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum UrgentPath {
    /// Baseline: the page is queued in the bulk channel, behind the frames that wait there.
    Shared,
    /// Baseline: the thread that sends bulk pages sends the page on an urgent channel, between two
    /// bulk frames.
    Interleaved,
    /// The thread that reads the page request answers at once, on the urgent channel of the
    /// request.
    #[default]
    Dedicated,
}

/// Rate limit of bulk pages in postcopy, while urgent pages share the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BulkLimit {
    /// The highest rate at which no long queue forms on the network path. The source finds this
    /// rate by measuring round trips.
    #[default]
    Auto,
    /// No limit.
    Off,
    /// A fixed rate in bytes per second.
    Rate(u64),
}

/// Encoding of the pages on bulk channels.
///
/// Pages on urgent channels and pages of zeros are never encoded. If the version of the target does
/// not decode pages, the source sends them unencoded under every setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PageCodec {
    /// For each kind of page, the encoding with which the migration is expected to be fastest. The
    /// source decides from what it measures: the rate of the link, the processor time and the size
    /// of encoded pages, and the processors that are idle.
    Auto,
    /// No encoding.
    #[default]
    Raw,
    /// LZ4, for all pages that become smaller.
    Lz4,
    /// Zstandard at this level, for all pages that become smaller.
    Zstd(ZstdLevel),
}

impl fmt::Display for PageCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Raw => f.write_str("raw"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{}", level.get()),
        }
    }
}

/// Use of deltas for pages that the guest has written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Deltas {
    /// Deltas while the link, and not the processors, limits the migration.
    Auto,
    /// Deltas for all pages whose last version the source has kept.
    On,
    /// No deltas.
    #[default]
    Off,
}

/// Settings of a migration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Migration mode, which determines when the guest moves to the target. Default: precopy.
    pub mode: MigrationMode,
    /// Path of urgent pages in postcopy. Default: dedicated.
    pub urgent: UrgentPath,
    /// Number of channels for urgent pages, 1 to [`Settings::MAX_CHANNELS`]. Used in postcopy only.
    /// Default: 2.
    pub urgent_channels: u16,
    /// Rate limit of bulk pages while urgent pages share the link. Default: `Auto`.
    pub pace: BulkLimit,
    /// Time during which the source reconnects by itself after the link is lost in postcopy.
    /// Default: 60 s.
    pub reconnect_for: Duration,
    /// True to keep the processors of the source host awake during postcopy.
    ///
    /// The source then answers page requests in about half the time, but the host uses more power
    /// during postcopy. The setting has an effect only if the process may write
    /// `/dev/cpu_dma_latency`. Default: true.
    pub stay_awake: bool,
    /// Number of parallel bulk channels, 1 to [`Settings::MAX_CHANNELS`]. Default: 2. See
    /// [`Settings::usual_channels`].
    pub channels: u16,
    /// True to let only some of the channels send at the same time while the guest runs, so that
    /// the threads that send take few processors from vCPUs. Default: false.
    ///
    /// At first, one channel sends for each idle processor. Ten times a second, the source compares
    /// how long vCPUs have waited for processors ([`SourceVm::run_delays`]). If they wait, fewer
    /// channels send, but at least one. Two channels send if no processor is idle and the vCPUs
    /// wait nevertheless, because a sender that shares its processor with a vCPU takes breaks. If
    /// they do not wait, and a processor is idle, more channels send. All channels send while the
    /// guest is stopped. If the VMM does not tell how long vCPUs wait, the first number stays.
    ///
    /// The thread that calls [`migrate`](crate::migrate) must be allowed to open `/proc/loadavg`
    /// and `/proc/stat`. Otherwise, all processors count as idle at first, and none later.
    ///
    /// [`SourceVm::run_delays`]: vmferry_core::SourceVm::run_delays
    pub adapt_channels: bool,
    /// Largest acceptable downtime. In precopy, the source stops the guest once the predicted
    /// downtime is within this limit. Default: 300 ms.
    pub downtime_limit: Duration,
    /// Bandwidth limit of all channels together, in bytes per second, greater than 0. Default:
    /// `None`, no limit.
    ///
    /// The limit protects other users of the link. Therefore it also applies while the guest is
    /// stopped, at the cost of downtime, unless [`Settings::switchover_bandwidth`] sets another
    /// limit. (QEMU lifts its limit during the switchover.)
    pub max_bandwidth: Option<u64>,
    /// Bandwidth limit that applies once the source begins to stop the guest. Default: `None`,
    /// which keeps [`Settings::max_bandwidth`].
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// Time after which [`Settings::on_timeout`] applies. Default: `None`, no limit.
    pub timeout: Option<Duration>,
    /// Action taken when `timeout` expires. Default: cancel.
    pub on_timeout: OnTimeout,
    /// vCPUs that the source may throttle so that precopy converges. Default: off.
    pub auto_converge: AutoConverge,
    /// Changes that the migration may make by itself if precopy does not converge, or if the
    /// migration departs from its plan. Default: `None`, no changes.
    pub auto: Option<Auto>,
    /// True to skip pages that the guest reports as free, if the guest can be asked. Default: true.
    pub free_pages: bool,
    /// Longest time for which the source waits for the guest's answer about free pages before it
    /// sends the first page. Default: 0, no wait.
    ///
    /// Without a wait, the source sends pages while the guest looks for its free pages, and sends
    /// some of them in vain. The wait ends early when the guest has named all of its free pages.
    /// The source does not wait for a source of free pages that answers [at
    /// once](vmferry_core::AnswerMode::AtOnce), or if [`Settings::free_pages`] is false.
    pub free_pages_wait: Duration,
    /// Encoding of pages on bulk channels. Default: raw.
    pub codec: PageCodec,
    /// Use of deltas for pages that the guest has written again. Default: off.
    pub deltas: Deltas,
    /// Memory for the pages that deltas refer to, in bytes, for all channels together. Default:
    /// `None`, a sixteenth of the guest's memory and at least 16 MiB, but at most a quarter of the
    /// memory that the host has available.
    pub delta_cache: Option<u64>,
    /// True to compare the digest of every page between source and target.
    ///
    /// The pages are compared while the guest is stopped. In postcopy, each missing page is
    /// compared when it arrives. Default: false.
    pub verify: bool,
    /// Time without a message after which the peer is considered lost, greater than 0. While a call
    /// of the VMM takes longer, source and target send keepalives, for up to three times this
    /// value. Default: 10 s.
    pub peer_timeout: Duration,
    /// True to allow unencrypted connections to other hosts. Every host on the network path can
    /// read and change the content of such a connection. Default: false.
    pub insecure: bool,
    /// Certificate, key and trusted authorities for encrypted connections. Default: `None`,
    /// unencrypted connections.
    #[cfg(feature = "tls")]
    pub tls: Option<Tls>,
    /// Arbiter that decides whether source or target owns the guest if neither can know. The target
    /// must use the same arbiter. Default: `None`, which leaves the decision to the operator.
    pub arbiter: Option<Arc<dyn Arbiter>>,
}

impl Settings {
    /// Largest number of parallel channels of each kind.
    pub const MAX_CHANNELS: u16 = 64;

    /// Returns the number of bulk channels that suits this host together with
    /// [`Settings::adapt_channels`]: one for each processor, from 1 to 4.
    ///
    /// More channels are faster only on links that are faster than memory is copied.
    #[must_use]
    pub fn usual_channels() -> u16 {
        super::parallel::usual_channels()
    }

    /// Returns the settings for the session of the protocol.
    pub(crate) fn session(&self) -> session::Settings {
        session::Settings {
            mode: self.mode,
            channels: self.channels,
            urgent_channels: self.urgent_channels,
            probe: self.pace == BulkLimit::Auto,
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
            arbiter: self.arbiter.is_some(),
            encodes: self.codec != PageCodec::Raw || self.deltas != Deltas::Off,
        }
    }

    /// Returns true if the guest may run on the target before the target has all of its memory.
    pub(crate) fn may_use_postcopy(&self) -> bool {
        self.session().may_hand_over()
    }

    /// Returns the settings of encrypted channels, or `None` for unencrypted channels.
    #[cfg(feature = "tls")]
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Returns `None`, because this build has no encrypted channels.
    #[cfg(not(feature = "tls"))]
    pub(crate) fn tls(&self) -> Option<&Tls> {
        None
    }

    /// Returns true if channels to other hosts are allowed.
    pub(crate) fn permits_remote(&self) -> bool {
        self.insecure || self.tls().is_some()
    }

    /// Returns true if the source measures round trips.
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
            pace: BulkLimit::Auto,
            reconnect_for: Duration::from_secs(60),
            stay_awake: true,
            channels: 2,
            adapt_channels: false,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            switchover_bandwidth: None,
            timeout: None,
            on_timeout: OnTimeout::Cancel,
            auto_converge: AutoConverge::Off,
            auto: None,
            free_pages: true,
            free_pages_wait: Duration::ZERO,
            codec: PageCodec::default(),
            deltas: Deltas::default(),
            delta_cache: None,
            verify: false,
            peer_timeout: Duration::from_secs(10),
            insecure: false,
            #[cfg(feature = "tls")]
            tls: None,
            arbiter: None,
        }
    }
}
