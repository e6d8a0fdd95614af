//! State of a vCPU.

use super::mirror::saved;
use super::sections::{Saved, SectionKind};
use kvm_bindings::{
    kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events,
    kvm_vcpu_events__bindgen_ty_1, kvm_vcpu_events__bindgen_ty_2, kvm_vcpu_events__bindgen_ty_3,
    kvm_vcpu_events__bindgen_ty_4, kvm_vcpu_events__bindgen_ty_5, kvm_xcr,
};

saved! {
    /// All state of a vCPU: registers, local APIC, pending events, time stamp counter.
    ///
    /// [`VcpuSaver`](crate::VcpuSaver) saves and loads the state.
    VcpuState {
        /// State of the vCPU, `KVM_MP_STATE_*`: running, halted, or waiting for its start.
        mp_state: u32,
        /// General registers.
        regs: Regs,
        /// Special registers.
        sregs: Sregs,
        /// Floating point and vector registers.
        xsave: XsaveState,
        /// Extended control registers.
        xcrs: Vec<Xcr>,
        /// Model-specific registers, except those with their own fields below.
        msrs: Vec<Msr>,
        /// Registers of the local APIC: the first 1 KiB of its architectural page.
        lapic: Vec<u8>,
        /// Pending exceptions and interrupts.
        events: Events,
        /// Debug registers.
        debug: DebugRegs,
        /// Value of the time stamp counter at `realtime_ns`.
        tsc: u64,
        /// Time at which `tsc` was read: nanoseconds since 1970 by the host's clock.
        realtime_ns: u64,
        /// Frequency of the time stamp counter, in kHz.
        tsc_khz: u32,
        /// Deadline of the local APIC's timer as a value of the time stamp counter, or 0 for none.
        tsc_deadline: u64,
        /// Shadow stack pointer, if the guest is shown shadow stacks. It has its own section:
        /// [`ShadowStackState`].
        #[serde(skip)]
        shadow_stack: Option<u64>,
    }
}

#[cfg(feature = "hostile")]
impl VcpuState {
    /// Converts each part to the structure that KVM receives.
    pub(crate) fn to_kvm(&self) {
        use super::mirror::Field;
        let _: (kvm_regs, kvm_sregs) = (self.regs.put(), self.sregs.put());
        let _: (kvm_debugregs, kvm_vcpu_events) = (self.debug.put(), self.events.put());
        self.xcrs.iter().for_each(|xcr| {
            let _: kvm_xcr = xcr.put();
        });
    }
}

impl Saved for VcpuState {
    const KIND: SectionKind = SectionKind { name: "vcpu", version: 1 };
}

/// Bit CR4.CET: shadow stacks, or tracking of indirect branches, may be on.
const CR4_CET: u64 = 1 << 23;

impl VcpuState {
    /// Returns whether this vCPU may be using its shadow stack pointer, if it has one.
    pub(crate) fn may_use_shadow_stack(&self) -> bool {
        self.sregs.cr4 & CR4_CET != 0
    }
}

saved! {
    /// Shadow stack pointer of a vCPU. Only guests that are shown shadow stacks have this section.
    ShadowStackState {
        /// Value of the pointer: a guest-virtual address.
        pointer: u64,
    }
}

impl Saved for ShadowStackState {
    const KIND: SectionKind = SectionKind { name: "shadow-stack", version: 1 };
}

saved! {
    /// General registers.
    Regs = kvm_regs {
        rax: u64, rbx: u64, rcx: u64, rdx: u64, rsi: u64, rdi: u64, rsp: u64, rbp: u64,
        r8: u64, r9: u64, r10: u64, r11: u64, r12: u64, r13: u64, r14: u64, r15: u64,
        rip: u64, rflags: u64,
    }
}

saved! {
    /// Segment register.
    Segment = kvm_segment {
        base: u64, limit: u32, selector: u16, type_: u8, present: u8, dpl: u8, db: u8, s: u8, l: u8, g: u8, avl: u8,
        unusable: u8,
    }
}

saved! {
    /// Descriptor table register.
    Table = kvm_dtable { base: u64, limit: u16 }
}

saved! {
    /// Special registers.
    Sregs = kvm_sregs {
        cs: Segment, ds: Segment, es: Segment, fs: Segment, gs: Segment, ss: Segment, tr: Segment, ldt: Segment,
        gdt: Table, idt: Table,
        cr0: u64, cr2: u64, cr3: u64, cr4: u64, cr8: u64, efer: u64, apic_base: u64,
        interrupt_bitmap: [u64; 4],
    }
}

saved! {
    /// XSAVE area, in the standard format of the Intel SDM (volume 1, 13.4).
    XsaveState {
        /// Bytes of the area: at least 4096 bytes, and a whole number of 32-bit words.
        area: Vec<u8>,
    }
}

saved! {
    /// Extended control register.
    Xcr = kvm_xcr { xcr: u32, value: u64 }
}

saved! {
    /// Model-specific register.
    Msr {
        /// Number of the register, as in `RDMSR`.
        index: u32,
        /// Value of the register.
        value: u64,
    }
}

saved! {
    /// Debug registers.
    DebugRegs = kvm_debugregs { db: [u64; 4], dr6: u64, dr7: u64, flags: u64 }
}

saved! {
    /// Pending exception.
    Exception = kvm_vcpu_events__bindgen_ty_1 { injected: u8, nr: u8, has_error_code: u8, pending: u8, error_code: u32 }
}

saved! {
    /// Pending interrupt.
    Interrupt = kvm_vcpu_events__bindgen_ty_2 { injected: u8, nr: u8, soft: u8, shadow: u8 }
}

saved! {
    /// Pending non-maskable interrupt.
    Nmi = kvm_vcpu_events__bindgen_ty_3 { injected: u8, pending: u8, masked: u8 }
}

saved! {
    /// State of system management mode.
    Smi = kvm_vcpu_events__bindgen_ty_4 { smm: u8, pending: u8, smm_inside_nmi: u8, latched_init: u8 }
}

saved! {
    /// Pending triple fault.
    TripleFault = kvm_vcpu_events__bindgen_ty_5 { pending: u8 }
}

saved! {
    /// Pending events, as in `KVM_GET_VCPU_EVENTS`. `flags` says which other fields are valid.
    Events = kvm_vcpu_events {
        exception: Exception, interrupt: Interrupt, nmi: Nmi, sipi_vector: u32, flags: u32, smi: Smi,
        triple_fault: TripleFault, exception_has_payload: u8, exception_payload: u64,
    }
}
