//! The state that the vCPUs of a VM share: interrupt controllers, timer, clock.

use crate::state::mirror::Field;
use crate::state::{ClockState, IoapicState, PicState, PitState, Saved, Sections, StateError};
use crate::vcpu::now_ns;
use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_irqchip,
};
use kvm_ioctls::{Cap, VmFd};
use vmferry_core::Section;

type Result<T> = std::result::Result<T, StateError>;

fn kvm<S: Saved>(instance: u32, action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::kvm::<S>(instance, action, error)
}

/// State that the vCPUs share: KVM's interrupt controllers, its timer, and the guest's paravirtual clock.
///
/// The VM has the interrupt controllers of `KVM_CREATE_IRQCHIP` and the timer of `KVM_CREATE_PIT2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmState {
    /// 8259 interrupt controllers: master, slave.
    pub pics: [PicState; 2],
    /// I/O APIC.
    pub ioapic: IoapicState,
    /// 8254 timer.
    pub pit: PitState,
    /// Paravirtual clock.
    pub clock: ClockState,
}

impl VmState {
    /// Reads the state of `vm`, whose vCPUs are paused.
    ///
    /// # Errors
    /// [`StateError::Kvm`] if KVM does not give a part of it.
    pub fn save(vm: &VmFd) -> Result<Self> {
        let pit = vm.get_pit2().map_err(kvm::<PitState>(0, "KVM_GET_PIT2"))?;
        Ok(Self {
            pics: [save_pic(vm, 0)?, save_pic(vm, 1)?],
            ioapic: IoapicState::read(vm)?,
            pit: Field::get(&pit),
            clock: save_clock(vm)?,
        })
    }

    /// Loads the state into `vm`. Load the vCPUs and the devices first: an interrupt that is pending goes to a
    /// local APIC.
    ///
    /// The clock continues as if the guest had never been paused.
    ///
    /// # Errors
    /// [`StateError::Kvm`] if KVM refuses a part of it.
    pub fn load(&self, vm: &VmFd) -> Result<()> {
        for (instance, pic) in (0..).zip(&self.pics) {
            load_pic(vm, instance, pic)?;
        }
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        chip.chip.ioapic = self.ioapic.to_kvm();
        vm.set_irqchip(&chip).map_err(kvm::<IoapicState>(0, "KVM_SET_IRQCHIP"))?;
        vm.set_pit2(&self.pit.put()).map_err(kvm::<PitState>(0, "KVM_SET_PIT2"))?;
        load_clock(vm, &self.clock)
    }

    /// Adds the sections of this state to `sections`.
    pub(crate) fn put(&self, sections: &mut Vec<Section>) -> Result<()> {
        for (instance, pic) in (0..).zip(&self.pics) {
            sections.push(pic.section(instance)?);
        }
        sections.extend([self.ioapic.section(0)?, self.pit.section(0)?, self.clock.section(0)?]);
        Ok(())
    }

    /// Takes the sections that [`put`](Self::put) adds.
    pub(crate) fn take(parts: &mut Sections<'_>) -> Result<Self> {
        let pics = [parts.take_saved(0)?, parts.take_saved(1)?];
        let (ioapic, pit, clock) = (parts.take_saved(0)?, parts.take_saved(0)?, parts.take_saved(0)?);
        Ok(Self { pics, ioapic, pit, clock })
    }
}

impl IoapicState {
    /// Reads the I/O APIC of `vm`.
    ///
    /// # Errors
    /// [`StateError::Kvm`] if KVM does not give it.
    pub fn read(vm: &VmFd) -> Result<Self> {
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        vm.get_irqchip(&mut chip).map_err(kvm::<Self>(0, "KVM_GET_IRQCHIP"))?;
        // SAFETY: for this chip id KVM fills this member of the union; it is plain numbers.
        Ok(Self::from_kvm(unsafe { &chip.chip.ioapic }))
    }
}

fn pic_id(instance: u32) -> u32 {
    if instance == 0 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE }
}

fn save_pic(vm: &VmFd, instance: u32) -> Result<PicState> {
    let mut chip = kvm_irqchip { chip_id: pic_id(instance), ..Default::default() };
    vm.get_irqchip(&mut chip).map_err(kvm::<PicState>(instance, "KVM_GET_IRQCHIP"))?;
    // SAFETY: for this chip id KVM fills this member of the union; it is plain bytes.
    Ok(Field::get(unsafe { &chip.chip.pic }))
}

fn load_pic(vm: &VmFd, instance: u32, saved: &PicState) -> Result<()> {
    let mut chip = kvm_irqchip { chip_id: pic_id(instance), ..Default::default() };
    chip.chip.pic = saved.put();
    vm.set_irqchip(&chip).map_err(kvm::<PicState>(instance, "KVM_SET_IRQCHIP"))
}

fn save_clock(vm: &VmFd) -> Result<ClockState> {
    let realtime_ns = now_ns();
    let clock = vm.get_clock().map_err(kvm::<ClockState>(0, "KVM_GET_CLOCK"))?;
    // KVM reads both at one moment where it can.
    let paired = clock.flags & KVM_CLOCK_REALTIME != 0;
    Ok(ClockState { clock_ns: clock.clock, realtime_ns: if paired { clock.realtime } else { realtime_ns } })
}

/// Sets the clock to what it would show had the guest never stood still, as for the time stamp counters.
fn load_clock(vm: &VmFd, saved: &ClockState) -> Result<()> {
    let flags = u32::try_from(vm.check_extension_int(Cap::AdjustClock)).unwrap_or(0);
    let clock = if flags & KVM_CLOCK_REALTIME != 0 {
        let (clock, realtime) = (saved.clock_ns, saved.realtime_ns);
        kvm_clock_data { clock, realtime, flags: KVM_CLOCK_REALTIME, ..Default::default() }
    } else {
        let passed = now_ns().saturating_sub(saved.realtime_ns);
        kvm_clock_data { clock: saved.clock_ns.saturating_add(passed), ..Default::default() }
    };
    vm.set_clock(&clock).map_err(kvm::<ClockState>(0, "KVM_SET_CLOCK"))
}
