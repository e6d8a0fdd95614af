//! Types of saved state, which consist of plain numbers.
//!
//! Every part has its own type, which is never a structure of KVM. Therefore KVM's structures can
//! change without a change of the wire format. A type that is saved as a section has a
//! [`SectionKind`]. [`Sections`] takes the sections out of a list, and detects sections that are
//! missing, unknown, duplicate, of another version, or damaged.

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
