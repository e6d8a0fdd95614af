//! Memory for measurements. The kernel allocates its pages at the first access, as it does for the
//! memory of a target when a guest begins to arrive.

use crate::MigrateError;
use crate::mapped::MappedMemory;
use std::io;
use std::ptr::NonNull;
use vmferry_core::{Gpa, Region, RegionId, VmError};

/// Size of the memory in bytes. One channel of a measurement may fill all of it.
pub(crate) const SCRATCH_BYTES: usize = 32 << 20;
/// Size of the memory in pages.
pub(crate) const SCRATCH_PAGES: u64 = SCRATCH_BYTES as u64 >> 12;
/// Id of the only region.
pub(crate) const SCRATCH: RegionId = RegionId(0);
/// Size of a huge page in bytes. The mapping is longer by this amount, so that the memory can be
/// aligned.
const HUGE: usize = 2 << 20;

/// Anonymous memory that is unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: MappedMemory,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is accessed by address only, through `memory`, which any thread may use. Its
// only owner unmaps it.
unsafe impl Send for Scratch {}
// SAFETY: as above.
unsafe impl Sync for Scratch {}

impl Scratch {
    /// Maps the memory without touching it.
    pub(crate) fn new() -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Host { what: "memory to measure with", source };
        let len = SCRATCH_BYTES + HUGE;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        let aligned = start.map_addr(|at| {
            let up = at.get().next_multiple_of(HUGE);
            std::num::NonZero::new(up).unwrap_or(at)
        });
        // SAFETY: the range is within the mapping above. The call is advice: a kernel without huge
        // pages refuses, which has no consequence.
        unsafe { libc::madvise(aligned.as_ptr().cast(), SCRATCH_BYTES, libc::MADV_HUGEPAGE) };
        let region = Region { id: SCRATCH, gpa: Gpa(0), len: SCRATCH_BYTES as u64 };
        // SAFETY: `SCRATCH_BYTES` from `aligned` on are within the mapping, which lives as long as
        // `self` and is accessed through `memory` only.
        let memory = unsafe { MappedMemory::new(&[(region, aligned)]) };
        let memory = memory.map_err(|error| MigrateError::Vm(VmError::new(error)))?;
        Ok(Self { memory, start, len })
    }

    pub(crate) fn memory(&self) -> &MappedMemory {
        &self.memory
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length. Every window on it borrows `self`, so none is
        // left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
