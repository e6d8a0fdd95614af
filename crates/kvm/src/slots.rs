//! VM with its memory slots, and the trackers of their dirty pages.

use crate::error::{Error, Result};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use vmferry_core::{GuestMemory, Region, RegionId};
use vmferry_dirty::{DirtyRings, KvmLogTracker, LogSlot, Marks, TrackerError};
use vmferry_sys::SysError;
use vmferry_sys::kvm::SlotSpec;
use vmferry_sys::ring::{self, RingEntries};

/// Capabilities of KVM that are necessary to move the whole state of a guest.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::PitState2, "KVM_CAP_PIT_STATE2"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
];

/// Returns the names of the capabilities that moving a guest requires and that KVM on this host
/// does not have. The list is empty on every host with Linux 4.12 or newer and an x86-64 KVM.
#[must_use]
pub fn missing_capabilities(kvm: &Kvm) -> Vec<&'static str> {
    NEEDED.iter().filter(|(cap, _)| !kvm.check_extension(*cap)).map(|(_, name)| *name).collect()
}

/// Virtual machine of KVM, with its memory slots and the memory behind them.
///
/// Each region of the guest's memory is one slot, which has the number of the region. The memory
/// stays mapped for as long as this value, or a tracker that was created from it, lives.
///
/// ```no_run
/// use std::sync::Arc;
/// use vmferry_core::GuestMemory;
/// use vmferry_kvm::{KvmVm, Result};
///
/// fn make(kvm: &kvm_ioctls::Kvm, memory: Arc<dyn GuestMemory>) -> Result<Arc<KvmVm>> {
///     let vm = kvm.create_vm().expect("a VM");
///     vm.create_irq_chip().expect("interrupt controllers");
///     // This VMM has no device that writes guest memory, so there are no marks.
///     // SAFETY: the thread of each vCPU holds the result, and drops its vCPU first.
///     let vm = unsafe { KvmVm::new(vm, memory, |_| None, None) }?;
///     Ok(Arc::new(vm))
/// }
/// ```
pub struct KvmVm {
    fd: VmFd,
    slots: Vec<LogSlot>,
    ring: Option<RingEntries>,
    /// Owner of the mappings.
    memory: Arc<dyn GuestMemory>,
}

impl fmt::Debug for KvmVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmVm").field("slots", &self.slots).field("ring", &self.ring).finish_non_exhaustive()
    }
}

impl KvmVm {
    /// Creates a memory slot in `fd`, a VM without vCPUs, for each region of `memory`. Dirty
    /// logging is off until a tracker starts, so that KVM can map huge pages until then.
    ///
    /// `marks` is called with the number of each region. It returns the [`Marks`] that record the
    /// pages which the VMM itself writes in this region, or `None` if there are no such writes. If
    /// `ring` is given, each vCPU has a dirty ring of this size, and the VM has no dirty log.
    ///
    /// # Errors
    /// Returns [`Error::MemorySlot`] if KVM refuses a slot, [`Error::DirtyRing`] if KVM does not
    /// support rings of this size, and [`Error::Memory`] if `memory` returns no window onto a
    /// region.
    ///
    /// # Safety
    /// No vCPU of the VM may run after the result, and everything that was created from it, has
    /// been dropped. Otherwise KVM would let the guest write to the addresses of its former memory.
    pub unsafe fn new(
        fd: VmFd,
        memory: Arc<dyn GuestMemory>,
        marks: impl Fn(RegionId) -> Option<Arc<dyn Marks>>,
        ring: Option<RingEntries>,
    ) -> Result<Self> {
        if let Some(entries) = ring {
            enable_rings(&fd, entries)?;
        }
        let mut vm = Self { fd, slots: Vec::new(), ring, memory };
        let regions = vm.memory.layout().regions().to_vec();
        for region in regions {
            vm.add_slot(&region, marks(region.id))?;
        }
        Ok(vm)
    }

    fn add_slot(&mut self, region: &Region, marks: Option<Arc<dyn Marks>>) -> Result<()> {
        let window = self.memory.window(region.id, region.run());
        let window = window.map_err(|error| Error::Memory(region.id, error))?;
        let spec = SlotSpec {
            slot: region.id.0,
            flags: 0,
            gpa: region.gpa.0,
            len: region.len,
            host: window.as_ptr().expose_provenance() as u64,
        };
        // SAFETY: the window covers the whole region, and it may live as long as `memory` is
        // borrowed. This value holds `memory`, and no vCPU runs when the value is dropped
        // (guaranteed by the caller of `new`).
        unsafe { set_slot(&self.fd, &spec) }.map_err(|error| Error::MemorySlot {
            len: spec.len,
            gpa: spec.gpa,
            source: io::Error::from_raw_os_error(error.errno()),
        })?;
        self.slots.push(LogSlot::new(spec, marks));
        Ok(())
    }

    /// Returns the VM.
    ///
    /// Do not change the memory slots through this descriptor. (The function of kvm-ioctls that
    /// does so is `unsafe`.)
    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Returns the memory slots.
    #[must_use]
    pub fn slots(&self) -> &[LogSlot] {
        &self.slots
    }

    /// Returns the memory behind the slots.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn GuestMemory> {
        &self.memory
    }

    /// Returns a tracker that finds dirty pages with KVM's dirty log. If the VM has dirty rings,
    /// use [`map_rings`](Self::map_rings) instead.
    ///
    /// # Errors
    /// Returns [`TrackerError`] if the marks of a region do not cover exactly the pages of the
    /// region.
    pub fn log_tracker(self: &Arc<Self>) -> Result<KvmLogTracker, TrackerError> {
        let vm: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(self) as _;
        // SAFETY: this value keeps its descriptor and its memory for as long as it lives. These are
        // the slots that it was created with, which never change.
        unsafe { KvmLogTracker::new(vm, self.slots.clone()) }
    }

    /// Maps the dirty rings of `vcpus`, which must be all vCPUs of this VM in the order of their
    /// numbers. Call this method once, after the vCPUs were created. A
    /// [`RingTracker`](vmferry_dirty::RingTracker) uses the rings to find dirty pages.
    ///
    /// # Errors
    /// Returns [`Error::DirtyRing`] if the VM was created without rings, or a ring cannot be
    /// mapped.
    pub fn map_rings(self: &Arc<Self>, vcpus: &[VcpuFd]) -> Result<DirtyRings> {
        let Some(entries) = self.ring else {
            return Err(Error::DirtyRing {
                entries: 0,
                why: "the VM was created without dirty rings".to_owned(),
            });
        };
        // SAFETY: the descriptors are open for as long as `vcpus` is borrowed.
        let borrow = |fd: &VcpuFd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        let vcpus: Vec<_> = vcpus.iter().map(borrow).collect();
        let vm: Arc<dyn AsRawFd + Send + Sync> = Arc::clone(self) as _;
        // SAFETY: as in `log_tracker`: this value keeps its descriptor and its memory for as long
        // as it lives, and its slots never change.
        let rings = unsafe { DirtyRings::new(vm, entries, &vcpus, self.slots.clone()) };
        rings.map_err(|error| Error::DirtyRing { entries: entries.get(), why: error.to_string() })
    }
}

impl AsRawFd for KvmVm {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Creates a memory slot.
///
/// # Safety
/// The memory of the slot must be mapped readable and writable for as long as a vCPU of the VM
/// runs. Rust code must create no references to its bytes, except references to atomics.
unsafe fn set_slot(vm: &VmFd, spec: &SlotSpec) -> std::result::Result<(), kvm_ioctls::Error> {
    let slot = kvm_userspace_memory_region {
        slot: spec.slot,
        flags: spec.flags,
        guest_phys_addr: spec.gpa,
        memory_size: spec.len,
        userspace_addr: spec.host,
    };
    // SAFETY: the caller guarantees the contract of this function.
    unsafe { vm.set_user_memory_region(slot) }
}

/// Returns the maximum number of entries of a dirty ring on this host, or `None` if KVM does not
/// support dirty rings.
///
/// # Errors
/// Returns [`Error::DirtyRing`] if KVM cannot be queried.
pub fn largest_dirty_ring(vm: &VmFd) -> Result<Option<RingEntries>> {
    // SAFETY: the descriptor is open for as long as `vm` is borrowed.
    let largest = ring::largest(unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) });
    largest.map_err(|error| Error::DirtyRing { entries: RingEntries::MIN, why: error.to_string() })
}

fn enable_rings(vm: &VmFd, entries: RingEntries) -> Result<()> {
    // SAFETY: the descriptor is open for as long as `vm` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
    let failed = |source: SysError| Error::DirtyRing { entries: entries.get(), why: source.to_string() };
    match ring::largest(fd).map_err(failed)? {
        None => {
            let why = "KVM on this host has none".to_owned();
            Err(Error::DirtyRing { entries: entries.get(), why })
        }
        Some(largest) if largest.get() < entries.get() => {
            let why = format!("KVM on this host allows at most {}", largest.get());
            Err(Error::DirtyRing { entries: entries.get(), why })
        }
        Some(_) => ring::enable(fd, entries).map_err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Memory;
    use vmferry_core::{Gpa, PAGE_BYTES};
    use vmferry_testkit::{Need, skip};

    fn memory() -> Arc<Memory> {
        Memory::new(RegionId(3), Gpa(0x10_0000), vec![[0; PAGE_BYTES]; 2])
    }

    #[test]
    fn each_region_is_a_slot_and_the_vm_keeps_the_memory() {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return skip(Need::Kvm, error),
        };
        let memory = memory();
        let marks: Arc<dyn Marks> = Arc::new(vmferry_bitmap::AtomicBitmap::new(2));
        let marked = |id: RegionId| (id == RegionId(3)).then(|| Arc::clone(&marks));
        let fd = kvm.create_vm().unwrap();
        // SAFETY: the VM has no vCPU.
        let vm = Arc::new(unsafe { KvmVm::new(fd, Arc::clone(&memory) as _, marked, None) }.unwrap());
        let [slot] = vm.slots() else { panic!("{vm:?}") };
        assert_eq!((slot.spec.slot, slot.spec.gpa, slot.spec.len), (3, 0x10_0000, 0x2000));
        assert!(slot.marks.is_some());
        let tracker = vm.log_tracker().unwrap();
        assert!(
            matches!(vm.map_rings(&[]), Err(Error::DirtyRing { .. })),
            "the VM was created without rings"
        );
        drop(vm);
        assert_eq!(Arc::strong_count(&memory), 2, "the tracker holds the VM and its memory");
        drop(tracker);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn ring_size_that_kvm_does_not_support_is_refused() {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return skip(Need::Kvm, error),
        };
        let entries = RingEntries::new(1 << 27).unwrap();
        // SAFETY: the VM has no vCPU.
        let vm = unsafe { KvmVm::new(kvm.create_vm().unwrap(), memory(), |_| None, Some(entries)) };
        let error = vm.unwrap_err().to_string();
        assert!(error.starts_with("no dirty rings of 134217728 entries: KVM on this host"), "{error}");
    }
}
