//! Mappings of this process: advice about them (`madvise(2)`), which drops and populates pages and
//! controls transparent huge pages, and their replacement at the same addresses (`mmap(2)`).

use crate::error::{common, need_small_pages};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Sharing of the pages of a file mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// A write changes the file (`MAP_SHARED`).
    Shared,
    /// A write copies the page for this mapping, and the file keeps its page (`MAP_PRIVATE`).
    Private,
}

/// Alignment at which the kernel moves a whole page of page-table entries at a time.
const GIB: usize = 1 << 30;
const MMAP: &str = "mmap";
/// Number of bytes that are unmapped at a time. Other threads that map memory wait meanwhile.
const UNMAP_BYTES: usize = 64 << 20;

/// Old mapping that [`replace`] has moved to other addresses. Dropping the value unmaps it, which
/// takes time for each of its pages.
#[derive(Debug)]
#[must_use = "dropping the old mapping takes time for each of its pages"]
pub struct Retired {
    start: usize,
    len: usize,
}

impl Drop for Retired {
    fn drop(&mut self) {
        for at in (0..self.len).step_by(UNMAP_BYTES) {
            let start = std::ptr::without_provenance_mut(self.start + at);
            // SAFETY: the range belongs to this value, and nothing else refers to it.
            unsafe { libc::munmap(start, UNMAP_BYTES.min(self.len - at)) };
        }
    }
}

/// Replaces what is mapped at the addresses `span`, which is one mapping, by a readable and
/// writable mapping of `file` from `offset` on. Returns the old mapping.
///
/// The time that the call takes hardly depends on the number of mapped pages: the kernel moves the
/// page tables of the old mapping to other addresses (`MREMAP_DONTUNMAP`), and touches no page of
/// the new mapping. Linux before 5.13 cannot move the page tables of a file, and removes each
/// entry.
///
/// A thread that accesses the addresses at the same time accesses the old mapping, the new mapping
/// or, for some microseconds, a mapping of the old file without the pages that were written
/// privately. Advice about the old mapping does not apply to the new one.
///
/// # Errors
/// Returns an error if `span` or `offset` is not whole pages, or if the file cannot be mapped in
/// this way. The old mapping is then unchanged: the function first maps the file at other
/// addresses, and replaces the old mapping only if that mapping succeeds.
///
/// # Safety
/// The owner of the mapping at `span` permits the replacement. Its content may be replaced, and no
/// Rust reference covers it.
pub unsafe fn replace(
    span: Range<u64>,
    file: BorrowedFd<'_>,
    offset: u64,
    sharing: Sharing,
) -> Result<Option<Retired>, SysError> {
    let new = NewMapping::new(&span, file, offset, sharing)?;
    // SAFETY: the caller guarantees that the mapping at these addresses may be replaced.
    let retired = unsafe { retire(new.start, new.len, new.len) };
    // SAFETY: as above.
    if let Err(error) = unsafe { new.put() } {
        if let Some(old) = retired {
            let (from, to) = (std::ptr::without_provenance_mut(old.start), new.start);
            let to = std::ptr::without_provenance_mut::<libc::c_void>(to);
            // SAFETY: moves the old mapping back to its addresses.
            unsafe { libc::mremap(from, old.len, old.len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to) };
            std::mem::forget(old);
        }
        return Err(error);
    }
    Ok(retired)
}

/// Replaces what is mapped at the addresses `span` as [`replace`] does, and unmaps it at once.
///
/// The call takes time for each page of the old mapping, and is faster than [`replace`] if the old
/// mapping has no pages: KVM looks for its entries once, and not twice.
///
/// # Errors
/// Returns an error as [`replace`]. If the kernel has too little memory for the replacement, the
/// old mapping may be gone.
///
/// # Safety
/// The owner of the mapping at `span` permits the replacement. Its content may be replaced, and no
/// Rust reference covers it.
pub unsafe fn replace_unused(
    span: Range<u64>,
    file: BorrowedFd<'_>,
    offset: u64,
    sharing: Sharing,
) -> Result<(), SysError> {
    // SAFETY: the caller guarantees that the mapping at these addresses may be replaced.
    unsafe { NewMapping::new(&span, file, offset, sharing)?.put() }
}

/// Mapping of a file that is known to be possible at other addresses.
struct NewMapping<'a> {
    start: usize,
    len: usize,
    file: BorrowedFd<'a>,
    offset: libc::off_t,
    kind: libc::c_int,
}

impl<'a> NewMapping<'a> {
    /// Checks the arguments, and maps the file for a moment at addresses of the kernel's choice.
    fn new(span: &Range<u64>, file: BorrowedFd<'a>, offset: u64, sharing: Sharing) -> Result<Self, SysError> {
        need_small_pages(MMAP)?;
        let pages = [span.start, span.end, offset].iter().all(|number| number.is_multiple_of(PAGE_SIZE));
        let parts = (
            usize::try_from(span.start),
            usize::try_from(span.end.saturating_sub(span.start)),
            libc::off_t::try_from(offset),
        );
        let ((Ok(start), Ok(len), Ok(offset)), true) = (parts, pages) else {
            return Err(SysError::NotPages { call: MMAP, target: named(span.start, span.end) });
        };
        let kind = match sharing {
            Sharing::Shared => libc::MAP_SHARED,
            Sharing::Private => libc::MAP_PRIVATE,
        };
        let new = Self { start, len, file, offset, kind };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let trial = unsafe { new.map(0, 0) }?;
        // SAFETY: mapped above, and nothing refers to it.
        unsafe { libc::munmap(trial, len) };
        Ok(new)
    }

    /// Maps the file at its addresses, instead of what is mapped there.
    ///
    /// # Safety
    /// The old mapping at the addresses may be replaced, and no Rust reference covers it.
    unsafe fn put(&self) -> Result<(), SysError> {
        // SAFETY: the caller guarantees that the mapping at these addresses may be replaced.
        unsafe { self.map(self.start, libc::MAP_FIXED) }.map(|_| ())
    }

    /// Maps the file at `at`, or, without the flag `fixed`, anywhere. Returns the address.
    ///
    /// # Safety
    /// Memory at `at` may be mapped.
    unsafe fn map(&self, at: usize, fixed: libc::c_int) -> Result<*mut libc::c_void, SysError> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_NORESERVE | self.kind | fixed;
        let at = std::ptr::without_provenance_mut(at);
        // SAFETY: the caller guarantees that memory at `at` may be mapped.
        let mapped = unsafe { libc::mmap(at, self.len, access, flags, self.file.as_raw_fd(), self.offset) };
        if mapped != libc::MAP_FAILED {
            return Ok(mapped);
        }
        let target = || named(self.start as u64, (self.start + self.len) as u64);
        Err(SysError::last(MMAP, target, |errno| match errno {
            libc::EPERM => "the file is sealed against this mapping",
            libc::EACCES => "the file is not open for this mapping",
            libc::ENODEV => "the file cannot be mapped",
            libc::ENOMEM => "the process has too many mappings, or the host has not enough memory",
            other => common(other),
        }))
    }
}

fn named(start: u64, end: u64) -> String {
    format!("addresses {start:#x}..{end:#x}")
}

/// Moves the page-table entries of the shared mapping at the addresses `span` to other addresses,
/// while other threads use the mapping. The file keeps its pages, and an access maps a page again.
/// Returns the old entries, or `None` if the kernel cannot move them.
///
/// `part` is the number of bytes whose entries one call of the kernel moves. During such a call,
/// other threads that access the mapping wait, and so do vCPUs that access guest memory in it. The
/// time for the page table of this process is about 0.1 ms for each GiB. KVM removes its own
/// entries, which takes time for each page.
///
/// # Safety
/// `span` lies in one mapping of a file, which is shared, and no Rust reference covers it.
pub unsafe fn move_entries(span: Range<u64>, part: u64) -> Option<Retired> {
    let start = usize::try_from(span.start).ok()?;
    let len = usize::try_from(span.end.checked_sub(span.start)?).ok()?;
    // SAFETY: the mapping stays in place, and an access finds the same bytes in the file.
    unsafe { retire(start, len, usize::try_from(part).ok()?) }
}

/// Moves the pages that are mapped at `start..start + len` to other addresses, `part` bytes at a
/// time. The mapping itself stays at its addresses, without pages. Returns `None` if the kernel
/// cannot do this.
///
/// # Safety
/// The range lies in one mapping whose owner permits the change, and no Rust reference covers it.
unsafe fn retire(start: usize, len: usize, part: usize) -> Option<Retired> {
    let spare = len.checked_add(GIB)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new range of addresses, inaccessible; nothing else refers to it.
    let reserved = unsafe { libc::mmap(std::ptr::null_mut(), spare, libc::PROT_NONE, flags, -1, 0) };
    if reserved == libc::MAP_FAILED {
        return None;
    }
    let first = reserved.addr();
    // The kernel moves a whole page table at a time where both addresses are at the same place in
    // it.
    let head = start.wrapping_sub(first) % GIB;
    let to = Retired { start: first + head, len };
    // SAFETY: unmaps the rest of the reservation, to which nothing refers.
    unsafe {
        if head > 0 {
            libc::munmap(reserved, head);
        }
        libc::munmap(std::ptr::without_provenance_mut(to.start + len), GIB - head);
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    for done in (0..len).step_by(part) {
        let bytes = part.min(len - done);
        let from = std::ptr::without_provenance_mut(start + done);
        let at = std::ptr::without_provenance_mut::<libc::c_void>(to.start + done);
        // SAFETY: the caller guarantees that the mapping may be moved; its new addresses are
        // reserved above.
        if unsafe { libc::mremap(from, bytes, bytes, flags, at) } == libc::MAP_FAILED {
            // What has been moved is unmapped, which a shared mapping permits. A private mapping is
            // moved in one part.
            return None;
        }
    }
    Some(to)
}

/// Allows or forbids transparent huge pages for the addresses `span`.
///
/// Forbidding them does not split existing huge pages. It prevents new ones, both on a fault and
/// when the kernel would collapse small pages.
///
/// # Errors
/// Returns an error if `span` is not whole pages, or if not all of it is mapped. `EINVAL` means
/// that the kernel has no transparent huge pages.
pub fn allow_huge_pages(span: Range<u64>, allow: bool) -> Result<(), SysError> {
    let (call, advice) = if allow {
        ("madvise(MADV_HUGEPAGE)", libc::MADV_HUGEPAGE)
    } else {
        ("madvise(MADV_NOHUGEPAGE)", libc::MADV_NOHUGEPAGE)
    };
    // SAFETY: the advice changes how memory is backed, not its content.
    unsafe { advise(call, span, advice, common) }
}

/// Drops the private anonymous pages at the addresses `span`, whether they are in memory or swapped
/// out. Afterwards the pages are missing, and they read as zeros unless a userfaultfd handles their
/// faults.
///
/// # Errors
/// Returns an error if `span` is not whole pages, if not all of it is mapped, or if a page is
/// locked (`mlock`). Pages at lower addresses than the failing one may have been dropped.
///
/// # Safety
/// `span` is private anonymous memory whose content the caller may discard, and no Rust reference
/// covers it.
pub unsafe fn drop_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock); demand paging cannot use locked memory",
        libc::ENOMEM => "not all of it is mapped",
        other => common(other),
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Unmaps the pages at the addresses `span`, which lie in a shared mapping of a memfd of huge
/// pages. The file keeps the pages, and an access maps them again.
///
/// # Errors
/// Returns an error if `span` is not whole pages, if not all of it is mapped, or if a page is
/// locked (`mlock`). Returns `EINVAL` before Linux 5.18, which cannot unmap huge pages in this way.
///
/// # Safety
/// `span` is a shared mapping of a file, and no Rust reference covers it. For private memory, the
/// call would drop the content.
pub unsafe fn unmap_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock), or this kernel is older than 5.18",
        other => common(other),
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Lets the kernel reclaim the private anonymous pages at the addresses `span` when it needs memory
/// (`MADV_FREE`). A page keeps its content until the kernel reclaims it, and reads as zeros
/// afterwards. If the page is written before that, the kernel no longer reclaims it.
///
/// # Errors
/// Returns an error in the cases of [`drop_pages`], or if the memory is not private and anonymous.
///
/// # Safety
/// The contract of [`drop_pages`].
pub unsafe fn free_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock), or not private and anonymous",
        libc::ENOMEM => "not all of it is mapped",
        other => common(other),
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { advise("madvise(MADV_FREE)", span, libc::MADV_FREE, meaning) }
}

/// Populates the pages at the addresses `span` for writing (`MADV_POPULATE_WRITE`): the first
/// write to such a page causes no page fault. The content does not change. Transparent huge pages
/// are used where the mapping allows them.
///
/// If a userfaultfd handles the missing pages of the mapping, the call waits for each of them like
/// any other access.
///
/// # Errors
/// Returns an error if `span` is not whole pages, if not all of it is mapped, or if the host has
/// not enough memory. `EINVAL` means that the mapping is not writable, or that the kernel is older
/// than 5.14. Pages at lower addresses than the failing one may have been populated.
pub fn populate(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is not writable, or this kernel is older than 5.14",
        libc::EFAULT => "the host has no page for the memory",
        libc::ENOMEM => "not all of it is mapped, or the host has not enough free memory",
        other => common(other),
    };
    populate_by("madvise(MADV_POPULATE_WRITE)", libc::MADV_POPULATE_WRITE, &span, meaning)
}

/// Populates the pages at the addresses `span` for reading (`MADV_POPULATE_READ`): untouched pages
/// of private anonymous memory get an entry in the page table, which refers to a page of zeros that
/// the whole host shares. The content does not change.
///
/// # Errors
/// Returns an error in the cases of [`populate`]. `EINVAL` means that the mapping is not readable,
/// or that the kernel is older than 5.14.
pub fn populate_for_reading(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is not readable, or this kernel is older than 5.14",
        libc::EFAULT => "the host has no page for the memory",
        libc::ENOMEM => "not all of it is mapped, or the host has not enough free memory",
        other => common(other),
    };
    populate_by("madvise(MADV_POPULATE_READ)", libc::MADV_POPULATE_READ, &span, meaning)
}

fn populate_by(
    call: &'static str,
    advice: libc::c_int,
    span: &Range<u64>,
    meaning: impl Fn(i32) -> &'static str,
) -> Result<(), SysError> {
    loop {
        // SAFETY: the advice allocates pages and does not change the content.
        let populated = unsafe { advise(call, span.clone(), advice, &meaning) };
        match populated {
            Err(error) if matches!(error.errno(), Some(libc::EAGAIN | libc::EINTR)) => {}
            done => return done,
        }
    }
}

/// Calls `madvise` for the addresses `span`.
///
/// # Safety
/// The caller guarantees that `advice` is sound for `span`.
unsafe fn advise(
    call: &'static str,
    span: Range<u64>,
    advice: libc::c_int,
    meaning: impl FnOnce(i32) -> &'static str,
) -> Result<(), SysError> {
    need_small_pages(call)?;
    let target = || format!("addresses {:#x}..{:#x}", span.start, span.end);
    let pages = span.start.is_multiple_of(PAGE_SIZE) && span.end.is_multiple_of(PAGE_SIZE);
    let (start, len) = (usize::try_from(span.start), usize::try_from(span.end.saturating_sub(span.start)));
    let (Ok(start), Ok(len), true) = (start, len, pages) else {
        return Err(SysError::NotPages { call, target: target() });
    };
    // SAFETY: the caller guarantees the contract of this function. The call returns an error for an
    // address that is not mapped.
    if unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, advice) } < 0 {
        return Err(SysError::last(call, target, meaning));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn dropped_pages_read_as_zeros_and_other_pages_keep_their_content() {
        let len = 4 * 4096;
        // SAFETY: a new anonymous mapping that this test owns.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let (start, base) = start.map(|start| (start.cast::<u8>(), start.addr() as u64)).unwrap();
        // SAFETY: the address is inside the mapping.
        (0..4).for_each(|page| unsafe { start.add(page * 4096).write_volatile(7) });
        allow_huge_pages(base..base + 4 * 4096, false)
            .or_else(|error| if error.errno() == Some(libc::EINVAL) { Ok(()) } else { Err(error) })
            .unwrap();
        // SAFETY: this test owns the mapping, and no reference to it exists.
        unsafe { drop_pages(base + 4096..base + 3 * 4096) }.unwrap();
        // SAFETY: the address is inside the mapping.
        let held: Vec<u8> = (0..4).map(|page| unsafe { start.add(page * 4096).read_volatile() }).collect();
        assert_eq!(held, [7, 0, 0, 7]);
        // SAFETY: the arguments are rejected before any call is made.
        assert!(matches!(unsafe { drop_pages(base + 1..base + 4096) }, Err(SysError::NotPages { .. })));
        // SAFETY: this test owns the mapping and does not use it any more.
        unsafe { munmap(start.cast(), len) }.unwrap();
    }

    #[test]
    fn replaced_mapping_has_the_content_of_the_file_and_keeps_its_writes_to_itself() {
        use std::os::fd::AsFd;
        let len = 4 * 4096;
        let file = rustix::fs::memfd_create("replace", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 5 * 4096).unwrap();
        rustix::io::pwrite(&file, &[9], 2 * 4096).unwrap();
        // SAFETY: a new anonymous mapping that this test owns.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let (start, base) = start.map(|start| (start.cast::<u8>(), start.addr() as u64)).unwrap();
        let (span, first) = (base..base + 4 * 4096, || {
            // SAFETY: the addresses are inside the mapping.
            (0..4).map(|page| unsafe { start.add(page * 4096).read_volatile() }).collect::<Vec<_>>()
        });
        // SAFETY: as above.
        unsafe { start.write_volatile(7) };
        // SAFETY: this test owns the mapping, here and below.
        assert!(unsafe { replace(span.clone(), file.as_fd(), 1, Sharing::Private) }.is_err());
        let (reader, _writer) = std::io::pipe().unwrap();
        // SAFETY: as above.
        let error = unsafe { replace(span.clone(), reader.as_fd(), 0, Sharing::Private) }.unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV), "{error}");
        assert_eq!(first(), [7, 0, 0, 0], "a failed replacement changes nothing");
        // SAFETY: as above.
        drop(unsafe { replace(span.clone(), file.as_fd(), 4096, Sharing::Private) }.unwrap());
        assert_eq!(first(), [0, 9, 0, 0]);
        // SAFETY: as above.
        unsafe { start.write_volatile(5) };
        // SAFETY: as above.
        drop(unsafe { replace(span.clone(), file.as_fd(), 4096, Sharing::Shared) }.unwrap());
        assert_eq!(first(), [0, 9, 0, 0], "the private write did not reach the file");
        // SAFETY: as above.
        unsafe { start.write_volatile(6) };
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 4096).unwrap();
        assert_eq!(byte, [6]);
        // SAFETY: as above.
        assert!(unsafe { replace_unused(span.clone(), reader.as_fd(), 0, Sharing::Shared) }.is_err());
        assert_eq!(first(), [6, 9, 0, 0], "a failed replacement changes nothing");
        // SAFETY: as above.
        unsafe { replace_unused(span, file.as_fd(), 0, Sharing::Shared) }.unwrap();
        assert_eq!(first(), [0, 6, 9, 0]);
        // SAFETY: this test owns the mapping and does not use it any more.
        unsafe { munmap(start.cast(), len) }.unwrap();
    }

    #[test]
    fn advice_on_unmapped_addresses_is_an_error() {
        if vmferry_testkit::skip_if_emulated("MADV_HUGEPAGE") {
            return;
        }
        // Linux maps nothing at such low addresses.
        let error = allow_huge_pages(4096..8192, true).unwrap_err();
        assert!(matches!(error.errno(), Some(libc::ENOMEM | libc::EINVAL)), "{error}");
    }
}
