//! Settings of a migration, as far as the session has to know them.

use super::course::Auto;
use std::time::Duration;
use vmferry_wire::Mode;

/// Action taken when a migration takes longer than its timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnTimeout {
    /// The migration is cancelled, and the guest stays.
    #[default]
    Cancel,
    /// The guest is stopped and the rest is sent, whatever time that takes.
    Switch,
    /// The guest runs on the target, and the rest is sent after that.
    Postcopy,
}

/// Moment at which the guest changes sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MigrationMode {
    /// After its memory was sent.
    #[default]
    Precopy,
    /// At once, or as soon as its I/O comes to rest. Its memory follows, requested pages first.
    Postcopy,
    /// After as many passes over its memory as are worth while. If the downtime would then be too long,
    /// the rest follows in postcopy.
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

/// Which vCPUs are slowed if the guest dirties faster than the link carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoConverge {
    /// None.
    #[default]
    Off,
    /// All vCPUs alike.
    All,
    /// The vCPUs that write more than their share, where the tracker can tell vCPUs apart (`ring`).
    /// Otherwise all.
    Writers,
}

/// Limit of the bandwidth while the guest is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchoverBandwidth {
    /// No limit.
    Unlimited,
    /// Bytes per second, above or below [`Settings::max_bandwidth`]. If the passes reached that limit,
    /// the predicted downtime assumes this one: the operator knows the link.
    AtMost(u64),
}

/// Settings of a migration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Moment at which the guest changes sides.
    pub mode: MigrationMode,
    /// Number of channels for pages.
    pub channels: u16,
    /// Number of channels for requested pages. They are opened if the guest may be handed over before
    /// its memory is there.
    pub urgent_channels: u16,
    /// The host watches round trips to pace the bulk channels in postcopy.
    pub probe: bool,
    /// Longest downtime for which the guest is stopped.
    pub downtime_limit: Duration,
    /// Limit of passes, in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// Limit that holds instead while the guest is paused.
    pub switchover_bandwidth: Option<SwitchoverBandwidth>,
    /// Time after which `on_timeout` is done.
    pub timeout: Option<Duration>,
    /// Action taken when `timeout` expires.
    pub on_timeout: OnTimeout,
    /// Which vCPUs may be slowed.
    pub auto_converge: AutoConverge,
    /// Decisions that the migration may make by itself. `None` for none.
    pub auto: Option<Auto>,
    /// Compare every page's digest while the guest is paused.
    pub verify: bool,
    /// Longest silence of the peer.
    pub peer_timeout: Duration,
    /// Time for which the source tries to open a lost link again in postcopy.
    pub reconnect_for: Duration,
    /// There is an arbiter.
    pub arbiter: bool,
}

impl Settings {
    /// Largest number of channels of a kind.
    pub const MAX_CHANNELS: u16 = 64;

    /// Returns true if the guest may run on the target before all of its memory is there.
    pub fn may_hand_over(&self) -> bool {
        self.mode != MigrationMode::Precopy
            || self.on_timeout == OnTimeout::Postcopy
            || self.auto.as_ref().is_some_and(|auto| auto.postcopy)
    }

    /// Returns the mode as the target has to know it.
    pub(crate) fn wire_mode(&self) -> Mode {
        match self.mode {
            MigrationMode::Postcopy => Mode::Postcopy,
            _ if self.may_hand_over() => Mode::Hybrid,
            _ => Mode::Precopy,
        }
    }

    /// Returns true if round trips are watched.
    pub fn probes(&self) -> bool {
        self.may_hand_over() && self.probe
    }

    /// Returns the number of urgent channels to open.
    pub fn urgent_count(&self) -> u16 {
        if self.may_hand_over() { self.urgent_channels } else { 0 }
    }
}

impl Default for Settings {
    /// Precopy over two channels, with a downtime of at most 300 ms.
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
