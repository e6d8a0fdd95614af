//! Report of a guest's allocator and of its balloon, after the [`StatsPage`](crate::StatsPage).
//!
//! There is a header page for the whole guest, and 1 KiB for each of 64 vCPUs. The format is that
//! of the statistics page: 64-bit little-endian words, and in each block a sequence word that is
//! odd while the block is written (a seqlock). The magic number exists only in guests that have an
//! allocator.

use crate::{MAX_CPUS, STATS_BYTES, STATS_GPA, StatsError};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering, fence};

/// First word of the header: "vmfalloc" in ASCII, little-endian.
pub const ALLOC_STATS_MAGIC: u64 = u64::from_le_bytes(*b"vmfalloc");

/// Second word of the header. The number changes with every layout that moves a field. New fields
/// come after all others, and read as zero if the guest is older.
pub const ALLOC_STATS_VERSION: u64 = 1;

/// Guest-physical address of the [`AllocPage`].
pub const ALLOC_STATS_GPA: u64 = STATS_GPA + STATS_BYTES;

/// Size of the whole [`AllocPage`] in bytes, a multiple of 4096.
pub const ALLOC_STATS_BYTES: u64 = alloc_stats_bytes(MAX_CPUS as u64);

/// Number of buckets of the histograms. Bucket `i` counts calls that took from `64 << i`
/// nanoseconds to below twice that. The first bucket also counts all shorter calls, and the last
/// one all longer calls.
pub const ALLOC_HIST_BUCKETS: usize = 24;

const HEADER_WORDS: usize = 512;
const BLOCK_WORDS: usize = 128;

/// Word indices in the header: magic number, version, vCPUs, and start of the guest's block.
const MAGIC: usize = 0;
const VERSION: usize = 1;
const CPUS: usize = 2;
const GUEST: usize = 8;

/// Returns the number of bytes that a guest with `cpus` vCPUs writes, from the start of its
/// [`AllocPage`].
#[must_use]
pub const fn alloc_stats_bytes(cpus: u64) -> u64 {
    let cpus = if cpus < MAX_CPUS as u64 { cpus } else { MAX_CPUS as u64 };
    8 * (HEADER_WORDS as u64 + cpus * BLOCK_WORDS as u64)
}

/// Number of attempts of a reader while the guest is writing. See the statistics page.
const READ_TRIES: u32 = 1000;

/// Defines a structure of 64-bit counters in the order of the page: counters, histograms, and
/// counters that were added later.
macro_rules! counters {
    (
        $(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident,)* }
        $({ $($(#[$hist_doc:meta])* $hist:ident,)* } { $($(#[$late_doc:meta])* $late:ident,)* })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: u64,)*
            $($($(#[$hist_doc])* pub $hist: [u64; ALLOC_HIST_BUCKETS],)* $($(#[$late_doc])* pub $late: u64,)*)?
        }

        impl $name {
            /// Returns each counter with its name, without the histograms.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)* $($((stringify!($late), self.$late),)*)?].into_iter()
            }

            fn put(&self, mut put: impl FnMut(u64)) {
                $(put(self.$field);)*
                $($(self.$hist.iter().for_each(|count| put(*count));)* $(put(self.$late);)*)?
            }

            fn take(mut next: impl FnMut() -> u64) -> Self {
                // Fields are read in the order of their definition, which is the order on the page.
                Self {
                    $($field: next(),)*
                    $($($hist: core::array::from_fn(|_| next()),)* $($late: next(),)*)?
                }
            }
        }
    };
}

counters! {
    /// Memory activity of one vCPU. All counters are cumulative since the start.
    AllocCpu {
        /// Guest clock at this report, in microseconds since the guest's entry.
        t_us,
        /// Number of completed rounds: allocated, touched, checked, freed.
        rounds,
        /// Number of rounds that got less memory than intended.
        short_rounds,
        /// 1 once all rounds are done. The guest then allocates nothing more.
        done,
        /// Number of allocated blocks.
        allocs,
        /// Number of freed blocks.
        frees,
        /// Number of allocated bytes.
        alloc_bytes,
        /// Number of touched bytes: every page was written to.
        touched_bytes,
        /// Number of freed bytes.
        freed_bytes,
        /// Time spent in allocations, in ns.
        alloc_ns,
        /// Time spent touching allocated memory, in ns.
        touch_ns,
        /// Time spent checking memory before it was freed, in ns.
        check_ns,
        /// Time spent in frees, synchronous reports included, in ns.
        free_ns,
        /// Duration of the longest allocation, in ns.
        alloc_max_ns,
        /// Duration of the longest free, in ns.
        free_max_ns,
        /// Number of allocations that waited for blocks that were being reported, were hinted, or
        /// were in the balloon.
        waits,
        /// Time spent waiting, in ns.
        wait_ns,
        /// Number of allocations that failed for lack of memory.
        failed,
        /// Number of reports sent: requests to the device, or hypercalls.
        reports,
        /// Number of blocks in reports.
        report_blocks,
        /// Number of bytes in reported blocks.
        report_bytes,
        /// Time spent reporting, in ns: isolating, the report itself, putting back.
        report_ns,
        /// Duration of the longest report, in ns.
        report_max_ns,
        /// Number of times that a buffer was full, or was flushed because nothing had been freed
        /// for some time.
        flushes,
        /// Number of buffer entries without a block to report: allocated since, or reported with a
        /// larger block.
        stale,
        /// Number of freed blocks that were not noted, because the buffer was still full. The flush
        /// after a quiet time finds them.
        missed,
        /// Number of times that reporting was deferred, because another vCPU was reporting or
        /// memory was low.
        deferred,
        /// Guest clock at the latest free, in microseconds.
        last_free_us,
        /// Guest clock at the end of the latest report, in microseconds.
        last_report_us,
    }
    {
        /// Histogram of allocations by duration.
        alloc_hist,
        /// Histogram of frees by duration, synchronous reports included.
        free_hist,
    }
    {
        /// Duration of the longest wait of an allocation, in ns.
        wait_max_ns,
        /// Number of allocations that waited for blocks that were being reported.
        waits_reported,
        /// Number of allocations that waited for pages that were kept back for a question of the
        /// host about free pages.
        waits_held,
        /// Number of allocations that took pages out of the balloon.
        waits_balloon,
        /// Number of failed allocations during which pages were kept back for a question of the
        /// host that the host had not finished processing.
        failed_held,
        /// Number of times that the buffer of freed blocks became full.
        full,
        /// Number of reports that ended early because memory was low. `deferred` includes them.
        low,
    }
}

counters! {
    /// State of the whole guest, as its first vCPU reports it.
    AllocGuest {
        /// Guest clock at this report, in microseconds since the guest's entry.
        t_us,
        /// Number of pages of the allocator.
        pages,
        /// Number of free pages, reported or not.
        free_pages,
        /// Number of free pages that have not been reported since they were last in use.
        unreported_pages,
        /// Number of pages that are being reported.
        isolated_pages,
        /// Number of pages that are kept back because they were hinted as free.
        held_pages,
        /// Number of pages in the balloon.
        balloon_pages,
        /// Number of pages that the host requests in the balloon.
        target_pages,
        /// Number of free pages below which nothing is reported.
        low_pages,
        /// Features that were negotiated with the balloon, bits 0 to 63; 0 if there is no balloon.
        features,
        /// Features of the balloon extension that were negotiated, from bit 96 on.
        private_features,
        /// Latest command that was answered.
        hint_id,
        /// Number of walks of the free lists.
        hint_walks,
        /// Number of hinted blocks.
        hint_blocks,
        /// Number of bytes in hinted blocks.
        hint_bytes,
        /// Time spent in walks, the host's part included, in ns.
        hint_ns,
        /// Duration of the latest walk, in ns.
        hint_last_ns,
        /// Guest clock at the end of the latest walk, in microseconds.
        hint_last_us,
        /// Number of times that hinted pages were taken back because memory was short.
        hint_releases,
        /// Guest-physical address of the map of free pages; 0 if there is none.
        map_gpa,
        /// Number of bits of the map.
        map_pages,
        /// Time that it took to create the map, in ns.
        map_ns,
        /// Guest clock at the publication of the map, in microseconds.
        map_us,
        /// Number of pages given to the balloon by `inflate=`.
        inflate_pages,
        /// Number of requests of that inflation.
        inflate_requests,
        /// Time spent allocating pages for that inflation, in ns.
        inflate_alloc_ns,
        /// Time spent sending them, the host's part included, in ns.
        inflate_send_ns,
        /// Duration of the whole inflation, in ns.
        inflate_ns,
        /// Guest clock at the end of the inflation, in microseconds; 0 before.
        inflate_us,
        /// Number of times that a request to inflate stopped because memory was low.
        inflate_short,
        /// Number of pages that allocations took out of the balloon.
        taken_back_pages,
        /// Number of times that a walk of the free lists waited because the queue of hints was
        /// full.
        hint_full,
    }
}

impl AllocCpu {
    /// Returns the bucket of a call that took `ns` nanoseconds.
    #[must_use]
    #[inline]
    pub fn bucket(ns: u64) -> usize {
        ((ns / 64).max(1).ilog2() as usize).min(ALLOC_HIST_BUCKETS - 1)
    }
}

/// Block of words, of which the first is the sequence.
struct Words<const N: usize>([AtomicU64; N]);

impl<const N: usize> Words<N> {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }

    /// Publishes the values of `fill` at word `start` and after it. Only the owner of the block may
    /// call this.
    fn publish(&self, start: usize, fill: impl FnOnce(&mut dyn FnMut(u64))) {
        let sequence = &self.0[start];
        let seq = sequence.load(Ordering::Relaxed) | 1;
        sequence.store(seq, Ordering::Relaxed);
        // Pairs with the acquire fence of the reader: a reader that sees a new field also sees the
        // odd sequence.
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

/// Page that host and guest share. A zeroed page is valid and has no magic number.
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
    /// Returns a zeroed page, as a guest finds it.
    #[must_use]
    pub const fn new() -> Self {
        Self { header: Words::new(), cpus: [const { Words::new() }; MAX_CPUS] }
    }

    /// Announces that the guest has an allocator and `cpus` vCPUs that use it.
    pub fn begin(&self, cpus: u64) {
        self.header.0[VERSION].store(ALLOC_STATS_VERSION, Ordering::Relaxed);
        self.header.0[CPUS].store(cpus, Ordering::Relaxed);
        self.header.0[MAGIC].store(ALLOC_STATS_MAGIC, Ordering::Release);
    }

    /// Publishes the state of the whole guest. Only the first vCPU may call this.
    pub fn publish_guest(&self, guest: &AllocGuest) {
        self.header.publish(GUEST, |put| guest.put(put));
    }

    /// Publishes the activity of vCPU `cpu`. Only that vCPU may call this. vCPUs beyond the 64th
    /// have no block.
    pub fn publish_cpu(&self, cpu: usize, report: &AllocCpu) {
        if let Some(block) = self.cpus.get(cpu) {
            block.publish(0, |put| report.put(put));
        }
    }

    /// Reads a consistent copy without touching anything after the blocks of `cpus` vCPUs, whatever
    /// number the guest reports. The rest reads as zeros. See [`alloc_stats_bytes`].
    ///
    /// # Errors
    /// Returns a [`StatsError`] if there is no allocator, or if the guest was stopped while it
    /// wrote.
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

/// Copy of the [`AllocPage`] as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocSnapshot {
    /// State of the whole guest.
    pub guest: AllocGuest,
    /// Number of vCPUs, `1..=64`.
    cpus: usize,
    blocks: [AllocCpu; MAX_CPUS],
}

impl AllocSnapshot {
    /// Reads a copy with a function that loads the 64-bit little-endian word with the given index
    /// (`0..ALLOC_STATS_BYTES / 8`) of the [`AllocPage`]. Each call must read the memory again, in
    /// whole words and in the order of the calls.
    ///
    /// # Errors
    /// Returns a [`StatsError`] if there is no allocator, or if the guest was stopped while it
    /// wrote.
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

    /// Returns the blocks of the guest's vCPUs.
    #[must_use]
    pub fn cpus(&self) -> &[AllocCpu] {
        &self.blocks[..self.cpus]
    }

    /// Returns the sum of one counter over all vCPUs.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&AllocCpu) -> u64) -> u64 {
        self.cpus().iter().map(of).sum()
    }

    /// Returns the time of the newest block of a vCPU, in us of the guest's clock.
    #[must_use]
    pub fn newest_us(&self) -> u64 {
        self.cpus().iter().map(|cpu| cpu.t_us).max().unwrap_or(0)
    }

    /// Returns true if the host had been told of all free memory when the guest published its own
    /// block. The blocks of the vCPUs may be older or newer.
    #[must_use]
    pub fn nothing_unreported(&self) -> bool {
        self.guest.unreported_pages == 0 && self.guest.isolated_pages == 0
    }

    /// Returns true if every vCPU has done all its rounds.
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
    fn published_report_is_read_unchanged() {
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
    fn invalid_page_is_refused() {
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
    fn word_indices_match_the_structure() {
        let page = AllocPage::new();
        for word in 0..usize::try_from(ALLOC_STATS_BYTES / 8).unwrap() {
            let address = std::ptr::from_ref(page.word(word)).addr();
            assert_eq!(address - std::ptr::from_ref(&page).addr(), 8 * word);
        }
    }

    /// A host reads the pages of older guests, and a guest is read by older hosts.
    #[test]
    fn fields_that_were_added_later_move_no_other_field() {
        let mut next = 0;
        let cpu = AllocCpu::take(|| {
            next += 1;
            next
        });
        assert_eq!((cpu.t_us, cpu.last_report_us, cpu.alloc_hist[0], cpu.free_hist[23]), (1, 29, 30, 77));
        assert_eq!((cpu.wait_max_ns, cpu.low, next), (78, 84, 84));
        next = 0;
        let guest = AllocGuest::take(|| {
            next += 1;
            next
        });
        assert_eq!((guest.t_us, guest.inflate_us, guest.inflate_short, next), (1, 29, 30, 32));
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
