//! Demand paging for memory made of huge pages (hugetlbfs): the 4 KiB pages arrive one by one, and
//! a huge page is mapped when it is complete.
//!
//! The kernel maps a huge page as a whole or not at all, so an arriving page cannot be placed where
//! the guest sees it. The page is written through a second mapping of the same file, the alias,
//! which raises no faults. When no page of a huge page is missing any more, the huge page is mapped
//! for the guest (`UFFDIO_CONTINUE`), and the threads that sleep on it wake.
//!
//! # Pages are never overwritten and never visible before their huge page is complete
//! One thread takes a page out of `untaken`, writes it, and then decrements `left` with release
//! ordering. The thread that decrements `left` to 0, with acquire ordering, maps the huge page.
//! Therefore a page that arrives twice is written once, and no thread writes a page that the guest
//! may see.

use crate::error::FaultError;
use crate::region::{Backing, PagedRegion};
use crate::shards::ShardedRegion;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use vmferry_bitmap::{Bitmap, ClaimBitmap};
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageRun, Placed, RegionId, Window};
use vmferry_sys::{mapping, memfd};

/// Number of 4 KiB pages in a huge page of 2 MiB, the only supported size.
pub(crate) const BLOCK_PAGES: u64 = 512;
/// Number of bytes in a huge page.
const BLOCK_BYTES: u64 = BLOCK_PAGES * PAGE_SIZE;

/// Region of huge pages.
#[derive(Debug)]
pub(crate) struct Blocks {
    id: RegionId,
    file: Arc<OwnedFd>,
    offset: u64,
    alias: Alias,
    /// State while pages are missing. Threads that place pages lock it for reading, which excludes
    /// only `begin` and `end`.
    missing: RwLock<Option<Missing>>,
}

/// State of the missing pages. For each block: 0 <= number of its pages in `untaken` <= its `left`.
#[derive(Debug)]
struct Missing {
    /// Missing pages that no thread has begun to write.
    untaken: ClaimBitmap,
    /// Number of missing pages of each block that have not been written.
    left: Vec<AtomicU64>,
    /// Blocks that are known to be allocated in the file.
    present: Vec<AtomicBool>,
}

/// Second mapping of the file.
#[derive(Debug)]
struct Alias {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the value holds an address range that is accessed through raw pointers only (`Window`),
// which any thread may use.
unsafe impl Send for Alias {}
// SAFETY: the value holds an address range that is accessed through raw pointers only (`Window`),
// which any thread may use.
unsafe impl Sync for Alias {}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: mapped by `Blocks::new`, and no other value keeps its address.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Blocks {
    /// Returns the huge pages of `region`, or `None` if the region is not made of huge pages.
    pub(crate) fn new(region: &PagedRegion) -> Result<Option<Self>, FaultError> {
        let Backing::HugeMemfd { file, offset } = &region.backing else { return Ok(None) };
        let id = region.id;
        let failed = |source: rustix::io::Errno| FaultError::Alias { region: id, source: source.into() };
        let size = rustix::fs::fstat(file).map_err(failed)?.st_blksize;
        let whole = [region.host, region.len, *offset].iter().all(|at| at.is_multiple_of(BLOCK_BYTES));
        if u64::try_from(size).ok() != Some(BLOCK_BYTES) || !whole {
            return Err(FaultError::Regions(format!(
                "{id} of {} bytes at {:#x} in huge pages of {size} bytes: they must be 2 MiB, and whole",
                region.len, region.host
            )));
        }
        let len = usize::try_from(region.len).map_err(|_| failed(rustix::io::Errno::NOMEM))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses. The mapping reserves nothing
        // from the host's pool: `memfd::populate`, which may fail, allocates a page before it is
        // accessed.
        let start = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(std::ptr::null_mut(), len, access, flags, file, *offset)
        };
        let start = NonNull::new(start.map_err(failed)?.cast()).ok_or(failed(rustix::io::Errno::NOMEM))?;
        let alias = Alias { start, len };
        Ok(Some(Self { id, file: Arc::clone(file), offset: *offset, alias, missing: RwLock::new(None) }))
    }

    /// Makes the pages of `missing` missing. Each huge page with a missing page is removed from the
    /// mapping at `place`, which is registered.
    ///
    /// # Safety
    /// No Rust reference covers the region's bytes, and `place` has the addresses at which they are
    /// mapped.
    pub(crate) unsafe fn begin(&self, place: &ShardedRegion, missing: &Bitmap) -> Result<(), FaultError> {
        let block = |number| number * BLOCK_PAGES..(number + 1) * BLOCK_PAGES;
        let blocks = 0..place.pages / BLOCK_PAGES;
        let left: Vec<u64> = blocks.map(|number| missing.count_range(block(number))).collect();
        let mut first = 0;
        // One call for each run of blocks: each call blocks all faults of this process for a
        // moment.
        for blocks in left.chunk_by(|one, next| (*one > 0) == (*next > 0)) {
            let end = first + blocks.len() as u64 * BLOCK_PAGES;
            if blocks[0] > 0 {
                // SAFETY: a shared mapping of the file (as its backing says). The caller guarantees
                // the rest.
                let unmapped = unsafe { mapping::unmap_pages(place.span((first..end).into())) };
                unmapped.map_err(FaultError::host(self.id))?;
            }
            first = end;
        }
        let present = left.iter().map(|_| AtomicBool::new(false)).collect();
        let left = left.into_iter().map(AtomicU64::new).collect();
        let untaken = ClaimBitmap::new(missing.clone());
        *self.missing.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Missing { untaken, left, present });
        Ok(())
    }

    /// Ends demand paging for the region. Pages that are still missing read as zeros after the
    /// region has been unregistered.
    pub(crate) fn end(&self) -> Result<(), FaultError> {
        let mut missing = self.missing.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(missing) = &*missing {
            // The file still has the content that a page had before it was missing.
            for run in missing.untaken.snapshot().runs().map(PageRun::from) {
                let start = self.offset + run.first.offset();
                memfd::erase(self.file.as_fd(), start..start + run.bytes())
                    .map_err(FaultError::host(self.id))?;
            }
        }
        *missing = None;
        Ok(())
    }

    /// Writes `bytes`, or zeros, to the missing pages of `run`, which lies in the region. Calls
    /// `show` for each huge page of `run` that is complete, even if it was complete before, because
    /// a thread that sleeps on it may not have been woken.
    pub(crate) fn place(
        &self,
        run: PageRun,
        bytes: Option<&[u8]>,
        show: impl Fn(PageRun) -> Result<(), FaultError>,
    ) -> Result<Placed, FaultError> {
        let missing = self.missing.read().unwrap_or_else(PoisonError::into_inner);
        let missing = missing.as_ref().ok_or(FaultError::NotBegun(self.id))?;
        let mut placed = Placed::default();
        let mut at = run.first.0;
        while at < run.end() {
            let part = at..run.end().min((at / BLOCK_PAGES + 1) * BLOCK_PAGES);
            let number = usize::try_from(at / BLOCK_PAGES).unwrap_or(usize::MAX);
            let content = bytes.map(|bytes| {
                let skip = usize::try_from(at - run.first.0).unwrap_or(usize::MAX);
                &bytes[skip.saturating_mul(PAGE_BYTES)..]
            });
            at = part.end;
            let written = self.write(missing, number, part.clone(), content)?;
            placed.pages += written;
            placed.already_present += part.end - part.start - written;
            let left = missing.left[number].fetch_sub(written, Ordering::AcqRel) - written;
            if left == 0 {
                self.populate(missing, number)?;
                show(block_of(part.start))?;
            }
        }
        Ok(placed)
    }

    /// Writes those pages of `part`, in block `number`, that no thread has taken yet, and returns
    /// the number of written pages.
    fn write(
        &self,
        missing: &Missing,
        number: usize,
        part: std::ops::Range<u64>,
        content: Option<&[u8]>,
    ) -> Result<u64, FaultError> {
        if missing.left[number].load(Ordering::Relaxed) == 0 {
            return Ok(0);
        }
        self.populate(missing, number)?;
        // SAFETY: the alias is mapped, readable and writable, for as long as `self` lives, and is
        // accessed through windows only.
        let window = unsafe { Window::new(self.alias.start, self.alias.len) };
        let mut written = 0;
        for (index, page) in part.enumerate() {
            if !missing.untaken.take(page) {
                continue;
            }
            let own = usize::try_from(page).unwrap_or(usize::MAX);
            let bytes = content.map_or(&[0; PAGE_BYTES][..], |content| &content[index * PAGE_BYTES..]);
            match bytes.first_chunk() {
                Some(bytes) => window.write_page(own, bytes),
                None => unreachable!("`content` has the length of its pages"),
            }
            written += 1;
        }
        Ok(written)
    }

    /// Allocates block `number` in the file.
    fn populate(&self, missing: &Missing, number: usize) -> Result<(), FaultError> {
        if !missing.present[number].load(Ordering::Acquire) {
            let start = self.offset + number as u64 * BLOCK_BYTES;
            memfd::populate(self.file.as_fd(), start..start + BLOCK_BYTES)
                .map_err(FaultError::host(self.id))?;
            missing.present[number].store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// Returns the block that contains `page`.
pub(crate) fn block_of(page: u64) -> PageRun {
    let first = page / BLOCK_PAGES * BLOCK_PAGES;
    PageRun::from(first..first + BLOCK_PAGES)
}
