//! Options of a process guest.

use vmferry_core::{Gpa, Layout, PAGE_SIZE, Region, RegionId};
pub use vmferry_dirty::Prealloc;
use vmferry_guest_abi::MAX_CPUS;

use crate::Error;

/// End of the low memory, below the hole that machines have under 4 GiB. The layout is the same as
/// that of a virtual machine, so that both kinds of guest exercise the same code.
const LOW_END: u64 = 3 << 30;
/// Start of the memory above the hole.
const HIGH_START: u64 = 4 << 30;
/// Minimum memory in bytes, which has room for the statistics page, the counters and some content.
const MIN_MEMORY: u64 = 4 << 20;

/// Options of a process guest. Create them with [`ProcessOptions::new`], and then change fields.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ProcessOptions {
    /// Size of the guest memory in bytes: a multiple of 4 KiB, at least 4 MiB.
    pub memory: u64,
    /// Number of vCPUs, which are threads, from 1 to 64.
    pub cpus: u32,
    /// True if the guest memory is a memfd instead of anonymous memory.
    pub memfd: bool,
    /// True to request transparent huge pages for the guest memory.
    pub huge_pages: bool,
    /// Time at which the host allocates the guest memory.
    pub prealloc: Prealloc,
    /// Size of the heap in bytes: a multiple of 4 KiB. The workload does not use this memory.
    /// Instead, the guest allocates and frees its pages one by one, and a migration can skip the
    /// free pages. A guest that arrives by migration keeps the size of its heap, and this value is
    /// ignored.
    pub heap: u64,
}

impl ProcessOptions {
    /// Returns the default options for a guest with `memory` bytes and `cpus` vCPUs: anonymous
    /// memory, transparent huge pages, memory that is allocated when a guest arrives, and no heap.
    #[must_use]
    pub fn new(memory: u64, cpus: u32) -> Self {
        Self { memory, cpus, memfd: false, huge_pages: true, prealloc: Prealloc::default(), heap: 0 }
    }

    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        if self.memory < MIN_MEMORY || !self.memory.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Options(format!(
                "{} bytes of memory are not possible: at least {} MiB are needed, in whole 4 KiB pages",
                self.memory,
                MIN_MEMORY >> 20
            )));
        }
        if !usize::try_from(self.cpus).is_ok_and(|cpus| (1..=MAX_CPUS).contains(&cpus)) {
            return Err(Error::Options(format!(
                "{} vCPUs are not possible: a process guest has 1 to {MAX_CPUS}",
                self.cpus
            )));
        }
        let low = self.memory.min(LOW_END);
        let mut regions = vec![Region { id: RegionId(0), gpa: Gpa(0), len: low }];
        if self.memory > low {
            regions.push(Region { id: RegionId(1), gpa: Gpa(HIGH_START), len: self.memory - low });
        }
        Layout::new(regions).map_err(|error| Error::Options(error.to_string()))
    }
}
