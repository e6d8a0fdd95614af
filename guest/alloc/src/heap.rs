//! One vCPU's side of the allocator: it allocates, frees, and gives back.

use crate::{Batch, Block, Buddy, FreeBuffer, Taken};
use vmferry_guest_abi::AllocCpu;

/// Blocks that are isolated or put back under one hold of the lock: about 2 us.
pub const PORTION: usize = 32;

/// When nothing has been freed for so long, what is noted is reported although no buffer is full, and however small it is. Short beside the 100 ms within which memory is to be back, long beside the time between two
/// frees of a busy vCPU.
pub const FLUSH_NS: u64 = 20_000_000;

/// In a guest that goes on freeing, what nobody has wanted for so long is reported although it is small. By then its neighbours are
/// free too if they belong together, and a fault when it is used after all is a small part of its time.
pub const IDLE_NS: u64 = 1_000_000_000;

/// How often [`Heap::tick`] looks, at most.
const TICK_NS: u64 = 1_000_000;

/// Longest wait of an allocation for blocks that are being reported. A report of 512 blocks of 4 MiB takes some 100 ms where the
/// host drops pages slowest; a host that is not back after this long will not be.
const WAIT_NS: u64 = 1_000_000_000;

/// Reports of one sweep over what is idle; the rest waits for the next tick, so that the vCPU gets to its other work.
const SWEEP_REPORTS: u32 = 16;

/// What an allocator needs from the machine that it runs on.
///
/// Reports need a claim: [`claim`](Self::claim), any number of [`report`](Self::report)s, [`release`](Self::release).
pub trait Machine {
    /// Does something with the allocator under its lock.
    fn with<R>(&self, work: impl FnOnce(&mut Buddy<'_>) -> R) -> R;

    /// The clock, in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Reads the word at a guest-physical address in an allocated block of the caller.
    fn load(&self, gpa: u64) -> u64;

    /// Writes it.
    fn store(&self, gpa: u64, value: u64);

    /// Makes some memory free that is not in use: pages that were hinted, or that the balloon has. `false` if there is none.
    fn relieve(&self) -> bool;

    /// Takes the way to the host for this vCPU; `false` if another has it. Never waits for another vCPU.
    fn claim(&self) -> bool;

    /// Blocks that one report can hold, at least 1.
    fn most(&self) -> usize;

    /// Reports isolated blocks, at most [`most`](Self::most), and returns when the host has dropped them.
    fn report(&self, blocks: &[Block]);

    /// Gives the way to the host back.
    fn release(&self);
}

/// Who reports what a vCPU frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reports {
    /// Nobody.
    Off,
    /// The vCPU itself, before the call of `free` that filled its buffer returns.
    Own,
    /// Another vCPU, when it gets to it.
    Handed,
    /// This vCPU, for all others and itself, in [`Heap::tick`].
    ForAll,
}

/// One vCPU's side of the allocator. Counts what it does in an [`AllocCpu`].
#[derive(Debug)]
pub struct Heap<'a> {
    buffers: &'a [FreeBuffer<'a>],
    /// Index of this vCPU, and of its buffer.
    cpu: usize,
    reports: Reports,
    /// Whether it looks for what no buffer holds, when all is quiet.
    sweeps: bool,
    /// Least order of a block that is reported out of a buffer.
    least: u32,
    batch: Batch<'a>,
    next_tick_ns: u64,
    own: Quiet,
    idle: Idle,
    stats: AllocCpu,
}

/// How long a number has stayed the same.
#[derive(Clone, Copy, Debug, Default)]
struct Quiet {
    number: u64,
    since_ns: u64,
}

impl Quiet {
    fn for_long(&mut self, number: u64, now_ns: u64) -> bool {
        // A clock that went back (another host) counts as quiet for long, once.
        let quiet = number == self.number && now_ns.wrapping_sub(self.since_ns) >= FLUSH_NS;
        if number != self.number {
            *self = Self { number, since_ns: now_ns };
        }
        quiet
    }
}

/// How much of what is free and unreported nobody wants.
///
/// A page that was freed a moment ago may be wanted in the next, or be part of a large block once its neighbours are free. So nothing
/// is, until no vCPU has freed anything for [`FLUSH_NS`]: then all is. In a guest that goes on, the least number of unreported pages
/// that there were in a time of [`IDLE_NS`] is: as allocations take unreported pages first, it did without so many.
///
/// `owed <= unreported`, as of the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Idle {
    all: Quiet,
    since_ns: u64,
    least: u64,
    owed: u64,
}

impl Idle {
    /// Pages to report now, when `unreported` pages are free and unreported after so many `frees`.
    fn look(&mut self, frees: u64, unreported: u64, now_ns: u64) -> u64 {
        self.least = self.least.min(unreported);
        self.owed = self.owed.min(unreported);
        if self.all.for_long(frees, now_ns) {
            self.owed = unreported;
        }
        // A clock that went back (another host) ends the time early, once.
        if now_ns.wrapping_sub(self.since_ns) >= IDLE_NS {
            self.owed = self.owed.max(self.least);
            (self.since_ns, self.least) = (now_ns, unreported);
        }
        self.owed
    }
}

impl<'a> Heap<'a> {
    /// The heap of vCPU `cpu`, which has the buffer with that index. `sweeps` is true for one vCPU of all, one that reports.
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

    /// The same heap; of what a buffer holds it reports only blocks of at least this order, 0 by default. Smaller ones stay free and
    /// unreported until they have merged, all is quiet, or nobody has wanted them for [`IDLE_NS`].
    #[must_use]
    pub fn reporting_from(self, order: u32) -> Self {
        Self { least: order.min(vmferry_guest_abi::balloon::MAX_ORDER), ..self }
    }

    /// What it has counted.
    #[must_use]
    pub fn stats(&self) -> &AllocCpu {
        &self.stats
    }

    pub(crate) fn stats_mut(&mut self) -> &mut AllocCpu {
        &mut self.stats
    }

    /// Allocates a block of `order`, or else the largest smaller one. It never waits for a report, unless there is no memory but
    /// what is being reported: then until that is put back, at most a second. `None` if there is none.
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
        let mut block = None;
        while block.is_none() && machine.now_ns().saturating_sub(start_ns) < WAIT_NS {
            let isolated = machine.with(|buddy| {
                block = buddy.alloc(0);
                buddy.pages().isolated
            });
            if block.is_none() && isolated == 0 && !machine.relieve() {
                break;
            }
            core::hint::spin_loop();
        }
        self.stats.wait_ns += machine.now_ns().saturating_sub(start_ns);
        block
    }

    /// Frees a block, and reports if that fills this vCPU's buffer and reports are its own affair.
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
        if !buffer.note(merged) {
            self.stats.missed += 1;
        }
        if buffer.is_full() && !buffer.is_handed() {
            self.pass_on(machine);
        }
    }

    /// Empties this vCPU's buffer: reports it, or gives it to who does.
    fn pass_on<M: Machine>(&mut self, machine: &M) {
        if self.reports == Reports::Own {
            self.report_buffer(machine, self.cpu);
        } else {
            self.stats.flushes += 1;
            self.buffers[self.cpu].hand_over();
        }
    }

    /// What is to be done besides: reports for others, and what is left over when nothing more is freed. Call it often; it looks at
    /// most once a millisecond.
    pub fn tick<M: Machine>(&mut self, machine: &M, now_ns: u64) {
        // A clock that went far back must not stop this for as long.
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

    /// Reports what nobody wants: small blocks, parts of noted blocks that were allocated meanwhile and split, and blocks that were
    /// never noted because a buffer was full.
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

    /// Isolates, reports and puts back until `next` says that there is no more, at most `reports` times. `next` isolates a portion under
    /// the lock and says why it has ended, or `None` if it has not. `false` if another vCPU is at it.
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
