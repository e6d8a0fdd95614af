//! A thread that fills: it answers the faults of a stripe, or sweeps.

use super::Fill;
use crate::lazy::Fault;
use crate::vm::VmError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_memory::{PAGE_BYTES, PageIndex, PageRun, RegionId};

/// Pages that are brought together, aligned: a fault's neighbours are likely to be wanted next, and somebody who waits for a
/// page that the sweep has claimed waits for no more than these. At most 64, a word of bits.
const WINDOW_PAGES: u64 = 16;
/// How far ahead of the sweep the origin is told what comes.
const AHEAD_PAGES: u64 = 1024;
/// How often a thread without faults looks whether it should end, in case an interrupt went by.
const POLL: Duration = Duration::from_millis(200);

/// Why pages cannot be had, for people: with the page, where it is one.
pub(crate) type Why = Box<dyn std::error::Error + Send + Sync>;

/// Where pages come from. Each thread has one of its own, with its own buffers.
pub(crate) trait PageOrigin: Send {
    /// Which pages of `run` have content: bit `i` for its `i`th page. All others are zeros. `run` is at most 64 pages long
    /// and lies within an aligned run of 64.
    fn contents(&mut self, region: RegionId, run: PageRun) -> Result<u64, Why>;

    /// The content of `run`, whose pages all have some, into `to`, which is as long. It is as it should be, or an error.
    fn read(&mut self, region: RegionId, run: PageRun, to: &mut [u8]) -> Result<(), Why>;

    /// The content of `run` will be asked for soon.
    fn expect(&mut self, region: RegionId, run: PageRun) {
        let _ = (region, run);
    }
}

/// Claims pages, gets them from its origin and places them.
pub(crate) struct Filler<'a, O> {
    fill: &'a Fill,
    origin: O,
    buffer: Vec<u8>,
    /// Pages with content among those that were swept.
    found: u64,
}

impl<'a, O: PageOrigin> Filler<'a, O> {
    pub(super) fn new(fill: &'a Fill, origin: O) -> Self {
        let bytes = PAGE_BYTES * usize::try_from(WINDOW_PAGES).unwrap_or(1);
        Self { fill, origin, buffer: vec![0; bytes], found: 0 }
    }

    /// Answers the faults of `stripe` until it all ends.
    pub(super) fn serve(&mut self, stripe: usize) {
        while !self.fill.ending() {
            match self.fill.memory.next_fault(stripe, POLL) {
                Ok(Some(fault)) => self.answer(fault),
                Ok(None) => {}
                Err(error) => {
                    return self.fill.fail(1, &format!("faults of stripe {stripe} cannot be heard: {error}"));
                }
            }
        }
    }

    fn answer(&mut self, fault: Fault) {
        let heard = Instant::now();
        self.fill.faults.fetch_add(1, Ordering::Relaxed);
        let Some(pages) = self.fill.region(fault.region) else { return };
        let all = pages.claimed.len();
        if fault.page.0 >= all {
            return;
        }
        // The one that somebody waits for goes first, and alone.
        self.bring(fault.region, PageRun::new(fault.page, 1), true);
        if pages.is_placed(fault.page) {
            self.fill.latency.add(heard.elapsed());
            // Another thread may have placed it before this fault was made known, and its wake-up gone by.
            let _ = self.fill.memory.wake(fault.region, fault.page);
        }
        self.bring(fault.region, window(fault.page, all), true);
    }

    /// Brings the pages of `run` that have content, in order; the origin is told what comes.
    pub(crate) fn sweep(&mut self, region: RegionId, run: PageRun) {
        let mut at = run.first.0;
        while at < run.end() && !self.fill.ending() {
            if (at - run.first.0).is_multiple_of(AHEAD_PAGES) {
                let next = at + AHEAD_PAGES..(at + 2 * AHEAD_PAGES).min(run.end());
                if !next.is_empty() {
                    self.origin.expect(region, next.into());
                }
            }
            let end = window(PageIndex(at), run.end()).end();
            self.found += u64::from(self.bring(region, (at..end).into(), false));
            at = end;
        }
    }

    /// Pages with content among those that were swept.
    pub(super) fn found(&self) -> u64 {
        self.found
    }

    /// Claims the pages of `run`, which lies in a window, that nobody has claimed, and places them. Without `zeros` only
    /// those with content: the others read as zeros in the end anyway, and cost memory. Says how many have content, claimed before or not.
    fn bring(&mut self, region: RegionId, run: PageRun, zeros: bool) -> u32 {
        let Some(pages) = self.fill.region(region) else { return 0 };
        let all = u64::MAX >> (64 - run.count);
        let contents = match self.origin.contents(region, run) {
            Ok(contents) => contents & all,
            Err(why) => {
                let lost = pages.claim(run, all);
                if lost != 0 {
                    self.fill.fail(lost.count_ones().into(), &why.to_string());
                }
                return 0;
            }
        };
        let mine = pages.claim(run, if zeros { all } else { contents });
        each_run(run, mine & contents, |run| self.place(region, run));
        each_run(run, mine & !contents, |run| self.place_zeros(region, run));
        contents.count_ones()
    }

    fn place(&mut self, region: RegionId, run: PageRun) {
        let bytes = usize::try_from(run.bytes()).unwrap_or(usize::MAX);
        if let Err(why) = self.origin.read(region, run, &mut self.buffer[..bytes]) {
            if run.count == 1 {
                return self.fill.fail(1, &why.to_string());
            }
            // Its neighbours are not to suffer for one page.
            return run.range().for_each(|page| self.place(region, (page..page + 1).into()));
        }
        let placed = self.fill.memory.place(region, run, &self.buffer[..bytes]);
        self.placed(region, run, placed.map(|_| &self.fill.placed));
    }

    fn place_zeros(&mut self, region: RegionId, run: PageRun) {
        let placed = self.fill.memory.place_zeros(region, run);
        self.placed(region, run, placed.map(|_| &self.fill.zeros));
    }

    fn placed(
        &self,
        region: RegionId,
        run: PageRun,
        counter: Result<&std::sync::atomic::AtomicU64, VmError>,
    ) {
        match (counter, self.fill.region(region)) {
            (Ok(counter), Some(pages)) => {
                pages.placed.set_range(run.range());
                counter.fetch_add(run.count, Ordering::AcqRel);
            }
            (Err(error), _) => {
                self.fill.fail(run.count, &format!("{region} {run} cannot be placed: {error}"))
            }
            (Ok(_), None) => {}
        }
    }
}

/// The window of `page` in a region of `all` pages.
fn window(page: PageIndex, all: u64) -> PageRun {
    let first = page.0 / WINDOW_PAGES * WINDOW_PAGES;
    PageRun::from(first..(first + WINDOW_PAGES).min(all))
}

/// Calls `each` with the runs of pages of `run` that `bits` has.
fn each_run(run: PageRun, mut bits: u64, mut each: impl FnMut(PageRun)) {
    let mut at = run.first.0;
    while bits != 0 {
        let skip = bits.trailing_zeros();
        let count = (bits >> skip).trailing_ones();
        at += u64::from(skip);
        each(PageRun::new(PageIndex(at), count.into()));
        at += u64::from(count);
        // Two shifts: together they may be all 64 bits.
        bits = (bits >> skip).checked_shr(count).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_the_bits(bits: u64, first in 0u64..1000) {
            let mut back = 0;
            let mut last = None;
            each_run(PageRun::new(PageIndex(first), 64), bits, |run| {
                // Maximal: a clear bit between two runs.
                assert!(last.is_none_or(|last| run.first.0 > last) && run.count > 0);
                last = Some(run.end());
                run.range().for_each(|page| back |= 1 << (page - first));
            });
            prop_assert_eq!(back, bits);
        }

        #[test]
        fn windows_hold_their_page_and_stay_inside(page in 0u64..200, more in 1u64..20) {
            let window = window(PageIndex(page), page + more);
            prop_assert!(window.range().contains(&page) && window.end() <= page + more);
            prop_assert!(window.count <= WINDOW_PAGES && window.first.0.is_multiple_of(WINDOW_PAGES));
        }
    }
}
