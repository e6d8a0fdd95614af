//! Placing what comes.

#[cfg(test)]
use super::Flaw;
use super::{Lazy, Place, faults};
use std::sync::atomic::Ordering;
use vmferry_core::{PageIndex, PageRun, VmError};

impl<O> Lazy<O> {
    /// Pages of zeros: nothing is placed unless somebody waits, or may wait.
    pub(crate) fn take_zeros(&self, region: usize, run: PageRun) -> bool {
        #[cfg(test)]
        if self.flaw == Flaw::WaitersFirst {
            self.waiters
                .take(region, run.range(), |waiter| self.zero_at_last(Place { region, page: waiter.page }));
            return self.arrived(region, run).1;
        }
        if !self.single(region) {
            // Somebody may wait for the rest of its huge page, which is shown when nothing of it is missing.
            self.zeros_at_last(region, run);
        }
        let (taken, last) = self.arrived(region, run);
        self.counters.zero_pages.fetch_add(taken, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(run.count - taken, Ordering::Relaxed);
        if !self.single(region) {
            self.release_units(region, run.range());
            return last;
        }
        self.waiters.take(region, run.range(), |waiter| {
            self.zero_at_last(Place { region, page: waiter.page });
            self.latencies.record(waiter.vcpu, self.now().saturating_sub(waiter.since));
        });
        if self.waiters.overflowed() {
            run.range().for_each(|page| self.zero_at_last(Place { region, page }));
        }
        last
    }

    /// Places the contents `bytes` of the pages of `run`. Says whether no page is lacking now, which one call does.
    pub(crate) fn place_run(&self, region: usize, run: PageRun, bytes: &[u8]) -> Result<bool, VmError> {
        #[cfg(test)]
        let early = (self.flaw == Flaw::OffBeforePlaced).then(|| self.arrived(region, run));
        let placed = self.memory.place(self.regions[region].id, run, bytes)?;
        self.counters.pages.fetch_add(placed.pages, Ordering::Relaxed);
        self.counters.duplicates.fetch_add(placed.there, Ordering::Relaxed);
        let (_, last) = self.arrived(region, run);
        #[cfg(test)]
        let last = early.map_or(last, |(_, last)| last);
        self.release_units(region, run.range());
        Ok(last)
    }

    fn zeros(&self, region: usize, run: PageRun) -> Result<(), VmError> {
        let id = self.regions[region].id;
        let placed = self
            .memory
            .place_zeros(id, run)
            .and_then(|placed| if placed.there > 0 { self.memory.wake(id, run.first) } else { Ok(()) });
        // Once faults have ended everything is there, and nothing can be placed.
        if self.stopped() { Ok(()) } else { placed }
    }

    /// Places zeros, as often as it takes: nobody else will do it, and somebody waits.
    fn zeros_at_last(&self, region: usize, run: PageRun) {
        while let Err(error) = self.zeros(region, run) {
            tracing::error!(
                "pages of zeros cannot be placed for somebody who waits for them: {error}; trying again"
            );
            std::thread::sleep(faults::AGAIN);
        }
    }

    /// The same for a page.
    pub(super) fn zero_at_last(&self, place: Place) {
        self.zeros_at_last(place.region, PageRun::new(PageIndex(place.page), 1));
    }
}
