//! The workload's view of memory: pages by number, counters, the statistics page.

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

/// What lies below is not the workload's: a machine has its boot structures and the statistics page there.
const RESERVED: u64 = STATS_GPA + STATS_BYTES;

/// Pages of the guest that a workload can use, for counters and content.
pub(crate) fn usable_pages(memory: &Memory) -> u64 {
    memory.layout().pages().saturating_sub(RESERVED / PAGE_SIZE)
}

/// Guest memory divided for a workload: counters first, then content, through all regions.
#[derive(Debug, Clone)]
pub(crate) struct Ram {
    // Holds the mappings that the addresses below point into.
    _memory: Arc<Memory>,
    /// Address and pages of each region, without what is reserved at the start of the first.
    spans: Vec<(NonNull<u8>, u64)>,
    /// The regions' names.
    regions: Vec<RegionId>,
    table_pages: u64,
}

// SAFETY: addresses into mappings that `_memory` keeps; accesses are atomic.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// For a workload, and `heap` pages that it leaves alone.
    pub(crate) fn new(
        memory: &Arc<Memory>,
        workload: &Workload,
        cpus: u32,
        heap: u64,
    ) -> Result<(Self, Layout), Error> {
        if workload.alloc.is_some() {
            return Err(Error::Options(
                "a process guest has no allocator: leave alloc= out of the workload, or use --guest kvm"
                    .to_owned(),
            ));
        }
        let usable = usable_pages(memory).checked_sub(heap);
        let usable = usable.ok_or_else(|| Error::Options(format!("a heap of {heap} pages is too large")))?;
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

    /// Which page of which region page `page` of everything usable is.
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

    /// Word `word` of page `page` of everything usable, counters included.
    #[inline]
    pub(crate) fn word(&self, page: u64, word: usize) -> &AtomicU64 {
        let mut left = page;
        for (start, pages) in &self.spans {
            if left < *pages {
                assert!(word < PAGE_WORDS, "word {word} of a page");
                #[expect(clippy::cast_possible_truncation, reason = "within a mapping of this process")]
                let offset = (left * PAGE_SIZE) as usize + 8 * word;
                // SAFETY: inside the span (both checked above), aligned, mapped for as long as `_memory` lives, and every
                // access in this process is atomic or by raw address.
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

/// The statistics page of a guest: at its fixed place in guest memory, so that it moves with the guest.
pub(crate) fn stats_page(memory: &Memory) -> &StatsPage {
    let (start, len) = memory.span(0);
    debug_assert!(RESERVED <= len as u64);
    #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
    // SAFETY: within the first region, which is larger; page-aligned; zeros or a former guest's words are valid, as every
    // field is an atomic; mapped for as long as `memory` is borrowed.
    unsafe {
        start.add(STATS_GPA as usize).cast::<StatsPage>().as_ref()
    }
}
