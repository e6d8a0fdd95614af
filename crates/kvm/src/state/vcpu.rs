//! The state of a vCPU.

use super::mirror::saved;
use super::sections::{Saved, SectionKind};
use kvm_bindings::{
    kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events,
    kvm_vcpu_events__bindgen_ty_1, kvm_vcpu_events__bindgen_ty_2, kvm_vcpu_events__bindgen_ty_3,
    kvm_vcpu_events__bindgen_ty_4, kvm_vcpu_events__bindgen_ty_5, kvm_xcr,
};

saved! {
    /// Everything that a vCPU has: registers, local APIC, pending events, time stamp counter.
    ///
    /// [`VcpuSaver`](crate::VcpuSaver) reads it and loads it.
    VcpuState {
        /// `KVM_MP_STATE_*`: running, halted, waiting to be started.
        mp_state: u32,
        /// General registers.
        regs: Regs,
        /// Special registers.
        sregs: Sregs,
        /// Floating point and vector registers.
        xsave: XsaveState,
        /// Extended control registers.
        xcrs: Vec<Xcr>,
        /// Model-specific registers but those that stand alone below.
        msrs: Vec<Msr>,
        /// The local APIC's registers: its architectural page, 1 KiB of it.
        lapic: Vec<u8>,
        /// Exceptions and interrupts under way.
        events: Events,
        /// Debug registers.
        debug: DebugRegs,
        /// The time stamp counter at `realtime_ns`.
        tsc: u64,
        /// When `tsc` was read: nanoseconds since 1970 by the host's clock.
        realtime_ns: u64,
        /// The time stamp counter's frequency.
        tsc_khz: u32,
        /// The deadline of the local APIC's timer, 0 for none.
        tsc_deadline: u64,
        /// The shadow stack pointer, if the guest is shown shadow stacks. It is in a section of its
        /// own: [`ShadowStackState`].
        #[serde(skip)]
        shadow_stack: Option<u64>,
    }
}

#[cfg(feature = "hostile")]
impl VcpuState {
    /// Makes of each part what KVM is given.
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

/// CR4.CET: shadow stacks, or tracking of indirect branches, may be on.
const CR4_CET: u64 = 1 << 23;

impl VcpuState {
    /// Returns whether this vCPU may be using its shadow stack pointer, if it has one.
    pub(crate) fn may_use_shadow_stack(&self) -> bool {
        self.sregs.cr4 & CR4_CET != 0
    }
}

saved! {
    /// The shadow stack pointer of a vCPU. The section is there for guests that are shown shadow
    /// stacks.
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
    /// A segment register.
    Segment = kvm_segment {
        base: u64, limit: u32, selector: u16, type_: u8, present: u8, dpl: u8, db: u8, s: u8, l: u8, g: u8, avl: u8,
        unusable: u8,
    }
}

saved! {
    /// A descriptor table register.
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
    /// The XSAVE area, in the standard format of the Intel SDM (volume 1, 13.4).
    XsaveState {
        /// Bytes of the area: at least 4096, whole 32-bit words.
        area: Vec<u8>,
    }
}

saved! {
    /// An extended control register.
    Xcr = kvm_xcr { xcr: u32, value: u64 }
}

saved! {
    /// A model-specific register.
    Msr {
        /// Number of the register, as `RDMSR` takes it.
        index: u32,
        /// Content.
        value: u64,
    }
}

saved! {
    /// Debug registers.
    DebugRegs = kvm_debugregs { db: [u64; 4], dr6: u64, dr7: u64, flags: u64 }
}

saved! {
    /// An exception.
    Exception = kvm_vcpu_events__bindgen_ty_1 { injected: u8, nr: u8, has_error_code: u8, pending: u8, error_code: u32 }
}

saved! {
    /// An interrupt.
    Interrupt = kvm_vcpu_events__bindgen_ty_2 { injected: u8, nr: u8, soft: u8, shadow: u8 }
}

saved! {
    /// A non-maskable interrupt.
    Nmi = kvm_vcpu_events__bindgen_ty_3 { injected: u8, pending: u8, masked: u8 }
}

saved! {
    /// System management mode.
    Smi = kvm_vcpu_events__bindgen_ty_4 { smm: u8, pending: u8, smm_inside_nmi: u8, latched_init: u8 }
}

saved! {
    /// A triple fault.
    TripleFault = kvm_vcpu_events__bindgen_ty_5 { pending: u8 }
}

saved! {
    /// What is under way: `KVM_GET_VCPU_EVENTS`. `flags` say which of the others count.
    Events = kvm_vcpu_events {
        exception: Exception, interrupt: Interrupt, nmi: Nmi, sipi_vector: u32, flags: u32, smi: Smi,
        triple_fault: TripleFault, exception_has_payload: u8, exception_payload: u64,
    }
}
