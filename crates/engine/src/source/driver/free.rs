//! When the driver asks what is free, and what comes of it. The argument is in [`crate::free`].

use super::{Driver, Event, Job, TICK};
use crate::report::Report;
use crate::source::flight::Flight;
use crate::source::skip::Next;
use crate::vm::shielded;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often it is looked whether the guest has answered; less often where looking takes more than [`LOOK_SHARE`] of the time.
const LOOK: Duration = Duration::from_millis(1);
const LOOK_SHARE: u32 = 20;

impl Driver<'_, '_> {
    /// A pass has begun, and its first pages are under way.
    pub(super) fn ask_what_is_free(&mut self, flight: &Flight) {
        // While the guest is paused it was settled at the last harvest.
        if !self.paused
            && let Some(skipping) = &mut self.skipping
        {
            skipping.begin(flight);
        }
        self.count_free(0);
    }

    /// No answer counts any more; the guest may use what it keeps for one.
    pub(super) fn stop_asking(&mut self) {
        if let Some(skipping) = &mut self.skipping {
            shielded("the guest may go on being asked for free pages", || skipping.close());
        }
    }

    /// Goes on with leaving out what is free, for a millisecond or so; returns how long there is nothing to do for it.
    pub(super) fn leave_out_free(&mut self) -> Duration {
        let (Some(skipping), Some(protect)) = (&mut self.skipping, &self.protect) else { return TICK };
        let began = Instant::now();
        let (pages, next) = skipping.step(&mut self.pending, &**protect);
        if pages > 0 || next != Next::Nothing {
            self.count_free(pages);
        }
        match next {
            Next::Now => Duration::ZERO,
            Next::Soon => LOOK.max(began.elapsed() * LOOK_SHARE).min(TICK),
            Next::Nothing => TICK,
        }
    }

    /// The guest is paused, and all that it wrote was harvested.
    pub(super) fn settle_free(&mut self) {
        if let Some(skipping) = &mut self.skipping {
            let pages = skipping.settle(&mut self.pending);
            self.count_free(pages);
        }
    }

    fn count_free(&self, pages: u64) {
        if pages > 0 {
            self.ground.monitor.counters.free.fetch_add(pages, Ordering::Relaxed);
        }
        let (skipped, figures) =
            (self.pending.skipped_count(), self.skipping.as_ref().map(|skipping| skipping.figures()));
        self.ground.monitor.update(|progress| {
            progress.free_pages_skipped = skipped;
            progress.free_pages = figures;
        });
    }

    /// Digests of all that the target has, and that counts.
    pub(super) fn send_digests(&mut self, number: u32) -> Event {
        self.timings.verifying();
        let mut except = self.pending.skipped().clone();
        if let Some(lacking) = &self.handed_over {
            except.union(lacking);
        }
        let pages = self.ground.memory.layout().pages() - except.count();
        self.give_out(&Job::Digests { pass: number, except: Arc::new(except) });
        Event::Comparing { pages }
    }

    pub(super) fn report_free(&self, report: &mut Report) {
        report.free_pages = self.skipping.as_ref().map(|skipping| skipping.figures());
        report.bytes.free_pages_skipped = self.pending.skipped_count();
        if self.ground.settings.verify {
            report.skipped_pages = self.pending.skipped_count();
        }
    }
}
