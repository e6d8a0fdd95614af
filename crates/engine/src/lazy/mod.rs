//! Pages that come while the guest runs: which are lacking, who waits for them, and how long. Where they come from is the
//! affair of an [`Origin`]: a link to the source of the migration (`target::lazy`), or a file (`snapshot::fill`).
//!
//! # One page's way
//! Somebody touches a page that is not there; the fault thread of its stripe reads the fault. If the page is lacking, the
//! thread notes who waits since when and has the origin bring the page, once; if not, the page is known to be zero, or came
//! in between. Over a link it is asked for, and whatever channel it then comes on, its content is staged; out of a file the
//! fault thread reads it itself. Either way it is compared with its digest, placed, and only then taken off the set of
//! lacking pages. A page that comes as zero is not placed at all unless somebody waits for it: it is only taken off the
//! set, and a later fault is answered here.
//!
//! # Why nobody waits for ever
//! The fault thread writes down the waiter and then looks whether the page still lacks; whoever brings a page takes it off the
//! set and then looks for waiters. Both with a full fence between, so at least one of them sees the other: the fault
//! thread a page that is no longer lacking, or the bringer a waiter. A page with content was placed before either looked,
//! and placing wakes by itself; for a page of zeros whoever sees the other places it. Of several threads that could bring a
//! page one does, by the bit that says it is on its way, and finds whoever waits by then.
//!
//! # Units
//! Where the guest runs on huge pages, a page that came cannot be seen before the others of its huge page: the unit
//! ([`LazyMemory::unit_pages`]). A fault is then on a unit, and has all brought that lacks of it. All of the above holds for
//! the unit: it lacks while any page of it does, zeros are placed like contents, and who takes the last page off the set
//! looks for waiters. With units of one page it is the same thing.
//!
//! # Each page once
//! An origin gives each page out once, so none comes twice. If one does all the same it is left as it is, because placing
//! never overwrites, and counted.

// What a peer or the host says must not panic a thread of the engine. Tests may.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod ahead;
mod faults;
mod latency;
mod place;
mod waiters;

pub(crate) use faults::{again_after_panics, serve_faults};

use crate::sync::{AtomicBitmap, AtomicBool, AtomicU64, ClaimBitmap, fence};
use latency::Latencies;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{Layout, LazyMemory, PageIndex, PageRun, PageSet, RegionId, VmError};
use vmferry_wire::LazyFigures;
use waiters::Waiters;

/// Where pages come from.
pub(crate) trait Origin: Debug + Send + Sync + Sized {
    /// What each fault thread has of its own: buffers.
    type Hands;

    /// For one more fault thread.
    fn hands(&self) -> Self::Hands;

    /// Somebody waits for `place`, and is written down: it is brought at once, and so is what lacks of its unit, unless it is
    /// on its way already. The `ahead` pages behind it are likely to be wanted next. Whoever brings a page calls
    /// [`Lazy::place_run`] or [`Lazy::take_zeros`], from whatever thread.
    fn bring(lazy: &Lazy<Self>, hands: &mut Self::Hands, place: Place, ahead: u16);
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    /// Pages that come together: 1, or those of a huge page.
    unit: u64,
    lacking: ClaimBitmap,
    /// Pages that somebody is bringing, or that were asked for on the present lines.
    asked: AtomicBitmap,
}

/// Nothing depends on these.
type Counter = std::sync::atomic::AtomicU64;

#[derive(Debug, Default)]
struct Counters {
    pages: Counter,
    zero_pages: Counter,
    duplicates: Counter,
    damaged: Counter,
    zero_faults: Counter,
    requests: Counter,
    ahead: Counter,
    ahead_used: Counter,
}

/// The memory of a guest that runs before all of it is here. Shared by fault threads and whoever brings pages.
#[derive(Debug)]
pub(crate) struct Lazy<O> {
    pub(crate) origin: O,
    pub(crate) memory: Arc<dyn LazyMemory>,
    regions: Vec<Region>,
    left: AtomicU64,
    waiters: Waiters,
    latencies: Latencies,
    counters: Counters,
    /// Faults are not answered any more.
    stop: AtomicBool,
    fate: AtomicU8,
    began: Instant,
    /// Nanoseconds from `began` to the guest's start.
    started: AtomicU64,
    /// Nanoseconds from `began` to the last page; 0 while there are pages to come.
    ended: AtomicU64,
    #[cfg(test)]
    pub(crate) flaw: Flaw,
}

/// A way to get the order wrong, for tests that show that it matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// Who waits is written down, and the page not looked at again.
    LooksOnce,
    /// Who brings zeros looks for waiters and then takes the page off the set.
    WaitersFirst,
    /// A page with content is taken off the set and then placed.
    OffBeforePlaced,
    /// Who waits when the link is taken up is asked for, and then the new lines are there to ask on.
    AsksBeforeLines,
}

/// The guest has not been started, and its pages come.
const OPEN: u8 = 0;
/// The guest is being started: from now on it waits for its pages, however long that takes.
const COMMITTED: u8 = 1;
/// Pages ceased to come before: the guest will not be started here.
const ABANDONED: u8 = 2;

/// A page: the position of its region in the layout, and its index there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) region: usize,
    pub(crate) page: u64,
}

impl<O> Lazy<O> {
    /// The pages of `lacking` are to come from `origin`, for a guest of `vcpus`.
    pub(crate) fn from(origin: O, memory: Arc<dyn LazyMemory>, lacking: &PageSet, vcpus: u32) -> Self {
        let region = |(id, map): (RegionId, &vmferry_bitmap::Bitmap)| Region {
            id,
            unit: memory.unit_pages(id).max(1),
            lacking: ClaimBitmap::new(map),
            asked: AtomicBitmap::new(map.len()),
        };
        let regions = lacking.iter().map(region).collect();
        Self {
            origin,
            memory,
            regions,
            left: AtomicU64::new(lacking.count()),
            waiters: Waiters::new(),
            latencies: Latencies::new(vcpus),
            counters: Counters::default(),
            stop: AtomicBool::new(false),
            fate: AtomicU8::new(OPEN),
            began: Instant::now(),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    /// How many pages are still to come.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::SeqCst)
    }

    /// How long somebody has waited for a page by now; the longest.
    pub(crate) fn longest_wait(&self) -> Duration {
        let since = self.waiters.oldest().unwrap_or(u64::MAX);
        Duration::from_nanos(self.now().saturating_sub(since))
    }

    /// The pages that are still to come. Exact only while no channel brings any.
    pub(crate) fn lacking(&self, layout: &Layout) -> PageSet {
        let mut set = PageSet::empty(layout);
        for region in &self.regions {
            if let Some(map) = set.region_mut(region.id) {
                map.union(&region.lacking.snapshot());
            }
        }
        set
    }

    /// The pages that somebody waits for now.
    pub(crate) fn waiting(&self) -> Vec<Place> {
        self.waiters.waiting()
    }

    /// Says that `place` is being brought by the caller; false if somebody else had said so.
    pub(crate) fn claim(&self, place: Place) -> bool {
        !self.regions[place.region].asked.set(place.page)
    }

    /// Takes back what [`claim`](Self::claim) said.
    pub(crate) fn unclaim(&self, place: Place) {
        self.regions[place.region].asked.test_and_clear(place.page);
    }

    /// Takes back whatever was said: nobody brings anything any more.
    pub(crate) fn unclaim_all(&self) {
        for region in &self.regions {
            let mut forgotten = vmferry_bitmap::Bitmap::new(region.asked.len());
            region.asked.harvest(&mut forgotten);
        }
    }

    /// The guest is about to be started. False if it must not be, because its pages will not come.
    pub(crate) fn commit(&self) -> bool {
        self.started.store(self.now(), Ordering::Relaxed);
        self.fate.compare_exchange(OPEN, COMMITTED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Pages do not come any more. If the guest has not been started it will not be, and whoever waits for one of its pages
    /// (the loading of its state) gets zeros, so that it ends; nobody will run on these.
    pub(crate) fn lost(&self) {
        if self.fate.compare_exchange(OPEN, ABANDONED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.end();
        }
    }

    /// Whether the link was lost before the guest was started: what was missing then reads as zeros.
    pub(crate) fn abandoned(&self) -> bool {
        self.fate.load(Ordering::SeqCst) == ABANDONED
    }

    /// Ends the faults: what is still lacking reads as zeros.
    pub(crate) fn end(&self) {
        if let Err(error) = self.try_end() {
            tracing::warn!("guest memory stays registered for faults: {error}");
        }
    }

    /// Like [`end`](Self::end), for who has something to do if the host refuses.
    pub(crate) fn try_end(&self) -> Result<(), VmError> {
        self.stop();
        self.memory.end()
    }

    /// Ends the fault threads.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.memory.interrupt();
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The position of a region of the layout.
    pub(crate) fn position(&self, region: RegionId) -> Option<usize> {
        self.regions.iter().position(|own| own.id == region)
    }

    /// The name of the region at a position.
    pub(crate) fn region(&self, position: usize) -> RegionId {
        self.regions[position].id
    }

    /// How many pages the region at a position has.
    pub(crate) fn pages(&self, position: usize) -> u64 {
        self.regions[position].lacking.len()
    }

    fn place_of(&self, region: RegionId, page: PageIndex) -> Option<Place> {
        let position = self.position(region)?;
        (page.0 < self.pages(position)).then_some(Place { region: position, page: page.0 })
    }

    pub(crate) fn lacks(&self, place: Place) -> bool {
        self.regions[place.region].lacking.test(place.page)
    }

    /// The pages that come together with `place`: itself, or its huge page.
    pub(crate) fn unit(&self, place: Place) -> Range<u64> {
        let region = &self.regions[place.region];
        let first = place.page / region.unit * region.unit;
        first..(first + region.unit).min(region.lacking.len())
    }

    /// Whether the region at a position is in single pages.
    fn single(&self, position: usize) -> bool {
        self.regions[position].unit == 1
    }

    /// Whether something of the unit of `place` lacks.
    fn unit_lacks(&self, place: Place) -> bool {
        if self.single(place.region) {
            return self.lacks(place);
        }
        self.regions[place.region].lacking.any(self.unit(place))
    }

    /// For the figures: so many pages were asked for.
    pub(crate) fn count_requests(&self, pages: u64) {
        self.counters.requests.fetch_add(pages, Ordering::Relaxed);
    }

    /// For the figures: a page came damaged.
    pub(crate) fn count_damaged(&self) {
        self.counters.damaged.fetch_add(1, Ordering::Relaxed);
    }

    /// `run` of a region is here (or known to be zero): takes it off the set. Returns how many pages that were, and
    /// whether none is left.
    fn arrived(&self, region: usize, run: PageRun) -> (u64, bool) {
        let (taken, _) = self.regions[region].lacking.take_range(run.range());
        let last = taken > 0 && self.left.fetch_sub(taken, Ordering::SeqCst) == taken;
        if last {
            let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.ended.store(now.max(1), Ordering::Release);
        }
        fence(Ordering::SeqCst);
        (taken, last)
    }

    /// How it has gone so far.
    pub(crate) fn figures(&self) -> LazyFigures {
        let load = |counter: &Counter| counter.load(Ordering::Relaxed);
        let elapsed = match self.ended.load(Ordering::Acquire) {
            0 => self.began.elapsed(),
            ns => Duration::from_nanos(ns),
        };
        let elapsed = elapsed.saturating_sub(Duration::from_nanos(self.started.load(Ordering::Relaxed)));
        LazyFigures {
            pages: load(&self.counters.pages),
            zero_pages: load(&self.counters.zero_pages),
            duplicates: load(&self.counters.duplicates),
            damaged: load(&self.counters.damaged),
            zero_faults: load(&self.counters.zero_faults),
            requests: load(&self.counters.requests),
            ahead: load(&self.counters.ahead),
            ahead_used: load(&self.counters.ahead_used),
            cpu_us: 0,
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
            all: self.latencies.all(),
            latency: self.latencies.figures(),
        }
    }
}

#[cfg(test)]
mod tests;
