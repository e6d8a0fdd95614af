//! Pages to send, and the free pages that are skipped. [`crate::free`] gives the proof that a page
//! may be skipped.

use super::Context;
use crate::handle::MigrationHandle;
use crate::report::Report;
use crate::source::inbox::TICK;
use crate::source::pending::{PassPages, PendingPages, Takers};
use crate::source::postcopy::missing_pages;
use crate::source::sender::division;
use crate::source::skip::{Next, Skipping};
use crate::vm::shielded;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_core::{FreePages, GuestMemory, Layout, PageRun, PageSet, Protect};
use vmferry_wire::{Refusal, RefusalCode, RegionRun};

/// Interval at which the source checks for an answer of the guest. The interval is longer if the
/// checks would take more than one part in [`LOOK_SHARE`] of the time.
const LOOK: Duration = Duration::from_millis(1);
const LOOK_SHARE: u32 = 20;

/// Pages to send.
pub(super) struct Pages {
    pub(super) pending: PendingPages,
    /// Skips the guest's free pages. `None` if the guest cannot be asked.
    skipping: Option<Skipping>,
    /// Pages that the target was told are missing. `None` before the handover.
    missing: Option<Arc<PageSet>>,
}

impl Pages {
    /// Creates the value with every page still to be sent. Pages that `free` reports as free are
    /// skipped later.
    pub(super) fn everything(layout: &Layout, free: Option<Box<dyn FreePages>>) -> Self {
        Self {
            pending: PendingPages::everything(layout),
            skipping: free.map(|free| Skipping::new(free, layout)),
            missing: None,
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.pending.count()
    }

    /// Ends the current pass. Returns the set for the pages of a harvest.
    ///
    /// The question of the pass also ends, because an answer that arrives after the harvest may
    /// name a page that the harvest has found.
    pub(super) fn before_harvest(&mut self) -> &mut PageSet {
        self.stop_free_page_requests();
        self.pending.end_pass();
        self.pending.next()
    }

    /// Returns the threads that will take the pages of the next pass, with `channels` senders. With
    /// `asks`, the guest may be asked for its free pages during the pass.
    pub(super) fn takers(&self, protect: &dyn Protect, channels: u16, asks: bool) -> Takers {
        let skipping = self.skipping.as_ref().filter(|_| asks);
        if skipping.is_some_and(|skipping| skipping.asks(self.pending.count(), self.pending.all())) {
            return Takers::SendersAndDriver(division(protect, channels, false));
        }
        Takers::Senders(division(protect, channels, true))
    }

    /// Begins a pass of the pages that the target has named. Returns an error if `runs` contains
    /// pages that do not exist, because the peer can send any value.
    pub(super) fn begin_repeat(
        &mut self,
        layout: &Layout,
        runs: &[RegionRun],
        takers: Takers,
    ) -> Result<Arc<PassPages>, String> {
        let mut set = PageSet::empty(layout);
        for name in runs {
            let run = PageRun::from(name.first..name.first.saturating_add(name.count));
            let region = set.region_mut(name.region).filter(|map| run.end() <= map.len());
            let map = region.ok_or_else(|| {
                format!("the target asks for {run} of {}, which does not exist", name.region)
            })?;
            map.set_range(run.range());
        }
        Ok(self.pending.begin_repeat(set, takers))
    }

    /// Takes the pages that the target must be told are missing: the pending pages, and `also`.
    pub(super) fn take_missing(
        &mut self,
        memory: &dyn GuestMemory,
        also: &[RegionRun],
    ) -> Result<Arc<PageSet>, Refusal> {
        let pending = self.pending.take_all(Some(memory));
        let pending = pending.map_err(|error| {
            Refusal::new(RefusalCode::Other, format!("finding the touched pages failed: {error}"))
        })?;
        let missing = missing_pages(pending, memory.layout(), also);
        let missing = missing.map_err(|why| Refusal::new(RefusalCode::Protocol, why))?;
        self.pending.unskip(&missing);
        Ok(Arc::clone(self.missing.insert(Arc::new(missing))))
    }

    /// Returns the pages that a verification does not compare: skipped free pages, whose content is
    /// not used, and missing pages, which are compared when they arrive.
    pub(super) fn not_compared(&self) -> PageSet {
        let mut except = self.pending.skipped().clone();
        if let Some(missing) = &self.missing {
            except.union(missing);
        }
        except
    }

    /// Asks the guest which pages of `pass` are free. The senders have started with the pass.
    pub(super) fn request_free_pages(&mut self, pass: &PassPages) {
        if let Some(skipping) = &mut self.skipping {
            skipping.begin(pass);
        }
    }

    /// Returns true while the guest itself still has to answer a question of the pass.
    pub(super) fn awaits_guest(&self) -> bool {
        self.skipping.as_ref().is_some_and(Skipping::awaits_guest)
    }

    /// Notes that the pages of a pass were held back for `time`.
    pub(super) fn held_back(&mut self, time: Duration, handle: &MigrationHandle) {
        if let Some(skipping) = &mut self.skipping {
            skipping.held_back(time);
        }
        self.count_free(0, handle);
    }

    /// Drops the open question, so that the guest may use the pages that it holds back for the
    /// answer.
    pub(super) fn stop_free_page_requests(&mut self) {
        if let Some(skipping) = &mut self.skipping {
            shielded("ending the question for free pages failed", || skipping.close());
        }
    }

    /// Continues to skip free pages, for about a millisecond. Returns the time after which this
    /// function must be called again.
    pub(super) fn leave_out_free(
        &mut self,
        protect: Option<&dyn Protect>,
        context: &Context<'_>,
    ) -> Duration {
        let (Some(skipping), Some(protect)) = (&mut self.skipping, protect) else { return TICK };
        let began = context.clock.now();
        let (pages, next) = skipping.step(&mut self.pending, protect);
        if pages > 0 || next != Next::Nothing {
            self.count_free(pages, context.handle);
        }
        match next {
            Next::Now => Duration::ZERO,
            Next::Soon => LOOK.max(context.clock.since(began) * LOOK_SHARE).min(TICK),
            Next::Nothing => TICK,
        }
    }

    /// Skips the pages that are free. The guest must be paused, and all of its writes must be
    /// harvested.
    pub(super) fn skip_free(&mut self, handle: &MigrationHandle) {
        if let Some(skipping) = &mut self.skipping {
            let pages = skipping.skip_free(&mut self.pending);
            self.count_free(pages, handle);
        }
    }

    /// Counts `pages` more skipped pages.
    pub(super) fn count_free(&self, pages: u64, handle: &MigrationHandle) {
        if pages > 0 {
            handle.counters.free.fetch_add(pages, Ordering::Relaxed);
        }
        let (skipped, figures) =
            (self.pending.skipped_count(), self.skipping.as_ref().map(|skipping| skipping.figures()));
        handle.update(|progress| {
            progress.free_pages_skipped = skipped;
            progress.free_pages = figures;
        });
    }

    /// Adds the figures of free pages to `report`. `verified` is true if all other pages were
    /// compared.
    pub(super) fn report(&self, report: &mut Report, verified: bool) {
        report.free_pages = self.skipping.as_ref().map(|skipping| skipping.figures());
        report.bytes.free_pages_skipped = self.pending.skipped_count();
        if verified {
            report.skipped_pages = self.pending.skipped_count();
        }
    }
}
