//! Memory that the guest takes and gives up again, page by page, and knows which of it is free.
//!
//! It lies at the end of the guest's memory: first a table with a word for each page of the rest, then those pages. A word is the
//! stamp of a page in use, or 0: the page is free. The table is in guest memory and moves with it; so whoever has the guest can
//! check that no page in use was lost, and nobody minds what became of a free one.

use crate::ram::Ram;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use vmferry_guest_abi::PAGE_WORDS;

/// Deeds between two looks at whether to pause.
const DEEDS: u32 = 8;
/// Of so many pages about one is in use.
const IN_USE_ONE_IN: u64 = 4;

/// What the guest did with its heap, since it came here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeapFigures {
    /// Pages that were free, taken and written.
    pub taken: u64,
    /// Pages that were given up.
    pub freed: u64,
    /// Pages in use that were found as they were left.
    pub checked: u64,
    /// Pages in use that were not.
    pub corrupt: u64,
}

/// The same, for others to look at.
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

/// The heap of one guest. One thread works on it; others may look which pages are free.
#[derive(Debug, Clone)]
pub(crate) struct Heap {
    ram: Ram,
    /// The first page of the table, of everything that a workload can use.
    table: u64,
    /// The first page behind it.
    first: u64,
    /// Pages behind it.
    pages: u64,
}

/// What the thread that works on a heap remembers. It begins anew wherever the guest comes to.
#[derive(Debug)]
pub(crate) struct Churn {
    random: u64,
    /// The first page that was not written for the first time, if any.
    filled: u64,
}

impl Churn {
    /// Of a heap that has its first content, or is to get it.
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
    /// The last `all` pages of `usable` ones; `None` if that is too few for a heap.
    pub(crate) fn new(ram: &Ram, usable: u64, all: u64) -> Option<Self> {
        let table_pages = all.div_ceil(PAGE_WORDS as u64 + 1);
        let pages = all - table_pages;
        let table = usable - all;
        (pages > 0).then(|| Self { ram: ram.clone(), table, first: table + table_pages, pages })
    }

    /// Its pages and its table's.
    pub(crate) fn all_pages(&self) -> u64 {
        self.first - self.table + self.pages
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder below 512")]
        self.ram.word(self.table + page / PAGE_WORDS as u64, (page % PAGE_WORDS as u64) as usize)
    }

    /// Calls `each` for every page that is free at that moment, numbered as everything that a workload can use.
    ///
    /// Whoever tracks writes since before this call finds every write to those pages from that moment on: the guest's word comes
    /// before its first write.
    pub(crate) fn each_free(&self, mut each: impl FnMut(u64)) {
        // Whatever the caller did to track writes comes first.
        fence(Ordering::SeqCst);
        for page in 0..self.pages {
            if self.word(page).load(Ordering::Acquire) == 0 {
                each(self.first + page);
            }
        }
    }

    /// Whether pages are yet to be written for the first time.
    pub(crate) fn is_new(&self, churn: &Churn) -> bool {
        churn.filled < self.pages
    }

    /// A few deeds, or a part of the first content: every page is written once, and most are given up. Says whether all pages
    /// that were looked at were as they should be.
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

    /// Checks every page in use; how many differ. Nobody works on the heap.
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
        // It is in use before it is written: pairs with `each_free`.
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
        // Both ends, and something between.
        let between = (stamp >> 20) as usize % PAGE_WORDS;
        let fine = [0, between, PAGE_WORDS - 1].into_iter().all(same);
        count(if fine { &counts.checked } else { &counts.corrupt });
    }
}

fn content(stamp: u64, word: usize) -> u64 {
    stamp.wrapping_mul(2 * word as u64 + 1)
}
