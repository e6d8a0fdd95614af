//! Memory of a guest at the instant at which other guests branch off.

use crate::{PageSet, RegionFile};
use std::fmt;

/// Files that hold the memory of a guest that is to be branched.
///
/// From the instant of the branch on, the content of these files never changes. Each process maps
/// them privately, so that a write copies the written page for the writer only.
#[derive(Debug)]
pub enum BranchMemory {
    /// The memory is these files, which the VM has mapped shared. They contain every write of the
    /// guest up to the instant, and no process changes them after that.
    Files {
        /// Files that are mapped shared.
        files: Vec<RegionFile>,
        /// Old page-table entries of the files, if the VM has moved them to other addresses. The
        /// engine drops them with the old mappings.
        retired: RetiredMemory,
    },
    /// The memory is these files, which the VM has mapped privately since an earlier branch, and
    /// pages that the guest has written since. The engine copies both into new files.
    Changed {
        /// Files that are mapped privately. No process changes them.
        files: Vec<RegionFile>,
        /// Pages that may differ from the files. A page that the guest writes during the call may
        /// be missing, because the engine tracks writes at that time.
        written: PageSet,
    },
}

/// Old mappings of guest memory that a VM has replaced. Dropping the value unmaps them.
///
/// Unmapping takes time for each page, so the engine drops the value after the guest runs again.
#[derive(Default)]
#[must_use = "dropping the old mappings takes time for each of their pages"]
pub struct RetiredMemory(Vec<Box<dyn Send>>);

impl RetiredMemory {
    /// Returns a value that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a mapping, or a value that owns one.
    pub fn push(&mut self, mapping: impl Send + 'static) {
        self.0.push(Box::new(mapping));
    }

    /// Adds all mappings of `other`.
    pub fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

impl fmt::Debug for RetiredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RetiredMemory").field(&self.0.len()).finish()
    }
}
