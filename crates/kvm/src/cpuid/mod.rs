//! CPUID of the guest's processors.
//!
//! The CPUID is based on what KVM on this host offers, or on the [baseline]. This crate defines the
//! topology: one package, one thread for each core, APIC id = vCPU number. The CPUID moves with the
//! guest, so that it does not change for the guest. The target host must offer all features that
//! the guest was shown, and may offer more. A feature is shown only if its state is known to be
//! saved ([allowed]). Sources: Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E; Linux,
//! Documentation/virt/kvm/x86/cpuid.rst.

mod allowed;
mod baseline;
mod features;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::state::mirror::Field;
use crate::state::{CpuidState, Saved, Sections, StateError};
use crate::vcpu::set_as_firmware;
use allowed::Allowed;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm, VcpuFd};

/// CPUID leaves, named by their content.
mod leaf {
    pub(super) const VENDOR: u32 = 0;
    pub(super) const FEATURES: u32 = 1;
    pub(super) const DESCRIPTORS: u32 = 2;
    pub(super) const CACHES: u32 = 4;
    pub(super) const THERMAL: u32 = 6;
    pub(super) const EXTENDED_FEATURES: u32 = 7;
    pub(super) const COUNTERS: u32 = 0xa;
    pub(super) const TOPOLOGY: u32 = 0xb;
    pub(super) const XSAVE: u32 = 0xd;
    /// First of many leaves that describe one extension each.
    pub(super) const QUALITY: u32 = 0xf;
    pub(super) const ENCLAVES: u32 = 0x12;
    pub(super) const TRACE: u32 = 0x14;
    pub(super) const TSC: u32 = 0x15;
    pub(super) const FREQUENCY: u32 = 0x16;
    /// Palettes of AMX.
    pub(super) const TILES: u32 = 0x1d;
    pub(super) const TILE_MULTIPLIER: u32 = 0x1e;
    pub(super) const TOPOLOGY_V2: u32 = 0x1f;
    pub(super) const AVX10: u32 = 0x24;
    /// First leaf of the hypervisor.
    pub(super) const HYPERVISOR: u32 = 0x4000_0000;
    pub(super) const KVM_FEATURES: u32 = 0x4000_0001;
    pub(super) const AMD_HIGHEST: u32 = 0x8000_0000;
    pub(super) const AMD_FEATURES: u32 = 0x8000_0001;
    /// First of three leaves with the processor's name. Two leaves about caches follow.
    pub(super) const AMD_NAME: u32 = 0x8000_0002;
    pub(super) const AMD_CACHE_L2: u32 = 0x8000_0006;
    pub(super) const AMD_POWER: u32 = 0x8000_0007;
    pub(super) const AMD_SIZES: u32 = 0x8000_0008;
    pub(super) const AMD_SVM: u32 = 0x8000_000a;
    pub(super) const AMD_TLB_1G: u32 = 0x8000_0019;
    /// Widths of vector units.
    pub(super) const AMD_WIDTHS: u32 = 0x8000_001a;
    pub(super) const AMD_CACHES: u32 = 0x8000_001d;
    pub(super) const AMD_TOPOLOGY: u32 = 0x8000_001e;
    pub(super) const AMD_ENCRYPTION: u32 = 0x8000_001f;
    pub(super) const AMD_FEATURES_2: u32 = 0x8000_0021;
    pub(super) const AMD_COUNTERS: u32 = 0x8000_0022;
}

const ECX_VMX: u32 = 1 << 5;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_OSXSAVE: u32 = 1 << 27;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;
const EBX_ENCLAVES: u32 = 1 << 2;
const EBX_TRACE: u32 = 1 << 25;
const ECX_OSPKE: u32 = 1 << 4;
const ECX_SHADOW_STACKS: u32 = 1 << 7;
const ECX_SVM: u32 = 1 << 2;
/// Invariant TSC: the counter always runs at the same rate, which no counter does across hosts. A
/// guest that is shown this bit uses the counter as its clock, so every move would make the clock
/// jump.
const EDX_INVARIANT_TSC: u32 = 1 << 8;
/// Asynchronous page faults, by exception, by interrupt, and to a nested hypervisor. Such a fault
/// is handled by a kernel worker, whose time is not attributed to the vCPU, and would have to be
/// quiesced before a save.
const KVM_ASYNC_PF: u32 = 1 << 4 | 1 << 10 | 1 << 14;
/// SGX launch control. Earlier versions showed this feature to guests, which cannot use it, because
/// they were shown no enclaves.
const LAUNCH_CONTROL: &str = "cpuid-7.0.ecx[30]";
/// Signature leaf of KVM: highest leaf, and the signature in EBX, ECX, EDX.
const KVM_SIGNATURE: [u32; 4] = [
    leaf::KVM_FEATURES,
    u32::from_le_bytes(*b"KVMK"),
    u32::from_le_bytes(*b"VMKV"),
    u32::from_le_bytes(*b"M\0\0\0"),
];

/// Lookup of CPUID entries.
trait OfLeaf {
    fn of_leaf(&self, function: u32, index: u32) -> Option<&kvm_cpuid_entry2>;
}

impl OfLeaf for [kvm_cpuid_entry2] {
    fn of_leaf(&self, function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
        self.iter().find(|e| e.function == function && e.index == index)
    }
}

/// Processor that a guest is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuChoice {
    /// Processor with all features that this host can offer. The guest can move only to hosts that
    /// offer all of these features.
    #[default]
    Host,
    /// Baseline processor x86-64-v2, without AVX and AES, which nearly every host can offer.
    Baseline,
}

/// CPUID of a guest: the results of the `CPUID` instruction.
///
/// A guest that has found a feature continues to use it, so a target must offer every feature that
/// the guest was shown. [`features`](Self::features) returns the names of these features for
/// [`MachineConfig`](vmferry_core::MachineConfig). If a target does not offer all of them, the
/// engine refuses the migration before anything is moved. When the guest's state is loaded,
/// [`GuestState::take`](crate::GuestState::take) checks again.
///
/// A guest is shown a feature only if its state is known to be saved. [`note`](Self::note) names
/// the hidden features.
#[derive(Debug, Clone)]
pub struct CpuModel {
    base: CpuId,
    cpus: u32,
    /// Features that this version does not show to guests, but earlier versions may have shown.
    accepted: Vec<String>,
    /// Features that KVM offers and that are hidden because their state is not known to be saved.
    hidden: Vec<String>,
}

impl CpuModel {
    /// Creates the CPUID that this host can offer to a guest with `cpus` vCPUs, limited to the
    /// processor `choice`. Set `incoming` to true if the guest arrives from another VM instead of
    /// booting in this one.
    ///
    /// # Errors
    /// Returns [`Error::Ioctl`] if KVM does not report the supported features.
    pub fn new(kvm: &Kvm, choice: CpuChoice, cpus: u32, incoming: bool) -> Result<Self> {
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| Error::ioctl("KVM_GET_SUPPORTED_CPUID", e))?;
        let msrs = kvm.get_msr_index_list().map_err(|e| Error::ioctl("KVM_GET_MSR_INDEX_LIST", e))?;
        let allowed = Allowed::new(kvm.check_extension(Cap::OneReg), msrs.as_slice());
        let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        let mut model = Self::of_host(supported, deadline, &allowed, cpus);
        if choice == CpuChoice::Baseline {
            model.base.retain(|e| baseline::limit(&mut e.clone()));
            model.base.as_mut_slice().iter_mut().for_each(|e| _ = baseline::limit(e));
            (model.hidden, model.accepted) = (Vec::new(), Vec::new());
        }
        if !incoming {
            model.accepted.clear();
        }
        Ok(model)
    }

    /// Creates the model from KVM's offer, without the features that guests are not shown.
    fn of_host(supported: CpuId, deadline: bool, allowed: &Allowed, cpus: u32) -> Self {
        let mut base = supported;
        let dropped = [
            leaf::TOPOLOGY,
            leaf::TOPOLOGY_V2,
            leaf::ENCLAVES,
            leaf::TRACE,
            leaf::AMD_SVM,
            leaf::AMD_ENCRYPTION,
        ];
        base.retain(|e| !dropped.contains(&e.function));
        base.as_mut_slice().iter_mut().for_each(|e| trim(e, deadline));
        let mut hidden = Vec::new();
        base.as_mut_slice().iter_mut().for_each(|e| _ = allowed.limit(e, &mut hidden));
        base.retain(|e| allowed.limit(&mut e.clone(), &mut Vec::new()));
        let (accepted, hidden) = hidden.into_iter().partition(|name| name == LAUNCH_CONTROL);
        Self { base, cpus, accepted, hidden }
    }

    /// Creates the model of a host whose KVM offers `entries`.
    #[cfg(feature = "hostile")]
    pub(crate) fn offering(entries: &[kvm_cpuid_entry2], cpus: u32) -> Self {
        let base = CpuId::from_entries(entries).expect("few enough");
        Self { base, cpus, accepted: Vec::new(), hidden: Vec::new() }
    }

    /// Returns a text that names the features which are hidden because their state is not known to
    /// be saved, or `None` if there are no such features.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        (!self.hidden.is_empty()).then(|| {
            format!(
                "the guest is not shown processor features whose state this version cannot save: {}",
                self.hidden.join(", ")
            )
        })
    }

    /// Returns the model of a guest that was shown `saved`.
    ///
    /// # Errors
    /// Returns an error if `saved` is not a valid table, or has features that `self`, the offer of
    /// this host, does not have.
    pub(crate) fn of_guest(&self, saved: &CpuidState) -> std::result::Result<Self, StateError> {
        let invalid = |why: String| StateError::invalid(CpuidState::KIND, 0, why);
        if saved.entries.len() > KVM_MAX_CPUID_ENTRIES {
            return Err(invalid(format!("{} entries", saved.entries.len())));
        }
        let entries: Vec<_> = saved.entries.iter().map(Field::put).collect();
        let base = CpuId::from_entries(&entries).map_err(|e| invalid(format!("{e:?}")))?;
        let model = Self { base, cpus: self.cpus, accepted: Vec::new(), hidden: Vec::new() };
        let ours = [self.features(), features::unannounced(self.base.as_slice())].concat();
        let theirs = [model.features(), features::unannounced(model.base.as_slice())].concat();
        match theirs.iter().find(|name| !ours.contains(name)) {
            Some(name) => Err(invalid(format!("the guest was shown {name}, which this host does not offer"))),
            None => Ok(model),
        }
    }

    /// Returns the CPUID as the state that moves with the guest.
    pub(crate) fn save(&self) -> CpuidState {
        CpuidState { entries: self.base.as_slice().iter().map(Field::get).collect() }
    }

    /// Takes the CPUID of the guest out of `parts`. `self` is the offer of this host.
    pub(crate) fn take(&self, parts: &mut Sections<'_>) -> std::result::Result<Self, StateError> {
        self.of_guest(&parts.take_saved(0)?)
    }

    /// Sets the CPUID of the new vCPU number `cpu`, and the registers that firmware sets before it
    /// starts a kernel.
    ///
    /// Call this before you set the registers of the boot protocol: KVM checks control registers
    /// against the CPUID.
    ///
    /// # Errors
    /// Returns [`Error::Ioctl`] if KVM refuses the CPUID, and [`Error::CpuidFull`] if the CPUID has
    /// too many entries.
    pub fn set_up(&self, cpu: u32, vcpu: &VcpuFd) -> Result<()> {
        let set = vcpu.set_cpuid2(&self.of_vcpu(cpu)?);
        set.map_err(|e| Error::ioctl(format!("KVM_SET_CPUID2 of vCPU {cpu}"), e))?;
        set_as_firmware(vcpu);
        Ok(())
    }

    /// Returns the CPUID of vCPU `cpu`, with its position in the topology: one package, one thread
    /// for each core.
    ///
    /// # Errors
    /// Returns [`Error::CpuidFull`] if the CPUID has too many entries for KVM.
    pub fn of_vcpu(&self, cpu: u32) -> Result<CpuId> {
        let mut table = self.base.clone();
        table.as_mut_slice().iter_mut().for_each(|e| place(e, cpu, self.cpus));
        let highest = table.as_slice().of_leaf(leaf::VENDOR, 0).map_or(0, |e| e.eax);
        for leaf in [leaf::TOPOLOGY, leaf::TOPOLOGY_V2].into_iter().filter(|leaf| *leaf <= highest) {
            for entry in topology(leaf, cpu, self.cpus) {
                table.push(entry).map_err(|_| Error::CpuidFull)?;
            }
        }
        Ok(table)
    }

    /// Returns the name of the processor's vendor, such as `GenuineIntel`. A guest cannot move
    /// between vendors, because software depends on differences between their processors.
    #[must_use]
    pub fn vendor(&self) -> String {
        let vendor = self.base.as_slice().of_leaf(leaf::VENDOR, 0).copied().unwrap_or_default();
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        String::from_utf8_lossy(name.as_flattened()).into_owned()
    }

    /// Returns the names of the features that a guest of this model may use, in ascending order. A
    /// target must offer all of these features.
    #[must_use]
    pub fn features(&self) -> Vec<String> {
        let mut names = features::names(self.base.as_slice());
        names.extend_from_slice(&self.accepted);
        names.sort_unstable();
        names
    }

    /// Returns whether the guest is shown shadow stacks, and therefore has a shadow stack pointer.
    #[must_use]
    pub fn has_shadow_stacks(&self) -> bool {
        self.base
            .as_slice()
            .of_leaf(leaf::EXTENDED_FEATURES, 0)
            .is_some_and(|e| e.ecx & ECX_SHADOW_STACKS != 0)
    }
}

/// Removes features from the host's offer that guests are not shown, and bits that depend on the
/// current state of the host.
fn trim(e: &mut kvm_cpuid_entry2, deadline: bool) {
    match (e.function, e.index) {
        (leaf::FEATURES, _) => {
            // No nested guests: their state is not saved.
            e.ecx = (e.ecx & !(ECX_VMX | ECX_OSXSAVE)) | ECX_HYPERVISOR;
            if deadline {
                e.ecx |= ECX_TSC_DEADLINE;
            }
        }
        (leaf::EXTENDED_FEATURES, 0) => {
            e.ebx &= !(EBX_ENCLAVES | EBX_TRACE);
            e.ecx &= !ECX_OSPKE;
        }
        // Size of the components that the host's kernel has enabled. KVM computes the value for the
        // guest.
        (leaf::XSAVE, 0 | 1) => e.ebx = 0,
        (leaf::HYPERVISOR, _) => [e.eax, e.ebx, e.ecx, e.edx] = KVM_SIGNATURE,
        (leaf::KVM_FEATURES, _) => e.eax &= !KVM_ASYNC_PF,
        (leaf::AMD_POWER, _) => e.edx &= !EDX_INVARIANT_TSC,
        (leaf::AMD_FEATURES, _) => e.ecx &= !ECX_SVM,
        _ => {}
    }
}

/// Sets the position of vCPU `cpu` among `cpus`. KVM's offer has the position of the host CPU that
/// ran the ioctl.
fn place(e: &mut kvm_cpuid_entry2, cpu: u32, cpus: u32) {
    match e.function {
        leaf::FEATURES => {
            let logical = cpus.next_power_of_two().min(255);
            e.ebx = e.ebx & 0xffff | logical << 16 | cpu << 24;
            e.edx = if cpus > 1 { e.edx | EDX_HTT } else { e.edx & !EDX_HTT };
        }
        leaf::CACHES if e.eax & 0x1f != 0 => {
            let level = e.eax >> 5 & 7;
            let sharing = if level >= 3 { cpus.next_power_of_two() - 1 } else { 0 };
            let cores = (cpus.next_power_of_two() - 1).min(63);
            e.eax = e.eax & 0x3fff | sharing.min(0xfff) << 14 | cores << 26;
        }
        leaf::AMD_SIZES => e.ecx = (e.ecx & !0xf0ff) | (cpus - 1).min(255),
        leaf::AMD_TOPOLOGY => (e.eax, e.ebx, e.ecx) = (cpu, cpu & 0xff, 0),
        _ => {}
    }
}

/// Returns the levels of the topology leaf: one thread for each core, `cpus` cores for each
/// package, end of list.
fn topology(leaf: u32, cpu: u32, cpus: u32) -> [kvm_cpuid_entry2; 3] {
    const THREADS: u32 = 1;
    const CORES: u32 = 2;
    let level = |index: u32, shift: u32, count: u32, kind: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | kind << 8,
        edx: cpu,
        ..Default::default()
    };
    [level(0, 0, 1, THREADS), level(1, cpus.next_power_of_two().ilog2(), cpus, CORES), level(2, 0, 0, 0)]
}
