//! Pages that come out of a file: read by the thread that has the fault, and in order by one that sweeps.

use super::open::{SnapshotPages, slot};
use super::progress::{FillState, LazyProgress};
use crate::lazy::{Origin, Place};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, PageSet};
use vmferry_wire::{PageTable, TABLE_PAGES};

/// Pages that are brought together, aligned: a fault's neighbours are likely to be wanted next, and somebody who waits for a
/// page that the sweep has claimed waits for no more than these.
const WINDOW_PAGES: u64 = 16;
/// Most pages that are brought for one fault, whatever is to be brought ahead.
const MOST_PAGES: u64 = 2 * WINDOW_PAGES;
/// How far ahead of the sweep the kernel is told what comes.
const AHEAD_PAGES: u64 = 1024;

/// Memory whose pages come out of a file.
pub(super) type Lazy = crate::lazy::Lazy<FileOrigin>;

#[derive(Debug, Default)]
struct Standing {
    state: FillState,
    failures: u64,
    first_failure: Option<String>,
}

/// The file, and how it is getting on. A page that cannot be had is reported and stays lacking, and claimed: whoever needs it
/// sleeps on, all others go on.
#[derive(Debug)]
pub(super) struct FileOrigin {
    pages: SnapshotPages,
    standing: Mutex<Standing>,
    changed: Condvar,
}

/// The file as one thread reads it.
pub(super) struct Hands {
    /// The table that was read last: whoever sweeps needs it again.
    cached: Option<Cached>,
    buffer: Vec<u8>,
}

struct Cached {
    position: usize,
    block: u64,
    /// `None` if none of its pages has content.
    table: Option<PageTable>,
}

impl Origin for FileOrigin {
    type Hands = Hands;

    fn hands(&self) -> Hands {
        Hands { cached: None, buffer: vec![0; PAGE_BYTES * usize::try_from(MOST_PAGES).unwrap_or(1)] }
    }

    fn bring(lazy: &Lazy, hands: &mut Hands, place: Place, ahead: u16) {
        let (Place { region, page }, unit) = (place, lazy.unit(place));
        if unit.end - unit.start > 1 {
            let windows = unit.clone().step_by(usize::try_from(WINDOW_PAGES).unwrap_or(1));
            return windows
                .for_each(|at| _ = hands.bring(lazy, region, at..(at + WINDOW_PAGES).min(unit.end)));
        }
        // The one that somebody waits for goes first, and alone.
        hands.bring(lazy, region, page..page + 1);
        let first = page / WINDOW_PAGES * WINDOW_PAGES;
        let end = (first + WINDOW_PAGES).max(page + 1 + u64::from(ahead)).min(first + MOST_PAGES);
        let table_end = (page / TABLE_PAGES as u64 + 1) * TABLE_PAGES as u64;
        hands.bring(lazy, region, first..end.min(table_end).min(lazy.pages(region)));
    }
}

impl Hands {
    /// Brings those of `pages`, which lie in one table and are no more than [`MOST_PAGES`], that nobody brings yet. Says how
    /// many of all of them have content.
    fn bring(&mut self, lazy: &Lazy, region: usize, pages: Range<u64>) -> u64 {
        let origin = &lazy.origin;
        // Read first: a page that is here costs no write to a cache line that others want.
        let claim = |page| lazy.lacks(Place { region, page }) && lazy.claim(Place { region, page });
        let table = match table(&mut self.cached, &origin.pages, region, pages.start) {
            Ok(table) => table,
            Err(why) => {
                let lost = pages.filter(|page| claim(*page)).count() as u64;
                if lost > 0 {
                    origin.fail(lazy, lost, &why.to_string());
                }
                return 0;
            }
        };
        let table = table.as_ref();
        let has = |page| table.is_some_and(|table| table.has_content(slot(PageIndex(page))));
        let mut at = pages.start;
        while at < pages.end {
            let first = at;
            at += 1;
            if !claim(first) {
                continue;
            }
            while at < pages.end && has(at) == has(first) && claim(at) {
                at += 1;
            }
            let run = PageRun::from(first..at);
            match table {
                Some(table) if has(first) => origin.place(lazy, region, run, table, &mut self.buffer),
                _ => origin.note(lazy.take_zeros(region, run)),
            }
        }
        pages.filter(|page| has(*page)).count() as u64
    }
}

/// The table of `page`, out of `cached` if it is that.
fn table<'a>(
    cached: &'a mut Option<Cached>,
    pages: &SnapshotPages,
    position: usize,
    page: u64,
) -> Result<&'a Option<PageTable>, super::RestoreError> {
    let block = page / TABLE_PAGES as u64;
    let found = match cached.take() {
        Some(found) if (found.position, found.block) == (position, block) => found,
        _ => Cached { position, block, table: pages.table(position, block)? },
    };
    Ok(&cached.insert(found).table)
}

impl FileOrigin {
    pub(super) fn new(pages: SnapshotPages) -> Self {
        Self { pages, standing: Mutex::default(), changed: Condvar::new() }
    }

    /// Reads the pages of `run`, which the caller has claimed, and places them.
    fn place(&self, lazy: &Lazy, region: usize, run: PageRun, table: &PageTable, buffer: &mut [u8]) {
        let bytes = &mut buffer[..usize::try_from(run.bytes()).unwrap_or(usize::MAX)];
        if let Err(why) = self.pages.read(region, run.first, bytes, table) {
            if run.count == 1 {
                return self.fail(lazy, 1, &why.to_string());
            }
            // Its neighbours are not to suffer for one page.
            let single = |page| self.place(lazy, region, (page..page + 1).into(), table, buffer);
            return run.range().for_each(single);
        }
        match lazy.place_run(region, run, bytes) {
            Ok(last) => self.note(last),
            Err(error) => {
                let region = lazy.region(region);
                self.fail(lazy, run.count, &format!("{region} {run} cannot be placed: {error}"));
            }
        }
    }

    /// Brings everything that may have content, in order, and ends the faults when all is there.
    pub(super) fn sweep(lazy: &Lazy, lacking: &PageSet) {
        let (mut hands, mut found) = (lazy.origin.hands(), 0);
        let runs = lacking.iter().enumerate();
        for (region, run) in runs.flat_map(|(at, (_, map))| map.runs().map(move |run| (at, run))) {
            for at in run.clone().step_by(usize::try_from(WINDOW_PAGES).unwrap_or(1)) {
                if lazy.stopped() {
                    return;
                }
                let next = at + AHEAD_PAGES..(at + 2 * AHEAD_PAGES).min(run.end);
                if (at - run.start).is_multiple_of(AHEAD_PAGES) && !next.is_empty() {
                    lazy.origin.pages.will_need(region, next.into());
                }
                found += hands.bring(lazy, region, at..(at + WINDOW_PAGES).min(run.end));
            }
        }
        let said = lazy.origin.pages.contents();
        if found != said {
            // Of a table that cannot be read nothing was found, and that has been said.
            lazy.origin.fail(lazy, 0, &format!("{found} pages with content were found, not {said}"));
        }
        lazy.origin.settle(lazy);
    }

    /// Everything is claimed: waits until it is there, and ends the faults. If some of it cannot be had, it must go on making
    /// faults for ever, or it would read as zeros.
    fn settle(&self, lazy: &Lazy) {
        let waits = |standing: &mut Standing| standing.state == FillState::Filling && lazy.left() > 0;
        let waited = self.changed.wait_while(self.lock(), waits);
        let mut standing = waited.unwrap_or_else(PoisonError::into_inner);
        if standing.state != FillState::Filling {
            return;
        }
        standing.state = match lazy.try_end() {
            Ok(()) => FillState::Completed,
            Err(error) => {
                standing.first_failure = Some(format!("faults could not be ended: {error}"));
                FillState::Failed
            }
        };
        self.changed.notify_all();
    }

    /// Whoever brought the last page tells who waits for it.
    fn note(&self, last: bool) {
        if last {
            // Who waits has looked at what is left before this lock could be taken, and hears it, or looks after.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// `pages` pages cannot be had. If the guest has not been started, it will not be.
    fn fail(&self, lazy: &Lazy, pages: u64, why: &str) {
        let mut standing = self.lock();
        standing.failures += pages;
        if standing.first_failure.is_none() {
            tracing::error!(
                "pages of the guest that are to come while it runs cannot be had ({why}): a vCPU that needs one sleeps for ever; \
                 restore the guest from another copy"
            );
            standing.first_failure = Some(why.to_owned());
        }
        standing.state = FillState::Failed;
        drop(standing);
        lazy.lost();
        self.changed.notify_all();
    }

    /// Why pages could not be had.
    pub(super) fn failure(&self) -> Option<String> {
        self.lock().first_failure.clone()
    }

    /// Ends all threads, soon. Pages that are missing stay missing.
    pub(super) fn stop(lazy: &Lazy) {
        let mut standing = lazy.origin.lock();
        if standing.state == FillState::Filling {
            standing.state = FillState::Stopped;
        }
        drop(standing);
        lazy.stop();
        lazy.origin.changed.notify_all();
    }

    /// Where it stands.
    pub(super) fn progress(lazy: &Lazy) -> LazyProgress {
        let figures = lazy.figures();
        let standing = lazy.origin.lock();
        LazyProgress {
            state: standing.state,
            pages: lazy.origin.pages.contents(),
            placed: figures.pages,
            zero_pages: figures.zero_faults,
            faults: figures.all.faults + figures.zero_faults,
            failed_pages: standing.failures,
            error: standing.first_failure.clone(),
            hist_us: figures.all.buckets,
        }
    }

    /// Waits until it has ended or failed, at most `within`.
    pub(super) fn wait(lazy: &Lazy, within: Duration) -> LazyProgress {
        let waits = |standing: &mut Standing| standing.state == FillState::Filling;
        let waited = lazy.origin.changed.wait_timeout_while(lazy.origin.lock(), within, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        Self::progress(lazy)
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        // A panic while holding it cannot leave it half changed: every change is one assignment after the other.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
