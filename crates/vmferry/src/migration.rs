//! Builder for a migration.

use std::sync::Arc;
use std::time::Duration;
use vmferry_core::{SourceVm, TrackerKind};
#[cfg(feature = "tls")]
use vmferry_engine::Tls;
use vmferry_engine::arbiter::Arbiter;
use vmferry_engine::{
    AutoConverge, Connect, MigrateError, MigrationHandle, MigrationMode, OnTimeout, Report, Settings,
    Sockets, Uri, migrate,
};

/// Migration of a guest to one target. [`run`](Self::run) performs the migration.
///
/// Every setting has the default of [`Settings`] until a method changes it.
#[derive(Debug, Clone)]
#[must_use = "a migration does nothing before it runs"]
pub struct Migration {
    connector: Arc<dyn Connect>,
    settings: Settings,
    tracker: Option<TrackerKind>,
    handle: Arc<MigrationHandle>,
}

impl Migration {
    /// Creates a migration to the target that listens at `uri`.
    pub fn to(uri: Uri) -> Self {
        Self::through(uri)
    }

    /// Creates a migration over connections that `connector` creates.
    pub fn through(connector: impl Connect + 'static) -> Self {
        let connector = Arc::new(connector);
        Self { connector, settings: Settings::default(), tracker: None, handle: Arc::default() }
    }

    /// Creates a migration over connected sockets: one socket that carries all channels, or one for
    /// each channel.
    pub fn over(sockets: Sockets) -> Self {
        Self::through(sockets)
    }

    /// Replaces all settings, including those that were changed before.
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Sets the migration mode, which decides whether the guest moves before or after its memory:
    /// precopy (the default), postcopy or hybrid.
    pub fn mode(self, mode: MigrationMode) -> Self {
        self.set(|settings| settings.mode = mode)
    }

    /// Hands the guest to a target on the same host without copying its memory:
    /// [`MigrationMode::Local`]. The VM must implement [`SourceVm::share_memory`], and the target
    /// [`TargetVm::take_memory`](vmferry_core::TargetVm::take_memory). The target is reached over a
    /// Unix socket, and accepts memory only with
    /// [`Arrival::local_memory`](vmferry_engine::Arrival::local_memory).
    pub fn handoff(self) -> Self {
        self.mode(MigrationMode::Local)
    }

    /// Sets the largest acceptable downtime. The source pauses the guest for the switchover once
    /// the predicted downtime is within `limit`. Default: 300 ms.
    pub fn downtime_limit(self, limit: Duration) -> Self {
        self.set(|settings| settings.downtime_limit = limit)
    }

    /// Sets the number of parallel bulk channels, 1 to [`Settings::MAX_CHANNELS`]. Default: 2.
    /// All of them send all the time.
    pub fn channels(self, channels: u16) -> Self {
        self.set(|settings| (settings.channels, settings.adapt_channels) = (channels, false))
    }

    /// Uses one bulk channel for each processor of the host, from 1 to 4. While the guest runs,
    /// only as many of them send as there are processors that the guest leaves idle, or up to
    /// two if there are none: [`Settings::adapt_channels`].
    pub fn adapting_channels(self) -> Self {
        let channels = Settings::usual_channels();
        self.set(|settings| (settings.channels, settings.adapt_channels) = (channels, true))
    }

    /// Sets the bandwidth limit of all channels together, in bytes per second. Default: no limit.
    pub fn max_bandwidth(self, bytes_per_second: u64) -> Self {
        self.set(|settings| settings.max_bandwidth = Some(bytes_per_second))
    }

    /// Sets the maximum duration of the migration, and the action taken when `timeout` expires.
    /// Default: no maximum.
    pub fn timeout(self, timeout: Duration, then: OnTimeout) -> Self {
        self.set(|settings| (settings.timeout, settings.on_timeout) = (Some(timeout), then))
    }

    /// Sets the vCPUs that may be throttled if the guest dirties pages faster than the link can
    /// carry them. Default: none.
    pub fn auto_converge(self, which: AutoConverge) -> Self {
        self.set(|settings| settings.auto_converge = which)
    }

    /// Sets whether the digest of every page is compared between source and target. Pages are
    /// compared while the guest is paused. In postcopy, each missing page is compared when it
    /// arrives. Default: false.
    pub fn verify(self, verify: bool) -> Self {
        self.set(|settings| settings.verify = verify)
    }

    /// Sets the time without a message after which the target is considered lost. Default: 10 s.
    pub fn peer_timeout(self, timeout: Duration) -> Self {
        self.set(|settings| settings.peer_timeout = timeout)
    }

    /// Encrypts all channels. `tls` decides which targets are trusted.
    #[cfg(feature = "tls")]
    pub fn tls(self, tls: Tls) -> Self {
        self.set(|settings| settings.tls = Some(tls))
    }

    /// Permits unencrypted connections to other hosts. Every host on the network path can then read
    /// and change the data.
    pub fn insecure(self) -> Self {
        self.set(|settings| settings.insecure = true)
    }

    /// Sets the arbiter that decides which host owns the guest if neither source nor target can
    /// know. The target must use the same arbiter.
    pub fn arbiter(self, arbiter: Arc<dyn Arbiter>) -> Self {
        self.set(|settings| settings.arbiter = Some(arbiter))
    }

    /// Sets the kind of dirty page tracker. Without this setting, the VM chooses the kind.
    pub fn tracker(self, kind: TrackerKind) -> Self {
        Self { tracker: Some(kind), ..self }
    }

    /// Returns the handle with which another thread can watch or cancel this migration.
    #[must_use]
    pub fn handle(&self) -> Arc<MigrationHandle> {
        Arc::clone(&self.handle)
    }

    /// Moves the guest of `vm`, and blocks until the migration has ended. Afterwards,
    /// [`Report::ended`] says which host owns the guest.
    ///
    /// # Errors
    /// Returns an error if the migration did not begin, because the settings are invalid, the VM
    /// does not provide the tracker, or the target cannot be reached or does not accept the
    /// connection. The guest is not affected. If the target accepts the connection but refuses the
    /// guest, for example because its machine differs, the report says
    /// [`Ended::Failed`](crate::Ended::Failed).
    pub fn run(self, vm: &mut dyn SourceVm) -> Result<Report, MigrateError> {
        migrate(vm, &*self.connector, self.tracker, &self.settings, &self.handle)
    }
}
