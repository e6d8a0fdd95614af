//! Memory for the tests of the trackers.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_core::{PAGE_BYTES, PageRun, RegionId, Window};
use vmferry_dirty::{Backing, MappedRegion};

/// Backing of a test's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Anonymous memory with small pages only.
    Small,
    /// Anonymous memory with huge pages where they fit.
    Huge,
    /// Memfd, mapped shared.
    Memfd,
    /// Memfd of huge pages of the host's pool, mapped shared.
    Pool,
}

/// Mapping of whole huge pages.
pub(crate) struct Memory {
    kind: Kind,
    mapped: *mut std::ffi::c_void,
    mapped_len: usize,
    start: NonNull<u8>,
    pub(crate) pages: u64,
    pub(crate) file: Option<Arc<OwnedFd>>,
}

// SAFETY: the value owns the mapping, whose bytes are only accessed through atomics and windows.
unsafe impl Send for Memory {}
// SAFETY: the value owns the mapping, whose bytes are only accessed through atomics and windows.
unsafe impl Sync for Memory {}

const HUGE: usize = 2 << 20;

impl Memory {
    pub(crate) fn new(kind: Kind, pages: u64) -> Self {
        let len = usize::try_from(pages).unwrap() * PAGE_BYTES;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let file = [Kind::Memfd, Kind::Pool].contains(&kind).then(|| {
            use rustix::fs::MemfdFlags;
            let of = if kind == Kind::Pool {
                MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
            } else {
                MemfdFlags::empty()
            };
            let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC | of).unwrap();
            rustix::fs::ftruncate(&fd, len as u64).unwrap();
            Arc::new(fd)
        });
        let mapped_len = len + if file.is_some() { 0 } else { HUGE };
        let mapped = match &file {
            // SAFETY: a new mapping at an address that the kernel chooses.
            Some(fd) => unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0) },
            // SAFETY: a new mapping at an address that the kernel chooses.
            None => unsafe {
                mmap_anonymous(
                    std::ptr::null_mut(),
                    mapped_len,
                    access,
                    MapFlags::PRIVATE | MapFlags::NORESERVE,
                )
            },
        }
        .unwrap();
        let skip = if file.is_some() { 0 } else { mapped.cast::<u8>().align_offset(HUGE) };
        // SAFETY: the mapping is larger than `len` by the largest possible value of `skip`.
        let start = unsafe { mapped.cast::<u8>().add(skip) };
        let advice = if kind == Kind::Huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: this value owns the range. A kernel without huge pages refuses, which changes
        // nothing.
        let _ = unsafe { madvise(start.cast(), len, advice) };
        Self { kind, mapped, mapped_len, start: NonNull::new(start).unwrap(), pages, file }
    }

    pub(crate) fn host(&self) -> u64 {
        self.start.addr().get() as u64
    }

    pub(crate) fn region(&self, id: u32) -> MappedRegion {
        let backing = match &self.file {
            Some(_) if self.kind == Kind::Pool => Backing::Other,
            Some(file) => Backing::Memfd { file: Arc::clone(file), offset: 0 },
            None => Backing::Anonymous,
        };
        let (marks, returned_pages) = (None, None);
        MappedRegion {
            id: RegionId(id),
            host: self.host(),
            len: self.pages * 4096,
            backing,
            marks,
            returned_pages,
        }
    }

    /// Returns the word at the start of `page`.
    pub(crate) fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < self.pages);
        let offset = usize::try_from(page).unwrap() * PAGE_BYTES;
        // SAFETY: the page is in the mapping, aligned, and accessed through atomics and windows
        // only.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    pub(crate) fn write(&self, page: u64, value: u64) {
        self.word(page).store(value, Ordering::Relaxed);
    }

    pub(crate) fn window(&self) -> Window<'_> {
        // SAFETY: mapped for as long as `self` lives, and no references to the bytes exist except
        // to atomics.
        unsafe { Window::new(self.start, usize::try_from(self.pages).unwrap() * PAGE_BYTES) }
    }

    pub(crate) fn page(&self, page: u64) -> [u8; PAGE_BYTES] {
        let mut copy = [0; PAGE_BYTES];
        self.window().copy_page(usize::try_from(page).unwrap(), &mut copy);
        copy
    }

    /// Drops `run` from this mapping.
    pub(crate) fn drop_pages(&self, run: PageRun) {
        let start = self.window().as_ptr().wrapping_add(usize::try_from(run.first.offset()).unwrap());
        // SAFETY: the pages are in this mapping, and their content may be lost.
        unsafe { madvise(start.cast(), usize::try_from(run.bytes()).unwrap(), Advice::LinuxDontNeed) }
            .unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nothing borrows it any more.
        unsafe { munmap(self.mapped, self.mapped_len) }.unwrap();
    }
}

/// Returns the next random number of splitmix64, which is random enough to choose pages.
pub(crate) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
