//! Pages of a guest that runs on the target already: those that it waits for, and the rest.
//!
//! | module | sends |
//! |---|---|
//! | `urgent` | a page that the guest waits for: the thread that reads the request sends the page at once |
//! | `rest` | all other pages, in order, on the bulk channels |
//! | `baselines` | urgent pages on two published paths, kept for comparison |
//!
//! Memory is frozen, so any thread can read a page at any time, and there is one version of each
//! page. No page may be sent twice. Therefore a thread claims each page by an atomic bit before it
//! sends the page.

mod baselines;
mod rest;
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

/// Pages that a bulk thread takes to itself at a time: the target's huge pages, so that their parts come together. Within
/// them it claims 64 at a time, right before it sends them.
const CHUNK_PAGES: u64 = 512;

/// Time of its pace that a bulk channel may have on its way out of this host.
const AT_ONCE: Duration = Duration::from_micros(500);

/// The bytes that a channel sends within [`AT_ONCE`] at `rate` bytes a second: at least a page and its headers, at most a
/// frame of 64.
pub(crate) fn unsent_bytes(rate: u64) -> u64 {
    let bytes = u128::from(rate) * AT_ONCE.as_nanos() / 1_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX).clamp(2 * PAGE_SIZE, 64 * PAGE_SIZE)
}

/// Factor by which a bulk frame near the guest is shorter than others. It costs more, and a vCPU that needs a page of it
/// waits less.
const NEAR: u64 = 4;

/// Page that the guest waits for, and pages that it may need next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) region: usize,
    pub(crate) page: u64,
    pub(crate) ahead: u16,
    pub(crate) again: bool,
}

/// The pages that the target lacks, for one set of channels: when these are lost, so are the claims, and the target says
/// anew what it lacks.
#[derive(Debug)]
pub(crate) struct Claims {
    pub(crate) regions: Vec<(RegionId, ClaimBitmap)>,
    /// Chunks that no bulk thread has taken, counted over all regions.
    chunks: ClaimBitmap,
    /// Below it all chunks are taken.
    cursor: AtomicU64,
    /// Where a guest that walks through memory is, as far as its faults tell: a number of a page counted from the first chunk, plus 1; 0 for nowhere.
    near: AtomicU64,
    /// Queue of requests for the bulk threads; `None` on the dedicated path.
    baseline: Option<BulkQueue>,
    /// Most pages of a bulk frame.
    frame_pages: AtomicU64,
    /// Pages never touched on this side read as zeros on the other: looked up before they are read. False if all that
    /// is lacking was written.
    pub(crate) look_up_untouched: bool,
}

/// A bulk thread's piece of work.
#[derive(Debug, Clone)]
struct Chunk {
    /// Position of its region.
    region: usize,
    pages: Range<u64>,
    /// `pages.start <= from <= pages.end`: where to begin; what lies before comes last.
    from: u64,
    /// The guest may come to need these soon, and wait for a frame that one of them is in.
    near: bool,
}

/// Returns the number of chunks that `pages` pages are.
fn chunks(pages: u64) -> u64 {
    pages.div_ceil(CHUNK_PAGES)
}

impl Claims {
    pub(crate) fn new(lacking: &PageSet, path: UrgentPath, look_up_untouched: bool) -> Self {
        Self {
            regions: lacking.iter().map(|(id, map)| (id, ClaimBitmap::new(map))).collect(),
            chunks: ClaimBitmap::new(&Bitmap::full(lacking.iter().map(|(_, map)| chunks(map.len())).sum())),
            cursor: AtomicU64::new(0),
            near: AtomicU64::new(0),
            baseline: BulkQueue::of(path),
            frame_pages: AtomicU64::new(64),
            look_up_untouched,
        }
    }

    /// Most pages of a bulk frame: 1 to 64; fewer `near` the guest, which may come to wait for the whole frame.
    fn frame_pages(&self, near: bool) -> u64 {
        let pages = self.frame_pages.load(Ordering::Relaxed);
        if near { pages.div_ceil(NEAR) } else { pages }
    }

    /// Makes bulk frames as long as a channel takes `AT_ONCE` for at `rate` bytes a second. Its pages are on their way from
    /// the claim until the frame's end has arrived, and a vCPU that needs one of them waits for as long.
    pub(crate) fn fit_frames(&self, rate: u64) {
        let pages = unsent_bytes(rate) / PAGE_SIZE;
        self.frame_pages.store(pages.clamp(1, 64), Ordering::Relaxed);
    }

    /// Returns the number of pages that no thread has claimed.
    pub(crate) fn left(&self) -> u64 {
        self.regions.iter().map(|(_, map)| map.left()).sum()
    }

    /// The position of region `id`.
    pub(crate) fn position(&self, id: RegionId) -> Option<usize> {
        self.regions.iter().position(|(own, _)| *own == id)
    }

    /// The guest walks through memory and is about to come to this page, which need not exist: what lies behind it is next.
    fn guest_runs_on(&self, region: usize, page: u64) {
        let page = page.min(self.regions[region].1.len().saturating_sub(1));
        let before: u64 = self.regions[..region].iter().map(|(_, map)| chunks(map.len())).sum();
        // A hint: the last one wins, and one that is lost costs a fault.
        self.near.store(before * CHUNK_PAGES + page + 1, Ordering::Relaxed);
    }

    /// The next piece of work for a bulk thread that no other has: where the guest is, or right behind, or else the first that is
    /// left.
    fn next_chunk(&self) -> Option<Chunk> {
        if let Some(page) = self.near.swap(0, Ordering::Relaxed).checked_sub(1) {
            let number = page / CHUNK_PAGES;
            if number < self.chunks.len() && self.chunks.take(number) {
                // Another thread goes on behind it, unless a fault tells otherwise.
                let behind = (number + 1) * CHUNK_PAGES + 1;
                let _ = self.near.compare_exchange(0, behind, Ordering::Relaxed, Ordering::Relaxed);
                return self.chunk(number, page % CHUNK_PAGES);
            }
            let behind = number + 1;
            if behind < self.chunks.len() && self.chunks.take(behind) {
                return self.chunk(behind, 0);
            }
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

    /// Chunk `number`, near the guest, from its page `from` on.
    fn chunk(&self, mut number: u64, from: u64) -> Option<Chunk> {
        for (region, (_, map)) in self.regions.iter().enumerate() {
            if number < chunks(map.len()) {
                let first = number * CHUNK_PAGES;
                let pages = first..(first + CHUNK_PAGES).min(map.len());
                // Claims are made word by word.
                let from = (first + from / 64 * 64).min(pages.end);
                return Some(Chunk { region, pages, from, near: true });
            }
            number -= chunks(map.len());
        }
        None
    }
}

/// The pages to hand over: all that were still to be sent, and those that `also` names.
pub(crate) fn lacking(
    mut pending: PageSet,
    layout: &Layout,
    also: &[vmferry_wire::RunName],
) -> Result<PageSet, String> {
    for name in also {
        let run = vmferry_core::PageRun::from(name.first..name.first.saturating_add(name.count));
        let pages = layout.region(name.region).map_or(0, vmferry_core::Region::pages);
        match pending.region_mut(name.region) {
            Some(map) if run.end() <= pages => map.set_range(run.range()),
            _ => return Err(format!("the target asks for {run} of {}, which is not there", name.region)),
        }
    }
    Ok(pending)
}

/// A request for something that is not there.
fn not_there(region: RegionId, page: u64) -> SenderError {
    SenderError::Vm(VmError::new(format!(
        "the target asks for page {page:#x} of {region}, which is not there"
    )))
}

#[cfg(test)]
mod tests;
