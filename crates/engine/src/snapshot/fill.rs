//! Filling of memory with pages from a snapshot file. The threads that handle faults read the pages
//! of the faults, and another thread reads all pages in order (the sweep).

use super::open::{BlockPages, SnapshotPages, slot};
use super::progress::{FillState, RestoreProgress};
use crate::demand::{self, MissingSet, PageLocation, PageSource};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PageIndex, PageRun, PageSet};
use vmferry_wire::TABLE_PAGES;

/// Number of aligned pages that are placed together, because the guest is likely to need the
/// neighbours of a fault next. If the sweep has claimed the page that a thread waits for, the
/// thread waits for at most this number of pages.
const WINDOW_PAGES: u64 = 16;
/// Maximum number of pages that are placed for one fault, including the pages ahead of it.
const MOST_PAGES: u64 = 2 * WINDOW_PAGES;
/// Number of pages ahead of the sweep for which the kernel gets a read-ahead hint.
const AHEAD_PAGES: u64 = 1024;

/// Demand paging whose pages come from a file.
pub(super) type DemandPager = demand::DemandPager<SnapshotFile>;

#[derive(Debug, Default)]
struct FillStatus {
    state: FillState,
    failures: u64,
    first_failure: Option<String>,
}

/// Snapshot file, and the progress of reading it. A page that cannot be read is reported, and stays
/// missing and claimed. A thread that needs such a page sleeps for ever, and all other threads
/// continue.
#[derive(Debug)]
pub(super) struct SnapshotFile {
    pages: SnapshotPages,
    status: Mutex<FillStatus>,
    changed: Condvar,
}

/// State of one thread that reads the file.
pub(super) struct Reader {
    /// Block whose tables were read last. Kept because the sweep needs it again.
    cached: Option<Cached>,
    buffer: Vec<u8>,
}

struct Cached {
    position: usize,
    block: u64,
    /// `None` if no page of the block has content.
    pages: Option<BlockPages>,
}

impl PageSource for SnapshotFile {
    type Local = Reader;

    fn local(&self) -> Reader {
        Reader { cached: None, buffer: vec![0; PAGE_BYTES * usize::try_from(MOST_PAGES).unwrap_or(1)] }
    }

    fn fetch(&self, missing: &MissingSet, reader: &mut Reader, place: PageLocation, ahead: u16) {
        let (PageLocation { region, page }, unit) = (place, missing.unit(place));
        if unit.end - unit.start > 1 {
            let windows = unit.clone().step_by(usize::try_from(WINDOW_PAGES).unwrap_or(1));
            return windows.for_each(|at| {
                self.fetch_range(missing, reader, region, at..(at + WINDOW_PAGES).min(unit.end));
            });
        }
        // The page that a thread waits for is placed first and alone.
        self.fetch_range(missing, reader, region, page..page + 1);
        let first = page / WINDOW_PAGES * WINDOW_PAGES;
        let end = (first + WINDOW_PAGES).max(page + 1 + u64::from(ahead)).min(first + MOST_PAGES);
        let table_end = (page / TABLE_PAGES as u64 + 1) * TABLE_PAGES as u64;
        let end = end.min(table_end).min(missing.region_pages(region));
        self.fetch_range(missing, reader, region, first..end);
    }
}

/// Returns the block of `page`, from `cached` if it is that block.
fn block<'a>(
    cached: &'a mut Option<Cached>,
    pages: &SnapshotPages,
    position: usize,
    page: u64,
) -> Result<&'a Option<BlockPages>, super::RestoreError> {
    let block = page / TABLE_PAGES as u64;
    let found = match cached.take() {
        Some(found) if (found.position, found.block) == (position, block) => found,
        _ => Cached { position, block, pages: pages.block(position, block)? },
    };
    Ok(&cached.insert(found).pages)
}

impl SnapshotFile {
    pub(super) fn new(pages: SnapshotPages) -> Self {
        Self { pages, status: Mutex::default(), changed: Condvar::new() }
    }

    /// Claims and places the pages of `wanted` that no other thread has claimed. Returns the number
    /// of pages of `wanted` that have content. `wanted` must lie within one table and contain at
    /// most [`MOST_PAGES`] pages.
    fn fetch_range(
        &self,
        missing: &MissingSet,
        reader: &mut Reader,
        region: usize,
        wanted: Range<u64>,
    ) -> u64 {
        // The page is checked by a read first, so that a page that is present costs no write to a
        // cache line that other threads use.
        let claim = |page| {
            missing.is_missing(PageLocation { region, page }) && missing.claim(PageLocation { region, page })
        };
        let block = match block(&mut reader.cached, &self.pages, region, wanted.start) {
            Ok(block) => block,
            Err(why) => {
                let lost = wanted.filter(|page| claim(*page)).count() as u64;
                if lost > 0 {
                    self.fail(missing, lost, &why.to_string());
                }
                return 0;
            }
        };
        let block = block.as_ref();
        let has = |page| block.is_some_and(|block| block.has_content(slot(PageIndex(page))));
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
            match block {
                Some(block) if has(first) => self.place(missing, region, run, block, &mut reader.buffer),
                _ => self.note(missing.take_zeros(region, run)),
            }
        }
        wanted.filter(|page| has(*page)).count() as u64
    }

    /// Reads the pages of `run`, which the caller has claimed, and places them.
    fn place(
        &self,
        missing: &MissingSet,
        region: usize,
        run: PageRun,
        block: &BlockPages,
        buffer: &mut [u8],
    ) {
        let bytes = &mut buffer[..usize::try_from(run.bytes()).unwrap_or(usize::MAX)];
        if let Err(why) = self.pages.read(region, run.first, bytes, block) {
            if run.count == 1 {
                return self.fail(missing, 1, &why.to_string());
            }
            // One page that cannot be read must not prevent its neighbours from being placed.
            let single = |page| self.place(missing, region, (page..page + 1).into(), block, buffer);
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

    /// Places the pages of `wanted`, which are all pages that may have content, in order. Ends
    /// demand paging once all of them are present.
    pub(super) fn sweep(&self, missing: &MissingSet, wanted: &PageSet) {
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
                found += self.fetch_range(missing, &mut reader, region, at..(at + WINDOW_PAGES).min(run.end));
            }
        }
        let expected = self.pages.contents();
        if found != expected {
            // If a table could not be read, its pages are not counted. In that case, the failure
            // was already reported.
            self.fail(missing, 0, &format!("{found} pages with content were found, not {expected}"));
        }
        self.wait_until_complete(missing);
    }

    /// Waits until all pages, which are claimed by now, are present, and then ends demand paging.
    /// If some pages cannot be read, demand paging must not end, because these pages would
    /// otherwise read as zeros.
    fn wait_until_complete(&self, missing: &MissingSet) {
        let waits = |status: &mut FillStatus| status.state == FillState::Filling && missing.left() > 0;
        let waited = self.changed.wait_while(self.lock(), waits);
        let mut status = waited.unwrap_or_else(PoisonError::into_inner);
        if status.state != FillState::Filling {
            return;
        }
        status.state = match missing.try_end() {
            Ok(()) => FillState::Completed,
            Err(error) => {
                status.first_failure = Some(format!("faults could not be ended: {error}"));
                FillState::Failed
            }
        };
        self.changed.notify_all();
    }

    /// Notifies the waiting threads if `last` is true, which means that the last page was placed.
    fn note(&self, last: bool) {
        if last {
            // The waiting thread either checked the missing pages before this lock was taken and
            // receives the notification, or checks them afterwards.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Records that `pages` pages cannot be read. If the guest has not been started, it will not be
    /// started.
    fn fail(&self, missing: &MissingSet, pages: u64, why: &str) {
        let mut status = self.lock();
        status.failures += pages;
        if status.first_failure.is_none() {
            tracing::error!(
                "missing pages of the guest cannot be read ({why}): a vCPU that needs one sleeps for ever; \
                 restore the guest from another copy"
            );
            status.first_failure = Some(why.to_owned());
        }
        status.state = FillState::Failed;
        drop(status);
        missing.lost();
        self.changed.notify_all();
    }

    /// Returns the reason of the first failure.
    pub(super) fn failure(&self) -> Option<String> {
        self.lock().first_failure.clone()
    }

    /// Makes all threads end soon. Pages that are missing stay missing.
    pub(super) fn stop(&self, missing: &MissingSet) {
        let mut status = self.lock();
        if status.state == FillState::Filling {
            status.state = FillState::Stopped;
        }
        drop(status);
        missing.stop();
        self.changed.notify_all();
    }

    /// Returns the progress.
    pub(super) fn progress(&self, missing: &MissingSet) -> RestoreProgress {
        let figures = missing.figures();
        let status = self.lock();
        RestoreProgress {
            state: status.state,
            pages: self.pages.contents(),
            placed: figures.pages,
            zero_pages: figures.zero_faults,
            faults: figures.all.faults + figures.zero_faults,
            failed_pages: status.failures,
            error: status.first_failure.clone(),
            hist_us: figures.all.buckets,
        }
    }

    /// Waits until the filling has ended, failed or was stopped, for at most `within`. Returns the
    /// progress.
    pub(super) fn wait(&self, missing: &MissingSet, within: Duration) -> RestoreProgress {
        let waits = |status: &mut FillStatus| status.state == FillState::Filling;
        let waited = self.changed.wait_timeout_while(self.lock(), within, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.progress(missing)
    }

    fn lock(&self) -> MutexGuard<'_, FillStatus> {
        // A poisoned lock is usable: a panic while it is held leaves a consistent state, because
        // each change is a sequence of single assignments.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
