//! Saved state: what goes into a migration, apart from memory.
//!
//! Every part is a type of its own ([`vcpu`], [`machine`]), never a struct of KVM's or of a device model, so that those can
//! change without changing what is on the wire. [`Saved`] gives each a name and a version; [`Sections`] takes a list of
//! sections apart and finds out what is missing, unknown, twice, of another version, or damaged.

mod machine;
pub(crate) mod mirror;
mod sections;
mod vcpu;

pub(crate) use machine::{ClockSaved, CpuidSaved, IoapicSaved, PicSaved, PitSaved, SerialSaved};
pub use sections::StateError;
pub(crate) use sections::{Saved, Sections};
pub(crate) use vcpu::{Msr, ShadowStackSaved, VcpuSaved, XsaveSaved};
