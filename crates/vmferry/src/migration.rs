//! A migration, as a VMM asks for it.

use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{SourceVm, TrackerKind};
#[cfg(feature = "tls")]
use vmferry_engine::Tls;
use vmferry_engine::fence::Arbiter;
use vmferry_engine::{
    AutoConverge, Connect, MigrateError, MigrationMode, Monitor, OnTimeout, Report, Settings, Sockets, Uri,
    migrate,
};

/// A migration to one target. [`run`](Self::run) moves the guest.
///
/// Whatever is not set has the default of [`Settings`].
#[derive(Debug, Clone)]
#[must_use = "a migration does nothing before it runs"]
pub struct Migration {
    connector: Arc<dyn Connect>,
    settings: Settings,
    tracker: Option<TrackerKind>,
    monitor: Arc<Monitor>,
}

impl Migration {
    /// A migration to the target that listens at `uri`.
    pub fn to(uri: Uri) -> Self {
        Self::through(uri)
    }

    /// A migration over connections that `connector` makes.
    pub fn through(connector: impl Connect + 'static) -> Self {
        let connector = Arc::new(connector);
        Self { connector, settings: Settings::default(), tracker: None, monitor: Arc::default() }
    }

    /// A migration over connected sockets: one socket that carries all channels, or one for each
    /// channel.
    pub fn over(sockets: Sockets) -> Self {
        Self::through(sockets)
    }

    /// Replaces all settings.
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Moment at which the guest changes sides.
    pub fn mode(self, mode: MigrationMode) -> Self {
        self.set(|settings| settings.mode = mode)
    }

    /// Longest downtime for which the guest is stopped.
    pub fn downtime_limit(self, limit: Duration) -> Self {
        self.set(|settings| settings.downtime_limit = limit)
    }

    /// Number of parallel channels for pages, 1 to [`Settings::MAX_CHANNELS`].
    pub fn channels(self, channels: u16) -> Self {
        self.set(|settings| settings.channels = channels)
    }

    /// Limit in bytes per second, of all channels together.
    pub fn max_bandwidth(self, bytes_per_second: u64) -> Self {
        self.set(|settings| settings.max_bandwidth = Some(bytes_per_second))
    }

    /// Action taken when the migration takes longer than `timeout`.
    pub fn timeout(self, timeout: Duration, then: OnTimeout) -> Self {
        self.set(|settings| (settings.timeout, settings.on_timeout) = (Some(timeout), then))
    }

    /// Which vCPUs may be slowed if the guest dirties faster than the link carries.
    pub fn auto_converge(self, which: AutoConverge) -> Self {
        self.set(|settings| settings.auto_converge = which)
    }

    /// Compares every page's digest on both sides while the guest is paused.
    pub fn verify(self, verify: bool) -> Self {
        self.set(|settings| settings.verify = verify)
    }

    /// Longest silence of the target.
    pub fn peer_timeout(self, timeout: Duration) -> Self {
        self.set(|settings| settings.peer_timeout = timeout)
    }

    /// Encrypts all channels, to a target that `tls` trusts.
    #[cfg(feature = "tls")]
    pub fn tls(self, tls: Tls) -> Self {
        self.set(|settings| settings.tls = Some(tls))
    }

    /// Permits plain connections to other hosts, which anyone on the way can read and change.
    pub fn insecure(self) -> Self {
        self.set(|settings| settings.insecure = true)
    }

    /// Decides who owns the guest where neither side can know. The target must have the same.
    pub fn arbiter(self, arbiter: Arc<dyn Arbiter>) -> Self {
        self.set(|settings| settings.fence = Some(arbiter))
    }

    /// Tracker of dirty pages. Without it, the VM chooses.
    pub fn tracker(self, kind: TrackerKind) -> Self {
        Self { tracker: Some(kind), ..self }
    }

    /// Returns what another thread needs to watch this migration, or to cancel it.
    #[must_use]
    pub fn monitor(&self) -> Arc<Monitor> {
        Arc::clone(&self.monitor)
    }

    /// Moves the guest of `vm`, and blocks until that has ended.
    ///
    /// [`Report::ended`] says who owns the guest.
    ///
    /// # Errors
    /// If nothing was begun: the target cannot be reached, it does not accept the connection, or the settings
    /// are impossible. The guest has not noticed. A target that refuses the guest, such as for its machine,
    /// is reported as [`Ended::Failed`](crate::Ended::Failed).
    pub fn run(self, vm: &mut dyn SourceVm) -> Result<Report, MigrateError> {
        migrate(vm, &*self.connector, self.tracker, &self.settings, &self.monitor)
    }
}
