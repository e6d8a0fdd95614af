//! What a mapping of this process holds, and whether in huge pages (`madvise(2)`).

use crate::error::{common, need_small_pages};
use crate::{PAGE_SIZE, SysError};
use std::ops::Range;

/// Allows or forbids transparent huge pages for the mapped bytes `span`. Forbidding splits none that is there, but none
/// comes any more: neither by a fault nor by the kernel's collapsing of small pages.
///
/// # Errors
/// If they are not all mapped. `EINVAL` if the kernel has no transparent huge pages.
pub fn allow_huge_pages(span: Range<u64>, allow: bool) -> Result<(), SysError> {
    let (call, advice) = if allow {
        ("madvise(MADV_HUGEPAGE)", libc::MADV_HUGEPAGE)
    } else {
        ("madvise(MADV_NOHUGEPAGE)", libc::MADV_NOHUGEPAGE)
    };
    // SAFETY: the advice changes how memory is backed, not what it holds.
    unsafe { advise(call, span, advice, common) }
}

/// Drops the private anonymous pages at `span`: they are missing from now on, swapped out or not, and read as zeros if
/// nobody handles their faults.
///
/// # Errors
/// If they are not all mapped, or locked (`mlock`): pages at lower addresses than the one it refused may have been
/// dropped.
///
/// # Safety
/// `span` is memory whose content the caller owns, private and anonymous, and no Rust reference covers it.
pub unsafe fn drop_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock); pages that come later cannot be locked",
        libc::ENOMEM => "not all of it is mapped",
        other => common(other),
    };
    // SAFETY: the caller's promise.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Takes the pages at `span`, a shared mapping of a memfd of huge pages, out of this mapping. The file keeps them: who
/// touches one gets it from there again.
///
/// # Errors
/// If they are not all mapped, or locked; or before Linux 5.18, which does not do this for huge pages.
///
/// # Safety
/// `span` is a shared mapping of a file (of private memory it would drop the content), and no Rust reference covers it.
pub unsafe fn unmap_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock), or this kernel is older than 5.18",
        other => common(other),
    };
    // SAFETY: the caller's promise.
    unsafe { advise("madvise(MADV_DONTNEED)", span, libc::MADV_DONTNEED, meaning) }
}

/// Lets the kernel take the private anonymous pages at `span` when it needs memory (`MADV_FREE`): until it does, or a page is
/// written, they read as before, and from then on as zeros.
///
/// # Errors
/// As for [`drop_pages`].
///
/// # Safety
/// As for [`drop_pages`].
pub unsafe fn free_pages(span: Range<u64>) -> Result<(), SysError> {
    let meaning = |errno| match errno {
        libc::EINVAL => "the memory is locked (mlock), or not private and anonymous",
        libc::ENOMEM => "not all of it is mapped",
        other => common(other),
    };
    // SAFETY: the caller's promise.
    unsafe { advise("madvise(MADV_FREE)", span, libc::MADV_FREE, meaning) }
}

/// # Safety
/// `advice` may be given for `span`.
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
    // SAFETY: the caller's promise. An address that is not mapped is an error of the call.
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
    fn dropped_pages_read_as_zeros_and_the_others_stay() {
        let len = 4 * 4096;
        // SAFETY: a fresh anonymous mapping of our own.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let (start, base) = start.map(|start| (start.cast::<u8>(), start.addr() as u64)).unwrap();
        // SAFETY: inside the mapping.
        (0..4).for_each(|page| unsafe { start.add(page * 4096).write_volatile(7) });
        allow_huge_pages(base..base + 4 * 4096, false)
            .or_else(|error| if error.errno() == Some(libc::EINVAL) { Ok(()) } else { Err(error) })
            .unwrap();
        // SAFETY: our own mapping, to which no reference was made.
        unsafe { drop_pages(base + 4096..base + 3 * 4096) }.unwrap();
        // SAFETY: inside the mapping.
        let held: Vec<u8> = (0..4).map(|page| unsafe { start.add(page * 4096).read_volatile() }).collect();
        assert_eq!(held, [7, 0, 0, 7]);
        // SAFETY: refused before any call is made.
        assert!(matches!(unsafe { drop_pages(base + 1..base + 4096) }, Err(SysError::NotPages { .. })));
        // SAFETY: our own mapping, not used any more.
        unsafe { munmap(start.cast(), len) }.unwrap();
    }

    #[test]
    fn advice_on_unmapped_addresses_is_an_error() {
        if vmferry_testkit::skip_if_emulated("MADV_HUGEPAGE") {
            return;
        }
        // Nothing is ever mapped so low.
        let error = allow_huge_pages(4096..8192, true).unwrap_err();
        assert!(matches!(error.errno(), Some(libc::ENOMEM | libc::EINVAL)), "{error}");
    }
}
