//! Guest addresses, page indexes and page runs.

use crate::PAGE_SHIFT;
use std::fmt;
use std::ops::Range;

/// A guest-physical address, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Gpa(pub u64);

impl fmt::Display for Gpa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Number of a region of guest memory, unique among the regions of a guest. With KVM, this is the
/// number of the memory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct RegionId(pub u32);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {}", self.0)
    }
}

/// Index of a 4 KiB page within its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// Returns the offset of the page from the start of its region, in bytes.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// Consecutive pages of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// First page of the run.
    pub first: PageIndex,
    /// Number of pages.
    pub count: u64,
}

impl PageRun {
    /// Returns the run of `count` pages from `first`.
    #[must_use]
    pub fn new(first: PageIndex, count: u64) -> Self {
        Self { first, count }
    }

    /// Returns the index of the page after the last one. The result saturates at `u64::MAX`, so
    /// that a bounds check rejects a run that is too long.
    #[must_use]
    pub fn end(self) -> u64 {
        self.first.0.saturating_add(self.count)
    }

    /// Returns the page indexes of the run.
    #[must_use]
    pub fn range(self) -> Range<u64> {
        self.first.0..self.end()
    }

    /// Returns the length of the run in bytes. The result saturates at `u64::MAX`.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.count.saturating_mul(1 << PAGE_SHIFT)
    }
}

impl From<Range<u64>> for PageRun {
    fn from(range: Range<u64>) -> Self {
        Self { first: PageIndex(range.start), count: range.end.saturating_sub(range.start) }
    }
}

impl fmt::Display for PageRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages {:#x}..{:#x}", self.first.0, self.end())
    }
}
