//! View of the live bytes of guest memory.

use crate::{PAGE_BYTES, PageDigest};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// View of mapped guest memory that the guest may change at any time. Its length is a multiple of
/// the page size.
///
/// No `&[u8]` to these bytes is ever created, because it is undefined behaviour if the guest or
/// another thread writes bytes to which such a reference exists. Therefore, code that examines the
/// content works on a copy, and code that transfers the content (`writev`, `readv`) uses the
/// address.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    start: NonNull<u8>,
    len: usize,
    // The mapping outlives the window, and its bytes are shared with the guest.
    mapping: PhantomData<&'a std::cell::UnsafeCell<u8>>,
}

// SAFETY: a window is an address and a length. The bytes are mapped for `'a` on every thread that
// gets the window (the promise of `new`), no reference to the bytes is made, and every access
// allows for other writers.
unsafe impl Send for Window<'_> {}

impl<'a> Window<'a> {
    /// Creates a window onto the `len` bytes at `start`.
    ///
    /// # Safety
    /// For all of `'a`, `start..start + len` is mapped readable and writable in this process, and
    /// nothing in this process holds a Rust reference to those bytes, other than to atomics. Other
    /// writers (the guest, the kernel) are expected.
    ///
    /// # Panics
    /// If `start` or `len` is not a multiple of 4 KiB.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        assert!(
            start.addr().get().is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES),
            "whole pages"
        );
        Self { start, len, mapping: PhantomData }
    }

    /// Returns the address of the first byte, for system calls.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes, a multiple of 4 KiB.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the window has no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.len / PAGE_BYTES
    }

    /// Returns the pages `first..first + count` of this window.
    ///
    /// # Panics
    /// If the window does not have all these pages.
    #[must_use]
    pub fn slice(&self, first: usize, count: usize) -> Window<'a> {
        assert!(
            first <= self.pages() && count <= self.pages() - first,
            "pages {first}+{count} of {}",
            self.pages()
        );
        // SAFETY: the sum stays within the mapping that the caller of `new` guaranteed (asserted
        // above).
        let start = unsafe { self.start.add(first * PAGE_BYTES) };
        Window { start, len: count * PAGE_BYTES, mapping: PhantomData }
    }

    /// Copies page `page` to `to`, and returns true if the page was all zero. The result describes
    /// the copy, whatever the guest writes meanwhile, because the memory is read only once.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn copy_page(&self, page: usize, to: &mut [u8; PAGE_BYTES]) -> bool {
        let from = self.slice(page, 1).as_ptr();
        // SAFETY: `from` points at PAGE_BYTES mapped bytes (`slice` checked the index), and `to` is
        // a buffer of this process. Guest memory and the buffer do not overlap. A concurrent guest
        // write can tear the copy, which every caller allows for.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), PAGE_BYTES) };
        is_zero(to)
    }

    /// Copies `from` to page `page`.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn write_page(&self, page: usize, from: &[u8; PAGE_BYTES]) {
        let to = self.slice(page, 1).as_ptr();
        // SAFETY: as in `copy_page`, with source and destination exchanged.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, PAGE_BYTES) };
    }

    /// Writes zeros to all pages of the window.
    pub fn zero(&self) {
        // SAFETY: the mapping is writable for `len` bytes (promise of `new`).
        unsafe { std::ptr::write_bytes(self.as_ptr(), 0, self.len) };
    }

    /// Returns the digest of page `page`, or `None` for a page of zeros. If the page must be
    /// copied, the copy is stored in `scratch`.
    ///
    /// The guest may write to the page during the call. In this case, `None` means that each byte
    /// was zero when it was read. A digest may be that of a page of zeros, or of a mixture of old
    /// and new bytes that neither source nor target ever has, so a comparison reports a difference.
    /// This does no harm, because the write is recorded, and the source therefore sends the page
    /// again (docs/decisions/hazards.md, section 10).
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn digest(&self, page: usize, scratch: &mut [u8; PAGE_BYTES]) -> Option<PageDigest> {
        let from = self.slice(page, 1).as_ptr();
        let probe = |at: usize| {
            // SAFETY: `at` is a multiple of eight inside the page, which is mapped and
            // page-aligned. Relaxed atomic loads may race with writes of the guest.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(from.add(at).cast()) }.load(Ordering::Relaxed)
        };
        if PROBES.into_iter().any(|at| probe(at) != 0) {
            // The last page has no next page. Its own lines are prefetched again instead, which
            // costs nothing.
            let next = if page + 1 < self.pages() { from.wrapping_add(PAGE_BYTES) } else { from };
            // SAFETY: the page is mapped (the promise of `new`), and `slice` checked the index.
            if let Some(digest) = unsafe { PageDigest::of_live(from, next) } {
                return Some(digest);
            }
        }
        if self.copy_page(page, scratch) { None } else { Some(PageDigest::of(scratch)) }
    }
}

/// Offsets in bytes of a few words, of which at least one is nonzero in nearly every page that is
/// not all zero.
const PROBES: [usize; 3] = [0, PAGE_BYTES / 2, PAGE_BYTES - 8];

/// Returns true if `page` is all zero. Checks the words of [`PROBES`] first, because they detect
/// nearly every page that is not all zero.
fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    let word = |at: usize| u64::from_ne_bytes(page[at..at + 8].try_into().expect("eight bytes"));
    if PROBES.into_iter().any(|at| word(at) != 0) {
        return false;
    }
    // Blocks of 256 bytes are combined without a branch, so that the compiler uses the widest
    // registers of the CPU.
    page.chunks_exact(256).all(|block| block.iter().fold(0, |or, byte| or | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    fn with_window(pages: usize, test: impl FnOnce(Window<'_>)) {
        let layout = Layout::from_size_align(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        let memory = Memory(start, layout);
        // SAFETY: the allocation is page-aligned, lives as long as `memory`, and no reference to it
        // is made.
        test(unsafe { Window::new(memory.0, pages * PAGE_BYTES) });
    }

    /// Allocation that is freed also when a test panics.
    struct Memory(NonNull<u8>, Layout);

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: allocated by `with_window` with this layout.
            unsafe { dealloc(self.0.as_ptr(), self.1) };
        }
    }

    proptest! {
        #[test]
        fn one_byte_anywhere_makes_a_page_not_zero(at in 0..PAGE_BYTES, value in 1u8..) {
            let mut page = [0; PAGE_BYTES];
            prop_assert!(is_zero(&page));
            page[at] = value;
            prop_assert!(!is_zero(&page));
        }
    }

    #[test]
    fn pages_are_written_read_and_digested() {
        with_window(3, |window| {
            let (mut scratch, mut page) = ([0; PAGE_BYTES], [7; PAGE_BYTES]);
            page[9] = 1;
            window.write_page(1, &page);
            assert!(window.copy_page(0, &mut scratch));
            assert!(!window.copy_page(1, &mut scratch));
            assert_eq!(scratch, page);
            assert_eq!(window.digest(1, &mut scratch), Some(PageDigest::of(&page)));
            assert_eq!(window.digest(2, &mut scratch), None);
            window.slice(1, 1).zero();
            assert_eq!(window.digest(1, &mut scratch), None);
        });
    }

    proptest! {
        #[test]
        fn a_live_page_has_the_digest_of_its_copy(seed: u64, sparse: bool) {
            with_window(2, |window| {
                let mut state = seed | 1;
                let mut page = [0; PAGE_BYTES];
                for byte in &mut page {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    *byte = if sparse && state >> 40 & 0xff != 0 { 0 } else { state.to_le_bytes()[7] };
                }
                page[0] = 1;
                window.write_page(1, &page);
                assert_eq!(window.digest(1, &mut [0; PAGE_BYTES]), Some(PageDigest::of(&page)));
            });
        }
    }

    #[test]
    fn a_page_of_zeros_is_digested_in_place() {
        use vmferry_testkit::{Need, skip};
        with_window(1, |window| {
            // SAFETY: the window's only page is mapped.
            let digest = unsafe { PageDigest::of_live(window.as_ptr(), window.as_ptr()) };
            match digest {
                Some(digest) => assert_eq!(digest, *crate::ZERO_PAGE),
                None => skip(Need::Cpu, "digests in place: no AVX-512 with VPCLMULQDQ"),
            }
        });
    }

    #[test]
    #[should_panic(expected = "pages 2+2 of 3")]
    fn a_slice_stays_inside() {
        with_window(3, |window| {
            let _ = window.slice(2, 2);
        });
    }
}
