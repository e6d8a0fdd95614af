//! Opening KVM and creating an empty virtual machine.

use crate::error::{Error, Result};
use crate::irq::LineLocks;
use crate::memory::GuestRam;
use kvm_bindings::{KVM_API_VERSION, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VmFd};
use std::io;
use std::sync::Arc;
use vmferry_dirty::Marks;
use vmferry_kvm::{KvmVm, RingEntries, missing_capabilities};

/// Address of three pages for KVM's own use on Intel hosts, in the hole below the firmware (Linux,
/// virt/kvm/api.rst, `KVM_SET_TSS_ADDR`).
const TSS_ADDR: usize = 0xfffb_d000;
/// Address of another page for KVM (`KVM_SET_IDENTITY_MAP_ADDR`).
const IDENTITY_MAP_ADDR: u64 = 0xfffb_c000;

/// Capabilities that the VMM requires, besides [what migrating a guest
/// needs](missing_capabilities).
const NEEDED: &[(Cap, &str)] =
    &[(Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"), (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR")];

/// Opens `/dev/kvm` and checks that a VM can be created with it.
///
/// # Errors
/// Returns an error that names what is missing, and the action to take.
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
    let own = NEEDED.iter().filter(|(cap, _)| !kvm.check_extension(*cap)).map(|(_, name)| *name);
    let missing: Vec<_> = missing_capabilities(&kvm).into_iter().chain(own).collect();
    if missing.is_empty() { Ok(kvm) } else { Err(Error::MissingCaps(missing)) }
}

/// Returns the maximum number of entries of a vCPU's dirty ring on this host, or `None` if KVM has
/// no dirty rings.
///
/// # Errors
/// Returns an error if KVM cannot be used.
pub fn largest_dirty_ring() -> Result<Option<u32>> {
    let vm = open_kvm()?.create_vm().map_err(|e| Error::kvm("KVM_CREATE_VM", e))?;
    Ok(vmferry_kvm::largest_dirty_ring(&vm)?.map(RingEntries::get))
}

/// Returns true if KVM on this host can pass the notifications of drivers directly to the threads
/// of devices (ioeventfd).
///
/// # Errors
/// Returns an error if KVM cannot be used.
pub fn passes_kicks() -> Result<bool> {
    Ok(crate::kicks::offered(&open_kvm()?))
}

/// KVM VM with its memory slots, and the guest memory.
#[derive(Debug)]
pub(crate) struct Machine {
    vm: Arc<KvmVm>,
    ram: Arc<GuestRam>,
    lines: LineLocks,
}

impl Machine {
    /// Creates a VM with interrupt controllers, timer and memory, and without vCPUs. vCPUs that are
    /// created later get a dirty ring of `ring` entries.
    pub(crate) fn new(kvm: &Kvm, ram: Arc<GuestRam>, ring: Option<RingEntries>) -> Result<Self> {
        let marks = |id| ram.region(id).map(|region| region.marks().bitmap() as Arc<dyn Marks>);
        // SAFETY: a vCPU's thread holds the machine, by the devices, and drops its vCPU first.
        let vm = unsafe { KvmVm::new(create_vm(kvm)?, Arc::clone(&ram) as _, marks, ring) }?;
        Ok(Self { vm: Arc::new(vm), ram, lines: LineLocks::default() })
    }

    /// Returns the VM with its slots, for the trackers of its dirty pages.
    pub(crate) fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }

    pub(crate) fn fd(&self) -> &VmFd {
        self.vm.fd()
    }

    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Returns the locks of the VM's interrupt lines.
    pub(crate) fn lines(&self) -> &LineLocks {
        &self.lines
    }
}

fn create_vm(kvm: &Kvm) -> Result<VmFd> {
    let vm = kvm.create_vm().map_err(|e| Error::kvm("KVM_CREATE_VM", e))?;
    vm.set_tss_address(TSS_ADDR).map_err(|e| Error::kvm("KVM_SET_TSS_ADDR", e))?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDR).map_err(|e| Error::kvm("KVM_SET_IDENTITY_MAP_ADDR", e))?;
    vm.create_irq_chip().map_err(|e| Error::kvm("KVM_CREATE_IRQCHIP", e))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(|e| Error::kvm("KVM_CREATE_PIT2", e))?;
    Ok(vm)
}
