//! Memory that is written and checked all the time.
//!
//! Each page holds its number and the number of its writes in its first and last words. The number
//! of writes is also kept outside the page. A page that is lost, old or only half received does not
//! match the kept number.

use anyhow::Result;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_lab::guest_report::GuestReport;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// Pages that are written between two pauses. The guest must work, but not take all of the
/// emulator's time.
const BATCH: usize = 64;
const REST: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct State {
    pages: Vec<[u64; WORDS]>,
    /// Number of writes of each page.
    counts: Vec<u64>,
    writes: u64,
    wrong: u64,
    random: u64,
}

/// Writer and checker of memory.
#[derive(Debug)]
pub(crate) struct Stress {
    state: Arc<Mutex<State>>,
}

impl Stress {
    /// Starts with `bytes` bytes of memory.
    pub(crate) fn start(bytes: usize) -> Result<Self> {
        let mut state = State::new(bytes / PAGE);
        state.fill();
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        std::thread::Builder::new().name("stress".into()).spawn(move || {
            loop {
                shared.lock().unwrap_or_else(PoisonError::into_inner).work(BATCH);
                std::thread::sleep(REST);
            }
        })?;
        Ok(Self { state })
    }

    /// Adds the state of the memory to a report. With `whole`, all pages are checked first.
    pub(crate) fn fill(&self, report: &mut GuestReport, whole: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if whole {
            state.check_all();
        }
        report.stress_pages = state.pages.len() as u64;
        report.stress_writes = state.writes;
        report.stress_wrong = state.wrong;
    }
}

impl State {
    fn new(pages: usize) -> Self {
        Self {
            pages: vec![[0; WORDS]; pages],
            counts: vec![0; pages],
            writes: 0,
            wrong: 0,
            random: 88_172_645_463_325_252,
        }
    }

    /// Fills every page with content that is neither zero nor equal to that of another page.
    fn fill(&mut self) {
        for page in 0..self.pages.len() {
            for word in 0..WORDS {
                self.pages[page][word] = self.next();
            }
            self.write(page);
        }
    }

    /// Returns the next number of Marsaglia's xorshift.
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn work(&mut self, count: usize) {
        for _ in 0..count.min(self.pages.len()) {
            let pages = self.pages.len() as u64;
            let page = usize::try_from(self.next() % pages).unwrap_or(0);
            self.check(page);
            self.write(page);
        }
    }

    fn write(&mut self, page: usize) {
        self.counts[page] += 1;
        self.writes += 1;
        let stamp = Self::stamp(page, self.counts[page]);
        self.pages[page][0] = stamp;
        self.pages[page][WORDS - 1] = !stamp;
    }

    fn check(&mut self, page: usize) {
        let stamp = Self::stamp(page, self.counts[page]);
        // The barrier makes the compiler read the memory, which the migration may have replaced.
        let found = std::hint::black_box(&self.pages[page]);
        if found[0] != stamp || found[WORDS - 1] != !stamp {
            self.wrong += 1;
            println!("LAB-WRONG page {page}: {:x} {:x} instead of {stamp:x}", found[0], found[WORDS - 1]);
        }
    }

    fn check_all(&mut self) {
        (0..self.pages.len()).for_each(|page| self.check(page));
    }

    fn stamp(page: usize, count: u64) -> u64 {
        (page as u64) << 40 | count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_old_and_half_pages_are_detected() {
        let mut state = State::new(8);
        state.fill();
        state.work(64);
        state.check_all();
        assert_eq!(state.wrong, 0);
        let spoilt: [fn(&mut [u64; WORDS]); 3] = [
            |page| page.fill(0),
            |page| (page[0], page[WORDS - 1]) = (page[0] - 1, !(page[0] - 1)),
            |page| page[WORDS - 1] = 7,
        ];
        for (page, spoil) in spoilt.into_iter().enumerate() {
            spoil(&mut state.pages[page]);
        }
        state.check_all();
        assert_eq!(state.wrong, 3);
    }
}
