//! The balloon, for other threads than the vCPUs'.

use super::VmBalloon;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;
use vmferry_core::{Layout, PAGE_SHIFT, PageSet};
use vmferry_virtio::balloon::extension::{FEATURE_FREE_MAP, FEATURE_HYPERCALL, FEATURE_RANGES, MapError};
use vmferry_virtio::balloon::{AskError, BalloonFigures, GuestStats, feature};

/// How a balloon is doing.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BalloonStatus {
    /// The guest's memory with an empty balloon, in bytes.
    pub memory: u64,
    /// How much of it the guest is to have, in bytes.
    pub target: u64,
    /// How much it has, in bytes, as its driver says.
    pub actual: u64,
    /// Whether the guest has a driver for it.
    pub driver: bool,
    /// Features that the driver accepted, by name.
    pub features: Vec<&'static str>,
    /// The guest's latest statistics.
    pub stats: GuestStats,
    /// When they came; `None` if none have come.
    pub stats_at: Option<SystemTime>,
    /// What happened so far.
    pub figures: BalloonFigures,
    /// Hints that came when nobody waited for them any more.
    pub late_hints: u64,
}

/// What was hinted since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hints {
    /// How many pages.
    pub pages: u64,
    /// The guest has no more of them.
    pub ended: bool,
}

/// A VM's balloon, for threads other than its vCPUs': none of the methods waits for the guest, nor for a request of it that is being
/// processed.
///
/// # Free pages, for a migration
/// *Hints*, from a driver that isolates what it names (Linux, and the bare-metal guest): [`ask_hints`](Self::ask_hints) gives an id,
/// then [`take_hints`](Self::take_hints) again and again, then [`stop_hints`](Self::stop_hints) if that is enough for now, and at the
/// end of the migration, however it ends, [`end_hints`](Self::end_hints): until then the guest does not use the pages that it named,
/// unless it runs out of others, when it writes them first. *The map*, from a guest that keeps one: [`read_map`](Self::read_map) any
/// time; those pages are not isolated.
///
/// What both promise: at some moment between the call and the answer the page was free, and a guest that uses it again writes it first.
/// So a page may be left out if writes to it have been tracked since *before* the call. That is for the caller to see to.
///
/// The target of a migration tells the guest by itself that a request of its source is over.
#[derive(Debug, Clone)]
pub struct BalloonHandle(pub(crate) Arc<VmBalloon>);

impl BalloonHandle {
    /// How it is doing.
    #[must_use]
    pub fn status(&self) -> BalloonStatus {
        let control = &self.0.control;
        let memory = self.0.ram.layout().pages() << PAGE_SHIFT;
        let less = |pages: u32| memory.saturating_sub(u64::from(pages) << PAGE_SHIFT);
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
            memory,
            target: less(control.target()),
            actual: less(control.actual()),
            driver: control.features() != 0,
            features: names.into_iter().filter(|(bit, _)| control.has(*bit)).map(|(_, name)| name).collect(),
            stats: control.stats(),
            stats_at: control.stats_at(),
            figures: control.figures(),
            late_hints: self.0.hints.late(),
        }
    }

    /// Lets the guest have `bytes` of its memory, rounded up to a page, at most all. It gets there when it can; what it is short of then
    /// it may take back.
    pub fn set_target(&self, bytes: u64) {
        let pages = self.0.ram.layout().pages().saturating_sub(bytes.div_ceil(1 << PAGE_SHIFT));
        self.0.control.set_target(u32::try_from(pages).unwrap_or(u32::MAX));
    }

    /// How often the guest is asked for statistics, in seconds; 0 for never.
    #[must_use]
    pub fn stats_interval(&self) -> u32 {
        self.0.every.load(Ordering::Relaxed)
    }

    /// Has the guest asked for statistics every so many seconds from now on; 0 for never.
    pub fn set_stats_interval(&self, seconds: u32) {
        self.0.every.store(seconds, Ordering::Relaxed);
    }

    /// The guest's memory.
    pub(crate) fn layout(&self) -> &Layout {
        self.0.ram.layout()
    }

    /// Whether the guest reads pages that it has freed before it writes them: to find its poison there, or zeros.
    #[must_use]
    pub fn relies_on_free_pages(&self) -> bool {
        self.0.control.has(feature::PAGE_POISON)
    }

    /// Whether the guest names its free pages when it is asked.
    #[must_use]
    pub fn gives_hints(&self) -> bool {
        self.0.control.has(feature::FREE_PAGE_HINT)
    }

    /// Asks the guest for its free pages; gives the id of this request. A request under way is over, and its hints are gone.
    ///
    /// # Errors
    /// If its driver gives none.
    pub fn ask_hints(&self) -> Result<u32, AskError> {
        self.0.hints.begin(|| self.0.control.ask())
    }

    /// Adds the pages that came for request `command` since this was last called to `into`, a set of the guest's layout. `None` if that
    /// request is not the one under way.
    ///
    /// # Panics
    /// If `into` is of another layout.
    #[must_use]
    pub fn take_hints(&self, command: u32, into: &mut PageSet) -> Option<Hints> {
        self.0.hints.take(command, into).map(|(pages, ended)| Hints { pages, ended })
    }

    /// Ends the request under way; hints that still come do not count. The guest leaves the pages that it named alone until the next
    /// request or [`end_hints`](Self::end_hints).
    pub fn stop_hints(&self) {
        self.0.hints.close();
        self.0.control.stop();
    }

    /// Lets the guest use all its pages again. Does nothing if it was never asked.
    pub fn end_hints(&self) {
        self.0.hints.close();
        self.0.control.done();
    }

    /// Whether the guest keeps a map of its free pages.
    #[must_use]
    pub fn keeps_map(&self) -> bool {
        self.0.control.map().is_some()
    }

    /// Adds the pages that are free by the guest's own map to `free`, a set of its layout; says how many there are. Takes about 0.1 ms
    /// for each GiB of guest memory that is mostly free.
    ///
    /// # Errors
    /// If it keeps none, its map does not fit its memory, or its memory is still coming from elsewhere.
    pub fn read_map(&self, free: &mut PageSet) -> Result<u64, MapError> {
        // Whoever read a page that has not come would sleep (hazards.md 18).
        let read = self.0.lazy.settled(|| self.0.control.read_map(self.0.ram.map(), free));
        read.unwrap_or(Err(MapError::Elsewhere))
    }
}
