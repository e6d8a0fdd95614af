//! Tests of reporting on a machine whose host really drops the reported memory.

use super::*;
use crate::{ASYNC_ENTRIES, SYNC_ENTRIES, Spans};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::vec;
use std::vec::Vec;
use vmferry_guest_abi::{PAGE_SIZE, PAGE_WORDS};

/// Guest-physical address of the start of memory.
const START: u64 = 0x12_3000;

/// Declares a machine with this number of pages. Its borrowed values live as long as the calling
/// block.
macro_rules! machine {
    ($machine:pat, $pages:expr) => {
        let spans = spans($pages);
        let mut words = words(&spans);
        let $machine = Model::new(spans, &mut words);
    };
}
pub(crate) use machine;

/// Declares the heap of the only vCPU, which reports its own blocks from a buffer with this number
/// of entries, `$slots` blocks at a time.
macro_rules! own_heap {
    ($heap:pat, $entries:expr, $slots:expr) => {
        let entries = entries(1, $entries);
        let buffers = buffers(&entries);
        let mut slots = [Block::default(); $slots];
        let $heap = Heap::new(&buffers, 0, Reports::Own, true, Batch::new(&mut slots));
    };
}
pub(crate) use own_heap;

/// Machine with words as memory. Each read of the clock advances it by `look_ns`, and
/// [`advance`](Self::advance) by more.
pub(crate) struct Model<'a> {
    buddy: Mutex<Buddy<'a>>,
    memory: Vec<AtomicU64>,
    now: AtomicU64,
    /// Time that passes with each read of the clock, in ns.
    look_ns: u64,
    claimed: AtomicBool,
    /// True if the host has processed all hints.
    processes_hints: bool,
    pub(crate) most: usize,
    /// Number of reports.
    pub(crate) reports: AtomicU64,
    /// Number of pages that a report drops beyond its blocks, to show that this is detected.
    pub(crate) greed: u64,
}

pub(crate) fn spans(pages: u64) -> Spans {
    let mut spans = Spans::new();
    spans.add(START, START + pages * PAGE_SIZE, 0).unwrap();
    spans
}

pub(crate) fn words(spans: &Spans) -> Vec<u64> {
    vec![0; usize::try_from(spans.frames()).unwrap()]
}

impl<'a> Model<'a> {
    pub(crate) fn new(spans: Spans, words: &'a mut [u64]) -> Self {
        let bytes = usize::try_from(spans.pages()).unwrap() * PAGE_WORDS;
        Self {
            buddy: Mutex::new(Buddy::new(spans, words)),
            memory: (0..bytes).map(|_| AtomicU64::new(0)).collect(),
            now: AtomicU64::new(1_000_000_000),
            look_ns: 1000,
            claimed: AtomicBool::new(false),
            processes_hints: true,
            most: 64,
            reports: AtomicU64::new(0),
            greed: 0,
        }
    }

    pub(crate) fn advance(&self, ns: u64) {
        self.now.fetch_add(ns, Ordering::Relaxed);
    }

    fn word(&self, gpa: u64) -> &AtomicU64 {
        &self.memory[usize::try_from((gpa - START) / 8).unwrap()]
    }
}

impl Machine for Model<'_> {
    fn with<R>(&self, work: impl FnOnce(&mut Buddy<'_>) -> R) -> R {
        work(&mut self.buddy.lock().unwrap_or_else(PoisonError::into_inner))
    }
    fn now_ns(&self) -> u64 {
        self.now.fetch_add(self.look_ns, Ordering::Relaxed)
    }
    fn load(&self, gpa: u64) -> u64 {
        self.word(gpa).load(Ordering::Relaxed)
    }
    fn store(&self, gpa: u64, value: u64) {
        self.word(gpa).store(value, Ordering::Relaxed);
    }
    fn relieve(&self) -> Relief {
        self.with(|buddy| match buddy.pages().held {
            0 => Relief::None,
            _ if self.processes_hints => {
                buddy.release_held(1);
                Relief::Hinted
            }
            _ => Relief::Held,
        })
    }
    fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::Acquire)
    }
    fn most(&self) -> usize {
        self.most
    }
    fn report(&self, blocks: &[Block]) {
        assert!(self.claimed.load(Ordering::Relaxed) && (1..=self.most).contains(&blocks.len()));
        for block in blocks {
            let gpa = self.with(|buddy| buddy.spans().gpa(*block));
            let end = self.memory.len() as u64 * 8 + START;
            let words = gpa..(gpa + block.bytes() + self.greed * PAGE_SIZE).min(end);
            words.step_by(8).for_each(|gpa| self.store(gpa, 0));
        }
        self.reports.fetch_add(1, Ordering::Relaxed);
    }
    fn release(&self) {
        assert!(self.claimed.swap(false, Ordering::Release));
    }
}

pub(crate) fn entries(cpus: usize, each: usize) -> Vec<Vec<AtomicU64>> {
    (0..cpus).map(|_| (0..each).map(|_| AtomicU64::new(0)).collect()).collect()
}

pub(crate) fn buffers(entries: &[Vec<AtomicU64>]) -> Vec<FreeBuffer<'_>> {
    entries.iter().map(|entries| FreeBuffer::new(entries)).collect()
}

/// Ticks until nothing has been freed for a long time, and a few times more.
pub(crate) fn advance_past_flush(machine: &Model<'_>, heaps: &mut [Heap<'_>]) {
    for _ in 0..80 {
        machine.advance(FLUSH_NS / 10);
        heaps.iter_mut().for_each(|heap| heap.tick(machine, machine.now_ns()));
    }
}

#[test]
fn full_buffer_is_reported_by_the_vcpu_that_filled_it() {
    machine!(machine, 8192);
    own_heap!(mut heap, SYNC_ENTRIES, 512);
    // Frees every second page, so that nothing merges.
    let blocks: Vec<_> = (0..2048).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
    for block in blocks.iter().step_by(2).take(511) {
        machine.store(machine.with(|buddy| buddy.spans().gpa(*block)), 7);
        heap.free(&machine, *block);
    }
    assert_eq!(machine.reports.load(Ordering::Relaxed), 0);
    heap.free(&machine, blocks[1022]);
    // 512 blocks, 64 in a report.
    assert_eq!((machine.reports.load(Ordering::Relaxed), heap.stats().report_blocks), (8, 512));
    assert_eq!(machine.with(|buddy| (buddy.pages().unreported, buddy.pages().isolated)), (0, 0));
    assert_eq!(machine.load(machine.with(|buddy| buddy.spans().gpa(blocks[0]))), 0);
    assert_eq!((heap.stats().flushes, heap.stats().reports), (1, 8));
    assert_eq!((heap.stats().full, heap.stats().missed), (1, 0));
    // Reported blocks are not reported again.
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.reports.load(Ordering::Relaxed), 8);
}

#[test]
fn rest_of_a_buffer_is_reported_after_a_quiet_time() {
    machine!(machine, 8192);
    own_heap!(mut heap, SYNC_ENTRIES, 512);
    let large = heap.alloc(&machine, 10).unwrap();
    heap.free(&machine, large);
    // A part of the block is in use again, and the rest has no entry of its own.
    let small = heap.alloc(&machine, 0).unwrap();
    heap.tick(&machine, machine.now_ns());
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 1023);
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
    assert_eq!(heap.stats().report_bytes, 1023 * PAGE_SIZE);
    assert!(large.contains(small));
}

#[test]
fn small_blocks_wait_until_they_have_merged_or_are_idle() {
    machine!(machine, 8192);
    own_heap!(heap, 16, 64);
    let mut heap = heap.reporting_from(9);
    let mut blocks: Vec<_> = (0..4096).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
    blocks.sort_unstable();
    let first = blocks.iter().position(|block| block.frame.is_multiple_of(1024)).unwrap();
    let large = &blocks[first..first + 1024];
    let mut lone = blocks.iter().filter(|block| !large.contains(block)).step_by(2);
    large.iter().for_each(|block| heap.free(&machine, *block));
    lone.by_ref().take(16).for_each(|block| heap.free(&machine, *block));
    // The buffer was full, but one block is not worth a report. Without further frees it is
    // reported all the same.
    assert_eq!((heap.stats().full, heap.stats().reports), (1, 0));
    heap.pass_on(&machine);
    assert_eq!((heap.stats().report_blocks, heap.stats().report_bytes), (1, 1024 * PAGE_SIZE));
    assert!(machine.with(|buddy| buddy.pages().unreported) >= 15);

    // Pages that are used repeatedly stay. Those next to them are reported.
    lone.for_each(|block| heap.free(&machine, *block));
    let before = heap.stats().report_bytes;
    for _ in 0..10 {
        let wanted: Vec<_> = (0..100).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
        machine.advance(IDLE_NS / 4);
        heap.tick(&machine, machine.now_ns());
        wanted.into_iter().for_each(|block| heap.free(&machine, block));
        machine.advance(FLUSH_NS / 4);
        heap.tick(&machine, machine.now_ns());
    }
    let kept = machine.with(|buddy| buddy.pages().unreported);
    assert!((100..200).contains(&kept) && heap.stats().report_bytes > before, "{kept}");
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
}

#[test]
fn full_buffer_is_reported_if_sixteen_of_its_blocks_are_worth_it() {
    machine!(machine, 8192);
    own_heap!(heap, 32, 64);
    let mut heap = heap.reporting_from(5);
    let mut alone = |order| {
        let mut blocks: Vec<_> = (0..64).map(|_| heap.alloc(&machine, order).unwrap()).collect();
        blocks.sort_unstable();
        blocks.into_iter().step_by(2)
    };
    let (mut large, mut small) = (alone(5), alone(0));
    let free = |heap: &mut Heap<'_>, blocks: &mut dyn Iterator<Item = Block>| {
        blocks.for_each(|block| heap.free(&machine, block));
    };
    free(&mut heap, &mut large.by_ref().take(15));
    free(&mut heap, &mut small.by_ref().take(17));
    // The small blocks have left the buffer, so it has room for 17 more.
    assert_eq!((heap.stats().full, heap.stats().reports), (1, 0));
    free(&mut heap, &mut small.by_ref().take(15));
    free(&mut heap, &mut large.by_ref().take(2));
    assert_eq!((heap.stats().full, heap.stats().reports, heap.stats().missed), (2, 1, 0));
    assert_eq!(heap.stats().report_bytes, 17 * 32 * PAGE_SIZE);
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
}

#[test]
fn off_reports_nothing() {
    machine!(machine, 4096);
    let mut slots = [Block::default(); 64];
    let mut heap = Heap::new(&[], 0, Reports::Own, true, Batch::new(&mut slots));
    let blocks: Vec<_> = (0..1000).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
    blocks.into_iter().for_each(|block| heap.free(&machine, block));
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.reports.load(Ordering::Relaxed), 0);
    assert!(machine.with(|buddy| buddy.pages().unreported) >= 1000);
}

#[test]
fn other_vcpu_reports_a_buffer_that_was_handed_over() {
    machine!(machine, 8192);
    let entries = entries(2, ASYNC_ENTRIES);
    let buffers = buffers(&entries);
    let (mut first, mut second) = ([Block::default(); 512], [Block::default(); 512]);
    let mut freer = Heap::new(&buffers, 0, Reports::Handed, false, Batch::new(&mut first));
    let mut reporter = Heap::new(&buffers, 1, Reports::ForAll, true, Batch::new(&mut second));
    let blocks: Vec<_> = (0..4096).map(|_| freer.alloc(&machine, 0).unwrap()).collect();
    for block in blocks.iter().step_by(2).take(1200) {
        freer.free(&machine, *block);
    }
    assert_eq!((freer.stats().reports, freer.stats().full, freer.stats().missed), (0, 1, 200));
    machine.advance(5_000_000);
    reporter.tick(&machine, machine.now_ns());
    assert_eq!((reporter.stats().report_blocks, buffers[0].is_empty()), (1000, true));
    let mut heaps = [freer, reporter];
    advance_past_flush(&machine, &mut heaps);
    // The sweep finds the blocks that were not noted.
    assert_eq!((heaps[0].stats().reports, heaps[1].stats().report_blocks), (0, 1200));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
}

#[test]
fn freeing_vcpu_does_not_wait_for_a_reporting_vcpu() {
    machine!(machine, 8192);
    own_heap!(mut heap, SYNC_ENTRIES, 512);
    let blocks: Vec<_> = (0..2000).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
    assert!(machine.claim());
    blocks.iter().step_by(2).take(600).for_each(|block| heap.free(&machine, *block));
    assert_eq!((heap.stats().reports, heap.stats().missed), (0, 88));
    assert_eq!((heap.stats().deferred, heap.stats().low), (89, 0));
    machine.release();
    // The next free reports. The one page without room is found later.
    heap.free(&machine, blocks[1200]);
    assert_eq!(heap.stats().report_blocks, 512);
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
}

#[test]
fn reporting_stops_when_memory_is_low() {
    machine!(machine, 8192);
    own_heap!(mut heap, 16, 64);
    let blocks: Vec<_> = (0..8192 - 100).map(|_| heap.alloc(&machine, 0).unwrap()).collect();
    blocks.iter().step_by(2).take(100).for_each(|block| heap.free(&machine, *block));
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.reports.load(Ordering::Relaxed), 0);
    assert!(heap.stats().low > 0 && heap.stats().low <= heap.stats().deferred);
    blocks.iter().skip(1).step_by(2).for_each(|block| heap.free(&machine, *block));
    advance_past_flush(&machine, std::slice::from_mut(&mut heap));
    assert_eq!(machine.with(|buddy| buddy.pages().unreported), 0);
}

#[test]
fn allocation_waits_only_for_memory_that_is_being_reported() {
    let spans = spans(4096);
    let mut words = words(&spans);
    // The waiting thread reads the clock for as long as the host keeps the other thread from
    // running. Its time must not run out meanwhile.
    let machine = Model { look_ns: 0, ..Model::new(spans, &mut words) };
    let mut slots = [Block::default(); 64];
    let mut heap = Heap::new(&[], 0, Reports::Off, false, Batch::new(&mut slots));
    let block = heap.alloc(&machine, 5).unwrap();
    heap.free(&machine, block);
    let mut isolated = [Block::default(); 4];
    let mut batch = Batch::new(&mut isolated);
    assert_eq!(machine.with(|buddy| buddy.isolate(block, 0, &mut batch)), Taken::All);
    while machine.with(|buddy| buddy.pages().free()) > 0 {
        heap.alloc(&machine, 10).unwrap();
    }
    assert_eq!((heap.stats().waits, heap.stats().failed), (0, 0));
    let got = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| heap.alloc(&machine, 3));
        // The other thread then waits, unless this host is busy. Both orders must have the same
        // result.
        std::thread::sleep(std::time::Duration::from_millis(1));
        machine.with(|buddy| buddy.put_back(block));
        waiting.join().unwrap()
    });
    // The allocation came too early and waited, or the block was back before it checked.
    assert!(got.is_some_and(|got| block.contains(got)));
    while machine.with(|buddy| buddy.alloc(0)).is_some() {}
    // Nothing is isolated, so the allocation fails without a wait.
    assert_eq!((heap.alloc(&machine, 0), heap.stats().failed), (None, 1));
    assert!(heap.stats().wait_ns < WAIT_NS);
}

#[test]
fn wait_for_a_host_that_never_answers_ends() {
    machine!(machine, 4096);
    let mut slots = [Block::default(); 64];
    let mut heap = Heap::new(&[], 0, Reports::Off, false, Batch::new(&mut slots));
    let block = heap.alloc(&machine, 0).unwrap();
    heap.free(&machine, block);
    let mut isolated = [Block::default(); 4];
    machine.with(|buddy| buddy.isolate(block, 0, &mut Batch::new(&mut isolated)));
    while machine.with(|buddy| buddy.alloc(0)).is_some() {}
    assert_eq!(heap.alloc(&machine, 0), None);
    assert!(heap.stats().waits == 1 && heap.stats().wait_ns >= WAIT_NS);
    assert_eq!((heap.stats().waits_reported, heap.stats().wait_max_ns), (1, heap.stats().wait_ns));
}

#[test]
fn hinted_pages_are_taken_back_when_memory_is_short() {
    machine!(machine, 4096);
    let mut slots = [Block::default(); 64];
    let mut heap = Heap::new(&[], 0, Reports::Off, false, Batch::new(&mut slots));
    let mut held = [Block::default(); 64];
    machine.with(|buddy| buddy.hold(64, &mut Batch::new(&mut held)));
    assert!(machine.with(|buddy| buddy.pages().held) > 3000);
    let mut pages = 0;
    while let Some(block) = heap.alloc(&machine, 10) {
        pages += block.pages();
    }
    assert_eq!(pages, 4096);
    // The last allocation found no page at all, and is none of the waits for hinted pages.
    assert!(heap.stats().waits_held > 0 && heap.stats().waits_held < heap.stats().waits);
    assert_eq!((heap.stats().failed, heap.stats().failed_held), (1, 0));
}

#[test]
fn allocation_fails_and_is_counted_while_the_host_has_hints_to_process() {
    let spans = spans(4096);
    let mut words = words(&spans);
    let machine = Model { processes_hints: false, ..Model::new(spans, &mut words) };
    let mut slots = [Block::default(); 64];
    let mut heap = Heap::new(&[], 0, Reports::Off, false, Batch::new(&mut slots));
    let mut held = [Block::default(); 64];
    machine.with(|buddy| buddy.hold(64, &mut Batch::new(&mut held)));
    while heap.alloc(&machine, 10).is_some() {}
    assert_eq!((heap.stats().failed, heap.stats().failed_held, heap.stats().waits_held), (1, 1, 0));
}
