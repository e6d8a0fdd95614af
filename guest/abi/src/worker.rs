//! The workload of one vCPU: fill, write, stamp, check.

use crate::fill::{PageKind, content};
use crate::stalls::{HIST_BUCKETS, Stalls};
use crate::{Fill, Layout, PAGE_WORDS, Pacer, Pattern, Picker, Share, Workload};

/// Guest memory as a workload sees it: pages of 512 words, and a table with one counter for each page of the working set.
///
/// Both lie in memory that migrates. Each page and its counter are accessed by one vCPU only, but the host reads them at
/// the same time: implementations use volatile or relaxed atomic accesses of whole words. Page numbers are below
/// [`Layout::data_pages`] (counters: [`Layout::ws_pages`]), words below 512.
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

/// A check that failed: a word of a page is not what the guest left there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt {
    /// The page, numbered as in [`Layout`].
    pub page: u64,
    /// The word in it: 0 is the page's number, 1 its counter, the others are content.
    pub word: u64,
    /// What the guest wrote.
    pub want: u64,
    /// What stands there.
    pub got: u64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It wrote a page, or checked one.
    Worked,
    /// Nothing was due. An idle vCPU may sleep.
    Waited,
    /// A check failed.
    Corrupt(Corrupt),
}

/// What a vCPU reports. Everything is cumulative since start, except the window's maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Guest clock in microseconds.
    pub t_us: u64,
    /// Writes.
    pub writes: u64,
    /// Pages checked by the sweep.
    pub checks: u64,
    /// Checks that failed.
    pub corrupt: u64,
    /// The first of them.
    pub first_corrupt: Option<Corrupt>,
    /// Stalls of 8 us and more.
    pub stalls: u64,
    /// Their sum in microseconds.
    pub stall_sum_us: u64,
    /// The longest since start, in microseconds.
    pub stall_max_us: u64,
    /// The longest since the last report, in microseconds.
    pub window_max_us: u64,
    /// Complete sweeps.
    pub sweeps: u64,
    /// The last verify request that was completed.
    pub verify_done: u64,
    /// Stalls by length.
    pub hist: [u64; HIST_BUCKETS],
    /// The sum of those of each length, in microseconds.
    pub hist_sum_us: [u64; HIST_BUCKETS],
}

/// Pages a second that each vCPU checks at least: all of 1 GiB in about a minute, at about 1 % of a core.
const SWEEP_MIN: u64 = 4000;

/// What a paced writer catches up at most: long enough for a page fault in the host, too short for a blackout.
const WRITE_DEBT_NS: u64 = 1_000_000;

/// What the sweep catches up at most: an idle vCPU sleeps 10 ms at a time.
const SWEEP_DEBT_NS: u64 = 20_000_000;

/// An idle vCPU that wakes up this much later than it wanted was stalled; less is the granularity of timers.
const OVERSLEPT_NS: u64 = 1_000_000;

/// Words of content that each check of the sweep reads, one in each third of the page.
const PROBES: usize = 3;
const PROBE_WORDS: usize = (PAGE_WORDS - 2) / PROBES;

/// The workload of one vCPU. Drive it by [`fill`](Self::fill) until that is done, then by [`step`](Self::step) in a loop.
///
/// A write checks that the page's stamp is the one it left there the last time, and then raises counter and stamp. Beside the
/// writes a sweep goes over all pages of the vCPU's share in turn and checks stamp and samples of the content, so that a page
/// that is lost, old or somebody else's is found within one sweep wherever it lies.
#[derive(Clone, Debug)]
pub struct Worker {
    share: Share,
    fill: Fill,
    filled: u64,
    picker: Picker,
    idle: bool,
    pacer: Option<Pacer>,
    sweep_pacer: Pacer,
    sweep_with_writes: bool,
    /// Below `share.len()`, or 0.
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
    /// The worker of vCPU `cpu` (`0..layout.cpus`).
    #[must_use]
    pub fn new(workload: &Workload, layout: &Layout, cpu: u64) -> Self {
        let share = layout.share(cpu);
        let ws = share.ws.end - share.ws.start;
        Self {
            picker: Picker::new(workload.pattern, ws, cpu),
            share,
            fill: workload.fill,
            filled: 0,
            idle: workload.pattern == Pattern::Idle,
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

    /// Writes the content of up to `pages` pages and resets their counters. Returns whether the whole share is done.
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

    /// Does what is due at `now_ns`: a write, a check, or nothing. Call it in a tight loop: a gap between two calls is taken for
    /// a stall.
    #[inline]
    pub fn step<S: PageStore>(&mut self, store: &S, now_ns: u64) -> Step {
        self.stalls.tick(now_ns);
        let mut step = Step::Waited;
        let write = self.pacer.as_mut().is_none_or(|pacer| pacer.due(now_ns));
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

    /// Whether the workload writes nothing, so that its vCPU may sleep after a [`Step::Waited`].
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.idle
    }

    /// Tells the worker that its vCPU does something else from now on, until [`resume`](Self::resume): what the last step took is
    /// measured before.
    pub fn pause(&mut self, now_ns: u64) {
        self.stalls.tick(now_ns);
    }

    /// Tells the worker that its vCPU did something else since the last step, which is no stall.
    pub fn resume(&mut self, now_ns: u64) {
        self.stalls.resume(now_ns);
    }

    /// Tells the worker that its vCPU slept since `from_ns` and wanted to wake up at `until_ns`. Being more than a millisecond
    /// late is a stall.
    pub fn slept(&mut self, until_ns: u64, now_ns: u64) {
        let late = now_ns.saturating_sub(until_ns);
        if late >= OVERSLEPT_NS {
            self.stalls.record(late);
        }
        self.stalls.resume(now_ns);
    }

    /// Counts a failed check of something else that the vCPU keeps, as one of its own.
    pub fn found(&mut self, corrupt: Corrupt) {
        self.failed(corrupt);
    }

    /// Starts a check of the whole share at full speed, unless `request` is the one that is done or under way, or 0.
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

    /// What to report now. Starts a new window.
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
            // Another word at each sweep, and another in each page: 170 sweeps see every word.
            #[expect(clippy::cast_possible_truncation, reason = "below 170")]
            let at = (self.sweeps.wrapping_add(page) % PROBE_WORDS as u64) as usize;
            let word = 2 + probe * PROBE_WORDS + at;
            step = step.worse(self.expect(store, page, word, content(kind, page, word)));
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
        // A zero page has no stamp until its first write: it is to be a zero page for the host too.
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
    /// The one that says more: the first failure, or else the later step.
    #[inline]
    fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Corrupt(_), _) | (_, Self::Waited) => self,
            _ => other,
        }
    }
}

/// What a worker must remember when its vCPU's thread ends on one host and begins on another: the process guest's register
/// state. (The bare-metal guest needs none of this: its workers lie in guest memory.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedWorker {
    /// Opaque words, to be kept in order.
    pub words: [u64; Self::WORDS],
}

impl SavedWorker {
    /// Words of the state.
    pub const WORDS: usize = 19 + 2 * HIST_BUCKETS;
}

impl Worker {
    /// The state of a worker that has finished its fill. Paces and the clock's last reading are not part of it: they begin anew.
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

    /// Continues where the saved worker stopped. `self` is a new worker of the same workload, layout and vCPU; values that cannot
    /// be (a peer sent them) are brought into range, so nothing panics later.
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
