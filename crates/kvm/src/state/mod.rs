//! Saved state, as plain numbers.
//!
//! Every part is a type of its own, never a structure of KVM, so that KVM's structures can change without a change
//! of what is on the wire. A type that is saved as a section has a [`SectionKind`]; [`Sections`] takes a list of
//! sections apart, and finds what is missing, unknown, twice, of another version, or damaged.

mod chips;
pub(crate) mod mirror;
mod sections;
mod vcpu;

pub use chips::{ClockState, CpuidEntry, CpuidState, IoapicState, PicState, PitChannel, PitState};
pub(crate) use sections::Saved;
pub use sections::{SectionKind, Sections, StateError};
pub use vcpu::{
    DebugRegs, Events, Exception, Interrupt, Msr, Nmi, Regs, Segment, ShadowStackState, Smi, Sregs, Table,
    TripleFault, VcpuState, Xcr, XsaveState,
};
