//! Inflating and deflating.

use super::{Balloon, DEFLATE_ON_OOM, config};
use crate::carve::Carver;
use crate::cpu;
use crate::pool::Pool;
use crate::virtio::{Part, VirtQueue};
use core::sync::atomic::{AtomicU32, Ordering};
use vmferry_guest_abi::balloon::{DEFLATE, INFLATE, MAX_ORDER};
use vmferry_guest_abi::{InflateBy, PAGE_SIZE};
use vmferry_guest_alloc::{Block, List};

/// Number of words of a request: 16384 page numbers, or a header and 4095 ranges.
const WORDS: usize = 16_384;
/// Size of a request's buffer in bytes.
pub(super) const BUFFER_BYTES: u64 = 4 * WORDS as u64;
const RANGES: usize = (WORDS - 2) / 4;

/// Number of pages that are taken back when an allocation needs one.
const DEFLATE_PAGES: u64 = 256;

/// Number of page numbers in a request by default, as in other drivers.
pub(super) const PAGE_NUMBERS: u32 = 256;

/// Queues and pages of the balloon.
#[derive(Debug)]
pub(super) struct Inflatable {
    /// Queue for inflating and queue for deflating.
    queues: [VirtQueue; 2],
    ranges: Option<VirtQueue>,
    words: &'static [AtomicU32],
    list: List,
}

/// Result of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    /// Number of pages that moved into or out of the balloon.
    pub(super) pages: u64,
    /// Time spent allocating or freeing the pages, in ns.
    pub(super) alloc_ns: u64,
    /// Time spent telling the host, in ns.
    pub(super) send_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Inflatable {
    pub(super) fn new(queues: [VirtQueue; 2], ranges: Option<VirtQueue>, carver: &mut Carver) -> Self {
        let words = carver.slice(PAGE_SIZE, WORDS, |_| AtomicU32::new(0));
        Self { queues, ranges, words, list: List::new() }
    }

    /// Puts the pages of a block into the request, after `at` words. Returns the end in words.
    fn write(&self, at: usize, gpa: u64, block: Block, by: InflateBy) -> usize {
        let put = |at: usize, value: u64| {
            // The value is half of a word, or a page number: guest memory ends below 512 GiB.
            #[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
            self.words[at].store(value as u32, Ordering::Relaxed);
        };
        if by == InflateBy::Ranges {
            for (word, value) in [gpa, gpa >> 32, block.bytes(), block.bytes() >> 32].into_iter().enumerate()
            {
                put(at + word, value);
            }
            return at + 4;
        }
        let first = gpa / PAGE_SIZE;
        (0..block.pages()).zip(at..).for_each(|(page, at)| put(at, first + page));
        at + usize::try_from(block.pages()).unwrap_or(0)
    }

    fn send(&mut self, balloon: &Balloon, way: Way, words: usize, by: InflateBy) {
        let gpa = self.words.as_ptr().addr() as u64;
        let len = u32::try_from(4 * words).unwrap_or(0);
        let buffer = [Part { gpa, len, write: false }];
        let queue = match (by, way, &mut self.ranges) {
            (InflateBy::Ranges, _, Some(queue)) => {
                let what = if way == Way::In { INFLATE } else { DEFLATE };
                self.words[0].store(what, Ordering::Relaxed);
                self.words[1].store(u32::try_from((words - 2) / 4).unwrap_or(0), Ordering::Relaxed);
                queue
            }
            (_, Way::In, _) => &mut self.queues[0],
            (_, Way::Out, _) => &mut self.queues[1],
        };
        queue.add(buffer.into_iter());
        queue.exchange(balloon.device);
    }
}

/// Returns the number of words before the first page or range.
fn header(by: InflateBy) -> usize {
    if by == InflateBy::Ranges { 2 } else { 0 }
}

/// Returns the number of pages or ranges that a request holds.
fn most(by: InflateBy) -> usize {
    match by {
        InflateBy::Pages(pages) => usize::try_from(pages).unwrap_or(WORDS).min(WORDS),
        InflateBy::Ranges => RANGES,
    }
}

impl Balloon {
    /// Returns the default portions of requests, if the command line does not give them.
    pub(super) fn usual(&self) -> InflateBy {
        if self.pages.lock().ranges.is_some() { InflateBy::Ranges } else { InflateBy::Pages(PAGE_NUMBERS) }
    }

    /// Gives up to `pages` pages to the host, in one request. Keeps the remaining pages when memory
    /// is low.
    pub(super) fn inflate(&self, pool: &Pool, pages: u64, by: InflateBy) -> Request {
        let mut inflatable = self.pages.lock();
        let now = || pool.clock.ns(cpu::tsc());
        let start = now();
        let (mut request, mut words) = (Request::default(), header(by));
        for _ in 0..most(by) {
            let left = pages - request.pages;
            if left == 0 {
                break;
            }
            let order = if by == InflateBy::Ranges { left.ilog2().min(MAX_ORDER) } else { 0 };
            let block = pool.with(|buddy| {
                let spare = buddy.pages().free().saturating_sub(buddy.pages().low);
                let block = (0..=order)
                    .rev()
                    .filter(|order| 1 << order <= spare)
                    .find_map(|order| buddy.alloc(order))?;
                buddy.push(&mut inflatable.list, block);
                Some((block, buddy.spans().gpa(block)))
            });
            let Some((block, gpa)) = block else { break };
            words = inflatable.write(words, gpa, block, by);
            request.pages += block.pages();
        }
        let allocated = now();
        if request.pages != 0 {
            inflatable.send(self, Way::In, words, by);
            self.count(inflatable.list.pages());
        }
        (request.alloc_ns, request.send_ns) = (allocated - start, now() - allocated);
        request
    }

    /// Takes up to `pages` pages back, in one request. The host is told before they are used.
    pub(super) fn deflate(&self, pool: &Pool, pages: u64, by: InflateBy) -> Request {
        let mut inflatable = self.pages.lock();
        let now = || pool.clock.ns(cpu::tsc());
        let start = now();
        let (mut request, mut words, mut taken) = (Request::default(), header(by), List::new());
        while let Some(block) = pool.with(|buddy| buddy.first(&inflatable.list)) {
            let needs =
                if by == InflateBy::Ranges { 4 } else { usize::try_from(block.pages()).unwrap_or(WORDS) };
            if request.pages + block.pages() > pages.max(block.pages()) || words + needs > WORDS {
                break;
            }
            let gpa = pool.with(|buddy| {
                buddy.pop(&mut inflatable.list);
                buddy.push(&mut taken, block);
                buddy.spans().gpa(block)
            });
            words = inflatable.write(words, gpa, block, by);
            request.pages += block.pages();
            if request.pages >= pages {
                break;
            }
        }
        let listed = now();
        if request.pages != 0 {
            inflatable.send(self, Way::Out, words, by);
            self.count(inflatable.list.pages());
        }
        let told = now();
        while pool.with(|buddy| buddy.pop(&mut taken).map(|block| buddy.free(block))).is_some() {}
        (request.alloc_ns, request.send_ns) = (listed - start + (now() - told), told - listed);
        request
    }

    /// Takes some pages back because an allocation has found none, if host and guest have agreed on
    /// this. Returns true if it did.
    pub(crate) fn deflate_some(&self, pool: &Pool) -> bool {
        if !self.has(DEFLATE_ON_OOM) {
            return false;
        }
        let taken = self.deflate(pool, DEFLATE_PAGES, self.usual()).pages;
        self.taken_back.fetch_add(taken, Ordering::Relaxed);
        taken != 0
    }

    /// Returns the number of pages in the balloon.
    pub(crate) fn actual(&self) -> u64 {
        self.actual.load(Ordering::Relaxed).into()
    }

    fn count(&self, pages: u64) {
        self.actual.store(u32::try_from(pages).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Tells the host the number of pages in the balloon. Not called for each request, because it
    /// causes an exit.
    pub(super) fn tell_actual(&self) {
        self.device.set_config(config::ACTUAL, self.actual.load(Ordering::Relaxed));
    }
}
