//! Content of a mapping of this process, and huge pages (`madvise(2)`).

use crate::error::{common, need_small_pages};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;

/// Allows or forbids transparent huge pages for the mapped bytes `span`.
///
/// Forbidding does not split existing huge pages, but no new one is created: neither by a fault nor
/// by the kernel's collapsing of small pages.
///
/// # Errors
/// Returns an error if not all of `span` is mapped. `EINVAL` means that the kernel has no
/// transparent huge pages.
pub fn allow_huge_pages(span: Range<u64>, allow: bool) -> Result<(), SysError> {
    let (call, advice) = if allow {
        ("madvise(MADV_HUGEPAGE)", libc::MADV_HUGEPAGE)
    } else {
        ("madvise(MADV_NOHUGEPAGE)", libc::MADV_NOHUGEPAGE)
    };
    // SAFETY: the advice changes how memory is backed, not its content.
    unsafe { advise(call, span, advice, common) }
}

/// Drops the private anonymous pages at `span`, whether they are in memory or swapped out. The
/// pages are missing afterwards, and read as zeros unless a userfaultfd handles their faults.
///
/// # Errors
/// Returns an error if not all of `span` is mapped, or a page is locked (`mlock`). Pages at lower
/// addresses than the failing one may have been dropped.
///
/// # Safety
/// The caller owns the content of `span`, which is private and anonymous memory, and no Rust
/// reference covers it.
pub unsafe fn drop_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock); demand paging cannot use locked memory",
        libc::ENOMEM => "not all of it is mapped",
        other => common(other),
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Removes the pages at `span`, in a shared mapping of a memfd of huge pages, from this mapping.
/// The file keeps the pages, and an access maps them again.
///
/// # Errors
/// Returns an error if not all of `span` is mapped, or a page is locked (`mlock`). Also before
/// Linux 5.18, which cannot remove huge pages this way.
///
/// # Safety
/// `span` is a shared mapping of a file (for private memory the call would drop the content), and
/// no Rust reference covers it.
pub unsafe fn unmap_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock), or this kernel is older than 5.18",
        other => common(other),
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Lets the kernel reclaim the private anonymous pages at `span` when it needs memory
/// (`MADV_FREE`). The pages keep their content until the kernel reclaims them, and read as zeros
/// afterwards. A write to a page keeps it.
///
/// # Errors
/// Returns an error in the cases of [`drop_pages`].
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

/// Calls `madvise` for `span`.
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
    fn advice_on_unmapped_addresses_is_an_error() {
        if vmferry_testkit::skip_if_emulated("MADV_HUGEPAGE") {
            return;
        }
        // Linux maps nothing at such low addresses.
        let error = allow_huge_pages(4096..8192, true).unwrap_err();
        assert!(matches!(error.errno(), Some(libc::ENOMEM | libc::EINVAL)), "{error}");
    }
}
