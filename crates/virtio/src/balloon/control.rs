//! Control of the balloon by threads other than those of the vCPUs.

use super::extension::Published;
use super::metrics::{BalloonFigures, Metrics, add};
use super::stats::GuestStats;
use super::{BalloonHost, BalloonOptions, Dropped, Why, feature};
use crate::runs::{BadRange, GuestRun};
use crate::signals::Signals;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use vmferry_core::Layout;

/// Command about hints: the guest stops hinting, and keeps the hinted pages out of use (5.5.6.4).
pub(super) const STOP: u32 = 0;
/// Command about hints: the request is over, and the guest may use the hinted pages.
pub(super) const DONE: u32 = 1;
/// First ID of a request for hints.
pub(super) const FIRST: u32 = 2;

/// Error that a request for hints returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HintError {
    /// The guest has no driver that is ready, or its driver does not support hints.
    #[error("the guest's driver gives no hints about free pages")]
    NoDriver,
}

/// State that the device shares with [`BalloonControl`]. Locks are held only for a copy, never
/// while guest memory is touched.
#[derive(Debug)]
pub(super) struct BalloonState {
    pub(super) layout: Layout,
    pub(super) host: Arc<dyn BalloonHost>,
    pub(super) signals: Arc<Signals>,
    pub(super) metrics: Metrics,
    /// Accepted features 0 to 63, and 64 to 127. Both are 0 while no driver is ready.
    features: [AtomicU64; 2],
    /// Number of pages that the host requests the balloon to have.
    pub(super) target: AtomicU32,
    /// Number of pages in the balloon, as the driver reports.
    pub(super) actual: AtomicU32,
    /// Command to the driver about hints: [`STOP`], [`DONE`], or the ID of a request.
    pub(super) command: AtomicU32,
    /// ID of the latest request for hints.
    pub(super) hint_request: AtomicU32,
    pub(super) poison: AtomicU32,
    pub(super) stats_wanted: AtomicBool,
    /// True if the device drops reported pages. Only the host changes this value.
    pub(super) reporting: AtomicBool,
    stats: Mutex<GuestStats>,
    stats_at: Mutex<Option<SystemTime>>,
    /// Latest time at which the driver put pages into the balloon, or the host requested a size.
    progress_at: Mutex<Instant>,
    pub(super) extension: Published,
}

impl BalloonState {
    pub(super) fn new(
        options: BalloonOptions,
        host: Arc<dyn BalloonHost>,
        signals: Arc<Signals>,
    ) -> Arc<Self> {
        Arc::new(Self {
            layout: options.layout,
            host,
            signals,
            metrics: Metrics::default(),
            features: Default::default(),
            target: AtomicU32::new(0),
            actual: AtomicU32::new(0),
            command: AtomicU32::new(STOP),
            hint_request: AtomicU32::new(STOP),
            poison: AtomicU32::new(0),
            stats_wanted: AtomicBool::new(false),
            reporting: AtomicBool::new(true),
            stats: Mutex::default(),
            stats_at: Mutex::default(),
            progress_at: Mutex::new(Instant::now()),
            extension: Published::new(options.ram),
        })
    }

    pub(super) fn features(&self) -> u128 {
        let half = |half: &AtomicU64| u128::from(half.load(Ordering::Acquire));
        half(&self.features[0]) | half(&self.features[1]) << 64
    }

    pub(super) fn set_features(&self, features: u128) {
        let [low, high] = [features & u128::from(u64::MAX), features >> 64];
        for (half, bits) in self.features.iter().zip([low, high]) {
            half.store(u64::try_from(bits).unwrap_or(0), Ordering::Release);
        }
    }

    pub(super) fn has(&self, bit: u32) -> bool {
        self.features() >> bit & 1 == 1
    }

    pub(super) fn set_stats(&self, stats: GuestStats) {
        *lock(&self.stats) = stats;
        *lock(&self.stats_at) = (stats != GuestStats::default()).then(SystemTime::now);
    }

    pub(super) fn stats(&self) -> GuestStats {
        *lock(&self.stats)
    }

    /// Notes that the driver puts pages into the balloon, or that it has a new request to do so.
    pub(super) fn note_progress(&self) {
        *lock(&self.progress_at) = Instant::now();
    }

    /// Returns true if the guest relies on finding its poison in free pages. A poison of zeros is
    /// no obstacle, because a dropped page reads as zeros.
    pub(super) fn poisoned(&self) -> bool {
        self.has(feature::PAGE_POISON) && self.poison.load(Ordering::Acquire) != 0
    }

    pub(super) fn bad_range(&self, what: &'static str, why: BadRange) {
        tracing::debug!(?why, "a {what} of the guest's balloon driver is not in guest memory");
        match why {
            BadRange::Unaligned => add(&self.metrics.unaligned, 1),
            BadRange::Outside => add(&self.metrics.outside, 1),
        }
    }

    pub(super) fn malformed(&self, what: &'static str) {
        tracing::debug!("the guest's balloon driver sent malformed {what}");
        add(&self.metrics.malformed, 1);
    }

    /// Makes the host drop `runs`.
    pub(super) fn drop_pages(&self, why: Why, runs: &[GuestRun]) {
        if runs.is_empty() {
            return;
        }
        let pages = runs.iter().map(|run| run.run.count).sum();
        let began = Instant::now();
        match self.host.drop_pages(why, runs) {
            Ok(Dropped::Done) => add(&self.metrics.dropped_pages, pages),
            Ok(Dropped::Held) => add(&self.metrics.held_pages, pages),
            Err(error) => self.host_error(&error),
        }
        add(&self.metrics.drop_ns, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn host_error(&self, error: &super::HostError) {
        tracing::warn!(%error, "the host cannot take back pages of the guest");
        add(&self.metrics.host_errors, 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves the value consistent, because it is always replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handle with which other threads of the VMM control the balloon. No method waits for a request of
/// the guest that is being processed. Only methods with guest memory as an argument access guest
/// memory.
#[derive(Debug, Clone)]
pub struct BalloonControl {
    pub(super) shared: Arc<BalloonState>,
}

impl BalloonControl {
    /// Returns the features that the guest's driver accepted, or 0 if no driver is ready.
    #[must_use]
    pub fn features(&self) -> u128 {
        self.shared.features()
    }

    /// Returns true if the guest's driver accepted feature `bit`.
    #[must_use]
    pub fn has(&self, bit: u32) -> bool {
        self.shared.has(bit)
    }

    /// Returns the number of pages that the host requests the balloon to have.
    #[must_use]
    pub fn target(&self) -> u32 {
        self.shared.target.load(Ordering::Acquire)
    }

    /// Sets the number of pages that the balloon should have, which is limited to the number of the
    /// guest's pages. The call does not wait: the driver inflates or deflates the balloon at its
    /// own pace.
    pub fn set_target(&self, pages: u32) {
        let most = u32::try_from(self.shared.layout.pages()).unwrap_or(u32::MAX);
        let pages = pages.min(most);
        if self.shared.target.swap(pages, Ordering::AcqRel) != pages {
            self.shared.note_progress();
            self.shared.signals.config_changed();
        }
    }

    /// Returns the number of pages in the balloon, as the driver reports.
    #[must_use]
    pub fn actual(&self) -> u32 {
        self.shared.actual.load(Ordering::Acquire)
    }

    /// Returns true if the device drops the pages that the guest reports as unused.
    #[must_use]
    pub fn reporting(&self) -> bool {
        self.shared.reporting.load(Ordering::Acquire)
    }

    /// Sets whether the device drops the pages that the guest reports as unused.
    ///
    /// The driver cannot see the change, because a feature bit is accepted only once. While
    /// reporting is off, the device returns each report at once and keeps its pages. A report that
    /// a vCPU is sending during this call may still be dropped. A driver that has reported a page
    /// does not report the page again before it was in use.
    pub fn set_reporting(&self, on: bool) {
        self.shared.reporting.store(on, Ordering::Release);
    }

    /// Returns the time for which the driver has put no page into the balloon although the balloon
    /// is smaller than requested. Returns `None` if the balloon is large enough, or if no driver is
    /// ready.
    ///
    /// A driver that is short of memory keeps its pages and tries again later. A time of more than
    /// a second therefore means that the guest cannot give up more memory.
    #[must_use]
    pub fn unmet_for(&self) -> Option<Duration> {
        let unmet = self.features() != 0 && self.actual() < self.target();
        unmet.then(|| lock(&self.shared.progress_at).elapsed())
    }

    /// Returns the value with which the driver fills free pages, or `None` if it has not accepted
    /// [`PAGE_POISON`](feature::PAGE_POISON).
    #[must_use]
    pub fn poison(&self) -> Option<u32> {
        self.has(feature::PAGE_POISON).then(|| self.shared.poison.load(Ordering::Acquire))
    }

    /// Returns the guest's latest statistics.
    #[must_use]
    pub fn stats(&self) -> GuestStats {
        self.shared.stats()
    }

    /// Makes the device request new statistics from the guest the next time that the statistics
    /// queue is [served](crate::mmio::MmioTransport::notify). Returns the index of that queue, or
    /// `None` if the guest does not report statistics.
    #[must_use]
    pub fn want_stats(&self) -> Option<u16> {
        let wanted = self.has(feature::STATS);
        self.shared.stats_wanted.store(wanted, Ordering::Release);
        wanted.then_some(super::device::STATS_QUEUE)
    }

    /// Returns the time at which the latest statistics arrived, or `None` if none have arrived in
    /// this process.
    #[must_use]
    pub fn stats_at(&self) -> Option<SystemTime> {
        *lock(&self.shared.stats_at)
    }

    /// Returns the counters.
    #[must_use]
    pub fn figures(&self) -> BalloonFigures {
        self.shared.metrics.figures()
    }

    /// Asks the guest which pages are free, and returns the ID of the request.
    /// [`BalloonHost::hinted`] receives the hints with this ID as they arrive. An earlier request
    /// ends.
    ///
    /// A hint means that the guest does not need the content that a page had before this call. It
    /// says nothing about later writes to the page. Therefore a migration that skips hinted pages
    /// must start to track writes before this call.
    ///
    /// # Errors
    /// Returns an error if the guest's driver does not support hints.
    pub fn request_hints(&self) -> Result<u32, HintError> {
        if !self.has(feature::FREE_PAGE_HINT) {
            return Err(HintError::NoDriver);
        }
        let next = |last: u32| Some(last.wrapping_add(1).max(FIRST));
        let hint_request = &self.shared.hint_request;
        let last =
            hint_request.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or_else(|last| last);
        let command = last.wrapping_add(1).max(FIRST);
        self.command(command);
        Ok(command)
    }

    /// Ends the current request. The guest keeps the hinted pages out of use until
    /// [`done`](Self::done).
    pub fn stop(&self) {
        if self.shared.command.load(Ordering::Acquire) >= FIRST {
            self.command(STOP);
        }
    }

    /// Ends the current request, and lets the guest use all of its pages again. Does nothing if
    /// there is no request.
    pub fn done(&self) {
        if self.shared.hint_request.load(Ordering::Acquire) >= FIRST
            && self.shared.command.load(Ordering::Acquire) != DONE
        {
            self.command(DONE);
        }
    }

    fn command(&self, command: u32) {
        self.shared.command.store(command, Ordering::Release);
        self.shared.signals.config_changed();
    }
}
