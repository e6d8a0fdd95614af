//! Guest memory for tests.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;
use vmferry_core::{
    Gpa, GuestMemory, Layout, PAGE_BYTES, PAGE_SIZE, PageRun, Region, RegionId, VmError, Window,
};

#[expect(dead_code, reason = "the bytes are accessed by windows")]
#[repr(align(4096))]
struct Page(UnsafeCell<[u8; PAGE_BYTES]>);

// SAFETY: the bytes are accessed by windows only.
unsafe impl Sync for Page {}

/// One region of guest memory, on the heap.
pub(crate) struct Memory {
    layout: Layout,
    pages: Box<[Page]>,
}

impl Memory {
    /// Returns the memory of region `id` at `gpa`. Its pages are `pages`.
    pub(crate) fn new(id: RegionId, gpa: Gpa, pages: Vec<[u8; PAGE_BYTES]>) -> Arc<Self> {
        let layout = Layout::new(vec![Region { id, gpa, len: pages.len() as u64 * PAGE_SIZE }]).unwrap();
        let pages = pages.into_iter().map(|page| Page(UnsafeCell::new(page))).collect();
        Arc::new(Self { layout, pages })
    }
}

impl GuestMemory for Memory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the window of the whole region: the tests use no other.
    fn window(&self, id: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        let region = &self.layout.regions()[0];
        if id != region.id || run != region.run() {
            return Err(VmError::new("no such pages"));
        }
        let start = NonNull::new(self.pages.as_ptr().cast_mut().cast::<u8>()).unwrap();
        // SAFETY: the window covers the pages, which live as long as `self`. `UnsafeCell` permits
        // the writes.
        Ok(unsafe { Window::new(start, self.pages.len() * PAGE_BYTES) })
    }
}
