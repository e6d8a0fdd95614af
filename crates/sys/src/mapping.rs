//! Mappings of this process: advice about them (`madvise(2)`) for dropping and populating pages and
//! for transparent huge pages, and replacing a mapping by one of a file.

use crate::error::{common, need_small_pages};
use crate::{PAGE_SIZE, SysError};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use std::ops::Range;
use std::os::fd::BorrowedFd;

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
    loop {
        // SAFETY: the advice allocates pages and does not change the content.
        let populated = unsafe {
            advise("madvise(MADV_POPULATE_WRITE)", span.clone(), libc::MADV_POPULATE_WRITE, meaning)
        };
        match populated {
            Err(error) if matches!(error.errno(), Some(libc::EAGAIN | libc::EINTR)) => {}
            done => return done,
        }
    }
}

/// Replaces the mapping at the addresses `span` by a shared mapping of `file` from `offset` on,
/// readable and writable. What was mapped there before is unmapped. The kernel's users of the
/// addresses, such as KVM, notice the change.
///
/// The file is first mapped elsewhere, so that a file that cannot be mapped leaves the old mapping
/// as it was. (`mmap` with `MAP_FIXED` may have removed the old mapping before it fails.)
///
/// # Errors
/// Returns an error if `span` is not whole pages, or if the file cannot be mapped. A memfd of huge
/// pages can be mapped only at addresses that are multiples of its page size.
///
/// # Safety
/// The caller owns all of `span`, no Rust reference covers it, and no thread writes it during the
/// call. A thread that reads it meanwhile gets the old or the new content, because the addresses
/// are mapped all the time. The file must not become shorter than the mapping.
pub unsafe fn replace(span: Range<u64>, file: BorrowedFd<'_>, offset: u64) -> Result<(), SysError> {
    let call = "mmap";
    need_small_pages(call)?;
    let target = || format!("a file at addresses {:#x}..{:#x}", span.start, span.end);
    let pages = span.start.is_multiple_of(PAGE_SIZE) && span.end.is_multiple_of(PAGE_SIZE);
    let (start, len) = (usize::try_from(span.start), usize::try_from(span.end.saturating_sub(span.start)));
    let (Ok(start), Ok(len), true) = (start, len, pages) else {
        return Err(SysError::NotPages { call, target: target() });
    };
    let failed = |call, error: rustix::io::Errno| SysError::from_io(call, target(), error.into(), common);
    let (access, nowhere) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe { rustix::mm::mmap(nowhere, len, access, MapFlags::SHARED, file, offset) };
    let mapped = mapped.map_err(|error| failed(call, error))?;
    let place = std::ptr::without_provenance_mut(start);
    // SAFETY: moves the new mapping, to which nothing refers, over `span`, which the caller owns.
    let moved = unsafe { rustix::mm::mremap_fixed(mapped, len, len, MremapFlags::MAYMOVE, place) };
    moved.map(drop).map_err(|error| {
        // SAFETY: the new mapping was not moved, and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(mapped, len) };
        failed("mremap", error)
    })
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
    fn replaced_mapping_shows_the_file_at_the_same_address() {
        use rustix::fs::MemfdFlags;
        use std::os::fd::AsFd;
        let len = 4 * 4096;
        // SAFETY: a new anonymous mapping that this test owns.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let (start, base) = start.map(|start| (start.cast::<u8>(), start.addr() as u64)).unwrap();
        // SAFETY: the address is inside the mapping.
        (0..4).for_each(|page| unsafe { start.add(page * 4096).write_volatile(7) });
        let file = rustix::fs::memfd_create("replace", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * 4096).unwrap();
        rustix::io::pwrite(&file, &[9], 2 * 4096).unwrap();
        // SAFETY: this test owns the pages, and no reference to them exists.
        unsafe { replace(base + 4096..base + 3 * 4096, file.as_fd(), 4096) }.unwrap();
        // SAFETY: the address is inside the mapping.
        let held: Vec<u8> = (0..4).map(|page| unsafe { start.add(page * 4096).read_volatile() }).collect();
        assert_eq!(held, [7, 0, 9, 7]);
        // SAFETY: the address is inside the mapping of the file.
        unsafe { start.add(4096).write_volatile(5) };
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 4096).unwrap();
        assert_eq!(byte, [5]);
        let (reader, _writer) = std::io::pipe().unwrap();
        // SAFETY: as above. A pipe cannot be mapped.
        assert!(unsafe { replace(base..base + 4096, reader.as_fd(), 0) }.is_err());
        // SAFETY: the address is inside the mapping, which the failed call left as it was.
        assert_eq!(unsafe { start.read_volatile() }, 7);
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
