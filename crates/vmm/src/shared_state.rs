//! The state that the vCPUs share, out of KVM and into it: interrupt controllers, timer, clock.

use crate::kvm::Machine;
use crate::state::mirror::Field;
use crate::state::{ClockSaved, IoapicSaved, PicSaved, PitSaved, Saved, StateError};
use crate::vcpu::now_ns;
use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_irqchip,
};
use kvm_ioctls::Cap;

type Result<T> = std::result::Result<T, StateError>;

fn kvm<S: Saved>(instance: u32, action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::kvm::<S>(instance, action, error)
}

/// Interrupt controllers, timer and clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedSaved {
    pub(crate) pics: [PicSaved; 2],
    pub(crate) ioapic: IoapicSaved,
    pub(crate) pit: PitSaved,
    pub(crate) clock: ClockSaved,
}

impl SharedSaved {
    /// Reads it; the vCPUs are paused.
    pub(crate) fn save(machine: &Machine) -> Result<Self> {
        let pit = machine.fd().get_pit2().map_err(kvm::<PitSaved>(0, "KVM_GET_PIT2"))?;
        Ok(Self {
            pics: [save_pic(machine, 0)?, save_pic(machine, 1)?],
            ioapic: save_ioapic(machine)?,
            pit: Field::get(&pit),
            clock: save_clock(machine)?,
        })
    }

    /// Loads it; local APICs and devices have been loaded, as interrupts on their way go to them.
    pub(crate) fn load(&self, machine: &Machine) -> Result<()> {
        for (instance, pic) in (0..).zip(&self.pics) {
            load_pic(machine, instance, pic)?;
        }
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        chip.chip.ioapic = self.ioapic.to_kvm();
        machine.fd().set_irqchip(&chip).map_err(kvm::<IoapicSaved>(0, "KVM_SET_IRQCHIP"))?;
        machine.fd().set_pit2(&self.pit.put()).map_err(kvm::<PitSaved>(0, "KVM_SET_PIT2"))?;
        load_clock(machine, &self.clock)
    }
}

fn pic_id(instance: u32) -> u32 {
    if instance == 0 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE }
}

fn save_pic(machine: &Machine, instance: u32) -> Result<PicSaved> {
    let mut chip = kvm_irqchip { chip_id: pic_id(instance), ..Default::default() };
    machine.fd().get_irqchip(&mut chip).map_err(kvm::<PicSaved>(instance, "KVM_GET_IRQCHIP"))?;
    // SAFETY: for this chip id KVM fills this member of the union; it is plain bytes.
    Ok(Field::get(unsafe { &chip.chip.pic }))
}

fn load_pic(machine: &Machine, instance: u32, saved: &PicSaved) -> Result<()> {
    let mut chip = kvm_irqchip { chip_id: pic_id(instance), ..Default::default() };
    chip.chip.pic = saved.put();
    machine.fd().set_irqchip(&chip).map_err(kvm::<PicSaved>(instance, "KVM_SET_IRQCHIP"))
}

/// The I/O APIC.
pub(crate) fn save_ioapic(machine: &Machine) -> Result<IoapicSaved> {
    let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
    machine.fd().get_irqchip(&mut chip).map_err(kvm::<IoapicSaved>(0, "KVM_GET_IRQCHIP"))?;
    // SAFETY: for this chip id KVM fills this member of the union; it is plain numbers.
    Ok(IoapicSaved::from_kvm(unsafe { &chip.chip.ioapic }))
}

fn save_clock(machine: &Machine) -> Result<ClockSaved> {
    let realtime_ns = now_ns();
    let clock = machine.fd().get_clock().map_err(kvm::<ClockSaved>(0, "KVM_GET_CLOCK"))?;
    // KVM reads both at one moment where it can.
    let paired = clock.flags & KVM_CLOCK_REALTIME != 0;
    Ok(ClockSaved { clock_ns: clock.clock, realtime_ns: if paired { clock.realtime } else { realtime_ns } })
}

/// Sets the clock to what it would show had the guest never stood still, as for the time stamp counters.
fn load_clock(machine: &Machine, saved: &ClockSaved) -> Result<()> {
    let flags = u32::try_from(machine.fd().check_extension_int(Cap::AdjustClock)).unwrap_or(0);
    let clock = if flags & KVM_CLOCK_REALTIME != 0 {
        let (clock, realtime) = (saved.clock_ns, saved.realtime_ns);
        kvm_clock_data { clock, realtime, flags: KVM_CLOCK_REALTIME, ..Default::default() }
    } else {
        let passed = now_ns().saturating_sub(saved.realtime_ns);
        kvm_clock_data { clock: saved.clock_ns.saturating_add(passed), ..Default::default() }
    };
    machine.fd().set_clock(&clock).map_err(kvm::<ClockSaved>(0, "KVM_SET_CLOCK"))
}
