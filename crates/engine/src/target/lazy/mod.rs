//! Pages that come while the guest runs: which are lacking, who waits for them, and how long.
//!
//! # One page's way
//! Somebody touches a page that is not there; the fault thread of its stripe reads the fault. If the page is lacking, the
//! thread notes who waits since when and asks for the page, once; if not, the page is known to be zero, or came in between.
//! Whatever channel it then comes on, its content is staged, compared with its digest, placed, and only then taken off
//! the set of lacking pages. A page that comes as zero is not placed at all unless somebody waits for it: it is only taken
//! off the set, and a later fault is answered here.
//!
//! # Why nobody waits for ever
//! The fault thread writes down the waiter and then looks whether the page still lacks; whoever brings a page takes it off the
//! set and then looks for waiters. Both with a full fence between, so at least one of them sees the other: the fault
//! thread a page that is no longer lacking, or the bringer a waiter. A page with content was placed before either looked,
//! and placing wakes by itself; for a page of zeros whoever sees the other places it.
//!
//! # Each page once
//! The source gives each page out once, so none comes twice. If one does all the same it is left as it is, because placing
//! never overwrites, and counted.

mod ahead;
mod faults;
mod latency;
mod place;
mod waiters;

pub(crate) use faults::serve_faults;
pub(crate) use place::Stager;

use crate::channel::Stream;
use crate::lazy::LazyMemory;
use crate::sync::{AtomicBitmap, AtomicBool, AtomicU64, ClaimBitmap, RwLock, fence};
use crate::vm::VmError;
use latency::Latencies;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_memory::{Layout, PageIndex, PageRun, PageSet, RegionId};
use vmferry_wire::{LazyFigures, Request};
use waiters::Waiters;

/// Pages that came damaged and are asked for again, at most: beyond that the link is given up.
const MOST_DAMAGED: u64 = 10_000;

/// An urgent channel, to ask on.
#[derive(Debug)]
pub(crate) struct UrgentLine {
    stream: Arc<Stream>,
    /// A request is one write; several fault threads may share a line.
    turn: Mutex<()>,
}

impl UrgentLine {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, turn: Mutex::new(()) }
    }

    pub(crate) fn ask(&self, request: Request) -> io::Result<()> {
        let _turn = lock(&self.turn);
        self.stream
            .send_bytes_within(&request.encode(), Duration::from_secs(1))
            .map_err(|failed| failed.error)
    }
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    lacking: ClaimBitmap,
    /// Pages that were asked for on the present lines.
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

/// The memory of a guest that runs before all of it is here. Shared by fault threads and channels.
#[derive(Debug)]
pub(crate) struct Lazy {
    pub(crate) memory: Arc<dyn LazyMemory>,
    regions: Vec<Region>,
    left: AtomicU64,
    waiters: Waiters,
    latencies: Latencies,
    counters: Counters,
    /// Where to ask; empty while the link is down.
    lines: RwLock<Vec<Arc<UrgentLine>>>,
    /// Pages that came damaged on these lines.
    damaged_here: AtomicU64,
    /// Whether processors are kept awake while the link is up.
    pub(crate) stay_awake: bool,
    /// Faults are not answered any more.
    stop: AtomicBool,
    fate: AtomicU8,
    began: Instant,
    /// Nanoseconds from `began` to the guest's start.
    started: AtomicU64,
    /// Nanoseconds from `began` to the last page; 0 while there are pages to come.
    ended: AtomicU64,
    #[cfg(test)]
    flaw: Flaw,
}

/// A way to get the order wrong, for tests that show that it matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
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

/// The guest has not been started, and the link is up.
const OPEN: u8 = 0;
/// The guest is being started: from now on it waits for its pages, however long that takes.
const COMMITTED: u8 = 1;
/// The link was lost before: the guest will not be started here.
const ABANDONED: u8 = 2;

/// A page: the position of its region in the layout, and its index there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    region: usize,
    page: u64,
}

impl Lazy {
    /// The pages of `lacking` are to come, for a guest of `vcpus`.
    pub(crate) fn new(memory: Arc<dyn LazyMemory>, lacking: &PageSet, vcpus: u32) -> Self {
        let region = |(id, map): (RegionId, &vmferry_bitmap::Bitmap)| Region {
            id,
            lacking: ClaimBitmap::new(map),
            asked: AtomicBitmap::new(map.len()),
        };
        Self {
            memory,
            regions: lacking.iter().map(region).collect(),
            left: AtomicU64::new(lacking.count()),
            waiters: Waiters::new(),
            latencies: Latencies::new(vcpus),
            counters: Counters::default(),
            lines: RwLock::default(),
            damaged_here: AtomicU64::new(0),
            stay_awake: false,
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

    /// Asks on `lines` from now on. What was asked for before is forgotten, because those lines are gone; whoever waits is
    /// asked for again.
    pub(crate) fn ask_on(&self, lines: Vec<Arc<UrgentLine>>) {
        let again = !lines.is_empty();
        #[cfg(test)]
        if self.flaw == Flaw::AsksBeforeLines {
            self.waiters.waiting().into_iter().for_each(|place| self.ask(place, 0, false));
            *self.lines.write().unwrap_or_else(PoisonError::into_inner) = lines;
            return;
        }
        *self.lines.write().unwrap_or_else(PoisonError::into_inner) = lines;
        self.damaged_here.store(0, Ordering::Relaxed);
        for region in &self.regions {
            let mut forgotten = vmferry_bitmap::Bitmap::new(region.asked.len());
            region.asked.harvest(&mut forgotten);
        }
        if again {
            for place in self.waiters.waiting() {
                self.ask(place, 0, false);
            }
        }
    }

    /// The guest is about to be started. False if it must not be, because its pages will not come.
    pub(crate) fn commit(&self) -> bool {
        self.started.store(self.now(), Ordering::Relaxed);
        self.fate.compare_exchange(OPEN, COMMITTED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The link is lost. If the guest has not been started it will not be, and whoever waits for one of its pages (the
    /// loading of its state) gets zeros, so that it ends; nobody will run on these.
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
        self.stop();
        if let Err(error) = self.memory.end() {
            tracing::warn!("guest memory stays registered for faults: {error}");
        }
    }

    /// Ends the fault threads.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.memory.interrupt();
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn place_of(&self, region: RegionId, page: PageIndex) -> Option<Place> {
        let position = self.regions.iter().position(|own| own.id == region)?;
        (page.0 < self.regions[position].lacking.len()).then_some(Place { region: position, page: page.0 })
    }

    fn lacks(&self, place: Place) -> bool {
        self.regions[place.region].lacking.test(place.page)
    }

    /// Asks for a page, unless that was done already. A line that fails is found broken by whoever reads it, and then the
    /// page is asked for again on the next.
    fn ask(&self, place: Place, ahead: u16, again: bool) {
        let region = &self.regions[place.region];
        if region.asked.set(place.page) && !again {
            return;
        }
        let page = PageIndex(place.page);
        let stripe = self.memory.stripe_of(region.id, page);
        let lines = self.lines.read().unwrap_or_else(PoisonError::into_inner);
        let line = lines.get(stripe % lines.len().max(1)).cloned();
        // Not held while something is sent: whoever ends the lines must not wait for that.
        drop(lines);
        let Some(line) = line else {
            // The link is down: whoever waits is asked for when it is up again.
            region.asked.test_and_clear(place.page);
            return;
        };
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = line.ask(Request::Page { region: region.id, page, ahead, again }) {
            tracing::warn!("{} {} could not be asked for: {error}", region.id, PageRun::new(page, 1));
            // Half a request may have left: nothing that follows could be understood.
            line.stream.shutdown();
        }
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

    fn zero(&self, place: Place) -> Result<(), VmError> {
        let (region, page) = (self.regions[place.region].id, PageIndex(place.page));
        let placed = self
            .memory
            .place_zeros(region, PageRun::new(page, 1))
            .and_then(|placed| if placed.there > 0 { self.memory.wake(region, page) } else { Ok(()) });
        // Once faults have ended everything is there, and nothing can be placed.
        if self.stopped() { Ok(()) } else { placed }
    }

    /// Like `zero`, as often as it takes: nobody else will do it, and somebody waits.
    fn zero_at_last(&self, place: Place) {
        while let Err(error) = self.zero(place) {
            tracing::error!(
                "a page of zeros cannot be placed for somebody who waits for it: {error}; trying again"
            );
            std::thread::sleep(faults::AGAIN);
        }
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
