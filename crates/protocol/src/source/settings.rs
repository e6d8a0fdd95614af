//! Settings of a migration that the session needs.

use super::course::Auto;
use std::time::Duration;
use vmferry_wire::Mode;

/// Action taken when a migration takes longer than its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnTimeout {
    /// The migration is cancelled, and the guest stays on the source.
    #[default]
    Cancel,
    /// The guest is stopped and the rest is sent, without a limit in time.
    Switch,
    /// The guest runs on the target, and the rest is sent after that.
    Postcopy,
}

/// Moment at which the guest moves to the target, relative to its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MigrationMode {
    /// The guest moves after its memory was sent.
    #[default]
    Precopy,
    /// The guest moves at once, or as soon as its I/O is quiesced. Its memory follows, requested
    /// pages first.
    Postcopy,
    /// The guest moves after the passes over its memory that are worth sending. If the downtime
    /// would then be too long, the rest follows in postcopy.
    Hybrid,
}

impl std::fmt::Display for MigrationMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        })
    }
}

/// vCPUs that are throttled if the guest dirties faster than the link sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoConverge {
    /// No vCPU.
    #[default]
    Off,
    /// All vCPUs equally.
    All,
    /// vCPUs that write more than their share, if the tracker distinguishes vCPUs (`ring`).
    /// Otherwise all vCPUs.
    Writers,
}

/// Limit of the bandwidth while the guest is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchoverBandwidth {
    /// No limit.
    Unlimited,
    /// Bytes per second, above or below [`Settings::max_bandwidth`]. If the passes reached that
    /// limit, the predicted downtime assumes this value, because the operator knows the link.
    AtMost(u64),
}

/// Settings of a migration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Moment at which the guest moves to the target.
    pub mode: MigrationMode,
    /// Number of channels for pages.
    pub channels: u16,
    /// Number of channels for requested pages. They are opened if the guest may be handed over
    /// before its memory has arrived.
    pub urgent_channels: u16,
    /// True if the host measures round trips to pace the bulk channels in postcopy.
    pub probe: bool,
    /// Downtime limit.
    pub downtime_limit: Duration,
    /// Limit of passes, in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// Limit that holds instead while the guest is paused.
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// Time after which `on_timeout` is performed.
    pub timeout: Option<Duration>,
    /// Action taken when `timeout` expires.
    pub on_timeout: OnTimeout,
    /// vCPUs that may be throttled.
    pub auto_converge: AutoConverge,
    /// Decisions that the migration may make by itself. `None` for none.
    pub auto: Option<Auto>,
    /// True if every page's digest is compared while the guest is paused.
    pub verify: bool,
    /// Longest silence of the peer.
    pub peer_timeout: Duration,
    /// Time for which the source tries to open a lost link again in postcopy.
    pub reconnect_for: Duration,
    /// True if there is an arbiter.
    pub arbiter: bool,
}

impl Settings {
    /// Maximum number of channels of a kind.
    pub const MAX_CHANNELS: u16 = 64;

    /// Returns true if the guest may run on the target before all of its memory has arrived.
    pub fn may_hand_over(&self) -> bool {
        self.mode != MigrationMode::Precopy
            || self.on_timeout == OnTimeout::Postcopy
            || self.auto.as_ref().is_some_and(|auto| auto.postcopy)
    }

    /// Returns the mode for the message to the target.
    pub(crate) fn wire_mode(&self) -> Mode {
        match self.mode {
            MigrationMode::Postcopy => Mode::Postcopy,
            _ if self.may_hand_over() => Mode::Hybrid,
            _ => Mode::Precopy,
        }
    }

    /// Returns true if round trips are measured.
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
        }
    }
}
