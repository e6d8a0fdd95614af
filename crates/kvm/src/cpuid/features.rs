//! Features by name: those that a guest was shown, and that a target host must have.

use super::{OfLeaf as _, leaf};
use kvm_bindings::kvm_cpuid_entry2;

/// Register of a CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

use Register::{Eax, Ebx, Ecx, Edx};

impl Register {
    pub(super) const ALL: [Self; 4] = [Eax, Ebx, Ecx, Edx];

    /// Returns the value of this register in `entry`.
    pub(super) fn of(self, entry: &mut kvm_cpuid_entry2) -> &mut u32 {
        match self {
            Eax => &mut entry.eax,
            Ebx => &mut entry.ebx,
            Ecx => &mut entry.ecx,
            Edx => &mut entry.edx,
        }
    }
}

/// Leaf, index and register whose bits are features, with the names of the bits from bit 0 on. `_`
/// is a bit without a name.
type Names = (u32, u32, Register, &'static str);

/// Registers whose bits the source announces to the target, by name.
///
/// The names are part of the wire format: if you add a name or a register, a peer of another
/// version refuses guests that it could run.
const WORDS: &[Names] = &[
    (
        leaf::FEATURES,
        0,
        Ecx,
        "sse3 pclmulqdq _ monitor _ _ _ _ _ ssse3 _ _ fma cx16 _ pdcm _ pcid _ sse4.1 sse4.2 x2apic movbe popcnt \
         tsc-deadline aes xsave _ avx f16c rdrand hypervisor",
    ),
    (
        leaf::FEATURES,
        0,
        Edx,
        "fpu vme de pse tsc msr pae mce cx8 apic _ sep mtrr pge mca cmov pat pse36 _ clflush _ _ _ mmx fxsr sse sse2 ss _",
    ),
    (
        leaf::EXTENDED_FEATURES,
        0,
        Ebx,
        "fsgsbase tsc-adjust _ bmi1 hle avx2 _ smep bmi2 erms invpcid rtm _ _ _ _ avx512f avx512dq rdseed adx smap \
         avx512ifma _ clflushopt clwb _ avx512pf avx512er avx512cd sha-ni avx512bw avx512vl",
    ),
    (
        leaf::EXTENDED_FEATURES,
        0,
        Ecx,
        "_ avx512vbmi umip pku _ waitpkg avx512vbmi2 shstk gfni vaes vpclmulqdq avx512vnni avx512bitalg _ avx512vpopcntdq _ \
         la57 _ _ _ _ _ rdpid _ bus-lock-detect cldemote _ movdiri movdir64b",
    ),
    (
        leaf::EXTENDED_FEATURES,
        0,
        Edx,
        "_ _ _ _ fsrm _ _ _ avx512-vp2intersect _ md-clear _ _ _ serialize _ tsxldtrk _ _ _ ibt _ amx-bf16 avx512-fp16 amx-tile \
         amx-int8 spec-ctrl stibp l1d-flush arch-capabilities core-capabilities ssbd",
    ),
    (leaf::EXTENDED_FEATURES, 1, Eax, "_ _ _ _ avx-vnni avx512-bf16"),
    (leaf::EXTENDED_FEATURES, 1, Edx, ""),
    (leaf::EXTENDED_FEATURES, 2, Edx, ""),
    // Parts of the processor's state that XSAVE covers, and its variants.
    (
        leaf::XSAVE,
        0,
        Eax,
        "x87-state sse-state avx-state _ _ avx512-mask avx512-state avx512-high _ pkru-state",
    ),
    (leaf::XSAVE, 1, Eax, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (
        leaf::KVM_FEATURES,
        0,
        Eax,
        "kvmclock _ _ kvmclock2 _ kvm-steal-time kvm-pv-eoi kvm-pv-unhalt _ kvm-pv-tlb-flush _ kvm-pv-ipi kvm-poll-control \
         kvm-pv-sched-yield _ kvm-msi-ext-dest-id",
    ),
    (
        leaf::AMD_FEATURES,
        0,
        Ecx,
        "lahf _ _ extapic cr8-legacy abm sse4a misalignsse 3dnowprefetch osvw _ xop _ _ _ _ fma4 _ _ _ _ tbm topoext perfctr-core",
    ),
    (
        leaf::AMD_FEATURES,
        0,
        Edx,
        "_ _ _ _ _ _ _ _ _ _ _ syscall _ _ _ _ _ _ _ _ nx _ mmxext _ _ fxsr-opt pdpe1gb rdtscp _ lm",
    ),
    (leaf::AMD_POWER, 0, Edx, "_ _ _ _ _ _ _ _ invtsc"),
    (
        leaf::AMD_SIZES,
        0,
        Ebx,
        "clzero _ xsaveerptr _ _ _ _ _ _ wbnoinvd _ _ amd-ibpb _ amd-ibrs amd-stibp _ amd-stibp-always _ _ _ _ _ _ amd-ssbd \
         virt-ssbd amd-ssb-no",
    ),
    (leaf::AMD_FEATURES_2, 0, Eax, ""),
];

/// Registers whose bits are compared when a guest's state is loaded, but that are not announced:
/// versions that do not announce these names could not receive a guest that has them.
const UNANNOUNCED: &[Names] = &[
    (leaf::EXTENDED_FEATURES, 1, Ecx, ""),
    (leaf::AVX10, 0, Ebx, ""),
    (leaf::AMD_FEATURES_2, 0, Ecx, ""),
    (leaf::AMD_COUNTERS, 0, Eax, ""),
];

/// Returns the names of the features in `entries`, sorted.
///
/// A bit without a name is called by its position, as in `cpuid-7.0.ebx[14]`. Each bit of an
/// address size is a feature too: a guest that was shown a larger size cannot work with a smaller
/// one.
pub(super) fn names(entries: &[kvm_cpuid_entry2]) -> Vec<String> {
    let mut names = names_in(WORDS, entries);
    if let Some(sizes) = entries.of_leaf(leaf::AMD_SIZES, 0) {
        names.extend((33..=sizes.eax & 0xff).map(|bits| format!("physical-address-{bits}")));
        names.extend((49..=sizes.eax >> 8 & 0xff).map(|bits| format!("linear-address-{bits}")));
    }
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns the features in `entries` that [`names`] does not return, by position.
pub(super) fn unannounced(entries: &[kvm_cpuid_entry2]) -> Vec<String> {
    names_in(UNANNOUNCED, entries)
}

fn names_in(words: &[Names], entries: &[kvm_cpuid_entry2]) -> Vec<String> {
    let mut names = Vec::new();
    for (function, index, register, _) in words {
        let Some(mut entry) = entries.of_leaf(*function, *index).copied() else { continue };
        let word = *register.of(&mut entry);
        let bits = (0..32).filter(|bit| word >> bit & 1 == 1 && !placed(*function, *register, *bit));
        names.extend(bits.map(|bit| name(*function, *index, *register, bit)));
    }
    names
}

/// Returns the name of one bit, or its position.
pub(super) fn name(function: u32, index: u32, register: Register, bit: u32) -> String {
    let word = WORDS.iter().find(|word| (word.0, word.1, word.2) == (function, index, register));
    match word.and_then(|word| word.3.split_whitespace().nth(bit as usize)) {
        Some(name) if name != "_" => name.to_owned(),
        _ => format!("cpuid-{function:x}.{index:x}.{register:?}[{bit}]").to_lowercase(),
    }
}

/// Returns true for bits that depend on the position or the current state of a vCPU, not on the
/// processor: OSXSAVE and HTT.
fn placed(function: u32, register: Register, bit: u32) -> bool {
    matches!((function, register, bit), (leaf::FEATURES, Ecx, 27) | (leaf::FEATURES, Edx, 28))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    #[test]
    fn features_have_names_or_positions() {
        let entries = [
            kvm_cpuid_entry2 { ecx: 1 << 28 | 1 << 27 | 1 << 16, edx: 1 << 28 | 1, ..entry(1, 0) },
            kvm_cpuid_entry2 { ebx: 1 << 16 | 1 << 5, ..entry(7, 0) },
            kvm_cpuid_entry2 { eax: 36 | 48 << 8, ..entry(0x8000_0008, 0) },
        ];
        let expected = [
            "avx",
            "avx2",
            "avx512f",
            "cpuid-1.0.ecx[16]",
            "fpu",
            "physical-address-33",
            "physical-address-34",
            "physical-address-35",
            "physical-address-36",
        ];
        assert_eq!(names(&entries), expected);
        assert!(names(&[]).is_empty());
    }

    #[test]
    fn lists_have_at_most_one_name_for_each_bit() {
        for (function, index, register, known) in WORDS {
            let known: Vec<_> = known.split_whitespace().collect();
            assert!(known.len() <= 32, "{function:#x}.{index} {register:?}: {}", known.len());
        }
        // A few bits with well-known positions, so that a shifted list fails the test.
        let place = |name: &str| {
            let word =
                WORDS.iter().find(|word| word.3.split_whitespace().any(|known| known == name)).unwrap();
            (word.0, word.2, word.3.split_whitespace().position(|known| known == name).unwrap())
        };
        assert_eq!(place("hypervisor"), (1, Ecx, 31));
        assert_eq!(place("popcnt"), (1, Ecx, 23));
        assert_eq!(place("sse2"), (1, Edx, 26));
        assert_eq!(place("avx512vl"), (7, Ebx, 31));
        assert_eq!(place("smap"), (7, Ebx, 20));
        assert_eq!(place("la57"), (7, Ecx, 16));
        assert_eq!(place("movdir64b"), (7, Ecx, 28));
        assert_eq!(place("ssbd"), (7, Edx, 31));
        assert_eq!(place("md-clear"), (7, Edx, 10));
        assert_eq!(place("pkru-state"), (0xd, Eax, 9));
        assert_eq!(place("kvm-pv-sched-yield"), (0x4000_0001, Eax, 13));
        assert_eq!(place("topoext"), (0x8000_0001, Ecx, 22));
        assert_eq!(place("lm"), (0x8000_0001, Edx, 29));
        assert_eq!(place("amd-ssbd"), (0x8000_0008, Ebx, 24));
    }
}
