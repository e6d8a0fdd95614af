//! Settings of a session.

use super::course::Auto;
use std::time::Duration;
use vmferry_wire::Mode;

/// Action taken when a migration takes longer than its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnTimeout {
    /// The migration is cancelled, and the guest stays on the source.
    #[default]
    Cancel,
    /// The guest is stopped, and the remaining pages are sent without a downtime limit.
    Switch,
    /// The migration goes over to postcopy: the guest runs on the target, and the remaining pages
    /// are sent afterwards.
    Postcopy,
}

/// Mode of a migration, which determines when the guest moves to the target relative to its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MigrationMode {
    /// The guest moves to the target after its memory was sent.
    #[default]
    Precopy,
    /// The guest moves to the target at once, or as soon as its I/O is quiesced. Its memory
    /// follows, requested pages first.
    Postcopy,
    /// The guest moves to the target after precopy passes, which continue for as long as they
    /// shrink. If the downtime would then be too long, the remaining pages follow in postcopy.
    Hybrid,
    /// The guest moves to a target on the same host, which maps the guest's memory. No page is
    /// sent.
    Local,
}

impl std::fmt::Display for MigrationMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
            Self::Local => "local",
        })
    }
}

/// vCPUs that may be throttled if the guest dirties pages faster than the link sends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoConverge {
    /// No vCPU.
    #[default]
    Off,
    /// All vCPUs equally.
    All,
    /// vCPUs that write more than their share, if the tracker distinguishes vCPUs (`ring`). With
    /// other trackers, all vCPUs equally.
    Writers,
}

/// Bandwidth limit while the guest is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchoverBandwidth {
    /// No limit.
    Unlimited,
    /// Limit in bytes per second, greater than 0. It may be above or below
    /// [`Settings::max_bandwidth`]. If the passes reached `max_bandwidth`, the predicted downtime
    /// assumes that the link reaches this limit, because the operator knows the link.
    AtMost(u64),
}

/// Settings of a source's session.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Mode of the migration, which determines when the guest moves to the target.
    pub mode: MigrationMode,
    /// Number of bulk channels.
    pub channels: u16,
    /// Number of urgent channels, which are opened only if the settings allow postcopy.
    pub urgent_channels: u16,
    /// True if the host measures round trips to pace the bulk channels in postcopy.
    pub probe: bool,
    /// Largest acceptable downtime.
    pub downtime_limit: Duration,
    /// Bandwidth limit of passes, in bytes per second. `None` for no limit.
    pub max_bandwidth: Option<u64>,
    /// Bandwidth limit that applies instead while the guest is paused. `None` if `max_bandwidth`
    /// applies then, too.
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// Time after which the action `on_timeout` is taken. `None` for no limit.
    pub timeout: Option<Duration>,
    /// Action taken when `timeout` expires.
    pub on_timeout: OnTimeout,
    /// vCPUs that may be throttled so that precopy converges.
    pub auto_converge: AutoConverge,
    /// Changes of course that the migration may make by itself. `None` for none.
    pub auto: Option<Auto>,
    /// True if the digests of all pages are compared while the guest is paused.
    pub verify: bool,
    /// Time without a message after which the target counts as lost.
    pub peer_timeout: Duration,
    /// Time for which the source tries to reconnect after the link is lost in postcopy.
    pub reconnect_for: Duration,
    /// True if there is an arbiter.
    pub arbiter: bool,
    /// True if the host encodes pages. A session with raw pages that does not converge recommends
    /// this.
    pub encodes: bool,
}

impl Settings {
    /// Maximum number of channels of each kind.
    pub const MAX_CHANNELS: u16 = 64;

    /// Returns true if the guest may run on the target before all of its memory has arrived.
    pub fn may_hand_over(&self) -> bool {
        match self.mode {
            MigrationMode::Postcopy | MigrationMode::Hybrid => true,
            MigrationMode::Precopy => {
                self.on_timeout == OnTimeout::Postcopy || self.auto.as_ref().is_some_and(|auto| auto.postcopy)
            }
            // The target has all of the memory before it has the guest.
            MigrationMode::Local => false,
        }
    }

    /// Returns the mode for the message to the target.
    pub(crate) fn wire_mode(&self) -> Mode {
        match self.mode {
            MigrationMode::Postcopy => Mode::Postcopy,
            _ if self.may_hand_over() => Mode::Hybrid,
            _ => Mode::Precopy,
        }
    }

    /// Returns true if the host measures round trips.
    pub fn probes(&self) -> bool {
        self.may_hand_over() && self.probe
    }

    /// Returns the number of urgent channels to open.
    pub fn urgent_count(&self) -> u16 {
        if self.may_hand_over() { self.urgent_channels } else { 0 }
    }
}

impl Default for Settings {
    /// Returns settings for precopy over two channels, with a downtime limit of 300 ms.
    fn default() -> Self {
        Self {
            mode: MigrationMode::Precopy,
            channels: 2,
            urgent_channels: 2,
            probe: true,
            downtime_limit: Duration::from_millis(300),
            max_bandwidth: None,
            switchover_bandwidth: None,
            timeout: None,
            on_timeout: OnTimeout::Cancel,
            auto_converge: AutoConverge::Off,
            auto: None,
            verify: false,
            peer_timeout: Duration::from_secs(10),
            reconnect_for: Duration::from_secs(60),
            arbiter: false,
            encodes: false,
        }
    }
}
