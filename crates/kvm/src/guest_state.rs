//! State of a guest that is in KVM.

use crate::cpuid::CpuModel;
use crate::state::{Saved as _, Sections, ShadowStackState, StateError, VcpuState};
use crate::vm_state::{KvmChips, VmState};
use vmferry_core::Section;

type Result<T> = std::result::Result<T, StateError>;

/// All state of a guest that is in KVM: vCPUs, interrupt controllers, timer, clock, and CPUID.
///
/// The state of the VMM's own devices is not included. The VMM adds its own sections for these
/// devices.
#[derive(Debug, Clone)]
pub struct GuestState {
    /// State of each vCPU, in the order of their numbers.
    pub vcpus: Vec<VcpuState>,
    /// State that the vCPUs share.
    pub vm: VmState,
    /// CPUID of the guest.
    pub cpu: CpuModel,
}

impl GuestState {
    /// Returns the sections of this state, for [`SourceVm::save`](vmferry_core::SourceVm::save).
    ///
    /// # Errors
    /// Returns [`StateError::Payload`] if a part cannot be encoded, which cannot happen for state
    /// that was read from KVM.
    pub fn sections(&self) -> Result<Vec<Section>> {
        let mut sections = Vec::with_capacity(2 * self.vcpus.len() + 6);
        for (cpu, vcpu) in (0..).zip(&self.vcpus) {
            sections.push(vcpu.section(cpu)?);
            if let Some(pointer) = vcpu.shadow_stack {
                sections.push(ShadowStackState { pointer }.section(cpu)?);
            }
        }
        self.vm.add_to(&mut sections)?;
        sections.push(self.cpu.save().section(0)?);
        Ok(sections)
    }

    /// Takes the state of a guest with `cpus` vCPUs out of `parts`, for a VM with these `chips`.
    /// `offer` is the CPUID that this host offers. It must include all features that the guest was
    /// shown.
    ///
    /// If this VM does not have a chip, the state of the chip stays in `parts`, and
    /// [`Sections::finish`] names it.
    ///
    /// # Errors
    /// Returns [`StateError`] if a section is missing or damaged. If this host does not offer a
    /// feature of the guest, the error names it.
    pub fn take(parts: &mut Sections<'_>, cpus: u32, chips: KvmChips, offer: &CpuModel) -> Result<Self> {
        let mut vcpus: Vec<VcpuState> = (0..cpus).map(|cpu| parts.take_saved(cpu)).collect::<Result<_>>()?;
        let vm = VmState::take(parts, chips)?;
        let cpu = offer.take(parts)?;
        for (index, vcpu) in (0..).zip(&mut vcpus) {
            let used = cpu.has_shadow_stacks() && vcpu.may_use_shadow_stack();
            vcpu.shadow_stack = take_shadow_stack(parts, index, used)?;
        }
        Ok(Self { vcpus, vm, cpu })
    }
}

/// Takes the shadow stack pointer of vCPU `cpu` out of `parts`.
///
/// Versions that did not know this section showed shadow stacks to guests and did not save the
/// pointer. State of such a version is accepted if the guest did not use the pointer.
fn take_shadow_stack(parts: &mut Sections<'_>, cpu: u32, used: bool) -> Result<Option<u64>> {
    let kind = ShadowStackState::KIND;
    match parts.take_optional::<ShadowStackState>(kind, cpu)? {
        None if used => Err(StateError::Missing { name: kind.name, instance: cpu }),
        saved => Ok(saved.map(|saved| saved.pointer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuChoice, VcpuSaver};
    use kvm_bindings::KVM_CAP_SPLIT_IRQCHIP;
    use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
    use vmferry_testkit::{Need, skip};

    fn machine(kvm: &Kvm, chips: KvmChips) -> (VmFd, VcpuFd, VcpuSaver, CpuModel) {
        let vm = kvm.create_vm().unwrap();
        if chips.irqchip {
            vm.create_irq_chip().unwrap();
        } else {
            let mut split = kvm_bindings::kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
            split.args[0] = 24;
            vm.enable_cap(&split).unwrap();
        }
        if chips.pit {
            vm.create_pit2(kvm_bindings::kvm_pit_config::default()).unwrap();
        }
        assert_eq!(KvmChips::of(&vm).unwrap(), chips);
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpu = CpuModel::new(kvm, CpuChoice::Host, 1, true).unwrap();
        cpu.set_up(0, &vcpu).unwrap();
        let saver = VcpuSaver::probe(kvm, &vm, &vcpu).unwrap();
        (vm, vcpu, saver, cpu)
    }

    const ALL: KvmChips = KvmChips { irqchip: true, pit: true };

    fn state_survives(kvm: &Kvm, chips: KvmChips) {
        let (vm, vcpu, saver, cpu) = machine(kvm, chips);
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rbx) = (0x1234, 0x5678);
        vcpu.set_regs(&regs).unwrap();
        if chips.irqchip {
            vm.set_irq_line(3, true).unwrap();
        }
        let vcpus = vec![saver.save(0, &vcpu).unwrap()];
        let state = GuestState { vcpus, vm: VmState::save(&vm, chips).unwrap(), cpu };
        let sections = state.sections().unwrap();

        let (vm, vcpu, mut saver, offer) = machine(kvm, chips);
        let mut parts = Sections::new(&sections).unwrap();
        let taken = GuestState::take(&mut parts, 1, chips, &offer).unwrap();
        parts.finish().unwrap();
        assert_eq!((&taken.vcpus, &taken.vm), (&state.vcpus, &state.vm));
        saver.load(0, &vcpu, &taken.vcpus[0], Some(&taken.cpu.of_vcpu(0).unwrap())).unwrap();
        taken.vm.load(&vm).unwrap();
        let again = saver.save(0, &vcpu).unwrap();
        assert_eq!((again.regs.rip, again.regs.rbx), (0x1234, 0x5678));
        assert_eq!((again.msrs, again.sregs), (state.vcpus[0].msrs.clone(), state.vcpus[0].sregs.clone()));
        let again = VmState::save(&vm, chips).unwrap();
        assert_eq!((again.irqchip, again.pit.is_some()), (state.vm.irqchip, chips.pit));
    }

    #[test]
    fn state_survives_its_sections_and_loads_into_another_vm() {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return skip(Need::Kvm, error),
        };
        state_survives(&kvm, ALL);
        state_survives(&kvm, KvmChips { irqchip: true, pit: false });
        if !kvm.check_extension(Cap::SplitIrqchip) {
            return skip(
                Need::Kvm,
                "KVM_CAP_SPLIT_IRQCHIP is missing; VMs with KVM's interrupt controllers were tested",
            );
        }
        state_survives(&kvm, KvmChips { irqchip: false, pit: false });
    }

    #[test]
    fn state_for_other_chips_is_refused_before_any_change() {
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => return skip(Need::Kvm, error),
        };
        let without = KvmChips { irqchip: true, pit: false };
        let refused = |from: KvmChips, to: KvmChips| {
            let (vm, vcpu, saver, cpu) = machine(&kvm, from);
            let vcpus = vec![saver.save(0, &vcpu).unwrap()];
            let state = GuestState { vcpus, vm: VmState::save(&vm, from).unwrap(), cpu: cpu.clone() };
            let sections = state.sections().unwrap();
            let mut parts = Sections::new(&sections).unwrap();
            let taken = GuestState::take(&mut parts, 1, to, &cpu).and_then(|_| parts.finish());
            taken.unwrap_err().to_string()
        };
        assert_eq!(refused(without, ALL), "the saved state lacks section pit 0");
        assert_eq!(refused(ALL, without), "the saved state has section pit 0, which this VM does not have");
    }

    #[test]
    fn missing_shadow_stack_pointer_is_an_error_if_it_may_be_in_use() {
        let sections = [ShadowStackState { pointer: 0x7000 }.section(1).unwrap()];
        let take = |cpu, used| {
            let mut parts = Sections::new(&sections).unwrap();
            let taken = take_shadow_stack(&mut parts, cpu, used);
            (taken, parts.finish().is_ok())
        };
        assert!(matches!(take(1, true), (Ok(Some(0x7000)), true)));
        assert!(matches!(take(1, false), (Ok(Some(0x7000)), true)));
        assert!(matches!(take(0, false), (Ok(None), false)));
        let (missing, _) = take(0, true);
        assert_eq!(missing.unwrap_err().to_string(), "the saved state lacks section shadow-stack 0");
    }
}
