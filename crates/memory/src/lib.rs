//! Guest memory as the engine sees it: regions with an id, pages by run, windows onto live bytes.
//!
//! Nothing here maps memory; whoever owns a mapping makes a [`Window`] of it. Addresses, page indexes and region ids are
//! types of their own, because mixing them up is how pages get lost.

mod addr;
mod digest;
mod fold;
mod layout;
mod set;
mod window;

pub use addr::{Gpa, PageIndex, PageRun, RegionId};
pub use digest::{PageDigest, ZERO_PAGE};
pub use layout::{Layout, LayoutError, MAX_PAGES, MAX_REGIONS, Region};
pub use set::PageSet;
pub use window::Window;

/// Shift of the page that everything here counts in: 4 KiB, the smallest page of x86-64 and of its dirty logs.
pub const PAGE_SHIFT: u8 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// Bytes in a page, as an array length.
pub const PAGE_BYTES: usize = 1 << PAGE_SHIFT;
