//! Tests of saving and loading with vCPUs of KVM that are not in a `Guest`.

use super::msrs::{self, MsrPlan};
use super::set_as_firmware;
use super::transfer::{self, HostTsc, XsaveSize};
use crate::CpuChoice;
use crate::cpuid::CpuModel;
use crate::state::{Msr, StateError, VcpuState};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vmferry_testkit::{Need, skip};

const MCG_CAP: u32 = 0x179;
const MCG_STATUS: u32 = 0x17a;
const MCG_CTL: u32 = 0x17b;
const MC0_CTL: u32 = 0x400;
/// Bit of MCG_CAP: MCG_CTL exists.
const MCG_CTL_P: u64 = 1 << 8;

struct Bare {
    _vm: VmFd,
    vcpu: VcpuFd,
    plan: MsrPlan,
    xsave: XsaveSize,
    tsc: HostTsc,
    shadow_stacks: bool,
}

fn kvm() -> Option<Kvm> {
    Kvm::new().map_err(|error| skip(Need::Kvm, error)).ok()
}

impl Bare {
    fn new(kvm: &Kvm) -> Self {
        let vm = kvm.create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let model = CpuModel::new(kvm, CpuChoice::Host, 1, false).unwrap();
        vcpu.set_cpuid2(&model.of_vcpu(0).unwrap()).unwrap();
        set_as_firmware(&vcpu);
        Self {
            plan: MsrPlan::probe(kvm, &vcpu).unwrap(),
            xsave: XsaveSize::new(vm.check_extension_int(Cap::Xsave2)),
            tsc: HostTsc::of(kvm, &vcpu).unwrap(),
            shadow_stacks: model.has_shadow_stacks(),
            vcpu,
            _vm: vm,
        }
    }

    fn save(&self) -> VcpuState {
        transfer::save(0, &self.vcpu, &self.plan, self.xsave).unwrap()
    }

    fn load(&self, saved: &VcpuState) -> Result<(), StateError> {
        transfer::load(0, &self.vcpu, saved, (self.xsave, self.tsc))
    }

    fn set(&self, index: u32, value: u64) {
        assert!(msrs::set(&self.vcpu, Msr { index, value }), "{index:#x}");
    }
}

fn value(saved: &VcpuState, index: u32) -> Option<u64> {
    saved.msrs.iter().find(|msr| msr.index == index).map(|msr| msr.value)
}

#[test]
fn machine_check_registers_survive_a_move() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (Bare::new(&kvm), Bare::new(&kvm));
    let banks = u32::try_from(msrs::get(&source.vcpu, MCG_CAP).unwrap() & 0xff).unwrap();
    assert!(banks > 0);
    source.set(MCG_STATUS, 5);
    for bank in 0..banks {
        let first = MC0_CTL + 4 * bank;
        source.set(first, if bank % 2 == 0 { u64::MAX } else { 0 });
        (1..4).for_each(|register| source.set(first + register, u64::from(first + register) << 32 | 1));
    }
    let saved = source.save();
    // The target has had another guest.
    target.set(MC0_CTL + 4, u64::MAX);
    target.load(&saved).unwrap();
    for index in [MCG_CAP, MCG_STATUS].into_iter().chain(MC0_CTL..MC0_CTL + 4 * banks) {
        assert_eq!(msrs::get(&target.vcpu, index), msrs::get(&source.vcpu, index), "{index:#x}");
    }
    assert_eq!(target.save().msrs, saved.msrs);
}

/// Checks registers that KVM keeps and does not list, if this KVM keeps them at all.
#[test]
fn registers_that_kvm_does_not_list_survive_a_move() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (Bare::new(&kvm), Bare::new(&kvm));
    // The first variable memory type range, DEBUGCTL (single-stepping on branches), OSVW.
    let candidates = [(0x200, 6), (0x1d9, 2), (0xc001_0140, 4), (0xc001_0141, 8)];
    let kept = candidates.into_iter().filter(|&(index, value)| {
        msrs::set(&source.vcpu, Msr { index, value }) && msrs::get(&source.vcpu, index) == Some(value)
    });
    let kept: Vec<_> = kept.collect();
    assert!(!kept.is_empty());
    target.load(&source.save()).unwrap();
    for (index, value) in kept {
        assert_eq!(msrs::get(&target.vcpu, index), Some(value), "{index:#x}");
    }
}

#[test]
fn target_sets_up_the_machine_check_banks_of_the_guest() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (Bare::new(&kvm), Bare::new(&kvm));
    source.set(MC0_CTL + 1, 7);
    let mut saved = source.save();
    let set = |saved: &mut VcpuState, index: u32, value: u64| {
        saved.msrs.iter_mut().find(|msr| msr.index == index).unwrap().value = value;
    };
    set(&mut saved, MCG_CAP, 10 | MCG_CTL_P);
    set(&mut saved, MCG_CTL, u64::MAX);
    target.load(&saved).unwrap();
    assert_eq!(msrs::get(&target.vcpu, MCG_CAP), Some(10 | MCG_CTL_P));
    assert_eq!(msrs::get(&target.vcpu, MCG_CTL), Some(u64::MAX));
    assert_eq!(
        msrs::get(&target.vcpu, MC0_CTL),
        Some(0),
        "the load clears the bits that KVM_X86_SETUP_MCE sets"
    );
    assert_eq!(msrs::get(&target.vcpu, MC0_CTL + 1), Some(7));
    let again = MsrPlan::of(&saved.msrs, &target.vcpu);
    assert_eq!(transfer::save(0, &target.vcpu, &again, target.xsave).unwrap().msrs, saved.msrs);

    set(&mut saved, MCG_CAP, 200);
    let error = target.load(&saved).unwrap_err().to_string();
    assert!(error.contains("KVM_X86_SETUP_MCE on MCG_CAP 0xc8"), "{error}");
}

#[test]
fn state_of_a_version_without_machine_checks_is_loaded_and_saved_with_them() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (Bare::new(&kvm), Bare::new(&kvm));
    let mut old = source.save();
    old.msrs.retain(|msr| msr.index != MCG_CAP && !(MC0_CTL..MC0_CTL + 128).contains(&msr.index));
    target.load(&old).unwrap();
    let plan = MsrPlan::of(&old.msrs, &target.vcpu);
    // The guest continues, and enables a bank.
    target.set(MC0_CTL, u64::MAX);
    let again = transfer::save(0, &target.vcpu, &plan, target.xsave).unwrap();
    assert_eq!(again.msrs[..old.msrs.len()], old.msrs);
    assert_eq!(
        (value(&again, MCG_CAP), value(&again, MC0_CTL)),
        (msrs::get(&source.vcpu, MCG_CAP), Some(u64::MAX))
    );
}

#[test]
fn more_registers_can_be_moved_than_one_ioctl_accepts() {
    let Some(kvm) = kvm() else { return };
    let bare = Bare::new(&kvm);
    // SYSENTER_ESP many times: the last value remains.
    let many: Vec<Msr> = (0..600).map(|value| Msr { index: 0x175, value }).collect();
    msrs::load(0, &bare.vcpu, &many).unwrap();
    let read = MsrPlan::of(&many, &bare.vcpu).save(0, &bare.vcpu).unwrap();
    assert!(read[..600].iter().all(|msr| *msr == many[599]), "{:?}", read[0]);
}

#[test]
fn unsupported_tsc_frequency_is_refused_before_kvm_is_asked() {
    let Some(kvm) = kvm() else { return };
    let bare = Bare::new(&kvm);
    let mut saved = bare.save();
    let host = saved.tsc_khz;
    saved.tsc_khz = host + host / 10_000;
    bare.load(&saved).unwrap();
    assert_eq!(bare.vcpu.get_tsc_khz().unwrap(), saved.tsc_khz, "100 ppm more is tolerated");

    saved.tsc_khz = host * 2;
    let loaded = bare.load(&saved);
    if kvm.check_extension(Cap::TscControl) {
        loaded.unwrap();
        assert_eq!(bare.vcpu.get_tsc_khz().unwrap(), saved.tsc_khz);
        return;
    }
    let error = loaded.unwrap_err();
    let same =
        matches!(error, StateError::TscFrequency { guest, host: ours } if guest == host * 2 && ours == host);
    assert!(same, "{error}");
    let said = error.to_string();
    assert!(said.contains(&host.to_string()) && said.contains(&saved.tsc_khz.to_string()), "{said}");
    assert_ne!(bare.vcpu.get_tsc_khz().unwrap(), saved.tsc_khz);
    // A second attempt is refused too, although KVM accepts the frequency: KVM would correct the
    // counter on each entry instead of scaling it.
    assert!(bare.vcpu.set_tsc_khz(saved.tsc_khz).is_ok());
    assert!(matches!(bare.load(&saved), Err(StateError::TscFrequency { .. })));
}

#[test]
fn shadow_stack_pointer_survives_a_move() {
    let Some(kvm) = kvm() else { return };
    let (source, target) = (Bare::new(&kvm), Bare::new(&kvm));
    let mut saved = source.save();
    if !source.shadow_stacks {
        return skip(Need::Cpu, "this host's KVM offers no shadow stacks, or does not return their pointer");
    }
    assert_eq!(saved.shadow_stack, Some(0));
    saved.shadow_stack = Some(0x7fff_f000_1238);
    // U_CET: shadow stacks are on; PL3_SSP.
    for (index, value) in [(0x6a0, 1), (0x6a7, 0x7fff_f000_2000)] {
        saved.msrs.iter_mut().find(|msr| msr.index == index).unwrap().value = value;
    }
    target.load(&saved).unwrap();
    let again = target.save();
    assert_eq!((again.shadow_stack, again.msrs), (saved.shadow_stack, saved.msrs));
}

#[test]
fn shadow_stack_pointer_is_refused_if_the_guest_is_shown_no_shadow_stacks() {
    let Some(kvm) = kvm() else { return };
    let bare = Bare::new(&kvm);
    if bare.shadow_stacks {
        return skip(Need::Cpu, "this host's KVM offers shadow stacks");
    }
    let mut saved = bare.save();
    assert_eq!(saved.shadow_stack, None);
    saved.shadow_stack = Some(0x1000);
    let error = bare.load(&saved).unwrap_err().to_string();
    assert!(error.contains("KVM_SET_ONE_REG of the shadow stack pointer"), "{error}");
}
