//! Memory that is filled while its guest runs: who answers faults, and who brings the rest.
//!
//! Where pages come from is a [`PageOrigin`]'s affair; here is what holds for any: each page is claimed once, by an atomic
//! bit, and placed by whoever claimed it. A fault's page goes before its neighbours, and those before the sweep over
//! everything else. A page that cannot be had is reported and never placed: whoever needs it sleeps on, all others go on.

mod filler;
mod progress;

pub(crate) use filler::{Filler, PageOrigin, Why};
pub use progress::{FillState, LazyProgress};

use crate::lazy::LazyMemory;
use crate::vm::VmError;
use progress::Histogram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_bitmap::AtomicBitmap;
use vmferry_memory::{Layout, PageIndex, PageRun, RegionId};

/// What is known of a region's pages. `placed` is a subset of `claimed`.
#[derive(Debug)]
struct Pages {
    id: RegionId,
    claimed: AtomicBitmap,
    placed: AtomicBitmap,
}

/// How often the sweep, when it is done, looks whether the threads that answer faults have placed what they claimed.
const SETTLE: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
struct Standing {
    state: FillState,
    /// The guest may run: from here on a failure cannot call the restore off.
    committed: bool,
    /// Somebody wants the threads to end.
    stop: bool,
    failures: u64,
    first_failure: Option<String>,
}

/// What all threads that fill one guest's memory share.
#[derive(Debug)]
pub(crate) struct Fill {
    memory: Arc<dyn LazyMemory>,
    pages: Vec<Pages>,
    /// Pages with content that there are.
    total: u64,
    placed: AtomicU64,
    zeros: AtomicU64,
    faults: AtomicU64,
    latency: Histogram,
    /// Mirrors `standing.stop`, or all is done: looked at without a lock.
    ending: AtomicBool,
    standing: Mutex<Standing>,
    changed: Condvar,
}

impl Fill {
    /// Fills `memory`, which was begun, with `total` pages of content.
    pub(crate) fn new(memory: Arc<dyn LazyMemory>, layout: &Layout, total: u64) -> Self {
        let pages = |region: &vmferry_memory::Region| Pages {
            id: region.id,
            claimed: AtomicBitmap::new(region.pages()),
            placed: AtomicBitmap::new(region.pages()),
        };
        Self {
            memory,
            pages: layout.regions().iter().map(pages).collect(),
            total,
            placed: AtomicU64::new(0),
            zeros: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            latency: Histogram::default(),
            ending: AtomicBool::new(false),
            standing: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Runs the guest's faults against `origins`, one for each stripe, and then brings the rest by `sweep`, which is
    /// called when the guest was let go. Returns when all is there, or somebody called [`stop`](Self::stop).
    pub(crate) fn run<O: PageOrigin>(
        self: &Arc<Self>,
        origin: impl Fn() -> O,
        sweep: impl FnOnce(&mut Filler<'_, O>),
    ) {
        std::thread::scope(|scope| {
            for stripe in 0..self.memory.stripes() {
                let mut filler = Filler::new(self, origin());
                let name = format!("fault-{stripe}");
                let spawned =
                    std::thread::Builder::new().name(name).spawn_scoped(scope, move || filler.serve(stripe));
                if let Err(error) = spawned {
                    self.fail(1, &format!("the host refused a thread for faults: {error}"));
                }
            }
            if self.may_sweep() {
                let mut filler = Filler::new(self, origin());
                sweep(&mut filler);
                let found = filler.found();
                if found != self.total && !self.ending() {
                    // Of a table that cannot be read nothing was found, and that has been said.
                    self.fail(0, &format!("{found} pages with content were found, not {}", self.total));
                }
                self.settle();
            }
            self.ending.store(true, Ordering::Release);
            self.memory.interrupt();
        });
        // Nobody places anything any more. Whoever faulted meanwhile sleeps until the end wakes him.
        self.finish();
    }

    /// Everything is claimed: waits until it is placed. If some of it cannot be, it must go on making faults for ever, so
    /// the threads stay, until they are told.
    fn settle(&self) {
        let mut standing = self.lock();
        while !standing.stop {
            if standing.state == FillState::Filling && self.placed.load(Ordering::Acquire) == self.total {
                return;
            }
            let waited = self.changed.wait_timeout(standing, SETTLE);
            standing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn finish(&self) {
        let whole = self.placed.load(Ordering::Acquire) == self.total;
        let mut standing = self.lock();
        if standing.first_failure.is_some() {
            standing.state = FillState::Failed;
        } else if !standing.committed || !whole {
            // Ending it would let missing pages read as zeros, under a guest that may run.
            standing.state = FillState::Stopped;
        } else if let Err(error) = self.memory.end() {
            standing.first_failure = Some(format!("faults could not be ended: {error}"));
            standing.state = FillState::Failed;
        } else {
            standing.state = FillState::Completed;
        }
        self.changed.notify_all();
    }

    /// The guest is about to run. Says why it must not, if something has failed already.
    pub(crate) fn commit(&self) -> Result<(), String> {
        let mut standing = self.lock();
        if let Some(why) = &standing.first_failure {
            return Err(why.clone());
        }
        standing.committed = true;
        self.changed.notify_all();
        Ok(())
    }

    /// Ends all threads, soon. Pages that are missing stay missing.
    pub(crate) fn stop(&self) {
        self.lock().stop = true;
        self.ending.store(true, Ordering::Release);
        self.memory.interrupt();
        self.changed.notify_all();
    }

    fn ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Ends missing pages for a guest that does not run and never will.
    pub(crate) fn abandon(&self) -> Result<(), VmError> {
        self.memory.end()
    }

    /// `pages` pages cannot be had.
    fn fail(&self, pages: u64, why: &str) {
        let mut standing = self.lock();
        standing.failures += pages;
        if standing.first_failure.is_none() {
            tracing::error!("memory that comes while the guest runs: {why}");
            standing.first_failure = Some(why.to_owned());
        }
        if standing.committed {
            standing.state = FillState::Failed;
        } else if let Err(error) = self.memory.end() {
            // The state is just being loaded, perhaps by somebody who sleeps on this page: he is woken, to be told that
            // nothing comes of it. What he reads does not matter: `commit` refuses.
            tracing::error!("a restore that failed could not be ended: {error}");
        }
        self.changed.notify_all();
    }

    /// Where it stands.
    pub(crate) fn progress(&self) -> LazyProgress {
        let (state, failed_pages, error) = {
            let standing = self.lock();
            (standing.state, standing.failures, standing.first_failure.clone())
        };
        LazyProgress {
            state,
            pages: self.total,
            placed: self.placed.load(Ordering::Relaxed),
            zero_pages: self.zeros.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            failed_pages,
            error,
            hist_us: self.latency.read(),
        }
    }

    /// Waits until it has ended or failed, at most `within`.
    pub(crate) fn wait(&self, within: Duration) -> LazyProgress {
        let deadline = Instant::now().checked_add(within);
        let mut standing = self.lock();
        while standing.state == FillState::Filling {
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => within,
            };
            if left.is_zero() {
                break;
            }
            standing = self.changed.wait_timeout(standing, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(standing);
        self.progress()
    }

    /// Waits until the guest may run: until then only what its state needs is brought, so that it runs soon.
    fn may_sweep(&self) -> bool {
        let wait = |standing: &mut Standing| !standing.committed && !standing.stop;
        let waited = self.changed.wait_while(self.lock(), wait);
        waited.unwrap_or_else(PoisonError::into_inner).committed
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        // A panic while holding it cannot leave it half changed: every change is one assignment after the other.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region(&self, id: RegionId) -> Option<&Pages> {
        self.pages.iter().find(|pages| pages.id == id)
    }
}

impl Pages {
    /// Claims those pages of `run` that `wanted` has a bit for; says which of them nobody had.
    fn claim(&self, run: PageRun, wanted: u64) -> u64 {
        let mut mine = 0;
        for (bit, page) in run.range().enumerate().filter(|(bit, _)| wanted >> bit & 1 != 0) {
            // Read first: a page of which somebody is faster costs no write to his cache line.
            if !self.claimed.test(page) && !self.claimed.set(page) {
                mine |= 1 << bit;
            }
        }
        mine
    }

    fn is_placed(&self, page: PageIndex) -> bool {
        self.placed.test(page.0)
    }
}
