//! Content of guest memory.

use vmferry_core::{GuestMemory, PAGE_BYTES, PageDigest, PageRun};

/// Returns the digest of each page, in the order of the layout. `None` stands for a page of zeros.
///
/// # Panics
/// If the memory has no window onto one of its regions.
pub fn digests(memory: &dyn GuestMemory) -> Vec<Option<PageDigest>> {
    let mut scratch = Box::new([0; PAGE_BYTES]);
    let mut digests = Vec::new();
    for region in memory.layout().regions() {
        let window = memory.window(region.id, PageRun::from(0..region.pages())).unwrap();
        digests.extend((0..window.pages()).map(|page| window.digest(page, &mut scratch)));
    }
    digests
}
