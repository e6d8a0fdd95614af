//! Buddy allocator.

use crate::lists::{Lists, Words};
use crate::word::{Kind, NIL, Word};
use crate::{Batch, Block, FreeBits, List, Spans};
use vmferry_guest_abi::balloon::{MAX_ORDER, REPORT_FROM};

/// Part of the memory that is kept free of reports and hints: 1/32. A guest that has no more free
/// memory is about to use it again. Giving it back would only cost a fault per page, and an
/// allocation must not wait for memory that is isolated for a report.
const LOW_SHARE: u64 = 32;

/// Numbers of pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// All pages of the allocator.
    pub all: u64,
    /// Free pages that were not reported since they were last in use.
    pub unreported: u64,
    /// Free pages that were reported or never used.
    pub reported: u64,
    /// Pages that are being reported.
    pub isolated: u64,
    /// Pages that are kept back because they were hinted.
    pub held: u64,
    /// Number of free pages below which nothing is isolated.
    pub low: u64,
}

impl Pages {
    /// Returns the number of pages that can be allocated.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.unreported + self.reported
    }
}

/// Reason for which no more blocks were taken into a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// There are no more blocks.
    All,
    /// The batch is full.
    Full,
    /// Memory is low.
    Low,
}

/// Buddy allocator for blocks of orders 0 to 10, which knows the free blocks that were reported to
/// the host.
///
/// The allocator uses unreported memory before reported memory. The host still backs unreported
/// memory, so it needs no fault, and reported memory stays given back. A merged block counts as
/// reported only if both halves were reported, and if they were reported in pieces of at least 2
/// MiB.
///
/// Each frame has one word of 8 bytes, and nothing else is kept per page. Allocation, free and
/// isolation are O(1) in the size of memory: at most one step per order.
///
/// Invariants: every frame belongs to exactly one block, or to none (holes). No two free buddies of
/// one order are both in the free lists. `free + isolated + held + allocated = all`.
#[derive(Debug)]
pub struct Buddy<'a> {
    spans: Spans,
    words: Words<'a>,
    unreported: Lists,
    reported: Lists,
    held: List,
    isolated: u64,
    all: u64,
    low: u64,
    frees: u64,
    map: Option<FreeBits<'a>>,
}

impl<'a> Buddy<'a> {
    /// Returns an allocator of all memory in `spans`. All of it is free and never used, so that
    /// none of it has to be reported. `words` must have at least [`Spans::frames`] words, of any
    /// content.
    ///
    /// # Panics
    /// Panics if there are fewer words.
    #[must_use]
    pub fn new(spans: Spans, words: &'a mut [u64]) -> Self {
        assert!(words.len() as u64 >= spans.frames(), "{} words for {} frames", words.len(), spans.frames());
        let all = spans.pages();
        let mut buddy = Self {
            spans,
            words: Words::new(words),
            unreported: Lists::new(Kind::Unreported),
            reported: Lists::new(Kind::Reported),
            held: List::new(),
            isolated: 0,
            all,
            low: all / LOW_SHARE,
            frees: 0,
            map: None,
        };
        buddy.each_block(|buddy, block| buddy.reported.insert(&mut buddy.words, block));
        buddy
    }

    /// Calls `with` for the largest aligned blocks of the memory, the highest first, so that the
    /// lowest come first in their lists.
    fn each_block(&mut self, mut with: impl FnMut(&mut Self, Block)) {
        let spans = self.spans;
        for span in spans.spans().iter().rev() {
            let mut end = span.frame + span.pages;
            while end > span.frame {
                let order = end.trailing_zeros().min((end - span.frame).ilog2()).min(MAX_ORDER);
                end -= 1 << order;
                // Frames have 28 bits.
                let frame = u32::try_from(end).unwrap_or(NIL);
                with(self, Block { frame, order });
            }
        }
    }

    /// Starts to keep a map of free pages. All its bits must be clear, and nothing may have been
    /// allocated yet.
    pub fn keep_map(&mut self, map: FreeBits<'a>) {
        self.map = Some(map);
        self.each_block(|buddy, block| buddy.mark(block, true));
    }

    /// Returns the memory of the allocator.
    #[must_use]
    pub fn spans(&self) -> &Spans {
        &self.spans
    }

    /// Returns the numbers of pages by state.
    #[must_use]
    pub fn pages(&self) -> Pages {
        Pages {
            all: self.all,
            unreported: self.unreported.pages,
            reported: self.reported.pages,
            isolated: self.isolated,
            held: self.held.pages,
            low: self.low,
        }
    }

    /// Returns the number of calls of [`free`](Self::free). If it is unchanged, nothing was freed
    /// meanwhile.
    #[must_use]
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// Allocates a block of an order (0 to 10). Returns `None` if no block is large enough.
    #[inline]
    pub fn alloc(&mut self, order: u32) -> Option<Block> {
        let (lists, from) = match self.unreported.order_from(order) {
            Some(from) => (&mut self.unreported, from),
            None => {
                let from = self.reported.order_from(order)?;
                (&mut self.reported, from)
            }
        };
        let block = lists.first(from)?;
        lists.remove(&mut self.words, block);
        // The upper halves keep their kind.
        for half in (order..from).rev() {
            lists.insert(&mut self.words, Block { frame: block.frame + (1 << half), order: half });
        }
        let block = Block { frame: block.frame, order };
        self.words.set(block.frame, Word::alone(order, Kind::Used));
        self.mark(block, false);
        Some(block)
    }

    /// Frees a block. Returns the block that it has become part of.
    ///
    /// # Panics
    /// Panics if the block is not allocated, for example because it was freed twice.
    #[inline]
    pub fn free(&mut self, block: Block) -> Block {
        let word = self.words.get(block.frame);
        assert!(word.kind == Kind::Used && word.order == block.order, "freed twice: {block:?}, {word:?}");
        self.frees = self.frees.wrapping_add(1);
        self.mark(block, true);
        self.merge(block, false)
    }

    /// Puts a free block that is in no list into one, merged as far as possible.
    ///
    /// Parts that become a block of [`REPORT_FROM`] are reported once more as a whole. A host that
    /// has dropped them one by one keeps a table of small pages for them, and provides a huge page
    /// again only after it has dropped this table too.
    fn merge(&mut self, block: Block, mut reported: bool) -> Block {
        let Block { mut frame, mut order } = block;
        while order < MAX_ORDER {
            let buddy = Block { frame: frame ^ (1 << order), order };
            let word = self.words.get(buddy.frame);
            let lists = match word.kind {
                Kind::Unreported if word.order == order => &mut self.unreported,
                Kind::Reported if word.order == order => &mut self.reported,
                _ => break,
            };
            reported &= word.kind == Kind::Reported;
            lists.remove(&mut self.words, buddy);
            self.words.set(frame.max(buddy.frame), Word::alone(0, Kind::Inside));
            frame = frame.min(buddy.frame);
            order += 1;
            reported &= order != REPORT_FROM;
        }
        let merged = Block { frame, order };
        let lists = if reported { &mut self.reported } else { &mut self.unreported };
        lists.insert(&mut self.words, merged);
        merged
    }

    /// Isolates for a report the parts of a freed block that are still free and unreported: the
    /// whole block if it is free (with the block that it merged into), or the parts that no
    /// allocation has taken since. In both cases only blocks of at least `least` are isolated.
    ///
    /// Takes at most one step per page of `noted`. [`Taken::Full`] means that there may be more
    /// parts.
    pub fn isolate(&mut self, noted: Block, least: u32, batch: &mut Batch<'_>) -> Taken {
        if let Some((block, kind)) = self.free_block(noted) {
            let wanted = kind == Kind::Unreported && block.order >= least;
            return if wanted { self.isolate_block(block, batch) } else { Taken::All };
        }
        let end = u64::from(noted.frame) + noted.pages();
        let mut frame = noted.frame;
        while u64::from(frame) < end {
            let word = self.words.get(frame);
            if word.kind == Kind::Unreported && word.order >= least {
                let taken = self.isolate_block(Block { frame, order: word.order }, batch);
                if taken != Taken::All {
                    return taken;
                }
            }
            frame += if word.kind == Kind::Inside { 1 } else { 1 << word.order };
        }
        Taken::All
    }

    /// Returns the block that [`isolate`](Self::isolate) would isolate for `noted`. If the block
    /// was allocated since, but is large enough that parts of it could be isolated, returns
    /// `noted`.
    #[must_use]
    pub fn reportable(&self, noted: Block, least: u32) -> Option<Block> {
        match self.free_block(noted) {
            Some((block, kind)) => (kind == Kind::Unreported && block.order >= least).then_some(block),
            None => (noted.order >= least).then_some(noted),
        }
    }

    /// Returns the free block that `noted` is, or has become part of, with its kind: unreported or
    /// reported. Returns `None` if no free block contains all of `noted`.
    fn free_block(&self, noted: Block) -> Option<(Block, Kind)> {
        (noted.order..=MAX_ORDER).find_map(|order| {
            let block = Block { frame: noted.frame >> order << order, order };
            let word = self.words.get(block.frame);
            let free = word.order == order && matches!(word.kind, Kind::Unreported | Kind::Reported);
            free.then_some((block, word.kind))
        })
    }

    /// Isolates up to `portion` blocks that are free and unreported, large ones first, until
    /// `pages` pages have been isolated (the last block may exceed this). Returns `None` if there
    /// may be more blocks and room for them.
    pub fn isolate_any(&mut self, portion: usize, pages: &mut u64, batch: &mut Batch<'_>) -> Option<Taken> {
        for _ in 0..portion {
            if *pages == 0 {
                return Some(Taken::All);
            }
            let largest = self.unreported.largest().and_then(|order| self.unreported.first(order));
            let Some(block) = largest else { return Some(Taken::All) };
            let taken = self.isolate_block(block, batch);
            if taken != Taken::All {
                return Some(taken);
            }
            *pages = pages.saturating_sub(block.pages());
        }
        None
    }

    fn isolate_block(&mut self, block: Block, batch: &mut Batch<'_>) -> Taken {
        if self.pages().free() < self.low + block.pages() {
            return Taken::Low;
        }
        if !batch.push(block) {
            return Taken::Full;
        }
        self.unreported.remove(&mut self.words, block);
        self.words.set(block.frame, Word::alone(block.order, Kind::Isolated));
        self.isolated += block.pages();
        Taken::All
    }

    /// Puts an isolated block back as reported.
    ///
    /// # Panics
    /// Panics if the block is not isolated.
    pub fn put_back(&mut self, block: Block) {
        let word = self.words.get(block.frame);
        assert!(
            word.kind == Kind::Isolated && word.order == block.order,
            "not isolated: {block:?}, {word:?}"
        );
        self.isolated -= block.pages();
        self.merge(block, true);
    }

    /// Takes up to `portion` free blocks out, large ones first, to be hinted and kept until
    /// [`release_held`](Self::release_held). Returns `None` if there may be more blocks and room
    /// for them.
    pub fn hold(&mut self, portion: usize, batch: &mut Batch<'_>) -> Option<Taken> {
        for _ in 0..portion {
            let free = self.pages().free();
            let (lists, kind) = if self.reported.largest() > self.unreported.largest() {
                (&mut self.reported, Kind::HeldReported)
            } else {
                (&mut self.unreported, Kind::HeldUnreported)
            };
            let largest = lists.largest().and_then(|order| lists.first(order));
            let Some(block) = largest else { return Some(Taken::All) };
            if free < self.low + block.pages() {
                return Some(Taken::Low);
            }
            if !batch.push(block) {
                return Some(Taken::Full);
            }
            lists.remove(&mut self.words, block);
            let word = Word { next: self.held.head, prev: NIL, order: block.order, kind };
            self.words.set(block.frame, word);
            self.held.head = block.frame;
            self.held.pages += block.pages();
        }
        None
    }

    /// Puts up to `blocks` hinted blocks back. Returns true if there are more.
    pub fn release_held(&mut self, blocks: usize) -> bool {
        for _ in 0..blocks {
            if self.held.head == NIL {
                return false;
            }
            let word = self.words.get(self.held.head);
            let block = Block { frame: self.held.head, order: word.order };
            self.held.head = word.next;
            self.held.pages -= block.pages();
            self.merge(block, word.kind == Kind::HeldReported);
        }
        self.held.head != NIL
    }

    /// Puts an allocated block at the front of its owner's list.
    pub fn push(&mut self, list: &mut List, block: Block) {
        let word = self.words.get(block.frame);
        assert!(word.kind == Kind::Used && word.order == block.order, "not allocated: {block:?}, {word:?}");
        self.words.set(block.frame, Word { next: list.head, ..word });
        list.head = block.frame;
        list.pages += block.pages();
    }

    /// Takes the first block out of its owner's list.
    pub fn pop(&mut self, list: &mut List) -> Option<Block> {
        let block = self.first(list)?;
        list.head = self.words.get(block.frame).next;
        list.pages -= block.pages();
        Some(block)
    }

    /// Returns the first block of a list.
    #[must_use]
    pub fn first(&self, list: &List) -> Option<Block> {
        self.block(list.head)
    }

    /// Returns the block after `block` in its owner's list.
    #[must_use]
    pub fn next(&self, block: Block) -> Option<Block> {
        self.block(self.words.get(block.frame).next)
    }

    fn block(&self, frame: u32) -> Option<Block> {
        (frame != NIL).then(|| Block { frame, order: self.words.get(frame).order })
    }

    fn mark(&self, block: Block, free: bool) {
        if let Some(map) = self.map
            && let Some(bit) = self.spans.bit(block.frame)
        {
            if free { map.set(bit, block.pages()) } else { map.clear(bit, block.pages()) }
        }
    }

    /// Checks all invariants, block by block. Returns the blocks in the order of their frames, each
    /// with whether it is reported.
    #[cfg(test)]
    pub(crate) fn check(&self) -> std::vec::Vec<(Block, bool)> {
        let mut found = std::vec::Vec::new();
        let mut pages = Pages { all: self.all, low: self.low, ..Pages::default() };
        let mut used = 0;
        for span in self.spans.spans() {
            let (mut frame, end) = (u32::try_from(span.frame).unwrap(), span.frame + span.pages);
            while u64::from(frame) < end {
                let word = self.words.get(frame);
                let block = Block { frame, order: word.order };
                assert_eq!(frame % (1 << word.order), 0, "unaligned {block:?}");
                assert!(u64::from(frame) + block.pages() <= end, "{block:?} is beyond memory");
                for inside in 1..1 << word.order {
                    assert_eq!(self.words.get(frame + inside).kind, Kind::Inside, "inside {block:?}");
                }
                match word.kind {
                    Kind::Inside => panic!("frame {frame} belongs to no block"),
                    Kind::Used => used += block.pages(),
                    Kind::Isolated => pages.isolated += block.pages(),
                    Kind::HeldUnreported | Kind::HeldReported => pages.held += block.pages(),
                    Kind::Unreported => pages.unreported += block.pages(),
                    Kind::Reported => pages.reported += block.pages(),
                }
                if matches!(word.kind, Kind::Unreported | Kind::Reported) {
                    let buddy = self.words.get(frame ^ (1 << word.order));
                    let free = matches!(buddy.kind, Kind::Unreported | Kind::Reported);
                    assert!(
                        word.order == MAX_ORDER || !free || buddy.order != word.order,
                        "{block:?} has not merged"
                    );
                    found.push((block, word.kind == Kind::Reported));
                }
                frame += 1 << word.order;
            }
        }
        assert_eq!(pages, self.pages());
        assert_eq!(used + pages.free() + pages.isolated + pages.held, self.all);
        self.check_lists(&found);
        found
    }

    #[cfg(test)]
    fn check_lists(&self, found: &[(Block, bool)]) {
        let mut listed = std::vec::Vec::new();
        for (lists, reported) in [(&self.unreported, false), (&self.reported, true)] {
            for order in 0..=MAX_ORDER {
                assert_eq!(lists.order_from(order) == Some(order), lists.first(order).is_some());
                let (mut at, mut prev) = (lists.first(order), NIL);
                while let Some(block) = at {
                    assert_eq!(self.words.get(block.frame).prev, prev);
                    listed.push((block, reported));
                    (prev, at) = (block.frame, self.next(block));
                    assert!(listed.len() <= self.words.frames(), "a list goes round");
                }
            }
        }
        listed.sort_unstable();
        assert_eq!(listed, found);
    }
}

#[cfg(test)]
#[path = "buddy_tests.rs"]
mod tests;
