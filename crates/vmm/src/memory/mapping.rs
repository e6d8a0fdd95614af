//! Mapping of memory with an alignment for huge pages.

use super::pool::{Advice, HugePagePool};
use crate::options::Backing;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmferry_core::{LayoutError, RegionId};
use vmferry_dirty::{PopulateError, TrackerError};

/// Reason for which guest memory cannot be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A guest cannot have memory of this size.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The host refuses the mapping.
    #[error("cannot map {len} bytes of {backing} guest memory; check that the host has enough free memory")]
    Map {
        /// Size of the mapping in bytes.
        len: u64,
        /// Backing of the memory.
        backing: Backing,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The host has too few huge pages.
    #[error("cannot map {len} bytes of guest memory: {advice}")]
    HugePages {
        /// Size of the mapping in bytes.
        len: u64,
        /// Action to take.
        advice: Advice,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The memory cannot be allocated before it is used.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// The memory cannot be shared with a branch.
    #[error("guest memory cannot be shared with a branch: {0}")]
    Branch(#[source] TrackerError),
    /// A branch does not have a region of the guest's memory.
    #[error("the branch has no memory for {0}")]
    NoBranch(RegionId),
    /// The memory is of a kind that no branch can share.
    #[error(
        "{backing} guest memory cannot be shared with a branch; start the guest with a memfd as its memory"
    )]
    NotShareable {
        /// Backing of the memory.
        backing: Backing,
    },
    /// Another process cannot map the memory.
    #[error("the guest's memory is anonymous, so that no other process can map it; run the guest on a memfd")]
    NotShared,
    /// Another process cannot map the memory, because the guest has branches or is one. Each guest
    /// then has its own changes in private memory.
    #[error(
        "the guest shares memory with a branch, and has its own changes in memory that no other process can map; move the guest with an \
         ordinary migration instead"
    )]
    Branched,
    /// The memory of another process cannot be mapped.
    #[error("cannot map the memory of {region} from another process: {why}")]
    Take {
        /// Region of the memory.
        region: RegionId,
        /// The reason.
        why: String,
    },
    /// The range is not guest RAM.
    #[error("{what} is not in guest memory")]
    NotRam {
        /// Description of the range.
        what: String,
    },
}

/// Type of the file system of memfds of huge pages (statfs(2)).
pub(super) const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
/// Alignment of mappings in bytes. With it, guest and host agree on the start of a 2 MiB page.
/// Otherwise KVM could never map one.
const ALIGN: usize = 2 << 20;

/// Memory behind a mapping.
#[derive(Debug, Clone)]
pub(crate) enum Behind {
    /// Private anonymous memory.
    Anonymous,
    /// memfd that is mapped shared from its start on.
    Shared(Arc<OwnedFd>),
    /// File that is mapped privately, because the guest was branched or is a branch. No process
    /// changes the file.
    Private { file: Arc<OwnedFd>, offset: u64 },
}

/// Memory of a mapping, and its kind.
#[derive(Debug)]
struct Memory {
    backing: Backing,
    behind: Behind,
}

/// Memory mapped readable and writable, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    memory: Mutex<Memory>,
}

// SAFETY: a `Mapping` is an address range and its files; it returns only the address, and code that
// uses the address says why no reference to the bytes is made.
unsafe impl Send for Mapping {}
// SAFETY: as above; the only state that changes is behind a lock.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes (whole pages, not 0) of zeros.
    pub(crate) fn new(len: u64, backing: Backing) -> Result<Self, MemoryError> {
        // Huge pages are reserved at this point. Later, a lack of them could not be reported as an
        // error: the kernel would kill the process that touches one.
        let failed = |source: io::Error| match backing {
            Backing::HugePages => {
                MemoryError::HugePages { len, advice: HugePagePool::read().advice(len), source }
            }
            _ => MemoryError::Map { len, backing, source },
        };
        let size = usize::try_from(len).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let file = match backing {
            Backing::Anonymous => None,
            Backing::Memfd => Some(memfd(len, MemfdFlags::empty()).map_err(failed)?),
            Backing::HugePages => {
                Some(memfd(len, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).map_err(failed)?)
            }
        };
        let start = map_aligned(size, backing, file.as_ref()).map_err(failed)?;
        let behind = file.map_or(Behind::Anonymous, |file| Behind::Shared(Arc::new(file)));
        Ok(Self { start, len: size, memory: Mutex::new(Memory { backing, behind }) })
    }

    /// Returns the address of the first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the backing of the memory.
    pub(crate) fn backing(&self) -> Backing {
        self.memory().backing
    }

    /// Returns the memory behind the mapping.
    pub(crate) fn behind(&self) -> Behind {
        self.memory().behind.clone()
    }

    /// Calls `change`, which replaces the mapping at its addresses, and records its result. No
    /// other replacement happens meanwhile.
    pub(crate) fn change<E>(&self, change: impl FnOnce() -> Result<(Backing, Behind), E>) -> Result<(), E> {
        let mut memory = self.memory();
        let (backing, behind) = change()?;
        *memory = Memory { backing, behind };
        Ok(())
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the kernel for huge pages.
    pub(crate) fn advise_huge(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping, and the advice changes how it is backed, not its
        // content.
        unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxHugepage)?
        };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map_aligned` mapped this range and nothing else unmaps it; users of the address
        // keep the owner of this mapping alive.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Creates a memfd of `len` bytes that cannot be shrunk: a mapping of a shrunken file would fault
/// on access.
pub(super) fn memfd(len: u64, of: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("vmferry-guest", flags | of)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// Maps `len` bytes at a multiple of [`ALIGN`]: reserves more addresses than needed, maps in the
/// middle of them, and unmaps the rest.
fn map_aligned(len: usize, backing: Backing, file: Option<&OwnedFd>) -> io::Result<NonNull<u8>> {
    let spare = len.checked_add(ALIGN).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a new range of addresses, inaccessible; nothing else refers to it.
    let reserved = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            spare,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
    };
    let head = reserved.addr().next_multiple_of(ALIGN) - reserved.addr();
    let start = reserved.wrapping_byte_add(head);
    // NORESERVE: a guest rarely touches all of its memory, and the host's administrator decides
    // about overcommit. Huge pages are never overcommitted.
    let reserve = if backing == Backing::HugePages { MapFlags::empty() } else { MapFlags::NORESERVE };
    let fixed = MapFlags::FIXED | reserve;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: `start..start + len` lies within the range reserved above (head <= ALIGN), which this
    // function owns.
    let mapped = unsafe {
        match file {
            None => rustix::mm::mmap_anonymous(start, len, access, fixed | MapFlags::PRIVATE),
            Some(file) => rustix::mm::mmap(start, len, access, fixed | MapFlags::SHARED, file, 0),
        }
    };
    // SAFETY: unmaps the rest of the reservation, to which nothing refers: all of it if the mapping
    // failed, otherwise what lies before and after the mapping.
    unsafe {
        match mapped {
            Err(_) => unmap(reserved, spare),
            Ok(_) => {
                unmap(reserved, head);
                unmap(start.wrapping_byte_add(len), ALIGN - head);
            }
        }
    }
    NonNull::new(mapped?.cast()).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

/// Unmaps `len` bytes at `start`. Does nothing for 0 bytes.
///
/// # Safety
/// Nothing may refer to the range.
unsafe fn unmap(start: *mut c_void, len: usize) {
    if len > 0 {
        // SAFETY: guaranteed by the caller.
        let _ = unsafe { rustix::mm::munmap(start, len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_aligned_zero_and_writable() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let mapping = Mapping::new(3 * 4096, backing).unwrap();
            assert!(mapping.start().addr().get().is_multiple_of(ALIGN));
            assert_eq!(matches!(mapping.behind(), Behind::Shared(_)), backing == Backing::Memfd);
            let last = mapping.start().as_ptr().wrapping_add(3 * 4096 - 1);
            // SAFETY: the last byte of the mapping, which no reference covers.
            unsafe {
                assert_eq!(last.read_volatile(), 0);
                last.write_volatile(7);
                assert_eq!(last.read_volatile(), 7);
            }
        }
    }

    #[test]
    fn mapping_that_the_host_refuses_is_an_error() {
        let error = Mapping::new(1 << 62, Backing::Anonymous).unwrap_err();
        assert!(error.to_string().contains("anonymous guest memory"), "{error}");
    }
}
