//! Workload `alloc=`: allocate, touch, check and free in rounds.

use crate::{Block, Heap, List, Machine};
use vmferry_guest_abi::balloon::MAX_ORDER;
use vmferry_guest_abi::{ALLOC_PAGE, Allocation, Corrupt, PAGE_SIZE, PAGE_WORDS, Prng};

/// Number of pages that one step touches or checks, so that the vCPU gets to its other work. A step
/// takes some microseconds where memory is present, and less than a millisecond where the host must
/// provide it.
const STEP_PAGES: u64 = 64;

/// Number of lists to which blocks are added at random. Blocks are freed list by list, so
/// neighbours are freed at different times.
const LISTS: usize = 8;

/// Number of content words that are written and checked besides the stamp, one in each third of a
/// page.
const PROBES: u64 = 3;
const PROBE_WORDS: u64 = (PAGE_WORDS as u64 - 2) / PROBES;

/// Seed that keeps tags and draws apart from other uses of the generator.
const TAG_SEED: u64 = 0x616c_6c6f_6361_7465;

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The step did a part of the round.
    Worked,
    /// The step did nothing, because all rounds are done.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Frees the pages that the last round kept, then begins the next round.
    Begin,
    Allocate,
    /// Touches the pages of a block from `at` on.
    Touch {
        block: Block,
        at: u64,
    },
    /// Takes the next block to free.
    Next,
    /// Checks the block's pages from `at` on, then frees the block.
    Check {
        block: Block,
        at: u64,
    },
    Done,
}

/// Allocation workload of one vCPU, driven by [`step`](Self::step).
///
/// Each touched page gets a stamp (its page number and the round's tag) and a word in each third of
/// the page, which depends on both. All are checked before the page is freed. A page that was
/// dropped, overwritten or taken from an earlier round is therefore detected.
#[derive(Debug)]
pub struct Churn {
    spec: Allocation,
    cpu: u64,
    /// Number of pages of this vCPU in a round.
    share: u64,
    left: u64,
    drawn: u64,
    prng: Prng,
    round: u64,
    phase: Phase,
    lists: [List; LISTS],
    /// Pages kept, one in `frag`. They belong to the round before `round` while that round has not
    /// begun.
    kept: List,
    kept_tag: u64,
    freeing_kept: bool,
}

impl Churn {
    /// Returns the workload of vCPU `cpu` of `cpus`.
    #[must_use]
    pub fn new(spec: Allocation, cpu: u64, cpus: u64) -> Self {
        let pages = spec.bytes / PAGE_SIZE;
        let cut = |cpu: u64| pages / cpus.max(1) * cpu + pages % cpus.max(1) * cpu / cpus.max(1);
        Self {
            spec,
            cpu,
            share: cut(cpu + 1) - cut(cpu),
            left: 0,
            drawn: 0,
            prng: Prng::new(0),
            round: 0,
            phase: Phase::Begin,
            lists: [const { List::new() }; LISTS],
            kept: List::new(),
            kept_tag: 0,
            freeing_kept: false,
        }
    }

    /// Does the next part of the work. Calls `found` for each word that differs from what was
    /// written.
    pub fn step<M: Machine>(
        &mut self,
        machine: &M,
        heap: &mut Heap<'_>,
        found: &mut dyn FnMut(Corrupt),
    ) -> Progress {
        match self.phase {
            Phase::Begin => self.begin(),
            Phase::Allocate => self.allocate(machine, heap),
            Phase::Touch { block, at } => self.touch(machine, heap, block, at),
            Phase::Next => self.next(machine, heap),
            Phase::Check { block, at } => self.check(machine, heap, block, at, found),
            Phase::Done => {
                heap.stats_mut().done = 1;
                return Progress::Done;
            }
        }
        Progress::Worked
    }

    fn begin(&mut self) {
        if self.spec.rounds != 0 && self.round == self.spec.rounds || self.share == 0 {
            self.phase = Phase::Done;
            return;
        }
        if !self.kept.is_empty() {
            self.freeing_kept = true;
            self.phase = Phase::Next;
            return;
        }
        self.freeing_kept = false;
        self.round += 1;
        self.prng = Prng::new(self.tag());
        (self.left, self.drawn) = (self.share, 0);
        self.phase = Phase::Allocate;
    }

    /// Returns the order of the next block. See [`Allocation`].
    fn order(&mut self) -> u32 {
        let order = if self.spec.frag == 0 { self.prng.bits().trailing_ones().min(MAX_ORDER) } else { 0 };
        order.min(self.left.ilog2())
    }

    fn allocate<M: Machine>(&mut self, machine: &M, heap: &mut Heap<'_>) {
        if self.left == 0 {
            self.phase = Phase::Next;
            return;
        }
        match heap.alloc(machine, self.order()) {
            Some(block) => {
                self.left -= block.pages();
                self.phase = Phase::Touch { block, at: 0 };
            }
            None => {
                heap.stats_mut().short_rounds += 1;
                self.left = 0;
            }
        }
    }

    fn touch<M: Machine>(&mut self, machine: &M, heap: &mut Heap<'_>, block: Block, at: u64) {
        let start = machine.now_ns();
        let end = block.pages().min(at + STEP_PAGES);
        let gpa = machine.with(|buddy| buddy.spans().gpa(block));
        let tag = self.tag();
        for page in at..end {
            let address = gpa + page * PAGE_SIZE;
            words(tag, address).for_each(|(word, value)| machine.store(address + 8 * word, value));
        }
        let stats = heap.stats_mut();
        stats.touched_bytes += (end - at) * PAGE_SIZE;
        stats.touch_ns += machine.now_ns().saturating_sub(start);
        if end < block.pages() {
            self.phase = Phase::Touch { block, at: end };
            return;
        }
        self.drawn += 1;
        let keep = self.spec.frag != 0 && self.drawn.is_multiple_of(self.spec.frag);
        let list = if keep {
            &mut self.kept
        } else if self.spec.frag != 0 {
            &mut self.lists[0]
        } else {
            #[expect(clippy::cast_possible_truncation, reason = "below LISTS")]
            let list = self.prng.below(LISTS as u64) as usize;
            &mut self.lists[list]
        };
        machine.with(|buddy| buddy.push(list, block));
        self.phase = Phase::Allocate;
    }

    fn next<M: Machine>(&mut self, machine: &M, heap: &mut Heap<'_>) {
        let list = if self.freeing_kept {
            Some(&mut self.kept).filter(|list| !list.is_empty())
        } else {
            self.lists.iter_mut().find(|list| !list.is_empty())
        };
        if let Some(block) = list.and_then(|list| machine.with(|buddy| buddy.pop(list))) {
            self.phase = Phase::Check { block, at: 0 };
            return;
        }
        if !self.freeing_kept {
            self.kept_tag = self.tag();
            heap.stats_mut().rounds += 1;
        }
        self.phase = Phase::Begin;
    }

    fn check<M: Machine>(
        &mut self,
        machine: &M,
        heap: &mut Heap<'_>,
        block: Block,
        at: u64,
        found: &mut dyn FnMut(Corrupt),
    ) {
        let start = machine.now_ns();
        let end = block.pages().min(at + STEP_PAGES);
        let gpa = machine.with(|buddy| buddy.spans().gpa(block));
        let tag = if self.freeing_kept { self.kept_tag } else { self.tag() };
        check_pages(machine, tag, gpa, at..end, found);
        heap.stats_mut().check_ns += machine.now_ns().saturating_sub(start);
        if end < block.pages() {
            self.phase = Phase::Check { block, at: end };
        } else {
            heap.free(machine, block);
            self.phase = Phase::Next;
        }
    }

    /// Checks all memory that is allocated and touched, at once.
    pub fn verify<M: Machine>(&self, machine: &M, found: &mut dyn FnMut(Corrupt)) {
        let own = self.lists.iter().map(|list| (list, self.tag()));
        // The kept pages belong to the current round once all others are freed, and while the round
        // lasts.
        let between = self.freeing_kept || self.phase == Phase::Begin || self.phase == Phase::Done;
        let kept = if between { self.kept_tag } else { self.tag() };
        for (list, tag) in own.chain([(&self.kept, kept)]) {
            let mut at = machine.with(|buddy| buddy.first(list));
            while let Some(block) = at {
                let (gpa, next) = machine.with(|buddy| (buddy.spans().gpa(block), buddy.next(block)));
                check_pages(machine, tag, gpa, 0..block.pages(), found);
                at = next;
            }
        }
    }

    /// Returns the tag that marks the pages of this vCPU and round.
    fn tag(&self) -> u64 {
        Prng::new(TAG_SEED ^ self.cpu << 48 ^ self.round).bits()
    }
}

/// Returns the words of a page that are written: the stamp first, then the probes.
fn words(tag: u64, gpa: u64) -> impl Iterator<Item = (u64, u64)> {
    let page = gpa / PAGE_SIZE;
    let at = page.wrapping_add(tag) % PROBE_WORDS;
    let probe = move |probe: u64| {
        let word = 2 + probe * PROBE_WORDS + at;
        // The factor is odd, so every bit of the tag counts. A page of another vCPU or round
        // differs.
        (word, (tag ^ page.rotate_left(32) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    };
    [(0, page), (1, tag)].into_iter().chain((0..PROBES).map(probe))
}

fn check_pages<M: Machine>(
    machine: &M,
    tag: u64,
    gpa: u64,
    pages: core::ops::Range<u64>,
    found: &mut dyn FnMut(Corrupt),
) {
    for page in pages {
        let address = gpa + page * PAGE_SIZE;
        let wrong = words(tag, address).find_map(|(word, want)| {
            let got = machine.load(address + 8 * word);
            (got != want).then_some((word, want, got))
        });
        if let Some((word, want, got)) = wrong {
            found(Corrupt { page: ALLOC_PAGE + address / PAGE_SIZE, word, want, got });
        }
    }
}

#[cfg(test)]
#[path = "churn_tests.rs"]
mod tests;
