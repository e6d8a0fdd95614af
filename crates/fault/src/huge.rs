//! Memory made of huge pages (hugetlbfs): its 4 KiB pages come one by one, and a huge page is shown when it is whole.
//!
//! The kernel maps a huge page whole or not at all, so a page that comes cannot be placed where the guest sees it. It is
//! written through a second mapping of the same file, the alias, which makes no faults; when nothing of a huge page is
//! missing any more it is mapped where it belongs (`UFFDIO_CONTINUE`), and who sleeps there wakes.
//!
//! # Never overwritten, never shown before it is whole
//! A page is taken out of `untaken` by one thread, which writes it and then counts it off `left`, with release; who brings
//! `left` to 0, with acquire, shows the huge page. So whatever comes twice is written once, and nobody writes a page that
//! the guest may see.

use crate::error::FaultError;
use crate::region::{Backing, LazyRegion};
use crate::stripes::Place;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use vmferry_bitmap::{Bitmap, ClaimBitmap};
use vmferry_core::{PAGE_BYTES, PAGE_SIZE, PageRun, Placed, RegionId, Window};
use vmferry_sys::{mapping, memfd};

/// 4 KiB pages of a huge page of 2 MiB, the only size here.
pub(crate) const BLOCK_PAGES: u64 = 512;
/// Bytes of a huge page.
const BLOCK_BYTES: u64 = BLOCK_PAGES * PAGE_SIZE;

/// A region of huge pages.
#[derive(Debug)]
pub(crate) struct Blocks {
    id: RegionId,
    file: Arc<OwnedFd>,
    offset: u64,
    alias: Alias,
    /// While pages are missing. Locked for reading by who places, which excludes nobody but the beginning and the end.
    missing: RwLock<Option<Missing>>,
}

/// For each block: 0 <= pages of it in `untaken` <= its `left`.
#[derive(Debug)]
struct Missing {
    /// Missing pages that nobody has begun to write.
    untaken: ClaimBitmap,
    /// Missing pages of each block that have not been written.
    left: Vec<AtomicU64>,
    /// Blocks that the file is known to have.
    there: Vec<AtomicBool>,
}

/// The second mapping.
#[derive(Debug)]
struct Alias {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range, reached by raw pointers only (`Window`), which any thread may use.
unsafe impl Send for Alias {}
// SAFETY: as above.
unsafe impl Sync for Alias {}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: mapped by `Blocks::new`, and nobody keeps its address.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Blocks {
    /// Those of `region`; `None` if it is not made of huge pages.
    pub(crate) fn new(region: &LazyRegion) -> Result<Option<Self>, FaultError> {
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
        // SAFETY: a new mapping at an address of the kernel's choice. It takes nothing from the host's pool: what the
        // file lacks is asked for by `memfd::populate`, which can be refused, before it is touched.
        let start = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            rustix::mm::mmap(std::ptr::null_mut(), len, access, flags, file, *offset)
        };
        let start = NonNull::new(start.map_err(failed)?.cast()).ok_or(failed(rustix::io::Errno::NOMEM))?;
        let alias = Alias { start, len };
        Ok(Some(Self { id, file: Arc::clone(file), offset: *offset, alias, missing: RwLock::new(None) }))
    }

    /// The pages of `missing` are missing from now on, and with each all of its huge page is out of the mapping at `place`,
    /// which is registered.
    ///
    /// # Safety
    /// No Rust reference covers the region's bytes, which `place` says where they are mapped.
    pub(crate) unsafe fn begin(&self, place: &Place, missing: &Bitmap) -> Result<(), FaultError> {
        let block = |number| number * BLOCK_PAGES..(number + 1) * BLOCK_PAGES;
        let blocks = 0..place.pages / BLOCK_PAGES;
        let left: Vec<u64> = blocks.map(|number| missing.count_range(block(number))).collect();
        let mut first = 0;
        // In runs of blocks: each call excludes all faults of this process for a moment.
        for blocks in left.chunk_by(|one, next| (*one > 0) == (*next > 0)) {
            let end = first + blocks.len() as u64 * BLOCK_PAGES;
            if blocks[0] > 0 {
                // SAFETY: a shared mapping of the file (as its backing says); the rest is the caller's promise.
                let unmapped = unsafe { mapping::unmap_pages(place.span((first..end).into())) };
                unmapped.map_err(FaultError::host(self.id))?;
            }
            first = end;
        }
        let there = left.iter().map(|_| AtomicBool::new(false)).collect();
        let left = left.into_iter().map(AtomicU64::new).collect();
        let untaken = ClaimBitmap::new(missing);
        *self.missing.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Missing { untaken, left, there });
        Ok(())
    }

    /// What is still missing reads as zeros from now on, when the region is given back.
    pub(crate) fn end(&self) -> Result<(), FaultError> {
        let mut missing = self.missing.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(missing) = &*missing {
            // What a page held before it was missing is still in the file.
            for run in missing.untaken.snapshot().runs().map(PageRun::from) {
                let start = self.offset + run.first.offset();
                memfd::erase(self.file.as_fd(), start..start + run.bytes())
                    .map_err(FaultError::host(self.id))?;
            }
        }
        *missing = None;
        Ok(())
    }

    /// Writes the pages of `run`, which exist: `bytes`, or zeros. Calls `show` for each huge page that is whole now, or was
    /// before (then somebody may sleep who was not woken).
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
            placed.there += part.end - part.start - written;
            let left = missing.left[number].fetch_sub(written, Ordering::AcqRel) - written;
            if left == 0 {
                self.populate(missing, number)?;
                show(block_of(part.start))?;
            }
        }
        Ok(placed)
    }

    /// Writes those pages of `part`, in block `number`, that nobody has taken; says how many those were.
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
        // SAFETY: the alias is mapped, readable and writable, for as long as self lives, and reached by windows only.
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
                None => unreachable!("`content` is as long as its pages"),
            }
            written += 1;
        }
        Ok(written)
    }

    /// Sees to it that the file has block `number`.
    fn populate(&self, missing: &Missing, number: usize) -> Result<(), FaultError> {
        if !missing.there[number].load(Ordering::Acquire) {
            let start = self.offset + number as u64 * BLOCK_BYTES;
            memfd::populate(self.file.as_fd(), start..start + BLOCK_BYTES)
                .map_err(FaultError::host(self.id))?;
            missing.there[number].store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// The block that `page` is in.
pub(crate) fn block_of(page: u64) -> PageRun {
    let first = page / BLOCK_PAGES * BLOCK_PAGES;
    PageRun::from(first..first + BLOCK_PAGES)
}
