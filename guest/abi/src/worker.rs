//! Workload of one vCPU: fill, write, stamp, check.

use crate::fill::{PageKind, content};
use crate::stalls::{HIST_BUCKETS, Stalls};
use crate::{Fill, Layout, PAGE_WORDS, Pacer, Pattern, Picker, Share, Workload, Write};

/// Guest memory as a workload sees it: pages of 512 words, and a table with one counter for each
/// page of the working set.
///
/// Pages and table are in memory that migrates. Each page and its counter are accessed by one vCPU
/// only, but the host reads them at the same time. Implementations must use volatile or relaxed
/// atomic accesses of whole words. Page numbers are below [`Layout::data_pages`] (counters:
/// [`Layout::ws_pages`]), and words below 512.
pub trait PageStore {
    /// Reads a word of a page.
    fn load(&self, page: u64, word: usize) -> u64;
    /// Writes a word of a page.
    fn store(&self, page: u64, word: usize, value: u64);
    /// Reads a page's counter.
    fn counter(&self, page: u64) -> u64;
    /// Writes a page's counter.
    fn set_counter(&self, page: u64, value: u64);
}

/// Failed check: a word of a page differs from what the guest wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt {
    /// Page, numbered as in [`Layout`].
    pub page: u64,
    /// Word of the page: 0 is the page's number, 1 its counter, and the others are content.
    pub word: u64,
    /// Value that the guest wrote.
    pub want: u64,
    /// Value that was found.
    pub got: u64,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The step wrote or checked a page.
    Worked,
    /// Nothing was due. The next write may be due soon, so the vCPU must not sleep.
    Waited,
    /// Nothing was due, and the workload does not write now. The vCPU may sleep for some
    /// milliseconds.
    Rested,
    /// A check failed.
    Corrupt(Corrupt),
}

/// Report of a vCPU. All values are cumulative since the start, except the window's maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Guest clock in microseconds.
    pub t_us: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of pages that the sweep has checked.
    pub checks: u64,
    /// Number of failed checks.
    pub corrupt: u64,
    /// First failed check.
    pub first_corrupt: Option<Corrupt>,
    /// Number of stalls of 8 us and more.
    pub stalls: u64,
    /// Sum of the stalls in microseconds.
    pub stall_sum_us: u64,
    /// Longest stall since the start, in microseconds.
    pub stall_max_us: u64,
    /// Longest stall since the last report, in microseconds.
    pub window_max_us: u64,
    /// Number of complete sweeps.
    pub sweeps: u64,
    /// Latest verify request that was completed.
    pub verify_done: u64,
    /// Number of stalls by length.
    pub hist: [u64; HIST_BUCKETS],
    /// Sum of the stalls of each length, in microseconds.
    pub hist_sum_us: [u64; HIST_BUCKETS],
}

/// Least number of pages per second that each vCPU checks: all of 1 GiB in about a minute, at about
/// 1 % of a core.
const SWEEP_MIN: u64 = 4000;

/// Maximum time that a paced writer catches up, in ns: long enough for a page fault in the host,
/// too short for a blackout.
const WRITE_DEBT_NS: u64 = 1_000_000;

/// Maximum time that the sweep catches up, in ns: an idle vCPU sleeps for 10 ms at a time.
const SWEEP_DEBT_NS: u64 = 20_000_000;

/// Delay of a wake-up from which an idle vCPU counts as stalled, in ns. Smaller delays come from
/// the granularity of timers.
const OVERSLEPT_NS: u64 = 1_000_000;

/// Number of content words that each check of the sweep reads, one in each third of the page.
const PROBES: usize = 3;
const PROBE_WORDS: usize = (PAGE_WORDS - 2) / PROBES;

/// Workload of one vCPU. Call [`fill`](Self::fill) until the fill is done, and then
/// [`step`](Self::step) in a loop.
///
/// A write checks that the page's stamp is the one that was written last, changes the content as
/// the workload's [`Write`] says, and then raises counter and stamp. In addition, a sweep visits
/// all pages of the vCPU's share in turn, and checks the stamp and samples of the content. One
/// sweep therefore detects a page that was lost, that is old, or that has the content of another
/// page.
#[derive(Clone, Debug)]
pub struct Worker {
    share: Share,
    fill: Fill,
    write: Write,
    filled: u64,
    picker: Picker,
    rests: Rests,
    pacer: Option<Pacer>,
    sweep_pacer: Pacer,
    sweep_with_writes: bool,
    /// Index of the sweep's next page, below `share.len()`, or 0.
    sweep_at: u64,
    sweeps: u64,
    verify: u64,
    verify_left: u64,
    verify_done: u64,
    writes: u64,
    checks: u64,
    corrupt: u64,
    first_corrupt: Option<Corrupt>,
    stalls: Stalls,
}

impl Worker {
    /// Returns the worker of vCPU `cpu` (`0..layout.cpus`).
    #[must_use]
    pub fn new(workload: &Workload, layout: &Layout, cpu: u64) -> Self {
        let share = layout.share(cpu);
        let ws = share.ws.end - share.ws.start;
        Self {
            picker: Picker::new(workload.pattern, ws, cpu),
            share,
            fill: workload.fill,
            write: workload.write,
            filled: 0,
            rests: Rests::of(workload),
            pacer: (workload.rate != 0).then(|| Pacer::new(workload.rate_of(cpu), WRITE_DEBT_NS)),
            sweep_pacer: Pacer::new(workload.sweep.unwrap_or(SWEEP_MIN), SWEEP_DEBT_NS),
            sweep_with_writes: workload.sweep.is_none(),
            sweep_at: 0,
            sweeps: 0,
            verify: 0,
            verify_left: 0,
            verify_done: 0,
            writes: 0,
            checks: 0,
            corrupt: 0,
            first_corrupt: None,
            stalls: Stalls::default(),
        }
    }

    /// Writes the content of up to `pages` pages and resets their counters. Returns true if the
    /// whole share is done.
    pub fn fill<S: PageStore>(&mut self, store: &S, pages: u64) -> bool {
        let end = self.share.len().min(self.filled.saturating_add(pages));
        while self.filled < end {
            let page = self.share.page(self.filled);
            let kind = self.fill.kind(page);
            store.store(page, 0, if kind == PageKind::Zero { 0 } else { page });
            store.store(page, 1, 0);
            for word in 2..PAGE_WORDS {
                store.store(page, word, content(kind, page, word));
            }
            if page < self.share.ws.end {
                store.set_counter(page, 0);
            }
            self.filled += 1;
        }
        self.filled == self.share.len()
    }

    /// Does what is due at `now_ns`: a write, a check, or nothing. Must be called in a tight loop:
    /// a gap between two calls counts as a stall.
    #[inline]
    pub fn step<S: PageStore>(&mut self, store: &S, now_ns: u64) -> Step {
        self.stalls.tick(now_ns);
        let rests = self.rests.at(now_ns);
        let mut step = if rests { Step::Rested } else { Step::Waited };
        let write = !rests && self.pacer.as_mut().is_none_or(|pacer| pacer.due(now_ns));
        if write && let Some(page) = self.picker.pick() {
            step = self.write(store, self.share.ws.start + page);
            if self.sweep_with_writes {
                step = step.worse(self.check_next(store));
            }
        }
        if self.verify_left != 0 || self.sweep_pacer.due(now_ns) {
            step = step.worse(self.check_next(store));
        }
        step
    }

    /// Returns true if a step of this worker can be [`Step::Rested`].
    #[must_use]
    pub fn rests(&self) -> bool {
        !matches!(self.rests, Rests::Never)
    }

    /// Tells the worker that its vCPU does other work until [`resume`](Self::resume). The time of
    /// the last step is measured first.
    pub fn pause(&mut self, now_ns: u64) {
        self.stalls.tick(now_ns);
    }

    /// Tells the worker that its vCPU has done other work since the last step, which does not count
    /// as a stall.
    pub fn resume(&mut self, now_ns: u64) {
        self.stalls.resume(now_ns);
    }

    /// Tells the worker that its vCPU slept and intended to wake up at `until_ns`. A delay of more
    /// than a millisecond is a stall.
    pub fn slept(&mut self, until_ns: u64, now_ns: u64) {
        let late = now_ns.saturating_sub(until_ns);
        if late >= OVERSLEPT_NS {
            self.stalls.record(late);
        }
        self.stalls.resume(now_ns);
    }

    /// Counts a failed check of other memory that the vCPU keeps as one of the worker's own.
    pub fn found(&mut self, corrupt: Corrupt) {
        self.failed(corrupt);
    }

    /// Starts a check of the whole share at full speed, unless `request` is 0, or is already done
    /// or under way.
    #[inline]
    pub fn verify(&mut self, request: u64) {
        if request != self.verify && request != 0 {
            self.verify = request;
            self.verify_left = self.share.len();
            if self.verify_left == 0 {
                self.verify_done = request;
            }
        }
    }

    /// Returns the report at `now_ns`, and starts a new window.
    pub fn report(&mut self, now_ns: u64) -> Report {
        Report {
            t_us: now_ns / 1000,
            writes: self.writes,
            checks: self.checks,
            corrupt: self.corrupt,
            first_corrupt: self.first_corrupt,
            stalls: self.stalls.count,
            stall_sum_us: self.stalls.sum_ns / 1000,
            stall_max_us: self.stalls.max_ns / 1000,
            window_max_us: self.stalls.take_window() / 1000,
            sweeps: self.sweeps,
            verify_done: self.verify_done,
            hist: self.stalls.hist,
            hist_sum_us: self.stalls.hist_sum_ns.map(|ns| ns / 1000),
        }
    }

    #[inline]
    fn write<S: PageStore>(&mut self, store: &S, page: u64) -> Step {
        let counter = store.counter(page);
        let step = self.check_stamp(store, page, counter);
        let counter = counter.wrapping_add(1);
        let words = self.write.words(counter);
        if !words.is_empty() {
            let kind = self.fill.kind(page);
            for word in words {
                store.store(page, word, self.write.content(kind, page, word, counter));
            }
        }
        store.store(page, 0, page);
        store.store(page, 1, counter);
        store.set_counter(page, counter);
        self.writes += 1;
        step
    }

    #[inline]
    fn check_next<S: PageStore>(&mut self, store: &S) -> Step {
        if self.share.is_empty() {
            return Step::Waited;
        }
        let page = self.share.page(self.sweep_at);
        let counter = if page < self.share.ws.end { store.counter(page) } else { 0 };
        let mut step = self.check_stamp(store, page, counter);
        let kind = self.fill.kind(page);
        for probe in 0..PROBES {
            // Each sweep and each page uses another word. 170 sweeps check every word.
            #[expect(clippy::cast_possible_truncation, reason = "below 170")]
            let at = (self.sweeps.wrapping_add(page) % PROBE_WORDS as u64) as usize;
            let word = 2 + probe * PROBE_WORDS + at;
            let want = self.write.content(kind, page, word, counter);
            step = step.worse(self.expect(store, page, word, want));
        }
        self.checks += 1;
        self.advance();
        step
    }

    #[inline]
    fn advance(&mut self) {
        self.sweep_at += 1;
        if self.sweep_at == self.share.len() {
            self.sweep_at = 0;
            self.sweeps += 1;
        }
        if self.verify_left != 0 {
            self.verify_left -= 1;
            if self.verify_left == 0 {
                self.verify_done = self.verify;
            }
        }
    }

    #[inline]
    fn check_stamp<S: PageStore>(&mut self, store: &S, page: u64, counter: u64) -> Step {
        // A zero page has no stamp until its first write, so that it is a zero page for the host as
        // well.
        let number = if counter == 0 && self.fill.kind(page) == PageKind::Zero { 0 } else { page };
        let step = self.expect(store, page, 1, counter);
        step.worse(self.expect(store, page, 0, number))
    }

    #[inline]
    fn expect<S: PageStore>(&mut self, store: &S, page: u64, word: usize, want: u64) -> Step {
        let got = store.load(page, word);
        if got == want { Step::Worked } else { self.failed(Corrupt { page, word: word as u64, want, got }) }
    }

    #[cold]
    fn failed(&mut self, corrupt: Corrupt) -> Step {
        self.corrupt += 1;
        self.first_corrupt.get_or_insert(corrupt);
        Step::Corrupt(corrupt)
    }
}

impl Step {
    /// Returns the more important step: the first failure, or else the later step.
    #[inline]
    fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Corrupt(_), _) | (_, Self::Waited | Self::Rested) => self,
            _ => other,
        }
    }
}

/// Times at which a workload writes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rests {
    Never,
    /// Every second period of this length, the first included.
    Every {
        period_ns: u64,
    },
    Always,
}

impl Rests {
    fn of(workload: &Workload) -> Self {
        match (workload.pattern, workload.burst_ms) {
            (Pattern::Idle, _) => Self::Always,
            (_, 0) => Self::Never,
            (_, ms) => Self::Every { period_ns: ms.saturating_mul(1_000_000) },
        }
    }

    #[inline]
    fn at(self, now_ns: u64) -> bool {
        match self {
            Self::Never => false,
            Self::Every { period_ns } => (now_ns / period_ns).is_multiple_of(2),
            Self::Always => true,
        }
    }
}

/// State that a worker needs when its vCPU's thread ends on one host and starts on another. It
/// takes the role of the process guest's registers. (The bare-metal guest does not need it: its
/// workers are in guest memory.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedWorker {
    /// Opaque words, to be kept in order.
    pub words: [u64; Self::WORDS],
}

impl SavedWorker {
    /// Number of words of the state.
    pub const WORDS: usize = 19 + 2 * HIST_BUCKETS;
}

impl Worker {
    /// Returns the state of a worker that has finished its fill. Paces and the latest reading of
    /// the clock are not part of the state: they begin anew.
    #[must_use]
    pub fn save(&self) -> SavedWorker {
        let [prng, next] = self.picker.state();
        let first = self.first_corrupt.unwrap_or(Corrupt { page: 0, word: 0, want: 0, got: 0 });
        let head = [
            prng,
            next,
            self.filled,
            self.sweep_at,
            self.sweeps,
            self.verify,
            self.verify_left,
            self.verify_done,
            self.writes,
            self.checks,
            self.corrupt,
            u64::from(self.first_corrupt.is_some()),
            first.page,
            first.word,
            first.want,
            first.got,
            self.stalls.count,
            self.stalls.sum_ns,
            self.stalls.max_ns,
        ];
        let mut words = [0; SavedWorker::WORDS];
        words[..head.len()].copy_from_slice(&head);
        let (hist, sums) = words[head.len()..].split_at_mut(HIST_BUCKETS);
        hist.copy_from_slice(&self.stalls.hist);
        sums.copy_from_slice(&self.stalls.hist_sum_ns);
        SavedWorker { words }
    }

    /// Continues where the saved worker stopped. `self` must be a new worker of the same workload,
    /// layout and vCPU. Invalid values (from a peer) are brought into range, so that nothing panics
    /// later.
    pub fn restore(&mut self, saved: &SavedWorker) {
        let (head, hists) = saved.words.split_at(SavedWorker::WORDS - 2 * HIST_BUCKETS);
        let (hist, sums) = hists.split_at(HIST_BUCKETS);
        let len = self.share.len();
        self.picker.set_state([head[0], head[1]]);
        self.filled = head[2].min(len);
        self.sweep_at = if head[3] < len { head[3] } else { 0 };
        self.sweeps = head[4];
        self.verify = head[5];
        self.verify_left = head[6].min(len);
        self.verify_done = head[7];
        self.writes = head[8];
        self.checks = head[9];
        self.corrupt = head[10];
        self.first_corrupt = (head[11] != 0).then(|| Corrupt {
            page: head[12],
            word: head[13],
            want: head[14],
            got: head[15],
        });
        self.stalls = Stalls { count: head[16], sum_ns: head[17], max_ns: head[18], ..Stalls::default() };
        self.stalls.hist.copy_from_slice(hist);
        self.stalls.hist_sum_ns.copy_from_slice(sums);
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
