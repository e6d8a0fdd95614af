//! What a guest tells of its allocator and of what it does with its balloon, behind the [`StatsPage`](crate::StatsPage).
//!
//! A header page for the whole guest and 1 KiB for each of 64 vCPUs, in the same style: 64-bit little-endian words, each block
//! with a sequence word that is odd while it is written (a seqlock). The magic is there only in guests that have an allocator.

use crate::{MAX_CPUS, STATS_BYTES, STATS_GPA, StatsError};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering, fence};

/// First word of the header: "vmfalloc" in ASCII, little-endian.
pub const ALLOC_STATS_MAGIC: u64 = u64::from_le_bytes(*b"vmfalloc");

/// Second word of the header. A layout that moves a field gets another number.
pub const ALLOC_STATS_VERSION: u64 = 1;

/// Guest physical address of the [`AllocPage`].
pub const ALLOC_STATS_GPA: u64 = STATS_GPA + STATS_BYTES;

/// Bytes of the whole [`AllocPage`], a multiple of 4096.
pub const ALLOC_STATS_BYTES: u64 = alloc_stats_bytes(MAX_CPUS as u64);

/// Buckets of the histograms: bucket `i` counts calls that took from `64 << i` nanoseconds to below twice that; the first one
/// also all that are shorter, the last one all that are longer.
pub const ALLOC_HIST_BUCKETS: usize = 24;

const HEADER_WORDS: usize = 512;
const BLOCK_WORDS: usize = 128;

/// Words of the header: magic, version, vCPUs, and where the guest's block begins.
const MAGIC: usize = 0;
const VERSION: usize = 1;
const CPUS: usize = 2;
const GUEST: usize = 8;

/// Bytes that are written by a guest with `cpus` vCPUs, at the start of its [`AllocPage`].
#[must_use]
pub const fn alloc_stats_bytes(cpus: u64) -> u64 {
    let cpus = if cpus < MAX_CPUS as u64 { cpus } else { MAX_CPUS as u64 };
    8 * (HEADER_WORDS as u64 + cpus * BLOCK_WORDS as u64)
}

/// How often a reader tries again when the guest is writing, see the statistics page.
const READ_TRIES: u32 = 1000;

/// A structure of 64-bit counters, with its order on the page.
macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident,)* } $({ $($(#[$hist_doc:meta])* $hist:ident,)* })?) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: u64,)*
            $($($(#[$hist_doc])* pub $hist: [u64; ALLOC_HIST_BUCKETS],)*)?
        }

        impl $name {
            /// Each counter with its name, but for histograms.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }

            fn put(&self, mut put: impl FnMut(u64)) {
                $(put(self.$field);)*
                $($(self.$hist.iter().for_each(|count| put(*count));)*)?
            }

            fn take(mut next: impl FnMut() -> u64) -> Self {
                // Fields are read in the order in which they stand here, which is the order on the page.
                Self {
                    $($field: next(),)*
                    $($($hist: core::array::from_fn(|_| next()),)*)?
                }
            }
        }
    };
}

counters! {
    /// What one vCPU did with memory. Everything is cumulative since start.
    AllocCpu {
        /// Guest clock at this report, in microseconds since the guest's entry.
        t_us,
        /// Rounds that were completed: allocated, touched, checked, freed.
        rounds,
        /// Rounds that got less memory than they were to have.
        short_rounds,
        /// 1 once all rounds are done; the guest allocates nothing more.
        done,
        /// Blocks allocated.
        allocs,
        /// Blocks freed.
        frees,
        /// Bytes allocated.
        alloc_bytes,
        /// Bytes touched: every page written to.
        touched_bytes,
        /// Bytes freed.
        freed_bytes,
        /// Nanoseconds in allocations.
        alloc_ns,
        /// Nanoseconds touching what was allocated.
        touch_ns,
        /// Nanoseconds checking it before it was freed.
        check_ns,
        /// Nanoseconds in frees, synchronous reports included.
        free_ns,
        /// The longest allocation, in nanoseconds.
        alloc_max_ns,
        /// The longest free, in nanoseconds.
        free_max_ns,
        /// Allocations that waited for blocks that were being reported, hinted or in the balloon.
        waits,
        /// Nanoseconds waited.
        wait_ns,
        /// Allocations for which there was no memory.
        failed,
        /// Reports sent: requests to the device, or hypercalls.
        reports,
        /// Blocks in them.
        report_blocks,
        /// Bytes of those.
        report_bytes,
        /// Nanoseconds in reporting: isolating, the report itself, putting back.
        report_ns,
        /// The longest of them.
        report_max_ns,
        /// Times that a buffer was full, or flushed because nothing had been freed for some time.
        flushes,
        /// Entries of the buffer that named nothing to report: allocated since, or reported with a larger block.
        stale,
        /// Freed blocks that were not noted, because the buffer was still full: they are found by the flush when all is quiet.
        missed,
        /// Times that reporting was put off: another vCPU was at it, or memory was low.
        deferred,
        /// Guest clock at the last free, in microseconds.
        last_free_us,
        /// Guest clock at the end of the last report, in microseconds.
        last_report_us,
    }
    {
        /// Allocations by length.
        alloc_hist,
        /// Frees by length, synchronous reports included.
        free_hist,
    }
}

counters! {
    /// What is true for the whole guest, as its first vCPU tells it.
    AllocGuest {
        /// Guest clock at this report, in microseconds since the guest's entry.
        t_us,
        /// Pages that the allocator has in all.
        pages,
        /// Pages that are free, reported or not.
        free_pages,
        /// Free pages that have not been reported since they were last in use.
        unreported_pages,
        /// Pages that are just being reported.
        isolated_pages,
        /// Pages that are kept back because they were hinted as free.
        held_pages,
        /// Pages in the balloon.
        balloon_pages,
        /// Pages that the host wants in the balloon.
        target_pages,
        /// Below so many free pages, nothing is reported.
        low_pages,
        /// Features that were negotiated with the balloon, bits 0 to 63; 0 if there is none.
        features,
        /// Features of the balloon extension that were negotiated, from bit 96 on.
        private_features,
        /// The command that was answered last.
        hint_id,
        /// Walks of the free lists.
        hint_walks,
        /// Blocks hinted.
        hint_blocks,
        /// Bytes of those.
        hint_bytes,
        /// Nanoseconds in walks, the host's part included.
        hint_ns,
        /// Nanoseconds of the last walk.
        hint_last_ns,
        /// Guest clock at its end, in microseconds.
        hint_last_us,
        /// Times that hinted pages were taken back because memory was short.
        hint_releases,
        /// Where the map of free pages lies; 0 if there is none.
        map_gpa,
        /// Its bits.
        map_pages,
        /// Nanoseconds that it took to make the map.
        map_ns,
        /// Guest clock when it was published, in microseconds.
        map_us,
        /// Pages given to the balloon by `inflate=`.
        inflate_pages,
        /// Requests that it took.
        inflate_requests,
        /// Nanoseconds allocating them.
        inflate_alloc_ns,
        /// Nanoseconds sending them, the host's part included.
        inflate_send_ns,
        /// Nanoseconds of it all.
        inflate_ns,
        /// Guest clock when it was done, in microseconds; 0 before.
        inflate_us,
    }
}

impl AllocCpu {
    /// The bucket of a call that took `ns` nanoseconds.
    #[must_use]
    #[inline]
    pub fn bucket(ns: u64) -> usize {
        ((ns / 64).max(1).ilog2() as usize).min(ALLOC_HIST_BUCKETS - 1)
    }
}

/// A block: the first word is its sequence.
struct Words<const N: usize>([AtomicU64; N]);

impl<const N: usize> Words<N> {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }

    /// Publishes what `fill` puts, at word `start` and behind. Only the owner of the block calls this.
    fn publish(&self, start: usize, fill: impl FnOnce(&mut dyn FnMut(u64))) {
        let sequence = &self.0[start];
        let seq = sequence.load(Ordering::Relaxed) | 1;
        sequence.store(seq, Ordering::Relaxed);
        // Pairs with the acquire fence of the reader: who sees a new field sees the odd sequence too.
        fence(Ordering::Release);
        let mut at = start;
        fill(&mut |value| {
            at += 1;
            self.0[at].store(value, Ordering::Relaxed);
        });
        sequence.store(seq.wrapping_add(1), Ordering::Release);
    }
}

impl<const N: usize> fmt::Debug for Words<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Words").field(&N).finish()
    }
}

/// The page as host and guest share it: valid when zeroed (no magic).
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct AllocPage {
    header: Words<HEADER_WORDS>,
    cpus: [Words<BLOCK_WORDS>; MAX_CPUS],
}

const _: () = assert!(size_of::<AllocPage>() as u64 == ALLOC_STATS_BYTES);
const _: () = assert!(size_of::<AllocCpu>() < 8 * BLOCK_WORDS && ALLOC_STATS_BYTES.is_multiple_of(4096));
const _: () = assert!(size_of::<AllocGuest>() < 8 * (HEADER_WORDS - GUEST));

impl AllocPage {
    /// A zeroed page, as a guest finds it.
    #[must_use]
    pub const fn new() -> Self {
        Self { header: Words::new(), cpus: [const { Words::new() }; MAX_CPUS] }
    }

    /// Says that the guest has an allocator, and `cpus` vCPUs that use it.
    pub fn begin(&self, cpus: u64) {
        self.header.0[VERSION].store(ALLOC_STATS_VERSION, Ordering::Relaxed);
        self.header.0[CPUS].store(cpus, Ordering::Relaxed);
        self.header.0[MAGIC].store(ALLOC_STATS_MAGIC, Ordering::Release);
    }

    /// Publishes what is true for the whole guest. Only its first vCPU calls this.
    pub fn publish_guest(&self, guest: &AllocGuest) {
        self.header.publish(GUEST, |put| guest.put(put));
    }

    /// Publishes what vCPU `cpu` did. Only that vCPU calls this; there is no block for those beyond the 64th.
    pub fn publish_cpu(&self, cpu: usize, report: &AllocCpu) {
        if let Some(block) = self.cpus.get(cpu) {
            block.publish(0, |put| report.put(put));
        }
    }

    /// Reads a consistent copy without touching anything behind the blocks of `cpus` vCPUs, whatever the guest says of their
    /// number: the rest reads as zeros. See [`alloc_stats_bytes`].
    ///
    /// # Errors
    /// [`StatsError`] when there is no allocator, or when its guest was stopped while it wrote.
    pub fn snapshot_of(&self, cpus: usize) -> Result<AllocSnapshot, StatsError> {
        let end = HEADER_WORDS + cpus.min(MAX_CPUS) * BLOCK_WORDS;
        AllocSnapshot::read(|word| if word < end { self.word(word).load(Ordering::Acquire) } else { 0 })
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        match word.checked_sub(HEADER_WORDS) {
            Some(rest) => &self.cpus[rest / BLOCK_WORDS].0[rest % BLOCK_WORDS],
            None => &self.header.0[word],
        }
    }
}

impl Default for AllocPage {
    fn default() -> Self {
        Self::new()
    }
}

/// A copy of the [`AllocPage`] as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocSnapshot {
    /// What is true for the whole guest.
    pub guest: AllocGuest,
    /// `1..=64`.
    cpus: usize,
    blocks: [AllocCpu; MAX_CPUS],
}

impl AllocSnapshot {
    /// Reads a copy by a function that loads the 64-bit little-endian word with the given index (`0..ALLOC_STATS_BYTES / 8`) of the
    /// [`AllocPage`]. It must really read at each call, whole words, in the order of the calls.
    ///
    /// # Errors
    /// [`StatsError`] when there is no allocator, or when its guest was stopped while it wrote.
    pub fn read(mut load: impl FnMut(usize) -> u64) -> Result<Self, StatsError> {
        match load(MAGIC) {
            ALLOC_STATS_MAGIC => {}
            0 => return Err(StatsError::NotYet),
            value => return Err(StatsError::Invalid { word: MAGIC, value }),
        }
        let version = load(VERSION);
        if version != ALLOC_STATS_VERSION {
            return Err(StatsError::Invalid { word: VERSION, value: version });
        }
        let count = load(CPUS);
        let cpus = usize::try_from(count)
            .ok()
            .filter(|cpus| (1..=MAX_CPUS).contains(cpus))
            .ok_or(StatsError::Invalid { word: CPUS, value: count })?;
        let guest = read_block(&mut load, GUEST, |next| AllocGuest::take(next));
        let guest = guest.ok_or(StatsError::Busy { cpu: 0 })?;
        let mut blocks = [AllocCpu::default(); MAX_CPUS];
        for (cpu, block) in blocks.iter_mut().enumerate().take(cpus) {
            let start = HEADER_WORDS + cpu * BLOCK_WORDS;
            let read = read_block(&mut load, start, |next| AllocCpu::take(next));
            *block = read.ok_or(StatsError::Busy { cpu })?;
        }
        Ok(Self { guest, cpus, blocks })
    }

    /// The vCPUs' blocks, as many as the guest has.
    #[must_use]
    pub fn cpus(&self) -> &[AllocCpu] {
        &self.blocks[..self.cpus]
    }

    /// The sum of one counter over all vCPUs.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&AllocCpu) -> u64) -> u64 {
        self.cpus().iter().map(of).sum()
    }

    /// Whether every vCPU has done all its rounds.
    #[must_use]
    pub fn done(&self) -> bool {
        self.cpus().iter().all(|cpu| cpu.done != 0)
    }
}

fn read_block<T>(
    load: &mut impl FnMut(usize) -> u64,
    start: usize,
    take: impl Fn(&mut dyn FnMut() -> u64) -> T,
) -> Option<T> {
    for _ in 0..READ_TRIES {
        let before = load(start);
        if before.is_multiple_of(2) {
            fence(Ordering::Acquire);
            let mut at = start;
            let block = take(&mut || {
                at += 1;
                load(at)
            });
            fence(Ordering::Acquire);
            if load(start) == before {
                return Some(block);
            }
        }
        core::hint::spin_loop();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn cpu(n: u64) -> AllocCpu {
        AllocCpu::take(|| n)
    }

    #[test]
    fn what_was_published_is_read() {
        let page = AllocPage::new();
        assert_eq!(page.snapshot_of(64), Err(StatsError::NotYet));
        page.begin(2);
        page.publish_guest(&AllocGuest { pages: 7, inflate_us: 9, ..AllocGuest::default() });
        page.publish_cpu(
            1,
            &AllocCpu { rounds: 3, free_hist: [5; ALLOC_HIST_BUCKETS], ..AllocCpu::default() },
        );
        page.publish_cpu(64, &cpu(1));
        let snapshot = page.snapshot_of(64).unwrap();
        assert_eq!((snapshot.guest.pages, snapshot.guest.inflate_us, snapshot.guest.t_us), (7, 9, 0));
        assert_eq!((snapshot.cpus().len(), snapshot.cpus()[0]), (2, AllocCpu::default()));
        assert_eq!((snapshot.cpus()[1].rounds, snapshot.cpus()[1].free_hist[23]), (3, 5));
        assert_eq!((snapshot.sum(|cpu| cpu.rounds), snapshot.done()), (3, false));
        let other = page.snapshot_of(1).unwrap();
        assert_eq!(other.cpus()[1], AllocCpu::default());
    }

    #[test]
    fn nonsense_is_refused() {
        for (word, value) in [(MAGIC, 1), (VERSION, 2), (CPUS, 0), (CPUS, 65)] {
            let page = AllocPage::new();
            page.begin(1);
            page.word(word).store(value, Ordering::Relaxed);
            assert_eq!(page.snapshot_of(64), Err(StatsError::Invalid { word, value }));
        }
        let page = AllocPage::new();
        page.begin(2);
        page.cpus[1].0[0].store(1, Ordering::Relaxed);
        assert_eq!(page.snapshot_of(64), Err(StatsError::Busy { cpu: 1 }));
    }

    #[test]
    fn words_lie_where_the_structure_has_them() {
        let page = AllocPage::new();
        for word in 0..usize::try_from(ALLOC_STATS_BYTES / 8).unwrap() {
            let address = std::ptr::from_ref(page.word(word)).addr();
            assert_eq!(address - std::ptr::from_ref(&page).addr(), 8 * word);
        }
    }

    #[test]
    fn buckets_are_powers_of_two() {
        for (ns, bucket) in [(0, 0), (127, 0), (128, 1), (64 << 23, 23), (u64::MAX, 23)] {
            assert_eq!(AllocCpu::bucket(ns), bucket, "{ns} ns");
        }
    }

    #[test]
    fn concurrent_readers_never_see_a_torn_block() {
        let page = AllocPage::new();
        page.begin(1);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    page.publish_cpu(0, &cpu(n));
                    (0..200).for_each(|_| core::hint::spin_loop());
                }
            });
            let mut seen = 0;
            for _ in 0..100_000 {
                if let Ok(snapshot) = page.snapshot_of(1) {
                    let read = snapshot.cpus()[0];
                    assert_eq!(read, cpu(read.t_us));
                    assert!(read.t_us >= seen);
                    seen = read.t_us;
                }
                if seen > 1000 {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(seen > 0, "the reader never got a report");
        });
    }
}
