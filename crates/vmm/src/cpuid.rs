//! What the guest's processors say they are.
//!
//! The base is what KVM can do on this host; the topology is ours: one package, one thread a core, APIC id = vCPU number.
//! Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E; Linux, virt/kvm/x86/cpuid.rst.

use crate::error::{Error, Result};
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};
use vmferry_memory::PageDigest;

const LEAF_FEATURES: u32 = 1;
const LEAF_CACHES: u32 = 4;
const LEAF_EXTENDED_FEATURES: u32 = 7;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_TSC: u32 = 0x15;
const LEAF_FREQUENCY: u32 = 0x16;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

const ECX_VMX: u32 = 1 << 5;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_OSXSAVE: u32 = 1 << 27;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;
const ECX_OSPKE: u32 = 1 << 4;
const ECX_SVM: u32 = 1 << 2;
/// Asynchronous page faults, by exception, by interrupt, and to a nested hypervisor: they move a fault into a kernel
/// worker, where its time is attributed to nobody, and they would have to be quiesced before a save.
const KVM_ASYNC_PF: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// The processors of a guest.
#[derive(Debug, Clone)]
pub(crate) struct CpuModel {
    base: CpuId,
    cpus: u32,
}

impl CpuModel {
    /// What this host can offer to a guest of `cpus` vCPUs.
    pub(crate) fn new(kvm: &Kvm, cpus: u32) -> Result<Self> {
        let mut base = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| Error::kvm("KVM_GET_SUPPORTED_CPUID", e))?;
        let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        base.retain(|e| !matches!(e.function, LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2));
        base.as_mut_slice().iter_mut().for_each(|e| trim(e, deadline));
        Ok(Self { base, cpus })
    }

    /// The table for vCPU `cpu`.
    pub(crate) fn of_vcpu(&self, cpu: u32) -> Result<CpuId> {
        let mut table = self.base.clone();
        table.as_mut_slice().iter_mut().for_each(|e| place(e, cpu, self.cpus));
        let highest = table.as_slice().iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
        for leaf in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2].into_iter().filter(|leaf| *leaf <= highest) {
            for entry in topology(leaf, cpu, self.cpus) {
                table.push(entry).map_err(|e| Error::Options(format!("the CPUID table is full: {e:?}")))?;
            }
        }
        Ok(table)
    }

    /// Two texts that are equal on two hosts if a guest may move between them: the processor by name, and a digest of all
    /// that CPUID tells the guest.
    pub(crate) fn identity(&self) -> (String, String) {
        let entries = self.base.as_slice();
        let leaf = |function| entries.iter().find(|e| e.function == function).copied().unwrap_or_default();
        let vendor = leaf(0);
        let name: Vec<u8> =
            [vendor.ebx, vendor.edx, vendor.ecx].into_iter().flat_map(u32::to_le_bytes).collect();
        let signature = leaf(LEAF_FEATURES).eax;
        let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
        let model = (signature >> 4 & 0xf) | (signature >> 12 & 0xf0);
        let text = format!("{} {family}/{model}/{}", String::from_utf8_lossy(&name), signature & 0xf);
        let mut bytes = Vec::new();
        for entry in entries.iter().filter(|e| !matches!(e.function, LEAF_TSC | LEAF_FREQUENCY)) {
            let mut e = *entry;
            place(&mut e, 0, 1);
            bytes.extend([e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx].map(u32::to_le_bytes));
        }
        (text, format!("{:016x}", PageDigest::of(bytes.as_flattened()).0))
    }
}

/// Takes out of the host's offer what is not for guests of ours, and what depends on the host's state of the moment.
fn trim(e: &mut kvm_cpuid_entry2, deadline: bool) {
    match (e.function, e.index) {
        (LEAF_FEATURES, _) => {
            // No nested guests: their state is not saved.
            e.ecx = (e.ecx & !(ECX_VMX | ECX_OSXSAVE)) | ECX_HYPERVISOR;
            if deadline {
                e.ecx |= ECX_TSC_DEADLINE;
            }
        }
        (LEAF_EXTENDED_FEATURES, 0) => e.ecx &= !ECX_OSPKE,
        // The size of what the host's kernel has switched on; KVM computes the guest's.
        (LEAF_XSAVE, 0 | 1) => e.ebx = 0,
        (LEAF_KVM_FEATURES, _) => e.eax &= !KVM_ASYNC_PF,
        (LEAF_AMD_FEATURES, _) => e.ecx &= !ECX_SVM,
        _ => {}
    }
}

/// Puts vCPU `cpu` of `cpus` into its place: KVM's offer holds the place of whichever host CPU was asked.
fn place(e: &mut kvm_cpuid_entry2, cpu: u32, cpus: u32) {
    match e.function {
        LEAF_FEATURES => {
            let logical = cpus.next_power_of_two().min(255);
            e.ebx = e.ebx & 0xffff | logical << 16 | cpu << 24;
            e.edx = if cpus > 1 { e.edx | EDX_HTT } else { e.edx & !EDX_HTT };
        }
        LEAF_CACHES if e.eax & 0x1f != 0 => {
            let level = e.eax >> 5 & 7;
            let sharing = if level >= 3 { cpus.next_power_of_two() - 1 } else { 0 };
            let cores = (cpus.next_power_of_two() - 1).min(63);
            e.eax = e.eax & 0x3fff | sharing.min(0xfff) << 14 | cores << 26;
        }
        LEAF_AMD_SIZES => e.ecx = (e.ecx & !0xf0ff) | (cpus - 1).min(255),
        LEAF_AMD_TOPOLOGY => (e.eax, e.ebx, e.ecx) = (cpu, cpu & 0xff, 0),
        _ => {}
    }
}

/// The levels of the topology leaf: one thread a core, `cpus` cores a package, end of list.
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
