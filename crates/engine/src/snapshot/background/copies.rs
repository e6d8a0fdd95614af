//! Copies of protected pages: each page is copied once, by the thread that serves a fault on it or
//! by a writer, and only then unprotected.
//!
//! # The image is the instant
//! At the instant of the snapshot, the guest is paused, and every page of the guarded blocks is
//! protected. From then on, a page changes only after it was unprotected. The image has the content
//! of the instant because of three rules:
//! 1. Pages are claimed in units. A unit is a bit of its block's word, which is set by an atomic
//!    operation and never cleared. Therefore exactly one thread claims each unit: a writer claims
//!    all units of a block that are left, and a fault thread claims the unit of the fault.
//! 2. The thread that has claimed a unit copies its pages, and then unprotects them. No other
//!    thread unprotects them. Therefore the copy is complete before the first write.
//! 3. No page is protected again.
//!
//! # No thread waits for ever
//! A thread that writes a protected page sleeps until the page is unprotected. The fault thread
//! finds one of three cases:
//! - The unit is claimed. Its claimer unprotects it, and this wakes the threads that sleep on it,
//!   also those whose fault has not been read yet.
//! - The unit is free, and so is a part of the buffer: the fault thread claims the unit, copies it
//!   and unprotects it. The fault thread takes the buffer before it claims the unit. Otherwise a
//!   writer could wait for a unit whose claimer waits for a buffer that only this writer can empty.
//! - The buffer is full: the fault thread puts the block into the queue of waiting blocks, which
//!   the writers serve first. It checks under the lock of the queue that the unit is still free. A
//!   writer takes this lock after it has unprotected the block. Therefore the writer finds the
//!   entry, or the fault thread finds the unit claimed.
//!
//! Fault threads therefore never wait for a writer, and writers wait only for fault threads that
//! are between their claim and the end of their copy.

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageRun, VmError};
use vmferry_wire::TABLE_PAGES;

/// Number of pages that are copied and unprotected for one fault.
pub(super) const UNIT_PAGES: u64 = 16;
/// Number of bytes of a unit.
pub(super) const UNIT_BYTES: usize = 16 * PAGE_BYTES;
/// Number of pages of a block, which has one table in the file.
pub(super) const BLOCK_PAGES: u64 = TABLE_PAGES as u64;
/// Number of units of a block. They are the bits of a word.
const BLOCK_UNITS: u64 = BLOCK_PAGES / UNIT_PAGES;
const _: () = assert!(BLOCK_UNITS == 32 && UNIT_PAGES * PAGE_SIZE == UNIT_BYTES as u64);

/// Protected memory of the guest.
pub(super) trait Live: Sync {
    /// Copies the pages of `run`, in the region at `position` of the layout, to `to`.
    fn copy(&self, position: usize, run: PageRun, to: &mut [u8]) -> Result<(), VmError>;

    /// Lifts the protection of the pages of `run`.
    fn unprotect(&self, position: usize, run: PageRun) -> Result<(), VmError>;
}

/// Block of 512 pages, by the position of its region and its number in the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Block {
    pub(super) position: usize,
    pub(super) number: u64,
}

/// Copy of a unit that a fault thread has made.
pub(super) struct Copied(Box<[u8]>);

impl Copied {
    /// Returns the bytes of the unit. Behind the end of the region, they have no meaning.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// State of a block.
#[derive(Debug)]
struct BlockState {
    /// Claimed units. Rule 1 of the module.
    claimed: AtomicU32,
    /// True if a writer has taken the block.
    taken: AtomicBool,
    /// True if the block was put into the queue of written blocks.
    queued: AtomicBool,
}

#[derive(Debug)]
struct RegionBlocks {
    pages: u64,
    blocks: Box<[BlockState]>,
}

/// Blocks that writers take before all others.
#[derive(Debug, Default)]
struct Queue {
    /// Blocks on which threads wait, because the buffer was full.
    urgent: VecDeque<Block>,
    /// Blocks of which a fault thread has copied units. They are written soon, because this empties
    /// the buffer, and because the guest is likely to write them again.
    written: VecDeque<Block>,
    /// Begin of each wait for a block that is not unprotected.
    waits: Vec<(Block, Instant)>,
}

/// Figures of the faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CopyFigures {
    /// Faults that were read.
    pub(super) faults: u64,
    /// Pages that fault threads have copied.
    pub(super) pages: u64,
    /// Waits because the buffer was full.
    pub(super) waits: u64,
    pub(super) waited: Duration,
    pub(super) longest_wait: Duration,
    /// Largest number of bytes of the buffer that were in use.
    pub(super) peak_bytes: u64,
}

#[derive(Debug, Default)]
struct Waits {
    number: u64,
    sum: Duration,
    longest: Duration,
}

/// Units that fault threads have copied and writers have not taken, by block and unit.
type Ready = HashMap<(Block, u64), Box<[u8]>>;

/// State of all pages of the guest, and the buffer of the fault threads.
pub(super) struct Copies {
    regions: Vec<RegionBlocks>,
    /// Number of blocks, over all regions.
    blocks: u64,
    /// Number of the next block that no writer has reached, over all regions.
    cursor: AtomicU64,
    queue: Mutex<Queue>,
    /// Number of entries of the queue's two lists. Writers read it without the lock.
    queued: AtomicUsize,
    ready: Mutex<Ready>,
    /// Signalled for each unit that becomes ready, and when the snapshot is given up.
    is_ready: Condvar,
    /// Buffers of units that were used and are free again.
    free: Mutex<Vec<Box<[u8]>>>,
    /// Number of buffers in use, at most `limit`.
    used: AtomicUsize,
    limit: usize,
    peak: AtomicUsize,
    stop: AtomicBool,
    faults: AtomicU64,
    pages: AtomicU64,
    waits: Mutex<Waits>,
}

impl Copies {
    /// Returns the state of a guest with regions of these numbers of pages. The buffer has `buffer`
    /// bytes, and room for at least one unit.
    pub(super) fn new(pages: impl IntoIterator<Item = u64>, buffer: u64) -> Self {
        let state = |_| BlockState {
            claimed: AtomicU32::new(0),
            taken: AtomicBool::new(false),
            queued: AtomicBool::new(false),
        };
        let region = |pages: u64| RegionBlocks {
            pages,
            blocks: (0..pages.div_ceil(BLOCK_PAGES)).map(state).collect(),
        };
        let regions: Vec<_> = pages.into_iter().map(region).collect();
        let blocks = regions.iter().map(|region| region.blocks.len() as u64).sum();
        let limit = usize::try_from(buffer / UNIT_BYTES as u64).unwrap_or(usize::MAX).max(1);
        Self {
            regions,
            blocks,
            cursor: AtomicU64::new(0),
            queue: Mutex::new(Queue::default()),
            queued: AtomicUsize::new(0),
            ready: Mutex::new(Ready::default()),
            is_ready: Condvar::new(),
            free: Mutex::new(Vec::new()),
            used: AtomicUsize::new(0),
            limit,
            peak: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            faults: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            waits: Mutex::new(Waits::default()),
        }
    }

    /// Serves a fault on `page` of the region at `position`.
    pub(super) fn fault(&self, live: &dyn Live, position: usize, page: u64) -> Result<(), VmError> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let block = Block { position, number: page / BLOCK_PAGES };
        let unit = page % BLOCK_PAGES / UNIT_PAGES;
        if self.is_claimed(block, unit) {
            return Ok(());
        }
        let Some(mut buffer) = self.take_buffer() else {
            self.wait_for_writer(block, unit);
            return Ok(());
        };
        if self.state(block).claimed.fetch_or(1 << unit, Ordering::AcqRel) & 1 << unit != 0 {
            self.give_buffer(buffer);
            return Ok(());
        }
        let run = self.unit_run(block, unit);
        let bytes = usize::try_from(run.bytes()).unwrap_or(UNIT_BYTES);
        live.copy(position, run, &mut buffer[..bytes])?;
        lock(&self.ready).insert((block, unit), buffer);
        self.is_ready.notify_all();
        live.unprotect(position, run)?;
        self.pages.fetch_add(run.count, Ordering::Relaxed);
        if !self.state(block).queued.swap(true, Ordering::AcqRel) {
            self.enqueue(|queue| queue.written.push_back(block));
        }
        Ok(())
    }

    /// Returns a block that no writer has taken, or `None` if there is none. Blocks on which
    /// threads wait come first.
    pub(super) fn next(&self) -> Option<Block> {
        while self.queued.load(Ordering::Acquire) > 0 {
            let mut queue = lock(&self.queue);
            let block = queue.urgent.pop_front().or_else(|| queue.written.pop_front());
            if block.is_some() {
                self.queued.fetch_sub(1, Ordering::AcqRel);
            }
            drop(queue);
            match block {
                Some(block) if self.take(block) => return Some(block),
                Some(_) => {}
                None => break,
            }
        }
        loop {
            let number = self.cursor.fetch_add(1, Ordering::Relaxed);
            if number >= self.blocks {
                return None;
            }
            let block = self.block(number);
            if self.take(block) {
                return Some(block);
            }
        }
    }

    /// Claims all units of `block` that are free. Returns all claimed units as bits: those of the
    /// caller, and those of fault threads.
    pub(super) fn claim(&self, block: Block) -> Claimed {
        let theirs = self.state(block).claimed.fetch_or(u32::MAX, Ordering::AcqRel);
        Claimed { theirs }
    }

    /// Ends the waits for `block`. The caller has unprotected the units that it had claimed.
    pub(super) fn unprotected(&self, block: Block) {
        let now = Instant::now();
        let mut queue = lock(&self.queue);
        if queue.waits.is_empty() {
            return;
        }
        let (ended, others) = std::mem::take(&mut queue.waits).into_iter().partition(|wait| wait.0 == block);
        queue.waits = others;
        drop(queue);
        let ended: Vec<(Block, Instant)> = ended;
        let mut waits = lock(&self.waits);
        for (_, began) in ended {
            let waited = now.saturating_duration_since(began);
            waits.number += 1;
            waits.sum += waited;
            waits.longest = waits.longest.max(waited);
        }
    }

    /// Returns the copy of a unit that a fault thread has claimed. Waits until it is complete.
    /// Returns `None` if the snapshot was given up.
    pub(super) fn copied(&self, block: Block, unit: u64) -> Option<Copied> {
        let mut ready = lock(&self.ready);
        loop {
            if let Some(copy) = ready.remove(&(block, unit)) {
                return Some(Copied(copy));
            }
            if self.stopped() {
                return None;
            }
            ready = self.is_ready.wait(ready).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes back the buffer of a copy.
    pub(super) fn give_back(&self, copy: Copied) {
        self.give_buffer(copy.0);
    }

    /// Gives the snapshot up: all threads end soon.
    pub(super) fn stop(&self) {
        // The lock ensures that a thread that is about to wait sees the flag or the signal.
        let ready = lock(&self.ready);
        self.stop.store(true, Ordering::Release);
        drop(ready);
        self.is_ready.notify_all();
    }

    /// Returns true after [`stop`](Self::stop).
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Returns the pages of unit `unit` of `block`.
    pub(super) fn unit_run(&self, block: Block, unit: u64) -> PageRun {
        let first = block.number * BLOCK_PAGES + unit * UNIT_PAGES;
        PageRun::from(first..(first + UNIT_PAGES).min(self.regions[block.position].pages))
    }

    /// Returns the figures so far.
    pub(super) fn figures(&self) -> CopyFigures {
        let waits = lock(&self.waits);
        CopyFigures {
            faults: self.faults.load(Ordering::Relaxed),
            pages: self.pages.load(Ordering::Relaxed),
            waits: waits.number,
            waited: waits.sum,
            longest_wait: waits.longest,
            peak_bytes: (self.peak.load(Ordering::Relaxed) * UNIT_BYTES) as u64,
        }
    }

    fn state(&self, block: Block) -> &BlockState {
        &self.regions[block.position].blocks[usize::try_from(block.number).unwrap_or(usize::MAX)]
    }

    fn is_claimed(&self, block: Block, unit: u64) -> bool {
        self.state(block).claimed.load(Ordering::Acquire) & 1 << unit != 0
    }

    fn take(&self, block: Block) -> bool {
        !self.state(block).taken.swap(true, Ordering::AcqRel)
    }

    /// Returns the block with this number, counted over all regions.
    fn block(&self, mut number: u64) -> Block {
        debug_assert!(number < self.blocks);
        let mut position = 0;
        for region in &self.regions {
            let own = region.blocks.len() as u64;
            if number < own {
                break;
            }
            number -= own;
            position += 1;
        }
        Block { position, number }
    }

    /// Puts `block` into the queue of waiting blocks, unless the unit was claimed meanwhile.
    fn wait_for_writer(&self, block: Block, unit: u64) {
        let began = Instant::now();
        self.enqueue(|queue| {
            if !self.is_claimed(block, unit) {
                queue.waits.push((block, began));
                queue.urgent.push_back(block);
            }
        });
    }

    fn enqueue(&self, add: impl FnOnce(&mut Queue)) {
        let mut queue = lock(&self.queue);
        add(&mut queue);
        self.queued.store(queue.urgent.len() + queue.written.len(), Ordering::Release);
    }

    fn take_buffer(&self) -> Option<Box<[u8]>> {
        let more = |used: usize| (used < self.limit).then_some(used + 1);
        let before = self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).ok()?;
        self.peak.fetch_max(before + 1, Ordering::Relaxed);
        let free = lock(&self.free).pop();
        Some(free.unwrap_or_else(|| vec![0; UNIT_BYTES].into_boxed_slice()))
    }

    fn give_buffer(&self, buffer: Box<[u8]>) {
        lock(&self.free).push(buffer);
        let before = self.used.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0);
    }
}

/// Claimed units of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claimed {
    /// Units that fault threads have claimed.
    theirs: u32,
}

impl Claimed {
    /// Returns true if the writer has claimed all units.
    pub(super) fn all_mine(self) -> bool {
        self.theirs == 0
    }

    /// Returns true if the writer has claimed `unit`.
    pub(super) fn is_mine(self, unit: u64) -> bool {
        self.theirs & 1 << unit == 0
    }
}

/// Returns all units of a block.
pub(super) fn units() -> std::ops::Range<u64> {
    0..BLOCK_UNITS
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while one of these locks is held leaves a consistent state, because each change is a
    // sequence of complete steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
