//! Dirty rings of KVM (Linux `Documentation/virt/kvm/api.rst`, `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`).
//!
//! Each vCPU has one ring, which is an array of entries in memory that KVM and this process share.
//! KVM adds a page to the ring when the vCPU writes to the page for the first time since it was
//! protected. This process harvests the page and marks its entry. [`reset`] makes KVM protect the
//! pages of all marked entries again, and frees the entries:
//!
//! ```text
//! free (00) --written--> dirty (01) --mark_harvested--> harvested (1x) --reset--> free
//! ```
//!
//! Entries must be harvested in the order of their indexes. After the last entry of the array, KVM
//! continues with the first.

use crate::error::{common, need_small_pages};
use crate::ioctl::{call_value, io};
use crate::kvm::{check_extension, enable_cap};
use crate::{PAGE_SIZE, SysError};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const RESET_DIRTY_RINGS: u64 = io(0xae, 0xc7);

/// Number of `KVM_CAP_DIRTY_LOG_RING`, which exists only on processors that do not reorder stores.
/// Older kernels have only this capability.
const CAP_RING: u32 = 192;
/// Number of `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`, the same capability for all processors.
const CAP_RING_ACQ_REL: u32 = 223;

/// Offset of the ring in the mapping of a vCPU's descriptor, in pages: `KVM_DIRTY_LOG_PAGE_OFFSET`
/// of x86 and arm64.
const RING_PAGE: u64 = 64;

/// Exit reason `KVM_EXIT_DIRTY_RING_FULL`: the ring of the vCPU has no room left.
pub const EXIT_RING_FULL: u32 = 31;

/// Minimum number of entries that are still free when KVM reports a full ring
/// (`KVM_DIRTY_RING_RSVD_ENTRIES`). On a processor with page-modification logging, 512 more are
/// free.
pub const RESERVED_ENTRIES: u32 = 64;

const DIRTY: u32 = 1;
const HARVESTED: u32 = 2;

/// Entry in the layout of KVM. It is used only through shared references and atomics, because KVM
/// may write to it at any time.
#[repr(C)]
struct Gfn {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

const _: () = assert!(size_of::<Gfn>() == 16 && align_of::<Gfn>() == 8);

/// Page that a vCPU has written, as an entry of a ring names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPage {
    /// Number of the memory slot, with the address space in the upper 16 bits.
    pub slot: u32,
    /// Index of the page in its slot.
    pub offset: u64,
}

/// Number of entries in a dirty ring: a power of two from [`MIN`](Self::MIN) to 2^27.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingEntries(u32);

impl RingEntries {
    /// Smallest number of entries, which fill one page.
    pub const MIN: u32 = 4096 / 16;

    /// Returns the size `entries`, or `None` if `entries` is not a power of two in the valid range.
    /// [`enable`] checks that the host allows a ring of this size.
    #[must_use]
    pub fn new(entries: u32) -> Option<Self> {
        let bytes = entries.checked_mul(16)?;
        (entries.is_power_of_two() && u64::from(bytes).is_multiple_of(PAGE_SIZE)).then_some(Self(entries))
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }

    fn bytes(self) -> usize {
        self.0 as usize * size_of::<Gfn>()
    }
}

impl fmt::Display for RingEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the size of the largest ring that this host offers, or `None` if the host has no dirty
/// rings.
///
/// # Errors
/// Returns an error if `vm` is not a VM.
pub fn largest(vm: BorrowedFd<'_>) -> Result<Option<RingEntries>, SysError> {
    let bytes = match check_extension(vm, CAP_RING_ACQ_REL)? {
        0 => check_extension(vm, CAP_RING)?,
        bytes => bytes,
    };
    Ok(RingEntries::new(u32::try_from(bytes / size_of::<Gfn>() as u64).unwrap_or(0)))
}

/// Gives every vCPU of `vm` a dirty ring with `entries` entries. The VM must not have vCPUs yet.
/// The change is permanent, and KVM refuses `KVM_GET_DIRTY_LOG` from then on.
///
/// # Errors
/// Returns an error if the VM already has vCPUs or rings, or if this host does not allow rings of
/// this size.
pub fn enable(vm: BorrowedFd<'_>, entries: RingEntries) -> Result<(), SysError> {
    need_small_pages("KVM_ENABLE_CAP(DIRTY_LOG_RING)")?;
    let cap = if check_extension(vm, CAP_RING_ACQ_REL)? != 0 { CAP_RING_ACQ_REL } else { CAP_RING };
    enable_cap(
        vm,
        (cap, "KVM_ENABLE_CAP(DIRTY_LOG_RING)"),
        entries.bytes() as u64,
        || format!("the VM, {entries} entries"),
        |errno| match errno {
            libc::EINVAL => {
                "the VM has a vCPU or rings already, the host has no dirty rings, or it allows no such size"
            }
            libc::E2BIG => "the host allows no rings of this size",
            other => common(other),
        },
    )
}

/// Calls `call` while all signals are blocked for the calling thread. Signals that arrive during
/// the call stay pending. `errno` is left as `call` set it.
fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: the signal sets are local and initialised before they are read. Only the mask of the
    // calling thread is changed, and it is restored.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = call();
        // `pthread_sigmask` returns its error and does not touch `errno`. It cannot fail with a
        // mask that was in force before.
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

/// Makes KVM protect the pages of all harvested entries in all rings again, and free these entries.
/// Returns the number of freed entries.
///
/// The number does not show that the entries of the calling thread were freed, because a call also
/// frees entries that other threads have marked. The page of a marked entry is protected again if
/// three conditions hold: the call began after the entry was marked, the entry no longer [awaits a
/// reset](DirtyRing::awaits_reset) after the call, and *no other call is running* when this call
/// returns.
///
/// *Signals are blocked during the call.* Since Linux 6.17 ("KVM: Bail from the dirty ring reset
/// flow if a signal is pending", 49005a2a3d2a), a pending signal ends the reset between two
/// entries. KVM protects pages in groups of up to 64. The group that the signal interrupts is not
/// protected, although its entries have been freed, so later writes to its pages would never be
/// recorded. The call does not report this: it returns the number of freed entries, or 0, and no
/// error.
///
/// If the process is stopped (`SIGSTOP`), frozen or traced during this call, the problem can still
/// occur, because these events cannot be blocked. A comparison of all pages finds such a page.
///
/// # Errors
/// Returns the error of KVM. After `EINTR`, call the function again.
pub fn reset(vm: BorrowedFd<'_>) -> Result<u32, SysError> {
    let count = without_signals(|| {
        // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument. It changes rings and page protection,
        // but no memory of this process.
        unsafe { call_value(vm, RESET_DIRTY_RINGS, 0) }
    });
    u32::try_from(count).map_err(|_| {
        SysError::last(
            "KVM_RESET_DIRTY_RINGS",
            || "the VM".to_owned(),
            |errno| match errno {
                libc::EINVAL => "the VM was not started with dirty rings",
                other => common(other),
            },
        )
    })
}

/// Ring of one vCPU, mapped in this process.
///
/// Indexes may increase forever and wrap around at 2^32, because the ring uses an index modulo its
/// number of entries.
#[derive(Debug)]
pub struct DirtyRing {
    start: NonNull<Gfn>,
    entries: RingEntries,
}

// SAFETY: the value owns the mapping and uses it through atomics only.
unsafe impl Send for DirtyRing {}
// SAFETY: the value owns the mapping and uses it through atomics only.
unsafe impl Sync for DirtyRing {}

impl DirtyRing {
    /// Maps the ring of `vcpu`. `entries` must be the size for which the rings of the VM were
    /// [enabled](enable). The ring stays mapped when the descriptor is closed.
    ///
    /// # Errors
    /// Returns an error if `vcpu` is not a vCPU, or if its ring is smaller than `entries`.
    pub fn map(vcpu: BorrowedFd<'_>, entries: RingEntries) -> Result<Self, SysError> {
        let failed = |source: std::io::Error| {
            SysError::from_io("mmap of a dirty ring", format!("a vCPU, {entries} entries"), source, |errno| {
                match errno {
                    libc::EFAULT | libc::EINVAL => "this is not a vCPU, or it has no ring of this size",
                    other => common(other),
                }
            })
        };
        need_small_pages("mmap of a dirty ring")?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let (len, from) = (entries.bytes(), RING_PAGE * PAGE_SIZE);
        // SAFETY: a new mapping at an address that the kernel chooses. Nothing else refers to it.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, vcpu, from) };
        let start = start.map_err(|errno| failed(errno.into()))?;
        let start = NonNull::new(start.cast::<Gfn>())
            .ok_or_else(|| failed(std::io::ErrorKind::AddrNotAvailable.into()))?;
        let ring = Self { start, entries };
        ring.populate().map_err(failed)?;
        Ok(ring)
    }

    /// Faults in all pages now. A later access to a page that does not exist would raise SIGBUS.
    fn populate(&self) -> std::io::Result<()> {
        // SAFETY: the range belongs to the mapping. Populating it has no other visible effect.
        let done = unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.entries.bytes(), libc::MADV_POPULATE_WRITE)
        };
        match std::io::Error::last_os_error() {
            _ if done == 0 => Ok(()),
            // Linux before 5.14 does not have this advice.
            error if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            error => Err(error),
        }
    }

    /// Returns the number of entries in the ring.
    #[must_use]
    pub fn entries(&self) -> RingEntries {
        self.entries
    }

    fn gfn(&self, index: u32) -> &Gfn {
        let at = (index & (self.entries.0 - 1)) as usize;
        // SAFETY: `at` is less than the number of entries, which are mapped for as long as `self`
        // lives. All bytes are atomics, for which every value is valid. The kernel's writes are
        // atomic for this process.
        unsafe { self.start.add(at).as_ref() }
    }

    /// Returns the page in entry `index` if the entry is dirty, that is, filled by KVM and not
    /// harvested yet.
    #[must_use]
    pub fn dirty(&self, index: u32) -> Option<RingPage> {
        let gfn = self.gfn(index);
        // Acquire: KVM stores the page and then releases the flags.
        let fresh = gfn.flags.load(Ordering::Acquire) & (DIRTY | HARVESTED) == DIRTY;
        fresh.then(|| RingPage {
            slot: gfn.slot.load(Ordering::Relaxed),
            offset: gfn.offset.load(Ordering::Relaxed),
        })
    }

    /// Marks entry `index` as harvested, for the next [`reset`]. The entry must be dirty, and the
    /// caller must have read its page.
    pub fn mark_harvested(&self, index: u32) {
        // Release: KVM may put another page into the entry once it sees the flag.
        self.gfn(index).flags.store(HARVESTED, Ordering::Release);
    }

    /// Returns true if entry `index` is harvested and KVM has not reset it yet.
    #[must_use]
    pub fn awaits_reset(&self, index: u32) -> bool {
        self.gfn(index).flags.load(Ordering::Acquire) & HARVESTED != 0
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.entries.bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn requests_and_sizes_match_the_documentation() {
        assert_eq!(RESET_DIRTY_RINGS, 0xaec7);
        assert_eq!(RingEntries::new(4096).map(RingEntries::get), Some(4096));
        assert_eq!(RingEntries::new(RingEntries::MIN).map(RingEntries::bytes), Some(4096));
        for wrong in [0, 1, 128, 4095, 5000, 1 << 28, u32::MAX] {
            assert_eq!(RingEntries::new(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn file_that_is_not_a_vm_is_refused() {
        if vmferry_testkit::skip_if_emulated("KVM_RESET_DIRTY_RINGS") {
            return;
        }
        let null = std::fs::File::open("/dev/null").unwrap();
        let size = RingEntries::new(256).unwrap();
        for error in [
            reset(null.as_fd()).unwrap_err(),
            largest(null.as_fd()).unwrap_err(),
            enable(null.as_fd(), size).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Some(libc::ENOTTY), "{error}");
        }
        let error = DirtyRing::map(null.as_fd(), size).unwrap_err().to_string();
        assert!(error.contains("mmap of a dirty ring on a vCPU, 256 entries"), "{error}");
    }

    #[test]
    fn entries_go_from_dirty_to_harvested_and_indexes_wrap_around() {
        // A file replaces the vCPU: the same memory at the same offset, and a hole for a smaller
        // ring.
        let file = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let entries = RingEntries::new(512).unwrap();
        rustix::fs::ftruncate(&file, RING_PAGE * PAGE_SIZE + entries.bytes() as u64).unwrap();
        let ring = DirtyRing::map(file.as_fd(), entries).unwrap();
        let mut gfn = [0u8; 16];
        gfn[0] = 1;
        gfn[4] = 7;
        gfn[8..].copy_from_slice(&0x1234_5678_9abc_u64.to_ne_bytes());
        rustix::io::pwrite(&file, &gfn, RING_PAGE * PAGE_SIZE + 16 * 511).unwrap();
        for index in [511, u32::MAX] {
            assert_eq!(ring.dirty(index), Some(RingPage { slot: 7, offset: 0x1234_5678_9abc }));
        }
        assert!(ring.dirty(510).is_none() && ring.dirty(0).is_none() && !ring.awaits_reset(511));
        ring.mark_harvested(1023);
        assert!(ring.dirty(511).is_none() && ring.awaits_reset(511));
    }

    #[test]
    fn ring_smaller_than_requested_is_refused() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_WRITE, which finds the missing pages,") {
            return;
        }
        let file = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let bytes = RingEntries::new(512).unwrap().bytes();
        rustix::fs::ftruncate(&file, RING_PAGE * PAGE_SIZE + bytes as u64).unwrap();
        let larger = DirtyRing::map(file.as_fd(), RingEntries::new(1024).unwrap()).unwrap_err();
        assert_eq!(larger.errno(), Some(libc::EFAULT), "{larger}");
    }
}
