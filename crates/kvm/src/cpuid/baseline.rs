//! Baseline processor that nearly every x86 host of the last fifteen years can offer: x86-64-v2
//! (x86-64 psABI, "Micro-Architecture Levels").
//!
//! A guest with the baseline processor can move between hosts whose processors have the same vendor
//! but are of different generations. The guest is shown
//! * x86-64-v2: SSE3, SSSE3, SSE4.1, SSE4.2, POPCNT, CMPXCHG16B and LAHF, in addition to the
//!   features of every x86-64 processor;
//! * features that a hypervisor provides on any processor: x2APIC, the TSC deadline timer, its own
//!   leaves;
//! * controls of speculation, if the host has them: a guest without them is less secure. A move to
//!   a host without them is refused.
//!
//! The guest is not shown XSAVE and the features that need it (such as AVX), AES, or later
//! supervisor-mode protections. A guest that needs these runs with the host's processor.

use super::leaf;
use kvm_bindings::kvm_cpuid_entry2;

/// Returns a word with these bits set.
pub(super) const fn bits(numbers: &[u32]) -> u32 {
    let (mut mask, mut at) = (0, 0);
    while at < numbers.len() {
        mask |= 1 << numbers[at];
        at += 1;
    }
    mask
}

/// SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, x2APIC, POPCNT, TSC deadline, hypervisor.
const FEATURES_ECX: u32 = bits(&[0, 9, 13, 19, 20, 21, 23, 24, 31]);
/// FPU to PGE, without PSN and reserved bits; MCA, CMOV, PAT, PSE36, CLFLUSH, MMX, FXSR, SSE, SSE2,
/// HTT (which the topology decides).
const FEATURES_EDX: u32 =
    bits(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26, 28]);
/// MD_CLEAR; IBRS and IBPB, STIBP, L1D_FLUSH, ARCH_CAPABILITIES, SSBD.
const EXTENDED_EDX: u32 = bits(&[10, 26, 27, 28, 29, 31]);
/// LAHF.
const AMD_ECX: u32 = bits(&[0]);
/// Bits that AMD repeats from leaf 1, and SYSCALL, NX, LM.
const AMD_EDX: u32 = (FEATURES_EDX & 0x0183_f3ff) | bits(&[11, 20, 29]);
/// IBPB, IBRS, STIBP, STIBP always on, IBRS preferred, SSBD, VIRT_SSBD, SSB_NO.
const AMD_SPECULATION_EBX: u32 = bits(&[12, 14, 15, 17, 18, 24, 25, 26]);

/// Clears the features of an entry that the baseline does not have. Returns whether the leaf stays.
pub(super) fn limit(e: &mut kvm_cpuid_entry2) -> bool {
    match (e.function, e.index) {
        (leaf::FEATURES, _) => {
            e.ecx &= FEATURES_ECX;
            e.edx &= FEATURES_EDX;
        }
        (leaf::EXTENDED_FEATURES, 0) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, e.edx & EXTENDED_EDX),
        (leaf::AMD_FEATURES, _) => (e.ecx, e.edx) = (e.ecx & AMD_ECX, e.edx & AMD_EDX),
        (leaf::AMD_SIZES, _) => e.ebx &= AMD_SPECULATION_EBX,
        // Further extended features, XSAVE, performance counters and other extensions with their
        // own leaves.
        (leaf::EXTENDED_FEATURES | leaf::XSAVE | leaf::COUNTERS | leaf::QUALITY..leaf::HYPERVISOR, _) => {
            return matches!(e.function, leaf::TSC | leaf::FREQUENCY | leaf::TOPOLOGY_V2);
        }
        (leaf::AMD_TOPOLOGY.., _) => return e.function == leaf::AMD_TOPOLOGY,
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
        let all = u32::MAX;
        let mut e = kvm_cpuid_entry2 {
            function,
            index,
            eax: all,
            ebx: all,
            ecx: all,
            edx: all,
            ..Default::default()
        };
        limit(&mut e).then_some(e)
    }

    #[test]
    fn baseline_is_exactly_x86_64_v2() {
        let features = limited(1, 0).unwrap();
        for (bit, name, there) in [
            (0, "SSE3", true),
            (9, "SSSE3", true),
            (12, "FMA", false),
            (13, "CMPXCHG16B", true),
            (19, "SSE4.1", true),
            (20, "SSE4.2", true),
            (23, "POPCNT", true),
            (25, "AES", false),
            (26, "XSAVE", false),
            (28, "AVX", false),
            (31, "hypervisor", true),
        ] {
            assert_eq!(features.ecx >> bit & 1 == 1, there, "{name}");
        }
        // Every x86-64 processor has SSE2, long mode, NX and SYSCALL.
        assert_eq!(features.edx >> 26 & 1, 1);
        let amd = limited(0x8000_0001, 0).unwrap();
        assert_eq!(amd.edx & bits(&[11, 20, 29]), bits(&[11, 20, 29]));
        assert_eq!((amd.ecx, limited(7, 0).unwrap().ebx), (1, 0));
        assert_eq!(limited(7, 0).unwrap().eax, 0, "no further leaves of extended features");
    }

    #[test]
    fn leaves_of_features_beyond_the_baseline_are_removed() {
        for function in [0xa, 0xd, 0xf, 0x10, 0x12, 0x14, 0x1d, 0x1e, 0x8000_001f, 0x8000_0021] {
            assert!(limited(function, 0).is_none(), "{function:#x}");
        }
        for function in
            [0, 1, 2, 4, 0xb, 0x15, 0x16, 0x1f, 0x4000_0000, 0x4000_0001, 0x8000_0002, 0x8000_001e]
        {
            assert!(limited(function, 0).is_some(), "{function:#x}");
        }
    }
}
