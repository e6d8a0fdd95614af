//! Missing pages of a running guest, the threads that wait for them, and the latencies of faults.

use super::arriving::Arriving;
use super::latency::Latencies;
use super::waiters::Waiters;
use crate::sync::{AtomicBitmap, AtomicBool, AtomicU64, ClaimBitmap, fence};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{DemandPaging, GuestMemory, Layout, PageIndex, PageRun, PageSet, RegionId, VmError};
use vmferry_wire::PagingFigures;

/// Page, identified by the position of its region in the layout and by its index in the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageLocation {
    pub(crate) region: usize,
    pub(crate) page: u64,
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    /// Number of pages of a unit: 1, or those of a huge page.
    unit: u64,
    missing: ClaimBitmap,
    /// Pages that a thread is fetching, or that were requested on the current channels.
    claimed: AtomicBitmap,
}

/// Counter for statistics, on which no decision depends.
type Counter = std::sync::atomic::AtomicU64;

#[derive(Debug, Default)]
struct Counters {
    pages: Counter,
    zero_pages: Counter,
    duplicates: Counter,
    digest_mismatches: Counter,
    zero_faults: Counter,
    requests: Counter,
    ahead: Counter,
    ahead_used: Counter,
}

/// State: the guest has not been started, and its pages arrive.
const OPEN: u8 = 0;
/// State: the guest is being started. From now on, its vCPUs wait for missing pages without a time
/// limit.
const COMMITTED: u8 = 1;
/// State: pages stopped arriving before the start. The guest will not be started on this host.
const ABANDONED: u8 = 2;

/// Missing pages of a guest that runs before all of its memory has arrived. The [parent
/// module](super) describes the sets and their invariants.
#[derive(Debug)]
pub(crate) struct MissingSet {
    pub(crate) memory: Arc<dyn DemandPaging>,
    regions: Vec<Region>,
    left: AtomicU64,
    /// Entry in the list of memories whose pages still arrive.
    arriving: OnceLock<Arriving>,
    pub(super) waiters: Waiters,
    latencies: Latencies,
    counters: Counters,
    /// True once faults are not answered any more.
    stop: AtomicBool,
    fate: AtomicU8,
    began: Instant,
    /// Time from `began` to the guest's start, in nanoseconds.
    started: AtomicU64,
    /// Time from `began` to the last page, in nanoseconds. 0 while pages are missing.
    ended: AtomicU64,
    #[cfg(test)]
    pub(crate) flaw: Flaw,
}

/// Wrong order of steps, for tests that show that the order matters.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// A waiter is noted, and the page is not checked again.
    LooksOnce,
    /// The thread that brings zeros looks for waiters and then removes the page from the missing
    /// set.
    WaitersFirst,
    /// A page with content is removed from the missing set and then placed.
    RemovesBeforePlacing,
    /// Pages are requested before the new channels are set, when the link is taken up again.
    AsksBeforeChannels,
}

impl MissingSet {
    pub(super) fn new(memory: Arc<dyn DemandPaging>, missing: &PageSet, vcpus: u32) -> Self {
        let region = |(id, map): (RegionId, &Bitmap)| Region {
            id,
            unit: memory.unit_pages(id).max(1),
            missing: ClaimBitmap::new(map.clone()),
            claimed: AtomicBitmap::new(map.len()),
        };
        let regions = missing.iter().map(region).collect();
        Self {
            memory,
            regions,
            left: AtomicU64::new(missing.count()),
            arriving: OnceLock::new(),
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
}

/// Pages and claims.
impl MissingSet {
    /// Prevents the guest of `memory`, whose pages are missing, from being moved or saved before
    /// all pages have arrived.
    pub(crate) fn hold(&self, memory: Arc<dyn GuestMemory>) {
        let fresh = self.arriving.set(Arriving::new(memory)).is_ok();
        assert!(fresh, "missing pages are of one memory");
    }

    /// Returns the number of missing pages.
    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::SeqCst)
    }

    /// Returns the missing pages. The result is exact only while no channel delivers pages.
    pub(crate) fn missing(&self, layout: &Layout) -> PageSet {
        let mut set = PageSet::empty(layout);
        for region in &self.regions {
            if let Some(map) = set.region_mut(region.id) {
                map.union(&region.missing.snapshot());
            }
        }
        set
    }

    /// Returns the position of a region in the layout.
    pub(crate) fn position(&self, region: RegionId) -> Option<usize> {
        self.regions.iter().position(|own| own.id == region)
    }

    /// Returns the number of the region at a position.
    pub(crate) fn region(&self, position: usize) -> RegionId {
        self.regions[position].id
    }

    /// Returns the number of pages of the region at a position.
    pub(crate) fn region_pages(&self, position: usize) -> u64 {
        self.regions[position].missing.len()
    }

    pub(super) fn location_of(&self, region: RegionId, page: PageIndex) -> Option<PageLocation> {
        let position = self.position(region)?;
        (page.0 < self.region_pages(position)).then_some(PageLocation { region: position, page: page.0 })
    }

    pub(crate) fn is_missing(&self, place: PageLocation) -> bool {
        self.regions[place.region].missing.test(place.page)
    }

    /// Returns the pages of the unit of `place`: the page itself, or its huge page.
    pub(crate) fn unit(&self, place: PageLocation) -> Range<u64> {
        let region = &self.regions[place.region];
        let first = place.page / region.unit * region.unit;
        first..(first + region.unit).min(region.missing.len())
    }

    /// Returns true if the units of the region at a position are single pages.
    pub(super) fn single(&self, position: usize) -> bool {
        self.regions[position].unit == 1
    }

    /// Returns true if a page of the unit of `place` is missing.
    fn unit_is_missing(&self, place: PageLocation) -> bool {
        if self.single(place.region) {
            return self.is_missing(place);
        }
        self.regions[place.region].missing.any(self.unit(place))
    }

    /// Claims the page `place`, which the caller is going to fetch. Returns false if another thread
    /// has claimed the page.
    pub(crate) fn claim(&self, place: PageLocation) -> bool {
        !self.regions[place.region].claimed.set(place.page)
    }

    /// Releases the claim on a page.
    pub(crate) fn unclaim(&self, place: PageLocation) {
        self.regions[place.region].claimed.test_and_clear(place.page);
    }

    /// Releases all claims. No thread may be fetching a page.
    pub(crate) fn unclaim_all(&self) {
        for region in &self.regions {
            let mut forgotten = Bitmap::new(region.claimed.len());
            region.claimed.harvest(&mut forgotten);
        }
    }

    /// Removes the pages of `run` from the missing set, because they are present or known to be
    /// zero. Returns the number of removed pages, and whether no page is missing any more.
    fn remove(&self, region: usize, run: PageRun) -> (u64, bool) {
        let (taken, _) = self.regions[region].missing.take_range(run.range());
        let before = if taken > 0 { self.left.fetch_sub(taken, Ordering::SeqCst) } else { 0 };
        assert!(before >= taken, "a page leaves the missing set once: {taken} of {before} left it");
        let last = taken > 0 && before == taken;
        if last {
            self.ended.store(self.now().max(1), Ordering::Release);
        }
        fence(Ordering::SeqCst);
        (taken, last)
    }
}

/// Waiters.
impl MissingSet {
    /// Records that a thread waits for the page `place`, and returns true if the page must be
    /// fetched. Otherwise answers the fault.
    pub(super) fn wait_for(&self, place: PageLocation, vcpu: Option<u32>) -> bool {
        let now = self.now();
        if !self.unit_is_missing(place) {
            self.answer(place);
            return false;
        }
        // The waiter must be recorded before the page is checked again, as the documentation of the
        // module explains.
        let measured = self.waiters.add(place, now, vcpu);
        fence(Ordering::SeqCst);
        #[cfg(test)]
        if self.flaw == Flaw::LooksOnce {
            return false;
        }
        if !self.unit_is_missing(place) {
            self.release(place.region, self.unit(place));
            self.answer(place);
            return false;
        }
        if !measured {
            tracing::debug!("more concurrent faults than can be measured");
        }
        true
    }

    /// Answers a fault on a page that is zero, or that arrived in the meantime.
    fn answer(&self, place: PageLocation) {
        self.counters.zero_faults.fetch_add(1, Ordering::Relaxed);
        self.place_zero(place);
    }

    /// Returns the time for which the thread that waits longest has waited so far.
    pub(crate) fn longest_wait(&self) -> Duration {
        let since = self.waiters.oldest().unwrap_or(u64::MAX);
        Duration::from_nanos(self.now().saturating_sub(since))
    }

    /// Returns the pages that threads wait for now.
    pub(crate) fn waiting(&self) -> Vec<PageLocation> {
        self.waiters.waiting()
    }

    /// Releases the threads that waited for a page in the units of these pages, for each unit that
    /// is complete now. The pages must already be removed from the missing set.
    fn release_units(&self, region: usize, pages: Range<u64>) {
        if self.single(region) {
            return self.release(region, pages);
        }
        let mut page = pages.start;
        while page < pages.end {
            let unit = self.unit(PageLocation { region, page });
            page = unit.end;
            if !self.unit_is_missing(PageLocation { region, page: unit.start }) {
                self.release(region, unit);
            }
        }
    }

    /// Releases the threads that waited for these pages, and records their latencies.
    fn release(&self, region: usize, pages: Range<u64>) {
        self.waiters.take(region, pages, |waiter| {
            self.latencies.record(waiter.vcpu, self.now().saturating_sub(waiter.since));
        });
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Placing.
impl MissingSet {
    /// Takes pages of zeros. A page is placed only if a thread waits for it or may wait for it.
    /// Returns true if this call has removed the last missing page.
    pub(crate) fn take_zeros(&self, region: usize, run: PageRun) -> bool {
        #[cfg(test)]
        if self.flaw == Flaw::WaitersFirst {
            self.waiters.take(region, run.range(), |waiter| {
                self.place_zero(PageLocation { region, page: waiter.page })
            });
            return self.remove(region, run).1;
        }
        let single = self.single(region);
        if !single {
            // A thread may wait for another page of the huge page, which becomes accessible once
            // none of its pages is missing.
            self.place_zeros(region, run);
        }
        let (taken, last) = self.remove(region, run);
        self.counters.zero_pages.fetch_add(taken, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(run.count - taken, Ordering::Relaxed);
        if !single {
            self.release_units(region, run.range());
            return last;
        }
        self.waiters.take(region, run.range(), |waiter| {
            self.place_zero(PageLocation { region, page: waiter.page });
            self.latencies.record(waiter.vcpu, self.now().saturating_sub(waiter.since));
        });
        if self.waiters.overflowed() {
            run.range().for_each(|page| self.place_zero(PageLocation { region, page }));
        }
        last
    }

    /// Places the contents `bytes` of the pages of `run`. Returns true if this call has placed the
    /// last missing page.
    pub(crate) fn place_run(&self, region: usize, run: PageRun, bytes: &[u8]) -> Result<bool, VmError> {
        #[cfg(test)]
        let early = (self.flaw == Flaw::RemovesBeforePlacing).then(|| self.remove(region, run));
        let placed = self.memory.place(self.regions[region].id, run, bytes)?;
        self.counters.pages.fetch_add(placed.pages, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(placed.already_present, Ordering::Relaxed);
        let (_, last) = self.remove(region, run);
        #[cfg(test)]
        let last = early.map_or(last, |(_, last)| last);
        self.release_units(region, run.range());
        Ok(last)
    }

    fn try_place_zeros(&self, region: usize, run: PageRun) -> Result<(), VmError> {
        let id = self.regions[region].id;
        let placed = self.memory.place_zeros(id, run).and_then(|placed| {
            if placed.already_present > 0 { self.memory.wake(id, run.first) } else { Ok(()) }
        });
        // Once demand paging has ended, all pages are present, and no page can be placed. Therefore
        // an error no longer matters.
        if self.stopped() { Ok(()) } else { placed }
    }

    /// Places zeros, and retries without limit if this fails, because a thread waits for the pages
    /// and no other thread will place them.
    fn place_zeros(&self, region: usize, run: PageRun) {
        while let Err(error) = self.try_place_zeros(region, run) {
            tracing::error!(
                "pages of zeros cannot be placed for a thread that waits for them: {error}; trying again"
            );
            std::thread::sleep(super::AGAIN);
        }
    }

    /// Places zeros for one page, like [`place_zeros`](Self::place_zeros).
    fn place_zero(&self, place: PageLocation) {
        self.place_zeros(place.region, PageRun::new(PageIndex(place.page), 1));
    }
}

/// Start and end of the guest on this host.
impl MissingSet {
    /// Records that the guest is about to be started. Returns false if it must not be started,
    /// because its pages will not arrive.
    pub(crate) fn commit(&self) -> bool {
        self.started.store(self.now(), Ordering::Relaxed);
        self.fate.compare_exchange(OPEN, COMMITTED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Records that no more pages arrive. If the guest has not been started, it will not be
    /// started, and a thread that waits for one of its pages gets zeros. Such a thread, which loads
    /// the device state, can then end. No vCPU will run on these zeros.
    pub(crate) fn lost(&self) {
        if self.fate.compare_exchange(OPEN, ABANDONED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.end();
        }
    }

    /// Returns true if the link was lost before the guest was started. Pages that were missing then
    /// read as zeros.
    pub(crate) fn abandoned(&self) -> bool {
        self.fate.load(Ordering::SeqCst) == ABANDONED
    }

    /// Ends demand paging. Pages that are still missing then read as zeros.
    pub(crate) fn end(&self) {
        if let Err(error) = self.try_end() {
            tracing::warn!("guest memory stays registered for faults: {error}");
        }
    }

    /// Ends demand paging like [`end`](Self::end), but returns an error if the host refuses.
    pub(crate) fn try_end(&self) -> Result<(), VmError> {
        self.stop();
        self.memory.end()?;
        // If pages are still missing, they now read as zeros, and this memory never counts as
        // complete.
        if self.left() == 0
            && let Some(arriving) = self.arriving.get()
        {
            arriving.complete();
        }
        Ok(())
    }

    /// Ends the fault threads.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.memory.interrupt();
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Statistics.
impl MissingSet {
    /// Counts pages that were requested.
    pub(crate) fn count_requests(&self, pages: u64) {
        self.counters.requests.fetch_add(pages, Ordering::Relaxed);
    }

    /// Counts a page that arrived with a digest mismatch.
    pub(crate) fn count_digest_mismatch(&self) {
        self.counters.digest_mismatches.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `ahead` pages that are requested ahead, and `used` pages of earlier such requests
    /// that the guest used.
    pub(super) fn count_ahead(&self, ahead: u16, used: u16) {
        self.counters.ahead.fetch_add(ahead.into(), Ordering::Relaxed);
        self.counters.ahead_used.fetch_add(used.into(), Ordering::Relaxed);
    }

    /// Returns the statistics so far.
    pub(crate) fn figures(&self) -> PagingFigures {
        let load = |counter: &Counter| counter.load(Ordering::Relaxed);
        let elapsed = match self.ended.load(Ordering::Acquire) {
            0 => self.began.elapsed(),
            ns => Duration::from_nanos(ns),
        };
        let elapsed = elapsed.saturating_sub(Duration::from_nanos(self.started.load(Ordering::Relaxed)));
        PagingFigures {
            pages: load(&self.counters.pages),
            zero_pages: load(&self.counters.zero_pages),
            duplicates: load(&self.counters.duplicates),
            digest_mismatches: load(&self.counters.digest_mismatches),
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
