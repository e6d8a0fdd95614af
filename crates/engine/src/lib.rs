//! The live-migration engine.

mod vm;

pub use vm::{
    DirtyTracker, GuestMemory, MachineConfig, Protect, Section, SourceVm, TargetVm, TrackerKind, VmError,
};
