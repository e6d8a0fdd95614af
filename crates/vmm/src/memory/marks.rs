//! Marks for the pages that the VMM itself writes, which KVM does not see.

use std::sync::Arc;
use vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};
use vmferry_bitmap::AtomicBitmap;
use vmferry_core::PAGE_SIZE;

/// Marks of one region, as a bitmap backend of `vm-memory`.
///
/// Code that writes guest memory through `vm-memory` (loader, device models) marks the pages
/// automatically: `vm-memory` calls [`Bitmap::mark_dirty`] after each write, and the mark is a
/// `Release`. The tracker takes the marks by an `Acquire` swap, and the page is read after that.
/// Therefore either the harvest sees the mark and the read sees the write, or the next harvest
/// finds the mark.
#[derive(Debug, Clone)]
pub struct WriteMarks(Arc<AtomicBitmap>);

impl WriteMarks {
    /// Creates marks for a region of `pages` pages. No page is marked.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        Self(Arc::new(AtomicBitmap::new(pages)))
    }

    /// Returns the bitmap, for the tracker that harvests it.
    #[must_use]
    pub fn bitmap(&self) -> Arc<AtomicBitmap> {
        Arc::clone(&self.0)
    }
}

impl<'a> WithBitmapSlice<'a> for WriteMarks {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for WriteMarks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        // vm-memory checked the range before it wrote. Pages beyond the end do not exist and cannot
        // have been written.
        let (offset, len) = (offset as u64, len as u64);
        let first = offset / PAGE_SIZE;
        let end = offset.saturating_add(len).div_ceil(PAGE_SIZE).min(self.0.len());
        if first < end {
            self.0.set_range(first..end);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset as u64 / PAGE_SIZE;
        page < self.0.len() && self.0.test(page)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pages_of_a_write_are_marked() {
        let marks = WriteMarks::new(10);
        marks.mark_dirty(4095, 2);
        marks.slice_at(4096 * 4).mark_dirty(4096, 4096);
        marks.mark_dirty(9 * 4096, 1 << 20);
        marks.mark_dirty(3 * 4096, 0);
        let mut pages = vmferry_bitmap::Bitmap::new(10);
        marks.bitmap().harvest(&mut pages);
        assert_eq!(pages.runs().collect::<Vec<_>>(), [0..2, 5..6, 9..10]);
        assert!(!marks.dirty_at(0));
    }
}
