//! State of the devices that the vCPUs share.

use super::mirror::saved;
use super::sections::{Saved, SectionKind};
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_ioapic_state, kvm_pic_state, kvm_pit_channel_state, kvm_pit_state2,
};

saved! {
    /// CPUID result for one leaf and index.
    CpuidEntry = kvm_cpuid_entry2 { function: u32, index: u32, flags: u32, eax: u32, ebx: u32, ecx: u32, edx: u32 }
}

saved! {
    /// CPUID of the guest, without the position of each vCPU.
    CpuidState {
        /// Entries of the table, in KVM's order.
        entries: Vec<CpuidEntry>,
    }
}

impl Saved for CpuidState {
    const KIND: SectionKind = SectionKind { name: "cpuid", version: 1 };
}

saved! {
    /// Paravirtual clock of the guest.
    ClockState {
        /// Nanoseconds since the guest started.
        clock_ns: u64,
        /// Time at which `clock_ns` was read: nanoseconds since 1970 by the host's clock.
        realtime_ns: u64,
    }
}

impl Saved for ClockState {
    const KIND: SectionKind = SectionKind { name: "kvm-clock", version: 1 };
}

saved! {
    /// 8259 interrupt controller. Instance 0 is the master, instance 1 the slave.
    PicState = kvm_pic_state {
        last_irr: u8, irr: u8, imr: u8, isr: u8, priority_add: u8, irq_base: u8, read_reg_select: u8, poll: u8,
        special_mask: u8, init_state: u8, auto_eoi: u8, rotate_on_auto_eoi: u8, special_fully_nested_mode: u8,
        init4: u8, elcr: u8, elcr_mask: u8,
    }
}

impl Saved for PicState {
    const KIND: SectionKind = SectionKind { name: "pic", version: 1 };
}

saved! {
    /// I/O APIC.
    IoapicState {
        /// Guest-physical address of the registers.
        base_address: u64,
        /// Register that the guest has selected.
        ioregsel: u32,
        /// APIC id.
        id: u32,
        /// Inputs with a request.
        irr: u32,
        /// Redirection table.
        redirection: [u64; 24],
    }
}

impl Saved for IoapicState {
    const KIND: SectionKind = SectionKind { name: "ioapic", version: 1 };
}

impl IoapicState {
    pub(crate) fn from_kvm(kvm: &kvm_ioapic_state) -> Self {
        Self {
            base_address: kvm.base_address,
            ioregsel: kvm.ioregsel,
            id: kvm.id,
            irr: kvm.irr,
            // SAFETY: both views of the union are plain 64 bits.
            redirection: std::array::from_fn(|i| unsafe { kvm.redirtbl[i].bits }),
        }
    }

    pub(crate) fn to_kvm(&self) -> kvm_ioapic_state {
        let mut kvm = kvm_ioapic_state {
            base_address: self.base_address,
            ioregsel: self.ioregsel,
            id: self.id,
            irr: self.irr,
            ..Default::default()
        };
        for (entry, bits) in kvm.redirtbl.iter_mut().zip(self.redirection) {
            entry.bits = bits;
        }
        kvm
    }
}

saved! {
    /// One of the three counters of the timer.
    PitChannel = kvm_pit_channel_state {
        count: u32, latched_count: u16, count_latched: u8, status_latched: u8, status: u8, read_state: u8,
        write_state: u8, write_latch: u8, rw_mode: u8, mode: u8, bcd: u8, gate: u8,
        /// Time at which the count was loaded, in the host's boot time. KVM sets the field when the
        /// state is loaded.
        count_load_time: i64,
    }
}

saved! {
    /// 8254 timer.
    PitState = kvm_pit_state2 { channels: [PitChannel; 3], flags: u32 }
}

impl Saved for PitState {
    const KIND: SectionKind = SectionKind { name: "pit", version: 1 };
}
