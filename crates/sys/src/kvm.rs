//! Dirty log of KVM (Linux `Documentation/virt/kvm/api.rst`, sections 4.8, 4.35, 4.117 and 7.18).
//!
//! The functions take the file descriptor of the VM and act on existing memory slots.
//! [`set_slot_flags`] is unsafe because it could create a slot, and [`get_dirty_log`] is unsafe
//! because KVM derives the size of the log from the slot. One function is not about the log:
//! [`setup_machine_checks`] takes the descriptor of a vCPU and sets up machine-check banks.

use crate::error::{common, need_small_pages};
use crate::ioctl::{call, call_value, io, iow, iowr};
use crate::{PAGE_SIZE, SysError};
use std::os::fd::BorrowedFd;

const GROUP: u8 = 0xae;
const CHECK_EXTENSION: u64 = io(GROUP, 0x03);
const GET_DIRTY_LOG: u64 = iow::<DirtyLog>(GROUP, 0x42);
const SET_USER_MEMORY_REGION: u64 = iow::<UserMemoryRegion>(GROUP, 0x46);
const ENABLE_CAP: u64 = iow::<EnableCap>(GROUP, 0xa3);
const CLEAR_DIRTY_LOG: u64 = iowr::<ClearDirtyLog>(GROUP, 0xc0);
const X86_SETUP_MCE: u64 = iow::<u64>(GROUP, 0x9c);

/// Number of `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
const CAP_MANUAL_PROTECT: u32 = 168;

/// Slot flag `KVM_MEM_LOG_DIRTY_PAGES`: KVM records the written pages of the slot.
pub const MEM_LOG_DIRTY_PAGES: u32 = 1;

/// Mode in which the dirty log of a VM is cleared, as the flags of the capability
/// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManualProtect(u64);

impl ManualProtect {
    /// Bit `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE`: reading the log does not clear it, and
    /// `KVM_CLEAR_DIRTY_LOG` clears it instead.
    pub const ENABLE: u64 = 1;
    /// Bit `KVM_DIRTY_LOG_INITIALLY_SET`: when logging is enabled, every bit is set and no page is
    /// protected.
    pub const INITIALLY_SET: u64 = 2;

    /// Mode with neither bit set: enabling the log protects every page at once, and reading the log
    /// clears it.
    ///
    /// A VM with dirty rings must use this mode. With [`INITIALLY_SET`](Self::INITIALLY_SET), no
    /// page would be protected, and KVM would not record the first write to a page.
    pub const NONE: Self = Self(0);

    /// Creates flags from the bits [`ENABLE`](Self::ENABLE) and
    /// [`INITIALLY_SET`](Self::INITIALLY_SET).
    #[must_use]
    pub const fn new(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns true if the log is cleared by `KVM_CLEAR_DIRTY_LOG`, not by reading it.
    #[must_use]
    pub fn enabled(self) -> bool {
        self.0 & Self::ENABLE != 0
    }

    /// Returns true if every bit is set in a log that has just been enabled.
    #[must_use]
    pub fn initially_set(self) -> bool {
        self.0 & Self::INITIALLY_SET != 0
    }
}

/// Description of a memory slot as it was registered with KVM (`KVM_SET_USER_MEMORY_REGION`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSpec {
    /// Number of the slot.
    pub slot: u32,
    /// Flags of the slot besides [`MEM_LOG_DIRTY_PAGES`].
    pub flags: u32,
    /// Guest-physical address of the slot.
    pub gpa: u64,
    /// Length of the slot in bytes.
    pub len: u64,
    /// Address in this process at which the memory of the slot is mapped.
    pub host: u64,
}

#[repr(C)]
struct DirtyLog {
    slot: u32,
    padding: u32,
    bitmap: u64,
}

#[repr(C)]
struct ClearDirtyLog {
    slot: u32,
    num_pages: u32,
    first_page: u64,
    bitmap: u64,
}

#[repr(C)]
struct UserMemoryRegion {
    slot: u32,
    flags: u32,
    guest_phys_addr: u64,
    memory_size: u64,
    userspace_addr: u64,
}

#[repr(C)]
struct EnableCap {
    cap: u32,
    flags: u32,
    args: [u64; 4],
    pad: [u8; 64],
}

const _: () = assert!(size_of::<DirtyLog>() == 16 && size_of::<ClearDirtyLog>() == 24);
const _: () = assert!(size_of::<UserMemoryRegion>() == 32 && size_of::<EnableCap>() == 104);

/// Returns the number of 64-bit words in the dirty log of `len` bytes of guest memory.
#[must_use]
pub fn log_words(len: u64) -> usize {
    usize::try_from((len / PAGE_SIZE).div_ceil(64)).unwrap_or(usize::MAX)
}

/// Returns the flags of manual protection that this VM supports.
///
/// # Errors
/// Returns an error if `vm` is not a VM.
pub fn manual_protect_offered(vm: BorrowedFd<'_>) -> Result<ManualProtect, SysError> {
    let offered = check_extension(vm, CAP_MANUAL_PROTECT)?;
    Ok(ManualProtect(offered & (ManualProtect::ENABLE | ManualProtect::INITIALLY_SET)))
}

/// Sets the mode in which the dirty logs of all slots are cleared. `flags` must be a subset of the
/// result of [`manual_protect_offered`].
///
/// # Errors
/// Returns an error if the VM does not support `flags`.
pub fn enable_manual_protect(vm: BorrowedFd<'_>, flags: ManualProtect) -> Result<(), SysError> {
    let what = (CAP_MANUAL_PROTECT, "KVM_ENABLE_CAP(MANUAL_DIRTY_LOG_PROTECT2)");
    enable_cap(vm, what, flags.0, || "the VM".to_owned(), common)
}

/// Returns the value of a capability of `vm`, or 0 if the VM does not have the capability.
pub(crate) fn check_extension(vm: BorrowedFd<'_>, cap: u32) -> Result<u64, SysError> {
    // SAFETY: KVM_CHECK_EXTENSION takes a number and changes nothing.
    let answer = unsafe { call_value(vm, CHECK_EXTENSION, u64::from(cap)) };
    u64::try_from(answer).map_err(|_| SysError::last("KVM_CHECK_EXTENSION", || "the VM".to_owned(), common))
}

/// Enables a capability that takes a number and does not touch the memory of this process.
pub(crate) fn enable_cap(
    vm: BorrowedFd<'_>,
    (cap, name): (u32, &'static str),
    argument: u64,
    target: impl FnOnce() -> String,
    meaning: impl FnOnce(i32) -> &'static str,
) -> Result<(), SysError> {
    let mut cap = EnableCap { cap, flags: 0, args: [argument, 0, 0, 0], pad: [0; 64] };
    // SAFETY: the structure belongs to the request, and the capabilities of this crate only change
    // the meaning of other requests.
    if unsafe { call(vm, ENABLE_CAP, &mut cap) } < 0 {
        return Err(SysError::last(name, target, meaning));
    }
    Ok(())
}

/// Sets the flags of a slot to `spec.flags`, plus [`MEM_LOG_DIRTY_PAGES`] if `log` is true.
///
/// # Errors
/// Returns an error if the address or the length of the slot differs from `spec`, if the host has
/// not enough memory for the log, or if `log` is true and the page size of the kernel is not 4 KiB.
///
/// # Safety
/// `spec` describes an existing slot of this VM. If the slot did not exist, KVM would create it,
/// and the guest could write to whatever is mapped at `spec.host`.
pub unsafe fn set_slot_flags(vm: BorrowedFd<'_>, spec: &SlotSpec, log: bool) -> Result<(), SysError> {
    if log {
        need_small_pages("KVM_SET_USER_MEMORY_REGION(LOG_DIRTY_PAGES)")?;
    }
    let mut region = UserMemoryRegion {
        slot: spec.slot,
        flags: spec.flags | if log { MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: spec.gpa,
        memory_size: spec.len,
        userspace_addr: spec.host,
    };
    // SAFETY: the structure belongs to the request. The caller guarantees that the slot exists, so
    // only its flags change.
    if unsafe { call(vm, SET_USER_MEMORY_REGION, &mut region) } < 0 {
        return Err(SysError::last(
            "KVM_SET_USER_MEMORY_REGION",
            || format!("slot {}", spec.slot),
            |errno| match errno {
                libc::EINVAL => {
                    "the slot differs from the one that KVM has, or this KVM cannot log its pages"
                }
                libc::ENOMEM => "the host has not enough free memory for the dirty log",
                other => common(other),
            },
        ));
    }
    Ok(())
}

/// Reads the dirty log of the memory slot `slot`, which has `len` bytes, into the first
/// [`log_words`]`(len)` words of `log`.
///
/// Without manual protection, the call also clears the log and write-protects the pages that were
/// in it.
///
/// # Errors
/// Returns [`SysError::Buffer`] if `log` is too short, and otherwise the error of KVM. `ENXIO`
/// means that the VM uses dirty rings, and `ENOENT` means that the log of the slot is not enabled.
///
/// # Safety
/// `len` is not less than the length of the slot: KVM derives the size of the log from the slot.
pub unsafe fn get_dirty_log(
    vm: BorrowedFd<'_>,
    slot: u32,
    len: u64,
    log: &mut [u64],
) -> Result<(), SysError> {
    const CALL: &str = "KVM_GET_DIRTY_LOG";
    need_small_pages(CALL)?;
    let need = log_words(len);
    if log.len() < need {
        return Err(SysError::Buffer { call: CALL, target: format!("slot {slot}"), have: log.len(), need });
    }
    let mut argument = DirtyLog { slot, padding: 0, bitmap: log.as_mut_ptr().addr() as u64 };
    // SAFETY: KVM writes one bit for each page of the slot, rounded up to 64. The buffer has that
    // many words (checked above with the slot's length, which the caller guarantees) and is
    // exclusively borrowed for the call.
    if unsafe { call(vm, GET_DIRTY_LOG, &mut argument) } < 0 {
        return Err(SysError::last(CALL, || format!("slot {slot}"), log_meaning));
    }
    Ok(())
}

/// Clears those bits in the dirty log of the memory slot `slot` that are set in `bits`, and
/// write-protects their pages.
///
/// Bit `i` of `bits` stands for page `first_page + i` of the slot. Bits of pages that are not in
/// the log are ignored. `first_page` must be a multiple of 64. `pages` must be a multiple of 64
/// unless the range reaches the end of the slot.
///
/// # Errors
/// Returns [`SysError::Buffer`] if `bits` has fewer bits than `pages`, and otherwise the error of
/// KVM.
pub fn clear_dirty_log(
    vm: BorrowedFd<'_>,
    slot: u32,
    first_page: u64,
    pages: u32,
    bits: &[u64],
) -> Result<(), SysError> {
    const CALL: &str = "KVM_CLEAR_DIRTY_LOG";
    need_small_pages(CALL)?;
    let target = || format!("slot {slot}, {pages} pages from {first_page:#x}");
    let need = log_words(u64::from(pages) * PAGE_SIZE);
    if bits.len() < need {
        return Err(SysError::Buffer { call: CALL, target: target(), have: bits.len(), need });
    }
    let mut argument =
        ClearDirtyLog { slot, num_pages: pages, first_page, bitmap: bits.as_ptr().addr() as u64 };
    // SAFETY: KVM reads `pages` bits, rounded up to whole words, from `bits` (checked above). It
    // writes no memory of this process except the argument.
    if unsafe { call(vm, CLEAR_DIRTY_LOG, &mut argument) } < 0 {
        return Err(SysError::last(CALL, target, log_meaning));
    }
    Ok(())
}

/// Sets up the machine-check banks of a vCPU. `mcg_cap` describes the banks in the format of the
/// register MCG_CAP (section 4.104).
///
/// # Errors
/// Returns an error if this KVM has fewer banks or does not support all of the capabilities.
pub fn setup_machine_checks(vcpu: BorrowedFd<'_>, mut mcg_cap: u64) -> Result<(), SysError> {
    // SAFETY: the request reads one number and sets registers of the guest.
    if unsafe { call(vcpu, X86_SETUP_MCE, &mut mcg_cap) } < 0 {
        return Err(SysError::last(
            "KVM_X86_SETUP_MCE",
            || format!("MCG_CAP {mcg_cap:#x}"),
            |errno| match errno {
                libc::EINVAL => "this KVM has fewer machine-check banks, or not all of their capabilities",
                other => common(other),
            },
        ));
    }
    Ok(())
}

fn log_meaning(errno: i32) -> &'static str {
    match errno {
        libc::ENXIO => "the VM was started with a dirty ring, which replaces the log",
        libc::ENOENT => "the slot does not exist or its dirty log is off",
        libc::EINVAL => "the pages are not in the slot, or not aligned to 64",
        other => common(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn requests_have_their_documented_numbers() {
        assert_eq!(CHECK_EXTENSION, 0xae03);
        assert_eq!(GET_DIRTY_LOG, 0x4010_ae42);
        assert_eq!(SET_USER_MEMORY_REGION, 0x4020_ae46);
        assert_eq!(ENABLE_CAP, 0x4068_aea3);
        assert_eq!(CLEAR_DIRTY_LOG, 0xc018_aec0);
        assert_eq!(X86_SETUP_MCE, 0x4008_ae9c);
    }

    #[test]
    fn short_buffers_are_rejected_before_the_call() {
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the descriptor is not a VM, so the call would be refused in any case.
        let error = unsafe { get_dirty_log(null.as_fd(), 3, 65 * PAGE_SIZE, &mut [0]) }.unwrap_err();
        assert!(matches!(error, SysError::Buffer { have: 1, need: 2, .. }), "{error}");
        let error = clear_dirty_log(null.as_fd(), 3, 0, 65, &[0]).unwrap_err();
        assert!(matches!(error, SysError::Buffer { have: 1, need: 2, .. }), "{error}");
    }

    #[test]
    fn error_names_the_call_the_slot_and_the_reason() {
        if vmferry_testkit::skip_if_emulated("KVM_CLEAR_DIRTY_LOG") {
            return;
        }
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = clear_dirty_log(null.as_fd(), 3, 64, 64, &[1]).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOTTY));
        let text = error.to_string();
        assert!(text.contains("KVM_CLEAR_DIRTY_LOG on slot 3, 64 pages from 0x40"), "{text}");
        assert!(text.contains("no such request"), "{text}");
    }
}
