//! Heap of the guest: memory that the guest allocates and frees page by page, and of which it knows
//! the free pages.
//!
//! The heap lies at the end of guest memory. It starts with a table that has one word for each of
//! the pages that follow. The word is the stamp of a page in use, or 0 for a free page. Because the
//! table is in guest memory, it moves with the guest, and the target can check that no page in use
//! was lost. The content of a free page does not matter.

use crate::ram::Ram;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use vmferry_guest_abi::PAGE_WORDS;

/// Number of heap operations between two checks of the gate.
const DEEDS: u32 = 8;
/// Number of heap pages of which about one is in use.
const IN_USE_ONE_IN: u64 = 4;

/// Figures of the heap of a process guest, counted in one process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeapFigures {
    /// Number of free pages that the guest allocated and wrote.
    pub taken: u64,
    /// Number of pages that the guest freed.
    pub freed: u64,
    /// Number of checks of a page in use that found the expected content.
    pub checked: u64,
    /// Number of checks of a page in use that found other content.
    pub corrupt: u64,
}

/// Counters behind [`HeapFigures`], shared with other threads.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    taken: AtomicU64,
    freed: AtomicU64,
    checked: AtomicU64,
    corrupt: AtomicU64,
}

impl Counts {
    pub(crate) fn figures(&self) -> HeapFigures {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        HeapFigures {
            taken: load(&self.taken),
            freed: load(&self.freed),
            checked: load(&self.checked),
            corrupt: load(&self.corrupt),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Heap of one guest. Only one thread allocates and frees pages, and other threads may read the
/// table of free pages.
#[derive(Debug, Clone)]
pub(crate) struct Heap {
    ram: Ram,
    /// First page of the table, counted in the pages that a workload can use.
    table: u64,
    /// First page after the table.
    first: u64,
    /// Number of pages after the table.
    pages: u64,
}

/// State of the thread that works on a heap. The state is not part of the guest and starts anew in
/// each process.
#[derive(Debug)]
pub(crate) struct Churn {
    random: u64,
    /// First page that has never been written, or `u64::MAX` if the heap arrived with its content.
    filled: u64,
}

impl Churn {
    /// Returns the state for a heap. `filled` is true if the heap already has its first content.
    pub(crate) fn new(filled: bool) -> Self {
        Self { random: 0x9e37_79b9_7f4a_7c15, filled: if filled { u64::MAX } else { 0 } }
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

impl Heap {
    /// Returns the heap that consists of the last `all` of the `usable` pages, or `None` if `all`
    /// is too small for a heap.
    pub(crate) fn new(ram: &Ram, usable: u64, all: u64) -> Option<Self> {
        let table_pages = all.div_ceil(PAGE_WORDS as u64 + 1);
        let pages = all - table_pages;
        let table = usable - all;
        (pages > 0).then(|| Self { ram: ram.clone(), table, first: table + table_pages, pages })
    }

    /// Returns the number of pages of the heap, table included.
    pub(crate) fn all_pages(&self) -> u64 {
        self.first - self.table + self.pages
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder below 512")]
        self.ram.word(self.table + page / PAGE_WORDS as u64, (page % PAGE_WORDS as u64) as usize)
    }

    /// Calls `each` for every page that is free at this moment. The argument is the number of the
    /// page among the pages that a workload can use.
    ///
    /// If the caller tracks writes since before this call, it finds every later write to these
    /// pages, because the guest sets the word of a page before it writes the page.
    pub(crate) fn each_free(&self, mut each: impl FnMut(u64)) {
        // Orders the caller's start of write tracking before the loads below.
        fence(Ordering::SeqCst);
        for page in 0..self.pages {
            if self.word(page).load(Ordering::Acquire) == 0 {
                each(self.first + page);
            }
        }
    }

    /// Returns true if pages are left to be written for the first time.
    pub(crate) fn is_new(&self, churn: &Churn) -> bool {
        churn.filled < self.pages
    }

    /// Performs a few heap operations, or a part of the first fill, in which every page is written
    /// once and most pages are freed again. Returns true if all checked pages had the expected
    /// content.
    pub(crate) fn step(&self, churn: &mut Churn, counts: &Counts) -> bool {
        let before = counts.corrupt.load(Ordering::Relaxed);
        for _ in 0..DEEDS {
            let random = churn.next();
            if self.is_new(churn) {
                let page = churn.filled;
                churn.filled += 1;
                self.take(page, random | 1, counts);
                if !random.is_multiple_of(IN_USE_ONE_IN) {
                    self.give_up(page, counts);
                }
                continue;
            }
            let page = (random >> 16) % self.pages;
            let stamp = self.word(page).load(Ordering::Relaxed);
            match (stamp, random % IN_USE_ONE_IN) {
                (0, 0) => self.take(page, random | 1, counts),
                (0, _) => {}
                (stamp, 0) => {
                    self.check(page, stamp, counts);
                }
                (stamp, _) => {
                    self.check(page, stamp, counts);
                    self.give_up(page, counts);
                }
            }
        }
        counts.corrupt.load(Ordering::Relaxed) == before
    }

    /// Checks every page in use, and returns the number of pages with unexpected content. No thread
    /// may work on the heap during the call.
    pub(crate) fn check_all(&self) -> u64 {
        let counts = Counts::default();
        for page in 0..self.pages {
            let stamp = self.word(page).load(Ordering::Relaxed);
            if stamp != 0 {
                self.check(page, stamp, &counts);
            }
        }
        counts.figures().corrupt
    }

    fn take(&self, page: u64, stamp: u64, counts: &Counts) {
        self.word(page).store(stamp, Ordering::Relaxed);
        // The page is marked as in use before it is written. Pairs with the fence in `each_free`.
        fence(Ordering::SeqCst);
        for word in 0..PAGE_WORDS {
            self.ram.word(self.first + page, word).store(content(stamp, word), Ordering::Relaxed);
        }
        count(&counts.taken);
    }

    fn give_up(&self, page: u64, counts: &Counts) {
        self.word(page).store(0, Ordering::Release);
        count(&counts.freed);
    }

    fn check(&self, page: u64, stamp: u64, counts: &Counts) {
        let same = |word: usize| {
            self.ram.word(self.first + page, word).load(Ordering::Relaxed) == content(stamp, word)
        };
        // The first word, the last word and one in between.
        let between = (stamp >> 20) as usize % PAGE_WORDS;
        let fine = [0, between, PAGE_WORDS - 1].into_iter().all(same);
        count(if fine { &counts.checked } else { &counts.corrupt });
    }
}

fn content(stamp: u64, word: usize) -> u64 {
    stamp.wrapping_mul(2 * word as u64 + 1)
}
