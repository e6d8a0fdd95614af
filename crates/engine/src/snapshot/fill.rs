//! Missing pages out of a snapshot file: read by the thread that has the fault, and in order by a thread that sweeps.

use super::open::{SnapshotPages, slot};
use super::progress::{FillState, LazyProgress};
use crate::demand::{self, MissingPages, PageSource, Place};
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

/// Demand paging whose pages come out of a file.
pub(super) type DemandPager = demand::DemandPager<SnapshotFile>;

#[derive(Debug, Default)]
struct Standing {
    state: FillState,
    failures: u64,
    first_failure: Option<String>,
}

/// The file, and how it is getting on. A page that cannot be had is reported and stays lacking, and claimed: whoever needs it
/// sleeps on, all others go on.
#[derive(Debug)]
pub(super) struct SnapshotFile {
    pages: SnapshotPages,
    standing: Mutex<Standing>,
    changed: Condvar,
}

/// The file as one thread reads it.
pub(super) struct Reader {
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

impl PageSource for SnapshotFile {
    type Local = Reader;

    fn local(&self) -> Reader {
        Reader { cached: None, buffer: vec![0; PAGE_BYTES * usize::try_from(MOST_PAGES).unwrap_or(1)] }
    }

    fn fetch(&self, missing: &MissingPages, reader: &mut Reader, place: Place, ahead: u16) {
        let (Place { region, page }, unit) = (place, missing.unit(place));
        if unit.end - unit.start > 1 {
            let windows = unit.clone().step_by(usize::try_from(WINDOW_PAGES).unwrap_or(1));
            return windows.for_each(|at| {
                self.bring(missing, reader, region, at..(at + WINDOW_PAGES).min(unit.end));
            });
        }
        // The page that a thread waits for goes first, and alone.
        self.bring(missing, reader, region, page..page + 1);
        let first = page / WINDOW_PAGES * WINDOW_PAGES;
        let end = (first + WINDOW_PAGES).max(page + 1 + u64::from(ahead)).min(first + MOST_PAGES);
        let table_end = (page / TABLE_PAGES as u64 + 1) * TABLE_PAGES as u64;
        let end = end.min(table_end).min(missing.region_pages(region));
        self.bring(missing, reader, region, first..end);
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

impl SnapshotFile {
    pub(super) fn new(pages: SnapshotPages) -> Self {
        Self { pages, standing: Mutex::default(), changed: Condvar::new() }
    }

    /// Brings those of `wanted`, which lie in one table and are no more than [`MOST_PAGES`], that no thread has claimed. Returns how
    /// many of all of them have content.
    fn bring(&self, missing: &MissingPages, reader: &mut Reader, region: usize, wanted: Range<u64>) -> u64 {
        // Read first: a page that is here costs no write to a cache line that others want.
        let claim =
            |page| missing.is_missing(Place { region, page }) && missing.claim(Place { region, page });
        let table = match table(&mut reader.cached, &self.pages, region, wanted.start) {
            Ok(table) => table,
            Err(why) => {
                let lost = wanted.filter(|page| claim(*page)).count() as u64;
                if lost > 0 {
                    self.fail(missing, lost, &why.to_string());
                }
                return 0;
            }
        };
        let table = table.as_ref();
        let has = |page| table.is_some_and(|table| table.has_content(slot(PageIndex(page))));
        let mut at = wanted.start;
        while at < wanted.end {
            let first = at;
            at += 1;
            if !claim(first) {
                continue;
            }
            while at < wanted.end && has(at) == has(first) && claim(at) {
                at += 1;
            }
            let run = PageRun::from(first..at);
            match table {
                Some(table) if has(first) => self.place(missing, region, run, table, &mut reader.buffer),
                _ => self.note(missing.take_zeros(region, run)),
            }
        }
        wanted.filter(|page| has(*page)).count() as u64
    }

    /// Reads the pages of `run`, which the caller has claimed, and places them.
    fn place(
        &self,
        missing: &MissingPages,
        region: usize,
        run: PageRun,
        table: &PageTable,
        buffer: &mut [u8],
    ) {
        let bytes = &mut buffer[..usize::try_from(run.bytes()).unwrap_or(usize::MAX)];
        if let Err(why) = self.pages.read(region, run.first, bytes, table) {
            if run.count == 1 {
                return self.fail(missing, 1, &why.to_string());
            }
            // Its neighbours are not to suffer for one page.
            let single = |page| self.place(missing, region, (page..page + 1).into(), table, buffer);
            return run.range().for_each(single);
        }
        match missing.place_run(region, run, bytes) {
            Ok(last) => self.note(last),
            Err(error) => {
                let region = missing.region(region);
                self.fail(missing, run.count, &format!("{region} {run} cannot be placed: {error}"));
            }
        }
    }

    /// Brings everything that may have content, in order, and ends the faults when all is there.
    pub(super) fn sweep(&self, missing: &MissingPages, wanted: &PageSet) {
        let (mut reader, mut found) = (self.local(), 0);
        let runs = wanted.iter().enumerate();
        for (region, run) in runs.flat_map(|(at, (_, map))| map.runs().map(move |run| (at, run))) {
            for at in run.clone().step_by(usize::try_from(WINDOW_PAGES).unwrap_or(1)) {
                if missing.stopped() {
                    return;
                }
                let next = at + AHEAD_PAGES..(at + 2 * AHEAD_PAGES).min(run.end);
                if (at - run.start).is_multiple_of(AHEAD_PAGES) && !next.is_empty() {
                    self.pages.will_need(region, next.into());
                }
                found += self.bring(missing, &mut reader, region, at..(at + WINDOW_PAGES).min(run.end));
            }
        }
        let said = self.pages.contents();
        if found != said {
            // Of a table that cannot be read nothing was found, and that has been said.
            self.fail(missing, 0, &format!("{found} pages with content were found, not {said}"));
        }
        self.settle(missing);
    }

    /// Everything is claimed: waits until it is there, and ends the faults. If some of it cannot be had, it must go on making
    /// faults for ever, or it would read as zeros.
    fn settle(&self, missing: &MissingPages) {
        let waits = |standing: &mut Standing| standing.state == FillState::Filling && missing.left() > 0;
        let waited = self.changed.wait_while(self.lock(), waits);
        let mut standing = waited.unwrap_or_else(PoisonError::into_inner);
        if standing.state != FillState::Filling {
            return;
        }
        standing.state = match missing.try_end() {
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
    fn fail(&self, missing: &MissingPages, pages: u64, why: &str) {
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
        missing.lost();
        self.changed.notify_all();
    }

    /// Why pages could not be had.
    pub(super) fn failure(&self) -> Option<String> {
        self.lock().first_failure.clone()
    }

    /// Ends all threads, soon. Pages that are missing stay missing.
    pub(super) fn stop(&self, missing: &MissingPages) {
        let mut standing = self.lock();
        if standing.state == FillState::Filling {
            standing.state = FillState::Stopped;
        }
        drop(standing);
        missing.stop();
        self.changed.notify_all();
    }

    /// Where it stands.
    pub(super) fn progress(&self, missing: &MissingPages) -> LazyProgress {
        let figures = missing.figures();
        let standing = self.lock();
        LazyProgress {
            state: standing.state,
            pages: self.pages.contents(),
            placed: figures.pages,
            zero_pages: figures.zero_faults,
            faults: figures.all.faults + figures.zero_faults,
            failed_pages: standing.failures,
            error: standing.first_failure.clone(),
            hist_us: figures.all.buckets,
        }
    }

    /// Waits until it has ended or failed, at most `within`.
    pub(super) fn wait(&self, missing: &MissingPages, within: Duration) -> LazyProgress {
        let waits = |standing: &mut Standing| standing.state == FillState::Filling;
        let waited = self.changed.wait_timeout_while(self.lock(), within, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.progress(missing)
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        // A panic while holding it cannot leave it half changed: every change is one assignment after the other.
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
