//! A view of live guest bytes.

use crate::{PAGE_BYTES, PageDigest};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A view of mapped guest memory, whole pages long, that the guest may change under us at any time.
///
/// No `&[u8]` is ever made of it: a reference to bytes that somebody else writes is undefined behaviour. What looks at
/// the content works on a copy, and what moves it (`writev`, `readv`) takes the address.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    start: NonNull<u8>,
    len: usize,
    // The mapping outlives the window; its bytes are shared with the guest.
    mapping: PhantomData<&'a std::cell::UnsafeCell<u8>>,
}

impl<'a> Window<'a> {
    /// A window on the `len` bytes at `start`.
    ///
    /// # Safety
    /// For all of `'a`, `start..start + len` is mapped readable and writable in this process, and nothing in this
    /// process holds a Rust reference to those bytes, other than to atomics. Other writers (the guest, the kernel) are
    /// expected.
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

    /// The first byte's address, for system calls.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes, a multiple of 4 KiB.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many pages it holds.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.len / PAGE_BYTES
    }

    /// The pages `first..first + count` of this window.
    ///
    /// # Panics
    /// If they are not all in it.
    #[must_use]
    pub fn slice(&self, first: usize, count: usize) -> Window<'a> {
        assert!(
            first <= self.pages() && count <= self.pages() - first,
            "pages {first}+{count} of {}",
            self.pages()
        );
        // SAFETY: the sum stays within the mapping that `new`'s caller vouched for (asserted above).
        let start = unsafe { self.start.add(first * PAGE_BYTES) };
        Window { start, len: count * PAGE_BYTES, mapping: PhantomData }
    }

    /// Copies page `page` to `to` and says whether it was all zero; both from the same read of the memory, so that what
    /// is said of the copy is true of the copy whatever the guest does meanwhile.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn copy_page(&self, page: usize, to: &mut [u8; PAGE_BYTES]) -> bool {
        let from = self.slice(page, 1).as_ptr();
        // SAFETY: `from` points at PAGE_BYTES mapped bytes (slice checked it) and `to` is our own; guest memory and our
        // buffer do not overlap. A concurrent guest write can tear the copy, which every caller allows for.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), PAGE_BYTES) };
        is_zero(to)
    }

    /// Copies `from` over page `page`.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn write_page(&self, page: usize, from: &[u8; PAGE_BYTES]) {
        let to = self.slice(page, 1).as_ptr();
        // SAFETY: as in `copy_page`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, PAGE_BYTES) };
    }

    /// Writes zeros over all of it.
    pub fn zero(&self) {
        // SAFETY: the mapping is writable for `len` bytes (promise of `new`).
        unsafe { std::ptr::write_bytes(self.as_ptr(), 0, self.len) };
    }

    /// The digest of page `page`, taken of a copy; `None` for a page of zeros.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn digest(&self, page: usize, scratch: &mut [u8; PAGE_BYTES]) -> Option<PageDigest> {
        if self.copy_page(page, scratch) { None } else { Some(PageDigest::of(scratch)) }
    }
}

/// Whether `page` is all zero. Looks at a few scattered words first: nearly every page that is not zero shows it there.
fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    let word = |at: usize| u64::from_ne_bytes(page[at..at + 8].try_into().expect("eight bytes"));
    if word(0) | word(PAGE_BYTES / 2) | word(PAGE_BYTES - 8) != 0 {
        return false;
    }
    // Blocks of 256 bytes are folded without a branch, so that the compiler uses the widest registers there are.
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
        // SAFETY: the allocation is page-aligned, lives until `dealloc`, and no reference to it is made.
        test(unsafe { Window::new(start, pages * PAGE_BYTES) });
        // SAFETY: allocated above with the same layout.
        unsafe { dealloc(start.as_ptr(), layout) };
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

    #[test]
    #[should_panic(expected = "pages 2+2 of 3")]
    fn a_slice_stays_inside() {
        with_window(3, |window| {
            let _ = window.slice(2, 2);
        });
    }
}
