//! Statistics page, by which a guest reports to its host without an exit.
//!
//! There are nine pages at a fixed guest-physical address: a header page, and 512 bytes for each of
//! 64 vCPUs. Every field is a 64-bit little-endian word that is only accessed as a whole, so host
//! and guest share it without tearing single values. A sequence word makes a vCPU's block
//! consistent as a whole. The word is odd while the guest writes the block (a seqlock).
//!
//! The host either sees the page as [`&StatsPage`](StatsPage) (it owns the mapping and is
//! responsible for the cast), or reads words by other means and gives [`StatsSnapshot::read`] a
//! function.

mod error;

pub use error::StatsError;

use crate::stalls::HIST_BUCKETS;
use crate::worker::{Corrupt, Report};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Number of vCPUs that the statistics page has room for.
pub const MAX_CPUS: usize = 64;

/// First word of the header: "vmfstats" in ASCII, little-endian.
pub const STATS_MAGIC: u64 = u64::from_le_bytes(*b"vmfstats");

/// Second word of the header. The number changes with every layout that moves a field.
pub const STATS_VERSION: u64 = 1;

/// Size of the whole statistics page in bytes, a multiple of 4096.
pub const STATS_BYTES: u64 = 4096 + MAX_CPUS as u64 * BLOCK_BYTES;

/// Number of windows whose longest stall a block records: 16 reports of 10 ms, so that a host that
/// reads every 100 ms misses none.
pub const WINDOWS: usize = 16;

const BLOCK_BYTES: u64 = 512;

/// Returns the size in bytes of the statistics of a guest with `cpus` vCPUs, from the start of its
/// statistics page.
#[must_use]
pub const fn stats_bytes(cpus: u64) -> u64 {
    4096 + if cpus < MAX_CPUS as u64 { cpus } else { MAX_CPUS as u64 } * BLOCK_BYTES
}
const HEADER_WORDS: usize = 512;
const BLOCK_WORDS: usize = 64;

/// Number of attempts of a reader while the guest is writing. A guest writes a block in well below
/// a microsecond. If the guest was paused in the middle, the sequence stays odd until it runs
/// again.
const READ_TRIES: u32 = 1000;

/// Indices of 64-bit words, for readers without a [`StatsPage`]. Block words count from the start
/// of the block.
pub mod offset {
    /// Header: [`STATS_MAGIC`](super::STATS_MAGIC), written last, when the header is complete.
    pub const MAGIC: usize = 0;
    /// Header: [`STATS_VERSION`](super::STATS_VERSION).
    pub const VERSION: usize = 1;
    /// Header: number of vCPUs.
    pub const CPUS: usize = 2;
    /// Header: [`State`](super::State) as a number.
    pub const STATE: usize = 3;
    /// Header: frequency of the guest's TSC in kHz.
    pub const TSC_KHZ: usize = 4;
    /// Header: number of pages with content.
    pub const DATA_PAGES: usize = 5;
    /// Header: number of pages of the working set.
    pub const WS_PAGES: usize = 6;
    /// Header: guest clock at the end of the fill, in microseconds.
    pub const READY_US: usize = 7;
    /// Header: number written by the host, see
    /// [`Header::verify_request`](super::Header::verify_request).
    pub const VERIFY_REQUEST: usize = 8;
    /// Index of the first word of the first vCPU's block.
    pub const BLOCKS: usize = super::HEADER_WORDS;
    /// Number of words from one vCPU's block to the next.
    pub const BLOCK_WORDS: usize = super::BLOCK_WORDS;
    /// Block: sequence, odd while the block is written.
    pub const SEQ: usize = 0;
    pub(crate) const T_US: usize = 1;
    pub(crate) const WRITES: usize = 2;
    pub(crate) const CHECKS: usize = 3;
    pub(crate) const CORRUPT: usize = 4;
    pub(crate) const FIRST_PAGE: usize = 5;
    pub(crate) const FIRST_WORD: usize = 6;
    pub(crate) const FIRST_WANT: usize = 7;
    pub(crate) const FIRST_GOT: usize = 8;
    pub(crate) const STALLS: usize = 9;
    pub(crate) const STALL_SUM_US: usize = 10;
    pub(crate) const STALL_MAX_US: usize = 11;
    pub(crate) const REPORTS: usize = 12;
    pub(crate) const SWEEPS: usize = 13;
    pub(crate) const VERIFY_DONE: usize = 14;
    pub(crate) const HIST: usize = 16;
    pub(crate) const WINDOW: usize = 32;
    pub(crate) const HIST_SUM: usize = 48;
}

/// State of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The guest has not reached its main program.
    Booting,
    /// The guest writes its initial content.
    Filling,
    /// The workload runs.
    Running,
    /// The workload runs, and a check has failed.
    Corrupt,
    /// The guest has given up. A `PANIC` line on the serial port has the reason.
    Panicked,
}

impl State {
    /// Returns the number of the state in the header.
    #[must_use]
    pub fn code(self) -> u64 {
        match self {
            Self::Booting => 0,
            Self::Filling => 1,
            Self::Running => 2,
            Self::Corrupt => 3,
            Self::Panicked => 4,
        }
    }

    fn from_code(code: u64) -> Option<Self> {
        [Self::Booting, Self::Filling, Self::Running, Self::Corrupt, Self::Panicked]
            .into_iter()
            .find(|state| state.code() == code)
    }
}

/// First page, with the state of the whole guest. The guest's first vCPU writes it, except where a
/// field says otherwise.
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    /// [`STATS_MAGIC`] once the header is valid.
    pub magic: AtomicU64,
    /// [`STATS_VERSION`].
    pub version: AtomicU64,
    /// Number of vCPUs.
    pub cpus: AtomicU64,
    /// [`State::code`]. Any vCPU raises it to [`State::Corrupt`].
    pub state: AtomicU64,
    /// Frequency of the guest's TSC in kHz.
    pub tsc_khz: AtomicU64,
    /// Number of pages with content.
    pub data_pages: AtomicU64,
    /// Number of pages of the working set.
    pub ws_pages: AtomicU64,
    /// Guest clock at the end of the fill, in microseconds since the guest's entry.
    pub ready_us: AtomicU64,
    /// Number written by the host. A number other than the previous one makes every vCPU check all
    /// its pages at full speed, once, and then show that number in its block. (KVM does not see
    /// this write: mark the page as dirty if it is to migrate.)
    pub verify_request: AtomicU64,
    reserved: [AtomicU64; HEADER_WORDS - 9],
}

/// Block of one vCPU: 512 bytes, which are eight cache lines of its own. Only that vCPU writes it,
/// every 10 ms.
#[repr(C, align(512))]
pub struct CpuBlock {
    words: [AtomicU64; BLOCK_WORDS],
}

impl fmt::Debug for CpuBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuBlock").field("seq", &self.words[offset::SEQ]).finish_non_exhaustive()
    }
}

/// Statistics page as host and guest share it. A zeroed page is valid ([`State::Booting`], no magic
/// number).
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct StatsPage {
    /// State of the whole guest.
    pub header: Header,
    /// Blocks of the vCPUs.
    pub cpus: [CpuBlock; MAX_CPUS],
}

const _: () = assert!(size_of::<StatsPage>() as u64 == STATS_BYTES);
const _: () = assert!(size_of::<Header>() == 8 * HEADER_WORDS && size_of::<CpuBlock>() == 8 * BLOCK_WORDS);

impl CpuBlock {
    /// Publishes a vCPU's report. Only the owner of the block may call this.
    pub fn publish(&self, report: &Report) {
        use offset as at;
        let put = |word: usize, value: u64| self.words[word].store(value, Ordering::Relaxed);
        let seq = self.words[at::SEQ].load(Ordering::Relaxed) | 1;
        put(at::SEQ, seq);
        // Pairs with the acquire fence in `read_block`: a reader that sees a new field also sees
        // the odd sequence.
        fence(Ordering::Release);
        put(at::T_US, report.t_us);
        put(at::WRITES, report.writes);
        put(at::CHECKS, report.checks);
        put(at::CORRUPT, report.corrupt);
        if let Some(first) = report.first_corrupt {
            put(at::FIRST_PAGE, first.page);
            put(at::FIRST_WORD, first.word);
            put(at::FIRST_WANT, first.want);
            put(at::FIRST_GOT, first.got);
        }
        put(at::STALLS, report.stalls);
        put(at::STALL_SUM_US, report.stall_sum_us);
        put(at::STALL_MAX_US, report.stall_max_us);
        put(at::SWEEPS, report.sweeps);
        put(at::VERIFY_DONE, report.verify_done);
        for (bucket, count) in report.hist.iter().enumerate() {
            put(at::HIST + bucket, *count);
        }
        for (bucket, sum) in report.hist_sum_us.iter().enumerate() {
            put(at::HIST_SUM + bucket, *sum);
        }
        let reports = self.words[at::REPORTS].load(Ordering::Relaxed);
        put(at::WINDOW + window_slot(reports), report.window_max_us);
        put(at::REPORTS, reports.wrapping_add(1));
        self.words[at::SEQ].store(seq.wrapping_add(1), Ordering::Release);
    }
}

/// Returns the slot of report number `report` (counted from 0).
fn window_slot(report: u64) -> usize {
    usize::try_from(report % WINDOWS as u64).unwrap_or(0)
}

impl StatsPage {
    /// Returns a zeroed page, as a guest finds it.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            header: Header {
                magic: AtomicU64::new(0),
                version: AtomicU64::new(0),
                cpus: AtomicU64::new(0),
                state: AtomicU64::new(0),
                tsc_khz: AtomicU64::new(0),
                data_pages: AtomicU64::new(0),
                ws_pages: AtomicU64::new(0),
                ready_us: AtomicU64::new(0),
                verify_request: AtomicU64::new(0),
                reserved: [const { AtomicU64::new(0) }; HEADER_WORDS - 9],
            },
            cpus: [const { CpuBlock { words: [const { AtomicU64::new(0) }; BLOCK_WORDS] } }; MAX_CPUS],
        }
    }

    /// Reads a consistent copy.
    ///
    /// # Errors
    /// Returns a [`StatsError`] if no guest has written the page yet, or if a guest was stopped
    /// while it wrote.
    pub fn snapshot(&self) -> Result<StatsSnapshot, StatsError> {
        StatsSnapshot::read(|word| self.word(word).load(Ordering::Acquire))
    }

    /// Reads as [`snapshot`](Self::snapshot) does, without touching anything after the blocks of
    /// `cpus` vCPUs, whatever number the guest reports. The rest reads as zeros. See
    /// [`stats_bytes`].
    ///
    /// # Errors
    /// Fails as [`snapshot`](Self::snapshot) does.
    pub fn snapshot_of(&self, cpus: usize) -> Result<StatsSnapshot, StatsError> {
        let end = HEADER_WORDS + cpus.min(MAX_CPUS) * BLOCK_WORDS;
        StatsSnapshot::read(|word| if word < end { self.word(word).load(Ordering::Acquire) } else { 0 })
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        let header = &self.header;
        match word.checked_sub(HEADER_WORDS) {
            Some(rest) => &self.cpus[rest / BLOCK_WORDS].words[rest % BLOCK_WORDS],
            None => match word {
                offset::MAGIC => &header.magic,
                offset::VERSION => &header.version,
                offset::CPUS => &header.cpus,
                offset::STATE => &header.state,
                offset::TSC_KHZ => &header.tsc_khz,
                offset::DATA_PAGES => &header.data_pages,
                offset::WS_PAGES => &header.ws_pages,
                offset::READY_US => &header.ready_us,
                offset::VERIFY_REQUEST => &header.verify_request,
                _ => &header.reserved[word - offset::VERIFY_REQUEST - 1],
            },
        }
    }

    /// Raises the state and never lowers it: a guest that was corrupt once stays so.
    pub fn raise(&self, state: State) {
        self.header.state.fetch_max(state.code(), Ordering::Release);
    }
}

impl Default for StatsPage {
    fn default() -> Self {
        Self::new()
    }
}

/// Copy of one vCPU's block as plain numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSnapshot {
    /// Guest clock at the report, in microseconds since the guest's entry.
    pub t_us: u64,
    /// Number of writes since the start.
    pub writes: u64,
    /// Number of pages checked since the start, without the check before each write.
    pub checks: u64,
    /// Number of failed checks since the start.
    pub corrupt: u64,
    /// First failed check.
    pub first_corrupt: Option<Corrupt>,
    /// Number of stalls since the start.
    pub stalls: u64,
    /// Sum of the stalls in microseconds.
    pub stall_sum_us: u64,
    /// Longest stall since the start, in microseconds.
    pub stall_max_us: u64,
    /// Number of reports since the start. Each closes a window of 10 ms.
    pub reports: u64,
    /// Number of complete sweeps over the vCPU's pages.
    pub sweeps: u64,
    /// Latest [`verify_request`](Header::verify_request) that this vCPU has completed.
    pub verify_done: u64,
    /// Number of stalls since the start by length. See [`HIST_BUCKETS`].
    pub hist: [u64; HIST_BUCKETS],
    /// Sum of the stalls of each length, in microseconds.
    pub hist_sum_us: [u64; HIST_BUCKETS],
    /// Longest stall of each of the last 16 windows, in microseconds. The window that report `n`
    /// (from 0) closed is at `n % 16`.
    window_max_us: [u64; WINDOWS],
}

impl CpuSnapshot {
    /// Returns the longest stall, in microseconds, of the windows closed since the reader last saw
    /// `reports` reports. The value is exact for a reader that reads at least every 16 reports. A
    /// slower reader gets the maximum of the last 16 windows.
    #[must_use]
    pub fn stall_max_since(&self, reports: u64) -> u64 {
        let oldest = reports.max(self.reports.saturating_sub(WINDOWS as u64));
        (oldest..self.reports).map(|report| self.window_max_us[window_slot(report)]).max().unwrap_or(0)
    }

    /// Returns the longest stall, in microseconds, of each of the last windows, at most 16, the
    /// oldest first. Report `reports - 1` closed the last one.
    pub fn windows(&self) -> impl Iterator<Item = u64> {
        let oldest = self.reports.saturating_sub(WINDOWS as u64);
        (oldest..self.reports).map(|report| self.window_max_us[window_slot(report)])
    }
}

/// Copy of the statistics page as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatsSnapshot {
    /// State of the guest.
    pub state: State,
    /// Frequency of the guest's TSC in kHz.
    pub tsc_khz: u64,
    /// Number of pages with content.
    pub data_pages: u64,
    /// Number of pages of the working set.
    pub ws_pages: u64,
    /// Guest clock at the end of the fill, in microseconds; 0 before.
    pub ready_us: u64,
    /// Number of vCPUs, `1..=64`.
    cpus: usize,
    blocks: [CpuSnapshot; MAX_CPUS],
}

impl StatsSnapshot {
    /// Reads a copy with a function that loads the 64-bit little-endian word with the given index
    /// (`0..STATS_BYTES / 8`). Each call must read the memory again, in whole words and in the
    /// order of the calls (volatile reads on x86-64 do).
    ///
    /// # Errors
    /// Returns a [`StatsError`] if no guest has written the page yet, or if a guest was stopped
    /// while it wrote.
    pub fn read(mut load: impl FnMut(usize) -> u64) -> Result<Self, StatsError> {
        match load(offset::MAGIC) {
            STATS_MAGIC => {}
            0 => return Err(StatsError::NotYet),
            value => return Err(StatsError::Invalid { word: offset::MAGIC, value }),
        }
        let version = load(offset::VERSION);
        if version != STATS_VERSION {
            return Err(StatsError::Invalid { word: offset::VERSION, value: version });
        }
        let count = load(offset::CPUS);
        let cpus = usize::try_from(count)
            .ok()
            .filter(|cpus| (1..=MAX_CPUS).contains(cpus))
            .ok_or(StatsError::Invalid { word: offset::CPUS, value: count })?;
        let mut blocks = [CpuSnapshot::default(); MAX_CPUS];
        for (cpu, block) in blocks.iter_mut().enumerate().take(cpus) {
            let start = offset::BLOCKS + cpu * BLOCK_WORDS;
            *block = read_block(|word| load(start + word)).ok_or(StatsError::Busy { cpu })?;
        }
        // The state is read after the blocks. A vCPU raises the state before it publishes the
        // reason, so a copy with a failed check also has that state.
        let code = load(offset::STATE);
        let state = State::from_code(code).ok_or(StatsError::Invalid { word: offset::STATE, value: code })?;
        Ok(Self {
            state,
            tsc_khz: load(offset::TSC_KHZ),
            data_pages: load(offset::DATA_PAGES),
            ws_pages: load(offset::WS_PAGES),
            ready_us: load(offset::READY_US),
            cpus,
            blocks,
        })
    }

    /// Returns the blocks of the guest's vCPUs.
    #[must_use]
    pub fn cpus(&self) -> &[CpuSnapshot] {
        &self.blocks[..self.cpus]
    }

    /// Returns the number of writes of all vCPUs since the start.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.cpus().iter().map(|cpu| cpu.writes).sum()
    }

    /// Returns the number of failed checks of all vCPUs since the start.
    #[must_use]
    pub fn corrupt(&self) -> u64 {
        self.cpus().iter().map(|cpu| cpu.corrupt).sum()
    }

    /// Returns the first failed check of the first vCPU that has one.
    #[must_use]
    pub fn first_corrupt(&self) -> Option<Corrupt> {
        self.cpus().iter().find_map(|cpu| cpu.first_corrupt)
    }

    /// Returns true if every vCPU has completed the check that the host requested with this number.
    #[must_use]
    pub fn verified(&self, request: u64) -> bool {
        self.cpus().iter().all(|cpu| cpu.verify_done == request)
    }
}

fn read_block(mut load: impl FnMut(usize) -> u64) -> Option<CpuSnapshot> {
    for _ in 0..READ_TRIES {
        let before = load(offset::SEQ);
        if before.is_multiple_of(2) {
            fence(Ordering::Acquire);
            let block = copy_block(&mut load);
            fence(Ordering::Acquire);
            if load(offset::SEQ) == before {
                return Some(block);
            }
        }
        core::hint::spin_loop();
    }
    None
}

fn copy_block(load: &mut impl FnMut(usize) -> u64) -> CpuSnapshot {
    use offset as at;
    let corrupt = load(at::CORRUPT);
    let first = Corrupt {
        page: load(at::FIRST_PAGE),
        word: load(at::FIRST_WORD),
        want: load(at::FIRST_WANT),
        got: load(at::FIRST_GOT),
    };
    CpuSnapshot {
        t_us: load(at::T_US),
        writes: load(at::WRITES),
        checks: load(at::CHECKS),
        corrupt,
        first_corrupt: (corrupt != 0).then_some(first),
        stalls: load(at::STALLS),
        stall_sum_us: load(at::STALL_SUM_US),
        stall_max_us: load(at::STALL_MAX_US),
        reports: load(at::REPORTS),
        sweeps: load(at::SWEEPS),
        verify_done: load(at::VERIFY_DONE),
        hist: core::array::from_fn(|bucket| load(at::HIST + bucket)),
        hist_sum_us: core::array::from_fn(|bucket| load(at::HIST_SUM + bucket)),
        window_max_us: core::array::from_fn(|window| load(at::WINDOW + window)),
    }
}

#[cfg(test)]
#[path = "stats_tests.rs"]
mod tests;
