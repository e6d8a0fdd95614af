//! Features that a guest may be shown: those whose state is known to be saved.
//!
//! KVM offers more features with every release of Linux, and some of them have state that only an
//! interface of the same release reads. A guest that is shown such a feature loses the state in a
//! move. Therefore this file lists each feature with the part of the saved state that carries it,
//! and hides a feature that is not listed. Before you add a bit, look up which registers the
//! feature has and how KVM returns them.
//!
//! Sources: Intel SDM volume 2A, CPUID, and volume 1, chapter 13; AMD APM volume 3, appendix E;
//! Linux, `arch/x86/kvm/cpuid.c` for the offered features and Documentation/virt/kvm/api.rst for
//! the interfaces.

use super::baseline::bits;
use super::features::{self, Register};
use super::{EDX_HTT, leaf};
use Register::{Eax, Ebx, Ecx, Edx};
use kvm_bindings::kvm_cpuid_entry2;

/// Leaf, index, register, and the bits in it.
pub(super) type Word = (u32, u32, Register, u32);

/// Instructions without state of their own. Their operands are general registers (`KVM_GET_REGS`),
/// memory, and vector registers, which [`XSAVED`] carries. Bits that describe the processor (not
/// vulnerable to an attack, always in some mode) are here too.
const INSTRUCTIONS: &[Word] = &[
    // SSE3, PCLMULQDQ, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, AES, AVX, F16C, RDRAND,
    // hypervisor.
    (leaf::FEATURES, 0, Ecx, bits(&[0, 1, 9, 12, 13, 19, 20, 22, 23, 25, 28, 29, 30, 31])),
    // FPU, CX8, CMOV, CLFLUSH, MMX, FXSR, SSE, SSE2, self snoop.
    (leaf::FEATURES, 0, Edx, bits(&[0, 8, 15, 19, 23, 24, 25, 26, 27])),
    // ARAT: the local APIC's timer does not stop.
    (leaf::THERMAL, 0, Eax, bits(&[2])),
    // BMI1, HLE, AVX2, FDP_EXCPTN_ONLY, BMI2, ERMS, INVPCID, RTM, ZERO_FCS_FDS, AVX-512 F and DQ,
    // RDSEED, ADX, AVX-512 IFMA, CLFLUSHOPT, CLWB, AVX-512 PF, ER and CD, SHA, AVX-512 BW and VL. A
    // transaction of RTM ends when the vCPU leaves the guest.
    (
        leaf::EXTENDED_FEATURES,
        0,
        Ebx,
        bits(&[3, 4, 5, 6, 8, 9, 10, 11, 13, 16, 17, 18, 19, 21, 23, 24, 26, 27, 28, 29, 30, 31]),
    ),
    // AVX-512 VBMI, VBMI2, GFNI, VAES, VPCLMULQDQ, AVX-512 VNNI, BITALG and VPOPCNTDQ, CLDEMOTE,
    // MOVDIRI, MOVDIR64B.
    (leaf::EXTENDED_FEATURES, 0, Ecx, bits(&[1, 6, 8, 9, 10, 11, 12, 14, 25, 27, 28])),
    // AVX-512 4VNNIW and 4FMAPS, FSRM, AVX-512 VP2INTERSECT, MD_CLEAR, SERIALIZE, TSXLDTRK,
    // AMX-BF16, AVX-512 FP16, AMX-INT8, FLUSH_L1D.
    (leaf::EXTENDED_FEATURES, 0, Edx, bits(&[2, 3, 4, 8, 10, 14, 16, 22, 23, 25, 28])),
    // SHA512, SM3, SM4, AVX-VNNI, AVX-512 BF16, CMPCCXADD, FZRM, FSRS, FSRC, WRMSRNS, AMX-FP16,
    // AVX-IFMA.
    (leaf::EXTENDED_FEATURES, 1, Eax, bits(&[0, 1, 2, 4, 5, 7, 10, 11, 12, 19, 21, 23])),
    // MSR_IMM.
    (leaf::EXTENDED_FEATURES, 1, Ecx, bits(&[5])),
    // AVX-VNNI-INT8, AVX-NE-CONVERT, AMX-COMPLEX, AVX-VNNI-INT16, PREFETCHITI, AVX10.
    (leaf::EXTENDED_FEATURES, 1, Edx, bits(&[4, 5, 8, 10, 14, 19])),
    // MCDT_NO.
    (leaf::EXTENDED_FEATURES, 2, Edx, bits(&[5])),
    // Vector lengths of AVX10: 128, 256, 512.
    (leaf::AVX10, 0, Ebx, bits(&[16, 17, 18])),
    // LAHF, CMP_LEGACY, CR8_LEGACY, ABM, SSE4A, MISALIGNSSE, 3DNOWPREFETCH, XOP, FMA4, TBM,
    // TOPOEXT.
    (leaf::AMD_FEATURES, 0, Ecx, bits(&[0, 1, 4, 5, 6, 7, 8, 11, 16, 21, 22])),
    // FPU, CX8, CMOV, MMXEXT, MMX, FXSR, FXSR_OPT, 1 GiB pages, LM, 3DNOWEXT, 3DNOW.
    (leaf::AMD_FEATURES, 0, Edx, bits(&[0, 8, 15, 22, 23, 24, 25, 26, 29, 30, 31])),
    // CLZERO, XSAVEERPTR, WBNOINVD; STIBP always on, IBRS always on, preferred and for the same
    // mode, SSB_NO, BTC_NO, IBPB_RET.
    (leaf::AMD_SIZES, 0, Ebx, bits(&[0, 2, 9, 16, 17, 18, 19, 26, 29, 30])),
    // NO_NESTED_DATA_BP, WRMSR_XX_BASE_NS, LFENCE_RDTSC, VERW_CLEAR, NULL_SEL_CLR_BASE,
    // NO_SMM_CTL_MSR, PREFETCHI, SBPB, IBPB_BRTYPE, SRSO_NO, SRSO_USER_KERNEL_NO.
    (leaf::AMD_FEATURES_2, 0, Eax, bits(&[0, 1, 2, 5, 6, 9, 20, 27, 28, 29, 30])),
    // TSA_SQ_NO, TSA_L1_NO.
    (leaf::AMD_FEATURES_2, 0, Ecx, bits(&[1, 2])),
];

/// Features that a bit of CR0, CR3, CR4 or EFER enables, and that have no further state:
/// `KVM_GET_SREGS`.
const CONTROL_REGISTERS: &[Word] = &[
    // PCID.
    (leaf::FEATURES, 0, Ecx, bits(&[17])),
    // VME, DE, PSE, TSC, MSR, PAE, PGE, PSE36. (DE: also `KVM_GET_DEBUGREGS`. TSC: also the
    // register of that name.)
    (leaf::FEATURES, 0, Edx, bits(&[1, 2, 3, 4, 5, 6, 13, 17])),
    // FSGSBASE, SMEP, SMAP.
    (leaf::EXTENDED_FEATURES, 0, Ebx, bits(&[0, 7, 20])),
    // UMIP, LA57.
    (leaf::EXTENDED_FEATURES, 0, Ecx, bits(&[2, 16])),
    // LASS, LAM.
    (leaf::EXTENDED_FEATURES, 1, Eax, bits(&[6, 26])),
    // VME, DE, PSE, TSC, MSR, PAE, PGE, PSE36, NX.
    (leaf::AMD_FEATURES, 0, Edx, bits(&[1, 2, 3, 4, 5, 6, 13, 17, 20])),
    // AUTOIBRS.
    (leaf::AMD_FEATURES_2, 0, Eax, bits(&[8])),
];

/// Components of the XSAVE area: `KVM_GET_XSAVE2` returns all components that XCR0 can select,
/// `KVM_GET_XCRS` returns XCR0.
const XSAVED: &[Word] = &[
    // XSAVE.
    (leaf::FEATURES, 0, Ecx, bits(&[26])),
    // PKU.
    (leaf::EXTENDED_FEATURES, 0, Ecx, bits(&[3])),
    // AMX-TILE.
    (leaf::EXTENDED_FEATURES, 0, Edx, bits(&[24])),
    // x87, SSE, AVX, MPX (two), AVX-512 (three), PKRU, AMX (two). MPX and AMX: also registers of
    // KVM's list (BNDCFGS, XFD, XFD_ERR).
    (leaf::XSAVE, 0, Eax, bits(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 17, 18])),
    // XSAVEOPT, XSAVEC, XGETBV1, XSAVES (XSS is in KVM's list), XFD.
    (leaf::XSAVE, 1, Eax, bits(&[0, 1, 2, 3, 4])),
];

/// Features whose state is model-specific registers that are saved: see `vcpu/msrs.rs`.
const REGISTERS: &[Word] = &[
    // SEP, MTRR, PAT; MCE and MCA (all machine-check banks).
    (leaf::FEATURES, 0, Edx, bits(&[7, 11, 12, 14, 16])),
    // TSC_ADJUST, MPX (BNDCFGS).
    (leaf::EXTENDED_FEATURES, 0, Ebx, bits(&[1, 14])),
    // WAITPKG (UMWAIT_CONTROL), RDPID (TSC_AUX), bus lock detection (DEBUGCTL).
    (leaf::EXTENDED_FEATURES, 0, Ecx, bits(&[5, 22, 24])),
    // SPEC_CTRL, STIBP, ARCH_CAPABILITIES, SSBD: SPEC_CTRL and ARCH_CAPABILITIES. (PRED_CMD can
    // only be written.)
    (leaf::EXTENDED_FEATURES, 0, Edx, bits(&[26, 27, 29, 31])),
    // LKGS (KERNEL_GS_BASE).
    (leaf::EXTENDED_FEATURES, 1, Eax, bits(&[18])),
    // PSFD, IPRED_CTRL, RRSBA_CTRL, DDPD_U, BHI_CTRL: SPEC_CTRL.
    (leaf::EXTENDED_FEATURES, 2, Edx, bits(&[0, 1, 2, 3, 4])),
    // OSVW (OSVW_ID_LENGTH, OSVW_STATUS).
    (leaf::AMD_FEATURES, 0, Ecx, bits(&[9])),
    // MCE, SYSCALL (STAR, LSTAR, CSTAR, SYSCALL_MASK), MTRR, MCA, PAT, RDTSCP (TSC_AUX).
    (leaf::AMD_FEATURES, 0, Edx, bits(&[7, 11, 12, 14, 16, 27])),
    // IBPB, IBRS, STIBP, SSBD, VIRT_SSBD, PSFD: SPEC_CTRL and VIRT_SPEC_CTRL.
    (leaf::AMD_SIZES, 0, Ebx, bits(&[12, 14, 15, 24, 25, 28])),
    // GP_ON_USER_CPUID (HWCR).
    (leaf::AMD_FEATURES_2, 0, Eax, bits(&[17])),
];

/// Performance counters. KVM lists their registers, those of PEBS (DS_AREA, PEBS_ENABLE,
/// PEBS_DATA_CFG) and PERF_CAPABILITIES.
const COUNTERS: &[Word] = &[
    // DTES64, PDCM.
    (leaf::FEATURES, 0, Ecx, bits(&[2, 15])),
    // DS.
    (leaf::FEATURES, 0, Edx, bits(&[21])),
    // PERFCTR_CORE.
    (leaf::AMD_FEATURES, 0, Ecx, bits(&[23])),
    // PERFMON_V2.
    (leaf::AMD_COUNTERS, 0, Eax, bits(&[0])),
];

/// Features of the local APIC: `KVM_GET_LAPIC`, and the registers APIC_BASE (in `KVM_GET_SREGS`)
/// and TSC_DEADLINE.
const LOCAL_APIC: &[Word] = &[
    // x2APIC, TSC deadline.
    (leaf::FEATURES, 0, Ecx, bits(&[21, 24])),
    // APIC.
    (leaf::FEATURES, 0, Edx, bits(&[9])),
    (leaf::AMD_FEATURES, 0, Edx, bits(&[9])),
];

/// Features of KVM itself. Their registers are in KVM's list, the clock is saved with the machine,
/// and a vCPU with a pending PV_UNHALT is runnable in `KVM_GET_MP_STATE`.
const PARAVIRTUAL: &[Word] = &[
    // CLOCKSOURCE, NOP_IO_DELAY, CLOCKSOURCE2, STEAL_TIME, PV_EOI, PV_UNHALT, PV_TLB_FLUSH,
    // PV_SEND_IPI, POLL_CONTROL, PV_SCHED_YIELD, MSI_EXT_DEST_ID, CLOCKSOURCE_STABLE.
    (leaf::KVM_FEATURES, 0, Eax, bits(&[0, 1, 3, 5, 6, 7, 9, 11, 12, 13, 15, 24])),
];

/// Shadow stacks: registers of KVM's list, and the stack pointer, which `KVM_GET_ONE_REG` returns
/// since Linux 6.18.
const SHADOW_STACKS: &[Word] = &[(leaf::EXTENDED_FEATURES, 0, Ecx, bits(&[7]))];
/// Tracking of indirect branches: registers of KVM's list (U_CET, S_CET).
const BRANCH_TRACKING: &[Word] = &[(leaf::EXTENDED_FEATURES, 0, Edx, bits(&[20]))];
/// Supervisor components of XSAVES with the registers of shadow stacks and branch tracking.
/// `KVM_GET_XSAVE2` does not return these components, but the registers contain their state.
const CET_COMPONENTS: &[Word] = &[(leaf::XSAVE, 1, Ecx, bits(&[11, 12]))];

/// Registers U_CET and S_CET.
const MSRS_CET: [u32; 2] = [0x6a0, 0x6a2];
/// Registers PL0_SSP to PL3_SSP, and INTERRUPT_SSP_TABLE.
const MSRS_SHADOW_STACK: [u32; 5] = [0x6a4, 0x6a5, 0x6a6, 0x6a7, 0x6a8];

/// Groups of features whose state can be saved on this host.
#[derive(Debug, Clone)]
pub(super) struct Allowed(Vec<&'static [Word]>);

impl Allowed {
    /// Returns the groups that a KVM allows with or without `KVM_CAP_ONE_REG`, and with this list
    /// of model-specific registers.
    ///
    /// `KVM_CAP_ONE_REG` and the register of the shadow stack pointer appeared in the same release
    /// of Linux.
    pub(super) fn new(one_reg: bool, msrs: &[u32]) -> Self {
        let mut groups =
            vec![INSTRUCTIONS, CONTROL_REGISTERS, XSAVED, REGISTERS, COUNTERS, LOCAL_APIC, PARAVIRTUAL];
        let listed = |wanted: &[u32]| wanted.iter().all(|index| msrs.contains(index));
        if listed(&MSRS_CET) {
            groups.extend([BRANCH_TRACKING, CET_COMPONENTS]);
            if one_reg && listed(&MSRS_SHADOW_STACK) {
                groups.push(SHADOW_STACKS);
            }
        }
        Self(groups)
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> impl Iterator<Item = Word> {
        self.0.iter().copied().flatten().copied()
    }

    /// Returns the bits of a register that are features and may be shown to a guest.
    fn features(&self, function: u32, index: u32, register: Register) -> u32 {
        let words = self.0.iter().copied().flatten();
        let of_register = words.filter(|word| (word.0, word.1, word.2) == (function, index, register));
        of_register.fold(0, |all, word| all | word.3)
    }

    /// Returns the bits of EAX, EBX, ECX and EDX that are not features but sizes, names and counts.
    /// `None` if the leaf is hidden.
    fn data(&self, function: u32, index: u32) -> Option<[u32; 4]> {
        const ALL: u32 = u32::MAX;
        Some(match (function, index) {
            (leaf::VENDOR | leaf::DESCRIPTORS | leaf::CACHES | leaf::COUNTERS, _)
            | (leaf::TSC | leaf::FREQUENCY | leaf::TILES | leaf::HYPERVISOR, _)
            | (leaf::AMD_HIGHEST | leaf::AMD_NAME..=leaf::AMD_CACHE_L2, _)
            | (leaf::AMD_TLB_1G | leaf::AMD_WIDTHS | leaf::AMD_CACHES | leaf::AMD_TOPOLOGY, _)
            | (leaf::TILE_MULTIPLIER, 0) => [ALL; 4],
            // HTT depends on the topology.
            (leaf::FEATURES, _) => [ALL, ALL, 0, EDX_HTT],
            // Highest index.
            (leaf::EXTENDED_FEATURES, 0) => [ALL, 0, 0, 0],
            (leaf::EXTENDED_FEATURES, 1 | 2) => [0; 4],
            // EBX and ECX have the size of all components.
            (leaf::XSAVE, 0) => [0, ALL, ALL, 0],
            (leaf::XSAVE, 1) => [0, ALL, 0, 0],
            (leaf::XSAVE, component) => {
                let user = self.features(leaf::XSAVE, 0, Eax);
                let shown = user | self.features(leaf::XSAVE, 1, Ecx);
                return (shown.checked_shr(component)? & 1 == 1).then_some([ALL; 4]);
            }
            // Version; see `limit`.
            (leaf::AVX10, 0) => [0, 0xff, 0, 0],
            (leaf::THERMAL | leaf::KVM_FEATURES | leaf::AMD_POWER | leaf::AMD_FEATURES_2, _) => [0; 4],
            (leaf::AMD_FEATURES, _) => [ALL, ALL, 0, 0],
            (leaf::AMD_SIZES, _) => [ALL, 0, ALL, 0],
            // Number of counters.
            (leaf::AMD_COUNTERS, _) => [0, 0xf, 0, 0],
            _ => return None,
        })
    }

    /// Clears the bits of an entry that are not on the list, and adds their names to `hidden`.
    /// Returns whether the leaf stays.
    pub(super) fn limit(&self, e: &mut kvm_cpuid_entry2, hidden: &mut Vec<String>) -> bool {
        let (function, index) = (e.function, e.index);
        let Some(data) = self.data(function, index) else {
            if [e.eax, e.ebx, e.ecx, e.edx] != [0; 4] {
                hidden.push(format!("cpuid-{function:x}.{index:x}"));
            }
            return false;
        };
        for (register, data) in Register::ALL.into_iter().zip(data) {
            let word = register.of(e);
            let gone = *word & !(data | self.features(function, index, register));
            *word &= !gone;
            let bits = (0..32).filter(|bit| gone >> bit & 1 == 1);
            hidden.extend(bits.map(|bit| features::name(function, index, register, bit)));
        }
        if (function, index) == (leaf::AVX10, 0) && e.ebx & 0xff > 1 {
            // Version 1 has the registers of AVX-512. This program does not know the additions of
            // later versions.
            e.ebx = e.ebx & !0xff | 1;
            hidden.push("avx10 later than version 1".to_owned());
        }
        true
    }
}
