//! Which model-specific registers are saved.

use crate::error::{Error, Result};
use crate::state::{Msr, StateError};
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

/// The time stamp counter; saved by itself, with the time.
pub(super) const TSC: u32 = 0x10;
/// The deadline of the local APIC's timer; loaded after the local APIC.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// Memory type ranges, which KVM keeps and does not list: variable ranges, fixed ranges, default type.
const MEMORY_TYPES: [std::ops::RangeInclusive<u32>; 5] =
    [0x200..=0x20f, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, MTRR_DEFAULT..=MTRR_DEFAULT];
const MTRR_DEFAULT: u32 = 0x2ff;
/// Ranges are on, and what lies in none is write-back: Intel SDM volume 3, 12.11.2.1.
const WRITE_BACK: u64 = 1 << 11 | 6;
const MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;

/// Sets what firmware sets before it starts an operating system, which otherwise takes all memory for uncached and string operations for
/// slow. A KVM that does not take it has no such registers for its guests.
pub(crate) fn set_as_firmware(vcpu: &VcpuFd) {
    set(vcpu, Msr { index: MTRR_DEFAULT, value: WRITE_BACK });
    if let Some(value) = get(vcpu, MISC_ENABLE) {
        set(vcpu, Msr { index: MISC_ENABLE, value: value | FAST_STRINGS });
    }
}

/// The registers that this host's KVM both gives and takes, in KVM's order.
///
/// KVM lists registers that it cannot give for this guest's CPUID, and some that it gives but never takes; what is which
/// depends on kernel and processor. So it is tried, once, on a vCPU that has not run: read, write back, keep what went
/// both ways. On the target every register of a save must be taken, or the load fails: none is dropped silently there.
#[derive(Debug, Clone)]
pub(crate) struct MsrPlan {
    kept: Vec<u32>,
    dropped: Vec<u32>,
}

impl MsrPlan {
    /// Finds out on `vcpu`, which has not run yet.
    pub(crate) fn probe(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Self> {
        let list = kvm.get_msr_index_list().map_err(|e| Error::kvm("KVM_GET_MSR_INDEX_LIST", e))?;
        let listed: Vec<u32> =
            list.as_slice().iter().copied().filter(|i| !matches!(*i, TSC | TSC_DEADLINE)).collect();
        let works =
            |index: &u32| get(vcpu, *index).is_some_and(|value| set(vcpu, Msr { index: *index, value }));
        let unlisted = MEMORY_TYPES.into_iter().flatten().filter(|index| !listed.contains(index));
        let unlisted: Vec<u32> = unlisted.filter(works).collect();
        let (mut kept, dropped): (Vec<u32>, _) = listed.into_iter().partition(works);
        kept.extend(unlisted);
        Ok(Self { kept, dropped })
    }

    /// The registers that a guest came with.
    pub(super) fn of(saved: &[Msr]) -> Self {
        Self { kept: saved.iter().map(|msr| msr.index).collect(), dropped: Vec::new() }
    }

    /// What is not saved, as a sentence; `None` if everything is.
    pub(crate) fn note(&self) -> Option<String> {
        let list: Vec<String> = self.dropped.iter().map(|i| format!("{i:#x}")).collect();
        (!list.is_empty()).then(|| {
            format!(
                "model-specific registers that KVM lists but cannot save and restore here: {}",
                list.join(", ")
            )
        })
    }

    /// Reads the registers of `vcpu`.
    pub(super) fn save(&self, cpu: u32, vcpu: &VcpuFd) -> std::result::Result<Vec<Msr>, StateError> {
        let mut saved = Vec::with_capacity(self.kept.len());
        for chunk in self.kept.chunks(kvm_bindings::KVM_MAX_MSR_ENTRIES) {
            let mut entries = entries(chunk.iter().map(|index| (*index, 0)), cpu)?;
            let read = vcpu.get_msrs(&mut entries).map_err(|e| failed(cpu, "KVM_GET_MSRS", e))?;
            if let Some(index) = chunk.get(read) {
                let why = format!("KVM no longer gives model-specific register {index:#x}");
                return Err(StateError::invalid::<crate::state::VcpuSaved>(cpu, why));
            }
            saved.extend(entries.as_slice().iter().map(|e| Msr { index: e.index, value: e.data }));
        }
        Ok(saved)
    }
}

/// Loads `msrs` into `vcpu`, all of them: KVM may take fewer than it was given and says how many it took.
pub(super) fn load(cpu: u32, vcpu: &VcpuFd, msrs: &[Msr]) -> std::result::Result<(), StateError> {
    for chunk in msrs.chunks(kvm_bindings::KVM_MAX_MSR_ENTRIES) {
        let mut rest = chunk;
        while !rest.is_empty() {
            let entries = entries(rest.iter().map(|msr| (msr.index, msr.value)), cpu)?;
            let taken = vcpu.set_msrs(&entries).map_err(|e| failed(cpu, "KVM_SET_MSRS", e))?;
            rest = rest.get(taken..).unwrap_or_default();
            // The first of the rest was refused. That is no loss if it has this value anyway.
            if let Some((first, after)) = rest.split_first() {
                if get(vcpu, first.index) != Some(first.value) {
                    return Err(StateError::Msr { cpu, index: first.index, value: first.value });
                }
                rest = after;
            }
        }
    }
    Ok(())
}

/// One register; `None` if KVM does not give it.
pub(super) fn get(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let mut one = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    let read = vcpu.get_msrs(&mut one).ok()?;
    (read == 1).then(|| one.as_slice()[0].data)
}

/// Sets one register; says whether KVM took it.
pub(super) fn set(vcpu: &VcpuFd, msr: Msr) -> bool {
    let entry = kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() };
    Msrs::from_entries(&[entry]).is_ok_and(|one| vcpu.set_msrs(&one) == Ok(1))
}

fn entries(pairs: impl Iterator<Item = (u32, u64)>, cpu: u32) -> std::result::Result<Msrs, StateError> {
    let list: Vec<_> =
        pairs.map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() }).collect();
    Msrs::from_entries(&list).map_err(|e| {
        StateError::invalid::<crate::state::VcpuSaved>(cpu, format!("too many registers: {e:?}"))
    })
}

fn failed(cpu: u32, action: &str, error: kvm_ioctls::Error) -> StateError {
    StateError::kvm::<crate::state::VcpuSaved>(cpu, action, error)
}
