//! State that the vCPUs of a VM share: interrupt controllers, timer, clock.

use crate::Error;
use crate::state::mirror::Field;
use crate::state::{ClockState, IoapicState, PicState, PitState, Saved, Sections, StateError};
use crate::vcpu::now_ns;
use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_irqchip,
};
use kvm_ioctls::{Cap, VmFd};
use std::fmt;
use vmferry_core::Section;

type Result<T, E = StateError> = std::result::Result<T, E>;

fn kvm<S: Saved>(instance: u32, action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::kvm::<S>(instance, action, error)
}

/// Devices of a VM that KVM emulates. The VMM chooses these devices when it creates the VM, and the
/// choice must be the same on source and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvmChips {
    /// True if the VM has the 8259 interrupt controllers and the I/O APIC that `KVM_CREATE_IRQCHIP`
    /// creates. False for a VM with `KVM_CAP_SPLIT_IRQCHIP`, whose VMM emulates the I/O APIC and
    /// saves its state in a section of the VMM.
    pub irqchip: bool,
    /// True if the VM has the 8254 timer that `KVM_CREATE_PIT2` creates.
    pub pit: bool,
}

impl KvmChips {
    /// Determines the devices of `vm`.
    ///
    /// # Errors
    /// Returns [`Error::Ioctl`](crate::Error::Ioctl) if KVM cannot be queried.
    pub fn of(vm: &VmFd) -> Result<Self, Error> {
        let exists = |what, result: Result<(), kvm_ioctls::Error>| match result {
            Ok(()) => Ok(true),
            // KVM's result for a device that the VM does not have (virt/kvm/api.rst, 4.26 and
            // 4.71).
            Err(error) if error.errno() == libc::ENXIO => Ok(false),
            Err(error) => Err(Error::ioctl(what, error)),
        };
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        Ok(Self {
            irqchip: exists("KVM_GET_IRQCHIP", vm.get_irqchip(&mut chip))?,
            pit: exists("KVM_GET_PIT2", vm.get_pit2().map(|_| ()))?,
        })
    }
}

/// Writes the names of the devices, for
/// [`MachineConfig::extra`](vmferry_core::MachineConfig::extra).
impl fmt::Display for KvmChips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.irqchip { "irqchip" } else { "split irqchip" })?;
        f.write_str(if self.pit { ", pit" } else { "" })
    }
}

/// State of KVM's interrupt controllers, which `KVM_CREATE_IRQCHIP` creates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IrqchipState {
    /// 8259 interrupt controllers: master and slave.
    pub pics: [PicState; 2],
    /// I/O APIC.
    pub ioapic: IoapicState,
}

impl IrqchipState {
    fn save(vm: &VmFd) -> Result<Self> {
        Ok(Self { pics: [save_pic(vm, 0)?, save_pic(vm, 1)?], ioapic: IoapicState::read(vm)? })
    }

    fn load(&self, vm: &VmFd) -> Result<()> {
        for (instance, pic) in (0..).zip(&self.pics) {
            load_pic(vm, instance, pic)?;
        }
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        chip.chip.ioapic = self.ioapic.to_kvm();
        vm.set_irqchip(&chip).map_err(kvm::<IoapicState>(0, "KVM_SET_IRQCHIP"))
    }
}

/// State that the vCPUs share: KVM's interrupt controllers, its timer, and the guest's paravirtual
/// clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmState {
    /// Interrupt controllers, or `None` for a VM [without them](KvmChips::irqchip).
    pub irqchip: Option<IrqchipState>,
    /// 8254 timer, or `None` for a VM without it.
    pub pit: Option<PitState>,
    /// Paravirtual clock.
    pub clock: ClockState,
}

impl VmState {
    /// Reads the state of `vm`, which has these `chips`. The vCPUs must be paused.
    ///
    /// # Errors
    /// Returns [`StateError::Kvm`] if KVM does not return a part of the state.
    pub fn save(vm: &VmFd, chips: KvmChips) -> Result<Self> {
        let pit = || vm.get_pit2().map_err(kvm::<PitState>(0, "KVM_GET_PIT2"));
        Ok(Self {
            irqchip: chips.irqchip.then(|| IrqchipState::save(vm)).transpose()?,
            pit: chips.pit.then(pit).transpose()?.map(|pit| Field::get(&pit)),
            clock: save_clock(vm)?,
        })
    }

    /// Loads the state into `vm`. Load the vCPUs and the devices first, because loading a pending
    /// interrupt delivers it to a local APIC.
    ///
    /// The clock continues as if the guest had never been paused.
    ///
    /// # Errors
    /// Returns [`StateError::Kvm`] if KVM refuses a part of the state.
    pub fn load(&self, vm: &VmFd) -> Result<()> {
        if let Some(irqchip) = &self.irqchip {
            irqchip.load(vm)?;
        }
        if let Some(pit) = &self.pit {
            vm.set_pit2(&pit.put()).map_err(kvm::<PitState>(0, "KVM_SET_PIT2"))?;
        }
        load_clock(vm, &self.clock)
    }

    /// Adds the sections of this state to `sections`.
    pub(crate) fn add_to(&self, sections: &mut Vec<Section>) -> Result<()> {
        if let Some(irqchip) = &self.irqchip {
            for (instance, pic) in (0..).zip(&irqchip.pics) {
                sections.push(pic.section(instance)?);
            }
            sections.push(irqchip.ioapic.section(0)?);
        }
        if let Some(pit) = &self.pit {
            sections.push(pit.section(0)?);
        }
        sections.push(self.clock.section(0)?);
        Ok(())
    }

    /// Takes the sections that [`add_to`](Self::add_to) adds for a VM with these `chips`. A section
    /// of a chip that the VM does not have stays in `parts`.
    pub(crate) fn take(parts: &mut Sections<'_>, chips: KvmChips) -> Result<Self> {
        let mut irqchip = || {
            Ok(IrqchipState {
                pics: [parts.take_saved(0)?, parts.take_saved(1)?],
                ioapic: parts.take_saved(0)?,
            })
        };
        let irqchip = chips.irqchip.then(&mut irqchip).transpose()?;
        let pit = chips.pit.then(|| parts.take_saved(0)).transpose()?;
        Ok(Self { irqchip, pit, clock: parts.take_saved(0)? })
    }
}

impl IoapicState {
    /// Reads the I/O APIC of `vm`.
    ///
    /// # Errors
    /// Returns [`StateError::Kvm`] if KVM does not return the state of the I/O APIC.
    pub fn read(vm: &VmFd) -> Result<Self> {
        let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
        vm.get_irqchip(&mut chip).map_err(kvm::<Self>(0, "KVM_GET_IRQCHIP"))?;
        // SAFETY: for this chip id KVM fills this member of the union, which consists of plain
        // numbers.
        Ok(Self::from_kvm(unsafe { &chip.chip.ioapic }))
    }
}

fn pic_id(instance: u32) -> u32 {
    if instance == 0 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE }
}

fn save_pic(vm: &VmFd, instance: u32) -> Result<PicState> {
    let mut chip = kvm_irqchip { chip_id: pic_id(instance), ..Default::default() };
    vm.get_irqchip(&mut chip).map_err(kvm::<PicState>(instance, "KVM_GET_IRQCHIP"))?;
    // SAFETY: for this chip id KVM fills this member of the union, which consists of plain bytes.
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
    // If this flag is set, KVM has read both clocks at the same moment.
    let paired = clock.flags & KVM_CLOCK_REALTIME != 0;
    Ok(ClockState { clock_ns: clock.clock, realtime_ns: if paired { clock.realtime } else { realtime_ns } })
}

/// Sets the clock to the value that it would have if the guest had never been stopped, as for the
/// time stamp counters.
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
