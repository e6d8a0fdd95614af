//! Allocator of this guest: the machine-dependent part for `vmferry-guest-alloc`.

use crate::balloon::{self, Balloon};
use crate::carve::Carver;
use crate::lock::SpinLock;
use crate::memory::{FreeRam, pointer};
use crate::pvh::BootInfo;
use crate::virtio::Mmio;
use crate::{cpu, stats};
use core::sync::atomic::{AtomicU64, Ordering};
use vmferry_guest_abi::balloon::{REPORT_ENTRIES, REPORT_PORT, report_entry};
use vmferry_guest_abi::{GuestArgs, PAGE_SIZE, ReportMode, TscClock};
use vmferry_guest_alloc::{
    ASYNC_ENTRIES, Batch, Block, Buddy, FreeBits, FreeBuffer, Heap, Machine, Relief, Reports, SYNC_ENTRIES,
    Spans,
};

/// Number of blocks of a batch: a page of reports, or more than a queue holds.
const BATCH: usize = REPORT_ENTRIES;

/// Number of hinted blocks that are put back at a time when an allocation needs one.
const RELEASE: usize = 64;

type Slots = SpinLock<Option<&'static mut [Block]>>;

/// Allocator, the memory that its vCPUs need to use it, and the balloon.
#[derive(Debug)]
pub(crate) struct Pool {
    buddy: SpinLock<Buddy<'static>>,
    buffers: &'static [FreeBuffer<'static>],
    /// Pages of reports, one for each vCPU.
    pages: &'static [AtomicU64],
    /// Slots for a batch of each vCPU, and for one of hints.
    slots: &'static [Slots],
    mode: ReportMode,
    /// Least order of a block that is reported from a buffer.
    report_from: u32,
    pub(crate) balloon: Option<Balloon>,
    pub(crate) clock: TscClock,
    cpus: usize,
}

/// Memory for the allocator's tables, before its remaining memory is known.
#[derive(Debug)]
pub(crate) struct Tables {
    carver: Carver,
    device: Option<Mmio>,
    map_pages: u64,
}

impl Tables {
    /// Returns the size in bytes of the tables of an allocator of all `free` memory, and of a
    /// balloon driver.
    fn bytes(free: &FreeRam, boot: &BootInfo, cpus: u32) -> u64 {
        let frames = Spans::frames_at_most(free.pages(), free.ranges().len() as u64);
        let batches = (u64::from(cpus) + 1) * (BATCH * size_of::<Block>() + size_of::<Slots>()) as u64;
        let each = 8 * ASYNC_ENTRIES as u64 + PAGE_SIZE + size_of::<FreeBuffer<'_>>() as u64;
        let map = boot.pages_below(u64::MAX).div_ceil(64) * 8;
        // Each piece may be aligned to a page.
        8 * frames + map + batches + u64::from(cpus) * each + balloon::TABLE_BYTES + 8 * PAGE_SIZE
    }

    /// Returns true if the tables are worth their memory: with `spare` pages left besides the
    /// workload's, they take a quarter of these at most.
    pub(crate) fn worth(free: &FreeRam, boot: &BootInfo, cpus: u32, spare: u64) -> bool {
        Self::bytes(free, boot, cpus) <= spare * PAGE_SIZE / 4
    }

    /// Takes memory for the tables.
    ///
    /// # Safety
    /// The ranges in `free` must be mapped and have no other user.
    pub(crate) unsafe fn take(free: &mut FreeRam, boot: &BootInfo, device: Option<Mmio>, cpus: u32) -> Self {
        let bytes = Self::bytes(free, boot, cpus);
        // SAFETY: the contract of this function is the same.
        let carver = unsafe { Carver::new(free, bytes) };
        Self { carver, device, map_pages: boot.pages_below(u64::MAX) }
    }
}

impl Pool {
    /// Returns an allocator of all `free` memory.
    pub(crate) fn new(
        tables: Tables,
        free: &FreeRam,
        boot: &BootInfo,
        args: &GuestArgs,
        (cpus, clock): (u32, TscClock),
    ) -> Self {
        let Tables { mut carver, device, map_pages } = tables;
        let cpus = usize::try_from(cpus).unwrap_or(1);
        let mut spans = Spans::new();
        for range in free.ranges().iter().filter(|range| range.start < range.end) {
            if let Err(error) = spans.add(range.start, range.end, boot.pages_below(range.start)) {
                panic!("{error}");
            }
        }
        let frames = usize::try_from(spans.frames()).unwrap_or(0);
        let mut buddy = Buddy::new(spans, carver.slice(8, frames, |_| 0));
        let mode = if device.is_some() { args.report } else { ReportMode::Off };
        let entries = if mode == ReportMode::Async { ASYNC_ENTRIES } else { SYNC_ENTRIES };
        let buffers = if mode == ReportMode::Off { 0 } else { cpus };
        let noted: &'static [AtomicU64] = carver.slice(8, buffers * entries, |_| AtomicU64::new(0));
        let buffers = carver.slice(64, buffers, |cpu| FreeBuffer::new(&noted[cpu * entries..][..entries]));
        let blocks = carver.slice(8, (cpus + 1) * BATCH, |_| Block::default());
        let mut chunks = blocks.chunks_exact_mut(BATCH);
        let slots = carver.slice(8, cpus + 1, |_| SpinLock::new(chunks.next()));
        let pages = if mode == ReportMode::Hypercall { cpus * REPORT_ENTRIES } else { 0 };
        let pages = carver.slice(PAGE_SIZE, pages, |_| AtomicU64::new(0));
        let balloon = device.and_then(|device| Balloon::new(device, args, &mut carver));
        if let Some(balloon) = balloon.as_ref().filter(|balloon| balloon.keeps_map()) {
            let start = clock.ns(cpu::tsc());
            let words = usize::try_from(map_pages.div_ceil(64)).unwrap_or(0);
            let words: &'static [AtomicU64] = carver.slice(PAGE_SIZE, words, |_| AtomicU64::new(0));
            buddy.keep_map(FreeBits::new(words));
            let built = clock.ns(cpu::tsc());
            balloon.publish_map(words.as_ptr().addr() as u64, map_pages, (built - start, built / 1000));
        }
        let mode = if balloon.as_ref().is_some_and(Balloon::reports) { mode } else { ReportMode::Off };
        stats::ALLOC.begin(cpus as u64);
        let buddy = SpinLock::new(buddy);
        let report_from = args.report_from;
        Self { buddy, buffers, pages, slots, mode, report_from, balloon, clock, cpus }
    }

    /// Returns the heap of vCPU `cpu`. Called once for each vCPU.
    pub(crate) fn heap(&self, cpu: usize) -> Heap<'static> {
        let last = cpu + 1 == self.cpus;
        let (reports, sweeps) = match self.mode {
            ReportMode::Off => (Reports::Off, false),
            ReportMode::Sync | ReportMode::Hypercall => (Reports::Own, cpu == 0),
            ReportMode::Async if last => (Reports::ForAll, true),
            ReportMode::Async => (Reports::Handed, false),
        };
        Heap::new(self.buffers, cpu, reports, sweeps, self.batch(cpu)).reporting_from(self.report_from)
    }

    /// Returns the batch for the hints of the balloon's driver. Called once.
    pub(crate) fn hint_batch(&self) -> Batch<'static> {
        self.batch(self.cpus)
    }

    fn batch(&self, index: usize) -> Batch<'static> {
        Batch::new(self.slots[index].lock().take().expect("a batch is taken once"))
    }

    /// Calls `work` with the allocator under its lock.
    #[inline]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut Buddy<'static>) -> R) -> R {
        work(&mut self.buddy.lock())
    }
}

/// Allocator as one vCPU uses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) cpu: usize,
}

impl Machine for Local<'_> {
    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Buddy<'_>) -> R) -> R {
        self.pool.with(work)
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        self.pool.clock.ns(cpu::tsc())
    }

    #[inline]
    fn load(&self, gpa: u64) -> u64 {
        // SAFETY: blocks of the allocator are mapped memory without other users, and the caller has
        // allocated this one.
        unsafe { pointer::<u64>(gpa).read_volatile() }
    }

    #[inline]
    fn store(&self, gpa: u64, value: u64) {
        // SAFETY: as for `load`.
        unsafe { pointer::<u64>(gpa).write_volatile(value) }
    }

    fn relieve(&self) -> Relief {
        let Some(balloon) = &self.pool.balloon else { return Relief::None };
        let mut without = Relief::None;
        if self.pool.with(|buddy| buddy.pages().held) != 0 {
            let release = || {
                self.pool.with(|buddy| buddy.release_held(RELEASE));
            };
            match balloon.if_hints_processed(release) {
                Some(true) => {
                    balloon.released();
                    return Relief::Hinted;
                }
                // The first vCPU is processing hints, so this is tried again later.
                None => return Relief::Hinted,
                Some(false) => without = Relief::Held,
            }
        }
        if balloon.deflate_some(self.pool) { Relief::Balloon } else { without }
    }

    fn claim(&self) -> bool {
        // Each vCPU has its own page of reports, but there is only one queue.
        self.pool.mode == ReportMode::Hypercall || self.balloon().claim()
    }

    fn most(&self) -> usize {
        if self.pool.mode == ReportMode::Hypercall { REPORT_ENTRIES } else { self.balloon().report_most() }
    }

    fn report(&self, blocks: &[Block]) {
        let gpa = |block: &Block| self.pool.with(|buddy| buddy.spans().gpa(*block));
        if self.pool.mode != ReportMode::Hypercall {
            self.balloon().report(blocks.iter().map(|block| (gpa(block), block.bytes())));
            return;
        }
        let page = &self.pool.pages[self.cpu * REPORT_ENTRIES..][..REPORT_ENTRIES];
        let entries = blocks.iter().map(|block| report_entry(gpa(block), block.order));
        for (slot, entry) in page.iter().zip(entries.chain(core::iter::repeat(0))) {
            slot.store(entry, Ordering::Relaxed);
        }
        let number = page.as_ptr().addr() as u64 / PAGE_SIZE;
        // Guest memory ends below 512 GiB.
        cpu::out32(REPORT_PORT, u32::try_from(number).unwrap_or(0));
    }

    fn release(&self) {
        if self.pool.mode != ReportMode::Hypercall {
            self.balloon().unclaim();
        }
    }
}

impl Local<'_> {
    fn balloon(&self) -> &Balloon {
        // Without a balloon the mode is off, and nothing is ever reported.
        self.pool.balloon.as_ref().expect("reports need a balloon")
    }
}
