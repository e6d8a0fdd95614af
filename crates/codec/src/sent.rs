//! Cache of page versions that were sent.
//!
//! Precopy sends the dirty pages in passes, each time in the same order. A cache that always admits
//! the newest page would be useless for a dirty set that is larger than the cache: each page would
//! be evicted before its turn in the next pass. Therefore the cache keeps the pages that are
//! rewritten with small changes, and admits others only to places that are of no use:
//!
//! - While there is room, every page is admitted.
//! - In the first pass, nothing is evicted. A scan of all memory keeps what the cache has.
//! - In later passes, every page is a page that the guest rewrote. It takes the place of a page
//!   that was not sent in the previous pass. It also takes the place of a page with a lower number
//!   that was sent in the first pass only. A page with a higher number may still have its turn in
//!   this pass. If it lost its place, each page would lose it right before its turn.
//! - A page whose delta is larger than the limit loses its place. After `n` such deltas in a row,
//!   the page is admitted only in passes whose number is a multiple of 2^n, at most of 32.
//!
//! With a dirty set of twice the cache that the guest rewrites in each pass, half of all pages have
//! a delta.
//!
//! # Memory
//!
//! | part | bytes for each page of the capacity | allocated |
//! |---|---|---|
//! | content | 4096 | in blocks of 64 pages, when they are needed |
//! | page number and pass | 16 | at the creation |
//! | list of free places | 4 | at the creation |
//! | index by page number | 8 to 16 | at the creation |
//! | pages with large deltas | 4 to 8 | at the creation |
//!
//! The sum over the capacity is at most the bound that the cache was created with. No page is
//! allocated alone.

use crate::Page;
use crate::delta::{Delta, DeltaEncoder};
use vmferry_core::PAGE_BYTES;

/// Number of pages in a block of content.
const BLOCK_PAGES: usize = 64;

/// Number of places that are examined to find one for a page. The next page continues at the place
/// after them.
const EXAMINED: usize = 16;

/// Largest binary logarithm of the number of passes for which a page with a large delta waits.
const MOST_STRIKES: u8 = 5;

/// Place in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    page: u64,
    /// Pass in which the page was last sent.
    pass: u32,
    /// True if the page was sent in a later pass than the first.
    rewritten: bool,
}

/// Figures of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SentFigures {
    /// Pages that were sent as a delta.
    pub hits: u64,
    /// Pages without a version in the cache.
    pub misses: u64,
    /// Pages with a version in the cache, but with a delta larger than the limit.
    pub large: u64,
    /// Pages that were admitted.
    pub admitted: u64,
    /// Pages that lost their place to another page.
    pub evicted: u64,
    /// Bytes of all deltas.
    pub delta_bytes: u64,
    /// Bytes that the deltas are shorter than their pages.
    pub saved_bytes: u64,
}

impl std::ops::AddAssign for SentFigures {
    fn add_assign(&mut self, other: Self) {
        let Self { hits, misses, large, admitted, evicted, delta_bytes, saved_bytes } = self;
        *hits += other.hits;
        *misses += other.misses;
        *large += other.large;
        *admitted += other.admitted;
        *evicted += other.evicted;
        *delta_bytes += other.delta_bytes;
        *saved_bytes += other.saved_bytes;
    }
}

/// Bounded cache of the versions of pages that one sender has sent.
///
/// A page always belongs to the same sender, so the cache has no locks. The sender must call
/// [`Self::send`] for each page that it sends in any way, or [`Self::forget`]: the target must have
/// exactly the version that the cache has.
pub struct SentPages {
    capacity: usize,
    blocks: Vec<Box<[Page]>>,
    /// Places that were ever used. Invariant: at most `capacity`, and at most the pages in
    /// `blocks`.
    slots: Vec<Slot>,
    /// Places without a page. Invariant: none of them is in the index.
    free: Vec<u32>,
    index: Index,
    refused: Refused,
    /// Place at which the next search for a useless page begins.
    hand: usize,
    pass: u32,
    encoder: DeltaEncoder,
    figures: SentFigures,
}

impl std::fmt::Debug for SentPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SentPages")
            .field("capacity", &self.capacity)
            .field("pages", &self.pages())
            .field("pass", &self.pass)
            .field("figures", &self.figures)
            .finish_non_exhaustive()
    }
}

impl SentPages {
    /// Creates a cache that takes at most `bound` bytes of memory, in its first pass.
    ///
    /// A bound that is too small for a single block of pages gives a cache without pages.
    #[must_use]
    pub fn new(bound: usize, encoder: DeltaEncoder) -> Self {
        let capacity = Self::capacity_of(bound);
        Self {
            capacity,
            blocks: Vec::with_capacity(capacity / BLOCK_PAGES),
            slots: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            index: Index::new(capacity),
            refused: Refused::new(capacity),
            hand: 0,
            pass: 1,
            encoder,
            figures: SentFigures::default(),
        }
    }

    /// Returns the capacity of a cache that takes at most `bound` bytes of memory.
    #[must_use]
    pub fn capacity_of(bound: usize) -> usize {
        // Places are numbered by u32, and one number is reserved.
        let most = (bound / PAGE_BYTES).min(u32::MAX as usize - BLOCK_PAGES) / BLOCK_PAGES;
        let (mut fits, mut beyond) = (0, most + 1);
        while beyond - fits > 1 {
            let middle = fits.midpoint(beyond);
            if Self::fixed(middle * BLOCK_PAGES) + middle * BLOCK_PAGES * PAGE_BYTES <= bound {
                fits = middle;
            } else {
                beyond = middle;
            }
        }
        fits * BLOCK_PAGES
    }

    /// Returns the memory of a cache for `capacity` pages without their content, in bytes.
    fn fixed(capacity: usize) -> usize {
        size_of::<Self>()
            + PAGE_BYTES // buffer of the encoder
            + capacity / BLOCK_PAGES * size_of::<Box<[Page]>>()
            + capacity * (size_of::<Slot>() + size_of::<u32>())
            + Index::places(capacity) * size_of::<u32>()
            + Refused::places(capacity) * size_of::<u64>()
    }

    /// Returns the number of bytes of memory that the cache holds.
    #[must_use]
    pub fn memory(&self) -> usize {
        Self::fixed(self.capacity) + self.blocks.len() * BLOCK_PAGES * PAGE_BYTES
    }

    /// Returns the maximum number of pages in the cache.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of pages in the cache.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the figures since the creation of the cache, or since the last call of
    /// [`Self::take_figures`].
    #[must_use]
    pub fn figures(&self) -> SentFigures {
        self.figures
    }

    /// Returns true if a page without a version can be admitted. In the first pass, a full cache
    /// admits none.
    #[must_use]
    pub fn admits(&self) -> bool {
        self.pages() < self.capacity || (self.pass > 1 && self.capacity > 0)
    }

    /// Returns the figures as [`Self::figures`] does, and sets them to 0.
    pub fn take_figures(&mut self) -> SentFigures {
        std::mem::take(&mut self.figures)
    }

    /// Begins the next pass.
    pub fn next_pass(&mut self) {
        self.pass = self.pass.saturating_add(1);
    }

    /// Records that page `page` is sent with the content `now`, and returns the delta against the
    /// version sent before. Returns `None` if the cache has no such version, or if the delta would
    /// have more than `limit` bytes. The sender must then send the page in another way.
    ///
    /// `page` is a number that no other page of the guest has.
    pub fn send(&mut self, page: u64, now: &Page, limit: usize) -> Option<&[u8]> {
        let Some(at) = self.index.find(page, &self.slots) else {
            self.figures.misses += 1;
            if let Some(at) = self.place_for(page) {
                self.admit(page, at, now);
            }
            return None;
        };
        let slot = at as usize;
        let before = &mut self.blocks[slot / BLOCK_PAGES][slot % BLOCK_PAGES];
        let Some(delta) = self.encoder.encode(before, now, limit) else {
            self.figures.large += 1;
            self.refused.strike(page);
            self.index.remove(page, &self.slots);
            self.free.push(at);
            return None;
        };
        // As the target does. A copy of the page would write all of its lines.
        let (change, _) = Delta::parse(delta).expect("the encoder's deltas are valid");
        change.apply(before);
        debug_assert!(before == now);
        let slot = &mut self.slots[slot];
        slot.rewritten |= self.pass > 1;
        slot.pass = self.pass;
        self.refused.forgive(page);
        self.figures.hits += 1;
        self.figures.delta_bytes += delta.len() as u64;
        self.figures.saved_bytes += (PAGE_BYTES - delta.len()) as u64;
        Some(delta)
    }

    /// Removes page `page`, because the target no longer has the version that was sent, or may not
    /// have received it.
    pub fn forget(&mut self, page: u64) {
        if let Some(at) = self.index.find(page, &self.slots) {
            self.index.remove(page, &self.slots);
            self.free.push(at);
        }
    }

    /// Removes all pages. The memory of their content is kept.
    pub fn forget_all(&mut self) {
        self.index.clear();
        self.slots.clear();
        self.free.clear();
        self.hand = 0;
    }

    /// Returns a place for `page`, or `None` if the page is not admitted.
    fn place_for(&mut self, page: u64) -> Option<u32> {
        if !self.refused.allows(page, self.pass) {
            return None;
        }
        if let Some(at) = self.free.pop() {
            return Some(at);
        }
        if self.slots.len() < self.capacity {
            if self.slots.len() == self.blocks.len() * BLOCK_PAGES {
                self.blocks.push(vec![[0; PAGE_BYTES]; BLOCK_PAGES].into_boxed_slice());
            }
            let at = u32::try_from(self.slots.len()).expect("the capacity is below u32::MAX");
            self.slots.push(Slot { page, pass: 0, rewritten: false });
            return Some(at);
        }
        self.evict(page)
    }

    /// Takes the place of a page that is of no use, and returns the place for `page`. Returns
    /// `None` if none of the places that were examined has such a page, which keeps the time for
    /// each page bounded.
    fn evict(&mut self, page: u64) -> Option<u32> {
        if self.pass == 1 {
            return None;
        }
        for _ in 0..EXAMINED.min(self.slots.len()) {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = self.slots[at];
            let had_its_turn = slot.page < page && slot.pass < self.pass;
            if slot.pass + 1 < self.pass || (!slot.rewritten && had_its_turn) {
                self.figures.evicted += 1;
                let at = u32::try_from(at).expect("the capacity is below u32::MAX");
                self.index.remove(slot.page, &self.slots);
                return Some(at);
            }
        }
        None
    }

    fn admit(&mut self, page: u64, at: u32, now: &Page) {
        let slot = at as usize;
        self.slots[slot] = Slot { page, pass: self.pass, rewritten: self.pass > 1 };
        self.blocks[slot / BLOCK_PAGES][slot % BLOCK_PAGES] = *now;
        self.index.insert(page, at, &self.slots);
        self.figures.admitted += 1;
    }
}

/// Number of consecutive pages that have consecutive homes in a table, so that a sender that sends
/// pages in order uses whole cache lines of the table.
const NEIGHBOURS: u64 = 16;

/// Returns the home of `page` in a table of `places`, a power of two.
fn home(page: u64, places: usize) -> usize {
    let mixed = (page / NEIGHBOURS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let at = (mixed >> 32).wrapping_mul(NEIGHBOURS).wrapping_add(page % NEIGHBOURS);
    usize::try_from(at & (places as u64 - 1)).expect("below the number of places")
}

/// Index from page numbers to places: a hash table with linear probing, at most half full.
struct Index {
    /// Numbers of places, or [`Index::EMPTY`]. The length is a power of two.
    table: Box<[u32]>,
}

impl Index {
    const EMPTY: u32 = u32::MAX;

    fn places(capacity: usize) -> usize {
        (capacity * 2).next_power_of_two()
    }

    fn new(capacity: usize) -> Self {
        Self { table: vec![Self::EMPTY; Self::places(capacity)].into() }
    }

    fn clear(&mut self) {
        self.table.fill(Self::EMPTY);
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.table.len() - 1)
    }

    /// Returns the position in the table of `page`, or of the empty entry at which it would be
    /// inserted.
    fn position(&self, page: u64, slots: &[Slot]) -> usize {
        let mut at = home(page, self.table.len());
        // Ends, because at least half of all entries are empty.
        while self.table[at] != Self::EMPTY && slots[self.table[at] as usize].page != page {
            at = self.next(at);
        }
        at
    }

    fn find(&self, page: u64, slots: &[Slot]) -> Option<u32> {
        let found = self.table[self.position(page, slots)];
        (found != Self::EMPTY).then_some(found)
    }

    fn insert(&mut self, page: u64, slot: u32, slots: &[Slot]) {
        let at = self.position(page, slots);
        assert_eq!(self.table[at], Self::EMPTY, "page {page} is already in the index");
        self.table[at] = slot;
    }

    /// Removes `page`, and moves later entries of its cluster to where a search finds them.
    fn remove(&mut self, page: u64, slots: &[Slot]) {
        let mut hole = self.position(page, slots);
        assert_ne!(self.table[hole], Self::EMPTY, "page {page} is not in the index");
        let mut at = hole;
        loop {
            at = self.next(at);
            let slot = self.table[at];
            if slot == Self::EMPTY {
                break;
            }
            // The entry may move into the hole if its home is not between the hole and the entry.
            let mask = self.table.len() - 1;
            let home = home(slots[slot as usize].page, self.table.len());
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.table[hole] = slot;
                hole = at;
            }
        }
        self.table[hole] = Self::EMPTY;
    }
}

/// Pages whose last delta was large. Two pages can share an entry, and then the later page replaces
/// the earlier one, so the table is an estimate.
struct Refused {
    /// Page number in the upper 56 bits, and the number of large deltas in a row in the lower 8.
    /// An entry of 0 is empty.
    table: Box<[u64]>,
}

impl Refused {
    fn places(capacity: usize) -> usize {
        // At most one entry for each page of the capacity. A table needs at least one entry.
        (capacity / 2 + 1).next_power_of_two()
    }

    fn new(capacity: usize) -> Self {
        Self { table: vec![0; Self::places(capacity)].into() }
    }

    fn entry(&mut self, page: u64) -> &mut u64 {
        let at = home(page, self.table.len());
        &mut self.table[at]
    }

    fn strikes(entry: u64, page: u64) -> u8 {
        if entry >> 8 == page << 8 >> 8 { entry.to_le_bytes()[0] } else { 0 }
    }

    fn strike(&mut self, page: u64) {
        let entry = self.entry(page);
        let strikes = (Self::strikes(*entry, page) + 1).min(MOST_STRIKES);
        *entry = page << 8 | u64::from(strikes);
    }

    fn forgive(&mut self, page: u64) {
        let entry = self.entry(page);
        if Self::strikes(*entry, page) != 0 {
            *entry = 0;
        }
    }

    fn allows(&mut self, page: u64, pass: u32) -> bool {
        let strikes = Self::strikes(*self.entry(page), page);
        pass.is_multiple_of(1 << strikes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::Noise;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Sender and target, which must agree on each page.
    struct Pair {
        sent: SentPages,
        target: HashMap<u64, Page>,
    }

    impl Pair {
        fn new(pages: usize) -> Self {
            let bound = SentPages::fixed(pages) + pages * PAGE_BYTES;
            let sent = SentPages::new(bound, DeltaEncoder::default());
            assert_eq!(sent.capacity(), pages);
            Self { sent, target: HashMap::new() }
        }

        /// Sends a page, and returns true if it was sent as a delta.
        fn send(&mut self, page: u64, now: &Page) -> bool {
            let Some(delta) = self.sent.send(page, now, 2048) else {
                self.target.insert(page, *now);
                return false;
            };
            let (delta, rest) = Delta::parse(delta).unwrap();
            assert!(rest.is_empty());
            let version = self.target.get_mut(&page).expect("a delta follows a whole page");
            delta.apply(version);
            assert!(*version == *now, "page {page} differs on the target");
            true
        }

        /// Sends `pages` with one changed byte each, as a pass.
        fn pass(&mut self, pages: impl Iterator<Item = u64>) -> usize {
            let mut deltas = 0;
            for page in pages {
                let mut now = self.target.get(&page).copied().unwrap_or([7; PAGE_BYTES]);
                now[8] = now[8].wrapping_add(1);
                deltas += usize::from(self.send(page, &now));
            }
            self.sent.next_pass();
            deltas
        }
    }

    proptest! {
        #[test]
        fn target_has_what_the_cache_has(
            seed: u64,
            steps in prop::collection::vec((0u64..400, 0u8..8), 1..1500),
        ) {
            let mut pair = Pair::new(128);
            let mut noise = Noise::new(seed);
            let mut memory: HashMap<u64, Page> = HashMap::new();
            for (page, what) in steps {
                let now = memory.entry(page).or_insert([0; PAGE_BYTES]);
                match what {
                    0 => noise.fill(now),
                    1 => now.fill(0),
                    2 => pair.sent.next_pass(),
                    3 if noise.below(50) == 0 => pair.sent.forget_all(),
                    3 => pair.sent.forget(page),
                    _ => now[noise.below(PAGE_BYTES)] = 1,
                }
                if what != 3 {
                    pair.send(page, now);
                }
                prop_assert!(pair.sent.pages() <= 128);
                let figures = pair.sent.figures();
                prop_assert_eq!(figures.delta_bytes + figures.saved_bytes, figures.hits * 4096);
            }
            // The index finds exactly the pages of the places that are in use.
            let free: Vec<usize> = pair.sent.free.iter().map(|at| *at as usize).collect();
            for (at, slot) in pair.sent.slots.iter().enumerate() {
                let found = pair.sent.index.find(slot.page, &pair.sent.slots);
                let in_use = !free.contains(&at);
                prop_assert_eq!(found == Some(u32::try_from(at).unwrap()), in_use);
            }
            let entries = pair.sent.index.table.iter().filter(|entry| **entry != Index::EMPTY).count();
            prop_assert_eq!(entries, pair.sent.pages());
        }

        #[test]
        fn memory_stays_within_its_bound(bound in 0usize..(4 << 20)) {
            let mut sent = SentPages::new(bound, DeltaEncoder::default());
            for page in 0..sent.capacity() as u64 + 10 {
                sent.send(page, &[1; PAGE_BYTES], 2048);
            }
            if sent.capacity() > 0 {
                prop_assert!(sent.memory() <= bound, "{} of {bound}", sent.memory());
                // Not even one more block would fit.
                let more = sent.capacity() + BLOCK_PAGES;
                prop_assert!(SentPages::fixed(more) + more * PAGE_BYTES > bound);
            }
            prop_assert_eq!(sent.pages(), sent.capacity());
        }
    }

    #[test]
    fn figures_that_are_taken_add_up_to_all_figures() {
        let (mut whole, mut parts) = (Pair::new(128), Pair::new(128));
        let mut sum = SentFigures::default();
        for _ in 0..3 {
            for pages in [0..100, 50..400] {
                whole.pass(pages.clone());
                parts.pass(pages);
                sum += parts.sent.take_figures();
                assert_eq!(parts.sent.figures(), SentFigures::default());
            }
        }
        assert_eq!(sum, whole.sent.figures());
        assert!(sum.hits > 0 && sum.misses > 0 && sum.evicted > 0 && sum.saved_bytes > 0, "{sum:?}");
    }

    #[test]
    fn first_pass_over_all_memory_evicts_nothing() {
        let mut pair = Pair::new(128);
        assert!(pair.sent.admits());
        for page in 0..4096 {
            let admits = pair.sent.admits();
            pair.send(page, &[7; PAGE_BYTES]);
            assert_eq!(pair.sent.index.find(page, &pair.sent.slots).is_some(), admits);
        }
        assert!(!pair.sent.admits() && !SentPages::new(0, DeltaEncoder::default()).admits());
        pair.sent.next_pass();
        assert!(pair.sent.admits());
        assert_eq!((pair.sent.figures().evicted, pair.sent.pages()), (0, 128));
        assert_eq!(pair.pass(0..128), 128);
    }

    #[test]
    fn rewritten_pages_replace_pages_that_were_sent_once() {
        let mut pair = Pair::new(128);
        pair.pass(0..4096);
        // None of these pages is in the cache yet.
        assert_eq!(pair.pass(1000..1100), 0);
        for _ in 0..5 {
            assert_eq!(pair.pass(1000..1100), 100);
        }
    }

    #[test]
    fn pages_that_were_not_kept_do_not_evict_those_that_follow() {
        let mut pair = Pair::new(128);
        // The first ten pages were sent before the versions of pages were kept.
        pair.pass(10..1024);
        assert_eq!(pair.pass(0..128), 118);
        assert!(pair.pass(0..128) >= 118);
    }

    #[test]
    fn dirty_set_of_twice_the_cache_has_deltas_for_half_of_its_pages() {
        let mut pair = Pair::new(256);
        pair.pass(0..8192);
        pair.pass(3000..3512);
        let found: Vec<usize> = (0..8).map(|_| pair.pass(3000..3512)).collect();
        assert!(found.iter().all(|deltas| *deltas >= 250), "{found:?}");
    }

    #[test]
    fn another_dirty_set_takes_over_within_three_passes() {
        let mut pair = Pair::new(128);
        pair.pass(0..1024);
        for _ in 0..4 {
            pair.pass(0..128);
        }
        let found: Vec<usize> = (0..4).map(|_| pair.pass(500..628)).collect();
        assert_eq!(found[3], 128, "{found:?}");
    }

    #[test]
    fn pages_that_are_rewritten_as_a_whole_lose_their_places_to_pages_with_counters() {
        let mut pair = Pair::new(256);
        let mut noise = Noise::new(5);
        pair.pass(0..1024);
        let mut deltas = 0;
        for _ in 0..12 {
            for page in 0..128 {
                let mut now = [0; PAGE_BYTES];
                noise.fill(&mut now);
                pair.send(page, &now);
            }
            deltas = pair.pass(500..628);
        }
        assert!(deltas >= 120, "{deltas} of 128");
        // Without the table of refused pages, each of them would be tried in every other pass.
        let tried = pair.sent.figures().large;
        assert!(tried < 128 * 5, "{tried}");
    }
}
