use super::allowed::Allowed;
use super::*;

/// Registers of shadow stacks and branch tracking in KVM's list of Linux 6.18.
const CET_MSRS: [u32; 7] = [0x6a0, 0x6a2, 0x6a4, 0x6a5, 0x6a6, 0x6a7, 0x6a8];

fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
}

fn model(entries: &[kvm_cpuid_entry2], one_reg: bool, msrs: &[u32]) -> CpuModel {
    let supported = CpuId::from_entries(entries).unwrap();
    CpuModel::of_host(supported, true, &Allowed::new(one_reg, msrs), 1)
}

/// Returns entries with every bit set, for all leaves of a current processor and some further ones.
fn everything() -> Vec<kvm_cpuid_entry2> {
    let basic = (0..0x30).flat_map(|leaf| (0..4).map(move |index| (leaf, index)));
    let hypervisor = (0..4).map(|leaf| (leaf::HYPERVISOR + leaf, 0));
    let amd = (0..0x28).map(|leaf| (leaf::AMD_HIGHEST + leaf, 0));
    let all = basic.chain(hypervisor).chain(amd);
    all.map(|(leaf, index)| entry(leaf, index, [u32::MAX; 4])).collect()
}

fn word(model: &CpuModel, function: u32, index: u32) -> [u32; 4] {
    model.base.as_slice().of_leaf(function, index).map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

#[test]
fn unknown_features_are_hidden_and_named_once() {
    // SSE3 and x2APIC, and a reserved bit; SMEP, and FRED, whose registers KVM does not list.
    let entries = [
        entry(leaf::FEATURES, 0, [0x600, 0, 1 | 1 << 16 | 1 << 21, 1]),
        entry(leaf::EXTENDED_FEATURES, 0, [2, 1 << 7 | 1 << 22, 0, 0]),
        entry(leaf::EXTENDED_FEATURES, 1, [1 << 4 | 1 << 17, 7, 0, 0]),
        entry(0x1c, 0, [0xff, 0, 0, 0]),
        entry(0x19, 0, [0; 4]),
        entry(leaf::XSAVE, 0, [0x7 | 1 << 19, 0, 0x240, 0]),
        entry(leaf::XSAVE, 2, [0x100, 0x240, 0, 0]),
        entry(leaf::XSAVE, 19, [0x80, 0x3c0, 0, 0]),
    ];
    let model = model(&entries, true, &[]);
    assert_eq!(word(&model, leaf::FEATURES, 0), [0x600, 0, 1 | 1 << 21 | 1 << 24 | 1 << 31, 1]);
    assert_eq!(word(&model, leaf::EXTENDED_FEATURES, 0), [2, 1 << 7, 0, 0]);
    assert_eq!(word(&model, leaf::EXTENDED_FEATURES, 1), [1 << 4, 0, 0, 0]);
    assert_eq!(word(&model, leaf::XSAVE, 0), [0x7, 0, 0x240, 0]);
    assert!(model.base.as_slice().of_leaf(leaf::XSAVE, 2).is_some());
    assert!(model.base.as_slice().of_leaf(leaf::XSAVE, 19).is_none());
    assert!(model.base.as_slice().of_leaf(0x1c, 0).is_none());
    let hidden = "cpuid-1.0.ecx[16], cpuid-7.0.ebx[22], cpuid-7.1.eax[17], cpuid-7.1.ebx[0], cpuid-7.1.ebx[1], cpuid-7.1.ebx[2], \
                  cpuid-1c.0, cpuid-d.0.eax[19], cpuid-d.13";
    assert_eq!(
        model.note().unwrap(),
        format!("the guest is not shown processor features whose state this version cannot save: {hidden}")
    );
}

#[test]
fn host_with_known_features_only_has_no_note() {
    let entries = [
        entry(leaf::FEATURES, 0, [0x600, 0x800, 0x8120_2001, 0x078b_fbff]),
        entry(leaf::EXTENDED_FEATURES, 0, [1, 0x0180_0002, 0x104, 0x2000_0000]),
        entry(3, 0, [0; 4]),
        entry(0x1c, 0, [0; 4]),
        // Nested virtualization, enclaves, traces: documented, and hidden without a note.
        entry(leaf::AMD_FEATURES, 0, [0, 0, 1 << 2 | 1 << 22, 0x23d3_fbff]),
        entry(leaf::AMD_SVM, 0, [1, 8, 0, 0xf]),
        entry(leaf::ENCLAVES, 0, [3, 0, 0, 0]),
        entry(leaf::AMD_POWER, 0, [0, 0, 0, 1 << 8]),
        entry(leaf::KVM_FEATURES, 0, [0x0100_7efb, 0, 0, 0]),
    ];
    let model = model(&entries, true, &CET_MSRS);
    assert_eq!(model.note(), None);
    assert!(model.base.as_slice().of_leaf(leaf::ENCLAVES, 0).is_none());
    assert_eq!(word(&model, leaf::AMD_FEATURES, 0), [0, 0, 1 << 22, 0x23d3_fbff]);
    assert_eq!(word(&model, leaf::KVM_FEATURES, 0), [0x0100_7efb & !KVM_ASYNC_PF, 0, 0, 0]);
}

#[test]
fn shadow_stacks_are_shown_if_kvm_returns_the_pointer_and_the_registers() {
    let entries = [
        entry(leaf::EXTENDED_FEATURES, 0, [0, 0, ECX_SHADOW_STACKS, 1 << 20]),
        entry(leaf::XSAVE, 0, [7, 0, 0, 0]),
        entry(leaf::XSAVE, 1, [0xf, 0, 1 << 11 | 1 << 12 | 1 << 15, 0]),
        entry(leaf::XSAVE, 11, [0x10, 0, 1, 0]),
        entry(leaf::XSAVE, 12, [0x18, 0, 1, 0]),
        entry(leaf::XSAVE, 15, [0x328, 0, 1, 0]),
    ];
    let shown = |one_reg: bool, msrs: &[u32]| {
        let model = model(&entries, one_reg, msrs);
        let components = (10..16).filter(|i| model.base.as_slice().of_leaf(leaf::XSAVE, *i).is_some());
        (
            model.has_shadow_stacks(),
            word(&model, leaf::EXTENDED_FEATURES, 0)[3] != 0,
            word(&model, leaf::XSAVE, 1)[2],
            components.collect::<Vec<_>>(),
        )
    };
    // Components of last branch records and unknown components stay hidden.
    assert_eq!(shown(true, &CET_MSRS), (true, true, 0x1800, vec![11, 12]));
    assert_eq!(shown(false, &CET_MSRS), (false, true, 0x1800, vec![11, 12]));
    assert_eq!(shown(true, &CET_MSRS[..2]), (false, true, 0x1800, vec![11, 12]));
    assert_eq!(shown(true, &[0x10]), (false, false, 0, vec![]));
    let note = model(&entries, false, &[]).note().unwrap();
    assert!(note.contains(": shstk, ibt, cpuid-d.1.ecx[11]"), "{note}");
}

#[test]
fn every_feature_that_can_be_shown_is_compared_with_the_target() {
    for (function, index, register, bits) in Allowed::new(true, &CET_MSRS).words() {
        // ARAT is shown by every KVM. The supervisor components of XSAVES come with features that
        // are compared.
        if function == leaf::THERMAL
            || (function, index, register) == (leaf::XSAVE, 1, features::Register::Ecx)
        {
            continue;
        }
        let mut shown = entry(function, index, [0; 4]);
        *register.of(&mut shown) = bits;
        let compared = [features::names(&[shown]), features::unannounced(&[shown])].concat();
        assert_eq!(
            compared.len(),
            bits.count_ones() as usize,
            "{function:#x}.{index} {register:?}: {compared:?}"
        );
    }
}

#[test]
fn every_baseline_feature_is_allowed() {
    let mut base = everything();
    base.retain(|e| baseline::limit(&mut e.clone()));
    base.iter_mut().for_each(|e| _ = baseline::limit(e));
    let features = |entries: &[kvm_cpuid_entry2]| features::names(entries);
    let limited = model(&base, false, &[]);
    let missing: Vec<_> =
        features(&base).into_iter().filter(|name| limited.features().binary_search(name).is_err()).collect();
    // Reserved bits of leaves that the baseline does not limit, and bits that `trim` removes.
    assert!(
        missing.iter().all(|name| name.contains('[') || name == "invtsc" || name.starts_with("kvm-")),
        "{missing:?}"
    );
}

#[test]
fn guest_with_launch_control_of_an_earlier_version_is_accepted() {
    let offered = [entry(leaf::EXTENDED_FEATURES, 0, [0, 1, 1 << 30, 0])];
    let mut target = model(&offered, true, &[]);
    assert_eq!(word(&target, leaf::EXTENDED_FEATURES, 0), [0, 1, 0, 0]);
    assert_eq!(target.note(), None);
    let guest = CpuModel { base: CpuId::from_entries(&offered).unwrap(), ..target.clone() };
    let arrived = target.of_guest(&guest.save()).unwrap();
    assert_eq!(word(&arrived, leaf::EXTENDED_FEATURES, 0), [0, 1, 1 << 30, 0]);
    assert_eq!(arrived.features(), ["cpuid-7.0.ecx[30]", "fsgsbase"]);
    // A guest that boots on this host was not shown the feature, and does not need it on a target.
    target.accepted.clear();
    assert_eq!(target.features(), ["fsgsbase"]);
}

#[test]
fn unannounced_features_are_compared_when_a_guest_is_loaded() {
    let host = |ecx: u32| [entry(leaf::AMD_FEATURES_2, 0, [0, 0, ecx, 0])];
    let guest = model(&host(1 << 1 | 1 << 2), true, &[]);
    assert!(model(&host(1 << 1 | 1 << 2), true, &[]).of_guest(&guest.save()).is_ok());
    let error = model(&host(1 << 1), true, &[]).of_guest(&guest.save()).unwrap_err().to_string();
    assert!(
        error.contains("the guest was shown cpuid-80000021.0.ecx[2], which this host does not offer"),
        "{error}"
    );
    // Other versions do not know these names.
    assert!(guest.features().is_empty());
}
