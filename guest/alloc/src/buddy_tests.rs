//! Tests of the allocator against a model that keeps the state of every page.

use super::*;
use core::sync::atomic::{AtomicU64, Ordering};
use proptest::prelude::*;
use std::collections::HashSet;
use std::vec;
use std::vec::Vec;
use vmferry_guest_abi::PAGE_SIZE;

/// Returns 3 ranges with odd ends: 16 pages, 5000 pages, and 1500 pages after a hole.
fn spans() -> Spans {
    let mut spans = Spans::new();
    for (start, pages, bit) in [(0x10, 16, 3), (0x123, 5000, 19), (0x10_0000, 1500, 5019)] {
        spans.add(start * PAGE_SIZE, (start + pages) * PAGE_SIZE, bit).unwrap();
    }
    spans
}

fn words(spans: &Spans) -> Vec<u64> {
    // The initial content of memory does not matter.
    vec![u64::MAX; usize::try_from(spans.frames()).unwrap()]
}

fn bits() -> Vec<AtomicU64> {
    (0..128).map(|_| AtomicU64::new(0)).collect()
}

fn is_set(bits: &[AtomicU64], bit: u64) -> bool {
    bits[usize::try_from(bit / 64).unwrap()].load(Ordering::Relaxed) >> (bit % 64) & 1 == 1
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc(u32),
    Free(usize),
    Isolate(usize, usize),
    IsolateAny(usize),
    PutBack,
    Hold(usize),
    Release(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0u32..=10).prop_map(Op::Alloc),
        5 => any::<usize>().prop_map(Op::Free),
        2 => (any::<usize>(), 1usize..9).prop_map(|(block, most)| Op::Isolate(block, most)),
        1 => (1usize..9).prop_map(Op::IsolateAny),
        3 => Just(Op::PutBack),
        1 => (1usize..9).prop_map(Op::Hold),
        1 => (1usize..9).prop_map(Op::Release),
    ];
    prop::collection::vec(op, 0..400)
}

/// Model of the allocated blocks and of those that were freed once.
struct Model<'a> {
    buddy: Buddy<'a>,
    map: &'a [AtomicU64],
    used: Vec<Block>,
    noted: Vec<Block>,
    isolated: Vec<Block>,
    /// Pages that were freed and not reported since.
    unreported: HashSet<u32>,
}

impl Model<'_> {
    fn apply(&mut self, op: Op) {
        let mut slots = [Block::default(); 8];
        let mut batch = Batch::new(&mut slots);
        match op {
            Op::Alloc(order) => {
                if let Some(block) = self.buddy.alloc(order) {
                    assert_eq!(block.order, order);
                    assert!(self.used.iter().all(|used| !used.contains(block) && !block.contains(*used)));
                    assert!(self.isolated.iter().all(|other| !other.contains(block)));
                    self.unreported.retain(|page| !pages(block).contains(page));
                    self.used.push(block);
                }
            }
            Op::Free(index) if !self.used.is_empty() => {
                let block = self.used.swap_remove(index % self.used.len());
                assert!(self.buddy.free(block).contains(block));
                self.unreported.extend(pages(block));
                self.noted.push(block);
            }
            Op::Isolate(index, most) if !self.noted.is_empty() => {
                let noted = self.noted[index % self.noted.len()];
                batch.begin(most);
                let taken = self.buddy.isolate(noted, 0, &mut batch);
                assert!(taken != Taken::Full || batch.is_full());
                if taken == Taken::All {
                    let mut left = pages(noted).filter(|page| self.unreported.contains(page));
                    let taken = |page| matches!(self.kind(page), Kind::Isolated | Kind::HeldUnreported);
                    assert!(left.all(taken), "{noted:?} was not isolated");
                }
                self.isolated.extend_from_slice(batch.blocks());
            }
            Op::IsolateAny(portion) => {
                let taken = self.buddy.isolate_any(portion, &mut u64::MAX.clone(), &mut batch);
                if taken == Some(Taken::All) {
                    assert_eq!(self.buddy.pages().unreported, 0);
                }
                self.isolated.extend_from_slice(batch.blocks());
            }
            Op::PutBack => {
                if let Some(block) = self.isolated.pop() {
                    self.buddy.put_back(block);
                    self.unreported.retain(|page| !pages(block).contains(page));
                }
            }
            Op::Hold(portion) => drop(self.buddy.hold(portion, &mut batch)),
            Op::Release(blocks) => drop(self.buddy.release_held(blocks)),
            Op::Free(_) | Op::Isolate(..) => {}
        }
    }

    /// Returns the kind of the block that contains a page.
    fn kind(&self, page: u32) -> Kind {
        let words = (0..=MAX_ORDER).map(|order| (order, self.buddy.words.get(page >> order << order)));
        let mut heads = words.filter(|(order, word)| word.order >= *order && word.kind != Kind::Inside);
        heads.next().unwrap().1.kind
    }

    /// Checks the allocator's state against the model.
    fn check(&self) {
        let free = self.buddy.check();
        // A page that was freed and not reported is in no block that counts as reported.
        for (block, reported) in free {
            assert!(!reported || pages(block).all(|page| !self.unreported.contains(&page)), "{block:?}");
        }
        let used: u64 = self.used.iter().map(|block| block.pages()).sum();
        let counts = self.buddy.pages();
        assert_eq!(counts.all - counts.free() - counts.isolated - counts.held, used);
        // The map has a bit for every page that is not allocated.
        let mut set = 0;
        for span in self.buddy.spans().spans() {
            set += (span.bit..span.bit + span.pages).filter(|bit| is_set(self.map, *bit)).count() as u64;
        }
        assert_eq!(set, counts.all - used);
        for block in &self.used {
            let bit = self.buddy.spans().bit(block.frame).unwrap();
            assert!((bit..bit + block.pages()).all(|bit| !is_set(self.map, bit)));
        }
    }
}

fn pages(block: Block) -> std::ops::Range<u32> {
    block.frame..block.frame + (1 << block.order)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn blocks_never_overlap_merge_completely_and_all_come_back(ops in ops()) {
        let (spans, map) = (spans(), bits());
        let mut words = words(&spans);
        let mut buddy = Buddy::new(spans, &mut words);
        buddy.keep_map(FreeBits::new(&map));
        let start: Vec<_> = buddy.check();
        let mut model = Model {
            buddy,
            map: &map,
            used: Vec::new(),
            noted: Vec::new(),
            isolated: Vec::new(),
            unreported: HashSet::new(),
        };
        for (count, op) in ops.into_iter().enumerate() {
            model.apply(op);
            if count % 20 == 0 {
                model.check();
            }
        }
        model.check();
        while !model.used.is_empty() {
            model.apply(Op::Free(0));
        }
        while !model.isolated.is_empty() {
            model.apply(Op::PutBack);
        }
        while model.buddy.release_held(3) {}
        let end = model.buddy.check();
        // The blocks are the same as in the beginning, whether they were reported or not.
        prop_assert!(start.iter().map(|(block, _)| block).eq(end.iter().map(|(block, _)| block)));
        prop_assert!(start.iter().all(|(_, reported)| *reported));
    }
}

#[test]
fn unreported_memory_is_used_first() {
    let spans = spans();
    let mut words = words(&spans);
    let mut buddy = Buddy::new(spans, &mut words);
    let (first, second) = (buddy.alloc(3).unwrap(), buddy.alloc(3).unwrap());
    buddy.free(first);
    assert_eq!(buddy.alloc(0).unwrap().frame, first.frame);
    assert_eq!(buddy.pages().unreported, 7);
    // No unreported block is large enough.
    assert!(!first.contains(buddy.alloc(4).unwrap()));
    assert_eq!(buddy.pages().unreported, 7);
    buddy.free(second);
    assert_eq!(buddy.pages().unreported, 15);
}

#[test]
fn parts_of_a_block_that_was_split_are_still_reported() {
    let spans = spans();
    let mut words = words(&spans);
    let mut buddy = Buddy::new(spans, &mut words);
    let noted = buddy.alloc(10).unwrap();
    assert_eq!(buddy.free(noted), noted);
    let taken = buddy.alloc(0).unwrap();
    let mut slots = [Block::default(); 16];
    let mut batch = Batch::new(&mut slots);
    assert_eq!(buddy.isolate(noted, 0, &mut batch), Taken::All);
    assert_eq!(batch.blocks().iter().map(|block| block.pages()).sum::<u64>(), 1023);
    assert_eq!((buddy.pages().unreported, buddy.pages().isolated), (0, 1023));
    batch.blocks().to_vec().into_iter().for_each(|block| buddy.put_back(block));
    // The freed page makes the whole block unreported again, and an entry for a part of it finds
    // the whole.
    assert_eq!(buddy.free(taken), noted);
    batch.begin(16);
    assert_eq!(buddy.isolate(Block { frame: noted.frame + 512, order: 1 }, 0, &mut batch), Taken::All);
    assert_eq!(batch.blocks(), [noted]);
}

#[test]
fn nothing_is_isolated_or_held_when_memory_is_low() {
    let spans = spans();
    let mut words = words(&spans);
    let mut buddy = Buddy::new(spans, &mut words);
    let mut slots = [Block::default(); 64];
    let mut batch = Batch::new(&mut slots);
    let mut used = Vec::new();
    while buddy.pages().free() > buddy.pages().low {
        used.push(buddy.alloc(0).unwrap());
    }
    let block = used[0];
    buddy.alloc(0).unwrap();
    buddy.free(block);
    assert_eq!((buddy.isolate(block, 0, &mut batch), buddy.pages().isolated), (Taken::Low, 0));
    assert_eq!(buddy.isolate_any(64, &mut u64::MAX.clone(), &mut batch), Some(Taken::Low));
    assert_eq!((buddy.hold(64, &mut batch), buddy.pages().held), (Some(Taken::Low), 0));
}

#[test]
fn lists_return_the_pushed_blocks() {
    let spans = spans();
    let mut words = words(&spans);
    let mut buddy = Buddy::new(spans, &mut words);
    let mut list = List::new();
    let blocks: Vec<_> = (0..5).map(|order| buddy.alloc(order).unwrap()).collect();
    blocks.iter().for_each(|block| buddy.push(&mut list, *block));
    assert_eq!((list.pages(), buddy.first(&list)), (31, Some(blocks[4])));
    assert_eq!(buddy.next(blocks[4]), Some(blocks[3]));
    for block in blocks.iter().rev() {
        assert_eq!(buddy.pop(&mut list), Some(*block));
    }
    assert!(buddy.pop(&mut list).is_none() && list.is_empty() && list.pages() == 0);
}

#[test]
#[should_panic(expected = "freed twice")]
fn freeing_twice_panics() {
    let spans = spans();
    let mut words = words(&spans);
    let mut buddy = Buddy::new(spans, &mut words);
    let block = buddy.alloc(2).unwrap();
    buddy.free(block);
    buddy.free(block);
}
