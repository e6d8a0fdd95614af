//! Options of a process guest.

use vmferry_core::{Gpa, Layout, PAGE_SIZE, Region, RegionId};
use vmferry_guest_abi::MAX_CPUS;

use crate::Error;

/// End of the low memory, below the hole that machines have under 4 GiB. The layout is that of a
/// virtual machine, so that both kinds of guest exercise the same code.
const LOW_END: u64 = 3 << 30;
/// Start of the memory above the hole.
const HIGH_START: u64 = 4 << 30;
/// Least memory, in bytes: statistics page, counters and some content.
const MIN_MEMORY: u64 = 4 << 20;

/// Options of a process guest. Start from [`ProcessOptions::new`] and change fields.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ProcessOptions {
    /// Memory in bytes: a multiple of 4 KiB, at least 4 MiB.
    pub memory: u64,
    /// Number of threads that write, 1 to 64.
    pub cpus: u32,
    /// True if guest memory is a memfd instead of anonymous memory.
    pub memfd: bool,
    /// True if transparent huge pages are requested.
    pub huge_pages: bool,
    /// Size of the heap in bytes, in whole pages. The workload does not use this memory; the guest
    /// takes and gives up its pages one by one. A migration can skip the free pages of the heap. A
    /// received guest has the heap of its source, whatever this value is.
    pub heap: u64,
}

impl ProcessOptions {
    /// Returns the options of a guest with `memory` bytes and `cpus` threads: anonymous memory,
    /// huge pages, no heap.
    #[must_use]
    pub fn new(memory: u64, cpus: u32) -> Self {
        Self { memory, cpus, memfd: false, huge_pages: true, heap: 0 }
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
