//! Memory of our own to measure with: fresh from the kernel, as a target's is when a guest begins to arrive.

use crate::MigrateError;
use crate::mapped::MappedMemory;
use std::io;
use std::ptr::NonNull;
use vmferry_core::{Gpa, Region, RegionId};

/// Bytes of it: what one channel of a measurement may fill.
pub(crate) const SCRATCH_BYTES: usize = 32 << 20;
/// The same in pages.
pub(crate) const SCRATCH_PAGES: u64 = SCRATCH_BYTES as u64 >> 12;
/// Its region.
pub(crate) const SCRATCH: RegionId = RegionId(0);
/// The size of a huge page: twice as much is mapped as would be needed otherwise.
const HUGE: usize = 2 << 20;

/// Anonymous memory that is gone when this is.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: MappedMemory,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is reached by address only, through `memory`, which any thread may use; it is unmapped by its one owner.
unsafe impl Send for Scratch {}
// SAFETY: as above.
unsafe impl Sync for Scratch {}

impl Scratch {
    /// Maps it; nothing of it is touched yet.
    pub(crate) fn new() -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Host { what: "memory to measure with", source };
        let len = SCRATCH_BYTES + HUGE;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice concerns nobody else.
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
        // SAFETY: within the mapping above. Advice; a kernel without huge pages says no, and that is all.
        unsafe { libc::madvise(aligned.as_ptr().cast(), SCRATCH_BYTES, libc::MADV_HUGEPAGE) };
        let region = Region { id: SCRATCH, gpa: Gpa(0), len: SCRATCH_BYTES as u64 };
        // SAFETY: `SCRATCH_BYTES` from `aligned` on are within the mapping, which lives as long as self and is reached by nobody else.
        let memory = unsafe { MappedMemory::new(&[(region, aligned)]) };
        let memory = memory.map_err(|error| MigrateError::Vm(error.to_string()))?;
        Ok(Self { memory, start, len })
    }

    pub(crate) fn memory(&self) -> &MappedMemory {
        &self.memory
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; every window on it borrows self, so none is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
