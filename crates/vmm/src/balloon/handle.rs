//! Handle of the balloon, for threads other than those of the vCPUs.

use super::VmBalloon;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};
use vmferry_core::{Layout, PAGE_SHIFT, PageSet};
use vmferry_virtio::balloon::extension::{FEATURE_FREE_MAP, FEATURE_HYPERCALL, FEATURE_RANGES, MapError};
use vmferry_virtio::balloon::{BalloonFigures, GuestStats, HintError, feature};

/// Status of a balloon.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BalloonStatus {
    /// Size of the guest's memory with an empty balloon, in bytes.
    pub memory: u64,
    /// Memory that the guest should have, in bytes.
    pub target: u64,
    /// Memory that the guest has, in bytes, as its driver reports it.
    pub actual: u64,
    /// Time for which the guest has given up no memory although it has more than `target`. `None`
    /// if it has no more than `target`, or no driver.
    pub unmet: Option<Duration>,
    /// True if the guest has a driver for the balloon.
    pub driver: bool,
    /// True if the host takes back the pages that the guest reports as unused.
    pub reporting: bool,
    /// Features that the driver accepted, by name.
    pub features: Vec<&'static str>,
    /// Value with which the guest fills free pages, or `None` if the driver has not accepted the
    /// feature. If the value is not 0, the host keeps the pages that the guest reports.
    pub poison: Option<u32>,
    /// Latest statistics that the guest reported.
    pub stats: GuestStats,
    /// Time at which the statistics arrived, or `None` if none have arrived.
    pub stats_at: Option<SystemTime>,
    /// Counters of the balloon.
    pub figures: BalloonFigures,
    /// Number of hints that arrived when no request was waiting for them.
    pub late_hints: u64,
}

/// Hints that have arrived since the last call of [`BalloonHandle::take_hints`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hints {
    /// Number of hinted pages.
    pub pages: u64,
    /// True if the guest has no more hints.
    pub ended: bool,
}

/// Handle of a VM's balloon, for threads other than those of its vCPUs. No method waits for the
/// guest, or for a request of the guest that is being processed.
///
/// # Free pages, for a migration
/// *Hints* come from a driver that does not use the pages that it names (Linux, and the bare-metal
/// guest). To get them:
/// 1. Call [`request_hints`](Self::request_hints), which returns an ID.
/// 2. Call [`take_hints`](Self::take_hints) with this ID repeatedly.
/// 3. Call [`stop_hints`](Self::stop_hints) when no more hints are needed at present.
/// 4. Call [`end_hints`](Self::end_hints) at the end of the migration, whatever its result. Until
///    then, the guest does not use the named pages unless it runs out of other pages, and then it
///    writes to them first.
///
/// *The map* comes from a guest that keeps one. [`read_map`](Self::read_map) can be called at any
/// time. The guest may use these pages again at any time.
///
/// Hints and map have the same meaning: the page was free at some moment between the call and the
/// answer, and a guest that uses the page again writes to it first. Therefore a page may be skipped
/// only if writes to it have been tracked since *before* the call. The caller must ensure this.
///
/// After a migration, the target tells the guest that a request of the source is over. The caller
/// need not do this.
#[derive(Debug, Clone)]
pub struct BalloonHandle(pub(crate) Arc<VmBalloon>);

impl BalloonHandle {
    /// Returns the memory that the guest has, in bytes, as its driver reports it.
    #[must_use]
    pub fn actual(&self) -> u64 {
        self.without(self.0.control.actual())
    }

    /// Returns the size of the guest's memory without `pages` pages, in bytes.
    fn without(&self, pages: u32) -> u64 {
        (self.0.ram.layout().pages() << PAGE_SHIFT).saturating_sub(u64::from(pages) << PAGE_SHIFT)
    }

    /// Returns the status. While callers read the status, the guest is asked for statistics in
    /// every second, and otherwise every ten seconds, unless
    /// [`set_stats_interval`](Self::set_stats_interval) was called.
    #[must_use]
    pub fn status(&self) -> BalloonStatus {
        let control = &self.0.control;
        self.0.cadence.read();
        let names = [
            (feature::STATS, "stats"),
            (feature::DEFLATE_ON_OOM, "deflate-on-oom"),
            (feature::FREE_PAGE_HINT, "free-page-hint"),
            (feature::PAGE_POISON, "page-poison"),
            (feature::REPORTING, "reporting"),
            (FEATURE_RANGES, "ranges"),
            (FEATURE_FREE_MAP, "free-map"),
            (FEATURE_HYPERCALL, "hypercall"),
        ];
        BalloonStatus {
            memory: self.without(0),
            target: self.without(control.target()),
            actual: self.actual(),
            unmet: control.unmet_for(),
            driver: control.features() != 0,
            reporting: control.reporting(),
            features: names.into_iter().filter(|(bit, _)| control.has(*bit)).map(|(_, name)| name).collect(),
            poison: control.poison(),
            stats: control.stats(),
            stats_at: control.stats_at(),
            figures: control.figures(),
            late_hints: self.0.hints.late(),
        }
    }

    /// Sets the memory that the guest should have, in bytes. The value is rounded up to a page and
    /// limited to the size of the guest's memory. The call does not wait: the driver inflates or
    /// deflates the balloon at its own pace. A guest that is short of memory may take pages back.
    pub fn set_target(&self, bytes: u64) {
        let pages = self.0.ram.layout().pages().saturating_sub(bytes.div_ceil(1 << PAGE_SHIFT));
        self.0.control.set_target(u32::try_from(pages).unwrap_or(u32::MAX));
    }

    /// Sets whether the host takes back the pages that the guest reports as unused. The setting
    /// moves with the guest.
    ///
    /// While reporting is off, each report of the guest is answered at once, and its pages stay
    /// resident. A guest does not report these pages again before it has used them.
    pub fn set_reporting(&self, on: bool) {
        self.0.control.set_reporting(on);
    }

    /// Lowers the memory that the guest should have to `bytes`, until the guest is paused for a
    /// migration or [`end_squeeze`](Self::end_squeeze) is called. The call has no effect if the
    /// guest should have less memory already.
    ///
    /// The pause restores the earlier target before the state of the balloon is saved. Therefore
    /// the guest has its earlier target on the target, and also if it resumes on the source.
    pub fn squeeze(&self, bytes: u64) {
        let mut before = self.0.before_squeeze.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.0.control.target();
        let pages = self.0.ram.layout().pages().saturating_sub(bytes.div_ceil(1 << PAGE_SHIFT));
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        if pages > current {
            before.get_or_insert(current);
            self.0.control.set_target(pages);
        }
    }

    /// Ends a squeeze, if one is in effect: the guest should have as much memory as before.
    pub fn end_squeeze(&self) {
        self.0.end_squeeze();
    }

    /// Returns the present interval at which the guest is asked for statistics, in seconds. 0 means
    /// never.
    #[must_use]
    pub fn stats_interval(&self) -> u32 {
        self.0.cadence.interval()
    }

    /// Sets the interval at which the guest is asked for statistics, in seconds, whether callers
    /// read the statistics or not. 0 means never.
    pub fn set_stats_interval(&self, seconds: u32) {
        self.0.cadence.set(seconds);
    }

    /// Returns the layout of the guest's memory.
    pub(crate) fn layout(&self) -> &Layout {
        self.0.ram.layout()
    }

    /// Returns true if the guest reads pages that it has freed before it writes them, to find its
    /// poison or zeros.
    #[must_use]
    pub fn relies_on_free_pages(&self) -> bool {
        self.0.control.has(feature::PAGE_POISON)
    }

    /// Returns true if the guest names its free pages on request.
    #[must_use]
    pub fn gives_hints(&self) -> bool {
        self.0.control.has(feature::FREE_PAGE_HINT)
    }

    /// Asks the guest for its free pages, and returns the ID of the request. An earlier request
    /// ends, and its hints are dropped.
    ///
    /// # Errors
    /// Returns an error if the guest's driver does not support hints.
    pub fn request_hints(&self) -> Result<u32, HintError> {
        self.0.hints.begin(|| self.0.control.request_hints())
    }

    /// Adds the pages that the guest has named for the request `command` since the last call to
    /// `into`, a set with the guest's layout. Returns `None` if `command` is not the current
    /// request.
    ///
    /// # Panics
    /// Panics if `into` has another layout.
    #[must_use]
    pub fn take_hints(&self, command: u32, into: &mut PageSet) -> Option<Hints> {
        self.0.hints.take(command, into).map(|(pages, ended)| Hints { pages, ended })
    }

    /// Ends the current request. Hints that still arrive are dropped. The guest does not use the
    /// named pages until the next request or [`end_hints`](Self::end_hints).
    pub fn stop_hints(&self) {
        self.0.hints.close();
        self.0.control.stop();
    }

    /// Lets the guest use all of its pages again. Does nothing if there was no request.
    pub fn end_hints(&self) {
        self.0.hints.close();
        self.0.control.done();
    }

    /// Returns true if the guest keeps a map of its free pages that fits its memory.
    #[must_use]
    pub fn keeps_map(&self) -> bool {
        self.0.control.check_map(self.0.ram.map()).is_ok()
    }

    /// Adds the pages that the guest's map marks as free to `free`, a set with the guest's layout.
    /// Returns the number of these pages. The call takes about 0.1 ms for each GiB of guest memory
    /// that is mostly free.
    ///
    /// # Errors
    /// Returns an error if the guest keeps no map, if its map does not fit its memory, or if pages
    /// are missing.
    pub fn read_map(&self, free: &mut PageSet) -> Result<u64, MapError> {
        // A thread that reads a missing page would sleep (hazards.md 18).
        let read = self.0.paging.if_complete(|| self.0.control.read_map(self.0.ram.map(), free));
        read.unwrap_or(Err(MapError::Elsewhere))
    }
}
