//! The balloon, as other threads see it.

use super::extension::Published;
use super::metrics::{BalloonFigures, Metrics, add};
use super::stats::GuestStats;
use super::{BalloonHost, BalloonOptions, Dropped, Why, feature};
use crate::runs::{BadRange, GuestRun};
use crate::signals::Signals;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};
use vmferry_core::Layout;

/// Hints: stop, and keep the pages (5.5.6.4).
pub(super) const STOP: u32 = 0;
/// Hints: it is over, the pages are the guest's.
pub(super) const DONE: u32 = 1;
/// The first id of a request for hints.
pub(super) const FIRST: u32 = 2;

/// Reason for which the guest cannot be asked for hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// Its driver is not there, or knows no hints.
    #[error("the guest's driver gives no hints about free pages")]
    NoDriver,
}

/// State that the device shares with [`BalloonControl`]. Locks are held for a copy only, never while guest memory is
/// touched.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) layout: Layout,
    pub(super) host: Arc<dyn BalloonHost>,
    pub(super) signals: Arc<Signals>,
    pub(super) metrics: Metrics,
    /// Accepted features 0 to 63, and 64 to 127; zeros while no driver is ready.
    features: [AtomicU64; 2],
    /// Pages that the balloon is to have.
    pub(super) target: AtomicU32,
    /// Pages that it has, as the driver says.
    pub(super) actual: AtomicU32,
    /// What the driver is to do about hints: [`STOP`], [`DONE`], or a request.
    pub(super) command: AtomicU32,
    /// The request made last.
    pub(super) asked: AtomicU32,
    pub(super) poison: AtomicU32,
    pub(super) stats_wanted: AtomicBool,
    stats: Mutex<GuestStats>,
    stats_at: Mutex<Option<SystemTime>>,
    pub(super) extension: Published,
}

impl Shared {
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
            asked: AtomicU32::new(STOP),
            poison: AtomicU32::new(0),
            stats_wanted: AtomicBool::new(false),
            stats: Mutex::default(),
            stats_at: Mutex::default(),
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

    /// The guest relies on finding its poison in free pages. Zeros are what a dropped page reads as, so they are no obstacle.
    pub(super) fn poisoned(&self) -> bool {
        self.has(feature::PAGE_POISON) && self.poison.load(Ordering::Acquire) != 0
    }

    pub(super) fn bad_range(&self, what: &'static str, why: BadRange) {
        tracing::debug!(?why, "the guest's {what} is not in its memory");
        match why {
            BadRange::Unaligned => add(&self.metrics.unaligned, 1),
            BadRange::Outside => add(&self.metrics.outside, 1),
        }
    }

    pub(super) fn malformed(&self, what: &'static str) {
        tracing::debug!("the guest sent {what} that make no sense");
        add(&self.metrics.malformed, 1);
    }

    /// Has the host drop `runs`.
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
        tracing::warn!(%error, "the host does not take a guest's pages back");
        add(&self.metrics.host_errors, 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is in it is replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The balloon, as the VMM's other threads see it. No method waits for a request of the guest that is being processed, nor touches
/// guest memory, but for those that are given it.
#[derive(Debug, Clone)]
pub struct BalloonControl {
    pub(super) shared: Arc<Shared>,
}

impl BalloonControl {
    /// The features that the guest's driver accepted; 0 while there is none.
    #[must_use]
    pub fn features(&self) -> u128 {
        self.shared.features()
    }

    /// Returns true if the guest's driver accepted feature `bit`.
    #[must_use]
    pub fn has(&self, bit: u32) -> bool {
        self.shared.has(bit)
    }

    /// Returns the number of pages that the balloon is to have.
    #[must_use]
    pub fn target(&self) -> u32 {
        self.shared.target.load(Ordering::Acquire)
    }

    /// Sets how many pages the balloon is to have, at most those that there are. The driver gets there when it can.
    pub fn set_target(&self, pages: u32) {
        let most = u32::try_from(self.shared.layout.pages()).unwrap_or(u32::MAX);
        let pages = pages.min(most);
        if self.shared.target.swap(pages, Ordering::AcqRel) != pages {
            self.shared.signals.config_changed();
        }
    }

    /// Returns the number of pages that it has, as the driver says.
    #[must_use]
    pub fn actual(&self) -> u32 {
        self.shared.actual.load(Ordering::Acquire)
    }

    /// The guest's latest statistics.
    #[must_use]
    pub fn stats(&self) -> GuestStats {
        self.shared.stats()
    }

    /// Lets the statistics queue, when it is [served](crate::mmio::MmioTransport::notify) next, ask the guest for new ones; gives the
    /// index of that queue, if the guest has statistics.
    #[must_use]
    pub fn want_stats(&self) -> Option<u16> {
        let wanted = self.has(feature::STATS);
        self.shared.stats_wanted.store(wanted, Ordering::Release);
        wanted.then_some(super::device::STATS_QUEUE)
    }

    /// Returns the time at which statistics came last; `None` if none have come here yet.
    #[must_use]
    pub fn stats_at(&self) -> Option<SystemTime> {
        *lock(&self.shared.stats_at)
    }

    /// Returns the figures so far.
    #[must_use]
    pub fn figures(&self) -> BalloonFigures {
        self.shared.metrics.figures()
    }

    /// Asks the guest which pages are free. The host is [told](BalloonHost::hinted) as they come, with the id given here. A request
    /// under way is over.
    ///
    /// What was written to a page since this call counts; what was in it before does not. So a migration that skips hinted pages tracks writes
    /// before it asks.
    ///
    /// # Errors
    /// If its driver cannot answer.
    pub fn ask(&self) -> Result<u32, AskError> {
        if !self.has(feature::FREE_PAGE_HINT) {
            return Err(AskError::NoDriver);
        }
        let next = |last: u32| Some(last.wrapping_add(1).max(FIRST));
        let asked = &self.shared.asked;
        let last = asked.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or_else(|last| last);
        let command = last.wrapping_add(1).max(FIRST);
        self.command(command);
        Ok(command)
    }

    /// Ends the request under way; the guest keeps the pages that it hinted out of use until [`done`](Self::done).
    pub fn stop(&self) {
        if self.shared.command.load(Ordering::Acquire) >= FIRST {
            self.command(STOP);
        }
    }

    /// Ends the request under way; the guest uses all its pages again. Does nothing without a request.
    pub fn done(&self) {
        if self.shared.asked.load(Ordering::Acquire) >= FIRST
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
