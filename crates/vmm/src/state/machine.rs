//! The state of what the vCPUs share.

use super::mirror::saved;
use super::sections::Saved;
use kvm_bindings::{
    kvm_cpuid_entry2, kvm_ioapic_state, kvm_pic_state, kvm_pit_channel_state, kvm_pit_state2,
};
use vm_superio::serial::SerialState;

saved! {
    /// What CPUID says for one leaf and index.
    CpuidEntry = kvm_cpuid_entry2 { function: u32, index: u32, flags: u32, eax: u32, ebx: u32, ecx: u32, edx: u32 }
}

saved! {
    /// What CPUID tells the guest, apart from what each vCPU is told of its place.
    CpuidSaved { entries: Vec<CpuidEntry> }
}

impl Saved for CpuidSaved {
    const NAME: &'static str = "cpuid";
    const VERSION: u32 = 1;
}

saved! {
    /// The guest's paravirtual clock.
    ClockSaved {
        /// Nanoseconds since the guest started.
        clock_ns: u64,
        /// When that was read: nanoseconds since 1970 by the host's clock.
        realtime_ns: u64,
    }
}

impl Saved for ClockSaved {
    const NAME: &'static str = "kvm-clock";
    const VERSION: u32 = 1;
}

saved! {
    /// An 8259 interrupt controller; instance 0 is the master, 1 the slave.
    PicSaved = kvm_pic_state {
        last_irr: u8, irr: u8, imr: u8, isr: u8, priority_add: u8, irq_base: u8, read_reg_select: u8, poll: u8,
        special_mask: u8, init_state: u8, auto_eoi: u8, rotate_on_auto_eoi: u8, special_fully_nested_mode: u8,
        init4: u8, elcr: u8, elcr_mask: u8,
    }
}

impl Saved for PicSaved {
    const NAME: &'static str = "pic";
    const VERSION: u32 = 1;
}

saved! {
    /// The I/O APIC.
    IoapicSaved {
        base_address: u64,
        ioregsel: u32,
        id: u32,
        irr: u32,
        /// The redirection table.
        redirection: [u64; 24],
    }
}

impl Saved for IoapicSaved {
    const NAME: &'static str = "ioapic";
    const VERSION: u32 = 1;
}

impl IoapicSaved {
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
    /// One of the timer's three counters.
    PitChannel = kvm_pit_channel_state {
        count: u32, latched_count: u16, count_latched: u8, status_latched: u8, status: u8, read_state: u8,
        write_state: u8, write_latch: u8, rw_mode: u8, mode: u8, bcd: u8, gate: u8,
        /// When the count was loaded, in the host's boot time; KVM sets it anew when the state is loaded.
        count_load_time: i64,
    }
}

saved! {
    /// The 8254 timer.
    PitSaved = kvm_pit_state2 { channels: [PitChannel; 3], flags: u32 }
}

impl Saved for PitSaved {
    const NAME: &'static str = "pit";
    const VERSION: u32 = 1;
}

saved! {
    /// The 16550 serial port.
    SerialSaved {
        baud_divisor_low: u8,
        baud_divisor_high: u8,
        interrupt_enable: u8,
        interrupt_identification: u8,
        line_control: u8,
        line_status: u8,
        modem_control: u8,
        modem_status: u8,
        scratch: u8,
        /// Input that the guest has not read.
        input: Vec<u8>,
    }
}

impl Saved for SerialSaved {
    const NAME: &'static str = "serial";
    const VERSION: u32 = 1;
}

impl From<&SerialState> for SerialSaved {
    fn from(state: &SerialState) -> Self {
        Self {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer.clone(),
        }
    }
}

impl From<&SerialSaved> for SerialState {
    fn from(saved: &SerialSaved) -> Self {
        Self {
            baud_divisor_low: saved.baud_divisor_low,
            baud_divisor_high: saved.baud_divisor_high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.input.clone(),
        }
    }
}
