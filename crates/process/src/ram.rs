//! Guest memory as the workload uses it: numbered pages, counters, and the statistics page.

use crate::Error;
use crate::memory::Memory;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_core::RegionId;
use vmferry_engine::GuestMemory;
use vmferry_guest_abi::{
    Layout, PAGE_SIZE, PAGE_WORDS, PageStore, STATS_BYTES, STATS_GPA, StatsPage, Workload,
};

/// Number of bytes at the start of memory that the workload does not use, because a virtual machine
/// has its boot structures and the statistics page there.
const RESERVED: u64 = STATS_GPA + STATS_BYTES;

/// Returns the number of guest pages that a workload can use, for counters and content.
pub(crate) fn usable_pages(memory: &Memory) -> u64 {
    memory.layout().pages().saturating_sub(RESERVED / PAGE_SIZE)
}

/// Guest memory divided for a workload: counters first, then content, across all regions.
#[derive(Debug, Clone)]
pub(crate) struct Ram {
    // Keeps the mappings that the addresses below point into.
    _memory: Arc<Memory>,
    /// Address and number of pages of each region, without the reserved start of the first region.
    spans: Vec<(NonNull<u8>, u64)>,
    /// IDs of the regions.
    regions: Vec<RegionId>,
    table_pages: u64,
}

// SAFETY: addresses into mappings that `_memory` keeps; accesses are atomic.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// Returns the memory for a workload, and its layout. The workload does not use the last `heap`
    /// pages.
    pub(crate) fn new(
        memory: &Arc<Memory>,
        workload: &Workload,
        cpus: u32,
        heap: u64,
    ) -> Result<(Self, Layout), Error> {
        if workload.alloc.is_some() {
            return Err(Error::Options(
                "a process guest has no allocator: remove alloc= from the workload, or use a KVM guest"
                    .to_owned(),
            ));
        }
        let usable = usable_pages(memory).checked_sub(heap);
        let usable = usable.ok_or_else(|| {
            Error::Options(format!("a heap of {heap} pages is too large for the guest's memory"))
        })?;
        let layout = Layout::new(workload, usable, u64::from(cpus)).map_err(Error::Workload)?;
        let count = memory.layout().regions().len();
        let mut spans: Vec<_> = (0..count)
            .map(|position| {
                let (start, len) = memory.span(position);
                (start, len as u64 / PAGE_SIZE)
            })
            .collect();
        let reserved = usize::try_from(RESERVED).map_err(|error| Error::Options(error.to_string()))?;
        // SAFETY: the first region has at least MIN_MEMORY bytes, more than what is reserved.
        spans[0] = (unsafe { spans[0].0.add(reserved) }, spans[0].1 - RESERVED / PAGE_SIZE);
        let regions = memory.layout().regions().iter().map(|region| region.id).collect();
        let ram = Self { _memory: Arc::clone(memory), spans, regions, table_pages: layout.table_pages() };
        Ok((ram, layout))
    }

    /// Returns region and page number of usable page `page`.
    pub(crate) fn place(&self, page: u64) -> Option<(RegionId, u64)> {
        let (mut left, mut reserved) = (page, RESERVED / PAGE_SIZE);
        for (region, (_, pages)) in self.regions.iter().zip(&self.spans) {
            if left < *pages {
                return Some((*region, left + reserved));
            }
            left -= pages;
            reserved = 0;
        }
        None
    }

    /// Returns word `word` of usable page `page`, counters included.
    #[inline]
    pub(crate) fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        let mut left = page;
        for (start, pages) in &self.spans {
            if left < *pages {
                assert!(word < PAGE_WORDS, "word {word} of a page");
                #[expect(clippy::cast_possible_truncation, reason = "within a mapping of this process")]
                let offset = (left * PAGE_SIZE) as usize + 8 * word;
                // SAFETY: inside the span (both checked above), aligned, mapped for as long as
                // `_memory` lives, and every access in this process is atomic or by raw address.
                return unsafe { AtomicU64::from_ptr(start.as_ptr().add(offset).cast()) };
            }
            left -= pages;
        }
        panic!("page {page} is beyond the guest's memory");
    }

    #[inline]
    fn counter_word(&self, page: u64) -> &AtomicU64 {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder below 512")]
        self.word(page / PAGE_WORDS as u64, (page % PAGE_WORDS as u64) as usize)
    }
}

impl PageStore for Ram {
    #[inline]
    fn load(&self, page: u64, word: usize) -> u64 {
        self.word(page + self.table_pages, word).load(Ordering::Relaxed)
    }

    #[inline]
    fn store(&self, page: u64, word: usize, value: u64) {
        self.word(page + self.table_pages, word).store(value, Ordering::Relaxed);
    }

    #[inline]
    fn counter(&self, page: u64) -> u64 {
        self.counter_word(page).load(Ordering::Relaxed)
    }

    #[inline]
    fn set_counter(&self, page: u64, value: u64) {
        self.counter_word(page).store(value, Ordering::Relaxed);
    }
}

/// Returns the statistics page of a guest. The page has a fixed address in guest memory and moves
/// with the guest.
pub(crate) fn stats_page(memory: &Memory) -> &StatsPage {
    let (start, len) = memory.span(0);
    debug_assert!(RESERVED <= len as u64);
    #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
    // SAFETY: within the first region, which is larger; page-aligned; zeros and the words of a
    // received guest are valid, as every field is an atomic; mapped for as long as `memory` is
    // borrowed.
    unsafe {
        start.add(STATS_GPA as usize).cast::<StatsPage>().as_ref()
    }
}
