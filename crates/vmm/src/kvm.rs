//! Opening KVM and making an empty virtual machine of it.

use crate::error::{Error, Result};
use crate::irq::LineLocks;
use crate::memory::{GuestRam, RamRegion};
use kvm_bindings::{KVM_API_VERSION, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VmFd};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use vmferry_dirty::LogSlot;
use vmferry_sys::SysError;
use vmferry_sys::kvm::SlotSpec;
use vmferry_sys::ring::{self, RingEntries};

/// Three pages for KVM's own use on Intel hosts, in the hole below the firmware (Linux, virt/kvm/api.rst,
/// `KVM_SET_TSS_ADDR`).
const TSS_ADDR: usize = 0xfffb_d000;
/// One more page, likewise (`KVM_SET_IDENTITY_MAP_ADDR`).
const IDENTITY_MAP_ADDR: u64 = 0xfffb_c000;

/// What the VMM cannot do without: for running a guest, and for moving its whole state.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::PitState2, "KVM_CAP_PIT_STATE2"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
];

/// Opens `/dev/kvm` and checks that a VM can be built with it.
///
/// # Errors
/// What is missing, and what to do about it.
pub fn open_kvm() -> Result<Kvm> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Error::NoKvm,
        libc::EACCES | libc::EPERM => Error::NoPermission,
        errno => Error::OpenKvm(io::Error::from_raw_os_error(errno)),
    })?;
    let found = kvm.get_api_version();
    if u32::try_from(found) != Ok(KVM_API_VERSION) {
        return Err(Error::ApiVersion { found });
    }
    let missing: Vec<_> =
        NEEDED.iter().filter(|(cap, _)| !kvm.check_extension(*cap)).map(|(_, name)| *name).collect();
    if missing.is_empty() { Ok(kvm) } else { Err(Error::MissingCaps(missing)) }
}

/// The most entries that a vCPU's dirty ring can have on this host; `None` if there are no dirty rings.
///
/// # Errors
/// If KVM cannot be used.
pub fn largest_dirty_ring() -> Result<Option<u32>> {
    let vm = open_kvm()?.create_vm().map_err(|e| Error::kvm("KVM_CREATE_VM", e))?;
    // SAFETY: the descriptor is open for as long as `vm` lives.
    let largest = ring::largest(unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) });
    let failed = |error: SysError| Error::DirtyRing { entries: RingEntries::MIN, why: error.to_string() };
    Ok(largest.map_err(failed)?.map(RingEntries::get))
}

/// Whether KVM on this host passes the notifications of drivers on to devices' threads by itself (ioeventfd).
///
/// # Errors
/// If KVM cannot be used.
pub fn passes_kicks() -> Result<bool> {
    Ok(crate::kicks::offered(&open_kvm()?))
}

/// A KVM VM and the memory that it runs in.
///
/// Whoever holds the VM's descriptor holds this, so the memory is mapped for as long as KVM may use it: the descriptor is
/// the first field, and fields are dropped in order.
#[derive(Debug)]
pub(crate) struct Machine {
    fd: VmFd,
    ram: Arc<GuestRam>,
    lines: LineLocks,
}

impl Machine {
    /// Makes a VM with interrupt controllers, timer and memory, and no vCPU; those that come will have a dirty ring of
    /// `ring` entries.
    pub(crate) fn new(kvm: &Kvm, ram: Arc<GuestRam>, ring: Option<RingEntries>) -> Result<Self> {
        let fd = create_vm(kvm, &ram)?;
        if let Some(entries) = ring {
            enable_rings(&fd, entries)?;
        }
        Ok(Self { fd, ram, lines: LineLocks::default() })
    }

    /// Its memory slots, as trackers want them.
    pub(crate) fn log_slots(&self) -> Vec<LogSlot> {
        let slot = |ram: &RamRegion| {
            let spec = SlotSpec {
                slot: ram.region().id.0,
                flags: 0,
                gpa: ram.region().gpa.0,
                len: ram.region().len,
                host: ram.host_address(),
            };
            LogSlot::new(spec, Some(ram.marks().bitmap()))
        };
        self.ram.regions().iter().map(slot).collect()
    }

    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// The locks of its interrupt lines.
    pub(crate) fn lines(&self) -> &LineLocks {
        &self.lines
    }
}

impl AsRawFd for Machine {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn enable_rings(vm: &VmFd, entries: RingEntries) -> Result<()> {
    // SAFETY: the descriptor is open for as long as `vm` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
    let failed = |source: SysError| Error::DirtyRing { entries: entries.get(), why: source.to_string() };
    match ring::largest(fd).map_err(failed)? {
        None => {
            let why = "KVM on this host has none; leave --dirty-ring off".to_owned();
            Err(Error::DirtyRing { entries: entries.get(), why })
        }
        Some(largest) if largest.get() < entries.get() => {
            let why = format!("KVM on this host allows at most {}", largest.get());
            Err(Error::DirtyRing { entries: entries.get(), why })
        }
        Some(_) => ring::enable(fd, entries).map_err(failed),
    }
}

fn create_vm(kvm: &Kvm, ram: &GuestRam) -> Result<VmFd> {
    let vm = kvm.create_vm().map_err(|e| Error::kvm("KVM_CREATE_VM", e))?;
    vm.set_tss_address(TSS_ADDR).map_err(|e| Error::kvm("KVM_SET_TSS_ADDR", e))?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDR).map_err(|e| Error::kvm("KVM_SET_IDENTITY_MAP_ADDR", e))?;
    vm.create_irq_chip().map_err(|e| Error::kvm("KVM_CREATE_IRQCHIP", e))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(|e| Error::kvm("KVM_CREATE_PIT2", e))?;
    for region in ram.regions() {
        let slot = kvm_userspace_memory_region {
            slot: region.region().id.0,
            // Dirty logging starts when a migration does: until then the guest may have huge pages.
            flags: 0,
            guest_phys_addr: region.region().gpa.0,
            memory_size: region.region().len,
            userspace_addr: region.host_address(),
        };
        // SAFETY: the mapping covers the slot's range, and `Machine` keeps it for as long as the VM's descriptor.
        unsafe { vm.set_user_memory_region(slot) }.map_err(|error| Error::MemorySlot {
            len: region.region().len,
            gpa: region.region().gpa.0,
            source: io::Error::from_raw_os_error(error.errno()),
        })?;
    }
    Ok(vm)
}
