//! KVM's dirty rings (Linux `Documentation/virt/kvm/api.rst`, `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`).
//!
//! One ring a vCPU, an array of entries in memory that KVM and this process share. KVM puts a page in when the vCPU
//! writes to it for the first time since it was protected; this process takes it out by marking the entry; and
//! [`reset`] has KVM protect the pages of all marked entries again and reuse the entries:
//!
//! ```text
//! free (00) --written--> dirty (01) --mark_harvested--> harvested (1x) --reset--> free
//! ```
//!
//! Entries are taken in the order in which they lie. KVM uses them round and round.

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

/// `KVM_CAP_DIRTY_LOG_RING`, which only processors that keep stores in order have: older kernels know nothing else.
const CAP_RING: u32 = 192;
/// `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`: the same for all processors.
const CAP_RING_ACQ_REL: u32 = 223;

/// `KVM_DIRTY_LOG_PAGE_OFFSET` of x86 and arm64: the page of a vCPU's descriptor at which its ring is mapped.
const RING_PAGE: u64 = 64;

/// `KVM_EXIT_DIRTY_RING_FULL`: the exit of a vCPU whose ring has no room left.
pub const EXIT_RING_FULL: u32 = 31;

/// Entries that KVM keeps free when it says that a ring is full, at least (`KVM_DIRTY_RING_RSVD_ENTRIES`; a processor
/// that logs writes itself needs 512 more).
pub const RESERVED_ENTRIES: u32 = 64;

const DIRTY: u32 = 1;
const HARVESTED: u32 = 2;

/// An entry as KVM lays it out. Only ever used through a shared reference, by atomics: KVM writes it at any time.
#[repr(C)]
struct Gfn {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

const _: () = assert!(size_of::<Gfn>() == 16 && align_of::<Gfn>() == 8);

/// A page that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPage {
    /// The memory slot, with the address space in its upper half.
    pub slot: u32,
    /// Index of the page in its slot.
    pub offset: u64,
}

/// How many entries a ring has: a power of two that fills whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingEntries(u32);

impl RingEntries {
    /// The fewest: one page of entries.
    pub const MIN: u32 = 4096 / 16;

    /// `entries`, if a ring can have that many. What KVM allows is for [`enable`] to find out.
    #[must_use]
    pub fn new(entries: u32) -> Option<Self> {
        let bytes = entries.checked_mul(16)?;
        (entries.is_power_of_two() && u64::from(bytes).is_multiple_of(PAGE_SIZE)).then_some(Self(entries))
    }

    /// The number.
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

/// The largest ring that this host offers; `None` if it has no dirty rings.
///
/// # Errors
/// If `vm` is no VM.
pub fn largest(vm: BorrowedFd<'_>) -> Result<Option<RingEntries>, SysError> {
    let bytes = match check_extension(vm, CAP_RING_ACQ_REL)? {
        0 => check_extension(vm, CAP_RING)?,
        bytes => bytes,
    };
    Ok(RingEntries::new(u32::try_from(bytes / size_of::<Gfn>() as u64).unwrap_or(0)))
}

/// Gives every vCPU of `vm`, which has none yet, a ring of `entries`. For good: `KVM_GET_DIRTY_LOG` is refused from now on.
///
/// # Errors
/// If KVM refuses: the VM has vCPUs or rings already, or `entries` are too many or too few for this host.
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

/// Calls `call` while the calling thread takes no signals; those that come wait. `errno` is the call's.
fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: sets of our own, initialised before they are read; only the calling thread's mask is changed, and put back.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = call();
        // It returns its error and leaves errno alone; it cannot fail with a mask that was in force before.
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

/// Has KVM protect the pages of all harvested entries of all vCPUs' rings again, and free the entries. Says how many.
///
/// The number says little: another thread's call may have taken the same entries. When a call that was made after entries
/// were marked has returned, *and no other call is under way*, those of them that no longer
/// [await a reset](DirtyRing::awaits_reset) are protected.
///
/// *Signals are blocked meanwhile.* Since Linux 6.17 ("KVM: Bail from the dirty ring reset flow if a signal is pending",
/// 49005a2a3d2a) a pending signal ends the reset between two entries, and the up to 64 pages whose entries were freed last
/// and gathered to be protected together are then not protected: writes to them would never be seen again, and nothing
/// tells which they are (the call returns how many it freed, or 0, and no error). What cannot be blocked still can do that: a process that is stopped (`SIGSTOP`), frozen or traced
/// in this very call. Comparing all pages (`--verify`) finds such a page.
///
/// # Errors
/// What KVM says. Should it be `EINTR`, call again.
pub fn reset(vm: BorrowedFd<'_>) -> Result<u32, SysError> {
    let count = without_signals(|| {
        // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument; it changes rings and page protection, no memory of ours.
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

/// The ring of one vCPU, mapped in this process.
///
/// Indexes count up for ever, and wrap around at the ring's size and at 2^32 alike.
#[derive(Debug)]
pub struct DirtyRing {
    start: NonNull<Gfn>,
    entries: RingEntries,
}

// SAFETY: the mapping belongs to the value, and is used through atomics only.
unsafe impl Send for DirtyRing {}
// SAFETY: as above.
unsafe impl Sync for DirtyRing {}

impl DirtyRing {
    /// Maps the ring of `vcpu`, whose VM was [enabled](enable) with `entries`. Stays mapped if the descriptor is closed.
    ///
    /// # Errors
    /// If `vcpu` is no vCPU, or its ring is smaller.
    pub fn map(vcpu: BorrowedFd<'_>, entries: RingEntries) -> Result<Self, SysError> {
        let failed = |source: std::io::Error| {
            SysError::from_io("mmap of a dirty ring", format!("a vCPU, {entries} entries"), source, |errno| {
                match errno {
                    libc::EFAULT | libc::EINVAL => "this is no vCPU, or it has no ring of this size",
                    other => common(other),
                }
            })
        };
        need_small_pages("mmap of a dirty ring")?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let (len, from) = (entries.bytes(), RING_PAGE * PAGE_SIZE);
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, vcpu, from) };
        let start = start.map_err(|errno| failed(errno.into()))?;
        let start = NonNull::new(start.cast::<Gfn>())
            .ok_or_else(|| failed(std::io::ErrorKind::AddrNotAvailable.into()))?;
        let ring = Self { start, entries };
        ring.populate().map_err(failed)?;
        Ok(ring)
    }

    /// Faults all pages in now: for those that are not there, a later access would be a SIGBUS.
    fn populate(&self) -> std::io::Result<()> {
        // SAFETY: the range is the mapping's; populating it changes nothing that could be seen.
        let done = unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.entries.bytes(), libc::MADV_POPULATE_WRITE)
        };
        match std::io::Error::last_os_error() {
            _ if done == 0 => Ok(()),
            // Linux before 5.14 does not know this advice.
            error if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            error => Err(error),
        }
    }

    /// How many entries it has.
    #[must_use]
    pub fn entries(&self) -> RingEntries {
        self.entries
    }

    fn gfn(&self, index: u32) -> &Gfn {
        let at = (index & (self.entries.0 - 1)) as usize;
        // SAFETY: `at` is less than the entries that are mapped for as long as `self` lives; all bytes are atomics, for
        // which every value is valid; the kernel's writes are atomic to us.
        unsafe { self.start.add(at).as_ref() }
    }

    /// The page in entry `index`, if it is dirty: written and not harvested yet.
    #[must_use]
    pub fn dirty(&self, index: u32) -> Option<RingPage> {
        let gfn = self.gfn(index);
        // Acquire: KVM stores the page, then releases the flags.
        let fresh = gfn.flags.load(Ordering::Acquire) & (DIRTY | HARVESTED) == DIRTY;
        fresh.then(|| RingPage {
            slot: gfn.slot.load(Ordering::Relaxed),
            offset: gfn.offset.load(Ordering::Relaxed),
        })
    }

    /// Marks entry `index`, which was dirty and has been read, for the next [`reset`].
    pub fn mark_harvested(&self, index: u32) {
        // Release: KVM may put another page into the entry once it sees this.
        self.gfn(index).flags.store(HARVESTED, Ordering::Release);
    }

    /// Whether entry `index` is harvested and KVM has not reset it yet.
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
    fn requests_and_sizes_are_the_documented_ones() {
        assert_eq!(RESET_DIRTY_RINGS, 0xaec7);
        assert_eq!(RingEntries::new(4096).map(RingEntries::get), Some(4096));
        assert_eq!(RingEntries::new(RingEntries::MIN).map(RingEntries::bytes), Some(4096));
        for wrong in [0, 1, 128, 4095, 5000, 1 << 28, u32::MAX] {
            assert_eq!(RingEntries::new(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_no_vm_is_refused() {
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
        // A file in the place of a vCPU: the same memory at the same offset, and a hole for a smaller ring.
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
    fn ring_that_is_smaller_than_asked_for_is_refused() {
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
