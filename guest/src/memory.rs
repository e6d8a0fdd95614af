//! Division of memory: image, page tables, counters, and the rest for the workload.

use crate::paging;
use crate::pvh::{BootInfo, MAX_RANGES, RamRange};
use vmferry_guest_abi::{PAGE_SIZE, PageStore};

unsafe extern "C" {
    /// End of the image, from `link.ld`.
    static image_end: u8;
}

/// RAM without an owner: page-aligned ranges after the image, in ascending order.
#[derive(Debug)]
pub(crate) struct FreeRam {
    ranges: [RamRange; MAX_RANGES],
    count: usize,
}

impl FreeRam {
    /// Returns all RAM after the image that page tables can reach, without the pages of modules.
    /// The memory below (the first mebibyte, where hosts keep boot structures and the other vCPUs
    /// start) is not used.
    pub(crate) fn new(boot: &BootInfo) -> Self {
        let mut free = Self { ranges: [RamRange::default(); MAX_RANGES], count: 0 };
        let first = (&raw const image_end).addr() as u64;
        for range in boot.ranges() {
            let start = range.start.max(first).next_multiple_of(PAGE_SIZE);
            let end = range.end.min(paging::LIMIT) / PAGE_SIZE * PAGE_SIZE;
            if start < end {
                free.ranges[free.count] = RamRange { start, end };
                free.count += 1;
            }
        }
        for module in boot.modules() {
            free.cut(module.start / PAGE_SIZE * PAGE_SIZE, module.end.next_multiple_of(PAGE_SIZE));
        }
        free.ranges[..free.count].sort_unstable_by_key(|range| range.start);
        free
    }

    /// Removes the pages from `start` to `end`, which are in at most one range.
    fn cut(&mut self, start: u64, end: u64) {
        let inside = |range: &RamRange| range.start < end && start < range.end;
        let Some(at) = self.ranges().iter().position(inside) else { return };
        let range = self.ranges[at];
        let parts = [(range.start, start.max(range.start)), (end.min(range.end), range.end)];
        let parts = parts.map(|(start, end)| RamRange { start, end });
        let mut parts = parts.into_iter().filter(|part| part.start < part.end);
        match (parts.next(), parts.next()) {
            (Some(part), None) => self.ranges[at] = part,
            (Some(below), Some(above)) => {
                assert!(
                    self.count < MAX_RANGES,
                    "a module splits a range, and there are {MAX_RANGES} already"
                );
                (self.ranges[at], self.ranges[self.count]) = (below, above);
                self.count += 1;
            }
            _ => {
                self.count -= 1;
                self.ranges[at] = self.ranges[self.count];
            }
        }
    }

    /// Returns the ranges.
    pub(crate) fn ranges(&self) -> &[RamRange] {
        &self.ranges[..self.count]
    }

    /// Returns the number of pages in all ranges.
    pub(crate) fn pages(&self) -> u64 {
        self.ranges().iter().map(|range| (range.end - range.start) / PAGE_SIZE).sum()
    }

    /// Takes `pages` contiguous pages out, at the lowest address where they fit. Returns their
    /// address.
    pub(crate) fn take(&mut self, pages: u64) -> Option<u64> {
        let bytes = pages.checked_mul(PAGE_SIZE)?;
        let range = self.ranges[..self.count].iter_mut().find(|range| range.end - range.start >= bytes)?;
        range.start += bytes;
        Some(range.start - bytes)
    }

    /// Takes the lowest `pages` pages out, or as many as there are.
    fn take_lowest(&mut self, pages: u64) -> Self {
        let mut taken = Self { ranges: [RamRange::default(); MAX_RANGES], count: 0 };
        let mut left = pages * PAGE_SIZE;
        for range in &mut self.ranges[..self.count] {
            let bytes = left.min(range.end - range.start);
            if bytes != 0 {
                taken.ranges[taken.count] = RamRange { start: range.start, end: range.start + bytes };
                taken.count += 1;
            }
            range.start += bytes;
            left -= bytes;
        }
        taken
    }
}

/// Memory of the workload: page `n` of the workload is the `n`-th page of the ranges.
#[derive(Debug)]
pub(crate) struct Ram {
    ranges: [RamRange; MAX_RANGES],
    count: usize,
    counters: u64,
}

impl Ram {
    /// Takes a table of `table_pages` pages and `data_pages` pages of content out of `free`, at the
    /// lowest addresses.
    ///
    /// # Safety
    /// The ranges in `free` must be mapped and have no other user.
    pub(crate) unsafe fn new(free: &mut FreeRam, table_pages: u64, data_pages: u64) -> Self {
        let counters = free.take(table_pages).expect("no contiguous memory for the counters; lower ws");
        let FreeRam { ranges, count } = free.take_lowest(data_pages);
        Self { ranges, count, counters }
    }

    #[inline]
    fn word(&self, page: u64, word: usize) -> *mut u64 {
        let mut left = page;
        for range in &self.ranges[..self.count] {
            let pages = (range.end - range.start) / PAGE_SIZE;
            if left < pages {
                return pointer(range.start + left * PAGE_SIZE + 8 * word as u64);
            }
            left -= pages;
        }
        panic!("page {page} is beyond memory");
    }
}

impl PageStore for Ram {
    #[inline]
    fn load(&self, page: u64, word: usize) -> u64 {
        // SAFETY: by the contract of `new` the ranges are mapped and ours; `word` checks that the
        // page is in them, and the workload uses words below 512. Other vCPUs do not touch this
        // page (`Share`), the host may at any time: volatile.
        unsafe { self.word(page, word).read_volatile() }
    }

    #[inline]
    fn store(&self, page: u64, word: usize, value: u64) {
        // SAFETY: as for `load`.
        unsafe { self.word(page, word).write_volatile(value) }
    }

    #[inline]
    fn counter(&self, page: u64) -> u64 {
        // SAFETY: the table has a word for each page of the working set, and only those have
        // counters.
        unsafe { pointer::<u64>(self.counters + 8 * page).read_volatile() }
    }

    #[inline]
    fn set_counter(&self, page: u64, value: u64) {
        // SAFETY: as for `counter`.
        unsafe { pointer::<u64>(self.counters + 8 * page).write_volatile(value) }
    }
}

/// Returns an identity-mapped physical address as a pointer.
#[inline]
pub(crate) fn pointer<T>(address: u64) -> *mut T {
    #[expect(clippy::cast_possible_truncation, reason = "this program only exists for 64 bits")]
    core::ptr::with_exposed_provenance_mut(address as usize)
}
