//! Populates guest memory ahead of the receivers, so that a receiver does not spend its time in page
//! faults.
//!
//! The source announces the blocks of 2 MiB of which the guest has touched every page. A few threads
//! populate announced blocks that lie a bounded distance ahead of the last frame. These threads give
//! way to others.
//!
//! | rule | reason |
//! |---|---|
//! | only announced blocks are populated | a page that the guest has never touched stays unallocated |
//! | at most as many threads as the host has [spare processors](Spare) | a thread must not take a processor from a receiver |
//! | at least as far before the last frame as the receivers come in two [calls](State::lead) | a receiver that reaches the block during the call would allocate it too. The kernel would clear two huge pages and discard one |
//! | at most [`DISTANCE`] blocks before the last frame | a page stays in the cache of the processor only for a short time, and the source may skip free pages |
//! | at most [a few pages](vain), and a [`SHARE`] of the arrived pages, are populated and have not arrived | announced pages may be zero or free, and then do not arrive |
//! | only during the first pass | later passes send pages that are already allocated |
//!
//! # Demand paging
//! A page that is populated after demand paging has begun would be present with zeros, and the
//! content of the page would never be placed. Therefore [`Ahead::close`] returns only after the last
//! call of [`GuestMemory::populate`] has returned, and the target calls it before it seals memory.

use super::spare::Processors;
#[cfg(doc)]
use super::spare::Spare;
use crate::handle::thread_cpu;
use crate::idle::INTERVAL;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{GuestMemory, Layout, PageIndex, PageRun, RegionId};
use vmferry_wire::{RunKind, Table};

/// Number of pages of a block: 2 MiB, the size of a huge page.
const BLOCK: u64 = 512;
/// Minimum distance in blocks between the last frame and a block that is populated: 8 MiB, which
/// take a fast link 2 ms. Most calls are shorter.
const LEAD: u64 = 4;
/// Maximum distance in blocks between the last frame and a block that is populated: 64 MiB.
const DISTANCE: u64 = 32;
/// Maximum number of pages that may be populated in vain before any page arrives: 32 MiB.
const MOST_VAIN: u64 = 8192;
/// Divisor of the guest's pages and of the arrived pages. The quotients are the numbers of pages
/// that may be populated in vain before any page arrives, and after.
const SHARE: u64 = 16;
/// Minimum number of pages for which a receiver populates memory in one call. For fewer pages, the
/// page faults cost no more than the call.
const LEAST: u64 = 8;
/// Maximum number of threads that populate memory.
const MOST_THREADS: usize = 8;

/// Returns the number of threads that populate memory for `channels` bulk channels: one for each
/// channel, while a processor is left for a receiver. With a single processor, there are none.
pub(super) fn threads(channels: usize) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    channels.min(MOST_THREADS).min(cpus - 1)
}

/// Returns the number of pages that may be populated in vain before any page arrives, for a guest
/// with `pages` pages: a [`SHARE`] of its pages, at least one block, and at most [`MOST_VAIN`].
fn vain(pages: u64) -> u64 {
    (pages / SHARE).clamp(BLOCK, MOST_VAIN)
}

/// Blocks that are populated ahead of the receivers.
#[derive(Debug)]
pub(crate) struct Ahead {
    state: Mutex<State>,
    /// Wakes threads that populate memory.
    work: Condvar,
    /// Wakes threads that wait for the end of all calls.
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    /// Blocks of each region, in the order of the layout.
    regions: Vec<Blocks>,
    /// Position of the region of the last frame, and the block after the frame.
    front: (usize, u64),
    /// Number of pages with content that arrived.
    arrived: u64,
    /// Time at which the first of them arrived.
    began: Option<Instant>,
    /// Number of populated pages that have not arrived.
    unused: u64,
    /// Number of pages that may be populated in vain before any page arrives.
    vain: u64,
    /// Number of threads that may populate memory at the moment.
    spare: usize,
    /// Number of running calls of [`GuestMemory::populate`] on threads of [`run`](Ahead::run).
    calls: usize,
    /// Number of bulk channels on which the first pass has not ended.
    channels: usize,
    /// True if no further block may be populated.
    closed: bool,
}

#[derive(Debug)]
struct Blocks {
    id: RegionId,
    /// Blocks that the source has announced, without those that a thread has taken or a page has reached.
    announced: Bitmap,
    /// Blocks that a thread has taken to populate them. Such a block is not taken again.
    taken: Bitmap,
}

impl Ahead {
    pub(crate) fn new(layout: &Layout) -> Self {
        let blocks = |region: &vmferry_core::Region| Blocks {
            id: region.id,
            announced: Bitmap::new(region.pages() / BLOCK),
            taken: Bitmap::new(region.pages() / BLOCK),
        };
        let regions = layout.regions().iter().map(blocks).collect();
        let state = State {
            regions,
            front: (0, 0),
            arrived: 0,
            began: None,
            unused: 0,
            vain: vain(layout.pages()),
            spare: 0,
            calls: 0,
            channels: 0,
            closed: false,
        };
        Self { state: Mutex::new(state), work: Condvar::new(), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Populates blocks of `memory` until [`stop`](Self::stop) is called, or until the memory
    /// refuses. No block is populated while no processor is spare.
    pub(super) fn run(&self, memory: &dyn GuestMemory, processors: &impl Processors) {
        vmferry_thread::scheduling::give_way();
        // Expected duration of a call. It falls while no block is populated, so that a single long
        // call does not end populating.
        let mut expected = Duration::ZERO;
        loop {
            // The processors are measured without the lock, which receivers need, and not before
            // the receivers are at work.
            let began = self.lock().began.is_some();
            let spare = if began { processors.spare() } else { 0 };
            let mut state = self.lock();
            if state.closed {
                return;
            }
            state.spare = spare;
            let lead = state.lead(expected);
            let next = if state.calls < spare { state.next(lead) } else { None };
            let Some((region, run)) = next else {
                expected -= expected / 8;
                // A thread that has nothing to do also measures the processors at times.
                drop(self.work.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner));
                continue;
            };
            state.calls += 1;
            drop(state);
            let (call, began, cpu) = (Call(self), Instant::now(), thread_cpu());
            let populated = memory.populate(region, run);
            let elapsed = began.elapsed();
            processors.used(elapsed, thread_cpu().saturating_sub(cpu));
            expected = elapsed.max(expected - expected / 8);
            drop(call);
            if !populated {
                self.stop();
            }
        }
    }

    /// Wakes a thread if there is a block for it.
    fn wake(&self, state: &State) {
        if state.calls < state.spare && state.candidate(LEAD).is_some() {
            self.work.notify_one();
        }
    }

    /// Notes the pages of a frame that announces touched pages.
    pub(crate) fn announce(&self, region: RegionId, table: &Table<'_>) {
        let mut state = self.lock();
        if !state.closed {
            table.runs().for_each(|entry| state.announce(region, entry.run));
            self.wake(&state);
        }
    }

    /// Notes the pages of a frame that is about to be received. Returns true if the caller should
    /// populate the pages itself.
    pub(crate) fn arrive(&self, region: RegionId, table: &Table<'_>) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        let (mut all, waiting) = (true, state.began.is_none());
        for entry in table.runs() {
            all &= state.arrive(region, entry.run, entry.kind);
        }
        if waiting && state.began.is_some() {
            // The threads measure the processors from now on.
            self.work.notify_all();
        }
        self.wake(&state);
        !all
    }

    /// Populates the pages of `run`. None of them has arrived before. The caller must keep memory
    /// from being sealed.
    pub(crate) fn populate(&self, memory: &dyn GuestMemory, region: RegionId, run: PageRun) {
        if run.count >= LEAST && !memory.populate(region, run) {
            self.stop();
        }
    }

    /// Notes a bulk channel, on which the first pass begins.
    pub(crate) fn join(&self) {
        self.lock().channels += 1;
    }

    /// Notes that the first pass has ended on a bulk channel. If it was the last channel, populating
    /// ends. A channel without pages ends its pass at once.
    pub(crate) fn leave(&self) {
        let mut state = self.lock();
        state.channels = state.channels.saturating_sub(1);
        if state.channels == 0 {
            drop(state);
            self.stop();
        }
    }

    /// Ends populating. Calls that are under way continue: see [`close`](Self::close).
    pub(crate) fn stop(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Ends populating, and waits for the calls that are under way. After this call, no thread
    /// populates a block.
    pub(crate) fn close(&self) {
        self.stop();
        let under_way = |state: &mut State| state.calls > 0;
        drop(self.ended.wait_while(self.lock(), under_way).unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns true if no further block will be populated.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

/// Running call of [`GuestMemory::populate`]. Dropping it ends the call, also after a panic of the
/// VMM's code.
struct Call<'a>(&'a Ahead);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.calls -= 1;
        state.closed |= std::thread::panicking();
        self.0.ended.notify_all();
    }
}

impl State {
    /// Returns the blocks of region `id`, and the position of the region.
    fn blocks(&mut self, id: RegionId) -> Option<(usize, &mut Blocks)> {
        self.regions.iter_mut().enumerate().find(|(_, blocks)| blocks.id == id)
    }

    /// Notes that the source has announced the pages of `run`.
    ///
    /// The frame is a hint of an untrusted peer. A block that was populated is not populated again,
    /// so announcements can cost only the memory that [`next`](Self::next) allows.
    fn announce(&mut self, id: RegionId, run: PageRun) {
        let Some((position, blocks)) = self.blocks(id) else { return };
        let whole = run.first.0.div_ceil(BLOCK)..(run.end() / BLOCK).min(blocks.announced.len());
        if whole.is_empty() {
            return;
        }
        blocks.announced.set_range(whole);
        // The blocks before `front` are those of a region that was sent before.
        self.front = self.front.max((position, 0));
    }

    /// Notes that the pages of `run` arrive. Returns true if their blocks are populated, or if the
    /// pages need no memory.
    fn arrive(&mut self, id: RegionId, run: PageRun, kind: RunKind) -> bool {
        let Some((position, blocks)) = self.blocks(id) else { return true };
        let end = run.end().div_ceil(BLOCK);
        // The last pages of a region may not be a whole block.
        let reached = run.first.0 / BLOCK..end.min(blocks.announced.len());
        if !reached.is_empty() {
            blocks.announced.clear_range(reached.clone());
        }
        let mut used = 0;
        if kind == RunKind::Data {
            for block in reached.filter(|block| blocks.taken.test(*block)) {
                used += run.end().min((block + 1) * BLOCK) - run.first.0.max(block * BLOCK);
            }
            self.began.get_or_insert_with(Instant::now);
            self.arrived += run.count;
        }
        self.front = self.front.max((position, end));
        // A source that sends a page twice in the first pass only gets more memory populated.
        self.unused = self.unused.saturating_sub(used);
        kind == RunKind::Zero || used == run.count
    }

    /// Returns the minimum distance in blocks between the last frame and a block that a call of
    /// duration `call` populates. The receivers must not reach the block before the call ends.
    fn lead(&self, call: Duration) -> u64 {
        let elapsed = self.began.map_or(Duration::MAX, |began| began.elapsed());
        lead(call, self.arrived, elapsed)
    }

    /// Takes the next block that may be populated, at least `lead` blocks before the last frame.
    fn next(&mut self, lead: u64) -> Option<(RegionId, PageRun)> {
        let block = self.candidate(lead)?;
        let blocks = self.regions.get_mut(self.front.0)?;
        blocks.announced.test_and_clear(block);
        blocks.taken.set(block);
        self.unused += BLOCK;
        Some((blocks.id, PageRun::new(PageIndex(block * BLOCK), BLOCK)))
    }

    /// Returns the block of the last frame's region that [`next`](Self::next) takes.
    fn candidate(&self, lead: u64) -> Option<u64> {
        if self.unused + BLOCK > self.vain + self.arrived / SHARE {
            return None;
        }
        let (position, front) = self.front;
        let blocks = self.regions.get(position)?;
        let mut from = front + lead;
        while let Some(block) = blocks.announced.next_set(from).filter(|block| *block < front + DISTANCE) {
            if !blocks.taken.test(block) {
                return Some(block);
            }
            from = block + 1;
        }
        None
    }
}

/// Returns the number of blocks that the receivers reach in two calls of duration `call`, and one
/// more, if `arrived` pages have arrived within `elapsed`. The result is [`LEAD`] to [`DISTANCE`].
fn lead(call: Duration, arrived: u64, elapsed: Duration) -> u64 {
    let pages = call.as_nanos().saturating_mul(2 * u128::from(arrived)) / elapsed.as_nanos().max(1);
    let blocks = u64::try_from(pages).unwrap_or(u64::MAX) / BLOCK;
    blocks.saturating_add(1).clamp(LEAD, DISTANCE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use vmferry_core::{Gpa, PageDigest, Region, VmError, Window};
    use vmferry_wire::{FrameKind, TableWriter};

    const REGION: RegionId = RegionId(3);

    /// Memory whose content is never transferred.
    struct Blank {
        layout: Layout,
        calls: AtomicU64,
        /// True while a call may not return.
        holds: AtomicBool,
        refuses: bool,
    }

    impl Blank {
        fn new(blocks: u64) -> Self {
            let layout = Layout::new(vec![Region { id: REGION, gpa: Gpa(0), len: blocks << 21 }]).unwrap();
            Self { layout, calls: AtomicU64::new(0), holds: AtomicBool::new(false), refuses: false }
        }

        fn ahead(&self) -> Ahead {
            Ahead::new(&self.layout)
        }

        /// Waits until `calls` calls have begun.
        fn wait(&self, calls: u64) {
            vmferry_testkit::wait("a call", || self.calls.load(Ordering::Acquire) >= calls);
        }
    }

    impl GuestMemory for Blank {
        fn layout(&self) -> &Layout {
            &self.layout
        }

        fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
            Err(VmError::new(format!("{region} has no {run}")))
        }

        fn populate(&self, _: RegionId, _: PageRun) -> bool {
            self.calls.fetch_add(1, Ordering::AcqRel);
            while self.holds.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            !self.refuses
        }
    }

    /// Host with a fixed number of spare processors.
    struct Fixed(usize);

    impl Processors for Fixed {
        fn spare(&self) -> usize {
            self.0
        }

        fn used(&self, _: Duration, _: Duration) {}
    }

    /// Notes the arrival of a page that has no block, so that threads begin.
    fn begin(ahead: &Ahead) {
        ahead.lock().began = Some(Instant::now());
    }

    fn run(first: u64, end: u64) -> PageRun {
        PageRun::from(first..end)
    }

    /// Returns the first block of each run that may be populated next.
    fn blocks(state: &mut State) -> Vec<u64> {
        std::iter::from_fn(|| state.next(LEAD)).map(|(_, run)| run.first.0 / BLOCK).collect()
    }

    fn state(ahead: &mut Ahead) -> &mut State {
        ahead.state.get_mut().unwrap()
    }

    /// Calls `test` with the table of a frame that brings the pages of `pages`.
    fn with_table<T>(pages: PageRun, test: impl FnOnce(&Table<'_>) -> T) -> T {
        let mut writer = TableWriter::default();
        pages.range().for_each(|page| assert!(writer.push(PageIndex(page), Some(PageDigest(0)))));
        let (header, table) = writer.finish(FrameKind::Pages, REGION, 0, 0);
        test(&Table::decode(&header, table, u64::MAX).unwrap())
    }

    #[test]
    fn only_whole_announced_blocks_within_the_distance_are_populated() {
        let mut ahead = Blank::new(256).ahead();
        let state = state(&mut ahead);
        assert!(blocks(state).is_empty(), "nothing is announced");
        state.announce(REGION, run(10 * BLOCK - 1, 13 * BLOCK - 1));
        state.announce(REGION, run(20 * BLOCK + 1, 21 * BLOCK));
        state.announce(REGION, run(40 * BLOCK, 50 * BLOCK));
        state.announce(RegionId(9), run(0, 50 * BLOCK));
        assert_eq!(blocks(state), [10, 11]);
        // The frame moves the window, in which block 43 is the last one.
        state.arrive(REGION, run(11 * BLOCK, 11 * BLOCK + 256), RunKind::Data);
        assert_eq!(blocks(state), [40, 41, 42, 43]);
    }

    #[test]
    fn block_that_a_receiver_has_reached_is_not_populated() {
        let mut ahead = Blank::new(256).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(0, 8 * BLOCK));
        assert_eq!(blocks(state), [4, 5, 6, 7]);
        state.announce(REGION, run(8 * BLOCK, 30 * BLOCK));
        state.arrive(REGION, run(10 * BLOCK, 12 * BLOCK), RunKind::Zero);
        assert_eq!(blocks(state).first(), Some(&16));
    }

    #[test]
    fn receiver_populates_what_the_threads_have_not() {
        let mut ahead = Blank::new(256).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(4 * BLOCK, 5 * BLOCK));
        assert_eq!(blocks(state), [4]);
        assert!(!state.arrive(REGION, run(3 * BLOCK, 3 * BLOCK + 256), RunKind::Data));
        assert!(!state.arrive(REGION, run(4 * BLOCK - 8, 4 * BLOCK + 256), RunKind::Data));
        assert!(state.arrive(REGION, run(4 * BLOCK + 256, 5 * BLOCK), RunKind::Data));
        assert!(state.arrive(REGION, run(5 * BLOCK, 200 * BLOCK), RunKind::Zero));
    }

    #[test]
    fn pages_that_never_arrive_are_a_bounded_share() {
        let all = 1 << 16;
        let mut ahead = Blank::new(all).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(0, all * BLOCK));
        // Of each four announced blocks, three are zero.
        let mut populated = 0;
        for block in 0..all {
            populated += blocks(state).len() as u64;
            let kind = if block % 4 == 0 { RunKind::Data } else { RunKind::Zero };
            state.arrive(REGION, run(block * BLOCK, (block + 1) * BLOCK), kind);
            assert!(state.unused <= MOST_VAIN + state.arrived / SHARE, "block {block}");
        }
        assert!(populated > all / 128, "{populated} of {all} blocks were populated");
    }

    #[test]
    fn blocks_that_arrive_may_be_followed_by_as_many() {
        let all = 1 << 12;
        let mut ahead = Blank::new(all).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(0, all * BLOCK));
        let mut populated = 0;
        for block in 0..all {
            populated += blocks(state).len() as u64;
            state.arrive(REGION, run(block * BLOCK, (block + 1) * BLOCK), RunKind::Data);
        }
        assert_eq!((populated, state.unused), (all - LEAD, 0));
    }

    #[test]
    fn block_is_populated_once_however_often_it_is_announced() {
        let mut ahead = Blank::new(64).ahead();
        let state = state(&mut ahead);
        for _ in 0..3 {
            state.announce(REGION, run(4 * BLOCK, 6 * BLOCK));
            state.announce(REGION, run(4 * BLOCK, 7 * BLOCK));
        }
        assert_eq!(blocks(state), [4, 5, 6]);
        state.announce(REGION, run(0, 8 * BLOCK));
        assert_eq!(blocks(state), [7]);
        assert_eq!(state.unused, 4 * BLOCK);
    }

    #[test]
    fn announcements_of_pages_that_do_not_exist_are_ignored() {
        let mut ahead = Blank::new(6).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(6 * BLOCK, 60 * BLOCK));
        state.announce(REGION, run(u64::MAX - 1, u64::MAX));
        state.announce(REGION, run(3, 3));
        state.announce(RegionId(77), run(0, 6 * BLOCK));
        assert!(blocks(state).is_empty());
        state.announce(REGION, run(5 * BLOCK, u64::MAX));
        assert_eq!(blocks(state), [5]);
    }

    /// The largest guest is announced again and again, and nothing arrives.
    #[test]
    fn source_that_only_announces_gets_little_memory_populated() {
        let all = 12 << 19;
        let mut ahead = Blank::new(all).ahead();
        let state = state(&mut ahead);
        let mut populated = 0;
        for _ in 0..100 {
            state.announce(REGION, run(0, all * BLOCK));
            populated += blocks(state).len() as u64;
        }
        assert_eq!(populated, MOST_VAIN / BLOCK);
    }

    #[test]
    fn populating_ends_with_the_first_pass_of_the_last_channel() {
        let ahead = Blank::new(64).ahead();
        (0..3).for_each(|_| ahead.join());
        for closed in [false, false, true] {
            ahead.leave();
            assert_eq!(ahead.is_closed(), closed);
        }
        ahead.leave();
        assert!(ahead.is_closed(), "a source may send any number of barriers");
    }

    #[test]
    fn announcement_after_the_end_is_ignored() {
        let memory = Blank::new(64);
        let ahead = memory.ahead();
        ahead.stop();
        with_table(run(8 * BLOCK, 8 * BLOCK + 256), |table| {
            assert!(!ahead.arrive(REGION, table), "a receiver populates nothing, either");
            ahead.announce(REGION, table);
        });
        ahead.run(&memory, &Fixed(8));
        assert_eq!(memory.calls.load(Ordering::Acquire), 0);
    }

    #[test]
    fn lead_grows_with_the_duration_of_a_call_and_with_the_rate_of_the_pages() {
        let ms = Duration::from_millis;
        assert_eq!(lead(ms(4), 0, Duration::MAX), LEAD, "nothing has arrived");
        // A block arrives every 2 ms.
        assert_eq!(lead(ms(1), 100 * BLOCK, ms(200)), LEAD);
        assert_eq!(lead(ms(9), 100 * BLOCK, ms(200)), 10);
        assert_eq!(lead(ms(9), 100 * BLOCK, ms(100)), 19);
        assert_eq!(lead(ms(900), 100 * BLOCK, ms(100)), DISTANCE);
        assert_eq!(lead(Duration::MAX, u64::MAX / BLOCK, Duration::ZERO), DISTANCE);
    }

    #[test]
    fn call_that_would_take_too_long_is_not_made() {
        let mut ahead = Blank::new(256).ahead();
        let state = state(&mut ahead);
        state.announce(REGION, run(0, 256 * BLOCK));
        assert_eq!(state.next(DISTANCE), None);
        assert_eq!(state.next(DISTANCE - 1).map(|(_, run)| run.first.0 / BLOCK), Some(DISTANCE - 1));
    }

    #[test]
    fn small_guest_gets_less_memory_populated_in_vain() {
        for (blocks, pages) in [(1, BLOCK), (16, BLOCK), (64, 4 * BLOCK), (256, MOST_VAIN), (4096, MOST_VAIN)]
        {
            let mut ahead = Blank::new(blocks).ahead();
            assert_eq!(state(&mut ahead).vain, pages, "{blocks} blocks");
        }
    }

    #[test]
    fn no_more_blocks_are_populated_at_a_time_than_processors_are_spare() {
        for spare in [0, 1, 2] {
            let memory = Blank::new(256);
            memory.holds.store(true, Ordering::Release);
            let ahead = memory.ahead();
            ahead.lock().announce(REGION, run(0, 64 * BLOCK));
            begin(&ahead);
            std::thread::scope(|scope| {
                (0..4).for_each(|_| drop(scope.spawn(|| ahead.run(&memory, &Fixed(spare)))));
                memory.wait(spare as u64);
                std::thread::sleep(2 * INTERVAL);
                assert_eq!(memory.calls.load(Ordering::Acquire), spare as u64);
                assert_eq!(ahead.lock().calls, spare);
                ahead.stop();
                memory.holds.store(false, Ordering::Release);
            });
        }
    }

    #[test]
    fn nothing_is_populated_before_the_first_page_arrives() {
        let memory = Blank::new(64);
        let ahead = memory.ahead();
        ahead.lock().announce(REGION, run(0, 64 * BLOCK));
        std::thread::scope(|scope| {
            scope.spawn(|| ahead.run(&memory, &Fixed(8)));
            std::thread::sleep(INTERVAL / 2);
            assert_eq!(memory.calls.load(Ordering::Acquire), 0);
            with_table(run(0, 256), |table| assert!(ahead.arrive(REGION, table)));
            memory.wait(1);
            ahead.stop();
        });
    }

    #[test]
    fn each_channel_has_a_thread_while_a_processor_is_left_for_a_receiver() {
        let cpus = std::thread::available_parallelism().unwrap().get();
        assert_eq!(threads(1), usize::from(cpus > 1));
        assert!(threads(64) <= MOST_THREADS);
        assert!(threads(64) < cpus, "{} threads", threads(64));
    }

    #[test]
    fn close_waits_for_the_last_call() {
        let memory = Blank::new(64);
        memory.holds.store(true, Ordering::Release);
        let ahead = memory.ahead();
        ahead.lock().announce(REGION, run(0, 64 * BLOCK));
        begin(&ahead);
        std::thread::scope(|scope| {
            scope.spawn(|| ahead.run(&memory, &Fixed(8)));
            memory.wait(1);
            let close = scope.spawn(|| ahead.close());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!close.is_finished(), "a call still runs");
            memory.holds.store(false, Ordering::Release);
            close.join().unwrap();
            let calls = memory.calls.load(Ordering::Acquire);
            ahead.lock().announce(REGION, run(0, 64 * BLOCK));
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(memory.calls.load(Ordering::Acquire), calls, "no call begins after the end");
        });
    }

    #[test]
    fn memory_that_refuses_is_asked_once() {
        let memory = Blank { refuses: true, ..Blank::new(64) };
        let ahead = memory.ahead();
        ahead.lock().announce(REGION, run(0, 64 * BLOCK));
        begin(&ahead);
        ahead.run(&memory, &Fixed(8));
        assert_eq!((memory.calls.load(Ordering::Acquire), ahead.is_closed()), (1, true));
        ahead.close();
    }
}
