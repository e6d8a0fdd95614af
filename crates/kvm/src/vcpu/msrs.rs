//! Selection of the model-specific registers that are saved.
//!
//! The registers that `KVM_GET_MSR_INDEX_LIST` names are saved, and also registers that a guest can
//! change although KVM does not name them ([`UNLISTED`], [`machine_checks`]). The following
//! registers are deliberately not saved:
//!
//! | registers | why |
//! |---|---|
//! | EFER, FS_BASE, GS_BASE, APIC_BASE | in `KVM_GET_SREGS` |
//! | x2APIC (0x800 to 0x8ff) | in `KVM_GET_LAPIC` |
//! | TSC, TSC_DEADLINE | saved separately, because their order matters |
//! | PRED_CMD, FLUSH_CMD, EOI and similar registers | write-only, without content |
//! | registers with a fixed value in KVM (SYSCFG, PERF_STATUS, RAPL, PLATFORM_ID, ...) | the same on every host |
//! | DE_CFG (AMD) | KVM sets what the host supports, and refuses another value once a vCPU has run |
//! | MCi_CTL2, unless MCG_CAP says that these registers exist | zero; KVM before Linux 6.0 refuses it |
//! | last branch records (LBR stack, LASTBRANCHFROMIP, ...) | not offered: see [`set_as_firmware`] |
//! | nested virtualization (capabilities of VMX, registers of SVM), SGX, processor trace | not offered: see `cpuid` |
//! | Hyper-V (0x40000000 on), Xen | not offered: the guest is shown KVM's own leaves |
//!
//! If KVM lists and returns registers of features that are not offered, these registers are saved
//! with the others. They contain zero.

use crate::error::{Error, Result};
use crate::state::{Msr, Saved as _, StateError, VcpuState};
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Time stamp counter. Saved separately, with the time.
pub(super) const TSC: u32 = 0x10;
/// Deadline of the local APIC's timer. Loaded after the local APIC.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// Maximum number of registers in one ioctl. The kernel refuses 256 (`MAX_IO_MSRS` is one more than
/// the accepted number).
const MOST_AT_ONCE: usize = 255;

/// Registers that a guest can change, and that KVM keeps but does not list: memory type ranges
/// (variable, fixed, default), DEBUGCTL (listed by newer kernels), and OSVW (two).
const UNLISTED: [std::ops::RangeInclusive<u32>; 7] = [
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    MTRR_DEFAULT..=MTRR_DEFAULT,
    0x1d9..=0x1d9,
    0xc001_0140..=0xc001_0141,
];
const MTRR_DEFAULT: u32 = 0x2ff;
/// Number and capabilities of the machine-check banks. Set by `KVM_X86_SETUP_MCE`, not by
/// `KVM_SET_MSRS`.
const MCG_CAP: u32 = 0x179;
/// Bit of MCG_CAP: the registers MCi_CTL2 exist.
const MCG_CMCI: u64 = 1 << 10;
const PERF_CAPABILITIES: u32 = 0x345;
/// Bits of PERF_CAPABILITIES: format of last branch records, 0 for none.
const LBR_FORMAT: u64 = 0x3f;
/// Memory type ranges are enabled, and memory outside all ranges is write-back: Intel SDM volume 3,
/// 12.11.2.1.
const WRITE_BACK: u64 = 1 << 11 | 6;
const MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;

/// Sets the registers that firmware sets before it starts an operating system. Without them, an
/// operating system treats all memory as uncached and string operations as slow. A KVM that refuses
/// a value has no such register for its guests.
pub(crate) fn set_as_firmware(vcpu: &VcpuFd) {
    set(vcpu, Msr { index: MTRR_DEFAULT, value: WRITE_BACK });
    // The state of last branch records is not saved. KVM offers them with this register, not with
    // CPUID.
    if let Some(value) = get(vcpu, PERF_CAPABILITIES) {
        set(vcpu, Msr { index: PERF_CAPABILITIES, value: value & !LBR_FORMAT });
    }
    if let Some(value) = get(vcpu, MISC_ENABLE) {
        set(vcpu, Msr { index: MISC_ENABLE, value: value | FAST_STRINGS });
    }
}

/// Registers that KVM on this host both returns and accepts, in KVM's order.
///
/// KVM lists registers that it cannot return for this guest's CPUID, and some that it returns but
/// never accepts. The set depends on kernel and processor. Therefore each register is tested once
/// on a vCPU that has not run: it is read and written back, and is kept if both work. The target
/// must accept every saved register. Otherwise the load fails, because no register is dropped
/// silently.
#[derive(Debug, Clone)]
pub(super) struct MsrPlan {
    kept: Vec<u32>,
    dropped: Vec<u32>,
}

impl MsrPlan {
    /// Determines the registers with `vcpu`, which has not run yet.
    pub(super) fn probe(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Self> {
        let list = kvm.get_msr_index_list().map_err(|e| Error::ioctl("KVM_GET_MSR_INDEX_LIST", e))?;
        let listed: Vec<u32> =
            list.as_slice().iter().copied().filter(|i| !matches!(*i, TSC | TSC_DEADLINE)).collect();
        let works = |index: &u32| works(vcpu, *index);
        let (mut kept, dropped): (Vec<u32>, Vec<u32>) = listed.iter().partition(|index| works(index));
        kept.extend(unlisted().filter(|index| !listed.contains(index)).filter(works));
        Ok(Self { kept, dropped })
    }

    /// Returns the plan for a guest that arrived with the registers `saved`. The plan contains
    /// these registers, and those that earlier versions did not save.
    pub(super) fn of(saved: &[Msr], vcpu: &VcpuFd) -> Self {
        let mut kept: Vec<u32> = saved.iter().map(|msr| msr.index).collect();
        kept.retain(|index| !machine_checks(u64::MAX).any(|bank| bank == *index));
        let more = unlisted().filter(|index| !kept.contains(index) && works(vcpu, *index));
        let more: Vec<u32> = more.collect();
        kept.extend(more);
        Self { kept, dropped: Vec::new() }
    }

    /// Returns a sentence that names the registers that are not saved, or `None` if all are saved.
    pub(super) fn note(&self) -> Option<String> {
        let list: Vec<String> = self.dropped.iter().map(|i| format!("{i:#x}")).collect();
        (!list.is_empty()).then(|| {
            format!(
                "model-specific registers that KVM lists but cannot save and restore on this host: {}",
                list.join(", ")
            )
        })
    }

    /// Reads the registers of `vcpu`. Registers of machine-check banks are omitted if they are
    /// zero.
    pub(super) fn save(&self, cpu: u32, vcpu: &VcpuFd) -> std::result::Result<Vec<Msr>, StateError> {
        let mut saved = read(cpu, vcpu, &self.kept)?;
        if let Some(cap) = saved.iter().find(|msr| msr.index == MCG_CAP) {
            let banks: Vec<u32> = machine_checks(cap.value).collect();
            saved.extend(read(cpu, vcpu, &banks)?.into_iter().filter(|msr| msr.value != 0));
        }
        Ok(saved)
    }
}

fn read(cpu: u32, vcpu: &VcpuFd, indexes: &[u32]) -> std::result::Result<Vec<Msr>, StateError> {
    let mut saved = Vec::with_capacity(indexes.len());
    for chunk in indexes.chunks(MOST_AT_ONCE) {
        let mut entries = entries(chunk.iter().map(|index| (*index, 0)), cpu)?;
        let read = vcpu.get_msrs(&mut entries).map_err(|e| failed(cpu, "KVM_GET_MSRS", e))?;
        if let Some(index) = chunk.get(read) {
            let why = format!("KVM no longer returns model-specific register {index:#x}");
            return Err(StateError::invalid(VcpuState::KIND, cpu, why));
        }
        saved.extend(entries.as_slice().iter().map(|e| Msr { index: e.index, value: e.data }));
    }
    Ok(saved)
}

/// Returns the registers of the machine-check banks of a vCPU with this MCG_CAP: MCi_CTL,
/// MCi_STATUS, MCi_ADDR and MCi_MISC, and MCi_CTL2 if these exist. Source: Intel SDM volume 3,
/// machine-check architecture. The general registers are in KVM's list.
fn machine_checks(mcg_cap: u64) -> impl Iterator<Item = u32> {
    // Architecturally fewer than 29, and at most 32 in KVM.
    let banks = u32::from(mcg_cap.to_le_bytes()[0]).min(32);
    let controls = if mcg_cap & MCG_CMCI == 0 { 0 } else { banks };
    (0x400..0x400 + 4 * banks).chain(0x280..0x280 + controls)
}

/// Returns the registers besides [`machine_checks`] that KVM does not list and may have.
fn unlisted() -> impl Iterator<Item = u32> {
    UNLISTED.into_iter().flatten().chain([MCG_CAP])
}

/// Returns whether KVM both returns and accepts a register. For MCG_CAP, another ioctl sets the
/// value.
fn works(vcpu: &VcpuFd, index: u32) -> bool {
    get(vcpu, index).is_some_and(|value| index == MCG_CAP || set(vcpu, Msr { index, value }))
}

/// Sets up the machine-check banks of the guest in `vcpu`. Earlier versions did not save MCG_CAP,
/// and left the value of KVM.
fn set_up_machine_checks(cpu: u32, vcpu: &VcpuFd, msrs: &[Msr]) -> std::result::Result<(), StateError> {
    let Some(saved) = msrs.iter().find(|msr| msr.index == MCG_CAP) else { return Ok(()) };
    if get(vcpu, MCG_CAP) == Some(saved.value) {
        return Ok(());
    }
    // SAFETY: the descriptor is open for as long as `vcpu` is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
    vmferry_sys::kvm::setup_machine_checks(fd, saved.value)
        .map_err(|error| StateError::invalid(VcpuState::KIND, cpu, error.to_string()))
}

/// Loads all of `msrs` into `vcpu`, and zero into the registers of machine-check banks that are not
/// among them.
pub(super) fn load(cpu: u32, vcpu: &VcpuFd, msrs: &[Msr]) -> std::result::Result<(), StateError> {
    set_up_machine_checks(cpu, vcpu, msrs)?;
    let banks = get(vcpu, MCG_CAP).into_iter().flat_map(machine_checks);
    let zeros = banks.filter(|index| !msrs.iter().any(|msr| msr.index == *index));
    let zeros: Vec<Msr> = zeros.map(|index| Msr { index, value: 0 }).collect();
    load_all(cpu, vcpu, msrs)?;
    load_all(cpu, vcpu, &zeros)
}

/// Loads all of `msrs`. KVM may accept only the first of the registers that it is given, and
/// returns their number.
fn load_all(cpu: u32, vcpu: &VcpuFd, msrs: &[Msr]) -> std::result::Result<(), StateError> {
    for chunk in msrs.chunks(MOST_AT_ONCE) {
        let mut rest = chunk;
        while !rest.is_empty() {
            let entries = entries(rest.iter().map(|msr| (msr.index, msr.value)), cpu)?;
            let taken = vcpu.set_msrs(&entries).map_err(|e| failed(cpu, "KVM_SET_MSRS", e))?;
            rest = rest.get(taken..).unwrap_or_default();
            // KVM refused the first of the rest. This is harmless if the register has the value
            // already.
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

/// Returns the value of one register, or `None` if KVM does not return it.
pub(super) fn get(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let mut one = Msrs::from_entries(&[kvm_msr_entry { index, ..Default::default() }]).ok()?;
    let read = vcpu.get_msrs(&mut one).ok()?;
    (read == 1).then(|| one.as_slice()[0].data)
}

/// Sets one register, and returns whether KVM accepted the value.
pub(super) fn set(vcpu: &VcpuFd, msr: Msr) -> bool {
    let entry = kvm_msr_entry { index: msr.index, data: msr.value, ..Default::default() };
    Msrs::from_entries(&[entry]).is_ok_and(|one| vcpu.set_msrs(&one) == Ok(1))
}

fn entries(pairs: impl Iterator<Item = (u32, u64)>, cpu: u32) -> std::result::Result<Msrs, StateError> {
    let list: Vec<_> =
        pairs.map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() }).collect();
    Msrs::from_entries(&list)
        .map_err(|e| StateError::invalid(VcpuState::KIND, cpu, format!("too many registers: {e:?}")))
}

fn failed(cpu: u32, action: &str, error: kvm_ioctls::Error) -> StateError {
    StateError::kvm::<VcpuState>(cpu, action, error)
}
