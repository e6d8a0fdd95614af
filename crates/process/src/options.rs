//! What a process guest is to be like.

use vmferry_core::{Gpa, Layout, PAGE_SIZE, Region, RegionId};
use vmferry_guest_abi::MAX_CPUS;

use crate::Error;

/// Memory below the hole that machines have under 4 GiB: laid out like a virtual machine's, so that both kinds of guest
/// exercise the same code.
const LOW_END: u64 = 3 << 30;
/// Memory goes on here.
const HIGH_START: u64 = 4 << 30;
/// Least memory in bytes: statistics page, counters and a little content.
const MIN_MEMORY: u64 = 4 << 20;

/// What a process guest is to be like. Start from [`ProcessOptions::new`] and change fields.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ProcessOptions {
    /// Memory in bytes: a multiple of 4 KiB, at least 4 MiB.
    pub memory: u64,
    /// Threads that write, 1 to 64.
    pub cpus: u32,
    /// A memfd instead of anonymous memory.
    pub memfd: bool,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
    /// Bytes of memory that the workload leaves alone and the guest takes and gives up page by page, in whole pages; a migration
    /// can leave out what is free of it. A guest that comes from elsewhere brings its own, whatever is said here.
    pub heap: u64,
}

impl ProcessOptions {
    /// A guest of `memory` bytes and `cpus` threads: anonymous memory, huge pages, no heap.
    #[must_use]
    pub fn new(memory: u64, cpus: u32) -> Self {
        Self { memory, cpus, memfd: false, huge_pages: true, heap: 0 }
    }

    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        if self.memory < MIN_MEMORY || !self.memory.is_multiple_of(PAGE_SIZE) {
            return Err(Error::Options(format!(
                "{} bytes of memory: at least {} MiB are needed, in whole 4 KiB pages",
                self.memory,
                MIN_MEMORY >> 20
            )));
        }
        if !usize::try_from(self.cpus).is_ok_and(|cpus| (1..=MAX_CPUS).contains(&cpus)) {
            return Err(Error::Options(format!("{} vCPUs: a process guest has 1 to {MAX_CPUS}", self.cpus)));
        }
        let low = self.memory.min(LOW_END);
        let mut regions = vec![Region { id: RegionId(0), gpa: Gpa(0), len: low }];
        if self.memory > low {
            regions.push(Region { id: RegionId(1), gpa: Gpa(HIGH_START), len: self.memory - low });
        }
        Layout::new(regions).map_err(|error| Error::Options(error.to_string()))
    }
}
