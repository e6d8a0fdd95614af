//! Allocator of one vCPU: it allocates, frees, and gives memory back.

use crate::{Batch, Block, Buddy, FreeBuffer, Taken};
use vmferry_guest_abi::AllocCpu;

/// Number of blocks that are isolated or put back while the lock is held: about 2 us.
pub const PORTION: usize = 32;

/// Least number of blocks for which a full buffer is reported. Each report costs an exit, however
/// few blocks it has.
const WORTH: usize = 16;

/// Time without a free after which noted blocks are reported although no buffer is full, however
/// small they are, in ns. The time is short compared with the 100 ms within which memory is to be
/// given back, and long compared with the time between two frees of a busy vCPU.
pub const FLUSH_NS: u64 = 20_000_000;

/// Time after which unused blocks of a guest that continues to free are reported although they are
/// small, in ns. By then related neighbours are free as well, and a later fault costs little
/// compared with this time.
pub const IDLE_NS: u64 = 1_000_000_000;

/// Minimum interval between two checks of [`Heap::tick`], in ns.
const TICK_NS: u64 = 1_000_000;

/// Longest wait of an allocation for blocks that are being reported, in ns. A report of 512 blocks
/// of 4 MiB takes about 100 ms where the host drops pages slowest. A host that has not answered
/// after this time will not.
const WAIT_NS: u64 = 1_000_000_000;

/// Number of reports of one sweep over idle blocks. The rest waits for the next tick, so that the
/// vCPU gets to its other work.
const SWEEP_REPORTS: u32 = 16;

/// Operations that an allocator needs from its machine.
///
/// Reports need a claim: [`claim`](Self::claim), any number of [`report`](Self::report)s,
/// [`release`](Self::release).
pub trait Machine {
    /// Calls `work` with the allocator under its lock.
    fn with<R>(&self, work: impl FnOnce(&mut Buddy<'_>) -> R) -> R;

    /// Returns the time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Reads the word at a guest-physical address in an allocated block of the caller.
    fn load(&self, gpa: u64) -> u64;

    /// Writes the word at a guest-physical address in an allocated block of the caller.
    fn store(&self, gpa: u64, value: u64);

    /// Frees some memory that is not in use: pages that were hinted, or that are in the balloon.
    fn relieve(&self) -> Relief;

    /// Claims the channel to the host for this vCPU. Returns false if another vCPU has it. Never
    /// waits for another vCPU.
    fn claim(&self) -> bool;

    /// Returns the maximum number of blocks of one report, at least 1.
    fn most(&self) -> usize;

    /// Reports isolated blocks, at most [`most`](Self::most). Returns when the host has dropped
    /// them.
    fn report(&self, blocks: &[Block]);

    /// Releases the channel to the host.
    fn release(&self);
}

/// Result of [`Machine::relieve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Hinted pages were freed, or are freed soon.
    Hinted,
    /// Pages were taken out of the balloon.
    Balloon,
    /// Only hinted pages exist, and the host has not finished processing their hints.
    Held,
    /// There are no such pages.
    None,
}

/// Reporter of the blocks that a vCPU frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reports {
    /// Nothing is reported.
    Off,
    /// The vCPU itself reports, before the call of `free` that filled its buffer returns.
    Own,
    /// Another vCPU reports, between steps of its work.
    Handed,
    /// This vCPU reports for all others and itself, in [`Heap::tick`].
    ForAll,
}

/// Allocator of one vCPU. It counts its activity in an [`AllocCpu`].
#[derive(Debug)]
pub struct Heap<'a> {
    buffers: &'a [FreeBuffer<'a>],
    /// Index of this vCPU and of its buffer.
    cpu: usize,
    reports: Reports,
    /// True if this vCPU searches for blocks that are in no buffer, when nothing is freed.
    sweeps: bool,
    /// Least order of a block that is reported from a buffer.
    least: u32,
    batch: Batch<'a>,
    next_tick_ns: u64,
    own: Quiet,
    idle: Idle,
    stats: AllocCpu,
}

/// Time for which a number has stayed the same.
#[derive(Clone, Copy, Debug, Default)]
struct Quiet {
    number: u64,
    since_ns: u64,
}

impl Quiet {
    fn for_long(&mut self, number: u64, now_ns: u64) -> bool {
        // A clock that went back (another host) counts as a long quiet time, once.
        let quiet = number == self.number && now_ns.wrapping_sub(self.since_ns) >= FLUSH_NS;
        if number != self.number {
            *self = Self { number, since_ns: now_ns };
        }
        quiet
    }
}

/// Number of free and unreported pages that are idle.
///
/// A page that was just freed may be used again at once, or may become part of a large block once
/// its neighbours are free. Therefore no page is idle until no vCPU has freed anything for
/// [`FLUSH_NS`]; then all are. In a guest that continues, the least number of unreported pages
/// within [`IDLE_NS`] is idle: allocations take unreported pages first, so the guest did without
/// this many.
///
/// Invariant: `owed <= unreported`, as of the last call.
#[derive(Clone, Copy, Debug, Default)]
struct Idle {
    all: Quiet,
    since_ns: u64,
    least: u64,
    owed: u64,
}

impl Idle {
    /// Returns the number of pages to report now, if `unreported` pages are free and unreported
    /// after `frees` frees.
    fn look(&mut self, frees: u64, unreported: u64, now_ns: u64) -> u64 {
        self.least = self.least.min(unreported);
        self.owed = self.owed.min(unreported);
        if self.all.for_long(frees, now_ns) {
            self.owed = unreported;
        }
        // A clock that went back (another host) ends the interval early, once.
        if now_ns.wrapping_sub(self.since_ns) >= IDLE_NS {
            self.owed = self.owed.max(self.least);
            (self.since_ns, self.least) = (now_ns, unreported);
        }
        self.owed
    }
}

impl<'a> Heap<'a> {
    /// Returns the heap of vCPU `cpu`, which has the buffer with that index. `sweeps` must be true
    /// for exactly one vCPU, which reports.
    #[must_use]
    pub fn new(
        buffers: &'a [FreeBuffer<'a>],
        cpu: usize,
        reports: Reports,
        sweeps: bool,
        batch: Batch<'a>,
    ) -> Self {
        Self {
            buffers,
            cpu,
            reports: if cpu < buffers.len() { reports } else { Reports::Off },
            sweeps,
            least: 0,
            batch,
            next_tick_ns: 0,
            own: Quiet::default(),
            idle: Idle::default(),
            stats: AllocCpu::default(),
        }
    }

    /// Returns the heap with a least order of blocks that it reports from a buffer, 0 by default.
    /// Smaller blocks stay free and unreported until they have merged, nothing is freed any more,
    /// or they have been idle for [`IDLE_NS`].
    #[must_use]
    pub fn reporting_from(self, order: u32) -> Self {
        Self { least: order.min(vmferry_guest_abi::balloon::MAX_ORDER), ..self }
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> &AllocCpu {
        &self.stats
    }

    pub(crate) fn stats_mut(&mut self) -> &mut AllocCpu {
        &mut self.stats
    }

    /// Allocates a block of `order`, or else the largest smaller one. Waits for a report only if
    /// the only remaining memory is being reported: until it is put back, at most a second. Returns
    /// `None` if there is no memory.
    pub fn alloc<M: Machine>(&mut self, machine: &M, order: u32) -> Option<Block> {
        let start = machine.now_ns();
        let found = machine.with(|buddy| (0..=order).rev().find_map(|order| buddy.alloc(order)));
        let block = found.or_else(|| self.wait(machine, start));
        let took = machine.now_ns().saturating_sub(start);
        let stats = &mut self.stats;
        stats.alloc_ns += took;
        stats.alloc_max_ns = stats.alloc_max_ns.max(took);
        stats.alloc_hist[AllocCpu::bucket(took)] += 1;
        match block {
            Some(block) => {
                stats.allocs += 1;
                stats.alloc_bytes += block.bytes();
            }
            None => stats.failed += 1,
        }
        block
    }

    #[cold]
    fn wait<M: Machine>(&mut self, machine: &M, start_ns: u64) -> Option<Block> {
        self.stats.waits += 1;
        let (mut reported, mut hinted, mut balloon) = (false, false, false);
        let mut block = None;
        while block.is_none() && machine.now_ns().saturating_sub(start_ns) < WAIT_NS {
            let isolated = machine.with(|buddy| {
                block = buddy.alloc(0);
                buddy.pages().isolated
            });
            if block.is_none() && isolated != 0 {
                reported = true;
            } else if block.is_none() {
                match machine.relieve() {
                    Relief::Hinted => hinted = true,
                    Relief::Balloon => balloon = true,
                    Relief::Held => {
                        self.stats.failed_held += 1;
                        break;
                    }
                    Relief::None => break,
                }
            }
            core::hint::spin_loop();
        }
        let took = machine.now_ns().saturating_sub(start_ns);
        let stats = &mut self.stats;
        stats.wait_ns += took;
        stats.wait_max_ns = stats.wait_max_ns.max(took);
        stats.waits_reported += u64::from(reported);
        stats.waits_held += u64::from(hinted);
        stats.waits_balloon += u64::from(balloon);
        block
    }

    /// Frees a block. Reports if this fills the vCPU's buffer and the vCPU reports itself.
    pub fn free<M: Machine>(&mut self, machine: &M, block: Block) {
        let start = machine.now_ns();
        let merged = machine.with(|buddy| buddy.free(block));
        if self.reports != Reports::Off {
            self.note(machine, merged);
        }
        let end = machine.now_ns();
        let took = end.saturating_sub(start);
        let stats = &mut self.stats;
        stats.frees += 1;
        stats.freed_bytes += block.bytes();
        stats.free_ns += took;
        stats.free_max_ns = stats.free_max_ns.max(took);
        stats.free_hist[AllocCpu::bucket(took)] += 1;
        stats.last_free_us = end / 1000;
    }

    fn note<M: Machine>(&mut self, machine: &M, merged: Block) {
        let buffer = &self.buffers[self.cpu];
        let noted = buffer.note(merged);
        if !noted {
            self.stats.missed += 1;
        } else if buffer.is_full() {
            self.stats.full += 1;
        }
        if buffer.is_full() && !buffer.is_handed() && self.is_worth_a_report(machine) {
            self.pass_on(machine);
        }
    }

    /// Returns true if this vCPU's full buffer has at least [`WORTH`] blocks to report. Otherwise
    /// removes all other blocks from the buffer, so that it has room again.
    fn is_worth_a_report<M: Machine>(&self, machine: &M) -> bool {
        let buffer = &self.buffers[self.cpu];
        let (mut worth, mut count) = ([Block::default(); WORTH], 0);
        let mut noted = buffer.blocks().peekable();
        while noted.peek().is_some() && count < WORTH {
            machine.with(|buddy| {
                for noted in noted.by_ref().take(PORTION) {
                    let Some(block) = buddy.reportable(noted, self.least) else { continue };
                    if count < WORTH && !worth[..count].contains(&block) {
                        worth[count] = block;
                        count += 1;
                    }
                }
            });
        }
        // A buffer with fewer entries is always worth a report, because it would stay full.
        let enough = count == WORTH.min(buffer.capacity());
        if !enough {
            buffer.replace(&worth[..count]);
        }
        enough
    }

    /// Empties this vCPU's buffer: reports it, or gives it to the reporter.
    fn pass_on<M: Machine>(&mut self, machine: &M) {
        if self.reports == Reports::Own {
            self.report_buffer(machine, self.cpu);
        } else {
            self.stats.flushes += 1;
            self.buffers[self.cpu].hand_over();
        }
    }

    /// Does background work: reports for other vCPUs, and reports of what is left over when nothing
    /// is freed. Should be called often. It checks at most once per millisecond.
    pub fn tick<M: Machine>(&mut self, machine: &M, now_ns: u64) {
        // A clock that went far back must not stop this work for as long.
        let early = self.next_tick_ns.wrapping_sub(now_ns);
        if self.reports == Reports::Off || early.wrapping_sub(1) < 2 * TICK_NS {
            return;
        }
        self.next_tick_ns = now_ns + TICK_NS;
        if self.reports == Reports::ForAll {
            for cpu in 0..self.buffers.len() {
                if self.buffers[cpu].is_handed() {
                    self.report_buffer(machine, cpu);
                }
            }
        }
        let buffer = &self.buffers[self.cpu];
        if self.own.for_long(self.stats.frees, now_ns) && !buffer.is_empty() && !buffer.is_handed() {
            self.pass_on(machine);
        }
        if self.sweeps {
            let (frees, pages) = machine.with(|buddy| (buddy.frees(), buddy.pages()));
            if self.idle.look(frees, pages.unreported, now_ns) != 0 && pages.free() > pages.low {
                self.sweep(machine);
            }
        }
    }

    /// Reports idle blocks: small blocks, parts of noted blocks that were allocated and split
    /// meanwhile, and blocks that were never noted because a buffer was full.
    fn sweep<M: Machine>(&mut self, machine: &M) {
        let mut owed = self.idle.owed;
        self.drain(machine, SWEEP_REPORTS, |buddy, batch| buddy.isolate_any(PORTION, &mut owed, batch));
        self.idle.owed = owed;
    }

    fn report_buffer<M: Machine>(&mut self, machine: &M, cpu: usize) {
        let (buffer, least) = (&self.buffers[cpu], self.least);
        let mut stale = 0;
        let mut again = None;
        let claimed = self.drain(machine, u32::MAX, |buddy, batch| {
            for _ in 0..PORTION {
                let Some(noted) = again.take().or_else(|| buffer.pop()) else { return Some(Taken::All) };
                let before = batch.blocks().len();
                match buddy.isolate(noted, least, batch) {
                    Taken::All => stale += u64::from(batch.blocks().len() == before),
                    Taken::Full => {
                        again = Some(noted);
                        return Some(Taken::Full);
                    }
                    Taken::Low => return Some(Taken::Low),
                }
            }
            None
        });
        if claimed {
            self.stats.flushes += 1;
            self.stats.stale += stale;
            buffer.hand_back();
        }
    }

    /// Isolates, reports and puts back until `next` reports the end, at most `reports` times.
    /// `next` isolates a portion under the lock, and returns why it ended, or `None` if there is
    /// more. Returns false if another vCPU has the channel.
    fn drain<M: Machine>(
        &mut self,
        machine: &M,
        reports: u32,
        mut next: impl FnMut(&mut Buddy<'_>, &mut Batch<'_>) -> Option<Taken>,
    ) -> bool {
        if !machine.claim() {
            self.stats.deferred += 1;
            return false;
        }
        for _ in 0..reports {
            let start = machine.now_ns();
            self.batch.begin(machine.most());
            let batch = &mut self.batch;
            let taken = loop {
                if let Some(taken) = machine.with(|buddy| next(buddy, batch)) {
                    break taken;
                }
            };
            if !self.batch.is_empty() {
                self.send(machine, start);
            }
            match taken {
                Taken::Full => {}
                Taken::All => break,
                Taken::Low => {
                    self.stats.deferred += 1;
                    self.stats.low += 1;
                    break;
                }
            }
        }
        machine.release();
        true
    }

    fn send<M: Machine>(&mut self, machine: &M, start_ns: u64) {
        machine.report(self.batch.blocks());
        for portion in self.batch.blocks().chunks(PORTION) {
            machine.with(|buddy| portion.iter().for_each(|block| buddy.put_back(*block)));
        }
        let end = machine.now_ns();
        let took = end.saturating_sub(start_ns);
        let stats = &mut self.stats;
        stats.reports += 1;
        stats.report_blocks += self.batch.blocks().len() as u64;
        stats.report_bytes += self.batch.blocks().iter().map(|block| block.bytes()).sum::<u64>();
        stats.report_ns += took;
        stats.report_max_ns = stats.report_max_ns.max(took);
        stats.last_report_us = end / 1000;
    }
}

#[cfg(test)]
#[path = "heap_tests.rs"]
pub(crate) mod tests;
