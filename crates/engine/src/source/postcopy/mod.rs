//! Pages of a guest that already runs on the target: the pages that vCPUs wait for, and the rest.
//!
//! | module | sends |
//! |---|---|
//! | `urgent` | a page that the guest waits for: the thread that reads the request sends the page at once |
//! | `bulk` | all other pages, in order, on the bulk channels |
//! | `baselines` | urgent pages on two published paths, kept for comparison |
//!
//! Because the memory of the source does not change any more, any thread can read a page at any
//! time, and there is only one version of each page. No page may be sent twice. Therefore a thread
//! claims each page by an atomic bit before it sends the page.

mod baselines;
mod bulk;
mod urgent;

pub(crate) use urgent::{UrgentOut, serve_urgent};

use super::settings::UrgentPath;
use crate::source::sender::SenderError;
use crate::sync::{AtomicU64, ClaimBitmap};
use baselines::BulkQueue;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_bitmap::Bitmap;
use vmferry_core::{Layout, PAGE_SIZE, PageSet, RegionId, VmError};

/// Number of pages that a bulk thread takes at a time. It is the size of a huge page of the target,
/// so that the parts of a huge page arrive together. Within such a chunk, the thread claims at most
/// 64 pages at a time, immediately before it sends them.
const CHUNK_PAGES: u64 = 512;

/// Time, at the current rate, that the unsent bytes of a bulk channel may take to leave this host.
const AT_ONCE: Duration = Duration::from_micros(500);

/// Returns the number of bytes that a channel sends within [`AT_ONCE`] at `rate` bytes per second,
/// but at least the size of a page with its headers, and at most that of a frame of 64 pages.
fn unsent_bytes(rate: u64) -> u64 {
    let bytes = u128::from(rate) * AT_ONCE.as_nanos() / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX).clamp(2 * PAGE_SIZE, 64 * PAGE_SIZE)
}

/// Factor by which a bulk frame near the guest's faults is shorter than others. Short frames cost
/// more, but a vCPU that needs a page of such a frame waits less.
const NEAR: u64 = 8;

/// Factor by which the unsent bytes of a bulk channel are fewer while the guest accesses memory
/// sequentially, because the guest then needs these bytes next. Still fewer bytes did not shorten
/// the waits of the guest further.
const NEAR_UNSENT: u64 = 4;

/// Number of chunks that are sent before all others if the guest accesses memory sequentially: its
/// chunk and those after it.
const FOLLOWED: u64 = 4;

/// Page that the guest waits for, and pages that it may need next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) region: usize,
    pub(crate) page: u64,
    pub(crate) ahead: u16,
    pub(crate) again: bool,
}

/// Missing pages of the target that were not sent over the present set of channels.
///
/// If the channels are lost, the claims are dropped, and the target names its missing pages again.
#[derive(Debug)]
pub(crate) struct Claims {
    pub(crate) regions: Vec<(RegionId, ClaimBitmap)>,
    /// Chunks that no bulk thread has taken, counted over all regions. All pages of another chunk
    /// are claimed, or will be by the threads that have taken it.
    chunks: ClaimBitmap,
    /// Number of the first chunk that the search in order has not reached. All chunks before it are
    /// taken.
    cursor: AtomicU64,
    /// Position of a guest that accesses memory sequentially, as its faults show: number of the
    /// page counted from the first chunk, plus 1. Zero if there is none.
    near: AtomicU64,
    /// Queue of requests for the bulk threads. `None` on the dedicated path.
    baseline: Option<BulkQueue>,
    /// Largest number of pages of a bulk frame.
    frame_pages: AtomicU64,
    /// True if the source looks up whether a page was ever touched before it reads the page. A page
    /// that was never touched is sent as zeros, unread. False if all missing pages were written.
    pub(crate) look_up_untouched: bool,
}

/// Piece of work of a bulk thread.
#[derive(Debug, Clone)]
struct Chunk {
    /// Position of the region.
    region: usize,
    pages: Range<u64>,
    /// Page to begin with: `pages.start <= from <= pages.end`. The pages of the chunk before this
    /// page are sent last.
    from: u64,
    /// True if the guest may need these pages soon. Frames are then shorter, because a vCPU may
    /// have to wait for a whole frame.
    near: bool,
}

/// Returns the number of chunks of `pages` pages.
fn chunks(pages: u64) -> u64 {
    pages.div_ceil(CHUNK_PAGES)
}

impl Claims {
    pub(crate) fn new(missing: PageSet, path: UrgentPath, look_up_untouched: bool) -> Self {
        let chunks = missing.iter().map(|(_, map)| chunks(map.len())).sum();
        Self {
            regions: missing.into_iter().map(|(id, map)| (id, ClaimBitmap::new(map))).collect(),
            chunks: ClaimBitmap::new(Bitmap::full(chunks)),
            cursor: AtomicU64::new(0),
            near: AtomicU64::new(0),
            baseline: BulkQueue::of(path),
            frame_pages: AtomicU64::new(64),
            look_up_untouched,
        }
    }

    /// Returns the largest number of pages of a bulk frame, 1 to 64. Frames `near` the guest's
    /// faults are shorter, because the guest may have to wait for the whole frame.
    fn frame_pages(&self, near: bool) -> u64 {
        let pages = self.frame_pages.load(Ordering::Relaxed);
        if near { pages.div_ceil(NEAR) } else { pages }
    }

    /// Sets the length of bulk frames to what a channel sends within [`AT_ONCE`] at `rate` bytes
    /// per second. A page is in flight from its claim until the end of its frame has arrived, and a
    /// vCPU that needs the page waits for that time.
    pub(crate) fn fit_frames(&self, rate: u64) {
        let pages = unsent_bytes(rate) / PAGE_SIZE;
        self.frame_pages.store(pages.clamp(1, 64), Ordering::Relaxed);
    }

    /// Returns the number of bytes that a bulk channel may have unsent at `rate` bytes per second.
    pub(crate) fn unsent_bytes(&self, rate: u64) -> u64 {
        let bytes = unsent_bytes(rate);
        if self.is_sequential() { (bytes / NEAR_UNSENT).max(2 * PAGE_SIZE) } else { bytes }
    }

    /// Returns true if the guest accesses memory sequentially.
    pub(crate) fn is_sequential(&self) -> bool {
        self.near.load(Ordering::Relaxed) != 0
    }

    /// Returns the number of pages that no thread has claimed.
    pub(crate) fn left(&self) -> u64 {
        self.regions.iter().map(|(_, map)| map.left()).sum()
    }

    /// Returns the position of region `id`.
    pub(crate) fn position(&self, id: RegionId) -> Option<usize> {
        self.regions.iter().position(|(own, _)| *own == id)
    }

    /// Records that the guest accesses memory sequentially and will need `page`, which need not
    /// exist. The pages from `page` on are sent next.
    fn guest_runs_on(&self, region: usize, page: u64) {
        let page = page.min(self.regions[region].1.len().saturating_sub(1));
        let before: u64 = self.regions[..region].iter().map(|(_, map)| chunks(map.len())).sum();
        // The value is a hint: the last one wins, and a lost one costs one fault.
        self.near.store(before * CHUNK_PAGES + page + 1, Ordering::Relaxed);
    }

    /// Returns the next chunk for a bulk thread: a chunk near a guest that accesses memory
    /// sequentially, or otherwise the first chunk that no thread has taken.
    fn next_chunk(&self) -> Option<Chunk> {
        if let Some(chunk) = self.near_chunk() {
            return Some(chunk);
        }
        loop {
            let number = self.cursor.fetch_add(1, Ordering::Relaxed);
            if number >= self.chunks.len() {
                return None;
            }
            if self.chunks.take(number) {
                return self.chunk(number, 0).map(|chunk| Chunk { near: false, ..chunk });
            }
        }
    }

    /// Returns the first chunk with a page that no thread has claimed, among the chunk that the
    /// guest accesses and those after it.
    ///
    /// Several threads may send the same chunk, so that the pages that the guest needs next come
    /// over all channels: each thread claims the next few pages that no thread has claimed. If each
    /// thread had a chunk of its own, the guest would get the pages of its chunk at the rate of one
    /// channel.
    fn near_chunk(&self) -> Option<Chunk> {
        let near = self.near.load(Ordering::Relaxed);
        let page = near.checked_sub(1)?;
        let number = page / CHUNK_PAGES;
        for ahead in 0..FOLLOWED {
            let from = if ahead == 0 { page % CHUNK_PAGES } else { 0 };
            let Some(chunk) = self.chunk(number + ahead, from) else { break };
            if self.regions[chunk.region].1.any(chunk.pages.clone()) {
                // Another thread may have taken the chunk before. Then both send it.
                self.chunks.take(number + ahead);
                return Some(chunk);
            }
        }
        // A newer position stays.
        let _ = self.near.compare_exchange(near, 0, Ordering::Relaxed, Ordering::Relaxed);
        None
    }

    /// Returns chunk `number`, marked as near the guest, to be sent from its page `from` on.
    fn chunk(&self, mut number: u64, from: u64) -> Option<Chunk> {
        for (region, (_, map)) in self.regions.iter().enumerate() {
            if number < chunks(map.len()) {
                let first = number * CHUNK_PAGES;
                let pages = first..(first + CHUNK_PAGES).min(map.len());
                // Claims are made in words of 64 pages.
                let from = (first + from / 64 * 64).min(pages.end);
                return Some(Chunk { region, pages, from, near: true });
            }
            number -= chunks(map.len());
        }
        None
    }
}

/// Returns the missing pages of a handover: all that were still to be sent, and those that `also`
/// names.
pub(crate) fn missing_pages(
    mut pending: PageSet,
    layout: &Layout,
    also: &[vmferry_wire::RegionRun],
) -> Result<PageSet, String> {
    for name in also {
        let run = vmferry_core::PageRun::from(name.first..name.first.saturating_add(name.count));
        let pages = layout.region(name.region).map_or(0, vmferry_core::Region::pages);
        match pending.region_mut(name.region) {
            Some(map) if run.end() <= pages => map.set_range(run.range()),
            _ => return Err(format!("the target asks for {run} of {}, which does not exist", name.region)),
        }
    }
    Ok(pending)
}

/// Returns the error for a request for a page that does not exist.
fn no_such_page(region: RegionId, page: u64) -> SenderError {
    SenderError::Vm(VmError::new(format!(
        "the target asks for page {page:#x} of {region}, which does not exist"
    )))
}

#[cfg(test)]
mod tests;
